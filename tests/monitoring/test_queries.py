"""Every query of the dashboard, as committed, has an answer from a real Prometheus that watched a server under load."""

import json

import httpx
import pytest

from deploy.grafana import check
from tests.monitoring.prometheus import Prometheus
from tests.support.daemon import ROOT, Daemon

_PANELS = [
    panel
    for path in sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
    for panel in check.every_panel(json.loads(path.read_text()))
    if panel["type"] != "row"
]
_NEEDS_GPU = {"GPU memory"}
_NEEDS_ADAPTERS = {panel["title"] for panel in _PANELS if "quire_adapter_" in panel["targets"][0]["expr"]}


@pytest.mark.parametrize("panel", _PANELS, ids=[panel["title"] for panel in _PANELS])
def test_a_panel_shows_numbers(prometheus: Prometheus, panel: check.Json) -> None:
    has_gpu = any(max(series.values) > 0 for series in prometheus.ask("quire_gpu_memory_total_bytes"))
    for target in panel["targets"]:
        found = prometheus.ask(target["expr"])
        if panel["title"] in _NEEDS_ADAPTERS or (panel["title"] in _NEEDS_GPU and not has_gpu):
            assert found == []
        else:
            assert found, target["expr"]


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
