"""Says in the log that the first start stands still; nobody ends it, as it may rightly wait. Imports
engine.interface.control.

A disk may be slow, and another load would be no faster. How long a start may take in all is for whoever supervises the
daemon to say; the load of an engine that replaces another is server/launcher/engine_health.py's.
Life: see, for each stage that the engine tells → the stage "ready".
"""

import asyncio
import logging
import time
from collections.abc import Callable

from engine.interface.control import LOAD_STALL_AFTER_S, Stage
from server.launcher.console import stage_fields

logger = logging.getLogger(__name__)


class FirstLoadWatch:
    """Warns after SILENCE_S in which a start has told nothing new, and again after as long. Use in one event loop."""

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
        """Take in where the start stands."""
        if stage == self._stage:
            return
        if self._has_warned:
            silence_s = self._clock() - self._progress_s
            logger.warning("the start goes on after_s=%.0f stage=%s%s", silence_s, stage.name, stage_fields(stage))
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
            "the start shows no progress after_s=%.0f stage=%s%s; it is not ended, and may go on",
            silence_s,
            self._stage.name,
            stage_fields(self._stage),
        )
        self._wait()
