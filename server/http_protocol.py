"""HTTP from bytes, with hard limits: uvicorn's h11 protocol, which itself refuses in plain text. Imports uvicorn, h11.

HttpProtocol answers what is not HTTP, and headers over the limits, in OpenAI's form. h11 limits only headers that are
still incomplete, so that any amount which arrives in one read would pass; _Connection measures the complete ones too.
"""

import asyncio
import logging
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from server.access import make_request_id
from server.errors import HeadersTooLarge, HttpError, MalformedHttp, error_reply

MAX_HEADER_BYTES = 64 * 1024  # of one request, its request line included
MAX_HEADER_LINES = 100
# Bytes that arrive after a refusal are read and dropped for so long: closing at once could reset the connection
# before the client has read why.
_LINGER_S = 1.0
_TOO_LARGE = 431

access_logger = logging.getLogger("quire.access")


class HttpProtocol(H11Protocol):
    """One connection. After a refusal it is only read until the client closes it or the time is over."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = _Connection()
        self._is_refused = False

    def data_received(self, data: bytes) -> None:
        """Parse what arrived."""
        if not self._is_refused:
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Answer the error that uvicorn is just handling; close without an answer if another one has begun."""
        refusal = self.conn.refusal
        self._is_refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # its app gets no word in any more
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        request_id = make_request_id()
        reply = error_reply(refusal, request_id=request_id)
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


class _Connection(h11.Connection):
    """h11's parser, with limits on complete headers and trailers. refusal: why next_event() raised."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self.refusal: HttpError = MalformedHttp("The request is not valid HTTP.")

    def next_event(self) -> Any:
        """Return the next event. Raises h11.RemoteProtocolError."""
        head = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                head = head[: len(head) - len(self.trailing_data[0])]
                _check_size(len(head), num_lines=head.count(b"\n") - 2)  # less the request line and the empty line
            elif isinstance(event, h11.EndOfMessage):
                num_bytes = sum(len(name) + len(value) + len(": \r\n") for name, value in event.headers)
                _check_size(num_bytes, num_lines=len(event.headers))
        except h11.RemoteProtocolError as error:
            self.refusal = _refusal(error)
            raise
        return event


def _check_size(num_bytes: int, *, num_lines: int) -> None:
    if num_bytes > MAX_HEADER_BYTES or num_lines > MAX_HEADER_LINES:
        raise h11.RemoteProtocolError("headers over the limits", error_status_hint=_TOO_LARGE)


def _refusal(error: h11.RemoteProtocolError) -> HttpError:
    if error.error_status_hint == _TOO_LARGE:
        return HeadersTooLarge(
            f"The headers are too large: the limits are {MAX_HEADER_BYTES} bytes and {MAX_HEADER_LINES} lines."
        )
    reason = str(error).partition(": bytearray(")[0]  # what follows is the client's own text, maybe its key
    return MalformedHttp(f"The request is not valid HTTP: {reason}.")
