"""Reports of `quire bench` in a real Chromium: no complaint, no request, light and dark, nothing wider than a phone."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.report_cli import run
from tests.unit.benchmarks.reports import kernels_report, offline_report, sweep_report

HOSTILE = "<img src=x onerror=document.title='owned'>" + "x" * 200


@pytest.mark.parametrize(
    "report", [sweep_report(1, 8, 64), offline_report(), kernels_report()], ids=["serve", "offline", "kernels"]
)
def test_a_report_is_readable_everywhere(report, open_page, tmp_path: Path):
    paths = [str(tmp_path / "before.json"), str(tmp_path / "after.json")]
    for path in paths:
        Path(path).write_text(json.dumps(report | {"command": HOSTILE, "date": HOSTILE}))
    html = tmp_path / "page.html"
    run(argparse.Namespace(files=paths, html=str(html), plot=None))
    backgrounds, inks = set(), set()
    for scheme in ("light", "dark"):
        page = open_page(html.as_uri(), color_scheme=scheme, viewport={"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.title() != "owned"
        assert page.evaluate("performance.getEntriesByType('resource').length") == 0
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        inks.add(page.evaluate("getComputedStyle(document.querySelector('figure svg text')).fill"))
        sizes = page.evaluate("[...document.querySelectorAll('figure svg')].map(e => e.getBoundingClientRect().height)")
        assert sizes
        assert min(sizes) > 100
    assert len(backgrounds) == len(inks) == 2
