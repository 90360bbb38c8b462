"""The forms that streams of server-sent events take: OpenAI's anonymous chunks, and events with names.

A StreamWriter makes the bytes of one answer; routes/answer.py runs it. An event that shows nothing is b"".
"""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from engine.interface.errors import ServiceError
from server.api.error_replies import error_body
from server.api.streaming import PING, SSE_DONE

E = TypeVar("E")
E_contra = TypeVar("E_contra", contravariant=True)

_encoder = msgspec.json.Encoder()


class ReplyHead(msgspec.Struct, frozen=True):
    """What every chunk of an answer repeats."""

    id: str
    created: int  # Unix time, seconds
    model: str


class Writer(Protocol[E_contra]):
    """Makes one kind of answer of one kind of events."""

    def opening(self) -> list[msgspec.Struct]:
        """Chunks before the first event."""
        ...

    def chunk(self, event: E_contra, *, is_last: bool) -> msgspec.Struct | None:
        """The chunk of one event, if it shows anything. `is_last`: no chunk of a choice comes after it."""
        ...

    def closing(self) -> msgspec.Struct | None:
        """The usage chunk, if it was asked for."""
        ...

    def whole(self, events: Sequence[E_contra]) -> msgspec.Struct:
        """The answer as one body."""
        ...


def sse_event(chunk: msgspec.Struct) -> bytes:
    """Return one server-sent event."""
    return b"data: " + _encoder.encode(chunk) + b"\n\n"


class StreamWriter(Protocol[E_contra]):
    """Makes one kind of answer, whole or as the bytes of a stream."""

    @property
    def ping(self) -> bytes:
        """What is sent while nothing else is."""
        ...

    def opening(self) -> bytes:
        """What comes before the first event."""
        ...

    def event(self, event: E_contra, *, is_last: bool) -> bytes:
        """What one event shows. `is_last`: no event of any choice comes after it."""
        ...

    def closing(self) -> bytes:
        """What ends a stream that went well."""
        ...

    def failed(self, error: ServiceError, *, request_id: str) -> bytes:
        """What ends a stream that did not: a stream is never just closed."""
        ...

    def whole(self, events: Sequence[E_contra]) -> msgspec.Struct:
        """The answer as one body."""
        ...


class DataEvents(Generic[E]):
    """A StreamWriter over a Writer of chunks: each is an event without a name, and [DONE] is the last in any case."""

    ping = PING

    def __init__(self, writer: Writer[E]) -> None:
        self._writer = writer

    def opening(self) -> bytes:
        """See StreamWriter.opening."""
        return b"".join(map(sse_event, self._writer.opening()))

    def event(self, event: E, *, is_last: bool) -> bytes:
        """See StreamWriter.event."""
        chunk = self._writer.chunk(event, is_last=is_last)
        return sse_event(chunk) if chunk is not None else b""

    def closing(self) -> bytes:
        """See StreamWriter.closing."""
        chunk = self._writer.closing()
        return (sse_event(chunk) if chunk is not None else b"") + SSE_DONE

    def failed(self, error: ServiceError, *, request_id: str) -> bytes:
        """See StreamWriter.failed."""
        return b"data: " + error_body(error, request_id=request_id) + b"\n\n" + SSE_DONE

    def whole(self, events: Sequence[E]) -> msgspec.Struct:
        """See StreamWriter.whole."""
        return self._writer.whole(events)


def named_event(event: msgspec.Struct) -> bytes:
    """Return one server-sent event; its name is the struct's tag, which its JSON has as `type`."""
    return f"event: {event.__struct_config__.tag}\ndata: ".encode() + _encoder.encode(event) + b"\n\n"
