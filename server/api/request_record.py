"""RequestRecord: the facts of one HTTP request that logs, metrics and traces read. Imports server only.

AccessLog makes one per request and keeps it in the ASGI scope; routes and error handlers fill it in.

W3C Trace Context: which trace a request belongs to. https://www.w3.org/TR/trace-context/ §3.2; imports msgspec.

A client's traceparent makes its span the parent of ours. The answer says who we were in `traceresponse`, the header of
W3C's draft of Trace Response Headers: traceparent and tracestate are defined for requests alone.

Which POST requests this worker is serving, so that one can be cancelled by its id. Imports server.http.access_log.

AccessLog adds a request's record when it arrives and removes it when its answer is over. How to end it is noted there
by grammar_wait.py first; then, with the answer's id, by routes/reply.py (generations) or routes/embeddings.py.
"""

import re
import secrets
from collections.abc import Callable, Iterable

import msgspec
from starlette.routing import Route
from starlette.types import Scope

from server.generation.generation import Stats

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
    """Return the context of a request with these headers; what is not valid in them is as if it were not there."""
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
    """Return a tracestate, or "" for one that is too long, has a key twice, or a member that is none.

    The SDK would drop it as well, but with a line in our log that has the client's text.
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
    record: RequestRecord = scope[RECORD_SCOPE_KEY]
    return record


def route_of(scope: Scope) -> str:
    """Return the path of the route that answered, as it is declared; NO_ROUTE if the request was refused before."""
    route = scope.get("route")
    return route.path if isinstance(route, Route) else NO_ROUTE


def make_request_id() -> str:
    """Return the id of a request that brought none."""
    return f"req-{secrets.token_hex(8)}"


class OpenRequests:
    """The records of one worker, in order of arrival."""

    def __init__(self) -> None:
        self._records: dict[int, RequestRecord] = {}  # by id(): two requests may bring the same x-request-id

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: RequestRecord) -> None:
        """A request has arrived."""
        self._records[id(record)] = record

    def remove(self, record: RequestRecord) -> None:
        """Its answer is over."""
        self._records.pop(id(record), None)

    def cancel(self, request_id: str, *, key_hash: str) -> bool:
        """End the requests that have this id or x-request-id and came with this API key; return if there was one.

        One that generates nothing yet ends as soon as it would begin.
        """
        found = False
        for record in self._records.values():
            if request_id in (record.request_id, record.answer_id) and record.key_hash == key_hash:
                found = record.is_cancelled = True
                if record.cancel is not None:
                    record.cancel()
        return found
