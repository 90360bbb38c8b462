"""Deadline: ends the waits of one stream at one time, with one timer for all of them. Imports server.errors; asyncio.

asyncio.timeout() makes and cancels a timer for every wait, which costs a streamed token 5 µs of about 30.
"""

import asyncio
import time
from types import TracebackType

from server.errors import DeadlineExceeded


class Deadline:
    """Life: each wait is inside `with deadline:`, one at a time, in any task → close(), which stops the timer."""

    def __init__(self, at_s: float | None, *, limit_s: float) -> None:
        """`at_s`: a time.monotonic(), None for no end; `limit_s`: the request's time limit, for the error."""
        self._at_s = at_s
        self._limit_s = limit_s
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self._task: asyncio.Task[object] | None = None  # that waits now
        self._num_cancels = 0  # of this task, before the wait
        self._has_cancelled = False

    def __enter__(self) -> None:
        """Begin a wait. After the deadline it still gets what is there at once."""
        if self._at_s is None:
            return
        left_s = self._at_s - time.monotonic()
        if self._timer is None or self._is_over or left_s <= 0:
            self.close()
            self._timer = asyncio.get_running_loop().call_later(max(left_s, 0.0), self._end)
        self._task = asyncio.current_task()
        assert self._task is not None, "a wait outside of a task"
        self._num_cancels = self._task.cancelling()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End a wait. Raises DeadlineExceeded if the timer has ended it, unless the task was cancelled besides."""
        task, self._task = self._task, None
        if task is None or not self._has_cancelled:
            return
        self._has_cancelled = False
        if task.uncancel() <= self._num_cancels and kind is asyncio.CancelledError:
            raise DeadlineExceeded(self._limit_s) from None

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        self._is_over = True
        if self._task is not None:
            self._has_cancelled = True
            self._task.cancel()
