"""The launcher's watch over the engine: StepWatchdog (running), LoadWatchdog (first load), EngineDowntime (restarts).

StepWatchdog reports when the engine's loop makes no progress and when it continues. Life: start (the engine is ready)
→ beat with every Heartbeat → load (the engine ended and the next one loads; again with each step of that load) →
start … → stop. Use inside one event loop.
LoadWatchdog logs a warning when the initial model load makes no progress. It never kills the load: slow disks are
normal, and a second load would be no faster; a time limit for the whole start is up to the service manager.
Life: see, for each stage that the engine reports, up to the stage "ready".
EngineDowntime measures how long the engine was gone, and decides if restarts succeed; the launcher publishes it.
Imports engine.interface.control and server.launcher.processes.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from engine.interface.control import LOAD_STALL_AFTER_S, STALL_AFTER_S, Heartbeat, Stage
from server.launcher.console import stage_fields
from server.launcher.processes import Backoff

logger = logging.getLogger(__name__)
_GIVEN_UP_AFTER = 5  # restarts that failed: with the back-off a quarter of a minute, and five loads


class StepWatchdog:
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
        """Seconds since the last progress, also while an engine loads."""
        return self._clock() - self._progress_s

    def start(self) -> None:
        """Expect heartbeats from now on."""
        self.stop()
        self._is_running, self._step_id = True, -1
        self._arm(self._stall_after_s)

    def load(self) -> None:
        """Record that an engine has ended, or that the next one's load made progress; expect more progress."""
        self._is_running = False
        self._arm(max(self._stall_after_s, LOAD_STALL_AFTER_S))
        self._go_on()

    def beat(self, heartbeat: Heartbeat) -> None:
        """Record one heartbeat. A heartbeat that arrives after stop() is ignored."""
        has_work = heartbeat.num_running + heartbeat.num_waiting > 0
        if not self._is_running or (has_work and heartbeat.step_id == self._step_id):
            return
        self._step_id = heartbeat.step_id
        self._arm(self._stall_after_s)
        self._go_on()

    def stop(self) -> None:
        """Stop watching."""
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


class LoadWatchdog:
    """Warns after SILENCE_S without progress of the first load, and after each SILENCE_S. Use in one event loop."""

    SILENCE_S = LOAD_STALL_AFTER_S

    def __init__(
        self,
        *,
        call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._call_later = call_later
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._stage: Stage | None = None
        self._progress_s = 0.0
        self._has_warned = False

    def see(self, stage: Stage) -> None:
        """Record the stage that the start has reached."""
        if stage == self._stage:
            return
        if self._has_warned:
            silence_s = self._clock() - self._progress_s
            logger.warning("the start continues after_s=%.0f stage=%s%s", silence_s, stage.name, stage_fields(stage))
        self._stage, self._progress_s, self._has_warned = stage, self._clock(), False
        if self._timer is not None:
            self._timer.cancel()
        if stage.name != "ready":
            self._wait()

    def _wait(self) -> None:
        call_later = self._call_later or asyncio.get_running_loop().call_later
        self._timer = call_later(self.SILENCE_S, self._warn)

    def _warn(self) -> None:
        assert self._stage is not None
        self._has_warned = True
        silence_s = self._clock() - self._progress_s
        logger.warning(
            "the start makes no progress after_s=%.0f stage=%s%s; the daemon keeps waiting",
            silence_s,
            self._stage.name,
            stage_fields(self._stage),
        )
        self._wait()


class EngineDowntime:
    """Measures restarts. Life: end (the first engine is ready) → begin (it ended; again at each failed start) → end → …

    A restart has failed if its engine did not serve for a minute: it may get ready each time, and end or hang by what
    it is asked, or by what only work brings out in its device. The time that it hung is no service. A kill from outside
    tells nothing of that: an engine that served counts as one that would have gone on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ready_s: float | None = None
        self._began_s: float | None = None
        self._num_failed = -1  # in a row; the first engine is no restart
        self.served_s = 0.0  # how long the engine that ended last was ready and made progress
        self.last_s = 0.0

    @property
    def fault(self) -> str:
        """The fault for State: "" while an engine is ready, "restarting", or "dead" after repeated failures."""
        return "" if self._began_s is None else self._fault_or("restarting")

    @property
    def stall_fault(self) -> str:
        """The fault for State while an engine makes no progress: "stalled", or "dead" after repeated failures."""
        return self._fault_or("stalled")

    def begin(self, *, hung_s: float = 0.0, was_killed: bool = False) -> None:
        """Record that an engine has ended; count from now, unless a previous end is still being counted.

        hung_s: how long it had made no progress. was_killed: from outside; if it served, its restart has not failed.
        """
        now_s = self._clock()
        self.served_s, self._ready_s = 0.0 if self._ready_s is None else now_s - hung_s - self._ready_s, None
        if was_killed and self.served_s > 0:
            self.served_s = max(self.served_s, Backoff.HEALTHY_S)
        self._num_failed = 0 if self.served_s >= Backoff.HEALTHY_S else self._num_failed + 1
        if self._began_s is None:
            self._began_s = now_s

    def end(self) -> None:
        """Record that an engine is ready; after an end, measure and log the downtime."""
        self._ready_s = self._clock()
        if self._began_s is not None:
            self.last_s, self._began_s = self._ready_s - self._began_s, None
            logger.info("engine ready again after_s=%.1f", self.last_s)

    def _fault_or(self, hopeful: str) -> str:
        return hopeful if self._num_failed < _GIVEN_UP_AFTER else "dead"
