"""benchmarks.many_gpus: its scripts, the GPUs that they get, their ends, the plan, and the table."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import many_gpus
from benchmarks.gpu_scripts import GpuScripts, Outcome, Script, plan
from benchmarks.many_gpus_scripts import CPU, GPU, MORE_PARTS, PARTS, scripts
from benchmarks.many_gpus_table import format_plan, format_summary
from tests.support.daemon import ROOT, is_alive, wait_for

SCRIPT = """
import json, os, sys, time
print("GPUs", os.environ["CUDA_VISIBLE_DEVICES"], "early", "early_module" in sys.modules, os.getpid(), flush=True)
if "--json" in sys.argv:
    json.dump({"sums": []}, open(sys.argv[-1], "w"))
open(os.path.join(os.path.dirname(__file__), "slept-" + sys.argv[1]), "w").close()
time.sleep(float(sys.argv[1]))
sys.exit(int(sys.argv[2]))
"""


def in_sleep(seconds: float, folder: Path, act: Callable[[], None]) -> None:
    """Do something, in a thread, once a script of the folder sleeps for so long."""

    def wait_and_act() -> None:
        wait_for((folder / f"slept-{seconds}").exists, timeout_s=60, what="a script's sleep")
        act()

    threading.Thread(target=wait_and_act, daemon=True).start()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run scripts on four GPUs; → outcomes by name."""
    (tmp_path / "some_script.py").write_text(SCRIPT)
    (tmp_path / "early_module.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(scripts, seconds=300.0, stops_in_sleep_of=None):
        found: dict[str, Outcome] = {}
        stop = threading.Event()
        if stops_in_sleep_of is not None:
            in_sleep(stops_in_sleep_of, tmp_path, stop.set)
        GpuScripts(
            list("0123"), folder=tmp_path, end_s=time.monotonic() + seconds, stop=stop,
            on_end=lambda outcome: found.update({outcome.script.name: outcome}),
        ).run(scripts)  # fmt: skip
        return found

    return run


def script(name, num_gpus, seconds=0.0, code=0, timeout_s=120.0, share=1.0, expected_s=0.0, imports=""):
    command = ("some_script", str(seconds), str(code))
    return Script("sums", name, command, num_gpus, timeout_s, share, expected_s, imports)


def test_neighbours_share_the_gpus_and_a_failure_ends_no_other(run):
    found = run([script("a", 2, 1.0, code=3), script("b", 2, 1.0), script("c", 4), script("d", 8)])
    assert {name: outcome.status for name, outcome in found.items()} == {
        "a": "failed", "b": "done", "c": "done", "d": "left out",
    }  # fmt: skip
    assert found["a"].gpus + found["b"].gpus == tuple("0123")
    assert "GPUs 0,1,2,3" in found["c"].output


def test_a_script_whose_time_is_up_is_ended_and_the_next_runs(run):
    found = run([script("long", 4, 60.0, timeout_s=0.5), script("next", 4)])
    assert [outcome.status for outcome in found.values()] == ["timed out", "done"]


def test_a_script_without_half_of_its_time_is_left_out(run):
    found = run([script("long", 4, timeout_s=1000.0), script("short", 4)])
    assert {name: outcome.status for name, outcome in found.items()} == {"long": "left out", "short": "done"}


def test_one_begins_only_with_its_expected_time(run):
    found = run([script("long", 4, timeout_s=400, expected_s=310.0), script("short", 4, timeout_s=800, expected_s=1.0)])
    assert {name: outcome.status for name, outcome in found.items()} == {"long": "left out", "short": "done"}


def test_the_end_of_the_run_is_said_of_every_script_that_is_not_done(run):
    scripts = [script("done", 4), script("runs", 4, 60.0), script("waits", 4, imports="early_module"), script("b", 2)]
    found = run(scripts, stops_in_sleep_of=60.0)
    assert {name: outcome.status for name, outcome in found.items()} == {
        "done": "done", "runs": "ended early", "waits": "left out", "b": "left out",
    }  # fmt: skip
    assert found["runs"].gpus == tuple("0123")
    assert "GPUs 0,1,2,3" in found["runs"].output
    assert not is_alive(int(found["runs"].output.split()[-1]))


def test_what_waits_for_all_gpus_may_import_meanwhile_and_begins_after(run):
    scripts = [script("first", 4, 1.0), script("all", 4, code=5, imports="early_module")]
    scripts += [script("pair", 2, imports="early_module"), script("not-there", 4, imports="no_such_module")]
    found = run(scripts)
    assert {name: outcome.status for name, outcome in found.items()} == {
        "first": "done", "all": "failed", "pair": "done", "not-there": "failed",
    }  # fmt: skip
    assert "early False" in found["first"].output
    assert "GPUs 0,1,2,3 early True" in found["all"].output
    assert "GPUs 0,1 early False" in found["pair"].output
    assert "no_such_module" in found["not-there"].output


def test_a_prepared_script_without_a_word_runs_nothing(tmp_path):
    command = [sys.executable, "-m", "benchmarks.prepared_script", "json", "this"]
    ended = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stdout) == (1, "")


