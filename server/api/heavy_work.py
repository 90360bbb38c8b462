"""HeavyWork: the threads of one HTTP worker for work that takes long. Imports server.api.limits."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from engine.interface.errors import Overloaded
from server.api.limits import LIMITS

T = TypeVar("T")
_NO_BRIEF_S = 1.0  # after work that was not brief: the loop begins with such work once in this time at most
TURN_DEADLINE_S = 30.0  # two threads encode the texts of all large bodies in less


class HeavyWork:
    """Runs work of requests outside the event loop.

    Heavy work waits for one of few threads, which bounds the memory that it takes together; large bodies wait for a
    thread of their own. Light work never waits for them. What has no turn within TURN_DEADLINE_S is never begun.
    Brief work needs no thread: a first token would wait for a thread to wake up, and for the loop to do so after it.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(LIMITS.heavy_threads, thread_name_prefix="heavy")
        self._body_thread = ThreadPoolExecutor(1, thread_name_prefix="body")
        self._light_threads = ThreadPoolExecutor(thread_name_prefix="light")
        self._brief_from_s = 0.0

    def is_brief(self, num_bytes: int) -> bool:
        """Return whether work on so many bytes of text takes the event loop less time than a thread's turn."""
        return num_bytes <= LIMITS.brief_bytes and time.monotonic() >= self._brief_from_s

    def note_long(self) -> None:
        """Tell that work on few bytes has taken long: for a moment none is brief."""
        self._brief_from_s = time.monotonic() + _NO_BRIEF_S

    async def run(self, num_bytes: int, work: Callable[[], T], *, may_wait: bool = False) -> T:
        """Return the result of the work in a thread. num_bytes: what it reads; it decides which thread.

        Raises Overloaded if there is none in time; may_wait: it waits for as long as it takes.
        """
        threads = self._threads if num_bytes > LIMITS.small_body_bytes else self._light_threads
        return await _in_turn(threads, work, turn_s=None if may_wait else TURN_DEADLINE_S)

    async def run_alone(self, work: Callable[[], T]) -> T:
        """Return the result of work on a large body: one at a time, since no other Python runs in its long steps.

        Raises Overloaded if it has no turn in time.
        """
        return await _in_turn(self._body_thread, work, turn_s=TURN_DEADLINE_S)


async def _in_turn(threads: ThreadPoolExecutor, work: Callable[[], T], *, turn_s: float | None) -> T:
    job = threads.submit(work)
    result = asyncio.wrap_future(job)
    try:
        await asyncio.wait({result}, timeout=turn_s)
        if not result.done() and job.cancel():
            raise Overloaded(f"Other requests take so long to prepare that this one had no turn within {turn_s:g} s.")
        return await result
    except asyncio.CancelledError:
        result.cancel()  # and the job, unless it has begun
        raise
