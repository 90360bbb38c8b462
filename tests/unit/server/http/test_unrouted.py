"""What no route takes: a 404 names the route that was meant, a 405 all methods of the path."""

import pytest

from tests.unit.server.conftest import CHAT, COMPLETIONS, check_error


# rule: Errors: A 404 of a wrong base URL names the right path
@pytest.mark.parametrize(
    ("path", "right"),
    [
        ("/chat/completions", CHAT),
        ("/v1/v1/chat/completions", CHAT),
        ("/api/v1/chat/completions", CHAT),
        ("/api/chat", CHAT),
        ("/v1/chat", CHAT),
        ("/v1/chat/completion", CHAT),
        ("/v1/chat/completions/", CHAT),
        ("/v1/chat/compeltions", CHAT),
        ("//v1/chat/completions", CHAT),
        ("/openai/deployments/gpt-4/chat/completions", CHAT),
        ("/completions", COMPLETIONS),
        ("/completion", COMPLETIONS),
        ("/api/generate", COMPLETIONS),
        ("/models", "/v1/models"),
        ("/api/tags", "/v1/models"),
        ("/models/tiny", "/v1/models/tiny"),
        ("/messages", "/v1/messages"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/responses", "/v1/responses"),
        ("/embeddings", "/v1/embeddings"),
        ("/v1/responses/", "/v1/responses"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/metrics", "/metrics"),
        ("/healthz", "/health"),
    ],
)
def test_a_wrong_base_url_is_told_the_right_path(harness, path, right):
    app = harness()
    for method in ("GET", "POST"):
        message = check_error(app.request(method, f"http://quire{path}"), 404, "not_found")["message"]
        assert message == f"There is no route {path}: it is {right} on this server."


@pytest.mark.parametrize("path", ["/nothing", "/v2", "/favicon.ico", "/" + "x/" * 2000, "/v1/{path}"])
def test_a_path_like_no_other_is_told_nothing(harness, path):
    message = check_error(harness().request("GET", path), 404, "not_found")["message"]
    assert message == f"There is no route {path[:200]}."


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/api/pull", "a server has one model, which quire serve MODEL downloads"),
        ("/v1/audio/transcriptions", "speech is not served"),
        ("/v1/rerank", "scores of pairs are not served; POST /v1/embeddings gives vectors to compare"),
        ("/v1/responses/compact", "conversations are not compacted here"),
        ("/v1/conversations", "conversations are not stored: POST /v1/responses takes the whole conversation as input"),
        ("/props", "GET /v1/models has the model and its context length"),
        ("/v1", "it is the base URL of clients, and GET /v1/models lists the models"),
        ("/v1/", "it is the base URL of clients, and GET /v1/models lists the models"),
        ("/generate_stream", "POST /v1/completions with stream continues a text"),
        ("/models/load", "a server has one model, that of quire serve MODEL"),
        ("/flush_cache", "cached blocks make room by themselves; --no-prefix-caching of quire serve keeps none"),
        ("/abort_request", "DELETE /v1/requests/ID ends a request, as does a client that leaves"),
        ("/redoc", "GET /docs describes the API"),
        ("/v1/load_lora_adapter", "adapters are loaded at the start: quire serve MODEL --lora NAME=FOLDER"),
    ],
)
def test_a_path_of_another_server_is_told_what_is_instead(harness, path, said):
    message = check_error(harness().request("POST", f"http://quire{path}"), 404, "not_found")["message"]
    assert message == f"There is no route {path}: {said}."


def test_behind_a_prefix_the_right_path_has_it(harness):
    app = harness(root_path="/llm")
    message = check_error(app.get("/llm/chat/completions"), 404, "not_found")["message"]
    assert message.endswith(": it is /llm/v1/chat/completions on this server.")
    message = check_error(app.get("/chat/completions"), 404, "not_found")["message"]
    assert message.endswith(f": it is {CHAT} on this server.")


# rule: Errors: `Allow` has every method of the path
@pytest.mark.parametrize(
    ("path", "allow"),
    [
        (CHAT, "POST"),
        ("/v1/models", "GET, HEAD"),
        ("/v1/models/tiny", "GET, HEAD"),
        ("/v1/requests/x", "DELETE"),
        ("/v1/responses", "POST"),
        ("/v1/responses/x", "DELETE, GET, POST"),
        ("/ping", "GET, HEAD, POST"),
        ("/health", "GET, HEAD"),
        ("/kv/stream", "GET, HEAD"),
        ("/openapi.json", "GET, HEAD"),
        ("/", "GET, HEAD"),
    ],
)
def test_a_405_allows_every_method_that_the_path_takes(harness, path, allow):
    app = harness()
    for method in ("OPTIONS", "PATCH", "TRACE", "QUERY"):
        reply = app.request(method, path)
        check_error(reply, 405, "method_not_allowed")
        assert reply.headers["allow"] == allow
        assert f"accepts {allow}." in reply.json()["error"]["message"]
