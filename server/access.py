"""Around every request: its id, its one log line, and the last net under exceptions. Pure ASGI. Imports server only.

AccessLog makes a RequestRecord, kept in the ASGI scope; the routes and error handlers fill it in, and the line is
written once, when the answer is over:  POST /v1/chat/completions 200 in=812 cached=768 out=64 ttft=41ms itl=9.8ms stop req-ab12
"""  # noqa: E501

import logging
import re
import secrets
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import ServiceError
from server.error_replies import error_reply
from server.generation import Stats

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("quire.access")

_SCOPE_KEY = "quire.record"
_SAFE_ID = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}")


class RequestRecord(msgspec.Struct):
    """What one HTTP request leaves behind. stats: asked for at the end, once a generation was begun."""

    request_id: str
    arrival_s: float  # time.monotonic()
    status: int = 0
    outcome: str = ""  # an error's code, or "abort"; "" if the answer was complete
    stats: Callable[[], Stats] | None = None
    has_started: bool = False  # the status line is out
    key_hash: str = ""  # of the API key that came with it, if keys are asked for
    answer_id: str = ""  # the id in its answer, once a generation was begun
    cancel: Callable[[], None] | None = None  # ends that generation
    is_cancelled: bool = False


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of the request that `scope` belongs to."""
    return scope[_SCOPE_KEY]


def make_request_id() -> str:
    """Return the id of a request that brought none."""
    return f"req-{secrets.token_hex(8)}"


class RequestTracker(Protocol):
    """Told of each POST request; the real one is server/open_requests.py."""

    def add(self, record: RequestRecord) -> None:
        """A request has arrived."""
        ...

    def remove(self, record: RequestRecord) -> None:
        """Its answer is over."""
        ...


class AccessLog:
    """Outermost middleware."""

    def __init__(self, app: ASGIApp, *, tracker: RequestTracker, root_path: str = "") -> None:
        self._app = app
        self._tracker = tracker
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, whatever happens."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(_request_id(scope), time.monotonic())
        scope[_SCOPE_KEY] = record
        scope["root_path"] = self._root_path  # routes match with it and, behind a proxy that cuts it off, without

        if scope["method"] == "POST":
            self._tracker.add(record)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status, record.has_started = message["status"], True
                message["headers"] = [*message["headers"], (b"x-request-id", record.request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("unhandled error request_id=%s", record.request_id)
            record.outcome = "internal_error"
            if not record.has_started:
                await _send_internal_error(send_with_id, record.request_id, path=scope["path"])
        finally:
            self._tracker.remove(record)
            if scope["method"] not in ("GET", "HEAD"):
                access_logger.info(_line(scope, record))


def _line(scope: Scope, record: RequestRecord) -> str:
    # The path of an unknown route is the client's own text: nothing but printable ASCII may reach a log line.
    path = "".join(char if "!" <= char <= "~" else "?" for char in scope["path"][:100])
    words = [scope["method"][:16], path, str(record.status or 499)]
    reason = record.outcome
    if record.stats is not None:
        stats = record.stats()
        words += [
            f"in={stats.num_prompt_tokens}",
            f"cached={stats.num_cached_tokens}",
            f"out={stats.num_output_tokens}",
        ]
        if stats.ttft_s is not None:
            words.append(f"ttft={stats.ttft_s * 1000:.0f}ms")
        if stats.itl_s is not None:
            words.append(f"itl={stats.itl_s * 1000:.1f}ms")
        reason = reason or ",".join(stats.finish_reasons)
    return " ".join([*words, reason or "-", record.request_id])


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _SAFE_ID.fullmatch(value):
            return value.decode()
    return make_request_id()


async def _send_internal_error(send: Send, request_id: str, *, path: str) -> None:
    reply = error_reply(ServiceError("internal error"), request_id=request_id, path=path)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(reply.body)).encode())]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
