"""Answers say why no more of the prompt was in the prefix cache: in a header, and in OpenAI's two forms in `cache`."""

import asyncio
from hashlib import sha256

import pytest

from engine.interface.kv_snapshot import CACHE_REASONS
from engine.interface.protocol import CacheReport
from server.api.sse import wait_watched
from server.http.routes import reply as reply_module
from tests.unit.server.conftest import CHAT, COMPLETIONS, USER_HI, stream_chunks

REPORT = CacheReport("no_checkpoint", 64, 1024, "state")
FACTS = {"reason": "no_checkpoint", "cached_tokens": 64, "matched_tokens": 1024, "kind": "state"}
HEADER = "no_checkpoint;cached=64;matched=1024;kind=state"
BODIES = {
    CHAT: {"messages": USER_HI},
    COMPLETIONS: {"prompt": "Hello"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": USER_HI, "max_tokens": 8},
}


# rule: Fields: A header says why no more of the prompt was cached, and `cache` in chats and completions
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_stream", [False, True])
def test_every_generation_has_the_header(harness, path, is_stream):
    app = harness(engine={"cache": REPORT})
    reply = app.post(path, {"model": "tiny", "stream": is_stream, **BODIES[path]})
    assert reply.status_code == 200
    assert reply.headers["x-quire-cache"] == HEADER


# rule: Fields: A header says why no more of the prompt was cached, and `cache` in chats and completions
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_whole_answers_and_the_last_chunk_have_it_as_an_object(harness, path):
    app = harness(engine={"cache": REPORT})
    assert app.post(path, {"model": "tiny", **BODIES[path]}).json()["cache"] == FACTS
    for options in ({}, {"stream_options": {"include_usage": True}}):
        text = app.post(path, {"model": "tiny", "stream": True, **options, **BODIES[path]}).text
        *before, last = stream_chunks(text)
        assert last["cache"] == FACTS
        assert all("cache" not in chunk for chunk in before)


def test_tokens_from_host_memory_are_told_if_there_are_any(harness):
    reply = harness(engine={"cache": CacheReport("all", 64, 64, None, 48)}).chat()
    assert reply.headers["x-quire-cache"] == "all;cached=64;matched=64;host=48"
    assert reply.json()["cache"]["host_tokens"] == 48


def test_tokens_from_disk_are_told_if_there_are_any(harness):
    reply = harness(engine={"cache": CacheReport("all", 64, 64, None, 48, 32)}).chat()
    assert reply.headers["x-quire-cache"] == "all;cached=64;matched=64;host=48;disk=32"
    facts = reply.json()["cache"]
    assert (facts["host_tokens"], facts["disk_tokens"]) == (48, 32)


def test_several_choices_tell_of_the_first(harness):
    reply = harness(engine={"cache": REPORT}).chat(n=3)
    assert reply.json()["cache"] == FACTS


@pytest.mark.parametrize("reason", CACHE_REASONS)
def test_each_reason_is_written(harness, reason):
    reply = harness(engine={"cache": CacheReport(reason, 0, 0)}).chat()
    assert reply.headers["x-quire-cache"] == f"{reason};cached=0;matched=0"
    assert reply.json()["cache"] == {"reason": reason, "cached_tokens": 0, "matched_tokens": 0, "kind": None}


def test_a_stream_that_begins_without_a_token_has_no_header_and_the_object_at_its_end(harness, monkeypatch):
    async def run():
        hold = asyncio.Event()
        app = harness(engine={"cache": REPORT, "hold": hold})

        async def wait_in_vain(gone, first, *, timeout_s):
            await wait_watched(gone, first, timeout_s=0.01)
            hold.set()

        monkeypatch.setattr(reply_module, "wait_watched", wait_in_vain)
        async with app.http() as http:
            return await http.post(CHAT, json={"model": "tiny", "stream": True, "messages": USER_HI})

    reply = asyncio.run(run())
    assert "x-quire-cache" not in reply.headers
    assert stream_chunks(reply.text)[-1]["cache"] == FACTS


def test_what_ends_before_its_first_token_has_neither(harness):
    reply = harness("", engine={"cache": None}).chat()
    assert "x-quire-cache" not in reply.headers
    assert "cache" not in reply.json()


@pytest.mark.parametrize("keys", [[], [sha256(b"secret").hexdigest()]])
def test_the_engine_learns_the_salt_that_the_client_would_have_without_its_own(harness, keys):
    app = harness(api_key_hashes=keys)
    for fields in ({"cache_salt": "mine"}, {}):
        body = {"model": "tiny", "messages": USER_HI, **fields}
        assert app.post(CHAT, body, headers={"authorization": "Bearer secret"}).status_code == 200
    salted, plain = app.client.submitted
    assert salted.open_salt == plain.open_salt == plain.cache_salt
    assert bool(plain.cache_salt) == bool(keys)
    assert salted.cache_salt != salted.open_salt
