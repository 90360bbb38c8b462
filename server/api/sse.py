"""Server-sent events: SseWriter, which each API implements, and the responses that end when their client disconnects.

server/http/routes/reply.py runs the writers. Streams consist of anonymous chunks (OpenAI) or of named events.

Starlette does not cancel a handler when its client disconnects, so streams and plain answers read receive() beside
their work: the disconnect message ends the work, and the work's `finally` aborts the engine requests.
Quire's own HTTP protocol offers an ASGI extension, BODY_WRITER, which takes the parts of a stream's body past the
middleware and the HTTP library: none of them changes a body, and each costs every token its time.
Imports msgspec, starlette, server.api.error_replies and server.generation.events.
"""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.interface.errors import ServiceError
from server.api.error_replies import error_body
from server.errors import ClientGone
from server.generation.events import Event

PING_INTERVAL_S = 15.0
# scope["extensions"][BODY_WRITER]["write"]: a BodyWriter, in a server that has one
BODY_WRITER = "quire.body_writer"
# Writes the next part of a body without a Content-Length, after its head; returns False if the part has to be sent
# through ASGI, which waits for a client that reads slowly
BodyWriter = Callable[[bytes], bool]
SSE_DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

T = TypeVar("T")


def begin(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Return a task that, from Python 3.12 on, works at once until it first waits: a turn of the loop sooner."""
    if sys.version_info >= (3, 12):
        return asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)
    return asyncio.create_task(work)


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the work's result; cancel it and raise ClientGone if the client leaves first. The body must be read."""
    task = asyncio.create_task(work)
    await wait_or_gone(receive, task)
    return task.result()


def watch_client(receive: Receive) -> asyncio.Task[None]:
    """Return a task that ends when the client disconnects. The body must be read, and nobody else may receive."""
    return asyncio.create_task(_disconnected(receive))


async def wait_or_gone(receive: Receive, task: asyncio.Task[Any], *, timeout_s: float | None = None) -> None:
    """Wait until the task is done or the time is over. If the client leaves first: cancel it, raise ClientGone."""
    gone = watch_client(receive)
    try:
        await wait_watched(gone, task, timeout_s=timeout_s)
    finally:
        await cancel(gone)


async def wait_watched(gone: asyncio.Task[None], task: asyncio.Task[Any], *, timeout_s: float | None = None) -> None:
    """As wait_or_gone(), beside a task of watch_client() that goes on."""
    try:
        done, _ = await asyncio.wait({task, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if gone in done and task not in done:
            await cancel(task)
            raise ClientGone("The client left before its answer.")
    except asyncio.CancelledError:
        await cancel(task)
        raise


async def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end; ignore its result."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class EventStreamResponse(Response):
    """Sends events as they arrive, `ping` while none do, and closes the source when the client disconnects.

    `events` yields whole events as bytes; `on_disconnect` tells of a client that left; `close` is always awaited at
    the end, also when `events` was never begun (a generator that was not has no `finally`). `gone`: a task of
    watch_client() that runs, which `close` ends; None: one is made here.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        headers: Mapping[str, str],
        on_disconnect: Callable[[], None],
        close: Callable[[], Awaitable[None]],
        gone: asyncio.Task[None] | None = None,
        ping: bytes = PING,
        ping_interval_s: float = PING_INTERVAL_S,
    ) -> None:
        self.status_code = 200
        self.background = None
        # no-transform and x-accel-buffering: proxies must not collect or compress a stream.
        self.init_headers({"cache-control": "no-cache, no-transform", "x-accel-buffering": "no", **headers})
        self._events = events
        self._on_disconnect = on_disconnect
        self._close = close
        self._gone = gone
        self._ping = ping
        self._ping_interval_s = ping_interval_s
        self._last_sent_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole stream."""
        sender = begin(self._send_events(send, _body_writer(scope)))
        watcher = asyncio.create_task(self._watch(receive, send))
        try:
            done, _ = await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if sender in done:
                sender.result()
            else:
                self._on_disconnect()
        except OSError:  # uvicorn's own ClientDisconnected
            self._on_disconnect()
        finally:
            await cancel(watcher)
            await cancel(sender)
            await self._events.aclose()
            await self._close()

    async def _send_events(self, send: Send, write: BodyWriter) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            self._last_sent_s = time.monotonic()
            if not write(event):
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch(self, receive: Receive, send: Send) -> None:
        gone = watch_client(receive) if self._gone is None else self._gone
        try:
            while True:
                wait_s = self._last_sent_s + self._ping_interval_s - time.monotonic()
                if wait_s <= 0:
                    self._last_sent_s = time.monotonic()
                    await send({"type": "http.response.body", "body": self._ping, "more_body": True})
                elif (await asyncio.wait({gone}, timeout=wait_s))[0]:
                    return
        finally:
            if self._gone is None:
                await cancel(gone)


def _body_writer(scope: Scope) -> BodyWriter:
    """Return the server's writer, or one that never writes."""
    extension = scope.get("extensions", {}).get(BODY_WRITER)
    return extension["write"] if extension is not None else lambda part: False


async def _disconnected(receive: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_encoder = msgspec.json.Encoder()
# In UTF-8, what JSON leaves as it is, though str.splitlines(), and so iter_lines() of httpx, ends a line there
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


class ReplyHead(msgspec.Struct, frozen=True):
    """The fields that every chunk of an answer repeats."""

    id: str
    created: int  # Unix time, seconds
    model: str


class SseWriter(Protocol):
    """Makes one kind of answer, whole or as the bytes of a stream. One writer belongs to one request."""

    @property
    def ping(self) -> bytes:
        """Bytes to send while there is no event."""
        ...

    def opening(self) -> bytes:
        """Bytes before the first event."""
        ...

    def event(self, event: Event, *, is_last: bool) -> bytes:
        """Bytes of one event, which may be empty. `is_last`: no event of any choice comes after it."""
        ...

    def closing(self) -> bytes:
        """Bytes at the end of a complete stream."""
        ...

    def failed(self, error: ServiceError, *, request_id: str) -> bytes:
        """Bytes at the end of a failed stream, which never ends without them."""
        ...

    def whole(self, events: Sequence[Event]) -> msgspec.Struct:
        """The answer as one body."""
        ...


def on_one_line(encoded: bytes) -> bytes:
    """Return the JSON with U+0085, U+2028 and U+2029 escaped, so that clients that end lines there read it whole."""
    if not encoded.isascii():
        for character, escaped in _LINE_ENDS:
            encoded = encoded.replace(character, escaped)
    return encoded


def data_events(*chunks: msgspec.Struct) -> bytes:
    """Return one server-sent event for each chunk, without a name: OpenAI's form. SSE_DONE ends such a stream."""
    return b"".join([b"data: " + on_one_line(_encoder.encode(chunk)) + b"\n\n" for chunk in chunks])


class TextEvent:
    """Writes the events of a stream that differ in one text alone: the rest is encoded once."""

    TEXT = "\0"  # stands for the text in the event that is given; a name or an id is never this

    def __init__(self, event: bytes) -> None:
        """`event`: one that has TEXT as the value of each field that shall have the text."""
        self._parts = event.split(_encoder.encode(self.TEXT))

    def __call__(self, text: str) -> bytes:
        """Return the event with this text."""
        return on_one_line(_encoder.encode(text)).join(self._parts)


def data_failure(error: ServiceError, *, request_id: str) -> bytes:
    """Return the end of a stream of data_events() that failed."""
    return b"data: " + on_one_line(error_body(error, request_id=request_id)) + b"\n\n" + SSE_DONE


def named_event(event: msgspec.Struct) -> bytes:
    """Return one server-sent event; its name is the struct's tag, which its JSON has as `type`."""
    return f"event: {event.__struct_config__.tag}\ndata: ".encode() + on_one_line(_encoder.encode(event)) + b"\n\n"
