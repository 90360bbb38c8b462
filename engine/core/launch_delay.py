"""LaunchDelay: has a step launched shortly before the one in flight ends, so that the newest requests are in it.

Never torch. With two steps in flight a step could be launched when the one before it begins. It would leave out the
requests of the meantime: these would wait for the rest of the step in flight and for the whole step behind it. But the
device needs it only when the step in flight ends. So the loop receives messages until then, if a request that comes may
be in the next step: while none waits and a row is free, or once there are several tenants
(WaitingQueue.has_several_tenants), as it may pass another one's prompts. Where requests of one tenant wait, the next
step is launched at once: it is full, or grows by each that comes, and more first tokens come late together. With
several ranks and one tenant, too: the others' launches come later than this rank's, which nothing here learns.

Messages are also received beside a step that copies blocks alone, while there are no requests: the loop would wait for
its copies, and a request that comes would wait until it looks again. Its own step can be launched meanwhile. The next
copies begin up to a millisecond after these have ended, so not while another engine waits for blocks. The first of such
steps is launched REST_S after the last token: a client's next request often comes at once, and would wait for it.

The end is predicted: a step takes at least the shortest time of the last steps of its size. The host launches the next
one earlier by the time that it needs for that, and by more after each step that came too late, when the device had
nothing to do. While the loop receives, it asks the device every millisecond whether the step has ended, so that a
wrong prediction costs about as much.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable

from engine.core.outputs import Transport
from engine.core.planned_step import PlannedStep
from engine.core.scheduler import Scheduler
from engine.core.step import StepHandle, StepPlan
from engine.interface.protocol import ClientGone, ToEngine

REST_S = 0.005  # for a client's next request, which often comes at once, before what can be done at any time
_NUM_TIMES = 8  # steps of a size from which its time is predicted
_LEAST_TIMES = 3  # the first step of a size may compile kernels
_RATIO = 1.1  # between sizes where the scheduler has none
_POLL_S = 0.001  # epoll waits for whole milliseconds, rounded up
_SPARE_S = 0.0005  # by which a step is launched earlier than the host needs
_EARLIER_S = 0.0005  # by how much earlier after a step that was launched too late
_MOST_S = 0.02  # of the host's time, and of what late launches add to it
_KEPT = 0.99  # of both at each launch


class LaunchDelay:
    """Predicts when the step in flight ends. All times are in seconds of `clock`.

    The engine calls receive(), note_launch() and note_commit() in this order, once for each step.
    """

    def __init__(
        self, scheduler: Scheduler, transport: Transport, clock: Callable[[], float], *, num_ranks: int = 1
    ) -> None:
        self.is_on = True  # turned off where no message can come meanwhile, and by benchmarks
        self.num_delayed = self.num_late = 0  # launches; and of these, those that came too late
        self._scheduler, self._transport, self._clock = scheduler, transport, clock
        self._num_ranks = num_ranks
        self._times: dict[int, deque[float]] = {}  # by size
        self._host_s = self._earlier_s = 0.0
        self._num_tokens = 0  # of the step in flight; 0: unknown
        self._only_copies = False  # whether the step in flight has no rows
        self._is_delayed = False  # whether the step that is about to be launched was
        self._received_s: float | None = None  # when receive() returned
        self._ended_s: float | None = None  # when the step in flight was found to have ended
        self._served_s = 0.0  # the last commit of rows

    def rest(self, handle: Callable[[int, ToEngine | ClientGone], None], *, while_: Callable[[], bool]) -> bool:
        """Pass messages to `handle` until REST_S after the last commit of rows, or until `while_` is no longer true.

        Returns whether any came.
        """
        has_come = False
        while self.is_on and (left_s := self._served_s + REST_S - self._clock()) > 0 and while_():
            has_come |= self._receive_once(handle, left_s)
        return has_come

    def receive(self, step: StepHandle, begun_s: float, handle: Callable[[int, ToEngine | ClientGone], None]) -> None:
        """Pass messages to `handle` until the next step is to be launched. step: in flight, begun at begun_s."""
        self._received_s = None
        has_others = bool(self._scheduler.requests) or self._scheduler.kv.tiers.is_exchanging
        if self.is_on and self._only_copies and not has_others:
            while not step.is_done() and not self._receive_once(handle):
                pass
            return
        if not (self.is_on and self._may_help()):
            return
        due_s = begun_s + self._least_s() - self._host_s - self._earlier_s - _SPARE_S
        self._is_delayed = due_s - self._clock() >= _POLL_S
        if self._is_delayed:
            self.num_delayed += 1
            self._receive_until(due_s, step, handle)
        self._received_s = self._clock()

    def _receive_until(
        self, due_s: float, step: StepHandle, handle: Callable[[int, ToEngine | ClientGone], None]
    ) -> None:
        self._scheduler.kv.late.publish_while(lambda: self._clock() < due_s)
        while due_s - self._clock() >= _POLL_S:
            if step.is_done():
                self._ended_s = self._clock()
                return
            self._receive_once(handle)

    def _receive_once(self, handle: Callable[[int, ToEngine | ClientGone], None], timeout_s: float = _POLL_S) -> bool:
        """Wait for messages for that long at most; return whether any came."""
        has_come = False
        for client_id, message in self._transport.receive(timeout_s):
            has_come = True
            handle(client_id, message)
        tiers = self._scheduler.kv.tiers
        if tiers.is_polled:  # receive() returns at once while one of its sockets is unread
            tiers.poll(self._clock())
        return has_come

    def note_launch(self, before: StepHandle | None, plan: StepPlan | None) -> None:
        """Learn from the launch of a step, which has just returned. before: the step that was in flight, if any."""
        self._num_tokens, self._only_copies = 0, plan is not None and not plan.num_rows
        if self._received_s is not None:
            host_s = min(self._clock() - self._received_s, _MOST_S)
            self._host_s, self._earlier_s = max(self._host_s * _KEPT, host_s), self._earlier_s * _KEPT
            if self._is_delayed and before is not None and before.is_done():
                self.num_late += 1
                self._earlier_s = min(self._earlier_s + _EARLIER_S, _MOST_S)
            self._received_s = None
        if plan is not None and self.is_on:
            self._num_tokens = plan.num_tokens

    def note_commit(self, step: PlannedStep, begun_s: float, now: float) -> None:
        """Learn from a step that ran from begun_s until now, or until receive() found that it had ended."""
        ended_s, self._ended_s = self._ended_s, None
        num_tokens = sum(step.num_tokens())
        if num_tokens:
            self._served_s = now
        if self.is_on and num_tokens:  # copies alone tell nothing of small steps
            times = self._times.setdefault(self._size(num_tokens), deque(maxlen=_NUM_TIMES))
            times.append((now if ended_s is None else ended_s) - begun_s)

    def _may_help(self) -> bool:
        """Return whether a request that came now might be in the next step."""
        waiting = self._scheduler.waiting
        if waiting.has_several_tenants:
            return True
        return self._num_ranks == 1 and not waiting and self._scheduler.num_free_rows > 0

    def _least_s(self) -> float:
        """Return the time that the step in flight takes at least, as far as steps of its size or less tell; or 0."""
        if not self._num_tokens:
            return 0.0
        size = self._size(self._num_tokens)
        known = max((n for n, times in self._times.items() if n <= size and len(times) >= _LEAST_TIMES), default=None)
        return 0.0 if known is None else min(self._times[known])

    def _size(self, num_tokens: int) -> int:
        """Return the number of a step's size: steps of one number take about as long."""
        sizes = self._scheduler.config.step_sizes
        if sizes and num_tokens <= sizes[-1]:
            return bisect_left(sizes, num_tokens)
        return len(sizes) + round(math.log(max(num_tokens, 1), _RATIO))
