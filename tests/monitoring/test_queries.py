"""Every query of the dashboard, as committed, has an answer from a real Prometheus that watched a server under load."""

import itertools
import json
from pathlib import Path

import httpx
import pytest

from deploy.grafana import check
from deploy.grafana.rows_engines import HANDOVER_QUERY
from tests.monitoring.load import MODEL
from tests.monitoring.prometheus import Prometheus
from tests.support.daemon import ROOT, Daemon, wait_for

_PANELS = [
    panel
    for path in sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
    for panel in check.every_panel(json.loads(path.read_text()))
    if panel["type"] != "row"
]
_NEEDS_GPU = {"GPU memory"}
_NEEDS_ADAPTERS = {panel["title"] for panel in _PANELS if "quire_adapter_" in panel["targets"][0]["expr"]}
_OF_ENGINES = [panel for panel in _PANELS if "$handover" in panel["targets"][0]["expr"]]
_NEEDS_PROMPTS = {"Wait for blocks"}  # handed over: a mean of none is no number
_ENGINES = (
    *("--device", "cpu", "--kv-cache-memory", "32MiB", "--max-model-len", "2048"),
    *("--disaggregate", "1p1d", "--disaggregate-from", "16", "--kv-host-memory", "32MiB"),
)


@pytest.mark.parametrize("panel", _PANELS, ids=[panel["title"] for panel in _PANELS])
def test_a_panel_shows_numbers(prometheus: Prometheus, panel: check.Json) -> None:
    has_gpu = any(max(series.values) > 0 for series in prometheus.ask("quire_gpu_memory_total_bytes"))
    for target in panel["targets"]:
        found = prometheus.ask(target["expr"])
        needs_more = _NEEDS_ADAPTERS | _NEEDS_PROMPTS | (set() if has_gpu else _NEEDS_GPU)
        if panel["title"] in needs_more:
            assert found == []
        else:
            assert found, target["expr"]


def test_the_row_of_engines_is_there_for_a_server_with_engines_alone_and_shows_what_they_did(
    prometheus: Prometheus, tmp_path: Path
) -> None:
    assert prometheus.ask(HANDOVER_QUERY) == []
    with Daemon(*_ENGINES, folder=tmp_path) as daemon:
        daemon.wait_ready()
        with Prometheus(daemon.base_url.removeprefix("http://"), folder=tmp_path) as watching:
            _read_until_handed_over(daemon.base_url, watching)
            assert {series.labels["instance"] for series in watching.ask(HANDOVER_QUERY)} == {"quire:8000"}
            shown = {
                target["expr"]: watching.ask(target["expr"]) for panel in _OF_ENGINES for target in panel["targets"]
            }
            assert [expr for expr, found in shown.items() if not found] == []
            for name in ("blocks", "bytes", "peers", "requests", "wait_seconds"):
                asked = [found for expr, found in shown.items() if f"quire_kv_handover_{name}" in expr]
                assert max(max(series.values) for found in asked for series in found) > 0, name


def _read_until_handed_over(url: str, watching: Prometheus) -> None:
    """Send prompts that are long enough for the prefill engine until Prometheus has a rate of their waits."""
    numbers = itertools.count()
    (waits,) = (panel["targets"][0]["expr"] for panel in _OF_ENGINES if panel["title"] in _NEEDS_PROMPTS)

    def has_waited() -> bool:
        prompt = f"Chapter {next(numbers)}. " + "The quire is folded once and sewn through the fold. " * 8
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
        httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
        return any(max(series.values) > 0 for series in watching.ask(waits))

    wait_for(has_waited, timeout_s=60, what="a rate of prompts that were handed over")


def test_annotations_are_queries_that_prometheus_takes(prometheus: Prometheus) -> None:
    for path in sorted((ROOT / "deploy/grafana/dashboards").glob("*.json")):
        for note in json.loads(path.read_text())["annotations"]["list"]:
            assert isinstance(prometheus.ask(note["expr"]), list)


@pytest.mark.parametrize(
    "expr",
    [
        'quire_requests_rejected_total{reason="invalid"}',
        'quire_requests_rejected_total{reason="overloaded"}',
        'quire_requests_failed_total{reason="deadline_exceeded"}',
        'quire_requests_finished_total{finished_reason="abort"}',
        "quire_http_disconnects_total",
        "quire_prefix_cache_hits_total",
        "quire_prefix_cache_evictions_total",
        "quire_spec_decode_num_accepted_tokens_total",
    ],
)
def test_the_load_was_of_every_kind(prometheus: Prometheus, expr: str) -> None:
    """Or panels could answer 0 and nobody would know if they can show anything else."""
    assert max(series.values[-1] for series in prometheus.ask(expr)) > 0


def test_the_check_knows_the_names_and_labels_that_a_real_page_has(daemon: Daemon, prometheus: Prometheus) -> None:
    known = check.exported()
    served = {name: labels for name, labels in known.items() if not name.startswith("quire_adapter_")}  # it has none
    assert check.names(httpx.get(f"{daemon.base_url}/metrics").text) == served
    assert prometheus.names() >= set(served)
