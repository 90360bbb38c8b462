"""What orchestrators and people look at: readiness, health, metrics, documents."""

import re
import threading

import httpx
import pytest

from engine.interface.control import Stage, State
from engine.interface.metrics import Metrics
from engine.interface.paired_client import PairedEngineClient
from server.config.api_keys import read_key_hashes
from tests.support.fakes import FakeEngineClient, FakeLauncherChannel
from tests.unit.server.conftest import CHAT, COMPLETIONS, Harness, check_error, serving


# rule: Endpoints: `/ready` is 503 with stage and progress until the self-test has given its first token
def test_ready_follows_the_launcher(harness):
    launcher = FakeLauncherChannel("weights")
    launcher.state = State(Stage("weights", done=1, total=4, unit="bytes"), False)
    app = harness(launcher=launcher)
    ready, app.client.ready = app.client.ready, None
    assert (app.get("/ready").status_code, app.get("/ready").json()) == (503, {"stage": "weights", "done": 0.25})
    assert app.get("/health").status_code == 200
    for path in (CHAT, COMPLETIONS):
        reply = app.post(path, {})
        assert "weights" in check_error(reply, 503, "not_ready")["message"]
        assert reply.headers["retry-after"]
    launcher.state = State(Stage("ready"), False)
    assert app.get("/ready").status_code == 503
    assert (app.get("/health").status_code, app.get("/health").json()["status"]) == (200, "engine restarting")
    app.client.ready = ready
    assert (app.get("/ready").status_code, app.get("/health").status_code) == (200, 200)
    assert app.get("/ready", "HEAD").status_code == 200
    launcher.state = State(Stage("ready"), True)
    assert app.get("/ready").json()["stage"] == "draining"
    reply = app.chat()
    check_error(reply, 503, "draining")
    assert reply.headers["retry-after"]
    assert app.get("/health").status_code == 200


def test_requests_wait_for_the_next_daemon_in_a_takeover(harness):
    launcher = FakeLauncherChannel()
    app = harness("Hello.", launcher=launcher)
    app.client.ready = None
    launcher.state = State(Stage("weights", 1, 2), False, fault="restarting", lets_wait=True)
    assert app.get("/ready").status_code == 503
    assert (app.get("/health").status_code, app.get("/health").json()["status"]) == (200, "engine restarting")
    assert "requests wait" in app.get("/health").json()["detail"]
    assert app.chat().status_code == 200  # a client of engines would wait
    for fault in ("stalled", "dead"):
        launcher.state = State(Stage("weights", 1, 2), False, fault=fault, lets_wait=True)
        check_error(app.chat(), 503, "not_ready")
    launcher.state = State(Stage("weights", 1, 2), True, fault="restarting", lets_wait=True)
    check_error(app.chat(), 503, "draining")


@pytest.mark.parametrize("stage", ["ready", "restarting", "config"])  # the launcher hears of an end after this worker
@pytest.mark.parametrize("is_greeted", [False, True])
def test_a_request_that_comes_while_a_standby_takes_over_is_not_refused(harness, stage, is_greeted):
    launcher = FakeLauncherChannel()
    app = harness("Hello.", launcher=launcher)
    if not is_greeted:
        app.client.ready = None
    launcher.state = State(Stage(stage), False, fault="" if stage == "ready" else "restarting", lets_wait=True)
    assert app.chat().status_code == 200  # a client of engines would wait


def test_a_request_that_may_not_wait_for_the_standby_is_refused(harness):
    app = harness("Hello.", launcher=(launcher := FakeLauncherChannel()), max_replays=0)
    app.client.ready = None
    launcher.state = State(Stage("restarting"), False, fault="restarting", lets_wait=True)
    check_error(app.chat(), 503, "not_ready")
    detail = app.get("/health").json()["detail"]
    assert "requests wait" not in detail
    assert "GET /ready" in detail


def test_a_request_waits_a_moment_for_an_engine_that_greets_this_worker_later_than_another(harness):
    app = harness("Hello.")
    ready, app.client.ready = app.client.ready, None
    later = threading.Timer(0.2, lambda: setattr(app.client, "ready", ready))
    later.start()
    assert app.chat().json()["choices"][0]["message"]["content"] == "Hello."
    later.join()


def test_a_request_waits_no_longer_for_an_engine_that_has_ended(harness):
    app = harness(launcher=(launcher := FakeLauncherChannel()))
    app.client.ready = None
    later = threading.Timer(0.2, lambda: setattr(launcher, "state", State(Stage("restarting"), False)))
    later.start()
    check_error(app.chat(), 503, "not_ready")
    assert later.finished.is_set()


