"""What Prometheus' own tool says of the rules, and what the rules say of a server under a short load."""

import subprocess

import pytest

from deploy.grafana.alerts import ALERTS
from tests.monitoring.prometheus import Prometheus
from tests.support.daemon import ROOT


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "config", "deploy/prometheus/prometheus.yml"],
        ["check", "rules", "deploy/prometheus/alerts.yml"],
        ["test", "rules", "deploy/prometheus/alerts_test.yml"],
    ],
    ids=" ".join,
)
def test_promtool_finds_no_fault(arguments: list[str]) -> None:
    ended = subprocess.run(["promtool", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("alert", ALERTS, ids=[alert.name for alert in ALERTS])
def test_prometheus_evaluates_an_alert(prometheus: Prometheus, alert: object) -> None:
    (group,) = prometheus.rule_groups()
    (rule,) = [rule for rule in group["rules"] if rule["name"] == f"Quire{alert.name}"]
    assert rule["health"] == "ok", rule
    assert rule["state"] != "firing"
