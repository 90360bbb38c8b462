"""Faults of the device while it serves, seen through HTTP: 503 for whoever is hit, and nothing that hangs."""

from pathlib import Path

import pytest

from tests.integration.conftest import needs_proc
from tests.support.daemon import wait_for
from tests.support.faulty_daemon import FaultyDaemon

pytestmark = needs_proc


@pytest.fixture
def daemon(tmp_path: Path):
    with FaultyDaemon(tmp_path) as running:
        yield running.wait_ready()


def test_without_memory_for_a_prompt_its_request_fails_with_503_and_the_others_go_on(daemon: FaultyDaemon) -> None:
    undisturbed = daemon.post(300).json()["choices"][0]["message"]["content"]
    events, thread = daemon.stream(300)
    daemon.fail_next("memory")
    refused = daemon.post()
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "out_of_memory"
    assert refused.json()["error"]["type"] == "service_unavailable_error"
    thread.join(60)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events if event.get("choices"))
    assert text == undisturbed
    assert daemon.post().status_code == 200
    assert daemon.metrics()["quire_engine_restarts_total"] == 0
    assert "out of memory in a step failed=1" in daemon.log


@pytest.mark.full
def test_after_a_fault_of_the_device_every_stream_is_told_and_the_engine_comes_back(daemon: FaultyDaemon) -> None:
    events, thread = daemon.stream(4000)
    daemon.fail_next("device")
    assert daemon.post().status_code == 503
    thread.join(60)
    assert not thread.is_alive()
    assert events[-1]["error"]["code"] == "engine_dead"
    wait_for(lambda: daemon.get("/ready").status_code == 200, timeout_s=60, what="ready again")
    assert daemon.post().status_code == 200
    assert daemon.metrics()["quire_engine_restarts_total"] == 1
    restarts = [line for line in daemon.log.splitlines() if "restarting delay_s=0.5" in line]
    assert len(restarts) == 1
    assert "while serving: " in restarts[0]
    assert "More words" not in restarts[0]
