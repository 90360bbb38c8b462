"""Faults of the device while it serves, seen through HTTP: who is refused, who goes on, and nothing that hangs."""

from pathlib import Path

import pytest

from tests.integration.conftest import needs_proc
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
def test_after_a_fault_of_the_device_every_request_goes_on_with_the_next_engine(daemon: FaultyDaemon) -> None:
    undisturbed = daemon.post(300).json()["choices"][0]["message"]["content"]
    events, thread = daemon.stream(300)
    daemon.fail_next("device")
    reply = daemon.post()
    assert reply.status_code == 200
    assert reply.json()["timings"]["replays"] == 1
    thread.join(60)
    assert not thread.is_alive()
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events if event.get("choices"))
    assert text == undisturbed
    assert daemon.metrics()["quire_request_replays_total"] == 2
    assert daemon.metrics()["quire_engine_restarts_total"] == 1
    restarts = [line for line in daemon.log.splitlines() if "restarting delay_s=0.5" in line]
    assert len(restarts) == 1
    assert "while serving: " in restarts[0]
    assert "More words" not in restarts[0]


@pytest.mark.full
def test_what_ends_every_engine_is_poison_and_the_others_go_on(daemon: FaultyDaemon) -> None:
    undisturbed = daemon.post(200).json()["choices"][0]["message"]["content"]
    events, thread = daemon.stream(200)
    daemon.fail_next("poison")
    reply = daemon.post(7)
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "poison_request")
    assert reply.headers["x-should-retry"] == "false"
    again = daemon.post(7)
    assert (again.status_code, again.json()["error"]["code"]) == (500, "poison_request")
    thread.join(60)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events if event.get("choices"))
    assert text == undisturbed
    metrics = daemon.metrics()
    assert metrics["quire_engine_restarts_total"] in (2, 3)  # 3 if the stream is the first suspect
    assert metrics["quire_requests_failed_total{reason=poison_request}"] == 2


@pytest.mark.full
def test_poison_is_found_while_requests_of_another_http_worker_are_open(tmp_path: Path) -> None:
    with FaultyDaemon(tmp_path, "--http-workers", "2") as running:
        daemon = running.wait_ready()
        streams = [daemon.stream(200) for _ in range(4)]  # most probably of both workers
        daemon.fail_next("poison")
        reply = daemon.post(7)
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "poison_request")
        for events, thread in streams:
            thread.join(60)
            assert not any("error" in event for event in events)
        assert daemon.metrics()["quire_engine_restarts_total"] in (2, 3)
