"""A deadline ends the wait of its stream, and nothing else."""

import asyncio
import time

import pytest

from server.errors import DeadlineExceeded
from server.generation.deadline import Deadline


def deadline(in_s: float | None) -> Deadline:
    return Deadline(None if in_s is None else time.monotonic() + in_s, limit_s=7.0)


async def for_ever(ends: Deadline, begun: asyncio.Event | None = None) -> None:
    with ends:
        if begun is not None:
            begun.set()
        await asyncio.get_running_loop().create_future()


def test_a_wait_ends_at_the_deadline_with_the_limit_in_the_error():
    with pytest.raises(DeadlineExceeded, match="7"):
        asyncio.run(for_ever(deadline(0.01)))


def test_a_wait_after_the_deadline_ends_too_but_gets_what_is_there():
    async def run() -> None:
        ends = deadline(-1.0)
        for _ in range(3):
            with ends:
                pass  # it was there: the loop had no turn
        for _ in range(2):
            with pytest.raises(DeadlineExceeded):
                await for_ever(ends)

    asyncio.run(run())


def test_time_between_waits_is_not_interrupted():
    async def run() -> None:
        ends = deadline(0.01)
        with ends:
            pass
        await asyncio.sleep(0.05)
        assert not asyncio.current_task().cancelling()
        with pytest.raises(DeadlineExceeded):
            await for_ever(ends)
        await asyncio.sleep(0)  # the task goes on

    asyncio.run(run())


def test_waits_may_be_in_several_tasks():
    async def run() -> None:
        ends = deadline(0.05)
        with ends:
            pass
        with pytest.raises(DeadlineExceeded):
            await asyncio.create_task(for_ever(ends))

    asyncio.run(run())


def test_a_cancelled_task_stays_cancelled_also_at_the_deadline():
    async def run(in_s: float | None) -> None:
        begun = asyncio.Event()
        ends = deadline(in_s)
        task = asyncio.create_task(for_ever(ends, begun))
        await begun.wait()
        task.cancel()
        if in_s is not None:
            ends._end()  # the timer, in the same turn
        with pytest.raises(asyncio.CancelledError):
            await task

    for in_s in (None, 60.0):
        asyncio.run(run(in_s))


def test_a_closed_deadline_leaves_no_timer():
    async def run() -> None:
        ends = deadline(0.01)
        with ends:
            pass
        ends.close()
        await asyncio.sleep(0.05)
        assert not ends._is_over

    asyncio.run(run())
    deadline(1.0).close()  # without any wait
