"""Tells the launcher when the engine's loop makes no progress, and when it does again. Imports engine.interface.control
only.

Life: start (the engine is ready) → beat with every Heartbeat → load (it ended: the next one is on its way, and again
with each step of its load) → start … → stop. Use inside one event loop.
"""

import asyncio
import time
from collections.abc import Callable

from engine.interface.control import LOAD_STALL_AFTER_S, STALL_AFTER_S, Heartbeat


class HeartbeatWatch:
    """Calls `on_change(True)` after `stall_after_s` without progress, `on_change(False)` with the progress after that.

    Calls `on_hang()` if there is none for `hang_after_s` either; 0: never. While an engine loads,
    LOAD_STALL_AFTER_S is the least of both.

    Progress is a heartbeat that is idle or follows a new step: a loop that turns and computes nothing is stuck too.
    """

    def __init__(
        self,
        on_change: Callable[[bool], None],
        *,
        stall_after_s: float = STALL_AFTER_S,
        on_hang: Callable[[], None] = lambda: None,
        hang_after_s: float = 0.0,
        call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_change = on_change
        self._stall_after_s = self._limit_s = stall_after_s
        self._on_hang = on_hang
        self._hang_after_s = hang_after_s
        self._call_later = call_later
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._is_running = False
        self._is_stalled = False
        self._step_id = -1
        self._progress_s = 0.0

    @property
    def age_s(self) -> float:
        """Seconds since the loop's last progress; 0 while no engine runs."""
        return self._clock() - self._progress_s if self._is_running else 0.0

    @property
    def silence_s(self) -> float:
        """Seconds since the last progress, also of an engine that loads."""
        return self._clock() - self._progress_s

    def start(self) -> None:
        """Expect heartbeats from now on."""
        self.stop()
        self._is_running, self._step_id = True, -1
        self._arm(self._stall_after_s)

    def load(self) -> None:
        """An engine has ended, or the next one's load goes on: expect more of it."""
        self._is_running = False
        self._arm(max(self._stall_after_s, LOAD_STALL_AFTER_S))
        self._go_on()

    def beat(self, heartbeat: Heartbeat) -> None:
        """Take in one heartbeat; one that comes after stop() was still on its way and means nothing."""
        has_work = heartbeat.num_running + heartbeat.num_waiting > 0
        if not self._is_running or (has_work and heartbeat.step_id == self._step_id):
            return
        self._step_id = heartbeat.step_id
        self._arm(self._stall_after_s)
        self._go_on()

    def stop(self) -> None:
        """Expect nothing any more."""
        self._is_running = self._is_stalled = False
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, limit_s: float) -> None:
        self._progress_s, self._limit_s = self._clock(), limit_s
        if self._timer is not None:
            self._timer.cancel()
        self._wait(limit_s, self._stall)

    def _go_on(self) -> None:
        if self._is_stalled:
            self._is_stalled = False
            self._on_change(False)

    def _wait(self, delay_s: float, then: Callable[[], None]) -> None:
        call_later = self._call_later or asyncio.get_running_loop().call_later
        self._timer = call_later(delay_s, then)

    def _stall(self) -> None:
        self._is_stalled = True
        if self._hang_after_s:
            self._wait(max(self._hang_after_s - self._limit_s, 0.0), self._on_hang)
        self._on_change(True)
