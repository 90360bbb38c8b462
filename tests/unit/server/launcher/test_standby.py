"""The second engine process: there is one whenever the engine is ready, and it can be taken once."""

import asyncio
from dataclasses import dataclass, field

import pytest

from engine.interface.control import EngineFailed
from server.launcher.standby import Standby


@dataclass
class Process:
    """A child of which only the end is told."""

    pid: int = 0
    returncode: int | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, returncode: int) -> None:
        self.returncode = returncode
        self.ended.set()

    async def wait(self) -> int:
        await self.ended.wait()
        return self.returncode or 0


class Starts:
    """Starts such processes."""

    def __init__(self) -> None:
        self.processes: list[Process] = []

    async def __call__(self) -> Process:
        self.processes.append(Process(100 + len(self.processes)))
        return self.processes[-1]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def run(scenario, told: list[bool] | None = None) -> None:
    async def main() -> None:
        starts = Starts()
        tell = (lambda is_loaded: None) if told is None else told.append
        standby = Standby(starts, reason=lambda: EngineFailed("No room.", 3), tell=tell)
        task = asyncio.create_task(standby.run())
        await settle()
        await scenario(standby, starts)
        task.cancel()

    asyncio.run(main())


def test_one_is_started_when_it_is_wanted_and_taken_once() -> None:
    async def scenario(standby: Standby, starts: Starts) -> None:
        assert standby.take() is None
        assert starts.processes == []
        standby.want()
        await settle()
        standby.want()  # it is there
        await settle()
        (process,) = starts.processes
        assert standby.take() is process
        assert standby.take() is None
        await settle()
        assert len(starts.processes) == 1  # the next is started when the engine is ready
        standby.want()
        await settle()
        process.end(-9)  # as the engine: it is no standby any more
        await settle()
        assert standby.take() is starts.processes[1]

    run(scenario)


def test_one_that_ends_untaken_is_replaced_after_a_delay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    delays: list[float] = []
    sleep = asyncio.sleep

    async def note(delay_s: float) -> None:
        if delay_s:
            delays.append(delay_s)
        await sleep(0)

    monkeypatch.setattr("server.launcher.standby.asyncio.sleep", note)

    async def scenario(standby: Standby, starts: Starts) -> None:
        standby.want()
        await settle()
        for _ in range(2):
            starts.processes[-1].end(3)
            await settle()
        assert len(starts.processes) == 3
        assert delays == [0.5, 1.0]
        assert "standby ended, restarting delay_s=0.5 reason='No room.'" in caplog.text
        standby.stop()
        starts.processes[-1].end(0)
        await settle()
        assert len(starts.processes) == 3

    run(scenario)


def test_one_that_lived_for_a_minute_is_replaced_as_the_first_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s, sleep = [0.0], asyncio.sleep
    monkeypatch.setattr("server.launcher.standby.asyncio.sleep", lambda delay_s: sleep(0))
    monkeypatch.setattr("server.launcher.standby.time.monotonic", lambda: now_s[0])

    async def scenario(standby: Standby, starts: Starts) -> None:
        standby.want()
        await settle()
        for lived_s in (0.0, 0.0, 60.0):
            now_s[0] += lived_s
            starts.processes[-1].end(-9)
            await settle()

    run(scenario)
    delays = [record.getMessage().split("delay_s=")[1].split()[0] for record in caplog.records]
    assert delays == ["0.5", "1", "0.5"]


def test_one_that_is_asked_for_while_it_starts_is_kept_for_the_next_time() -> None:
    async def scenario(standby: Standby, starts: Starts) -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def start_slowly() -> Process:
            begun.set()
            await go_on.wait()
            return await starts()

        standby._start = start_slowly
        standby.want()
        await begun.wait()
        assert standby.take() is None
        go_on.set()
        await settle()
        assert standby.take() is starts.processes[0]

    run(scenario)


def test_a_dead_standby_is_not_taken() -> None:
    async def scenario(standby: Standby, starts: Starts) -> None:
        standby.want()
        await settle()
        starts.processes[0].returncode = -9  # its end is not noticed yet
        assert standby.take() is None

    run(scenario)


def test_none_is_started_after_the_stop_even_if_one_is_wanted() -> None:
    async def scenario(standby: Standby, starts: Starts) -> None:
        standby.stop()
        standby.want()
        await settle()
        assert starts.processes == []

    run(scenario)


def test_it_is_told_when_one_is_loaded_and_when_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    sleep = asyncio.sleep
    monkeypatch.setattr("server.launcher.standby.asyncio.sleep", lambda delay_s: sleep(0))

    async def scenario(standby: Standby, starts: Starts) -> None:
        standby.want()
        await settle()
        assert (told, standby.is_loaded) == ([False], False)
        standby.load(100)
        assert (told, standby.is_loaded) == ([False, True], True)
        starts.processes[0].end(-9)
        assert not standby.is_loaded  # its end is not noticed yet
        await settle()
        assert (told, standby.is_loaded) == ([False, True, False], False)
        standby.load(100)  # said before its end
        assert told[3:] == []
        standby.load(101)
        standby.load(100)
        assert (told[3:], standby.is_loaded) == ([True], True)
        assert standby.take() is starts.processes[1]
        assert not standby.is_loaded
        standby.want()  # it is the engine, and ready
        await settle()
        assert told[4:] == [False]

    run(scenario, told)


def test_one_that_is_loaded_when_it_is_ended_for_a_takeover_tells_nothing() -> None:
    told: list[bool] = []

    async def scenario(standby: Standby, starts: Starts) -> None:
        standby.want()
        await settle()
        starts.processes[0].end(-9)
        await standby.end()
        told.clear()
        standby.load(100)  # was on its way: requests wait for the next daemon now
        assert told == []

    run(scenario, told)
