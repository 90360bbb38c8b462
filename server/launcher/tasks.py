"""Tasks that an object starts and nobody waits for. Standard library."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Tasks:
    """Holds each task while it runs, since asyncio does not. Life: spawn … → cancel.

    on_error: told when one raises; else asyncio logs it.
    """

    def __init__(self, on_error: Callable[[BaseException], None] | None = None) -> None:
        self._on_error = on_error
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Start a task."""
        task = asyncio.create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._done)

    def cancel(self) -> None:
        """Cancel what runs."""
        for task in self._running:
            task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if self._on_error is not None and not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)
