"""Request bodies from bytes to JSON objects, within limits. Imports msgspec and starlette.

BodyLimit is the middleware that refuses large bodies while they arrive; read_json is what the routes call.
"""

import re
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import BodyTooLarge, ClientGone, MalformedBody, UnsupportedMediaType

MAX_JSON_DEPTH = 64

_SURROGATE = rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
# All that comes before the first lone surrogate; possessive, since backtracking over 8 MiB would take its time.
_UP_TO_LONE_SURROGATE = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+(?P<lone>" + _SURROGATE + rb")"
)
_UTF8_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")


class BodyLimit:
    """Pure ASGI middleware: the handler's read of a body over the limit raises BodyTooLarge.

    A Content-Length over the limit is refused at the first read, before a byte of it is kept.
    """

    def __init__(self, app: ASGIApp, *, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count what is read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        num_read = 0

        async def limited_receive() -> Message:
            nonlocal num_read
            if not num_read and _content_length(scope) > self._max_body_bytes:
                raise self._too_large(_content_length(scope))
            message = await receive()
            num_read += len(message.get("body", b""))
            if num_read > self._max_body_bytes:
                raise self._too_large(num_read)
            return message

        await self._app(scope, limited_receive, send)

    def _too_large(self, num_bytes: int) -> BodyTooLarge:
        return BodyTooLarge(f"The body has {num_bytes} bytes or more, the limit is {self._max_body_bytes}.")


async def read_json(request: Request) -> dict[str, Any]:
    """Return the body as a JSON object. Raises UnsupportedMediaType, BodyTooLarge, MalformedBody, ClientGone."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        shown = content_type[:100] or "nothing"
        raise UnsupportedMediaType(f"The content type must be application/json, got {shown}.")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType(f"The body must not be compressed, got the content encoding {encoding[:100]}.")
    try:
        body = await request.body()
    except ClientDisconnect:
        raise ClientGone("The client left while it sent its body.") from None
    return parse_json(body)


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse strictly: no NaN, no Infinity, no lone surrogates, no deep nesting. Raises MalformedBody."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        surrogate = _lone_surrogate(body)
        if surrogate is not None:
            raise MalformedBody(
                f"The body contains a lone surrogate, {surrogate}, which is not valid Unicode text."
            ) from None
        raise MalformedBody(f"The body is not valid JSON: {str(error)[:200]}.") from None
    if not isinstance(value, dict):
        raise MalformedBody("The body must be a JSON object.")
    if body.count(b"{") + body.count(b"[") > MAX_JSON_DEPTH and _is_deeper_than(value, MAX_JSON_DEPTH):
        raise _too_deep()
    return value


def _content_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value[:20])
    return 0


def _lone_surrogate(body: bytes) -> str | None:
    """Describe the first half of a UTF-16 pair without the other half, in a body that does not parse."""
    has_escape = b"\\ud" in body or b"\\uD" in body
    if has_escape and (match := _UP_TO_LONE_SURROGATE.match(body)):
        return f"{match['lone'].decode()} at byte {match.start('lone')}"
    if match := _UTF8_SURROGATE.search(body):
        return f"{match[0].hex(' ')} at byte {match.start()}"
    return None


def _too_deep() -> MalformedBody:
    return MalformedBody(f"The body is nested too deeply, the limit is {MAX_JSON_DEPTH} levels.")


def _is_deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True