# rule: Endpoints: `/health` is 503 only if the engine makes no progress or does not come back
def test_health_is_bad_only_while_somebody_else_should_act(harness):
    """Not while it is not ready: a load is healthy, also one after a crash, as long as it goes on."""
    launcher = FakeLauncherChannel()
    app = harness(launcher=launcher)
    for stage, fault, status in (
        ("weights", "", 200), ("ready", "", 200), ("ready", "stalled", 503), ("ready", "", 200),
        ("restarting", "restarting", 200), ("weights", "restarting", 200), ("weights", "stalled", 503),
        ("restarting", "dead", 503), ("weights", "dead", 503), ("ready", "", 200),
    ):  # fmt: skip
        launcher.state = State(Stage(stage), False, fault)
        reply = app.get("/health")
        assert reply.status_code == status
        assert reply.json()["status"] == (f"engine {fault}" if fault else "ok")
        assert ("detail" in reply.json()) == bool(fault)
    launcher.state = State(Stage("ready"), False, "stalled")
    assert "10 s" in app.get("/health").json()["detail"]


# rule: Endpoints: `/ping` is `/health`, by GET and by POST
def test_ping_says_what_health_says_by_get_and_by_post(harness):
    launcher = FakeLauncherChannel()
    app = harness(launcher=launcher)
    for fault, status in (("", 200), ("stalled", 503)):
        launcher.state = State(Stage("ready"), False, fault)
        for reply in (app.get("/ping"), app.post("/ping"), app.post("/ping", content=b"anything")):
            assert reply.status_code == status
            assert reply.json() == app.get("/health").json()


# rule: Endpoints: Metrics, version, docs and the OpenAPI document answer
def test_metrics_version_and_documents(harness):
    app = harness()
    assert app.get("/metrics").content == b"quire_up 1\n"
    assert app.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")
    assert app.get("/version").json()["version"]
    assert app.get("/docs", "HEAD").status_code == 200
    document = app.get("/openapi.json").json()
    body = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "messages" in document["components"]["schemas"][body["$ref"].rsplit("/", 1)[1]]["properties"]


# rule: Endpoints: Metrics, version, docs and the OpenAPI document answer
def test_the_reference_page_loads_nothing_from_other_hosts(harness):
    app = harness()
    page = app.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert 'fetch("openapi.json",' in page.text
    assert "unsafe" not in page.headers["content-security-policy"]
    markup = page.text.split("<script")[0].split("</style>")[-1]
    assert "//" not in markup.replace("</", "")
    assert not re.search(r"@import|url\(", page.text.split("</style>")[0])
    check_error(app.get("/redoc"), 404, "not_found")
    check_error(app.get("/docs/oauth2-redirect"), 404, "not_found")


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/tiny", "/docs"]
)
def test_every_page_can_be_asked_for_by_head(harness, path):
    reply = harness().get(path, "HEAD")
    assert reply.status_code == 200
    assert reply.content == b""


PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,application/openmetrics-text;version=0.0.1;"
    "q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


# rule: Endpoints: Metrics, version, docs and the OpenAPI document answer
@pytest.mark.parametrize(
    ("accept", "is_open"),
    [
        (PROMETHEUS, True), ("application/openmetrics-text", True), ("Application/OpenMetrics-TEXT", True),
        ("text/plain, application/openmetrics-text;q=0.5", False), ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=x", False), ("application/openmetrics-text;version=2.0.0", False),
        ("*/*", False), ("text/html", False), ("", False), (";;,=", False),
    ],
)  # fmt: skip
def test_metrics_come_in_openmetrics_to_those_who_prefer_it(harness, accept, is_open):
    reply = harness().request("GET", "/metrics", headers={"accept": accept})
    kind = "application/openmetrics-text; version=1.0.0" if is_open else "text/plain; version=0.0.4"
    assert reply.headers["content-type"].startswith(kind)
    assert reply.content.endswith(b"# EOF\n") == is_open
    assert reply.headers["vary"] == "accept"


def test_engines_are_named_for_those_with_a_key_where_there_are_keys(model_folder):
    prefill, decode = (FakeEngineClient([]) for _ in range(2))
    client = PairedEngineClient([prefill], [decode], min_tokens=4, max_replays=2, metrics=Metrics())
    names = {"prefill-0": "ready", "decode-0": "ready"}
    launcher = FakeLauncherChannel()
    assert Harness(model_folder, client, launcher).get("/health").json() == {"status": "ok", "engines": names}
    hashes = read_key_hashes(["secret"], file=None, environment={})
    with serving(Harness(model_folder, client, launcher, api_key_hashes=hashes).app) as url:
        for key, more in ((None, {}), ("wrong", {}), ("secret", {"engines": names})):
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            for path in ("/health", "/ping"):
                reply = httpx.get(f"{url}{path}", headers=headers)
                assert (reply.status_code, reply.json()) == (200, {"status": "ok", **more})
