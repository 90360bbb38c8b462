"""BodyPlace: the place of one request's body among those of an HTTP worker. with_body: work that the body bounds.

A body has its place from its first byte until release_body(), which the routes call when the prompt is made, or until
the end of its answer. Work on a large body runs outside the event loop. Imports starlette and server.
"""

import gc
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Scope

from server.api.heavy_work import HeavyWork
from server.api.limits import LIMITS
from server.api.sse import run_while_connected
from server.errors import TooManyBodies

T = TypeVar("T")
_PLACE = "quire.body"  # the key in the ASGI scope of a request's BodyPlace
_FULL_COLLECTION_EVERY = 10  # collections of the middle generation; Python's own number
_WHILE_HELD_EVERY = 100


class LargeBodies:
    """The large bodies of one worker together. num_held: their bytes.

    While there are any, full garbage collections are rare: each walks all that is decoded, while every thread waits.
    A body is in no reference cycle, so that its memory is free without them.
    """

    def __init__(self, work: HeavyWork) -> None:
        self.work = work
        self.num_held = 0

    def hold(self, num_bytes: int) -> None:
        """Count so many bytes more, or fewer if they are negative."""
        had_any = self.num_held > 0
        self.num_held += num_bytes
        has_any = self.num_held > 0
        if has_any != had_any:
            every = _WHILE_HELD_EVERY if has_any else _FULL_COLLECTION_EVERY
            gc.set_threshold(*gc.get_threshold()[:2], every)


class BodyPlace:
    """The bytes of one request's body among those of the worker."""

    def __init__(self, bodies: LargeBodies) -> None:
        self.num_bytes = 0
        self.work = bodies.work
        self._bodies = bodies
        self._num_held = 0

    @property
    def is_large(self) -> bool:
        """Return whether work on all of the body would stop the event loop for long."""
        return self.num_bytes > LIMITS.small_body_bytes

    def add(self, num_bytes: int) -> None:
        """Count bytes that have arrived. Raises TooManyBodies if all large bodies together exceed their limit."""
        self.num_bytes += num_bytes
        if not self.is_large:
            return
        self._bodies.hold(self.num_bytes - self._num_held)
        self._num_held = self.num_bytes
        if self._bodies.num_held > LIMITS.bodies_bytes:
            raise TooManyBodies(
                f"The bodies that this server process reads have more than {LIMITS.bodies_bytes} bytes together, the"
                f" limit for bodies over {LIMITS.small_body_bytes} bytes; try again."
            )

    def release(self) -> None:
        """Count the body no more."""
        self._bodies.hold(-self._num_held)
        self._num_held = 0


def give_place(scope: Scope, bodies: LargeBodies) -> BodyPlace:
    """Return a new place for the body of the request that `scope` belongs to."""
    scope[_PLACE] = place = BodyPlace(bodies)
    return place


async def with_body(request: Request, work: Callable[[], T]) -> T:
    """Return the result of work whose cost the request's body bounds: outside the event loop, if that is large.

    Raises ClientGone and Overloaded.
    """
    place: BodyPlace = request.scope[_PLACE]
    return await while_wanted(request, place.work.run_alone(work)) if place.is_large else work()


async def while_wanted(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of work on the request's body. If that is large, the work ends with its client: ClientGone."""
    place: BodyPlace = request.scope[_PLACE]
    return await (run_while_connected(request.receive, work) if place.is_large else work)


def body_size(request: Request) -> int:
    """Return the bytes of the request's body that have arrived."""
    place: BodyPlace = request.scope[_PLACE]
    return place.num_bytes


def release_body(request: Request) -> None:
    """Tell that the prompt is made: the body makes room for others."""
    place: BodyPlace = request.scope[_PLACE]
    place.release()
