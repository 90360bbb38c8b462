"""RequestRecord: the facts of one HTTP request that logs, metrics and traces read. Imports server only.

AccessLog makes one per request and keeps it in the ASGI scope; routes and error handlers fill it in.
"""

import secrets
from collections.abc import Callable

import msgspec
from starlette.routing import Route
from starlette.types import Scope

from server.api.trace_context import TraceContext
from server.generation.generation import Stats

NO_ROUTE = "other"
RECORD_SCOPE_KEY = "quire.record"


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
    cancel: Callable[[], object] | None = None  # ends that generation
    is_cancelled: bool = False
    model: str = ""  # the name that the client asked for, once it is known to be served
    trace: TraceContext | None = None


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of the request that `scope` belongs to."""
    return scope[RECORD_SCOPE_KEY]


def route_of(scope: Scope) -> str:
    """Return the path of the route that answered, as it is declared; NO_ROUTE if the request was refused before."""
    route = scope.get("route")
    return route.path if isinstance(route, Route) else NO_ROUTE


def make_request_id() -> str:
    """Return the id of a request that brought none."""
    return f"req-{secrets.token_hex(8)}"
