"""Request bodies from bytes to checked objects, within limits. Imports msgspec and starlette.

BodyLimit is the middleware that refuses large bodies while they arrive; read_body is what the routes call.

    bytes ─ BodyLimit: one body, all bodies of the worker ─→ read_body: decoded, checked, translated ─→ release_body

A body counts among the worker's from its first byte to release_body(), which the routes call when the prompt is made,
or to the end of its answer.
"""

from collections.abc import Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.heavy_work import HeavyWork
from server.api.limits import LIMITS
from server.api.strict_json import Body, parse_body, parse_json
from server.errors import BodyTooLarge, ClientGone, TooManyBodies, UnsupportedMediaType

T = TypeVar("T")
_PLACE = "quire.body"  # the key in the ASGI scope of a request's _Place


class _Place:
    """The bytes of one request's body among those of the worker."""

    def __init__(self, limit: "BodyLimit") -> None:
        self.num_bytes = 0
        self.work = limit.work
        self._limit = limit
        self._num_held = 0

    def add(self, num_bytes: int) -> None:
        """Count bytes that have arrived. Raises TooManyBodies if all large bodies together exceed their limit."""
        self.num_bytes += num_bytes
        if self.num_bytes <= LIMITS.small_body_bytes:
            return
        self._limit.num_held += self.num_bytes - self._num_held
        self._num_held = self.num_bytes
        if self._limit.num_held > LIMITS.bodies_bytes:
            raise TooManyBodies(
                f"The bodies that this server process reads have more than {LIMITS.bodies_bytes} bytes together, the"
                f" limit for bodies over {LIMITS.small_body_bytes} bytes; try again."
            )

    def release(self) -> None:
        """Count the body no more."""
        self._limit.num_held -= self._num_held
        self._num_held = 0


class BodyLimit:
    """Pure ASGI middleware: the handler's read of a body over the limits raises BodyTooLarge or TooManyBodies.

    A Content-Length over the limit is refused at the first read, before a byte of it is kept. num_held: bytes of the
    worker's large bodies.
    """

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, work: HeavyWork) -> None:
        self.num_held = 0
        self.work = work
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the bytes that are read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[_PLACE] = place = _Place(self)

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
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        shown = content_type[:100] or "nothing"
        raise UnsupportedMediaType(f"The content type must be application/json, got {shown}.")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType(f"The body must not be compressed, got the content encoding {encoding[:100]}.")
    try:
        body = b"".join([part async for part in request.stream()])  # request.body() would keep it with the request
    except ClientDisconnect:
        raise ClientGone("The client left while it sent its body.") from None
    return await with_body(request, lambda: parse_body(schema, parse_json(body)))


async def with_body(request: Request, work: Callable[[], T]) -> T:
    """Return the result of work whose cost the request's body bounds: outside the event loop, if that is large."""
    place: _Place = request.scope[_PLACE]
    if place.num_bytes <= LIMITS.small_body_bytes:
        return work()
    return await place.work.run_alone(work)


def release_body(request: Request) -> None:
    """Tell that the prompt is made: the body makes room for others."""
    place: _Place = request.scope[_PLACE]
    place.release()


def _content_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value[:20])
    return 0
