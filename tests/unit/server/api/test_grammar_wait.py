"""While its grammar is tried a request can time out, be cancelled, and be left by its client."""

import asyncio
import json
import threading

import pytest

from engine.interface.protocol import GrammarVerdict
from server.structured_output.compile_check import GrammarChecker
from tests.unit.server.conftest import CHAT, COMPLETIONS, USER_HI, check_error

BODIES = {CHAT: {"messages": USER_HI}, COMPLETIONS: {"prompt": "a"}}
PATHS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


class Slow:
    """Compiles nothing before open is set."""

    def __init__(self):
        self.open = threading.Event()
        self.asked = []
        self.given_up = []

    async def ask(self, spec):
        self.asked.append(spec.source)
        try:
            while not self.open.is_set():
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.given_up.append(spec.source)
            raise
        return GrammarVerdict(), float("inf")


@pytest.fixture
def slow(monkeypatch):
    slow = Slow()
    monkeypatch.setattr(GrammarChecker, "_ask", lambda self, spec: slow.ask(spec))
    yield slow
    slow.open.set()


def body_of(path, regex="a", **more):
    return BODIES[path] | {"structured_outputs": {"regex": regex}} | more


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


# rule: Limits: A grammar compiles within 5 s, in a process that can be killed
@PATHS
@pytest.mark.parametrize("is_stream", [False, True])
def test_the_wait_for_a_grammar_counts_towards_the_timeout(harness, slow, path, is_stream):
    async def scenario() -> None:
        app = harness("a")
        async with app.http() as http:
            reply = await http.post(path, json=body_of(path, timeout=0.2, stream=is_stream))
            error = check_error(reply, 408, "deadline_exceeded")
            assert error["message"] == "The request took longer than its limit of 0.2 s."
            assert not app.client.submitted
            slow.open.set()
            assert (await http.post(path, json=body_of(path, timeout=20))).status_code == 200

    asyncio.run(scenario())


def test_the_servers_own_limit_holds_too(harness, slow):
    async def scenario() -> None:
        async with harness("a", request_timeout_s=0.2).http() as http:
            check_error(await http.post(CHAT, json=body_of(CHAT)), 408, "deadline_exceeded")
            slow.open.set()

    asyncio.run(scenario())


@PATHS
def test_a_request_whose_grammar_is_tried_can_be_cancelled(harness, slow, path):
    async def scenario() -> None:
        app = harness("a")
        async with app.http() as http:
            task = asyncio.create_task(http.post(path, json=body_of(path), headers={"x-request-id": "mine"}))
            await until(lambda: slow.asked)
            assert (await http.delete("/v1/requests/mine")).json()["cancelled"]
            error = check_error(await task, 409, "request_aborted")
            assert error["message"] == "The request was cancelled."
            assert not app.client.submitted
            slow.open.set()

    asyncio.run(scenario())


@PATHS
def test_the_grammar_of_a_client_that_left_is_given_up(harness, slow, path):
    async def scenario() -> None:
        app = harness("a")
        async with app.http() as http:
            first = asyncio.create_task(http.post(path, json=body_of(path, "a")))
            await until(lambda: slow.asked)
            await asyncio.wait_for(post_and_leave(app.app, path, body_of(path, "left")), 60)
            slow.open.set()
            assert (await first).status_code == 200
            assert (await http.post(path, json=body_of(path, "c"))).status_code == 200
            assert len(slow.asked) == 3
            (given_up,) = slow.given_up
            assert "left" in given_up

    asyncio.run(scenario())


async def post_and_leave(app, path, body) -> None:
    """Send a request and disconnect; returns when the app is done with it."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def send(message):
        pass

    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"}
    scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "server": ("quire", 80)}
    await app({**scope, "client": ("127.0.0.1", 1), "headers": [(b"content-type", b"application/json")]}, receive, send)
