"""How long the engine is gone when it ends, and whether it seems to come back. Standard library.

Measured by the launcher, published with its metrics.
"""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


_GIVEN_UP_AFTER = 5  # restarts that failed: with the back-off a quarter of a minute, and five loads


class Outage:
    """Life: begin (it ended; again, while it does not come back) → end (the next one is ready)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: float | None = None
        self._num_failed = 0
        self.last_s = 0.0

    @property
    def fault(self) -> str:
        """What State says of it: "" without one, "restarting", or "dead" once no restart seems to help."""
        if self._began_s is None:
            return ""
        return "restarting" if self._num_failed < _GIVEN_UP_AFTER else "dead"

    def begin(self) -> None:
        """Count from now; if it has begun already, a restart has failed."""
        if self._began_s is None:
            self._began_s, self._num_failed = self._clock(), 0
        else:
            self._num_failed += 1

    def end(self) -> None:
        """Measure and log it; without one, nothing."""
        if self._began_s is not None:
            self.last_s, self._began_s = self._clock() - self._began_s, None
            logger.info("engine ready again after_s=%.1f", self.last_s)
