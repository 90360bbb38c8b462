"""The CPU time of a worker per token: what the benchmark refuses, reports and, in full runs, measures."""

import json

import pytest

from benchmarks import worker_cpu
from benchmarks.worker_cpu import Load


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--streams", "0"], "--streams 0 must be above 0"),
        (["--step-ms", "-1"], "--step-ms -1.0 must be above 0"),
        (["--case", "speech"], "invalid choice: 'speech'"),
        (["--profile", "f", "--against", "."], "cannot be used with --against"),
    ],
)
def test_wrong_arguments_are_refused_before_a_worker_starts(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        worker_cpu.main(arguments)
    assert message in capsys.readouterr().err


def test_the_difference_is_the_median_over_pairs_of_blocks():
    blocks = {"chat": [[20.0, 30.0, 60.0], [40.0, 50.0, 80.0]]}  # 50, 40 and 25 % less
    report = worker_cpu._report(Load(64, 3, 0.02), None, ["this", "against"], blocks)
    chat = report["cases"]["chat"]
    assert (chat["this_us_per_token"], chat["against_us_per_token"], chat["less"]) == (30.0, 50.0, 0.4)
    assert worker_cpu._format(report).splitlines()[1].split() == ["chat", "30.0", "50.0", "40", "%"]


def test_without_another_checkout_there_is_no_difference():
    report = worker_cpu._report(Load(64, 1, 0.02), "folder", ["this"], {"chat": [[20.0]]})
    assert worker_cpu._format(report).splitlines()[1].split() == ["chat", "20.0", "-", "-"]


@pytest.mark.full
@pytest.mark.parametrize("case", worker_cpu._CASES)
def test_each_kind_of_stream_is_measured(case, tmp_path):
    path = tmp_path / "report.json"
    load = ["--streams", "2", "--blocks", "1", "--step-ms", "50"]
    assert worker_cpu.main(["--case", case, *load, "--json", str(path)]) == 0
    assert json.loads(path.read_text())["cases"][case]["this_us_per_token"] > 0
