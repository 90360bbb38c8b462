"""Step times as a file, and `quire bench plan` from flags to figures."""

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks.report import BenchError
from benchmarks.step_times import StepTimes, interpolate, read_step_times
from server.cli import main
from tests.unit.benchmarks.test_fleet import STEP_S, step_times

ROOT = Path(__file__).parents[3]
LOAD = ("--num-requests", "60", "--input-len", "20-60", "--output-len", "10")


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    path = tmp_path / "steps.json"
    path.write_bytes(msgspec.json.encode(step_times()))
    return path


def plan(steps: Path, *arguments: str) -> tuple[int, dict]:
    """Run the command; return its exit code and its report."""
    out = steps.parent / "plan.json"
    code = main(["bench", "plan", "--steps", str(steps), "--json", str(out), *arguments])
    return code, json.loads(out.read_text()) if out.exists() else {}


def test_between_points_a_line_and_beyond_them_its_slope() -> None:
    points = [(1, 1.0), (3, 2.0), (4, 4.0)]
    assert [interpolate(points, x) for x in (0, 1, 2, 3, 4, 6)] == [1.0, 1.0, 1.5, 2.0, 4.0, 8.0]
    assert interpolate([(5, 2.0)], 100) == 2.0


def test_a_step_is_longer_with_more_rows_prompts_or_context() -> None:
    times = msgspec.structs.replace(step_times(), context=100, context_s_per_token=1e-5)
    base = times.step_s(num_decodes=4, num_context_tokens=400, num_prompt_tokens=0)
    assert base == pytest.approx(times.step_s(num_decodes=4, num_context_tokens=400, num_prompt_tokens=0))
    for more in (
        times.step_s(num_decodes=5, num_context_tokens=500, num_prompt_tokens=0),
        times.step_s(num_decodes=4, num_context_tokens=900, num_prompt_tokens=0),
        times.step_s(num_decodes=4, num_context_tokens=400, num_prompt_tokens=50),
    ):
        assert more > base
    assert times.step_s(num_decodes=1, num_context_tokens=1, num_prompt_tokens=0) >= STEP_S / 2


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/results").glob("steps-*.json")), ids=lambda path: path.stem)
def test_the_measured_files_can_be_read(path: Path) -> None:
    assert read_step_times(str(path)).decode_s


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decode_s": []}, "decode_s must have points"),
        ({"prompt_s": [(8, 0.1), (4, 0.2)]}, "prompt_s must have points of ascending numbers"),
        ({"decode_s": [(1, -1.0)]}, "none negative"),
        ({"decode_s": [(1, 0.0)]}, "begins with 0"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(steps: Path, change: dict, words: str) -> None:
    steps.write_bytes(msgspec.json.encode(msgspec.structs.replace(step_times(), **change)))
    with pytest.raises(BenchError, match=words):
        read_step_times(str(steps))


def test_a_plan_has_the_figures_of_bench_serve(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = plan(steps, "--rate", "20", *LOAD, "--replicas", "2", "--price", "3.6")
    assert code == 0
    assert (report["num_completed"], report["num_output_tokens"], report["num_replicas"]) == (60, 600, 2)
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"):
        assert 0 < report[f"median_{name}"] <= report[f"p99_{name}"]
    assert report["usd_per_million_output_tokens"] == pytest.approx(2e3 / report["output_throughput_tok_per_s"])
    assert "median_ttft_ms" in capsys.readouterr().out


def test_auto_finds_the_fewest_replicas_that_keep_the_limits(steps: Path) -> None:
    flags = ("--rate", "200", *LOAD, "--goodput", "ttft:60")
    code, report = plan(steps, *flags, "--replicas", "auto", "--share", "0.95")
    assert code == 0
    number = report["num_replicas"]
    assert number > 1
    assert report["good_share"] >= 0.95
    assert plan(steps, *flags, "--replicas", str(number - 1))[1]["good_share"] < 0.95


def test_limits_that_no_fleet_keeps_are_exit_code_1(steps: Path) -> None:
    code, report = plan(steps, "--rate", "5", *LOAD, "--goodput", "ttft:1", "--replicas", "auto")
    assert (code, report["good_share"]) == (1, 0.0)


def test_against_takes_the_load_and_shows_both(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serve = steps.parent / "serve.json"
    measured = {"benchmark": "serve", "num_completed": 10, "num_input_tokens": 300, "num_output_tokens": 80}
    measured |= {"load": {"num_requests": 10, "rate_per_s": 0.0, "concurrency": 2, "input_len": 9, "seed": 1}}
    measured["load"] |= {"model": "m", "output_len": 8}
    measured |= {"num_failed": 0, "request_throughput_per_s": 1.0, "output_throughput_tok_per_s": 8.0}
    measured |= {"median_ttft_ms": 50.0}
    serve.write_text(json.dumps(measured))
    code, report = plan(steps, "--against", str(serve))
    assert code == 0
    assert (report["num_input_tokens"], report["num_output_tokens"]) == (300, 80)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("median_ttft_ms")]
    assert line.split()[2] == "50.00"
    assert line.endswith("%")
    serve.write_text(json.dumps({"benchmark": "serve", "sweep": [measured, measured]}))
    assert main(["bench", "plan", "--steps", str(steps), "--against", str(serve)]) == 2
    assert "has 2 loads (c2, c2): it takes a report of one" in capsys.readouterr().err
    del measured["load"]["seed"]
    serve.write_text(json.dumps(measured))
    assert main(["bench", "plan", "--steps", str(steps), "--against", str(serve)]) == 2
    assert "has no 'seed'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--input-len", "9-5"), "'9-5' is not a number of tokens"),
        (("--replicas", "auto"), "--replicas auto needs --rate"),
        (("--rate", "0"), "'0' is not a number of requests per second"),
        (("--overhead-ms", "-1"), "'-1' is not a number of milliseconds"),
        (("--price", "0"), "'0' is not a price"),
        (("--input-len", "9000", "--num-requests", "1"), "would be refused: The prompt has 9000 tokens"),
        (("--steps", "/no/such.json"), "--steps /no/such.json cannot be read"),
        (("--steps", str(ROOT / "pyproject.toml")), "is not a file of quire bench steps"),
    ],
)
def test_wrong_usage_names_what_is_wrong(
    steps: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    try:
        code = main(["bench", "plan", "--steps", str(steps), *arguments])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert words in capsys.readouterr().err


def test_the_scheduler_takes_the_limits_of_the_flags(steps: Path) -> None:
    load = ("--concurrency", "8", "--num-requests", "16", "--input-len", "16", "--output-len", "100")
    free, tight = plan(steps, *load)[1], plan(steps, *load, "--max-num-seqs", "2")[1]
    assert tight["output_throughput_tok_per_s"] < free["output_throughput_tok_per_s"] / 2
    assert plan(steps, *load, "--kv-tokens", "320")[1]["num_preemptions"] > 0
    assert isinstance(read_step_times(str(steps)), StepTimes)
