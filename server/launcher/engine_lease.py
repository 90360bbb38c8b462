"""EngineLease: who has the memory of the engine: this daemon, or the next one, which loads in its place. Never torch.

In a takeover of the form "instead" (server/launcher/takeover.py) the next daemon's model has no room beside this one's.
Life: lend (the engine ends between two steps, its standby too) → take_back, if the next daemon fails: the launcher
starts the engine again; or give: the HTTP workers go on with the next daemon's engine → follow its states → lose, if
that daemon ends before this one. Open requests wait meanwhile, as they do when an engine dies, and so do new ones.
Imports engine.interface and server.launcher.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

from engine.interface.control import Leave, Stage, State
from server.launcher.control_server import ControlServer
from server.launcher.engine_set import ChildKey
from server.launcher.processes import kill_child
from server.launcher.standby import Standby

logger = logging.getLogger(__name__)
_ENGINE: ChildKey = ("engine", 0)
_STOP_S = 30.0  # for the step in flight, and for what is being written to a disk
_KILL_S = 30.0  # for the kernel to end a process that was killed
_POLL_S = 0.01


class EngineLease:
    """The lease of a daemon's only engine. Use inside one event loop.

    children: the running ones. on_drain: called when the next daemon ends and this one's open requests have to.
    """

    def __init__(
        self,
        children: Mapping[ChildKey, asyncio.subprocess.Process],
        *,
        control: ControlServer,
        standby: Standby,
        on_drain: Callable[[], None],
    ) -> None:
        self.is_lent = False
        self._children = children
        self._control = control
        self._standby = standby
        self._on_drain = on_drain
        self._is_given = False
        self._is_parked = False  # the launcher waits to start the engine
        self._returned = asyncio.Event()
        self._num_ends = 0  # engines of this daemon that have ended
        self._next: State | None = None  # of the next daemon

    async def lend(self) -> None:
        """End the engine; return when its process and its standby's have ended. Raises TimeoutError if they do not."""
        self._returned.clear()
        self.is_lent = True
        is_serving = self._control.state.is_serving
        self._control.set_state(lets_wait=True)
        self._control.send(Leave(0.0), role="engine", index=0)
        loop = asyncio.get_running_loop()
        end_s = loop.time() + (_STOP_S if is_serving else 0.0)  # one that loads or hangs hears nothing
        async with asyncio.timeout_at(end_s + _KILL_S):
            await self._standby.end()
            while not self._is_parked:
                process = self._children.get(_ENGINE)
                if process is not None and process.returncode is None and loop.time() >= end_s:
                    kill_child(process)
                await asyncio.sleep(_POLL_S)

    def take_back(self) -> None:
        """Let the engine start again."""
        if self.is_lent:
            self.is_lent = False
            self._returned.set()

    def give(self) -> None:
        """The next daemon's engine serves, and stays the engine."""
        self._is_given = True
        self._num_ends = self._control.state.num_ends
        if self._next is not None:
            self.follow(self._next)

    def follow(self, state: State) -> None:
        """Let the HTTP workers know the next daemon's state; while that loads, only how far it is."""
        self._next = state
        if not self._is_given:
            if state.stage.name != "ready" and not self._control.state.is_draining:
                self._control.set_state(stage=state.stage)
            return
        self._control.follow(state, num_ends=self._num_ends)
        if state.is_draining and not self._control.state.is_draining:
            self._on_drain()

    def lose(self) -> None:
        """The next daemon has ended: requests that wait for its engine end with an error."""
        num_ends = self._control.state.num_ends - self._num_ends
        gone = State(Stage("restarting"), False, fault="dead", num_ends=num_ends, was_killed=True)
        self._control.follow(gone, num_ends=self._num_ends)

    async def wait_own(self) -> None:
        """Wait until this daemon may start its engine: for ever, once it is given."""
        self._is_parked = True
        try:
            await self._returned.wait()
        finally:
            self._is_parked = False
