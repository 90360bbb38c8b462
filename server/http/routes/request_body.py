"""Request bodies from bytes to checked objects, within limits. Imports msgspec and starlette.

BodyLimit is the middleware that refuses large bodies while they arrive; read_body is what the routes call.

    bytes ─ BodyLimit: one body, all bodies of the worker ─→ read_body: decoded, checked, translated ─→ release_body
"""

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.heavy_work import HeavyWork
from server.api.large_bodies import LargeBodies, give_place, with_body
from server.api.strict_json import Body, parse_body, parse_json
from server.errors import BodyTooLarge, ClientGone, UnsupportedMediaType


class BodyLimit:
    """Pure ASGI middleware: the handler's read of a body over the limits raises BodyTooLarge or TooManyBodies.

    A Content-Length over the limit is refused at the first read, before a byte of it is kept.
    """

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, work: HeavyWork) -> None:
        self._bodies = LargeBodies(work)
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the bytes that are read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        place = give_place(scope, self._bodies)

        async def limited_receive() -> Message:
            if not place.num_bytes and _content_length(scope) > self._max_body_bytes:
                raise self._too_large(_content_length(scope))
            message = await receive()
            place.add(len(message.get("body", b"")))
            if place.num_bytes > self._max_body_bytes:
                raise self._too_large(place.num_bytes)
            return message

        try:
            await self._app(scope, limited_receive, send)
        finally:
            place.release()

    def _too_large(self, num_bytes: int) -> BodyTooLarge:
        return BodyTooLarge(f"The body has {num_bytes} bytes or more, the limit is {self._max_body_bytes}.")


async def read_body(request: Request, schema: type[Body]) -> Body:
    """Return the body as a checked object.

    Raises UnsupportedMediaType, BodyTooLarge, TooManyBodies, MalformedBody, InvalidParameter and ClientGone.
    """
    content_type = _header(request.scope, b"content-type").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        shown = content_type[:100] or "nothing"
        raise UnsupportedMediaType(
            f"The content type must be application/json, got {shown}: send the header content-type: application/json."
        )
    encoding = _header(request.scope, b"content-encoding").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType(f"The body must not be compressed, got the content encoding {encoding[:100]}.")
    parts: list[bytes] = []  # request.body() would keep them with the request
    more_body = True
    while more_body:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("The client left while it sent its body.")
        parts.append(message.get("body", b""))
        more_body = message.get("more_body", False)
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    return await with_body(request, lambda: parse_body(schema, parse_json(body)))


def _content_length(scope: Scope) -> int:
    length = _header(scope, b"content-length")
    return int(length[:20]) if length.isdecimal() else 0


def _header(scope: Scope, name: bytes) -> str:
    """Return the value of a request's first header with this name, "" without one."""
    for found, value in scope["headers"]:
        if found == name:
            return str(value, "latin-1")
    return ""
