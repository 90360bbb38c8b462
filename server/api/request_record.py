"""RequestRecord: data of an HTTP request for logs, metrics and traces, with TraceContext and OpenRequests.

AccessLog makes one record per request, keeps it in the ASGI scope and in OpenRequests, and removes it when the answer
ends. Routes and error handlers fill it in. Its `cancel` is set first by server/api/grammar_wait.py, then together with
the answer's id by server/http/routes/reply.py (generations) or server/http/routes/embeddings.py.

TraceContext follows W3C Trace Context, https://www.w3.org/TR/trace-context/ §3.2: the server's span is a child of the
span in the client's traceparent. The answer names the server's span in `traceresponse`, the header of the W3C draft of
Trace Response Headers, since traceparent and tracestate are defined for requests only.
Imports msgspec, starlette and server.generation.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.routing import Route
from starlette.types import Scope

from engine.interface.tenant import Tenant
from server.generation.spec import Stats

_SAFE_ID = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}")
_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_MEMBER = re.compile(  # §3.3.1.3: key=value, the key with or without a tenant
    r"([a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    r"=[ -+\--<>-~]{0,255}[!-+\--<>-~]"
)
_MAX_MEMBERS = 32
_MAX_STATE_CHARACTERS = 512


class TraceContext(msgspec.Struct, frozen=True):
    """One request's place in a trace. Ids are lower-case hex; parent_id "": the trace begins here."""

    trace_id: str
    span_id: str
    parent_id: str = ""
    is_sampled: bool = True
    tracestate: str = ""

    @property
    def traceresponse(self) -> str:
        """The value of the answer's header."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"


def trace_context(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext:
    """Return the context of a request with these headers. Invalid values are ignored."""
    parents, states = [], []
    for name, value in headers:
        if name == b"traceparent":
            parents.append(value.strip())
        elif name == b"tracestate":
            states.append(value)
    span_id = _random_id(8)
    match = _TRACEPARENT.fullmatch(parents[0]) if len(parents) == 1 else None
    if match is None or not _is_valid(match):
        return TraceContext(_random_id(16), span_id)
    return TraceContext(
        match[2].decode(),
        span_id,
        parent_id=match[3].decode(),
        is_sampled=bool(int(match[4], 16) & _SAMPLED),
        tracestate=_valid_state(b",".join(states).decode("latin-1")),
    )


def _is_valid(match: re.Match[bytes]) -> bool:
    """Later versions may add fields, version 00 has none; ff and ids of zeros are forbidden."""
    version, has_more = match[1], match[5] is not None
    return version != b"ff" and not (version == b"00" and has_more) and bool(int(match[2], 16) and int(match[3], 16))


def _valid_state(state: str) -> str:
    """Return a tracestate, or "" if it is too long, has a duplicate key or an invalid member.

    The SDK would drop it too, but would write the client's text to the log.
    """
    if len(state) > _MAX_STATE_CHARACTERS:
        return ""
    members = [member for part in state.split(",") if (member := part.strip(" \t"))]
    matches = [_MEMBER.fullmatch(member) for member in members]
    keys = {match[1] for match in matches if match is not None}
    return state if len(keys) == len(members) <= _MAX_MEMBERS else ""


def _random_id(num_bytes: int) -> str:
    while not int(text := secrets.token_hex(num_bytes), 16):
        pass
    return text


NO_ROUTE = "other"
RECORD_SCOPE_KEY = "quire.record"


class RequestRecord(msgspec.Struct):
    """Data of one HTTP request. stats: called at the end, if a generation was started."""

    request_id: str
    arrival_s: float  # time.monotonic()
    status: int = 0
    outcome: str = ""  # an error's code, or "abort"; "" if the answer was complete
    stats: Callable[[], Stats] | None = None
    has_started: bool = False  # the status line is out
    key_hash: str = ""  # of the API key that came with it, if keys are asked for
    key_roles: Sequence[str] = ()  # of that key
    tenant: Tenant = Tenant()  # of that key
    answer_id: str = ""  # the id in its answer, once a generation was begun
    cancel: Callable[[], object] | None = None  # ends that generation
    is_cancelled: bool = False
    model: str = ""  # the name that the client asked for, once it is known to be served
    trace: TraceContext | None = None


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of the request that `scope` belongs to."""
    record: RequestRecord = scope[RECORD_SCOPE_KEY]
    return record


def request_id_of(scope: Mapping[str, Any]) -> str:
    """Return the id of a request: that of its record, else the client's own if it is safe, else a new one."""
    record: RequestRecord | None = scope.get(RECORD_SCOPE_KEY)
    if record is not None:
        return record.request_id
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _SAFE_ID.fullmatch(value):
            return str(value, "ascii")
    return make_request_id()


def path_of(scope: Mapping[str, Any]) -> str:
    """Return the path of a request as routes declare theirs: without the --root-path that it may begin with."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    return path.removeprefix(root) if root and path.startswith(f"{root}/") else path


def route_of(scope: Scope) -> str:
    """Return the path of the route that answered, as it is declared; NO_ROUTE if it was refused before routing."""
    route = scope.get("route")
    return route.path if isinstance(route, Route) else NO_ROUTE


def make_request_id() -> str:
    """Return an id for a request without one."""
    return f"req-{secrets.token_hex(8)}"


class OpenRequests:
    """The records of one worker, in order of arrival."""

    def __init__(self) -> None:
        self._records: dict[int, RequestRecord] = {}  # by id(): two requests may bring the same x-request-id

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: RequestRecord) -> None:
        """Add the record of a request that has arrived."""
        self._records[id(record)] = record

    def remove(self, record: RequestRecord) -> None:
        """Remove the record of a request whose answer has ended."""
        self._records.pop(id(record), None)

    def cancel(self, request_id: str, *, key_hash: str) -> bool:
        """End the requests that have this id or x-request-id and came with this API key; return whether there was one.

        A request that is not generating yet ends when its generation would start.
        """
        found = False
        for record in self._records.values():
            if request_id in (record.request_id, record.answer_id) and record.key_hash == key_hash:
                found = record.is_cancelled = True
                if record.cancel is not None:
                    record.cancel()
        return found
