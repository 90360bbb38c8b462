"""The KV cache on a fake engine: what a snapshot says, who may see it, and that looking costs no more than it must."""

import asyncio
import base64
import contextlib
import json
import re
import threading
import time
from array import array
from hashlib import sha256
from types import SimpleNamespace

import httpx
import pytest

from engine.interface.control import Stage, State
from engine.interface.errors import EngineDead, EngineError
from engine.interface.kv_snapshot import KvGroup, KvKind, KvRequest, KvSnapshot, KvStates, KvTier
from engine.interface.metrics import Metrics
from engine.interface.paired_client import PairedEngineClient
from server.config.api_keys import read_key_hashes
from server.http.routes.kv_feed import KvFeed
from tests.support.daemon import wait_for
from tests.support.fakes import FakeEngineClient, FakeLauncherChannel
from tests.unit.server.conftest import Harness, check_error, serving


def make_snapshot(step_id=7, cost_s=0.001, **changes):
    """Two requests that share blocks 1 and 2, one that waits, and two cached blocks."""
    rows = [
        KvRequest("chatcmpl-aa-0", "running", 1, 4, 2, 60, 40, 21, 32, 1.5, 0, [1]),
        KvRequest("cmpl-b-b-11", "retiring", 2, 4, 2, 50, 50, 0, 0, 2.5, 3, [1, 1]),
        KvRequest("chatcmpl-cc-0", "waiting", 0, 0, 0, 0, 9, 0, 0, 0.25, 0),
    ]
    fields = {
        "step_id": step_id, "now_s": time.monotonic() - 1.0, "cost_s": cost_s, "num_blocks": 20, "block_size": 16,
        "bytes_per_block": 1000, "num_used": 6, "num_shared": 2, "num_cached": 2, "requests": rows, "num_unlisted": 5,
        "runs": array("i", [1, 4, 1, 2, 9, -2]).tobytes(), "cached_runs": array("i", [12, 2]).tobytes(),
        "num_queried_tokens": 100, "num_hit_tokens": 32, "num_evictions": 4, "num_preemptions": 3,
        "kinds": [KvKind("full", 4, 0), KvKind("window", 2, 2)],
    }  # fmt: skip
    return KvSnapshot(**{**fields, **changes})


@pytest.fixture
def app(harness):
    app = harness()
    app.client.kv = make_snapshot()
    return app


class Viewer:
    """Reads /kv/stream in a thread: (event, data) pairs as they come."""

    def __init__(self, url, headers=None):
        self.events = []
        self.is_over = False
        self._must_leave = False
        self._url, self._headers = url + "/kv/stream", headers
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self):
        with contextlib.suppress(httpx.RemoteProtocolError), self._open() as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            name = ""
            for line in reply.iter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    self.events.append((name, json.loads(line.removeprefix("data: "))))
                if self._must_leave:
                    return
            self.is_over = True

    def _open(self):
        return httpx.stream("GET", self._url, headers=self._headers, timeout=60)

    def names(self):
        return [name for name, _ in self.events]

    def wait(self, name, count=1):
        wait_for(lambda: self.names().count(name) >= count, timeout_s=60, what=f"{count} × {name}")
        return self

    def leave(self):
        self._must_leave = True
        self._thread.join(60)

    def wait_end(self):
        wait_for(lambda: self.is_over, timeout_s=60, what="the end of the stream")


