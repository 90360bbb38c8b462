"""The door on a fake engine: without a key nothing but the state is told, on every path and method."""

import asyncio
import logging

import pytest

from server.config.api_keys import KeyRing, read_key_hashes
from server.errors import MissingRole
from server.http.auth import KeyGuard, RefusalLog
from tests.support.fakes import FakeLauncherChannel
from tests.unit.server.conftest import CHAT, USER_HI, check_error

pytestmark = pytest.mark.slow

HASHES = read_key_hashes(["secret-one", "secret-two"], file=None, environment={})
BODY = {"model": "tiny", "messages": USER_HI}


@pytest.fixture
def guarded(harness):
    return harness(api_key_hashes=HASHES)


# rule: Security: With a key set, everything but health, ready and version needs one
@pytest.mark.parametrize("path", ["/", "/health", "/ping", "/ready", "/version", "/kv", "/docs"])
def test_the_state_is_told_without_a_key(guarded, path):
    assert guarded.get(path).status_code == 200


# rule: Errors: 401 with `WWW-Authenticate`
# rule: Security: With a key set, everything but health, ready and version needs one
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", CHAT), ("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/tiny"),
        ("GET", "/metrics"), ("GET", "/openapi.json"),
        ("GET", "/tokenizer_info"), ("GET", "/no/such/route"),
        ("GET", CHAT), ("POST", "/health"), ("DELETE", "/ready"), ("GET", "/health/"), ("GET", "http://quire//health"),
        ("GET", "/health/../metrics"), ("GET", "/metrics?path=/health"), ("GET", "/healthz"), ("OPTIONS", CHAT),
        ("TRACE", "/version"),
    ],
)  # fmt: skip
def test_everything_else_is_a_401_that_tells_nothing(guarded, method, path):
    reply = guarded.get(path, method)
    error = check_error(reply, 401, "invalid_api_key")
    assert error["type"] == "invalid_request_error"
    assert reply.headers["www-authenticate"] == "Bearer"
    assert guarded.get("/no/such/route", method).json() == reply.json()  # known and unknown paths look the same
    assert guarded.client.submitted == []


def test_head_gets_no_body(guarded):
    reply = guarded.get("/metrics", "HEAD")
    assert (reply.status_code, reply.content) == (401, b"")


# rule: Security: `Authorization: Bearer` or `x-api-key`
@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer secret-one"}, {"authorization": "bearer  secret-two"}, {"x-api-key": "secret-two"},
        {"authorization": "Bearer wrong", "x-api-key": "secret-one"},
    ],
)  # fmt: skip
def test_a_known_key_is_let_in(guarded, headers):
    assert guarded.post(CHAT, BODY, headers=headers).status_code == 200


# rule: Security: `Authorization: Bearer` or `x-api-key`
@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer wrong"}, {"authorization": "Bearer"}, {"authorization": "secret-one"},
        {"authorization": "Basic secret-one"}, {"authorization": "Bearer secret-one2"}, {"x-api-key": ""},
        {"x-api-key": "Bearer secret-one"}, {"authorization": "Bearer secret-oné".encode("latin-1")},
        {"cookie": "x-api-key=secret-one"}, {"authorization": f"Bearer {HASHES[0]}"},
    ],
)  # fmt: skip
def test_any_other_is_not(guarded, headers):
    check_error(guarded.post(CHAT, BODY, headers=headers), 401, "invalid_api_key")


def test_a_refused_post_counts_as_rejected(guarded):
    guarded.post(CHAT, BODY)
    guarded.get("/v1/models")
    assert guarded.metrics.drain().counters["requests_rejected_total", "invalid"] == 1


def test_with_a_key_an_unknown_route_is_a_404_again(guarded):
    headers = {"x-api-key": "secret-one"}
    check_error(guarded.post("/no/such/route", {}, headers=headers), 404, "not_found")
    check_error(guarded.post("/health", {}, headers=headers), 405, "method_not_allowed")


# rule: Security: The Host header grants no access
@pytest.mark.parametrize("host", ["/health", "localhost/health", "quire@/ready"])
def test_the_host_header_opens_no_door(guarded, host):
    check_error(guarded.post(CHAT, BODY, headers={"host": host}), 401, "invalid_api_key")


def test_an_unread_body_over_the_limit_is_still_a_401(harness):
    app = harness(api_key_hashes=HASHES, max_body_bytes=10)
    check_error(app.post(CHAT, BODY), 401, "invalid_api_key")


# rule: Security: Two keys share no cached prefix
def test_keys_share_no_cached_prefix(guarded):
    for headers in ({"x-api-key": "secret-one"}, {"x-api-key": "secret-two"}):
        for salt in (None, "mine"):
            guarded.post(CHAT, BODY | {"cache_salt": salt}, headers=headers)
    salts = [request.cache_salt for request in guarded.client.submitted]
    assert len(set(salts)) == 4
    guarded.post(CHAT, BODY | {"cache_salt": "mine"}, headers={"authorization": "Bearer secret-one"})
    assert guarded.client.submitted[-1].cache_salt == salts[1]


