"""Edge: middleware of Ray's HTTP proxies that sets a prompt's session and reports lost replicas as API errors.

Ray loads it with RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=deploy.ray.edge:middlewares. Ray routes before it reads the
body, and reports a lost replica with plain text or a closed connection, so both tasks must be done inside its proxy.
"""

import os

import msgspec
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.ray.prompt_key import prompt_key
from engine.interface.errors import EngineDead, Overloaded, ServiceError
from server.api.error_replies import anthropic_body, error_body, error_reply, speaks_anthropic
from server.api.request_record import make_request_id
from server.api.sse import SSE_DONE, named_event

CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = "deploy.ray.edge:middlewares"
SESSION_HEADER = "x-session-id"  # default; the next variable sets another
SESSION_VARIABLE = "RAY_SERVE_SESSION_ID_HEADER_KEY"

_MAX_BODY_BYTES = 8 * 1024 * 1024  # the replica's own limit; a larger body is passed on without a session
_REPLICA_LOST = "The replica that served this request has ended; send the request again."
_NO_REPLICA = "No replica takes requests at the moment; try again shortly."


def middlewares() -> list[Middleware]:
    """Return the middlewares that Ray adds to each of its proxies."""
    return [Middleware(Edge, session_header=os.environ.get(SESSION_VARIABLE, SESSION_HEADER))]


class Edge:
    """The outermost middleware of one proxy."""

    def __init__(self, app: ASGIApp, *, session_header: str = SESSION_HEADER) -> None:
        self._app = app
        self._session_header = _normal(session_header.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_session = any(_normal(name) == self._session_header for name, _ in scope["headers"])
        if scope["method"] == "POST" and not has_session:
            key, receive = await _read_key(receive)
            if key:
                scope["headers"] = [*scope["headers"], (self._session_header, key.encode())]
        answer = _Answer(scope, send)
        try:
            await self._app(scope, receive, answer.send)
        finally:
            await answer.finish()


class _Answer:
    """Forwards a response; replaces Ray's own errors by JSON errors, and completes a broken stream with an error."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._path = scope["path"]
        self._send = send
        self._request_id = make_request_id()
        self._refused_status = 0  # status of a response of Ray itself, which is replaced
        self._has_started = self._is_complete = self._is_stream = False

    async def send(self, message: Message) -> None:
        """Forward one message."""
        if message["type"] == "http.response.start":
            self._start(message)
        elif not message.get("more_body", False):
            self._is_complete = True
        if not self._refused_status:
            await self._send(message)

    async def finish(self) -> None:
        """Send an error if the response is missing or incomplete."""
        if self._refused_status or not self._has_started:
            await self._refuse()
        elif not self._is_complete and self._is_stream:
            error = EngineDead(_REPLICA_LOST)
            await self._send({"type": "http.response.body", "body": self._last_event(error)})

    def _start(self, message: Message) -> None:
        headers: dict[bytes, bytes] = {}
        for name, value in message["headers"]:
            headers.setdefault(name.lower(), value)  # keep the first: the app sets x-request-id, then Ray sets it again
        message["headers"] = list(headers.items())
        content_type = headers.get(b"content-type", b"")
        self._request_id = headers.get(b"x-request-id", self._request_id.encode()).decode("latin-1")
        self._is_stream = content_type.startswith(b"text/event-stream")
        if message["status"] >= 400 and not content_type.startswith(b"application/json"):
            self._refused_status = message["status"]
        else:
            self._has_started = True

    async def _refuse(self) -> None:
        error: ServiceError = EngineDead(_NO_REPLICA if self._refused_status else _REPLICA_LOST)
        if self._refused_status == 429:
            error = Overloaded(_NO_REPLICA)
        reply = error_reply(error, request_id=self._request_id, path=self._path)
        headers = {"content-type": "application/json", "content-length": str(len(reply.body)), **reply.headers}
        headers["x-request-id"] = self._request_id
        lines = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": reply.status, "headers": lines})
        await self._send({"type": "http.response.body", "body": reply.body})

    def _last_event(self, error: ServiceError) -> bytes:
        if speaks_anthropic(self._path):
            return named_event(anthropic_body(error, request_id=self._request_id))
        body = error_body(error, request_id=self._request_id)
        if self._path.endswith("/responses"):
            detail = msgspec.json.decode(body)["error"]
            fields = {name: detail[name] for name in ("code", "message", "param")}
            return b"event: error\ndata: " + msgspec.json.encode({"type": "error", **fields}) + b"\n\n"
        return b"data: " + body + b"\n\n" + SSE_DONE


def _normal(header: bytes) -> bytes:
    """Return a header's name as Ray compares it, since proxies may change case and separators."""
    return header.lower().replace(b"_", b"-")


async def _read_key(receive: Receive) -> tuple[str, Receive]:
    """Read the body; return its prompt's session ("": none) and a receive function that replays the messages."""
    messages: list[Message] = []
    size = 0
    while size <= _MAX_BODY_BYTES:
        message = await receive()
        messages.append(message)
        size += len(message.get("body", b""))
        if not message.get("more_body", False):
            break
    key = ""
    if size <= _MAX_BODY_BYTES:
        key = prompt_key(b"".join(message.get("body", b"") for message in messages))
    remaining = iter(messages)

    async def replay() -> Message:
        for message in remaining:
            return message
        return await receive()

    return key, replay
