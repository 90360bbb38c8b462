"""What becomes of tasks that nobody waits for."""

import asyncio

from server.launcher.processes import Tasks


async def _raise() -> None:
    raise ValueError("a bug")


def test_who_starts_a_task_is_told_what_it_raises() -> None:
    errors: list[BaseException] = []

    async def run() -> None:
        tasks = Tasks(errors.append)
        for coroutine in (asyncio.sleep(0), _raise(), asyncio.sleep(600)):
            tasks.spawn(coroutine)
        await asyncio.sleep(0.01)

    asyncio.run(run())
    assert [str(error) for error in errors] == ["a bug"]


def test_a_cancelled_task_ends_and_is_no_error() -> None:
    errors: list[BaseException] = []

    async def run() -> bool:
        tasks, ended = Tasks(errors.append), asyncio.Event()

        async def last() -> None:
            try:
                await asyncio.sleep(600)
            finally:
                ended.set()

        tasks.spawn(last())
        await asyncio.sleep(0)
        tasks.cancel()
        await asyncio.wait_for(ended.wait(), 60)
        await asyncio.sleep(0)
        return ended.is_set()

    assert asyncio.run(run())
    assert errors == []
