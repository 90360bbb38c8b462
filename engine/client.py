"""EngineClient: the only door from the HTTP side to the engine. Imports protocol and errors; never torch.

SocketEngineClient (engine/transport.py) is the real one; tests/fakes.py has one without processes.
"""

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from engine.protocol import AddRequest, EngineReady, TokenLogprobs


class Delta(msgspec.Struct):
    """The next tokens of one request, in order. Several when the reader is behind; none in an end without a token."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per token if asked for
    arrival_s: float = 0.0  # time.monotonic() when the worker read it from the socket
    num_cached_tokens: int | None = None  # with the first tokens
    queue_s: float | None = None
    prefill_s: float | None = None
    finish_reason: str | None = None  # with the last: "stop" | "length" | "abort"
    stop_token_id: int | None = None


class EngineClient(Protocol):
    """Submit and abort requests. Every submitted request ends: by a Delta with finish_reason or by a ServiceError."""

    @property
    def ready(self) -> EngineReady | None:
        """The engine's limits, or None while it is not serving (loading, restarting)."""
        ...

    def submit(self, request: AddRequest) -> AsyncIterator[Delta]:
        """Send the request now; iterate its deltas. Raises Overloaded, EngineDead, EngineError, RequestError.

        Leaving the iterator early (break, cancel, aclose) aborts the request.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Ask the engine to end a request; its iterator then ends with finish_reason "abort"."""
        ...

    async def aclose(self) -> None:
        """Close the connection; open requests end with EngineDead."""
        ...
