"""AccessLog: gives each request its id, logs one line per request and catches every exception. Pure ASGI.

It makes a RequestRecord in the ASGI scope, which routes and error handlers complete, and logs one line when the reply
is complete:  POST /v1/chat/completions 200 in=812 cached=768 out=64 ttft=41ms itl=9.8ms stop req-ab12
Imports server only.
"""

import logging
import time
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.interface.errors import ServiceError
from server.api.error_replies import error_reply
from server.api.request_record import RECORD_SCOPE_KEY, OpenRequests, RequestRecord, path_of, request_id_of
from server.http.tracing import Tracer

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("quire.access")


class AccessLog:
    """The outermost middleware. on_end: called for every request when its reply is complete."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        open_requests: OpenRequests,
        on_end: Callable[[Scope, RequestRecord], None],
        tracer: Tracer | None = None,
        root_path: str = "",
    ) -> None:
        self._app = app
        self._open_requests = open_requests
        self._on_end = on_end
        self._tracer = tracer
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; exceptions never leave this method."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(request_id_of(scope), time.monotonic())
        scope[RECORD_SCOPE_KEY] = record
        scope["root_path"] = self._root_path  # routes match with it and, behind a proxy that cuts it off, without

        if scope["method"] == "POST":
            self._open_requests.add(record)
            if self._tracer is not None:
                record.trace = self._tracer.begin(scope["headers"])

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status, record.has_started = message["status"], True
                message["headers"] = [*message["headers"], (b"x-request-id", record.request_id.encode())]
                if record.trace is not None:
                    message["headers"].append((b"traceresponse", record.trace.traceresponse.encode()))
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("unhandled error request_id=%s", record.request_id)
            record.outcome = "internal_error"
            if not record.has_started:
                await _send_internal_error(send_with_id, record.request_id, path=path_of(scope))
        finally:
            self._open_requests.remove(record)
            if scope["method"] not in ("GET", "HEAD"):
                fields = _fields(scope, record)
                access_logger.info(_line(fields), extra={"fields": fields})
            self._on_end(scope, record)
            if self._tracer is not None:
                self._tracer.end(scope, record)


def _fields(scope: Scope, record: RequestRecord) -> dict[str, str | int | float]:
    """Return the fields of the log line; a JSON log has each as a field of its own."""
    # The path of an unknown route is the client's own text: nothing but printable ASCII may reach a log line.
    path = "".join(char if "!" <= char <= "~" else "?" for char in scope["path"][:100])
    fields: dict[str, str | int | float] = {"method": scope["method"][:16], "path": path}
    fields["status"] = record.status or 499
    outcome = record.outcome
    if record.stats is not None:
        stats = record.stats()
        fields["prompt_tokens"], fields["cached_tokens"] = stats.num_prompt_tokens, stats.num_cached_tokens
        fields["output_tokens"] = stats.num_output_tokens
        if stats.cache is not None:
            fields["cache"] = stats.cache.reason
        if stats.num_replays:
            fields["replays"] = stats.num_replays
        for name, seconds in (("queue_ms", stats.queue_s), ("ttft_ms", stats.ttft_s), ("itl_ms", stats.itl_s)):
            if seconds is not None:
                fields[name] = round(seconds * 1000, 3)
        outcome = outcome or ",".join(stats.finish_reasons)
    fields["outcome"], fields["request_id"] = outcome or "-", record.request_id
    if record.trace is not None:
        fields["trace_id"] = record.trace.trace_id
    return fields


def _line(fields: Mapping[str, str | int | float]) -> str:
    words = [str(fields[name]) for name in ("method", "path", "status")]
    if "prompt_tokens" in fields:
        words.append(f"in={fields['prompt_tokens']} cached={fields['cached_tokens']} out={fields['output_tokens']}")
    if "ttft_ms" in fields:
        words.append(f"ttft={fields['ttft_ms']:.0f}ms")
    if "itl_ms" in fields:
        words.append(f"itl={fields['itl_ms']:.1f}ms")
    if "replays" in fields:
        words.append(f"replays={fields['replays']}")
    return " ".join([*words, str(fields["outcome"]), str(fields["request_id"])])


async def _send_internal_error(send: Send, request_id: str, *, path: str) -> None:
    reply = error_reply(ServiceError("internal error"), request_id=request_id, path=path)
    headers = {"content-type": "application/json", "content-length": str(len(reply.body)), **reply.headers}
    lines = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": reply.status, "headers": lines})
    await send({"type": "http.response.body", "body": reply.body})
