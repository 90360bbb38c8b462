"""The parts of a stream that the worker writes past uvicorn and h11 arrive as HTTP, and wait for a slow client."""

import asyncio
import json
import re
import socket
import threading
from urllib.parse import urlparse

import h11
import pytest

from server.api.sse import BODY_WRITER
from server.http.h11_protocol import HttpProtocol, _JoinedWrites
from tests.unit.server.conftest import CHAT, COMPLETIONS, USER_HI, serving

PART = b"x" * 65_536
STREAM_HEADERS = [(b"content-type", b"text/event-stream"), (b"x-request-id", b"a")]
HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]}
TEXT = 'Schöne Grüße aus "Köln",\n日本語 😀👍🏽 and so on. '
BODIES = {
    CHAT: {"messages": USER_HI},
    COMPLETIONS: {"prompt": "Hello"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": USER_HI, "max_tokens": 64},
}


def connect(url: str) -> socket.socket:
    return socket.create_connection((urlparse(url).hostname, urlparse(url).port), timeout=60)


def post(path: str, body: bytes = b"{}", *, version: str = "1.1", head: str = "Connection: close\r\n") -> bytes:
    lines = f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n{head}"
    return f"{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body


def read(connection: socket.socket) -> tuple[h11.Response, bytes]:
    """Read one answer as h11 does, which raises for anything that is not HTTP."""
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
    parser.send(h11.EndOfMessage())
    head, body = None, []
    while True:
        match event := parser.next_event():
            case h11.Response():
                head = event
            case h11.Data():
                body.append(bytes(event.data))
            case h11.EndOfMessage():
                assert head is not None
                return head, b"".join(body)
            case _:
                assert event is h11.NEED_DATA
                parser.receive_data(connection.recv(65_536))


def shown(stream: bytes) -> list:
    """Return the events, without what differs between two answers."""
    events = []
    for event in stream.decode().split("\n\n"):
        for line in event.splitlines():
            data = line.removeprefix("data: ")
            if line != data and data != "[DONE]":
                events.append(without_ids(json.loads(data)))
    return events


def without_ids(value: object) -> object:
    if isinstance(value, dict):
        return {
            name: without_ids(item)
            for name, item in value.items()
            if name not in ("id", "item_id", "created", "created_at", "completed_at", "timings")
        }
    return [without_ids(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_over_a_socket_is_the_one_of_any_asgi_server(harness, path):
    app = harness(TEXT * 3)
    fields = {"model": "tiny", "stream": True, **BODIES[path]}
    whole = shown(app.post(path, fields).content)
    assert len(whole) > 10
    with serving(app.app) as url:
        for version, framing in (("1.1", b"chunked"), ("1.0", None)):
            with connect(url) as connection:
                connection.sendall(post(path, json.dumps(fields).encode(), version=version))
                head, body = read(connection)
            assert dict(head.headers).get(b"transfer-encoding") == framing
            assert shown(body) == whole


def test_two_streams_on_one_connection_do_not_mix(harness):
    app = harness(TEXT)
    body = json.dumps({"model": "tiny", "messages": USER_HI, "stream": True}).encode()
    with serving(app.app) as url, connect(url) as connection:
        connection.sendall(post(CHAT, body, head="") + post(CHAT, body))  # the second arrives with the first
        data = b""
        while part := connection.recv(65_536):
            data += part
    streams = data.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert [stream.count(b"[DONE]") for stream in streams] == [1, 1]
    ids = [{line.split(b'"')[3] for line in stream.splitlines() if b'"id"' in line} for stream in streams]
    assert [len(found) for found in ids] == [1, 1]
    assert ids[0] != ids[1]


class Writing:
    """An ASGI app that writes to a client until it lags, and tells what the writer said."""

    def __init__(self) -> None:
        self.lags = threading.Event()
        self.num_written = 0
        self.offers: list[bool] = []
        self.late: bool | None = None

    async def __call__(self, scope, receive, send) -> None:
        offer = scope.get("extensions", {}).get(BODY_WRITER)
        self.offers.append(offer is not None)
        if offer is None:
            await send(HEAD)
            await send({"type": "http.response.body"})
            return
        write = offer["write"]
        assert not write(PART), "the head was not sent yet"
        await send(HEAD)
        assert write(b""), "a part without bytes is no end"
        while write(PART):
            self.num_written += 1
            assert self.num_written < 2000, "nothing stops it"
        self.lags.set()
        if scope["path"] == "/gone":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.late = write(PART)
            return
        await send({"type": "http.response.body", "body": PART, "more_body": True})
        assert write(PART), "the client has caught up"
        await send({"type": "http.response.body"})
        assert not write(PART), "the answer is complete"


@pytest.fixture
def app():
    return Writing()


def test_a_client_that_lags_stops_the_writer_until_it_has_read(app):
    with serving(app) as url, connect(url) as connection:
        connection.sendall(post("/"))
        assert app.lags.wait(60)
        _, body = read(connection)
    assert body == PART * (app.num_written + 2)


def test_what_is_written_to_a_client_that_left_is_dropped(app):
    with serving(app) as url:
        with connect(url) as connection:
            connection.sendall(post("/gone"))
            assert app.lags.wait(60)
        asyncio.run(wait_until(lambda: app.late is not None))
    assert app.late


@pytest.mark.parametrize("request_", [b"GET / HTTP/1.1", b"HEAD / HTTP/1.1", b"POST / HTTP/1.0"])
def test_only_posts_of_http_1_1_have_the_writer(app, request_):
    with serving(app) as url, connect(url) as connection:
        connection.sendall(request_ + b"\r\nHost: x\r\nConnection: close\r\n\r\n")
        while connection.recv(65_536):
            pass
    assert app.offers == [False]


async def wait_until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


class Written(asyncio.Transport):
    """Records what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.parts.append(bytes(data))

    def close(self) -> None:
        self.parts.append(b"closed")

    def is_closing(self) -> bool:
        return b"closed" in self.parts


def test_a_head_is_written_with_what_follows_in_the_same_turn_of_the_loop_or_alone_at_its_end():
    async def run() -> list[bytes]:
        transport = Written()
        joined = _JoinedWrites(transport, asyncio.get_running_loop())
        joined.write(b"head")
        joined.write_now(b" first")
        joined.write_now(b"second")
        joined.write(b"end")
        joined.write(b" of it")
        assert transport.parts == [b"head first", b"second"]
        await asyncio.sleep(0)
        joined.write(b"last")
        joined.close()
        await asyncio.sleep(0)
        return transport.parts

    assert asyncio.run(run()) == [b"head first", b"second", b"end of it", b"last", b"closed"]


def test_what_is_held_while_the_connection_closes_is_lost_without_an_error():
    """uvloop raises for a write to a closed transport, in a callback whose traceback would be in the log."""

    async def run() -> tuple[list[bytes], bool]:
        transport = Written()
        joined = _JoinedWrites(transport, asyncio.get_running_loop())
        joined.write(b"late")
        transport.close()
        await asyncio.sleep(0)
        return transport.parts, joined.is_closing()

    assert asyncio.run(run()) == ([b"closed"], True)


@pytest.mark.parametrize("path", BODIES)
def test_the_first_write_of_a_stream_has_its_head_and_its_first_token(harness, path, monkeypatch):
    writes: list[bytes] = []
    write_now = _JoinedWrites.write_now

    def note(self, data):
        writes.append(self._held + data)
        write_now(self, data)

    monkeypatch.setattr(_JoinedWrites, "write_now", note)
    app = harness(TEXT)
    with serving(app.app) as url, connect(url) as connection:
        connection.sendall(post(path, json.dumps({"model": "tiny", "stream": True, **BODIES[path]}).encode()))
        _, body = read(connection)
    assert writes[0].startswith(b"HTTP/1.1 200")
    assert b"Sch" in writes[0]
    assert body.startswith(writes[0].partition(b"\r\n\r\n")[2].partition(b"\r\n")[2][:200])


HEADS = [
    STREAM_HEADERS,
    [],
    [(b"x-note", "grün".encode("latin-1")), (b"x-empty", b"")],
    [*STREAM_HEADERS, (b"connection", b"close")],
    [*STREAM_HEADERS, (b"content-length", b"2")],
    [(b"Content-Length", b"2")],
    [(b"x-note", b"a\r\nset-cookie: b")],  # h11 refuses it
    [(b"x-note", b"a\n")],
    [(b"x-note", b"a ")],
    [(b"x-note", b"a\0b"), (b"x-more", b"c\0d")],
    [(b"x note", b"a")],
    [(b"x: note", b"a")],
    [(b"", b"a")],
]


class Streaming:
    """An ASGI app that streams two bytes behind one of HEADS, which the path names, with a status."""

    async def __call__(self, scope, receive, send) -> None:
        place, status = map(int, scope["path"].strip("/").split("/"))
        await send({"type": "http.response.start", "status": status, "headers": HEADS[place]})
        for part in (b"o", b"k"):
            await send({"type": "http.response.body", "body": part, "more_body": part == b"o"})


@pytest.mark.parametrize(("method", "version"), [("POST", "1.1"), ("POST", "1.0"), ("GET", "1.1")])
@pytest.mark.parametrize("end", ["", "Connection: close\r\n"])
def test_a_streams_head_is_that_of_h11(monkeypatch, method, version, end):
    def answers() -> list[bytes]:
        found = []
        with serving(Streaming()) as url:
            for place in range(len(HEADS)):
                for status in (200, 400):
                    with connect(url) as connection:
                        lines = f"{method} /{place}/{status} HTTP/{version}\r\nHost: x\r\n{end}\r\n"
                        connection.sendall(lines.encode())
                        data = b""
                        while not data.endswith((b"0\r\n\r\n", b"\r\n\r\nok")) and (part := connection.recv(65_536)):
                            data += part
                    found.append(re.sub(rb"date: [^\r]+", b"date: now", data))
        return found

    quick = answers()
    monkeypatch.setattr(HttpProtocol, "_begin_stream", lambda *_: False)
    assert quick == answers()
    assert not any(b"set-cookie" in answer for answer in quick)
