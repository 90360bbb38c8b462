"""HeavyWork: the threads of one HTTP worker for work that takes long. Imports server.api.limits."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from server.api.limits import LIMITS

T = TypeVar("T")


class HeavyWork:
    """Runs work of requests outside the event loop.

    Heavy work waits for one of few threads, which bounds the memory that it takes together; large bodies wait for a
    thread of their own. Light work never waits for them: it runs in asyncio's own threads.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(LIMITS.heavy_threads, thread_name_prefix="heavy")
        self._body_thread = ThreadPoolExecutor(1, thread_name_prefix="body")

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Return the result of the work in a thread. num_bytes: what it reads; it decides which thread."""
        threads = self._threads if num_bytes > LIMITS.small_body_bytes else None
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    async def run_alone(self, work: Callable[[], T]) -> T:
        """Return the result of work on a large body: one at a time, since no other Python runs in its long steps."""
        return await asyncio.get_running_loop().run_in_executor(self._body_thread, work)