# rule: Endpoints: A KV snapshot matches the engine's state, names requests by their answers' ids, and contains no
#     text
def test_a_snapshot_is_the_engines_in_the_apis_words(app):
    reply = app.get("/kv/snapshot")
    assert reply.headers["cache-control"].startswith("no-store")
    answer = reply.json()
    assert abs(answer["time"] - (time.time() - 1.0)) < 5
    assert (answer["model"], answer["step_id"], answer["num_unlisted"]) == ("tiny", 7, 5)
    assert answer["pool"] == {
        "num_blocks": 20, "block_size": 16, "bytes_per_block": 1000,
        "num_used": 6, "num_shared": 2, "num_cached": 2, "num_empty": 12,
        "kinds": [
            {"kind": "full", "num_used": 4, "num_cached": 0}, {"kind": "window", "num_used": 2, "num_cached": 2},
        ],
        "groups": [], "states": None,
    }  # fmt: skip
    assert answer["totals"] == {
        "num_queried_tokens": 100, "num_hit_tokens": 32, "hit_rate": 0.32, "num_evictions": 4, "num_preemptions": 3,
    }  # fmt: skip
    assert answer["cached_runs"] == [12, 2]
    assert [request["runs"] for request in answer["requests"]] == [[1, 4], [1, 2, 9, -2], []]
    assert answer["requests"][0] == {
        "id": "chatcmpl-aa", "index": 0, "state": "running", "num_blocks": 4, "num_shared_blocks": 2, "bytes": 4000,
        "num_tokens": 61, "num_computed_tokens": 60, "num_prompt_tokens": 40, "num_hit_tokens": 32, "age_s": 1.5,
        "num_preemptions": 0, "runs": [1, 4], "group_runs": [1], "num_state_blocks": 0, "restored_tokens": 0,
        "saved_tokens": [], "cache_reason": None, "num_host_blocks": 0, "num_disk_blocks": 0,
    }  # fmt: skip
    assert answer["tiers"] == []


def test_tiers_are_shown_and_what_a_request_waits_for(app):
    row = KvRequest("cmpl-a-0", "waiting", 0, 0, 0, 0, 40, 0, 0, 1.5, 0, num_host_blocks=3, num_disk_blocks=4)
    host = KvTier("host", 10, 1000, 4000, 1, 3, 1, 640, 7, 0, is_paused=False)
    disk = KvTier("disk", 20, 8000, 9000, 2, 4, 1, 320, 5, 6, is_paused=True)
    app.client.kv = make_snapshot(requests=[row], runs=b"", tiers=[host, disk])
    answer = app.get("/kv/snapshot").json()
    (shown,) = answer["requests"]
    assert (shown["num_host_blocks"], shown["num_disk_blocks"]) == (3, 4)
    assert answer["tiers"] == [
        {
            "name": "host", "num_blocks": 10, "bytes": 1000, "max_bytes": 4000, "num_incoming": 1, "num_outgoing": 3,
            "num_waiting": 1, "num_hit_tokens": 640, "num_evictions": 7, "num_errors": 0, "is_paused": False,
        },
        {
            "name": "disk", "num_blocks": 20, "bytes": 8000, "max_bytes": 9000, "num_incoming": 2, "num_outgoing": 4,
            "num_waiting": 1, "num_hit_tokens": 320, "num_evictions": 5, "num_errors": 6, "is_paused": True,
        },
    ]  # fmt: skip


def test_states_are_shown_in_bytes_and_by_request(app):
    row = KvRequest("cmpl-a-0", "running", 1, 4, 0, 60, 40, 21, 32, 1.5, 0, [1, 0], 3, 32, [64, 128], "no_checkpoint")
    app.client.kv = make_snapshot(
        requests=[row], runs=array("i", [1, 4]).tobytes(), states=KvStates(1, 2, 3, 6, 5, 4, 7, 1),
        groups=[KvGroup("full", 16, 1), KvGroup("state", 64, 3)],
    )  # fmt: skip
    answer = app.get("/kv/snapshot").json()
    assert answer["pool"]["groups"] == [
        {"kind": "full", "num_tokens": 16, "num_pages": 1}, {"kind": "state", "num_tokens": 64, "num_pages": 3},
    ]  # fmt: skip
    assert answer["pool"]["states"] == {
        "num_live": 1, "num_saved": 2, "live_bytes": 3000, "saved_bytes": 6000,
        "num_made": 5, "num_skipped": 4, "num_restored": 7, "num_evicted": 1,
    }  # fmt: skip
    (shown,) = answer["requests"]
    assert (shown["num_state_blocks"], shown["restored_tokens"], shown["saved_tokens"]) == (3, 32, [64, 128])
    assert shown["cache_reason"] == "no_checkpoint"


