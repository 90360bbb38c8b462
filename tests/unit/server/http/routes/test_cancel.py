"""DELETE /v1/requests/{id}: ends the right request with an error, whatever the kind of answer."""

import asyncio

import httpx
import pytest

from server.config.api_keys import read_key_hashes
from tests.unit.server.conftest import CHAT, COMPLETIONS, USER_HI, check_error, stream_chunks

BODIES = {CHAT: {"messages": USER_HI}, COMPLETIONS: {"prompt": ["a", "b"], "n": 2}}


async def start(app, http: httpx.AsyncClient, path: str, **more) -> asyncio.Task:
    """Begin a request that the engine holds back; return once the engine has it."""
    body = BODIES[path] | more.pop("body", {})
    task = asyncio.create_task(http.post(path, json=body, **more))
    while not app.client.submitted:
        await asyncio.sleep(0.005)
    return task


def held(harness, **config):
    hold = asyncio.Event()
    app = harness(engine={"hold": hold}, **config)
    app.hold = hold
    return app


# rule: Endpoints: A running request can be cancelled
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_request_is_cancelled_by_the_id_it_brought(harness, path):
    async def scenario() -> None:
        app = held(harness)
        async with app.http() as http:
            task = await start(app, http, path, headers={"x-request-id": "mine/1"})
            reply = await http.delete("/v1/requests/mine/1")
            assert (reply.status_code, reply.json()) == (200, {"id": "mine/1", "cancelled": True})
            app.hold.set()
            error = check_error(await task, 409, "request_aborted")  # which no client sends again by itself
            assert error["message"] == "The request was cancelled."
            assert {request.request_id for request in app.client.submitted} == set(app.client.aborted)
            check_error(await http.delete("/v1/requests/mine/1"), 404, "request_not_found")

    asyncio.run(scenario())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.slow
def test_a_stream_ends_with_an_error_event_and_done(harness, path):
    async def scenario() -> None:
        app = held(harness)
        async with app.http() as http:
            task = await start(app, http, path, body={"stream": True})
            answer_id = app.client.submitted[0].request_id.rpartition("-")[0]
            await asyncio.sleep(1.1)  # past the grace in which an error is a status: the stream has begun
            assert (await http.delete(f"/v1/requests/{answer_id}")).json()["cancelled"]
            app.hold.set()
            chunks = stream_chunks((await task).text)
            assert chunks[-1]["error"]["code"] == "request_aborted"
            assert not any(choice["finish_reason"] for chunk in chunks[:-1] for choice in chunk["choices"])

    asyncio.run(scenario())


def test_other_requests_go_on(harness):
    async def scenario() -> None:
        app = held(harness)
        async with app.http() as http:
            task = await start(app, http, CHAT, headers={"x-request-id": "a"})
            other = asyncio.create_task(http.post(CHAT, json=BODIES[CHAT], headers={"x-request-id": "ab"}))
            while len(app.client.submitted) < 2:
                await asyncio.sleep(0.005)
            await http.delete("/v1/requests/a")
            app.hold.set()
            assert (await task).status_code == 409
            assert (await other).json()["choices"][0]["message"]["content"] == "Hello, world!"

    asyncio.run(scenario())


def test_nobody_cancels_the_requests_of_another_key(harness):
    async def scenario() -> None:
        app = held(harness, api_key_hashes=read_key_hashes(["one", "two"], file=None, environment={}))
        async with app.http() as http:
            task = await start(app, http, CHAT, headers={"x-request-id": "a", "x-api-key": "one"})
            check_error(await http.delete("/v1/requests/a"), 401, "invalid_api_key")
            refused = await http.delete("/v1/requests/a", headers={"x-api-key": "two"})
            check_error(refused, 404, "request_not_found")
            assert (await http.delete("/v1/requests/a", headers={"x-api-key": "one"})).status_code == 200
            app.hold.set()
            assert (await task).status_code == 409

    asyncio.run(scenario())


def test_a_request_of_another_worker_counts_as_found(harness):
    app = harness()
    app.launcher.elsewhere = ["cmpl-elsewhere"]
    assert app.get("/v1/requests/cmpl-elsewhere", "DELETE").json() == {"id": "cmpl-elsewhere", "cancelled": True}
    check_error(app.get("/v1/requests/nobody", "DELETE"), 404, "request_not_found")


def test_one_that_is_still_being_read_never_reaches_the_engine(harness):
    async def scenario() -> None:
        app = harness()
        sent = asyncio.Event()

        async def slow_body():
            yield b'{"prompt": '
            await sent.wait()
            yield b'"a"}'

        async with app.http() as http:
            headers = {"x-request-id": "early", "content-type": "application/json"}
            task = asyncio.create_task(http.post(COMPLETIONS, content=slow_body(), headers=headers))
            for _ in range(100):
                await asyncio.sleep(0.005)
                reply = await http.delete("/v1/requests/early")
                if reply.status_code == 200:
                    break
            assert reply.status_code == 200
            sent.set()
            check_error(await task, 409, "request_aborted")
            assert app.client.submitted == []

    asyncio.run(scenario())
