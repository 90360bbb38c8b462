"""The dashboard and the alerts as they are committed, and what the check of them finds."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from deploy.grafana import check, generate, slo
from deploy.grafana.alerts import ALERTS, rules
from engine.interface.metrics import METRICS

ROOT = Path(__file__).parents[3]


def test_what_is_committed_is_what_would_be_written_and_nothing_is_wrong_with_it() -> None:
    assert list(generate.faults()) == []


def test_a_stale_and_a_missing_file_are_named(tmp_path: Path) -> None:
    for path, text in generate.files().items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "docs/how-to").mkdir(parents=True)
    (tmp_path / "docs/how-to/alerts.md").write_text((ROOT / "docs/how-to/alerts.md").read_text())
    assert list(generate.faults(tmp_path)) == []
    dashboard = tmp_path / "deploy/grafana/dashboards/quire.json"
    dashboard.write_text(dashboard.read_text().replace("Overview", "Review"))
    assert list(generate.faults(tmp_path)) == [
        "deploy/grafana/dashboards/quire.json is stale: run python -m deploy.grafana.generate."
    ]
    dashboard.unlink()
    assert list(generate.faults(tmp_path)) == [
        "deploy/grafana/dashboards/quire.json is missing: run python -m deploy.grafana.generate."
    ]


def _ask(dashboard: check.Json, expr: str) -> None:
    dashboard["panels"][1]["targets"][0]["expr"] = expr


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda d: d["panels"][1].update(title=""), "has no title"),
        (lambda d: d["panels"][1].update(description=""), "has no description"),
        (lambda d: d["panels"][1]["fieldConfig"]["defaults"].update(unit=""), "has no unit"),
        (lambda d: d["panels"][1].update(targets=[]), "has no query"),
        (lambda d: _ask(d, "sum(quire_no_such)"), "asks for quire_no_such, which the server does not export"),
        (lambda d: _ask(d, "up or vllm:no_such > 1"), "asks for vllm:no_such, which"),
        (lambda d: _ask(d, 'quire_ready{route="/v1"}'), "selects quire_ready by route, which is no label of it"),
        (lambda d: _ask(d, "rate(quire_prompt_tokens_total[5m])"), "takes a rate over [5m]: only [$__rate_interval]"),
        (lambda d: _ask(d, 'sum(irate(quire_prompt_tokens_total{job=~"[a]"}[$__range]))'), "takes a irate over"),
    ],
)
def test_each_fault_of_a_panel_is_one_sentence(spoil: Callable[[check.Json], None], said: str) -> None:
    dashboard = json.loads(json.dumps(generate.quire_dashboards()["quire"]))
    spoil(dashboard)
    (fault,) = check.dashboard_faults(dashboard, check.exported())
    assert said in fault
    assert fault.startswith("Panel 2 ")
    assert fault.endswith(".")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda rule: rule["annotations"].pop("summary"), "has no summary"),
        (lambda rule: rule["annotations"].pop("description"), "has no description"),
        (lambda rule: rule["annotations"].pop("runbook"), "has no runbook"),
        (lambda rule: rule["labels"].clear(), "has no severity"),
        (lambda rule: rule.update(expr="quire_reddy == 0"), "asks for quire_reddy"),
        (lambda rule: rule["annotations"].update(runbook="docs/how-to/alerts.md#x"), "there is no such heading"),
    ],
)
def test_each_fault_of_an_alert_is_one_sentence(spoil: Callable[[check.Json], None], said: str) -> None:
    spoiled = yaml.safe_load(yaml.safe_dump(rules()))
    spoil(spoiled["groups"][0]["rules"][0])
    (fault,) = check.rule_faults(spoiled, check.exported(), (ROOT / "docs/how-to/alerts.md").read_text())
    assert said in fault
    assert fault.startswith("Alert QuireDown ")


@pytest.mark.parametrize(
    ("expr", "found"),
    [
        ('sum by (le) (rate(a{x="or b{",y!~"c"}[5m] offset 1m)) / on (job) d', {"a": {"x", "y"}, "d": set()}),
        ("a and ignoring (r) b unless c:d_total > bool 0.5", {"a": set(), "b": set(), "c:d_total": set()}),
        ("time() - max(a) or absent(b)", {"a": set(), "b": set()}),
    ],
)
def test_the_metrics_of_a_query_are_found_whatever_stands_around_them(expr: str, found: dict[str, set[str]]) -> None:
    assert {name: set(labels) for name, labels in check.queried(expr)} == found


def test_every_metric_is_exported_with_its_labels() -> None:
    known = check.exported()
    for metric in METRICS.values():
        name = f"quire_{metric.name}" + ("_bucket" if metric.kind == "histogram" else "")
        assert known[name] >= {"model_name", *metric.labels}


def test_targets_are_bounds_of_buckets_so_that_shares_are_exact() -> None:
    assert slo.TTFT_S in METRICS["time_to_first_token_seconds"].buckets
    assert slo.ITL_S in METRICS["inter_token_latency_seconds"].buckets


DASHBOARDS = generate.quire_dashboards()


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_do_not_overlap_and_stay_on_the_grid(name: str) -> None:
    top = DASHBOARDS[name]["panels"]
    for panels in (top, *(row["panels"] for row in top if row["type"] == "row")):
        taken: dict[tuple[int, int], str] = {}
        for panel in panels:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            for cell in (
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            ):
                assert taken.setdefault(cell, panel["title"]) == panel["title"]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_rows_below_the_first_are_folded_and_hold_their_panels(name: str) -> None:
    made = DASHBOARDS[name]
    rows = [panel for panel in made["panels"] if panel["type"] == "row"]
    assert [row["collapsed"] for row in rows] == [False] + [True] * (len(rows) - 1)
    assert all(row["panels"] for row in rows[1:])
    assert made["panels"][1]["type"] != "row"
    ids = [panel["id"] for panel in check.every_panel(made)]
    assert len(ids) == len(set(ids))


def test_the_page_has_every_row_and_the_number_of_alerts() -> None:
    page = Path("docs/how-to/dashboards.md").read_text(encoding="utf-8")
    rows = [panel["title"] for made in DASHBOARDS.values() for panel in made["panels"] if panel["type"] == "row"]
    assert [title for title in rows if f"| {re.sub(r'[$][a-z]+', '…', title)} | " not in page] == []
    assert f"the {('ten', 'eleven', 'twelve', 'thirteen', 'fourteen')[len(ALERTS) - 10]} alerts of the" in page


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("gpu", ["quire_gpu_memory_total_bytes"]),
        ("handover", ["quire_kv_handover_peers", "quire_kv_handover_blocks_total"]),
    ],
)
def test_a_row_of_what_not_every_server_has_comes_once_for_each_that_has_it(name: str, metrics: list[str]) -> None:
    made = DASHBOARDS["quire-details"]
    (row,) = (panel for panel in made["panels"] if panel.get("repeat") == name)
    (variable,) = (variable for variable in made["templating"]["list"] if variable["name"] == name)
    asked = variable["definition"].removeprefix("query_result(").removesuffix(")").split(" or ")
    assert [part.split("{")[0] for part in asked] == metrics
    assert all(part.endswith("> 0") for part in asked)  # every server exports them, without the thing as 0
    assert (variable["hide"], variable["includeAll"], variable["allValue"]) == (2, True, None)
    assert all(f'"${name}"' in target["expr"] for panel in row["panels"] for target in panel["targets"])


def test_every_metric_of_the_hand_over_has_a_panel() -> None:
    shown = json.dumps(DASHBOARDS["quire-details"])
    assert [name for name in METRICS if name.startswith("kv_handover") and f"quire_{name}{{" not in shown] == []


@pytest.mark.parametrize("name", DASHBOARDS)
def test_restarts_and_releases_are_marked_and_alerts_and_pages_linked(name: str) -> None:
    made = DASHBOARDS[name]
    assert [note["name"] for note in made["annotations"]["list"]] == ["Daemon started", "Engine restarted", "Release"]
    assert [link["title"] for link in made["links"]] == ["Dashboards", "Alerts", "Runbook", "Docs"]
    variables = {variable["name"] for variable in made["templating"]["list"]}
    repeated = {row["repeat"] for row in made["panels"] if "repeat" in row}
    assert repeated <= variables
    for link in made["links"]:
        assert "$" not in link["url"] or "docs" in variables


def test_a_fault_of_an_annotation_is_one_sentence() -> None:
    dashboard = json.loads(json.dumps(DASHBOARDS["quire"]))
    dashboard["annotations"]["list"][0]["expr"] = "quire_no_such > 0"
    (fault,) = check.dashboard_faults(dashboard, check.exported())
    assert fault.startswith("Annotation 'Daemon started' of dashboard 'Quire' asks for quire_no_such")


def test_every_alert_is_tested_to_fire_and_not_to() -> None:
    tests = yaml.safe_load((ROOT / "deploy/prometheus/alerts_test.yml").read_text())["tests"]
    asked = [rule for test in tests for rule in test["alert_rule_test"]]
    for alert in ALERTS:
        own = [rule for rule in asked if rule["alertname"] == f"Quire{alert.name}"]
        assert any(rule["exp_alerts"] for rule in own), alert.name
        assert any(not rule["exp_alerts"] for rule in own), alert.name


def test_grafana_and_prometheus_are_provisioned_for_one_interval() -> None:
    """$__rate_interval is made from what the data source says of it."""
    prometheus = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    (source,) = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    assert [config["job_name"] for config in prometheus["scrape_configs"]] == ["quire"]
