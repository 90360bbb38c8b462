"""EngineClient: the interface through which the server uses the engine. Plain asyncio; never torch.

engine/interface/socket_client.py implements it with one connection per HTTP worker; server/local/engine.py in the
engine's own process; tests/support/fakes.py without an engine.
Life of a request: submit() registers a mailbox under its request_id and sends AddRequest. StepEvents fill the mailbox;
outputs that the reader has not taken yet are merged. The last output, an error or the end of the iteration removes it.
"""

from collections.abc import AsyncGenerator
from typing import Protocol

from engine.interface.kv_snapshot import KvSnapshot
from engine.interface.mailbox import RequestOutput
from engine.interface.protocol import AddRequest, EngineReady, TenantUse
from engine.interface.tenant import Tenant

QUEUE_IS_FULL = "The queue is full; try again later."


class EngineClient(Protocol):
    """Submits and aborts requests.

    Every submitted request ends, with a RequestOutput that has a finish_reason or with a ServiceError.
    """

    @property
    def ready(self) -> EngineReady | None:
        """The engine's limits, or None while the engine does not serve (loading, restarting)."""
        ...

    @property
    def last_ready(self) -> EngineReady | None:
        """The limits of the engine that serves or served last, or None before the first."""
        ...

    @property
    def is_full(self) -> bool:
        """True while the engine's queue is full."""
        ...

    @property
    def engines(self) -> dict[str, bool]:
        """The engines by name and whether each serves; {}: there is one engine, which has no name."""
        ...

    def submit(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """Iterate over the outputs of a request. The first iteration sends the request.

        Raises Overloaded, EngineDead, ShuttingDown, EngineError, RequestError. aclose() or a cancellation before the
        end aborts the request.
        """
        ...

    def abort(self, request_id: str, *, reason: str = "abort") -> None:
        """Tell the engine to end a request; its last output then has this finish_reason ("abort" | "stop")."""
        ...

    def is_decided(self, request_id: str) -> bool:
        """Return whether an engine has accepted a request, or the request has ended. Also True if it is unknown."""
        ...

    async def kv_snapshot(self) -> KvSnapshot:
        """Request a snapshot of the KV pool; concurrent calls share one. Raises EngineDead, ShuttingDown."""
        ...

    def check_grammar(self, tenant: Tenant) -> None:
        """Raise RateLimited while the tenant has no grammar_seconds left."""
        ...

    def spend_grammar_s(self, tenant: Tenant, seconds: float) -> None:
        """Tell the engine that processor time was spent on a grammar of the tenant."""
        ...

    def tell_use(self, use: TenantUse) -> None:
        """See ToldOfUses.tell_use."""
        ...

    async def aclose(self) -> None:
        """Close the connection permanently. Open and later requests end with ShuttingDown."""
        ...