# rule: Security: No key and no text in logs and errors
def test_no_key_is_logged_or_answered(guarded, caplog):
    caplog.set_level(logging.DEBUG)
    replies = [guarded.post(CHAT, BODY, headers={"x-api-key": key}) for key in ("secret-one", "wrong-key-here")]
    for secret in ("secret-one", "wrong-key-here", *HASHES):
        assert secret not in caplog.text
        assert not any(secret in reply.text + str(reply.headers) for reply in replies)
    assert "401" in caplog.text


# rule: Security: A refused key is logged with address and route, one in a second at most
def test_a_refused_key_leaves_one_line_a_second_with_address_and_route(guarded, caplog):
    caplog.set_level(logging.WARNING)
    for _ in range(5):
        guarded.request("GET", "/v1/models?key=in-the-query", headers={"x-api-key": "guess-123"})
    (line,) = (record.message for record in caplog.records if "access refused" in record.message)
    assert line == "access refused code=invalid_api_key client=127.0.0.1 method=GET path=/v1/models not_logged_before=0"
    assert not any(text in caplog.text for text in ("guess", "in-the-query"))
    assert guarded.get("/health").status_code == 200  # no line


def test_lines_of_refusals_tell_how_many_there_were_between(caplog):
    times_s = iter((100.0, 100.5, 100.9, 101.0, 102.5))
    log = RefusalLog(lambda: next(times_s))
    scope = {"client": None, "method": "POST", "path": "/a\nb" + "x" * 200}
    for _ in range(5):
        log.refuse(scope, MissingRole("no"))
    assert [record.message.rpartition("=")[2] for record in caplog.records] == ["0", "2", "0"]
    assert caplog.messages[0].startswith("access refused code=missing_role client=- method=POST path=/a?bxxx")


def test_the_schema_says_that_a_key_is_needed(guarded, harness):
    headers = {"x-api-key": "secret-one"}
    document = guarded.post("/openapi.json", headers=headers)
    assert document.status_code == 405
    assert harness().get("/openapi.json").json().get("security") is None
    assert guarded.app.openapi()["security"] == [{"bearer": []}, {"x-api-key": []}]


# rule: Security: CORS is off unless asked for
def test_a_browsers_preflight_needs_no_key_and_only_its_origin_is_named(harness):
    app = harness(api_key_hashes=HASHES, cors_origins=["https://chat.example.org"])
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    preflight = app.request("OPTIONS", CHAT, headers={"origin": "https://chat.example.org", **asks})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example.org"
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    stranger = app.request("OPTIONS", CHAT, headers={"origin": "https://evil.example.org", **asks})
    assert "access-control-allow-origin" not in stranger.headers
    refused = app.post(CHAT, BODY, headers={"origin": "https://chat.example.org"})
    check_error(refused, 401, "invalid_api_key")  # which the page may read
    assert refused.headers["access-control-allow-origin"] == "https://chat.example.org"
    answer = app.post(CHAT, BODY, headers={"origin": "https://chat.example.org", "x-api-key": "secret-one"})
    assert answer.status_code == 200
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    # what the clients of OpenAI and Anthropic read in a browser, too
    assert {"x-request-id", "request-id", "x-should-retry", "retry-after"} <= set(exposed)


def test_a_star_lets_every_page_call_without_credentials(harness):
    reply = harness(cors_origins=["*"]).post(CHAT, BODY, headers={"origin": "https://any.example.org"})
    assert reply.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in reply.headers


# rule: Security: CORS is off unless asked for
def test_by_default_no_page_may_call(harness):
    app = harness()
    reply = app.post(CHAT, BODY, headers={"origin": "https://any.example.org"})
    assert not any(name.startswith("access-control") for name in reply.headers)
    ask = {"origin": "https://any.example.org", "access-control-request-method": "POST"}
    check_error(app.request("OPTIONS", CHAT, headers=ask), 405, "method_not_allowed")


def test_behind_a_proxy_routes_are_found_with_the_prefix_and_without(harness):
    app = harness(root_path="/llm", api_key_hashes=HASHES)
    for path in ("/llm/health", "/health", "/llm/version"):
        assert app.get(path).status_code == 200
    check_error(app.get("/llm/metrics"), 401, "invalid_api_key")
    check_error(app.get("/llmhealth"), 401, "invalid_api_key")
    document = app.request("GET", "/openapi.json", headers={"x-api-key": "secret-one"}).json()
    assert document["servers"] == [{"url": "/llm"}]
    assert app.post("/llm" + CHAT, BODY, headers={"x-api-key": "secret-one"}).status_code == 200


