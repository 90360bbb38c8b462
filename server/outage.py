"""How long the engine is gone when it ends: measured by the launcher, published with its metrics. Standard library."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Outage:
    """Life: begin (it ended; again, while it does not come back) → end (the next one is ready)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: float | None = None
        self.last_s = 0.0

    def begin(self) -> None:
        """Count from now, unless it has begun already."""
        if self._began_s is None:
            self._began_s = self._clock()

    def end(self) -> None:
        """Measure and log it; without one, nothing."""
        if self._began_s is not None:
            self.last_s, self._began_s = self._clock() - self._began_s, None
            logger.info("engine ready again after_s=%.1f", self.last_s)