def test_guesses_in_flight_are_not_counted_as_computed(app):
    app.client.kv = make_snapshot(
        requests=[KvRequest("cmpl-a-0", "running", 0, 0, 0, 105, 40, 61, 0, 1.0, 0)], runs=b""
    )
    row = app.get("/kv/snapshot").json()["requests"][0]
    assert (row["num_computed_tokens"], row["num_tokens"]) == (101, 101)


# rule: Endpoints: A KV snapshot matches the engine's state, names requests by their answers' ids, and contains no
#     text
def test_ids_are_those_of_the_answers_and_choices_are_numbered(app):
    rows = app.get("/kv/snapshot").json()["requests"]
    assert [(row["id"], row["index"]) for row in rows] == [("chatcmpl-aa", 0), ("cmpl-b-b", 11), ("chatcmpl-cc", 0)]
    app.chat()
    answered = app.chat().json()["id"]
    child = app.client.submitted[-1].request_id
    app.client.kv = make_snapshot(requests=[KvRequest(child, "running", 0, 0, 0, 0, 1, 0, 0, 0.0, 0)], runs=b"")
    time.sleep(0.3)
    assert app.get("/kv/snapshot").json()["requests"][0]["id"] == answered


def test_before_the_first_lookup_there_is_no_hit_rate(app):
    app.client.kv = make_snapshot(num_queried_tokens=0, num_hit_tokens=0)
    assert app.get("/kv/snapshot").json()["totals"]["hit_rate"] is None


def test_without_an_engine_the_answer_is_what_ready_says(app):
    app.client.ready = None
    app.launcher.state = State(Stage("weights", 1, 4), False)
    assert "weights" in check_error(app.get("/kv/snapshot"), 503, "not_ready")["message"]


# rule: Endpoints: The KV page is public and empty, runs its own script alone, and its data need the key
def test_the_shell_is_public_and_its_data_need_the_key(harness):
    app = harness(api_key_hashes=read_key_hashes(["secret"], file=None, environment={}), root_path="/llm")
    app.client.kv = make_snapshot()
    for path in ("/kv", "/llm/kv"):
        page = app.get(path)
        assert page.status_code == 200
        assert "chatcmpl-aa" not in page.text
        assert "tiny" not in page.text
    for path in ("/kv/snapshot", "/kv/stream", "/kv/", "/kv/style.css"):
        check_error(app.get(path), 401, "invalid_api_key")
    assert app.request("GET", "/kv/snapshot", headers={"authorization": "Bearer secret"}).status_code == 200
    assert app.get("/kv", "POST").status_code == 401
    with serving(app.app) as url:
        viewer = Viewer(url, {"x-api-key": "secret"}).wait("snapshot")
        viewer.leave()


@pytest.mark.slow
def test_a_stream_begins_with_a_snapshot_and_says_when_nothing_changed(app):
    with serving(app.app) as url:
        viewer = Viewer(url).wait("same", 2)
        assert viewer.names()[0] == "snapshot"
        assert viewer.names().count("snapshot") == 1
        assert viewer.events[0][1] == app.get("/kv/snapshot").json() | {"time": viewer.events[0][1]["time"]}
        app.client.kv = make_snapshot(step_id=8)
        viewer.wait("snapshot", 2)
        for name, data in viewer.events:
            assert abs(data["time"] - time.time()) < 60, name
        viewer.leave()


