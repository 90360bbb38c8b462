"""The KV cache on real daemons: what clients do is seen, whichever worker is asked; the stream outlives an engine."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable

import httpx
import openai
import pytest

from tests.integration.conftest import needs_proc
from tests.support.daemon import Daemon, wait_for

Start = Callable[..., Daemon]
PROMPT = "The quire is a gathering of leaves, folded once and sewn through the fold. " * 8


def snapshot(daemon: Daemon) -> dict:
    """Ask over a connection of its own, for what is true now: an answer may be a quarter of a second old."""
    time.sleep(0.3)
    reply = daemon.get("/kv/snapshot")
    assert reply.status_code == 200
    assert PROMPT[:20] not in reply.text
    return reply.json()


def stream(client: openai.OpenAI, prompt: str):
    return client.completions.create(
        model="quire-demo", prompt=prompt, max_tokens=1500, stream=True, n=1, extra_body={"ignore_eos": True}
    )


class Watcher:
    """Reads /kv/stream in a thread."""

    def __init__(self, daemon: Daemon) -> None:
        self.events: list[tuple[str, dict]] = []
        self.is_closed_well: bool | None = None
        self._url = f"{daemon.base_url}/kv/stream"
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        name = ""
        try:
            with httpx.stream("GET", self._url, timeout=60) as reply:
                for line in reply.iter_lines():
                    if line.startswith("event: "):
                        name = line.removeprefix("event: ")
                    elif line.startswith("data: "):
                        self.events.append((name, json.loads(line.removeprefix("data: "))))
            self.is_closed_well = True
        except httpx.HTTPError:
            self.is_closed_well = False

    def wait(self, name: str, after: int = 0) -> None:
        wait_for(lambda: name in [event for event, _ in self.events[after:]], timeout_s=60, what=name)


# rule: Endpoints: A KV snapshot matches the engine's state, names requests by their answers' ids, and contains no
#     text
def test_requests_their_shared_prefix_and_what_is_left_of_it_are_seen(daemon: Daemon, client: openai.OpenAI) -> None:
    wait_for(lambda: snapshot(daemon)["pool"]["num_used"] == 0, timeout_s=60, what="an idle pool")
    first = stream(client, PROMPT)
    first_id = next(iter(first)).id
    second = stream(client, PROMPT + "And then")
    second_id = next(iter(second)).id
    wait_for(lambda: len(snapshot(daemon)["requests"]) == 2, timeout_s=60, what="both requests")
    seen = snapshot(daemon)
    rows = {row["id"]: row for row in seen["requests"]}
    assert set(rows) == {first_id, second_id}
    assert all(row["state"] == "running" for row in rows.values())
    assert rows[second_id]["num_hit_tokens"] >= 16
    assert seen["pool"]["num_shared"] == rows[first_id]["num_shared_blocks"] == rows[second_id]["num_shared_blocks"] > 0
    tables = [sum(row["runs"][1::2]) for row in rows.values()]
    assert seen["pool"]["num_used"] == sum(abs(size) for size in tables) - seen["pool"]["num_shared"]
    first.close()
    second.close()
    wait_for(lambda: snapshot(daemon)["pool"]["num_used"] == 0, timeout_s=60, what="free blocks")
    after = snapshot(daemon)
    assert after["requests"] == []
    assert after["pool"]["num_cached"] >= seen["pool"]["num_shared"]
    assert after["totals"]["num_hit_tokens"] > 0


def test_choices_of_one_request_are_told_apart(daemon: Daemon, client: openai.OpenAI) -> None:
    streams = client.completions.create(
        model="quire-demo", prompt="Two of them", max_tokens=900, stream=True, n=2, extra_body={"ignore_eos": True}
    )
    id_ = next(iter(streams)).id
    wait_for(lambda: len(snapshot(daemon)["requests"]) == 2, timeout_s=60, what="both choices")
    rows = snapshot(daemon)["requests"]
    assert sorted((row["id"], row["index"]) for row in rows) == [(id_, 0), (id_, 1)]
    streams.close()


# rule: Endpoints: The KV stream sends at most four snapshots a second for all viewers, costs nothing without viewers,
#     ends at the drain, and reports an engine's death
@needs_proc
def test_any_worker_answers_and_each_stream_ends_at_the_drain(start: Start) -> None:
    daemon = start("--http-workers", "2", "--drain-timeout", "20").wait_ready()
    client = openai.OpenAI(base_url=f"{daemon.base_url}/v1", api_key="none", max_retries=0, timeout=60)
    answer = stream(client, PROMPT)
    id_ = next(iter(answer)).id
    for _ in range(8):  # connections of their own, so that both workers are asked
        assert [row["id"] for row in snapshot(daemon)["requests"]] == [id_]
    watchers = [Watcher(daemon) for _ in range(6)]
    for watcher in watchers:
        watcher.wait("snapshot")
    answer.close()
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(60) == 0
    for watcher in watchers:
        wait_for(lambda watcher=watcher: watcher.is_closed_well is not None, timeout_s=60, what="the end")
        assert watcher.is_closed_well
        assert watcher.events[-1][0] == "end"


# rule: Endpoints: The KV stream sends at most four snapshots a second for all viewers, costs nothing without viewers,
#     ends at the drain, and reports an engine's death
@needs_proc
@pytest.mark.full
def test_a_stream_shows_the_engines_death_and_its_successor(start: Start) -> None:
    daemon = start().wait_ready()
    watcher = Watcher(daemon)
    watcher.wait("snapshot")
    os.kill(daemon.child("engine.process"), signal.SIGKILL)
    watcher.wait("state")
    watcher.wait("snapshot", after=[name for name, _ in watcher.events].index("state"))
    assert watcher.events[0][1]["pool"] == watcher.events[-1][1].get("pool", watcher.events[0][1]["pool"])
    assert daemon.get("/kv/snapshot").status_code == 200
