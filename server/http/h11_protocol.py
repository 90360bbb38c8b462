"""HttpProtocol: uvicorn's h11 protocol with hard limits and OpenAI's error form. Imports uvicorn, h11.

uvicorn refuses malformed HTTP in plain text; HttpProtocol replies in OpenAI's form to malformed HTTP and to headers
over the limits. h11 limits only incomplete headers, so headers of any size that arrive in one read would pass;
_Connection measures complete ones too. uvicorn waits without limit for the rest of a request; here each part has a
time limit, so that clients cannot hold connections by sending single bytes.

A stream's head and its tokens are written past uvicorn and h11 (server.api.sse.BODY_WRITER), which take a third of the
worker's time for each token, and a tenth of its time for the first one.

ConnectionLimit: without file descriptors libuv closes new connections silently, so a worker keeps some in reserve,
replies 503 to connections beyond the limit, and logs that.
"""

import asyncio
import logging
import re
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from server.api.error_replies import error_reply
from server.api.request_record import make_request_id, path_of, request_id_of
from server.api.sse import BODY_WRITER
from server.errors import HeadersTooLarge, HttpError, MalformedHttp, SlowClient, TooManyConnections

logger = logging.getLogger(__name__)
_ENOUGH = 65_536  # a higher limit only makes those loops longer that close what a child shall not inherit
_MAX_RESERVE = 64  # for the engine, a grammar checker, traces, refusals on their way out
_LOG_INTERVAL_S = 10.0
MAX_HEADER_BYTES = 64 * 1024  # of one request, its request line included
MAX_HEADER_LINES = 100
# Bytes that arrive after a refusal are read and dropped for so long: closing at once could reset the connection
# before the client has read why.
_LINGER_S = 1.0
_TOO_LARGE = 431
_LAST_CHUNK = re.compile(rb"\r?\n?0+[ \t;\r]")  # h11 has left the last chunk's line end, or some of it
_OF_CONNECTION = {b"connection", b"content-length", b"transfer-encoding"}
_TOKEN, _TEXT = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+", rb"[!-~\x80-\xff]"
_HEADERS = re.compile(rb"(?:%b\0(?:%b(?:[\t -~\x80-\xff]*%b)?)?\0)*" % (_TOKEN, _TEXT, _TEXT))
_STREAM = h11.Response(status_code=200, reason=b"OK", headers=[(b"transfer-encoding", b"chunked")])  # its framing
_MAX_CHUNK_HEAD = 24  # h11 takes 20 digits
_ABSOLUTE_TARGET = re.compile(rb"https?://([^/?]*)(.*)", re.IGNORECASE)
HEAD_TIMEOUT_S = 30.0  # from the first byte of a request, or from the connection, to the end of the headers
BODY_PAUSE_S = 30.0  # between two reads of a body
BODY_TIMEOUT_S = 300.0  # from the end of the headers to the end of the body
access_logger = logging.getLogger("quire.access")