# rule: Errors: Anthropic's paths have Anthropic's errors, with --root-path as well
@pytest.mark.parametrize("path", ["/v1/messages", "/llm/v1/messages", "/llm/v1/messages/count_tokens"])
def test_behind_a_proxy_anthropics_paths_keep_their_form_of_errors(harness, path):
    app = harness(root_path="/llm", api_key_hashes=HASHES, engine={"script": lambda request: 1 / 0})
    key = {"x-api-key": "secret-one"}
    message = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    replies = [app.post(path, BODY), app.post(path, {}, headers=key), app.request("GET", path, headers=key)]
    replies += [app.post(path, message, headers=key)] if path.endswith("messages") else []
    assert [reply.status_code for reply in replies] == [401, 400, 405, 500][: len(replies)]
    for reply in replies:
        body = reply.json()
        assert body["type"] == "error"
        assert body["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]


# rule: Security: A key of the file may have roles: inference, metrics, admin, priority
@pytest.mark.parametrize(
    ("roles", "allowed"),
    [
        ([], set()), (["metrics"], {"/metrics"}), (["admin"], {"/kv/snapshot"}),
        (["inference"], {"/v1/models", CHAT}), (["priority"], set()),
        (["inference", "metrics", "admin"], {"/metrics", "/kv/snapshot", "/v1/models", CHAT}),
    ],
)  # fmt: skip
def test_a_key_opens_the_routes_of_its_roles_alone(harness, roles, allowed):
    app = harness(api_key_hashes=HASHES, api_key_roles={HASHES[1]: roles})
    for key in ("secret-one", "secret-two"):
        headers = {"x-api-key": key}
        for path in ("/metrics", "/kv/snapshot", "/v1/models", CHAT):
            reply = app.post(path, BODY, headers=headers) if path == CHAT else app.request("GET", path, headers=headers)
            if key == "secret-one" or path in allowed:
                assert reply.status_code == (503 if path == "/kv/snapshot" else 200)
            else:
                check_error(reply, 403, "missing_role")
        check_error(app.request("GET", "/no/such", headers=headers), 404, "not_found")
        assert app.request("GET", "/docs", headers=headers).status_code == 200
        assert app.request("HEAD", "/health", headers=headers).status_code == 200


def test_roles_change_with_the_keys(harness):
    launcher = FakeLauncherChannel()
    app = harness(api_key_hashes=HASHES, launcher=launcher)
    headers = {"x-api-key": "secret-one"}
    assert app.request("GET", "/metrics", headers=headers).status_code == 200
    launcher.key_hashes, launcher.key_roles = HASHES, {HASHES[0]: ["inference"]}
    check_error(app.request("GET", "/metrics", headers=headers), 403, "missing_role")


# rule: Security: Without a key, Host and Origin must be loopback names or allowed ones
@pytest.mark.parametrize(
    "headers",
    [
        {"host": "localhost:8000"}, {"host": "LOCALHOST."}, {"host": "127.0.0.1"}, {"host": "127.9.8.7:1"},
        {"host": "[::1]:8000"}, {"host": "quire.test:80"}, {"host": "localhost", "origin": "http://localhost:3000"},
        {"host": "localhost", "origin": "http://127.0.0.1:8000"}, {"host": "localhost", "origin": "http://[::1]"},
        {"host": "localhost", "origin": "https://quire.test"}, {"host": "localhost", "origin": "https://chat.test"},
    ],
)  # fmt: skip
def test_without_keys_known_hosts_and_origins_are_served(harness, headers):
    app = harness(allowed_hosts=["quire.test"], cors_origins=["https://chat.test"])
    assert app.post(CHAT, BODY, headers=headers).status_code == 200
    assert app.request("GET", "/", headers={**headers, "accept": "text/html"}).status_code == 200


# rule: Security: Without a key, Host and Origin must be loopback names or allowed ones
@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.test"}, {"host": "evil.test:8000"}, {"host": "localhost.evil.test"}, {"host": "10.0.0.1"},
        {"host": "127.0.0.1.evil.test"}, {"host": "[::2]"}, {"host": "localhost@evil.test"}, {"host": "[::1]evil.test"},
        {"host": "localhost", "origin": "http://evil.test"}, {"host": "localhost", "origin": "null"},
        {"host": "localhost", "origin": "https://chat.test.evil.test"}, {"host": "localhost", "origin": ""},
    ],
)  # fmt: skip
def test_without_keys_a_page_of_another_host_gets_nothing(harness, headers):
    app = harness(allowed_hosts=["quire.test"], cors_origins=["https://chat.test"])
    for path in ("/health", "/v1/models", "/", "/no/such"):
        reply = app.request("GET", path, headers=headers)
        check_error(reply, 403, "foreign_host")
        assert not any(name.startswith("access-control") for name in reply.headers)
    ask = {"access-control-request-method": "POST"}
    check_error(app.request("OPTIONS", CHAT, headers=headers | ask), 403, "foreign_host")


def test_a_star_in_cors_origins_allows_every_origin_but_no_host(harness):
    app = harness(allowed_hosts=[], cors_origins=["*"])
    assert app.request("GET", "/health", headers={"host": "localhost", "origin": "https://any.test"}).status_code == 200
    check_error(app.request("GET", "/health", headers={"host": "any.test"}), 403, "foreign_host")


@pytest.mark.parametrize("kind", ["lifespan", "websocket"])
def test_only_http_requests_need_a_key(kind):
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["type"])

    guard = KeyGuard(app, keys=KeyRing(HASHES), public=[], on_refusal=seen.append)
    asyncio.run(guard({"type": kind}, None, None))
    assert seen == [kind]
