"""quire doctor --tune: the choice of settings from measurements, the file, and a measurement of a small model."""

import argparse
import itertools
import re
from pathlib import Path

import pytest

from engine.interface.config import EngineConfig
from engine.interface.errors import StartupError
from engine.interface.tune_report import Measured, Rate, TuneAsk, TuneReport
from engine.tune import tune as measure
from server.cli import _parser, serve_parser
from server.commands.doctor import tune as tuning
from server.commands.doctor.tune import choose, to_yaml, tune
from server.config.model_source import DEMO_FOLDER


def measured(dtype: str, answers: list[tuple[int, float]]) -> Measured:
    prompts = [Rate(128, 500.0), Rate(512, 980.0), Rate(2048, 1000.0)]
    return Measured(dtype=dtype, prompts=prompts, answers=[Rate(*rate) for rate in answers])


SLOW = measured("float32", [(1, 10.0), (8, 50.0)])
FAST = measured("bfloat16", [(1, 20.0), (8, 97.0), (32, 100.0)])
REPORT = TuneReport(device="cpu", measured=[SLOW, FAST], max_model_len=4096, kv_cache_tokens=99_999, seconds=61.0)


def test_the_smallest_sizes_with_nearly_the_best_rate_of_the_faster_dtype_are_chosen() -> None:
    chosen = {choice.key: choice.value for choice in choose(REPORT, {})}
    assert chosen == {"dtype": "bfloat16", "max-num-seqs": "8", "max-num-batched-tokens": "512"}
    reasons = {choice.key: choice.reason for choice in choose(REPORT, {})}
    assert "float32: 50; bfloat16: 100" in reasons["dtype"]
    assert "1: 20, 8: 97, 32: 100." in reasons["max-num-seqs"]


def test_what_was_given_is_kept_and_half_of_a_step_is_left_for_prompts() -> None:
    chosen = {choice.key: choice for choice in choose(REPORT, {"max-num-seqs": "900"})}
    assert {key: choice.value for key, choice in chosen.items()} == {
        "dtype": "bfloat16", "max-num-batched-tokens": "1800",
    }  # fmt: skip
    assert chosen["max-num-batched-tokens"].reason.endswith("half of a step is left for prompts.")
    (step,) = (choice.value for choice in choose(REPORT, {"max-num-seqs": "30000"}) if "tokens" in choice.key)
    assert step == "32768"


def test_the_file_is_one_that_serve_takes(tmp_path: Path) -> None:
    path = tmp_path / "quire.yaml"
    path.write_text(to_yaml(REPORT, "./a model", {"kv-cache-memory": "1073741824", "max-model-len": "64"}))
    found = serve_parser({}).parse_args(["--config", str(path)])
    assert (found.model, found.dtype, found.max_num_seqs, found.max_num_batched_tokens) == (
        "./a model", "bfloat16", 8, 512,
    )  # fmt: skip
    assert (found.kv_cache_memory, found.max_model_len) == (2**30, 64)
    assert "before all sizes" in to_yaml(TuneReport(measured=[FAST], is_complete=False), None, {})


def test_a_size_that_was_still_getting_better_when_the_time_was_over_stays_at_its_default() -> None:
    entry = Measured(dtype="bfloat16", answers=[Rate(1, 20.0), Rate(8, 97.0), Rate(32, 50.0)], prompts=[Rate(128, 5.0)])
    text = to_yaml(TuneReport(measured=[entry], is_complete=False), None, {})
    assert "max-num-seqs: 8\n" in text
    assert "128: 5. The time was over before the best was known: the default stays.\n# max-num-batched-tokens:" in text
    entry = Measured(dtype="bfloat16", answers=[Rate(1, 20.0), Rate(8, 97.0)], prompts=[Rate(128, 9.0), Rate(256, 5.0)])
    chosen = {choice.key: choice.value for choice in choose(TuneReport(measured=[entry], is_complete=False), {})}
    assert chosen == {"max-num-seqs": None, "max-num-batched-tokens": None}


def test_no_file_is_overwritten_and_a_problem_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "quire.yaml"
    path.write_text("port: 1")
    with pytest.raises(StartupError, match="exists already"):
        tune(EngineConfig(model="x"), "x", {}, path=path)
    monkeypatch.setattr(tuning, "_measure", lambda ask: TuneReport(problem="No memory."))
    with pytest.raises(StartupError, match="No memory"):
        tune(EngineConfig(model="x"), "x", {}, path=tmp_path / "other.yaml")
    assert [file.name for file in tmp_path.iterdir()] == ["quire.yaml"]


@pytest.mark.slow
def test_a_small_model_is_measured_and_the_clock_ends_it() -> None:
    config = EngineConfig(model=str(DEMO_FOLDER), device="cpu", max_num_seqs=2, max_num_batched_tokens=128)
    report = measure(TuneAsk(config=config, limit_s=600.0))
    assert report.problem is None
    assert [entry.dtype for entry in report.measured] == ["float32", "bfloat16"]
    assert [rate.size for rate in report.measured[0].answers] in ([1, 2], [1])
    assert all(rate.tokens_per_s > 0 for entry in report.measured for rate in (*entry.answers, *entry.prompts))
    ticks = itertools.count()
    short = measure(TuneAsk(config=config, limit_s=1.0), clock=lambda: float(next(ticks)))
    assert not short.is_complete
    assert [len(short.measured), len(short.measured[0].answers)] == [1, 1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpu-memory", "24"], "--tune measures this machine"),
        (["--tensor-parallel-size", "2"], "--tune measures one GPU"),
        (["--json"], "--tune writes YAML"),
    ],
)
def test_what_cannot_be_measured_here_is_refused(flags: list[str], words: str) -> None:
    arguments: argparse.Namespace = _parser().parse_args(["doctor", "--tune", *flags])
    with pytest.raises(StartupError, match=words):
        arguments.run(arguments)


def test_doctor_takes_every_flag_that_messages_about_the_fit_recommend() -> None:
    root = Path(__file__).parents[5]
    files = [*(root / "engine" / "device").glob("*.py"), *(root / "engine" / "startup").glob("*.py")]
    files += [*(root / "models").rglob("*.py"), root / "server/text/embedding_model.py"]
    named = {
        flag
        for file in files
        if file.name not in ("host_memory.py", "kv_disk.py", "kv_peers.py")  # of tiers, which the doctor does not judge
        for line in file.read_text(encoding="utf-8").splitlines()
        if '"' in line
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+[a-z]", line)
    }
    assert {"--max-num-seqs", "--kv-cache-memory", "--quantization"} <= named
    commands = next(action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    known = {name for action in commands.choices["doctor"]._actions for name in action.option_strings}
    # adapters, random weights and tiers behind the pool are not part of the doctor's question
    assert named - known - {"--lora", "--load-format", "--attention-backend", "--kv-host-memory"} == set()
