"""Standby: keeps a second engine process, which takes over when the engine ends (--standby). Never torch.

It is loaded beside the engine as far as there is room: wholly on a CPU; with a GPU its imports are done, the weights
are in the page cache, and it has rehearsed a small model, of which a context and some memory stay there. One is started
when the engine is ready, so that it takes no time from its load. Imports server.launcher.processes.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from engine.interface.child_process import describe_exit
from engine.interface.control import EngineFailed
from server.launcher.processes import Backoff, kill_child

logger = logging.getLogger(__name__)


class Standby:
    """Life: want (the engine is ready) → run starts one → load (it waits) → take (the engine ended) → want …

    Use in one event loop.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[asyncio.subprocess.Process]],
        *,
        reason: Callable[[], EngineFailed | None] = lambda: None,
        tell: Callable[[bool], None] = lambda is_loaded: None,
    ) -> None:
        """start: starts the process, which waits for Activate. reason: returns what it said before it ended.

        tell: called with is_loaded when one is loaded or ends untaken, and when the engine is ready.
        """
        self._start = start
        self._reason = reason
        self._tell = tell
        self._loaded_pid: int | None = None
        self._is_stopped = self._is_paused = False
        self._wanted = asyncio.Event()
        self._taken = asyncio.Event()
        self.process: asyncio.subprocess.Process | None = None

    @property
    def is_loaded(self) -> bool:
        """True while there is one that takes over in a moment."""
        process = self.process
        return process is not None and process.returncode is None and process.pid == self._loaded_pid

    def load(self, pid: int) -> None:
        """Record that the process waits for Activate, loaded as far as there is room."""
        if self.process is not None and self.process.pid != pid:
            return  # one that has ended said so
        self._loaded_pid = pid
        if self.is_loaded:
            self._tell(True)

    def want(self) -> None:
        """Ask for a standby, unless there is one."""
        self._is_paused = False
        self._tell(self.is_loaded)
        if self.process is None:
            self._wanted.set()

    def take(self) -> asyncio.subprocess.Process | None:
        """Return the standby, whose process is the caller's from now on, or None if there is none."""
        process, self.process = self.process, None
        self._wanted.clear()
        self._taken.set()
        return process if process is not None and process.returncode is None else None

    def stop(self) -> None:
        """Start none from now on."""
        self._is_stopped = True

    async def end(self) -> None:
        """End the process, if there is one; return when it has ended. The next one starts when it is wanted."""
        self._is_paused = True
        process = self.take()
        if process is not None:
            kill_child(process)
            await process.wait()

    async def run(self) -> None:
        """Start a standby whenever one is wanted, and another after a delay if it ends untaken."""
        backoff = Backoff()
        while True:
            await self._wanted.wait()
            if self._is_stopped:
                return
            self._wanted.clear()
            if self._is_paused:
                continue
            process = self.process = await self._start()
            if self._is_paused:  # meanwhile
                kill_child(process)
            started_s = time.monotonic()
            self._taken.clear()  # there was none to take before
            ended, taken = asyncio.create_task(process.wait()), asyncio.create_task(self._taken.wait())
            try:
                await asyncio.wait([ended, taken], return_when=asyncio.FIRST_COMPLETED)
            finally:
                ended.cancel()
                taken.cancel()
            if self.process is process and self._is_paused:
                self.process = None
            elif self.process is process and not self._is_stopped:
                self.process = None
                self._tell(False)
                delay_s, failure = backoff.next(healthy_s=time.monotonic() - started_s), self._reason()
                reason = failure.message if failure else f"It {describe_exit(process.returncode or 0)}."
                logger.error("standby ended, restarting delay_s=%g reason=%r", delay_s, reason)
                await asyncio.sleep(delay_s)
                self._wanted.set()
