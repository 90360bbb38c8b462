"""Shutdown: ends a daemon: on signals, on a fault of the launcher, or when a next daemon has its port. Never torch.

Life: start → drain on SIGTERM or SIGINT: HTTP workers finish their streams, then the engines end; a second signal ends
everything at once. After the port was given workers have no time limit, until a signal sets it. Imports
engine.interface and server.launcher.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping

from engine.interface.control import Drain
from engine.interface.errors import StartupError
from server.launcher.console import Console
from server.launcher.control_server import ControlServer
from server.launcher.engine_set import ChildKey
from server.launcher.processes import Tasks, end_child
from server.launcher.standby import Standby

logger = logging.getLogger(__name__)
_DRAIN_GRACE_S = 5.0  # what a worker gets beyond its drain timeout to send the last error events
_ENGINE_END_S = 3.0


class Shutdown:
    """The end of a daemon, and its exit code. Use inside one event loop.

    children: the running ones. wait_guests: waits until no request of an earlier daemon goes on in this one's engine.
    """

    def __init__(
        self,
        children: Mapping[ChildKey, asyncio.subprocess.Process],
        *,
        control: ControlServer,
        standby: Standby,
        console: Console,
        drain_timeout_s: float,
        wait_guests: Callable[[], Awaitable[None]],
    ) -> None:
        self.is_drained = False  # the workers have ended
        self._children = children
        self._control = control
        self._standby = standby
        self._console = console
        self._drain_timeout_s = drain_timeout_s
        self._wait_guests = wait_guests
        self._tasks = Tasks(on_error=self.fail)

    def start(self) -> None:
        """Handle signals from now on."""
        loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int] = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.drain, number)

    async def wait(self) -> int:
        """Return the exit code at the end. Raises what fail() was called with."""
        try:
            return await self._exit
        finally:
            self._tasks.cancel()

    def drain(self, number: int) -> None:
        """Handle a signal that ends the daemon; the second one ends it at once."""
        if not self._control.state.is_draining:
            self._control.set_state(is_draining=True)
            self._tasks.spawn(self._drain())
        elif not self._exit.done():
            logger.warning("second signal received; the daemon ends without a drain")
            self._exit.set_result(128 + number)

    def give(self) -> None:
        """A next daemon has the port: let what is open end here, however long it takes, then end."""
        self._console.stop()
        self._standby.stop()
        self._tasks.spawn(self._end_given())

    def refuse(self, message: str, exit_code: int) -> None:
        """End the daemon, since it cannot start."""
        self.fail(StartupError(message, exit_code=exit_code))

    def fail(self, error: BaseException) -> None:
        """End the daemon; from a task of the launcher it is a bug, and half a launcher must not go on."""
        if not self._exit.done():
            self._exit.set_exception(error)

    async def _drain(self) -> None:
        """Let every stream finish or time out, then end the engines."""
        timeout_s = self._drain_timeout_s
        self._console.stop()
        logger.info("draining timeout_s=%g; a second signal ends the daemon at once", timeout_s)
        self._control.send(Drain(timeout_s), role="worker")
        end_s = timeout_s + _DRAIN_GRACE_S
        ends = [end_child(worker, timeout_s=end_s) for worker in self._processes("worker")]
        await asyncio.gather(*ends, self._end_guests(end_s))
        await self._end_engines()

    async def _end_guests(self, timeout_s: float) -> None:
        """Give the open requests of an earlier daemon the same time; it hears of the drain, and drains as well."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wait_guests()

    async def _end_given(self) -> None:
        await asyncio.gather(*(worker.wait() for worker in self._processes("worker")))
        await self._wait_guests()
        if not self._control.state.is_draining:
            await self._end_engines()

    async def _end_engines(self) -> None:
        self.is_drained = True
        self._standby.stop()
        await self._control.aclose()
        is_serving = self._control.state.stage.name == "ready"  # one that loads hears nothing
        timeout_s = _ENGINE_END_S if is_serving else 0.0
        await asyncio.gather(*(end_child(engine, timeout_s=timeout_s) for engine in self._processes("engine")))
        logger.info("stopped")
        if not self._exit.done():
            self._exit.set_result(0)

    def _processes(self, role: str) -> list[asyncio.subprocess.Process]:
        return [process for child, process in self._children.items() if child[0] == role]
