"""LocalEngine: an EngineClient whose engine runs on the thread of the event loop, without processes and sockets.

Life: LocalEngine.load(), which blocks → run(), a task that iterates the engine while it has work → submit …
→ close(). A device fault ends every open request with an EngineError; later ones are refused with the same sentence.
Imports engine.interface and engine.core; engine.offline, which imports torch, when a model is loaded.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from engine.core.local_client import LocalTransport
from engine.interface.config import EngineConfig
from engine.interface.errors import EngineError, ServiceError, first_line
from engine.interface.kv_snapshot import KvSnapshot
from engine.interface.mailbox import Mailbox, Mailboxes, RequestOutput
from engine.interface.protocol import AbortRequest, AddRequest, EngineReady, RequestFailed, StepEvents, TenantUse
from engine.interface.tenant import Tenant

if TYPE_CHECKING:
    from engine.core.engine import Engine
    from engine.offline import OfflineEngine


class LocalEngine:
    """One loaded model. Its queue takes `ready.max_queued_requests`; more fail with Overloaded."""

    def __init__(self, offline: "OfflineEngine") -> None:
        self._offline = offline
        self._engine: Engine = offline.engine
        self._transport: LocalTransport = offline.transport
        self._mailboxes = Mailboxes()
        self._has_work = asyncio.Event()
        self._fault = ""
        loaded = offline.loaded
        if loaded.disk is not None:
            loaded.disk.attach(self._engine.scheduler)
        self.ready: EngineReady | None = loaded.greeting(
            max_queued_requests=self._engine.max_queued_requests,
            max_queued_tokens=2**62,  # prompts wait in the caller's lists
        )

    @classmethod
    def load(cls, config: EngineConfig) -> "LocalEngine":
        """Load a model. Blocks for seconds to minutes. Raises StartupError."""
        from engine.offline import OfflineEngine

        return cls(OfflineEngine.load(config))

    @property
    def last_ready(self) -> EngineReady | None:
        """See EngineClient.last_ready."""
        return self.ready

    @property
    def is_full(self) -> bool:
        """False: the engine itself refuses a request for which its queue has no room."""
        return False

    @property
    def engines(self) -> dict[str, bool]:
        """See EngineClient.engines."""
        return {}

    def submit(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """See EngineClient.submit."""
        return self._mailboxes.outputs(request, send=self._send, abort=lambda: self.abort(request.request_id))

    def abort(self, request_id: str, *, reason: str = "abort") -> None:
        """See EngineClient.abort."""
        self._transport.inbox.append((0, AbortRequest(request_id, reason)))
        self._has_work.set()

    async def kv_snapshot(self) -> KvSnapshot:
        """Refuse: nobody watches this pool."""
        raise EngineError("There is no view of the KV cache without a server.")

    def is_decided(self, request_id: str) -> bool:
        """See EngineClient.is_decided; nothing is asked over a network."""
        return True

    def check_grammar(self, tenant: Tenant) -> None:
        """Do nothing: there are no keys, so no tenant has limits."""

    def spend_grammar_s(self, tenant: Tenant, seconds: float) -> None:
        """Do nothing: there are no keys, so no tenant has limits."""

    def tell_use(self, use: TenantUse) -> None:
        """Do nothing: there is no other engine."""

    async def run(self) -> None:
        """Iterate the engine whenever it has work, until the task is cancelled. One iteration blocks the event loop."""
        while True:
            await self._has_work.wait()
            try:
                self._engine.run_once()
            except Exception as error:  # a device fault, after which no device memory can be trusted
                self._fault = f"The engine has failed: {type(error).__name__}: {first_line(error)}"
                self._mailboxes.fail_all(self._failure)
                return
            now = time.monotonic()
            while self._transport.outbox:
                message = self._transport.outbox.popleft()
                if isinstance(message, StepEvents | RequestFailed):
                    self._mailboxes.deliver(message, now)
            if self._engine.is_idle and not self._transport.inbox:
                self._has_work.clear()
            await asyncio.sleep(0)  # readers take what there is

    def close(self) -> None:
        """Release the model's memory. Open requests end with an error."""
        self._fault = self._fault or "The model was closed."
        self.ready = None
        self._mailboxes.fail_all(self._failure)
        self._offline.loaded.close()

    async def aclose(self) -> None:
        """See EngineClient.aclose."""
        self.close()

    def _send(self, mailbox: Mailbox) -> None:
        if self._fault:
            raise self._failure()
        self._transport.inbox.append((0, mailbox.journal.submit()))
        self._has_work.set()

    def _failure(self) -> ServiceError:
        return EngineError(self._fault)
