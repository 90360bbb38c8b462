"""LauncherLink: a worker's connection to the launcher, the real engine.interface.control.LauncherChannel. Never torch.

Life: start (connect, Hello) → keeps State, answers Flush, sends its counts every second, scrapes → drain, or the
connection's end, which means that the launcher has ended → aclose. Imports engine only.
"""

import asyncio
import contextlib
import itertools
import os
from collections.abc import Callable
from typing import Protocol

import msgspec

from engine.interface.control import (
    AskUsage,
    Cancel,
    Cancelled,
    Drain,
    EngineFailed,
    Flush,
    Flushed,
    FromLauncher,
    HandedOver,
    Hello,
    Keys,
    Ledger,
    Page,
    Prepared,
    ReloadTls,
    Scrape,
    Serving,
    Stage,
    State,
    ToLauncher,
)
from engine.interface.errors import EngineError
from engine.interface.metrics import Metrics, MetricsDelta
from engine.interface.tenant import Tenant
from engine.interface.transport import encode_frame, read_messages

_DELTA_INTERVAL_S = 1.0
_SCRAPE_TIMEOUT_S = 2.5
_CANCEL_TIMEOUT_S = 2.0


class CancelHere(Protocol):
    """Ends this worker's requests with an id and an API key (OpenRequests.cancel)."""

    def __call__(self, request_id: str, *, key_hash: str) -> bool:
        """Return if there was one."""
        ...


