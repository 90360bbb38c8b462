"""SpareWork: work that can be done at any time, a piece after the other, where it delays requests least. Never torch.

Idle work has a piece in each turn without messages and requests, after REST_S without a message. Busy work has one in
every _TURNS_PER_PIECE-th turn with requests. Each ends when it returns False.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.core.launch_delay import REST_S

_TURNS_PER_PIECE = 8  # of busy work


class SpareWork:
    """The idle and the busy work that are left of one engine."""

    def __init__(
        self,
        idle_work: Callable[[Callable[[], bool]], bool],
        busy_work: Callable[[], bool],
        has_arrivals: Callable[[], bool],
    ) -> None:
        """idle_work, busy_work: do a piece, return False after the last one.

        has_arrivals: passed to idle_work; tells whether a message has arrived, which waits for the piece's end.
        """
        self._idle_work: Callable[[Callable[[], bool]], bool] | None = idle_work
        self._busy_work: Callable[[], bool] | None = busy_work
        self._has_arrivals = has_arrivals
        self._num_busy_turns = 0

    def patience_s(self, timeout_s: float | None) -> float | None:
        """Return how long an idle loop waits for messages: timeout_s (None: until one comes), or less for a piece."""
        if self._idle_work is None:
            return timeout_s
        return REST_S if timeout_s is None else min(timeout_s, REST_S)

    def end_turn(self, *, had_nothing: bool, is_idle: bool) -> SpareWork | None:
        """Do a piece, if it is time for one; return itself, or None if nothing is left.

        had_nothing: the turn began idle, and no message came. is_idle: it has ended so.
        """
        if had_nothing and self._idle_work is not None and not self._idle_work(self._has_arrivals):
            self._idle_work = None
        if self._busy_work is not None and not is_idle:
            self._num_busy_turns += 1
            if self._num_busy_turns % _TURNS_PER_PIECE == 0 and not self._busy_work():
                self._busy_work = None
        return None if self._idle_work is None and self._busy_work is None else self
