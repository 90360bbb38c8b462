"""Alerts fire on what really happens to a server, not only on numbers that somebody wrote down."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.monitoring.load import MODEL
from tests.monitoring.pictures import rows
from tests.monitoring.prometheus import Prometheus
from tests.support.daemon import Daemon, wait_for

_ENGINE = "engine.process"
_STREAM = {"model": MODEL, "prompt": "Go on", "max_tokens": 3500, "ignore_eos": True, "stream": True}


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[Daemon, Prometheus]]:
    """Return a daemon of the test's own and its Prometheus."""
    with Daemon("--device", "cpu", folder=tmp_path) as daemon:
        target = daemon.wait_ready().base_url.removeprefix("http://")
        with Prometheus(target, folder=tmp_path) as prometheus:
            yield daemon, prometheus


def firing(prometheus: Prometheus) -> set[str]:
    """Return the alerts that fire now."""
    return {rule["name"] for group in prometheus.rule_groups() for rule in group["rules"] if rule["state"] == "firing"}


def test_an_engine_that_hangs_in_a_stream_is_an_alert_until_it_goes_on(watched: tuple[Daemon, Prometheus]) -> None:
    daemon, prometheus = watched
    with httpx.stream("POST", f"{daemon.base_url}/v1/completions", json=_STREAM, timeout=120) as answer:
        lines = answer.iter_lines()
        next(lines)
        wait_for(lambda: daemon.metrics()["quire_num_requests_running"] == 1, timeout_s=60, what="a running request")
        engine = daemon.child(_ENGINE)
        os.kill(engine, signal.SIGSTOP)
        try:
            wait_for(lambda: "QuireEngineStalled" in firing(prometheus), timeout_s=100, what="the alert")
        finally:
            os.kill(engine, signal.SIGCONT)
        wait_for(lambda: not firing(prometheus), timeout_s=60, what="the alert's end")


def test_an_engine_that_dies_three_times_is_a_restart_loop(watched: tuple[Daemon, Prometheus]) -> None:
    daemon, prometheus = watched
    for number in (1, 2, 3):
        assert "QuireRestartLoop" not in firing(prometheus)
        os.kill(daemon.child(_ENGINE), signal.SIGKILL)
        wait_for(
            lambda n=number: daemon.metrics()["quire_engine_restarts_total"] == n, timeout_s=60, what="a new engine"
        )
        wait_for(lambda: daemon.get("/ready").status_code == 200, timeout_s=60, what="ready again")
    wait_for(lambda: "QuireRestartLoop" in firing(prometheus), timeout_s=30, what="the alert")
    (panel,) = [panel for panel in rows()["Processes and GPU"] if panel["title"] == "Engine gone for"]
    (series,) = prometheus.ask(panel["targets"][0]["expr"])
    assert series.values[-1] >= 0.5  # the first delay


def test_a_server_that_is_gone_is_down(watched: tuple[Daemon, Prometheus]) -> None:
    daemon, prometheus = watched
    daemon.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "QuireDown" in firing(prometheus), timeout_s=100, what="the alert")