class LauncherLink:
    """LauncherChannel over the control socket at `path`. Use inside one event loop."""

    def __init__(
        self,
        path: str,
        *,
        worker_index: int,
        metrics: Metrics,
        on_cancel: CancelHere,
        before_send: Callable[[], None] = lambda: None,
    ) -> None:
        """before_send: called before the metrics are sent, to record gauges."""
        self.on_reload_tls: Callable[[], None] = lambda: None  # set by a worker that serves HTTPS
        self.on_handed_over: Callable[[], None] = lambda: None  # set by a worker that serves
        self.handed_over = asyncio.Event()  # another daemon has the port
        self._path = path
        self._worker_index = worker_index
        self._metrics = metrics
        self._on_cancel = on_cancel
        self._before_send = before_send
        self._state = State(Stage("config"), False)
        self._key_hashes: list[str] = []
        self._key_roles: dict[str, list[str]] = {}
        self._key_tenants: dict[str, Tenant] = {}
        self._greeted = asyncio.Event()
        self._accepts = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._pages: dict[int, asyncio.Future[bytes]] = {}
        self._ledgers: dict[int, asyncio.Future[Ledger]] = {}
        self._cancels: dict[int, asyncio.Future[bool | None]] = {}
        self._numbers = itertools.count(1)
        self._is_connected = False
        self._end: asyncio.Future[float] | None = None

    @property
    def state(self) -> State:
        """The last State the launcher sent."""
        return self._state

    @property
    def key_hashes(self) -> list[str]:
        """See LauncherChannel.key_hashes."""
        return self._key_hashes

    @property
    def key_roles(self) -> dict[str, list[str]]:
        """See LauncherChannel.key_roles."""
        return self._key_roles

    @property
    def key_tenants(self) -> dict[str, Tenant]:
        """See LauncherChannel.key_tenants."""
        return self._key_tenants

    @property
    def is_connected(self) -> bool:
        """False once the launcher is gone."""
        return self._is_connected

    async def start(self) -> None:
        """Connect, say Hello and wait for the State. Raises OSError if the launcher is gone."""
        reader, self._writer = await asyncio.open_unix_connection(self._path, limit=1 << 20)
        self._is_connected = True
        self._end = asyncio.get_running_loop().create_future()
        self._send(Hello("worker", self._worker_index, os.getpid()))
        self._tasks = [asyncio.create_task(self._receive(reader)), asyncio.create_task(self._send_deltas())]
        await self._greeted.wait()  # keys that were changed are here too: none is let in by the old ones

    async def wait_end(self) -> float:
        """Wait for the request to end; return the seconds that open requests have. 0 if the launcher has ended."""
        assert self._end is not None, "start() first"
        return await asyncio.shield(self._end)

    async def scrape(self, *, is_open_metrics: bool = False) -> bytes:
        """Return the metrics page of the whole daemon. Raises EngineError when the launcher does not answer in time."""
        number = next(self._numbers)
        page = self._pages[number] = asyncio.get_running_loop().create_future()
        self._send_delta()
        self._send(Scrape(number, is_open_metrics))
        try:
            return await asyncio.wait_for(page, _SCRAPE_TIMEOUT_S)
        except TimeoutError:
            raise EngineError("The metrics registry did not answer in time.") from None
        finally:
            self._pages.pop(number, None)

    async def usage(self) -> Ledger:
        """See LauncherChannel.usage. Raises EngineError when the launcher does not answer in time."""
        number = next(self._numbers)
        ledger = self._ledgers[number] = asyncio.get_running_loop().create_future()
        self._send_delta()
        self._send(AskUsage(number))
        try:
            return await asyncio.wait_for(ledger, _SCRAPE_TIMEOUT_S)
        except TimeoutError:
            raise EngineError("The ledger did not answer in time.") from None
        finally:
            self._ledgers.pop(number, None)

    async def cancel(self, request_id: str, *, key_hash: str) -> bool:
        """See LauncherChannel.cancel. Raises EngineError when the launcher or a worker does not answer in time."""
        number = next(self._numbers)
        answer = self._cancels[number] = asyncio.get_running_loop().create_future()
        self._send(Cancel(number, request_id, key_hash))
        try:
            found = await asyncio.wait_for(answer, _CANCEL_TIMEOUT_S)
        except TimeoutError:
            found = None
        finally:
            self._cancels.pop(number, None)
        if found is None:
            raise EngineError("Not every HTTP worker has answered in time whether it serves this request.")
        return found

    async def wait_accept(self) -> bool:
        """Tell the launcher that this worker has loaded; return True once it may accept connections.

        False: it was told to end before.
        """
        self._send(Prepared())
        await self._accepts.wait()
        return self._state.accepts

    def serve(self) -> None:
        """Tell the launcher that this worker accepts connections."""
        self._send(Serving())

    def fail(self, message: str, exit_code: int) -> None:
        """Send the launcher one sentence with the reason why this worker cannot start."""
        self._send(EngineFailed(message, exit_code))

    async def aclose(self) -> None:
        """Send the last counts and close the connection."""
        self._send_delta()
        for task in self._tasks:
            task.cancel()
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        try:
            async for message in read_messages(reader, FromLauncher):
                match message:
                    case State():
                        self._set_state(message)
                        self._greeted.set()
                        if message.accepts:
                            self._accepts.set()
                    case Keys(hashes, roles, tenants):
                        self._key_hashes, self._key_roles, self._key_tenants = hashes, roles, tenants
                    case Ledger(number):
                        if number in self._ledgers and not self._ledgers[number].done():
                            self._ledgers[number].set_result(message)
                    case Flush(number):
                        self._send_delta()
                        self._send(Flushed(number))
                    case Page(number, body):
                        if number in self._pages and not self._pages[number].done():
                            self._pages[number].set_result(body)
                    case Cancel(number, request_id, key_hash):
                        self._send(Cancelled(number, self._on_cancel(request_id, key_hash=key_hash)))
                    case Cancelled(number, found):
                        if number in self._cancels and not self._cancels[number].done():
                            self._cancels[number].set_result(found)
                    case ReloadTls():
                        self.on_reload_tls()
                    case HandedOver():
                        self.handed_over.set()
                        self._set_state(self._state)
                        self.on_handed_over()
                    case Drain(timeout_s):
                        self._set_end(timeout_s)
        except (OSError, msgspec.MsgspecError):
            pass
        finally:
            self._is_connected = False
            self._greeted.set()
            self._set_end(0.0)

    def _set_state(self, state: State) -> None:
        """Keep a State, which says nothing of a hand-over: that is final."""
        self._state = msgspec.structs.replace(state, accepts=False) if self.handed_over.is_set() else state

    def _set_end(self, timeout_s: float) -> None:
        self._state = msgspec.structs.replace(self._state, is_draining=True)
        self._accepts.set()
        if self._end is not None and not self._end.done():
            self._end.set_result(timeout_s)

    async def _send_deltas(self) -> None:
        while True:
            await asyncio.sleep(_DELTA_INTERVAL_S)
            self._send_delta()

    def _send_delta(self) -> None:
        self._before_send()
        delta = self._metrics.drain()
        if delta != MetricsDelta({}, {}, {}):
            self._send(delta)

    def _send(self, message: ToLauncher) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode_frame(message))
