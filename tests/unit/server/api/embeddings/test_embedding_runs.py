"""Runs of /v1/embeddings: inputs at once, and what ends them early."""

import asyncio
import json

import msgspec
import pytest

from tests.support.fakes import READY
from tests.unit.server.api.embeddings.conftest import EMBEDDINGS, TEXTS, embed
from tests.unit.server.conftest import check_error


# rule: Limits: Embeddings: 2,048 inputs, each within the context, tokens in all, no more at once than the engine
#     holds
def test_no_more_inputs_are_sent_than_the_engine_holds(app):
    running = app(hold=asyncio.Event())

    async def watch() -> int:
        async with running.http() as http:
            post = asyncio.create_task(http.post(EMBEDDINGS, json={"input": ["fox"] * 200}))
            while len(running.client.submitted) < 2 * READY.max_num_seqs:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
            most = len(running.client.submitted)
            running.client.hold.set()
            assert len((await post).json()["data"]) == 200
            return most

    assert asyncio.run(watch()) == 2 * READY.max_num_seqs


@pytest.mark.parametrize(("num_tokens", "most"), [(2, 3), (3, 2), (7, 1), (9, 1)])
def test_no_more_tokens_are_sent_than_the_queue_takes(app, num_tokens, most):
    running = app(hold=asyncio.Event())
    running.client.ready = msgspec.structs.replace(READY, max_queued_tokens=7)

    async def watch() -> int:
        async with running.http() as http:
            post = asyncio.create_task(http.post(EMBEDDINGS, json={"input": [[1] * num_tokens] * 9}))
            while len(running.client.submitted) < most:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
            num_sent = len(running.client.submitted)
            running.client.hold.set()
            assert len((await post).json()["data"]) == 9
            return num_sent

    assert asyncio.run(watch()) == most


def test_a_timeout_and_a_cancel_end_every_input(app):
    running = app(hold=asyncio.Event())
    check_error(embed(running, timeout=0.05), 408, "deadline_exceeded")
    assert len(running.client.aborted) == 3

    async def cancelled():
        running = app(hold=asyncio.Event())
        async with running.http() as http:
            post = asyncio.create_task(http.post(EMBEDDINGS, json={"input": TEXTS}, headers={"x-request-id": "mine"}))
            while len(running.client.submitted) < 3:
                await asyncio.sleep(0.001)
            assert (await http.delete("/v1/requests/mine")).status_code == 200
            running.client.hold.set()
            return await post

    check_error(asyncio.run(cancelled()), 409, "request_aborted")


def test_a_disconnected_client_aborts_every_input(app):
    running = app(hold=asyncio.Event())

    async def leave():
        messages = [{"type": "http.request", "body": json.dumps({"input": TEXTS}).encode(), "more_body": False}]

        async def receive():
            if messages:
                return messages.pop(0)
            while len(running.client.submitted) < 3:
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message):
            pass

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": EMBEDDINGS, "headers": headers, "query_string": b""}
        await asyncio.wait_for(running.app({**scope, "raw_path": EMBEDDINGS.encode()}, receive, send), 60)

    asyncio.run(leave())
    assert len(running.client.aborted) == 3
