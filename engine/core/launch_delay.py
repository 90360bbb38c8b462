"""LaunchDelay: launches a step shortly before the one in flight ends, so that the newest requests are in it. Never torch.

A step that is launched as soon as the one before it begins leaves out the requests of the meantime: these wait for the
rest of the step in flight and for the whole step behind it. The device needs the next step only when this one ends. So
with several tenants (engine/core/waiting_queue.py) the loop goes on to receive messages meanwhile.

The end is predicted from the shortest of the last steps of the same size, and a step that was launched too late, so
that the device had nothing to do, makes the following ones be launched earlier. While the loop waits it asks the device
every millisecond, so a wrong prediction costs about as much.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable

from engine.core.outputs import Transport
from engine.core.planned_step import PlannedStep
from engine.core.scheduler import Scheduler
from engine.core.step import StepHandle
from engine.interface.protocol import ToEngine
from engine.interface.protocol import ClientGone

_NUM_TIMES = 8  # steps of a size from which its time is predicted
_LEAST_TIMES = 3
_RATIO = 1.1  # of neighbouring sizes, where the scheduler has none
_POLL_S = 0.001
_SPARE_S = 0.0005  # by which a step is launched early, beside what the host needs for it
_MAX_EARLIER_S = 0.02
_EARLIER_STEP_S = 0.0005  # more of it after a step that was launched too late
_KEPT = 0.99  # of it, and of the longest time of the host, after each launch


class LaunchDelay:
    """Owns the times of steps by size, and when the step in flight was launched. All times in seconds of `clock`."""

    def __init__(self, scheduler: Scheduler, transport: Transport, clock: Callable[[], float]) -> None:
        self.launched_s = 0.0  # when the step in flight was planned
        self.committed_s = 0.0
        self.num_late = self.num_delayed = 0
        self._scheduler, self._transport, self._clock = scheduler, transport, clock
        self._sizes = scheduler.config.step_sizes
        self._times: dict[int, deque[float]] = {}
        self._host_s = self._earlier_s = 0.0
        self._begun_s: float | None = None  # when the last delay ended
        self._ended_s: float | None = None  # when the step in flight was found to have ended

    def receive(self, step: StepHandle, planned: PlannedStep, handle: Callable[[int, ToEngine | ClientGone], None]) -> None:
        """Handle messages until the next step is to be launched."""
        expected_s = self._expected_s(planned)
        if expected_s is None:
            return
        due_s = max(self.committed_s, self.launched_s) + expected_s
        due_s -= self._host_s + self._earlier_s + _SPARE_S
        if due_s - self._clock() < _POLL_S:
            return
        self._scheduler.kv.late.publish_while(lambda: self._clock() < due_s and not step.is_done())
        self.num_delayed += 1
        while (left_s := due_s - self._clock()) > 0:
            if step.is_done():
                self._ended_s = self._clock()
                break
            for client_id, message in self._transport.receive(min(left_s, _POLL_S)):
                handle(client_id, message)
        self._begun_s = self._clock()

    def note_launch(self, before: StepHandle | None) -> None:
        """Learn from a step that has just been launched. before: the step in flight."""
        if self._begun_s is None or before is None:
            return
        self._host_s = max(self._host_s * _KEPT, self._clock() - self._begun_s)
        self._earlier_s *= _KEPT
        if before.is_done():
            self.num_late += 1
            self._earlier_s = min(self._earlier_s + _EARLIER_STEP_S, _MAX_EARLIER_S)
        self._begun_s = None

    def note_commit(self, planned: PlannedStep, now: float) -> float:
        """Learn from a committed step; return the time that it took."""
        ended_s = now if self._ended_s is None else self._ended_s
        step_s = ended_s - max(self.committed_s, self.launched_s)
        self._ended_s = None
        self._times.setdefault(self._size(planned), deque(maxlen=_NUM_TIMES)).append(step_s)
        return step_s

    def _size(self, planned: PlannedStep) -> int:
        total = sum(planned.num_tokens())
        if self._sizes and total <= self._sizes[-1]:
            return bisect_left(self._sizes, total)
        return 1000 + round(math.log(max(total, 1), _RATIO))

    def _expected_s(self, planned: PlannedStep) -> float | None:
        size = self._size(planned)
        for known in sorted(self._times, reverse=True):
            if known <= size and len(self._times[known]) >= _LEAST_TIMES:
                return min(self._times[known])
        return None
