"""A daemon is loaded in the place of another one, whose open requests go on in its engine: all are whole and equal."""

import os
import signal
import threading

import httpx
import pytest

from tests.integration.conftest import needs_proc
from tests.integration.test_takeover import CHAT, REQUESTS, STORY, Clients, new_client, start_next, stream
from tests.support.daemon import READY, Daemon, wait_for
from tests.support.life_cycle import MODEL, Start, Stream, post, ready_status

pytestmark = needs_proc
ENGINE = "engine.process"
INSTEAD = ("--takeover-form", "instead")
LONG = {"messages": STORY, "temperature": 0, "max_tokens": 3900, "ignore_eos": True}
RELEASED = "the engine has ended, requests wait for the next daemon"


def start_streams(daemon: Daemon, num_streams: int) -> Clients:
    """Start streams of all kinds, and probes of /health."""
    clients = Clients(daemon.base_url)
    for i in range(num_streams):
        clients._run(clients._stream, i % len(REQUESTS), i % 4 < 2)
    clients._run(clients._probe, "/health", False)
    wait_for(lambda: clients.num_answers > 0, timeout_s=120, what="answers")
    return clients


def wait_taken(old: Daemon, new: Daemon) -> None:
    wait_for(lambda: READY.search(new.log) or new.process.poll() is not None, timeout_s=240, what="ready instead")
    assert new.process.poll() is None, new.log
    assert f"open requests go on in the next daemon's engine until they end pid={new.process.pid}" in old.log


def wait_released(old: Daemon, *, times: int = 1) -> None:
    wait_for(lambda: old.log.count(RELEASED) == times, timeout_s=120, what="the end of the running engine")


def wait_again(old: Daemon, *, times: int = 1) -> None:
    wait_for(lambda: old.log.count("engine ready again") == times, timeout_s=120, what="the engine of the old one")


# rule: Streams: Without memory for two models a takeover cuts nobody either: all wait for the next daemon's engine
def test_open_requests_go_on_in_the_next_engine_and_new_ones_wait_for_it(start: Start) -> None:
    old = start("--http-workers", "2").wait_ready()
    clients = start_streams(old, 12)
    new = start_next(start, old, *INSTEAD, "--http-workers", "2")
    wait_released(old)
    during = httpx.get(old.base_url + "/ready", timeout=60)  # answered by the old one, or, soon, by the new one
    assert during.status_code == 503 or READY.search(new.log) or "has the port" in new.log
    assert post(old).status_code == 200  # it waits
    wait_taken(old, new)
    assert old.process.wait(60) == 0
    clients.stop()
    assert "form=instead reason='asked for'" in new.log
    assert "replays=1" in old.log
    assert new.metrics()["quire_takeover_pause_seconds"] > 0
    assert not old.running(ENGINE)
    assert "Traceback" not in old.log + new.log


def test_a_next_daemon_that_is_killed_while_it_loads_leaves_the_old_one_as_it_was(start: Start) -> None:
    old = start().wait_ready()
    clients = start_streams(old, 6)
    new = start_next(start, old, *INSTEAD)
    wait_released(old)
    new.process.kill()
    wait_again(old)
    clients.stop()
    assert "the takeover was given up, this daemon goes on" in old.log
    assert old.metrics()["quire_takeovers_failed_total"] == 1
    assert ready_status(old) == 200
    assert "Traceback" not in old.log


@pytest.mark.full
def test_a_next_engine_that_cannot_load_or_dies_leaves_the_old_one(start: Start) -> None:
    old = start().wait_ready()
    clients = start_streams(old, 6)
    wrong = start_next(start, old, *INSTEAD, "--kv-cache-memory", "1KiB")  # known before anything is touched
    assert wrong.process.wait(90) != 0
    assert f"The daemon with process {old.process.pid} goes on serving." in wrong.log
    assert RELEASED not in old.log
    wrong = start_next(start, old, *INSTEAD, "--kv-host-memory", "100TiB")  # known when it loads
    assert wrong.process.wait(90) == 3
    assert f"The daemon with process {old.process.pid} starts its engine again and goes on serving." in wrong.log
    wait_again(old)
    killed = start_next(start, old, *INSTEAD)
    wait_released(old, times=2)
    os.kill(killed.child(ENGINE), signal.SIGKILL)
    assert killed.process.wait(90) == 3
    wait_again(old, times=2)
    stopped = start_next(start, old, *INSTEAD)
    wait_released(old, times=3)
    stopped.process.send_signal(signal.SIGTERM)
    assert stopped.process.wait(90) == 0
    wait_again(old, times=3)
    clients.stop()
    assert "Traceback" not in old.log


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_next_daemon_serves_if_the_old_one_ends_while_it_loads(start: Start, number: int) -> None:
    old = start("--drain-timeout", "60").wait_ready()
    new = start_next(start, old, *INSTEAD)
    wait_released(old)
    old.process.send_signal(number)
    wait_for(lambda: READY.search(new.log) or new.process.poll() is not None, timeout_s=120, what="ready")
    assert ready_status(new) == 200
    old.process.wait(60)
    assert post(new).status_code == 200


@pytest.mark.full
def test_a_stream_goes_on_through_two_takeovers_and_a_killed_engine(start: Start) -> None:
    first = start().wait_ready()
    texts: list[dict[int, str]] = []

    def ask() -> None:
        with new_client() as client:
            texts.append(stream(client, first.base_url, CHAT, LONG))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    second = start_next(start, first, *INSTEAD)
    wait_taken(first, second)
    os.kill(second.child(ENGINE), signal.SIGKILL)
    wait_for(lambda: "engine ready again" in second.log, timeout_s=90, what="ready again")
    third = start_next(start, second, *INSTEAD)
    wait_taken(second, third)
    asking.join(300)
    assert first.process.wait(60) == 0
    assert second.process.wait(60) == 0
    assert first.log.count("open requests go on requests=1") == 3
    ask()  # the same, undisturbed
    assert texts[0] == texts[1]
    assert ready_status(third) == 200


@pytest.mark.full
def test_streams_of_the_old_daemon_share_the_end_of_the_new_one(start: Start) -> None:
    old = start("--drain-timeout", "1").wait_ready()
    drained = Stream(old, max_tokens=4000).wait_started()
    new = start_next(start, old, *INSTEAD, "--drain-timeout", "60")
    wait_taken(old, new)
    new.process.send_signal(signal.SIGTERM)
    assert drained.wait_end()[-1]["error"]["code"] == "server_shutting_down"
    assert old.process.wait(60) == 0
    assert new.process.wait(60) == 0
    old = start().wait_ready()
    cut = Stream(old, max_tokens=4000).wait_started()
    new = start_next(start, old, *INSTEAD)
    wait_taken(old, new)
    new.process.kill()
    assert cut.wait_end()[-1]["error"]["code"] == "engine_dead"
    assert old.process.wait(60) == 0


@pytest.mark.full
def test_another_model_is_not_loaded_in_its_place(start: Start, daemon: Daemon) -> None:
    refused = start_next(start, daemon, *INSTEAD, "--max-replays", "0")
    assert refused.process.wait(90) == 3
    assert "with --max-replays 0 a request goes on in no other engine" in refused.log
    assert MODEL in daemon.get("/v1/models").text
    assert RELEASED not in daemon.log
