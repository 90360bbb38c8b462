"""Reports drawn: what a page says and does not say, and that nothing in a file gets out of its text."""

import argparse
import json
import re
import warnings
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import BenchError, command_line
from benchmarks.report_cli import read_old, run, show
from tests.unit.benchmarks.reports import kernels_report, offline_report, serve_report, sweep_report

HOSTILE = "</title><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\"'$x$\\frac{ {{7*7}} 日本"
PNG = b"\x89PNG"


class Page(HTMLParser):
    """The text of a page, its headings, tags and attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.tags, self.attributes, self.headings = "", set(), [], []
        self._is_heading = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        self._is_heading = tag in ("h1", "h2")

    def handle_endtag(self, tag: str) -> None:
        self._is_heading = False

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._is_heading:
            self.headings.append(data)


def draw(folder: Path, *reports: Any, labels: tuple[str, ...] = ("old", "new", "newer")) -> Page:
    """Save reports, run `quire bench report` and read its page; the picture is drawn too."""
    pytest.importorskip("matplotlib")
    paths = []
    for label, report in zip(labels, reports, strict=False):
        paths.append(str(folder / f"{label}.json"))
        Path(paths[-1]).write_text(json.dumps(report))
    html, png = folder / "page.html", folder / "picture.png"
    assert run(argparse.Namespace(files=paths, html=str(html), plot=str(png))) == 0
    assert png.read_bytes().startswith(PNG)
    return Page(html.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_sweep_shows_throughput_histograms_and_facts(tmp_path: Path) -> None:
    facts = {"host": {"cpu": "A Processor", "cpu_count": 2}, "server": {"version": "1.2.3", "gpus": "H100"}}
    page = draw(tmp_path, sweep_report(1, 8, 64) | facts | {"command": "quire bench serve --concurrency 1,8,64"})
    assert page.headings == [
        "Load on m (H100): 16 in, 8 out, 2026-11-22",
        "Figures, latencies in ms",
        "Throughput and latency over the number of requests at once",
        "Latencies",
        "What was measured, and where",
    ]
    for text in ("A Processor", "1.2.3", "H100", "quire bench serve --concurrency 1,8,64", "64 at once", "2,560"):
        assert text in page.text


@pytest.mark.slow
def test_two_runs_are_compared_in_words_and_bars(tmp_path: Path) -> None:
    page = draw(tmp_path, serve_report(), serve_report(slowness=2.0, load=serve_report(concurrency=4)["load"]))
    assert "Change from old to new" in page.headings
    assert "From old to new" in page.headings
    assert "load.concurrency: 8 → 4" in page.text
    assert "+100.0% worse" in page.text
    assert ("class", "worse") in page.attributes


@pytest.mark.full
def test_sweeps_are_compared_load_by_load(tmp_path: Path) -> None:
    page = draw(tmp_path, sweep_report(1, 8), sweep_report(8, 64, slowness=0.5), serve_report())
    assert "Latencies, 8 at once" in page.headings
    assert "In one of the files alone, so without a histogram: 1 at once, 64 at once." in page.text.replace(
        "64 at once, 1 at once", "1 at once, 64 at once"
    )
    assert {"Change from old to new", "Change from old to newer"} <= set(page.headings)
    assert "c8 TTFT p50, ms" in page.text
    assert "c64 TTFT p50, ms" not in page.text


@pytest.mark.parametrize("make", [offline_report, kernels_report])
@pytest.mark.full
def test_other_kinds_are_drawn_alone_and_compared(make: Any, tmp_path: Path) -> None:
    assert "What was measured, and where" in draw(tmp_path, make()).headings
    assert "Change from old to new" in draw(tmp_path, make(), make()).headings


@pytest.mark.full
def test_a_file_without_histograms_says_so(tmp_path: Path) -> None:
    old = serve_report()
    del old["histograms"]
    page = draw(tmp_path, old, serve_report())
    assert "Not in the latency histograms, because the file holds none: old c8." in page.text
    assert "Latencies" in page.headings
    with pytest.raises(
        BenchError, match="nothing to draw: Not in the latency histograms, because the file holds none: old c8"
    ):
        draw(tmp_path, old)
    page = Page((tmp_path / "page.html").read_text())
    assert "old c8" in page.text
    assert "Latencies" not in page.headings


@pytest.mark.full
def test_a_load_of_which_nothing_was_completed_is_a_report_too(tmp_path: Path) -> None:
    empty = dict.fromkeys([name for name in serve_report() if name.endswith("_ms")])
    failed = serve_report(num_completed=0, num_failed=9, histograms={}, warnings=["9 × HTTP 500: boom"], **empty)
    page = draw(tmp_path, sweep_report(1) | {"sweep": [failed, serve_report(concurrency=16)]})
    assert "8 at once: 9 × HTTP 500: boom" in page.text


@pytest.mark.full
def test_what_comes_from_outside_stays_text(tmp_path: Path) -> None:
    load = serve_report()["load"] | {"model": HOSTILE}
    one = serve_report(load=load, warnings=[HOSTILE], server={HOSTILE: HOSTILE}, command=HOSTILE, date=HOSTILE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page = draw(tmp_path, one, one, labels=("<b>&$a$", "$\\frac{<script>"))
    assert page.text.count(HOSTILE) > 5
    assert "&$a$" in page.text
    assert page.tags.isdisjoint({"script", "img", "b", "link", "iframe", "object", "image", "foreignobject"})
    assert not [name for name, _ in page.attributes if name.startswith("on")]


@pytest.mark.slow
def test_a_page_needs_nothing_else(tmp_path: Path) -> None:
    page = draw(tmp_path, sweep_report(1, 8), sweep_report(1, 8))
    for name, value in page.attributes:
        if not name.startswith("xmlns"):
            assert "//" not in (value or ""), name
        if name in ("href", "xlink:href", "src"):
            assert value.startswith("#")
    html = (tmp_path / "page.html").read_text()
    assert "@import" not in html
    assert "default-src 'none'" in html
    assert "prefers-color-scheme: dark" in html


def test_a_picture_may_be_svg(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "a.json").write_text(json.dumps(serve_report()))
    run(argparse.Namespace(files=[str(tmp_path / "a.json")], html=None, plot=str(tmp_path / "a.svg")))
    assert ET.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")


@pytest.mark.full
def test_more_than_fits_is_said(tmp_path: Path) -> None:
    page = draw(tmp_path, sweep_report(*range(1, 11)))
    assert "Without a histogram of their own, for want of room:" in page.text


def test_kernels_without_a_single_time_are_a_table(tmp_path: Path) -> None:
    report = kernels_report()
    with pytest.raises(BenchError, match="there is nothing to draw"):
        draw(tmp_path, report | {"results": [cell | {"us": None} for cell in report["results"]]})
    assert "prefill 1 × 128" in Page((tmp_path / "page.html").read_text()).text


@pytest.mark.full
def test_decode_of_many_batches_is_thinned_out(tmp_path: Path) -> None:
    report = kernels_report()
    page = draw(
        tmp_path, report | {"results": [cell | {"num_rows": i} for i, cell in enumerate(report["results"] * 6)]}
    )
    assert re.search(r"Decode is drawn for (\d+, ){3,5}\d+ rows; the table has all", page.text)


def test_a_missing_matplotlib_is_said_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import serve

    monkeypatch.setattr("benchmarks.report.find_spec", lambda name: None)
    for flag in ("html", "plot"):
        arguments = argparse.Namespace(**{"json": None, "html": None, "plot": None} | {flag: f"x.{flag}"})
        with pytest.raises(BenchError, match=f"--{flag} needs matplotlib: pip install matplotlib") as caught:
            serve.run(arguments)
        assert caught.value.exit_code == 2


def test_nothing_to_draw_is_wrong_usage() -> None:
    with pytest.raises(BenchError, match="--html FILE, --png FILE or both"):
        run(argparse.Namespace(files=["x.json"], html=None, plot=None))


def test_an_old_report_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps(offline_report()))
    with pytest.raises(BenchError, match="is not a report of quire bench serve"):
        read_old(str(path), "serve")


def test_a_new_report_is_shown_beside_the_old_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "old.json"
    path.write_text(json.dumps(sweep_report(8, 16)))
    arguments = argparse.Namespace(html=str(tmp_path / "page.html"), plot=None)
    show(serve_report(slowness=2.0), read_old(str(path), "serve"), arguments)
    assert "c8 median_ttft_ms" in capsys.readouterr().out
    assert "Change from before to now" in Page((tmp_path / "page.html").read_text()).headings


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["bench", "serve", "--api-key", "sk-1"], "quire bench serve --api-key HIDDEN"),
        (["bench", "serve", "--api-key=sk-1"], "quire bench serve --api-key=HIDDEN"),
        (["bench", "serve", "--url", "https://me:sk-1@host/v1"], "quire bench serve --url https://HIDDEN@host/v1"),
        (["bench", "serve", "--url=me:sk-1@host/v1"], "quire bench serve --url=HIDDEN@host/v1"),
        (["bench", "report", "a b.json"], "quire bench report 'a b.json'"),
        (["bench", "report", "/home/me/a.json", "in/b.json"], "quire bench report a.json in/b.json"),
        (["bench", "serve", "--json=/tmp/a.json", "--model", "/m/"], "quire bench serve --json=a.json --model m/"),
    ],
)
def test_a_command_line_is_kept_without_its_secrets_and_its_folders(arguments: list[str], line: str) -> None:
    assert command_line(arguments) == line
