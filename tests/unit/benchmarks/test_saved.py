"""Files that --json wrote, or that look like it."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import BenchError
from benchmarks.saved import MAX_SOURCES, read_sources
from tests.unit.benchmarks.reports import kernels_report, offline_report, serve_report, sweep_report


def save(folder: Path, name: str, report: Any) -> str:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(report if isinstance(report, str) else json.dumps(report))
    return str(path)


def test_a_single_load_and_a_sweep_are_both_runs(tmp_path: Path) -> None:
    paths = [save(tmp_path, "one.json", serve_report()), save(tmp_path, "many.json", sweep_report(1, 8))]
    one, many = read_sources(paths)
    assert (one.label, [run.name for run in one.runs]) == ("one", ["c8"])
    assert (many.label, [run.name for run in many.runs]) == ("many", ["c1", "c8"])
    assert many.runs[0].statistic("median_ttft_ms") == 13.0


def test_loads_of_benchmarks_online_are_a_sweep(tmp_path: Path) -> None:
    old = serve_report()
    del old["histograms"]
    (source,) = read_sources([save(tmp_path, "online.json", {"date": "2026-11-21", "online": {"c8": old}})])
    assert (source.kind, source.runs[0].name, source.runs[0].histograms) == ("serve", "c8", None)


def test_files_of_one_name_get_numbers(tmp_path: Path) -> None:
    paths = [save(tmp_path / folder, "run.json", serve_report()) for folder in ("a", "b")]
    assert [source.label for source in read_sources(paths)] == ["run (1)", "run (2)"]


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ("{", "cannot be read: it is not JSON"),
        ('{"benchmark": "serve", "date": NaN}', "cannot be read: it is not JSON"),
        ("[" * 100_000, "cannot be read: it is not JSON"),
        ([], "is not a report of quire bench offline, serve or kernels"),
        ({"benchmark": "other"}, "is not a report of"),
        ({"benchmark": "serve"}, "missing required field `load`"),
        ({"benchmark": "serve", "sweep": []}, "not a whole report of quire bench serve"),
        ({"benchmark": "serve", "sweep": {"c1": 1}}, "not a whole report of quire bench serve"),
        (serve_report(num_completed=-1), "num_completed"),
        (serve_report(histograms={"ttft_ms": {"first": 0, "counts": [1] * 1001}}), "length <= 1000"),
        (serve_report(histograms={"ttft_ms": {"first": 1000, "counts": [1]}}), "`int` <= 999"),
        (serve_report(median_ttft_ms="fast"), "median_ttft_ms"),
        ({"benchmark": "offline"}, "it has no 'workloads'"),
        ({"benchmark": "offline", "workloads": {"x": {}}}, "num_requests"),
        ({"benchmark": "kernels", "results": [{}]}, "part"),
    ],
)
def test_another_file_is_one_sentence(report: Any, words: str, tmp_path: Path) -> None:
    path = save(tmp_path, "x.json", report)
    with pytest.raises(BenchError) as caught:
        read_sources([path])
    assert caught.value.exit_code == 2
    assert str(caught.value).startswith(path)
    assert words in str(caught.value)


def test_kinds_do_not_mix(tmp_path: Path) -> None:
    paths = [save(tmp_path, "a.json", offline_report()), save(tmp_path, "b.json", kernels_report())]
    with pytest.raises(BenchError, match=r"b\.json is of quire bench kernels, and .*a\.json of offline"):
        read_sources(paths)


def test_more_files_than_colours_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=f"the limit is {MAX_SOURCES}"):
        read_sources(["x.json"] * (MAX_SOURCES + 1))