def test_a_plan_packs_neighbours_and_keeps_the_order():
    tests = [script(f"test-{i}", 4, share=0.5, expected_s=10) for i in range(2)]
    pairs = [script("a", 2, expected_s=30), script("b", 2, expected_s=10), script("c", 1, expected_s=5)]
    found = plan([*tests, *pairs, script("d", 1, expected_s=6), script("e", 4, expected_s=7)], "0123", limit_s=100)
    assert [(each.script.name, "".join(each.gpus), each.start_s, each.end_s) for each in found] == [
        ("test-0", "0123", 0, 10),
        ("test-1", "0123", 0, 10),
        ("a", "01", 10, 40),
        ("b", "23", 10, 20),
        ("c", "2", 20, 25),
        ("d", "3", 20, 26),
        ("e", "0123", 40, 47),
    ]


def test_a_plan_leaves_out_what_does_not_fit():
    found = plan([script("a", 4, expected_s=30), script("b", 4, expected_s=30), script("c", 8)], "0123", limit_s=50)
    assert [bool(each.gpus) for each in found] == [True, False, False]
    assert "After 30 of 50 s on 4 GPUs no time is left for b, c." in format_plan(found, num_gpus=4, limit_s=50)


def default_plan(num_gpus):
    chosen = many_gpus.choose(list(scripts(GPU, num_gpus, router="vllm-router")), PARTS)
    return plan(chosen, [str(gpu) for gpu in range(num_gpus)], limit_s=many_gpus._MAX_S)


def test_the_whole_fits_into_eight_minutes_on_four_gpus_with_time_to_spare():
    found = default_plan(4)
    assert max(each.end_s for each in found) <= 0.96 * many_gpus._MAX_S
    assert many_gpus._MAX_S < 480
    words = f"Four GPUs take {max(each.end_s for each in found):.0f} of the {many_gpus._MAX_S:.0f} s"
    assert words in (ROOT / "docs/how-to/measure.md").read_text()
    assert all(each.gpus for each in found)
    assert all(each.script.expected_s > 0 for each in found)
    assert [each.script.name for each in found if each.script.num_gpus == 4 and each.script.part != "tests"] == [
        "sums-4", "llama-3.1-8b-tp4", "llama-3.1-70b-tp4", "qwen3-30b-a3b-tp4-whole", "qwen3-30b-a3b-tp4",
        "served-tp4", "replicas-4",
    ]  # fmt: skip


