"""HeavyWork: work waits for a thread of its kind, for a bounded time, and ends with those who wait for it."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest

from engine.interface.errors import Overloaded
from server.api import heavy_work
from server.api.heavy_work import HeavyWork
from server.api.limits import LIMITS

LARGE, SMALL = LIMITS.small_body_bytes + 1, 10


@asynccontextmanager
async def held(work: HeavyWork):
    """Occupy the heavy threads and that of large bodies; yield the event that lets them go."""
    may_go, begun = threading.Event(), threading.Semaphore(0)

    def wait() -> None:
        begun.release()
        may_go.wait(60)

    jobs = [asyncio.create_task(work.run(LARGE, wait)) for _ in range(LIMITS.heavy_threads)]
    jobs.append(asyncio.create_task(work.run_alone(wait)))
    for _ in jobs:
        await asyncio.to_thread(begun.acquire)
    try:
        yield may_go
    finally:
        may_go.set()
        await asyncio.gather(*jobs)


# rule: Limits: Work that finds no thread within 30 s is refused with 429 `overloaded` and is never begun
def test_work_that_finds_no_thread_in_time_is_refused_and_never_begun(monkeypatch):
    begun = []

    async def run() -> None:
        work = HeavyWork()
        async with held(work):
            with monkeypatch.context() as patch:
                patch.setattr(heavy_work, "TURN_DEADLINE_S", 0.1)
                for late in (work.run(LARGE, lambda: begun.append(1)), work.run_alone(lambda: begun.append(2))):
                    with pytest.raises(Overloaded, match=r"0\.1 s"):
                        await late
            assert await work.run(SMALL, lambda: "light") == "light"
        assert await work.run(LARGE, lambda: "heavy") == "heavy"
        assert await work.run_alone(lambda: "alone") == "alone"

    asyncio.run(asyncio.wait_for(run(), 60))
    assert begun == []


def test_work_that_has_begun_takes_its_time_and_an_answer_waits_for_its_turn(monkeypatch):
    async def run() -> None:
        work = HeavyWork()
        async with held(work) as may_go:
            monkeypatch.setattr(heavy_work, "TURN_DEADLINE_S", 1.0)
            begun = asyncio.create_task(work.run(SMALL, lambda: may_go.wait(60)))
            answer = asyncio.create_task(work.run(LARGE, lambda: "answer", may_wait=True))
            await asyncio.sleep(1.3)
            assert not begun.done()
            assert not answer.done()
            may_go.set()
            assert await begun
            assert await answer == "answer"

    asyncio.run(asyncio.wait_for(run(), 60))


def test_work_that_nobody_waits_for_is_never_begun():
    begun = []

    async def run() -> None:
        work = HeavyWork()
        async with held(work):
            abandoned = [work.run(LARGE, lambda: begun.append(1)), work.run_alone(lambda: begun.append(2))]
            for task in [asyncio.create_task(waiting) for waiting in abandoned]:
                await asyncio.sleep(0.01)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
        await work.run(LARGE, int)
        await work.run_alone(int)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert begun == []


def test_an_error_of_the_work_is_that_of_the_caller():
    def fail() -> None:
        raise ValueError("of the work")

    for num_bytes in (SMALL, LARGE):
        with pytest.raises(ValueError, match="of the work"):
            asyncio.run(HeavyWork().run(num_bytes, fail))
