"""The worker's share of the first token: what the benchmark refuses and reports, and in full runs what it measures."""

import json

import pytest

from benchmarks import first_token
from benchmarks.first_token import CASES, Times


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--requests", "0"], "--requests 0 must be above 0"), (["--case", "speech"], "invalid choice: 'speech'")],
)
def test_wrong_arguments_are_refused_before_a_worker_starts(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        first_token.main(arguments)
    assert message in capsys.readouterr().err


def test_medians_and_tenth_percentiles_of_each_time():
    figures = first_token._summarise([Times(10.0 * i, 20.0 * i, 30.0 * i) for i in range(1, 12)])
    assert figures == {
        "median_in_us": 60, "p10_in_us": 20, "median_out_us": 120, "p10_out_us": 40, "median_cpu_us": 180,
        "p10_cpu_us": 60,
    }  # fmt: skip
    report = {"cases": {"short chat": {"this": figures}}}
    assert first_token._format(report).splitlines()[1].split()[-6:] == ["60", "20", "120", "40", "180", "60"]


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_a_real_worker_is_measured(case, tmp_path, capsys):
    assert first_token.main(["--case", case, "--requests", "3", "--json", str(tmp_path / "out.json")]) == 0
    figures = json.loads((tmp_path / "out.json").read_text())["cases"][case]["this"]
    assert all(value > 0 for value in figures.values())