@pytest.mark.parametrize("num_gpus", [2, 4, 8])
def test_a_measured_gpu_has_one_script(num_gpus):
    found = [each for each in default_plan(num_gpus) if each.gpus]
    for gpu in map(str, range(num_gpus)):
        on_it = [each for each in found if gpu in each.gpus]
        measured = [each for each in on_it if each.script.part != "tests"]
        for each in measured:
            beside = [other for other in on_it if other.start_s < each.end_s and each.start_s < other.end_s]
            assert beside == [each]


@pytest.mark.parametrize("num_gpus", [2, 4, 8])
@pytest.mark.parametrize("sizes", [GPU, CPU], ids=["cuda", "cpu"])
def test_scripts_have_names_of_their_own_and_fit(sizes, num_gpus):
    found = list(scripts(sizes, num_gpus, router="nginx"))
    assert len({each.name for each in found}) == len(found)
    assert {each.part for each in found} <= {*PARTS, *MORE_PARTS}
    assert max(each.num_gpus for each in found) == num_gpus
    assert found[0].part == "tests"
    assert all(each.timeout_s > each.needed_s > 0 for each in found)


@pytest.mark.slow
def test_every_test_of_several_gpus_is_in_one_script():
    modules = ("tensor_parallel", "expert_parallel", "one_shot_all_reduce", "disaggregation")
    files = [f"tests/gpu/test_{name}_cuda.py" for name in modules]
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-m", "gpu", "--collect-only", "-q", "-n", "0"]
    listed = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    tests = [line for line in listed.stdout.splitlines() if "::" in line]
    chosen = [each.command for each in scripts(GPU, 8, router="none") if each.command[0] == "pytest"]
    for test in tests:
        file, _, name = test.partition("::")
        runs = [
            command
            for command in chosen
            if command[-1] == file and all(word in name for word in re.split(" and ", command[command.index("-k") + 1]))
        ]
        assert len(runs) == 1, (test, runs)


