"""LoopProbe: the longest silence of an event loop, in milliseconds of this process's own work.

slowness() is that of the machine.
"""

import asyncio
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType

from server.http.worker_app import COLLECT_EVERY, SWITCH_S

_BEAT_S = 0.001
_STEP_S = 0.007  # of the step below, on an idle machine of the kind that budgets are for


def slowness(clock: Callable[[], float] = time.process_time) -> float:
    """Return how many times longer a step of work takes than on an idle machine, 1 at least.

    clock: time.process_time() sees a slow processor, time.monotonic() one that others load as well.
    """
    times_s = []
    for _ in range(9):
        begun_s = clock()
        sum(i * i for i in range(150_000))
        times_s.append(clock() - begun_s)
    return max(statistics.median(times_s) / _STEP_S, 1.0)


@contextmanager
def interpreter_as_in_a_worker() -> Iterator[None]:
    """While it is entered, threads take turns as in a worker, and garbage is collected seldom, but for what lives.

    What tests/conftest.py has frozen stays so: a collection of all that they import takes half a second.
    """
    thresholds, switch_s, was_frozen = gc.get_threshold(), sys.getswitchinterval(), gc.get_freeze_count() > 0
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, *thresholds[1:])
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(switch_s)


class LoopProbe:
    """Measures while it is entered. A silence counts only as far as this process worked during it.

    So the load of other processes lengthens no silence, and work of threads that hold the interpreter's lock counts
    like work on the loop itself. Threads and garbage have their turns as in a worker.
    """

    def __init__(self) -> None:
        self.silences_ms: list[float] = []
        self._task: asyncio.Task[None] | None = None
        self._interpreter = ExitStack()

    @property
    def longest_ms(self) -> float:
        """The longest silence."""
        return max(self.silences_ms, default=0.0)

    async def __aenter__(self) -> "LoopProbe":
        self._interpreter.enter_context(interpreter_as_in_a_worker())
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._task is not None
        await asyncio.sleep(2 * _BEAT_S)  # the last silence ends with a beat
        self._task.cancel()
        self._interpreter.close()

    async def _beat(self) -> None:
        while True:
            begun_s, begun_work_s = time.monotonic(), time.process_time()
            await asyncio.sleep(_BEAT_S)
            late_s, work_s = time.monotonic() - begun_s - _BEAT_S, time.process_time() - begun_work_s
            self.silences_ms.append(1000 * max(min(late_s, work_s), 0.0))
