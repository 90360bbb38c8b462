"""Fields that shape how a request is served: each reaches the engine or the answer, as documented."""

import asyncio

import pytest

from server.config.api_keys import read_key_hashes
from tests.unit.server.conftest import (
    CHAT,
    COMPLETIONS,
    USER_HI,
    TooLateAfterOneToken,
    chat_text,
    check_error,
    stream_chunks,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_priority_and_salt_reach_the_engine(harness, path):
    app = harness()
    body = {"messages": USER_HI} if path == CHAT else {"prompt": "a"}
    app.post(path, body | {"priority": -3, "cache_salt": "mine", "n": 2})
    app.post(path, body)
    assert [(r.priority, r.cache_salt) for r in app.client.submitted] == [(-3, "mine")] * 2 + [(0, "")]


# rule: Fields: `priority` acts for those that --priority names
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/embeddings"])
@pytest.mark.parametrize(
    ("who", "num_keys", "roles", "acts"),
    [
        (None, 0, None, True), (None, 1, None, True), (None, 2, None, False),
        (None, 2, ["inference", "priority"], False), ("off", 0, None, False),
        ("off", 1, ["inference", "priority"], False), ("all", 2, None, True),
        ("keys", 0, None, False), ("keys", 2, None, False), ("keys", 2, ["inference", "priority"], True),
    ],
)  # fmt: skip
def test_priority_is_ignored_and_reported_unless_the_request_may_set_it(harness, path, who, num_keys, roles, acts):
    hashes = read_key_hashes(["one", "two"][:num_keys], file=None, environment={})
    granted = {hashes[0]: roles} if roles else {}
    body = {CHAT: {"messages": USER_HI}, COMPLETIONS: {"prompt": "a"}}.get(path, {"input": "a"})
    for strict in (False, True):
        app = harness(priority=who, api_key_hashes=hashes, api_key_roles=granted, pooling="mean", strict=strict)
        reply = app.post(path, body | {"priority": -3}, headers={"x-api-key": "one"})
        assert reply.status_code == (400 if strict and not acts else 200)
        if acts or not strict:
            assert reply.headers.get("x-quire-ignored") == (None if acts else "priority")
            assert [request.priority for request in app.client.submitted] == [-3 if acts else 0]
        assert "x-quire-ignored" not in app.post(path, body | {"priority": 0}, headers={"x-api-key": "one"}).headers


# rule: Fields: `timeout` acts
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_timeout_is_a_408_and_ends_the_request(harness, path, stream):
    app = harness(engine={"hold": asyncio.Event()})
    body = {"messages": USER_HI} if path == CHAT else {"prompt": "a"}
    error = check_error(app.post(path, body | {"timeout": 0.1, "stream": stream}), 408, "deadline_exceeded")
    assert "0.1 s" in error["message"]
    assert app.client.aborted == [app.client.submitted[0].request_id]


# rule: Fields: `timeout` acts
def test_the_smaller_of_both_timeouts_counts(harness):
    app = harness(engine={"hold": asyncio.Event()}, request_timeout_s=0.1)
    assert "0.1 s" in check_error(app.chat(timeout=60), 408, "deadline_exceeded")["message"]


def test_a_timeout_after_the_first_byte_is_an_event(harness, monkeypatch):
    app = harness(engine={"hold": TooLateAfterOneToken(monkeypatch)})
    chunks = stream_chunks(app.chat(timeout=600, stream=True).text)
    assert chat_text(chunks[:-1])
    assert chunks[-1]["error"]["code"] == "deadline_exceeded"
    assert app.client.aborted


# rule: Fields: `stream_options` puts usage at the end, or in every chunk
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_continuous_usage_is_in_every_chunk_of_both_routes(harness, path):
    app = harness("Hello, world!")
    body = {"messages": USER_HI} if path == CHAT else {"prompt": "a"}
    options = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    chunks = stream_chunks(app.post(path, body | options).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == len(app.ids("Hello, world!"))
    assert all(chunk["choices"] for chunk in chunks)


# rule: Limits: The queue is bounded by requests and tokens, and refuses at once
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_full_queue_refuses_before_the_body_is_read(harness, path):
    app = harness()
    app.client.is_full = True
    reply = app.post(path, content=b"no JSON", headers={"content-type": "application/json"})
    check_error(reply, 429, "overloaded")
    assert int(reply.headers["retry-after"]) >= 1
    assert app.post("/tokenize", {"prompt": "a"}).status_code == 200
    assert app.get("/ready").status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_best_of_may_only_say_what_n_says(harness, path):
    app = harness()
    body = {"messages": USER_HI} if path == CHAT else {"prompt": "a"}
    assert len(app.post(path, body | {"n": 2, "best_of": 2}).json()["choices"]) == 2
    assert app.post(path, body | {"best_of": 1}).status_code == 200
    for fields in ({"best_of": 2}, {"n": 2, "best_of": 3}, {"n": 2, "best_of": 1}):
        assert check_error(app.post(path, body | fields), 400, "unsupported_feature")["param"] == "best_of"


# rule: Fields: A suffix is refused
def test_a_suffix_is_refused(harness):
    assert check_error(harness().complete(suffix="end"), 400, "unsupported_feature")["param"] == "suffix"
    assert harness().complete(suffix="").status_code == 200


@pytest.mark.parametrize(("top_logprobs", "expected"), [(0, 0), (3, 3), (None, 0)])
def test_chat_logprobs_have_bytes_and_the_chosen_one_among_the_top(harness, top_logprobs, expected):
    app = harness("日本")
    content = app.chat(logprobs=True, top_logprobs=top_logprobs).json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "日本"
    for entry in content:
        assert len(entry["top_logprobs"]) == expected
        if expected:
            first = entry["top_logprobs"][0]
            assert (first["token"], first["bytes"], first["logprob"]) == (
                entry["token"], entry["bytes"], entry["logprob"],
            )  # fmt: skip
