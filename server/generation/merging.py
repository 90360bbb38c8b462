"""Several async generators as one. Standard library only."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


class _End:
    """A source has ended."""


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield what the sources yield, in order of arrival, until all have ended. Raises what the first one raises.

    All are closed at the end, also at an early one.
    """
    # Bounded, so that a slow reader slows its own sources and nothing grows here.
    queue: asyncio.Queue[T | Exception | _End] = asyncio.Queue(maxsize=2 * len(sources))

    async def pump(source: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(source) as items:
                async for item in items:
                    await queue.put(item)
            await queue.put(_End())
        except Exception as error:  # handed to the reader, who raises it
            await queue.put(error)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if isinstance(item, _End):
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