# rule: Endpoints: The KV stream sends at most four snapshots a second for all viewers, costs nothing without viewers,
#     ends at the drain, and reports an engine's death
@pytest.mark.slow
def test_all_viewers_share_at_most_four_asks_a_second(app):
    with serving(app.app) as url:
        begun = time.monotonic()
        viewers = [Viewer(url) for _ in range(5)]
        for viewer in viewers:
            viewer.wait("same", 4)
        num_asks, most_events = app.client.num_kv_asks, max(len(viewer.events) for viewer in viewers)
        elapsed_s = time.monotonic() - begun
        assert num_asks <= 1 + elapsed_s / 0.25
        assert most_events <= 2 + elapsed_s / 0.25
        for viewer in viewers:
            viewer.leave()


# rule: Endpoints: The KV stream sends at most four snapshots a second for all viewers, costs nothing without viewers,
#     ends at the drain, and reports an engine's death
@pytest.mark.slow
def test_nothing_is_asked_while_nobody_looks(app):
    with serving(app.app) as url:
        assert app.client.num_kv_asks == 0
        viewer = Viewer(url).wait("same")
        viewer.leave()

        def is_quiet() -> bool:
            num_asks = app.client.num_kv_asks
            time.sleep(0.8)
            return app.client.num_kv_asks == num_asks

        wait_for(is_quiet, timeout_s=60, what="no further ask")  # the server may notice later that the viewer left


# rule: Endpoints: The KV stream sends at most four snapshots a second for all viewers, costs nothing without viewers,
#     ends at the drain, and reports an engine's death
@pytest.mark.slow
def test_a_stream_ends_when_the_server_drains(app):
    with serving(app.app) as url:
        viewer = Viewer(url).wait("same")
        app.launcher.state = State(Stage("ready"), True)
        viewer.wait_end()
        assert viewer.names()[-1] == "end"
        late = Viewer(url)
        late.wait_end()
        assert late.names() == ["end"]


@pytest.mark.slow
def test_a_stream_ends_when_another_daemon_has_the_port(app):
    with serving(app.app) as url:
        viewer = Viewer(url).wait("same")
        app.launcher.state = State(Stage("ready"), False, accepts=False)
        viewer.wait_end()


@pytest.mark.slow
def test_a_dead_engine_is_told_once_and_the_next_one_shown(app):
    with serving(app.app) as url:
        viewer = Viewer(url).wait("same")
        snapshot, app.client.kv = app.client.kv, EngineDead("The engine stopped.")
        viewer.wait("state")
        app.launcher.state = State(Stage("weights"), False)
        viewer.wait("state", 2)
        app.client.kv = snapshot
        viewer.wait("snapshot", 2)
        states = [data for name, data in viewer.events if name == "state"]
        assert [state["stage"] for state in states] == ["restarting", "weights"]
        assert states[0]["detail"] == "The engine stopped."
        viewer.leave()


@pytest.mark.slow
def test_who_shuts_down_ends_the_stream(app):
    with serving(app.app) as url:
        viewer = Viewer(url).wait("same")
        asyncio.run(app.client.aclose())
        app.client.kv = app.client.fail
        viewer.wait_end()
        assert viewer.names()[-1] == "end"


