"""How long the engine is gone when it ends, and whether it seems to come back. Imports server.launcher.processes.

Measured by the launcher, published with its metrics.
"""

import logging
import time
from collections.abc import Callable

from server.launcher.processes import Backoff

logger = logging.getLogger(__name__)


_GIVEN_UP_AFTER = 5  # restarts that failed: with the back-off a quarter of a minute, and five loads


class Outage:
    """Life: end (the first engine is ready) → begin (it ended; again, while it does not come back) → end → …

    A restart has failed if its engine did not serve for a minute: it may get ready each time, and end by what it is
    asked, or by what only work brings out in its device.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ready_s: float | None = None
        self._began_s: float | None = None
        self._num_failed = -1  # in a row; the first engine is no restart
        self.served_s = 0.0  # how long the engine that ended last was ready
        self.last_s = 0.0

    @property
    def fault(self) -> str:
        """What State says of it: "" while one is ready, "restarting", or "dead" once no restart seems to help."""
        if self._began_s is None:
            return ""
        return "restarting" if self._num_failed < _GIVEN_UP_AFTER else "dead"

    def begin(self) -> None:
        """An engine has ended: count from now, unless it was gone already."""
        now_s = self._clock()
        self.served_s, self._ready_s = 0.0 if self._ready_s is None else now_s - self._ready_s, None
        self._num_failed = 0 if self.served_s >= Backoff.HEALTHY_S else self._num_failed + 1
        if self._began_s is None:
            self._began_s = now_s

    def end(self) -> None:
        """An engine is ready: measure and log how long there was none, if one has ended."""
        self._ready_s = self._clock()
        if self._began_s is not None:
            self.last_s, self._began_s = self._ready_s - self._began_s, None
            logger.info("engine ready again after_s=%.1f", self.last_s)