class ConnectionLimit:
    """Limits the connections of one worker. num_files: its file descriptors; by default the process limit."""

    def __init__(self, num_files: int | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if num_files is None else num_files
        self._num_files = _ENOUGH if soft == resource.RLIM_INFINITY else soft
        self._maximum = self._num_files - min(_MAX_RESERVE, self._num_files // 2)
        self._clock = clock
        self._num_refused = 0
        self._next_log_s = clock()

    def refusal(self, num_connections: int) -> TooManyConnections | None:
        """Return why the newest of so many connections is refused, None if it is not."""
        if num_connections <= self._maximum:
            return None
        self._num_refused += 1
        if self._clock() >= self._next_log_s:
            logger.error(
                "connections refused=%d limit=%d file_descriptors=%d; ulimit -n sets the file descriptors",
                self._num_refused,
                self._maximum,
                self._num_files,
            )
            self._num_refused, self._next_log_s = 0, self._clock() + _LOG_INTERVAL_S
        return TooManyConnections(f"This server process has its {self._maximum} connections; try again.")


class HttpProtocol(H11Protocol):
    """One connection. After a refusal it only reads, until the client closes the connection or a timeout."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limit: ConnectionLimit | None = None,
        prefix: str = "",
    ) -> None:
        """limit: shared by all connections of the worker. prefix: the --root-path."""
        super().__init__(config, server_state, app_state, _loop)
        self.conn: _Connection = _Connection()
        self._limit, self._prefix = limit, prefix
        self._is_refused = False
        self._joined: _JoinedWrites | None = None  # of the newest request
        self._began_s = 0.0  # when the first byte of a head, or the end of one, was there
        self._read_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection against the limit, and start its timeouts."""
        super().connection_made(transport)
        self._began_s = self.loop.time()
        refusal = None if self._limit is None else self._limit.refusal(len(self.connections))
        if refusal is not None:
            self.conn.refusal = refusal
            self.send_400_response(refusal.message)
            return
        self.loop.call_later(HEAD_TIMEOUT_S, self._look_at_time)

    def data_received(self, data: bytes) -> None:
        """Parse what arrived."""
        if self._is_refused:
            return
        self._read_s = self.loop.time()
        was_in_body = self.conn.their_state is h11.SEND_BODY
        if not was_in_body and not self.conn.has_begun:
            self._began_s = self._read_s
        super().data_received(data)
        if self.conn.their_state is h11.SEND_BODY and not was_in_body:
            self._began_s = self._read_s

    def handle_events(self) -> None:
        """Begin the request that is complete up to its head, if one is, and offer its app a BODY_WRITER."""
        before = self.cycle
        super().handle_events()
        cycle = self.cycle  # its app begins to run later
        if cycle is before:
            return
        self._joined = _JoinedWrites(self.transport, self.loop)
        cycle.transport = self._joined  # type: ignore[assignment]  # it writes and closes, no more
        if cycle.scope["method"] == "POST" and cycle.scope["http_version"] == "1.1":
            cycle.scope["extensions"] = {BODY_WRITER: {"write": partial(self._write_chunk, cycle, self._joined)}}
            cycle.send = partial(self._send, cycle)  # type: ignore[method-assign]

    async def _send(self, cycle: RequestResponseCycle, message: Any) -> None:
        """Send what the app sends."""
        if message["type"] != "http.response.start" or not self._begin_stream(cycle, message):
            await RequestResponseCycle.send(cycle, message)

    def _begin_stream(self, cycle: RequestResponseCycle, message: Any) -> bool:
        """Write the head of a body of unknown length as uvicorn and h11 do; return False if they have to.

        They check each header several times, while the first token waits.
        """
        if message["status"] != 200 or cycle.response_started or cycle.disconnected or self.flow.write_paused:
            return False
        headers = [*cycle.default_headers, *message["headers"]]
        is_usual = self.conn.may_go_on and _OF_CONNECTION.isdisjoint([name.lower() for name, _ in headers])
        # Each by itself: in their lines a value with a line end would be two headers
        parts = b"".join([b"%b\0%b\0" % header for header in headers])
        if not is_usual or parts.count(b"\0") != 2 * len(headers) or _HEADERS.fullmatch(parts) is None:
            return False
        self.conn.send(_STREAM)
        lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        cycle.transport.write(b"HTTP/1.1 200 OK\r\n%bTransfer-Encoding: chunked\r\n\r\n" % lines)
        return True

    def _write_chunk(self, cycle: RequestResponseCycle, joined: "_JoinedWrites", part: bytes) -> bool:
        """Write a part of the body as h11 does without a Content-Length (RFC 9112, §7.1), unless the client lags."""
        if cycle.disconnected or not part:  # a chunk of no bytes would end the body
            return True
        if self.flow.write_paused or not cycle.response_started or cycle.response_complete:
            return False
        joined.write_now(b"%x\r\n%b\r\n" % (len(part), part))
        return True

    def on_response_complete(self) -> None:
        """Go on with what the client has sent meanwhile; the time of that begins now."""
        self._began_s = self._read_s = self.loop.time()
        super().on_response_complete()

    def _look_at_time(self) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        due_s = self._due_s()
        wait_s = min(HEAD_TIMEOUT_S, BODY_PAUSE_S) if due_s is None else due_s - self.loop.time()
        if wait_s > 0:
            self.loop.call_later(wait_s, self._look_at_time)
        elif self.cycle is None and not self.conn.has_begun:
            self.transport.close()
        else:
            part = "body" if self.conn.their_state is h11.SEND_BODY else "headers"
            limits = (
                f"{BODY_TIMEOUT_S:g} s, or stopped for {BODY_PAUSE_S:g}" if part == "body" else f"{HEAD_TIMEOUT_S:g}"
            )
            self.conn.refusal = SlowClient(f"The {part} of the request took more than {limits} s.")
            self.send_400_response(self.conn.refusal.message)

    def _due_s(self) -> float | None:
        """Return the deadline of the data that is arriving; None if there is none, or the app does not read."""
        if self.conn.their_state is h11.SEND_BODY:
            is_held = self.flow.read_paused
            return None if is_held else min(self._began_s + BODY_TIMEOUT_S, self._read_s + BODY_PAUSE_S)
        if self.conn.their_state is h11.IDLE and (self.cycle is None or self.conn.has_begun):
            return self._began_s + HEAD_TIMEOUT_S
        return None  # between requests the keep-alive's time counts

    def send_400_response(self, msg: str) -> None:
        """Reply to the error that uvicorn handles now; close without a reply if another reply has begun."""
        refusal = self.conn.refusal
        self._is_refused = True
        if self._joined is not None:
            self._joined.flush()  # the answer before it
        request_id, path = make_request_id(), ""
        if self.cycle is not None and not self.cycle.response_complete:
            # its body is at fault; its app, which would name the prefix, may not have begun
            scope = {**self.cycle.scope, "root_path": self._prefix}
            request_id, path = request_id_of(scope), path_of(scope)
            self.cycle.disconnected = True  # its app gets no word in any more
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        reply = error_reply(refusal, request_id=request_id, path=path)
        headers = {
            "content-type": "application/json",
            "content-length": str(len(reply.body)),
            "connection": "close",
            "x-request-id": request_id,
            **reply.headers,
        }
        lines = self.server_state.default_headers + [(name.encode(), value.encode()) for name, value in headers.items()]
        start = h11.Response(status_code=reply.status, headers=lines, reason=STATUS_PHRASES[reply.status])
        for event in (start, h11.Data(data=reply.body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        access_logger.info("- - %d %s %s", reply.status, refusal.code, request_id)
        if self.transport.can_write_eof():  # TLS cannot: there the close alone is the end
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)


class _JoinedWrites:
    """A request's transport. What uvicorn writes in one turn of the loop is one write: a head and what follows it.

    Each write costs a call of the kernel, and mostly wakes the client, which then finds a head without a body.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held = b""

    def write(self, data: bytes) -> None:
        """Write the data at the end of this turn of the loop, or before anything that is written now."""
        if not self._held and data:
            self._loop.call_soon(self.flush)
        self._held += data

    def write_now(self, data: bytes) -> None:
        """Write the data behind what is held. What comes once the connection closes is lost."""
        held, self._held = self._held, b""
        if not self._transport.is_closing():  # uvloop raises for one that is closed
            self._transport.write(held + data)

    def flush(self) -> None:
        """Write what is held."""
        if self._held:
            self.write_now(b"")

    def is_closing(self) -> bool:
        """Return whether the connection is closed, or about to be."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the connection, once all is written."""
        self.flush()
        self._transport.close()


class _Connection(h11.Connection):
    """h11's parser, with limits on complete headers and trailers. refusal: why next_event() raised."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self._in_trailer = False
        self._has_skipped = False  # the one empty line that may come before a request (RFC 9112, §2.2)
        self.refusal: HttpError = MalformedHttp("The request is not valid HTTP.")

    @property
    def has_begun(self) -> bool:
        """Return True if bytes of the next request have arrived."""
        return bool(self.trailing_data[0])

    @property
    def may_go_on(self) -> bool:
        """Return True if the connection can stay open behind the answer, with chunks as its body."""
        return self.their_http_version == b"1.1" and bool(self._cstate.keep_alive)

    def next_event(self) -> Any:
        """Return the next event. Raises h11.RemoteProtocolError."""
        is_trailer = self.their_state is h11.SEND_BODY and self._may_be_trailer()
        raw = self.trailing_data[0] if is_trailer or self.their_state is h11.IDLE else b""
        if self.their_state is h11.IDLE and not self._has_skipped and raw[:2] in (b"\r", b"\r\n"):
            if raw == b"\r":
                return h11.NEED_DATA
            self._receive_buffer.maybe_extract_at_most(2)
            raw, self._has_skipped = raw[2:], True
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._has_skipped = False
                raw = raw[: len(raw) - len(self.trailing_data[0])]
                _check_size(len(raw), num_lines=raw.count(b"\n") - 2)  # less the request line and the empty line
                _check_lines(raw)
                _check_framing(event)
                event = _in_origin_form(event)
            elif isinstance(event, h11.EndOfMessage):
                _check_lines(raw[: len(raw) - len(self.trailing_data[0])])
                num_bytes = sum(len(name) + len(value) + len(": \r\n") for name, value in event.headers)
                _check_size(num_bytes, num_lines=len(event.headers))
        except h11.RemoteProtocolError as error:
            self.refusal = _refusal(error)
            raise
        self._in_trailer = is_trailer and event is h11.NEED_DATA
        return event

    def _clean_up_response_headers_for_sending(self, response: h11.Response) -> h11.Response:
        """Return a response with its framing: as h11 does, but for a stream, which has it."""
        return response if response is _STREAM else super()._clean_up_response_headers_for_sending(response)

    def _may_be_trailer(self) -> bool:
        """Return whether the last chunk's size is next, or was. All else in a body is not looked at again: chunks of a
        byte each would make that take long.
        """
        return self._in_trailer or _LAST_CHUNK.match(self._receive_buffer._data[:_MAX_CHUNK_HEAD]) is not None


def _check_size(num_bytes: int, *, num_lines: int) -> None:
    if num_bytes > MAX_HEADER_BYTES or num_lines > MAX_HEADER_LINES:
        raise h11.RemoteProtocolError("headers over the limits", error_status_hint=_TOO_LARGE)


def _check_lines(raw: bytes) -> None:
    """Refuse line ends that h11 takes and a proxy may read differently, in a head or a trailer."""
    if raw.count(b"\n") != raw.count(b"\r\n"):  # RFC 9112, §2.2
        raise h11.RemoteProtocolError("a line ends with LF alone")
    if b"\r\n " in raw or b"\r\n\t" in raw:  # RFC 9112, §5.2
        raise h11.RemoteProtocolError("a header is folded over two lines")


def _check_framing(request: h11.Request) -> None:
    """Refuse framing that a proxy may read differently from h11, and so as two requests or none."""
    if not request.http_version.startswith(b"1."):
        raise h11.RemoteProtocolError("the version must be HTTP/1.1 or HTTP/1.0")
    names = {name for name, _ in request.headers}
    if b"content-length" in names and b"transfer-encoding" in names:  # RFC 9112, §6.1
        raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding contradict each other")
    if request.http_version == b"1.0" and b"transfer-encoding" in names:  # RFC 9112, §6.1
        raise h11.RemoteProtocolError("HTTP/1.0 has no Transfer-Encoding")


def _in_origin_form(request: h11.Request) -> h11.Request:
    """Return a request for a whole URL as one for its path; the URL's host replaces Host (RFC 9112, §3.2.2)."""
    match = _ABSOLUTE_TARGET.fullmatch(request.target)
    if match is None:
        return request
    host, path = match.groups()
    if not host or b"@" in host:  # RFC 9110, §4.2.1 and §4.2.4
        raise h11.RemoteProtocolError("the URL of the request must have a host and no user")
    headers = [(b"host", host), *((name, value) for name, value in request.headers if name != b"host")]
    target = path if path.startswith(b"/") else b"/" + path
    return h11.Request(method=request.method, target=target, headers=headers, http_version=request.http_version)


def _refusal(error: h11.RemoteProtocolError) -> HttpError:
    if error.error_status_hint == _TOO_LARGE:
        return HeadersTooLarge(
            f"The headers are too large: the limits are {MAX_HEADER_BYTES} bytes and {MAX_HEADER_LINES} lines."
        )
    reason = str(error).partition(": bytearray(")[0]  # what follows is the client's own text, maybe its key
    return MalformedHttp(f"The request is not valid HTTP: {reason}.")
