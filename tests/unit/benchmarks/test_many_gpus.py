"""benchmarks.many_gpus: its scripts, the GPUs that they get, their ends, and the table."""

import time

import pytest

from benchmarks import many_gpus
from benchmarks.gpu_scripts import GpuScripts, Outcome, Script
from benchmarks.many_gpus_table import format_summary

SCRIPT = """
import os, sys, time
print("GPUs", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run scripts on four GPUs; → outcomes by name."""
    (tmp_path / "some_script.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(scripts, seconds=30.0):
        found: dict[str, Outcome] = {}
        GpuScripts(
            list("0123"), folder=tmp_path, end_s=time.monotonic() + seconds,
            on_end=lambda outcome: found.update({outcome.script.name: outcome}),
        ).run(scripts)  # fmt: skip
        return found

    return run


def script(name, num_gpus, seconds=0.0, code=0, timeout_s=20.0, share=1.0):
    command = ("some_script", str(seconds), str(code))
    return Script("sums", name, command, num_gpus, timeout_s, share)


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
    found = run([script("long", 4, timeout_s=100.0), script("short", 4, timeout_s=1.0)])
    assert {name: outcome.status for name, outcome in found.items()} == {"long": "left out", "short": "done"}


@pytest.mark.parametrize("num_gpus", [2, 4, 8])
@pytest.mark.parametrize("sizes", [many_gpus.GPU, many_gpus.CPU], ids=["cuda", "cpu"])
def test_scripts_have_names_of_their_own_and_fit(sizes, num_gpus):
    scripts = list(many_gpus.scripts(sizes, num_gpus))
    assert len({each.name for each in scripts}) == len(scripts)
    assert {each.part for each in scripts} <= set(many_gpus.PARTS)
    assert max(each.num_gpus for each in scripts) == num_gpus
    assert scripts[0].part == "tests"


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
    scripts["replicas-2"] = {"part": "replicas", "gpus": [], "status": "left out", "seconds": 0.0}
    text = format_summary({"scripts": scripts})
    assert "tests: 1 passed, 1 failed, 0 error, 0 skipped\ntests/a.py::c" in text
    for word in ("2.50", "9,000", "8.0", "60%", "Rank 1 was killed", "left out"):
        assert word in text


def test_scripts_are_chosen_by_part_and_by_name_in_their_own_order():
    scripts = list(many_gpus.scripts(many_gpus.GPU, 4))
    chosen = many_gpus.choose(scripts, ["replicas", "llama-3.1-70b-tp4"])
    assert [each.name for each in chosen] == ["llama-3.1-70b-tp4", "replicas-4"]
    assert many_gpus.choose(scripts, many_gpus.PARTS) == scripts
    with pytest.raises(SystemExit, match=r"--only llama-tp3: choose from .*llama-3\.1-8b-tp2"):
        many_gpus.choose(scripts, ["llama-tp3"])


def test_a_saved_command_names_no_folder_of_the_machine(tmp_path):
    script = Script("sums", "sums-2", ("benchmarks.collectives", "--json", str(tmp_path / "sums-2.json")), 2, 9)
    report = many_gpus.to_report(Outcome(script, "failed"), tmp_path / "sums-2.json")
    assert report["command"] == "python -m benchmarks.collectives --json sums-2.json"
