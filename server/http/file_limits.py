"""File descriptors: as many as the system grants, and connections refused before the last are gone. Standard library.

Without descriptors libuv closes new connections without a word. So a worker keeps some back, answers 503 to connections
beyond, and says so in the log.
"""

import logging
import resource
import time
from collections.abc import Callable

from server.errors import TooManyConnections

logger = logging.getLogger(__name__)

_ENOUGH = 65_536  # a higher limit only makes those loops longer that close what a child shall not inherit
_MAX_RESERVE = 64  # for the engine, a grammar checker, traces, refusals on their way out
_LOG_INTERVAL_S = 10.0


class ConnectionLimit:
    """Connections that one worker holds at once. num_files: its descriptors; by default what the system says."""

    def __init__(self, num_files: int | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if num_files is None else num_files
        self._num_files = _ENOUGH if soft == resource.RLIM_INFINITY else soft
        self._maximum = self._num_files - min(_MAX_RESERVE, self._num_files // 2)
        self._clock = clock
        self._num_refused = 0
        self._next_log_s = clock()

    def refusal(self, num_connections: int) -> TooManyConnections | None:
        """Return why the newest of so many connections is refused, None if it is not."""
        if num_connections <= self._maximum:
            return None
        self._num_refused += 1
        if self._clock() >= self._next_log_s:
            logger.error(
                "connections refused=%d, at most %d of %d file descriptors are for them (ulimit -n)",
                self._num_refused,
                self._maximum,
                self._num_files,
            )
            self._num_refused, self._next_log_s = 0, self._clock() + _LOG_INTERVAL_S
        return TooManyConnections(f"This server process has its {self._maximum} connections; try again.")