@pytest.fixture
def _handlers() -> Iterator[None]:
    """Keep the handlers of signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers")
def test_sigterm_keeps_what_was_measured_and_names_the_rest(run, tmp_path, capsys):
    in_sleep(60.0, tmp_path, lambda: os.kill(os.getpid(), signal.SIGTERM))
    folder = tmp_path / "out"
    args = argparse.Namespace(folder=folder, max_seconds=300.0, device="cpu")
    chosen = [script("sums-1", 4), script("sums-2", 4, 60.0, expected_s=1), script("sums-3", 4)]
    assert many_gpus._run(args, chosen, list("0123")) == 1
    report = json.loads(next(folder.glob("many-gpus-4xcpu-*.json")).read_text())
    assert {name: each["status"] for name, each in report["scripts"].items()} == {
        "sums-1": "done", "sums-2": "ended early", "sums-3": "left out",
    }  # fmt: skip
    assert report["scripts"]["sums-2"]["result"] == {"sums": []}  # as far as it came
    assert report["seconds"] > 0
    assert "not to the end: sums-2 (ended early), sums-3 (left out)" in capsys.readouterr().out


def test_the_file_names_every_script_from_the_beginning(tmp_path, monkeypatch):
    def end(self, scripts) -> None:
        raise SystemExit(9)

    monkeypatch.setattr(GpuScripts, "run", end)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    args = argparse.Namespace(folder=tmp_path, max_seconds=60.0, device="cpu")
    with pytest.raises(SystemExit):
        many_gpus._run(args, [script("sums-1", 4)], list("0123"))
    report = json.loads(next(tmp_path.glob("many-gpus-4xcpu-*.json")).read_text())
    assert report["scripts"]["sums-1"]["status"] == "not begun"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--plan", "--device", "cpu"), "seconds of GPUs alone"),
        (("--device", "cpu"), "needs a FOLDER"),
        (("--table",), "needs the JSON file"),
        (("out", "--device", "cpu", "--router", "no-such-file"), "there is no such router"),
    ],
)
def test_a_run_that_cannot_begin_says_why(monkeypatch, tmp_path, flags, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["many_gpus", *flags])
    with pytest.raises(SystemExit, match=words):
        many_gpus.main()
    assert not list(tmp_path.iterdir())


def test_the_plan_is_printed_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["many_gpus", "--plan"])
    assert many_gpus.main() == 0
    out = capsys.readouterr().out
    assert re.search(r"qwen3-30b-a3b-tp4-whole +mixtures +0,1,2,3 +41", out)
    assert re.search(r"All end after \d+ of 475 s on 4 GPUs\.", out)


def test_the_table_has_every_kind_of_figure():
    run = {"num_requests": 1, "num_output_tokens": 512, "ms_per_step": 2.5, "output_tok_per_s": 400.0}
    load = {"load": {"concurrency": 64}, "output_throughput_tok_per_s": 9000.0, "median_tpot_ms": 6.5, "num_failed": 0}
    loss = {"noticed_s": 0.1, "ready_s": 20.0, "num_failed": 64, "num_completed": 0, "errors": {}}
    one_sum = {"rows": 1, "hidden_size": 64, "nccl_norm_us": 8.0, "nccl_us": 7.0}
    experts = {"shape": "tiny", "ranks": 2, "tokens": 8, "busiest": 0.6, "whole_us": 5.0, "parts_us": None}
    results = {
        "tests-a": ("tests", {"tests/a.py::b": "PASSED", "tests/a.py::c": "FAILED"}),
        "8b-tp2": ("offline", {"workloads": {"single": run}, "load_s": 10.0, "peak_vram_gib": 70.0}),
        "sums-2": ("sums", {"sums": [one_sum]}),
        "moe-ranks": ("mixtures", {"results": [experts]}),
        "served-tp2": ("served", {"before": load, "after": load, "loss": loss, "named": "Rank 1 was killed"}),
    }
    scripts = {
        name: {"part": part, "gpus": ["0", "1"], "status": "done", "seconds": 1.0, "result": result}
        for name, (part, result) in results.items()
    }
    router = {"name": "vllm-router", "version": "0.1.17", "policy": "round_robin", "requests_by_server": [7, 8]}
    behind = {"router": router, "one": load, "all": load, "all routed": load | {"output_throughput_tok_per_s": 8765.0}}
    scripts["replicas-2"] = scripts["served-tp2"] | {"part": "replicas", "result": behind, "expected_s": 53.0}
    scripts["replicas-4"] = {"part": "replicas", "gpus": [], "status": "left out", "seconds": 0.0}
    text = format_summary({"scripts": scripts})
    assert "tests: 1 passed, 1 failed, 0 error, 0 skipped\ntests/a.py::c" in text
    assert "not measured, or not to the end: replicas-4 (left out)" in text
    assert "routed by vllm-router 0.1.17, round_robin; requests by server: 7, 8" in text
    for word in ("2.50", "9,000", "8,765", "8.0", "60%", "Rank 1 was killed", "left out", "53"):
        assert word in text


def test_scripts_are_chosen_by_part_and_by_name_in_their_own_order():
    found = list(scripts(GPU, 4, router="none"))
    chosen = many_gpus.choose(found, ["replicas", "llama-3.1-70b-tp4"])
    assert [each.name for each in chosen] == ["llama-3.1-70b-tp4", "replicas-4"]
    assert many_gpus.choose(found, [*PARTS, *MORE_PARTS]) == found
    with pytest.raises(SystemExit, match=r"--only llama-tp3: choose from .*llama-3\.1-8b-tp2"):
        many_gpus.choose(found, ["llama-tp3"])


def test_a_saved_command_names_no_folder_of_the_machine(tmp_path):
    script = Script("sums", "sums-2", ("benchmarks.collectives", "--json", str(tmp_path / "sums-2.json")), 2, 9)
    report = many_gpus.to_report(Outcome(script, "failed"), tmp_path / "sums-2.json")
    assert report["command"] == "python -m benchmarks.collectives --json sums-2.json"