def test_what_is_dear_to_make_is_asked_for_less_often_but_not_kept_for_ever(monkeypatch):
    clock = SimpleNamespace(now_s=100.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr("server.http.routes.kv_feed.time", clock)
    monkeypatch.setattr("server.http.routes.kv_feed._MAX_AGE_S", 1.0)

    async def run():
        client = FakeEngineClient()
        client.kv = make_snapshot(cost_s=0.1)  # 2 % of 5 s
        feed = KvFeed(client, model="tiny", wall=time.time)
        first = await feed.next()
        clock.now_s += 0.9
        assert await feed.next() is first
        clock.now_s += 0.2
        assert await feed.next() is not first
        client.kv = make_snapshot(cost_s=0.001)
        fresh = await (other := KvFeed(client, model="tiny", wall=time.time)).next()
        clock.now_s += 0.3
        assert await other.next() is not fresh
        assert client.num_kv_asks == 4

    asyncio.run(run())


def test_an_engine_that_does_not_answer_is_an_error_and_no_hang(monkeypatch):
    async def run():
        client = FakeEngineClient(delay_s=60)
        feed = KvFeed(client, model="tiny")
        with monkeypatch.context() as patch:
            patch.setattr("server.http.routes.kv_feed._ANSWER_TIMEOUT_S", 0.05)
            results = await asyncio.gather(feed.next(), feed.next(), return_exceptions=True)
        assert all(isinstance(result, EngineError) for result in results)
        assert client.num_kv_asks == 1
        client.delay_s, client.kv = 0, make_snapshot()
        assert (await feed.next()).body

    asyncio.run(run())


# rule: Endpoints: The KV page is public and empty, runs its own script alone, and its data need the key
def test_the_page_runs_its_own_script_and_style_and_nothing_else(harness):
    page = harness().get("/kv")
    policy = page.headers["content-security-policy"]
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        (text,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", page.text, re.DOTALL)
        assert len(text) > 1000
        digest = base64.b64encode(sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r"\s(on\w+|style)=\"", page.text.partition("<script")[0])
    assert not re.search(r"https?://|//\w+\.|@import|url\(", page.text)


def test_every_element_that_the_script_asks_for_is_on_the_page(harness):
    html, _, script = harness().get("/kv").text.partition("<script")
    wanted = set(re.findall(r'byId\("([\w-]+)"\)', script))
    assert len(wanted) > 20
    assert wanted <= set(re.findall(r'\sid="([\w-]+)"', html))
    for path in ("/kv", "/kv/snapshot", "/kv/stream"):
        app = harness()
        app.client.kv = make_snapshot()
        reply = app.get(path, "HEAD")
        assert (reply.status_code, reply.content) == (200, b"")


def test_the_document_describes_the_snapshot(harness):
    document = harness().get("/openapi.json").json()
    responses = document["paths"]["/kv/snapshot"]["get"]["responses"]
    assert "503" in responses
    reference = responses["200"]["content"]["application/json"]["schema"]["$ref"]
    assert "pool" in document["components"]["schemas"][reference.rpartition("/")[2]]["properties"]


@pytest.fixture
def pair(model_folder):
    sides = {name: FakeEngineClient([]) for name in ("prefill-0", "decode-0", "decode-1")}
    for step_id, client in enumerate(sides.values()):
        client.kv = make_snapshot(step_id)
    prefill, *decode = sides.values()
    client = PairedEngineClient([prefill], decode, min_tokens=4, max_replays=2, metrics=Metrics())
    return Harness(model_folder, client, FakeLauncherChannel()), decode


def test_of_several_engines_the_one_that_is_named_is_shown(pair):
    app, decode = pair
    for query, name, step_id in (
        ("", "decode-0", 1), ("?engine=prefill-0", "prefill-0", 0), ("?engine=decode-1", "decode-1", 2),
    ):  # fmt: skip
        answer = app.get("/kv/snapshot" + query).json()
        assert (answer["engine"], answer["step_id"]) == (name, step_id)
        assert answer["engines"] == ["prefill-0", "decode-0", "decode-1"]
    decode[0]._ready = None
    assert app.get("/kv/snapshot").json()["engine"] == "decode-1"


def test_an_engine_that_there_is_not_is_refused_with_the_names(pair, app):
    for path in ("/kv/snapshot", "/kv/stream"):
        error = check_error(pair[0].get(f"{path}?engine=decode-2"), 400, "invalid_parameter")
        assert "'decode-2'" in error["message"]
        assert "prefill-0, decode-0, decode-1" in error["message"]
        assert "one engine" in check_error(app.get(f"{path}?engine=decode-0"), 400, "invalid_parameter")["message"]
    assert (app.get("/kv/snapshot").json()["engine"], app.get("/kv/snapshot").json()["engines"]) == (None, [])
