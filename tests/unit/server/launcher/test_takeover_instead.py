"""A running daemon ends its engine for the next one, and starts it again if that one ends: sockets, no processes."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from engine.interface.control import Stage, State
from engine.interface.errors import StartupError
from server.launcher import hand_over as hand_over_module
from server.launcher import takeover as takeover_module
from server.launcher.takeover import Takeover
from server.launcher.takeover_form import Form
from tests.support.running_launcher import Running, ask, complete, running
from tests.unit.server.launcher.test_control import in_loop, until

pytestmark = pytest.mark.usefixtures("parent")


class Next:
    """The launcher of a next daemon that loads in the running one's place."""

    def __init__(self, takeover: Takeover) -> None:
        self.takeover = takeover
        takeover.form = Form(True, "asked for")
        self.state = State(Stage("standby"), False, engine_socket="/next.sock")
        self.is_held = self.is_activated = False

    async def release(self) -> float:
        return await self.takeover.release(
            is_held=lambda: self.is_held, activate=self._activate, state=lambda: self.state
        )

    def _activate(self) -> None:
        self.is_activated = True

    def close(self) -> None:
        self.takeover.close()
        for listener in self.takeover.listeners:
            listener.close()


@asynccontextmanager
async def next_instead() -> AsyncIterator[tuple[Running, Next]]:
    async with running() as old:
        old.control.set_state(stage=Stage("ready"))
        keeping = asyncio.create_task(old.keep_engine())
        following = Next(await ask(old.config))
        yield old, following
        following.close()
        keeping.cancel()


@in_loop
async def test_the_running_engine_ends_when_all_is_done_that_needs_no_memory() -> None:
    async with next_instead() as (old, following):
        releasing = asyncio.create_task(following.release())
        await asyncio.sleep(0.1)
        assert not old.lease.is_lent
        following.is_held = True
        await releasing
        assert following.is_activated
        assert (old.control.state.stage.name, old.control.state.lets_wait, old.control.state.num_ends) == (
            "restarting",
            True,
            1,
        )
        assert "starts its engine again and goes on serving" in following.takeover.untouched
        following.state = State(Stage("weights", 1, 2), False, engine_socket="/next.sock")
        await until(lambda: old.control.state.stage == Stage("weights", 1, 2))
        assert (old.control.state.fault, old.control.state.engine_socket) == ("restarting", "")
        following.state = State(Stage("ready"), False, engine_socket="/next.sock")
        assert await complete(following.takeover) is not None
        state = old.control.state
        assert (state.stage.name, state.fault, state.engine_socket) == ("ready", "", "/next.sock")
        assert (state.num_ends, state.was_killed, old.num_given) == (1, True, 1)


@in_loop
async def test_open_requests_of_the_old_daemon_hear_of_the_new_engine_until_they_end() -> None:
    async with next_instead() as (old, following):
        following.is_held = True
        await following.release()
        following.state = ready_state = State(Stage("ready"), False, engine_socket="/next.sock")
        await complete(following.takeover)
        guests = asyncio.create_task(following.takeover.wait_guests())
        following.state = msgspec.structs.replace(
            ready_state, stage=Stage("restarting"), fault="restarting", num_ends=1, engine_socket="/third.sock"
        )
        await until(lambda: old.control.state.num_ends == 2)
        assert not old.control.state.was_killed  # so its requests may be suspects
        assert old.control.state.engine_socket == "/third.sock"
        following.state = msgspec.structs.replace(ready_state, is_draining=True)
        await until(lambda: old.num_drains == 1)
        assert not guests.done()
        following.close()
        await until(lambda: old.control.state.fault == "dead")
        assert old.num_failed == 0
        await guests


@in_loop
async def test_the_engine_starts_again_if_the_next_daemon_ends_meanwhile() -> None:
    async with next_instead() as (old, following):
        following.is_held = True
        await following.release()
        following.close()
        await until(lambda: not old.lease.is_lent)
        await until(lambda: old.control.state.stage.name == "ready")
        assert (old.control.state.lets_wait, old.num_failed, old.num_given) == (True, 1, 0)
        again = Next(await ask(old.config))
        again.is_held = True
        await again.release()
        again.state = State(Stage("ready"), False, engine_socket="/again.sock")
        await complete(again.takeover)
        assert old.control.state.engine_socket == "/again.sock"
        again.close()


class Kills:
    """The os module, which records who is killed."""

    getuid = staticmethod(os.getuid)
    getpid = staticmethod(os.getpid)

    def __init__(self) -> None:
        self.killed: list[int] = []

    def kill(self, pid: int, number: int) -> None:
        self.killed.append(pid)


@pytest.mark.parametrize("limit", ["_SILENT_S", "_STUCK_S"])
@in_loop
async def test_a_next_daemon_that_stands_still_is_ended(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    kills = Kills()
    async with next_instead() as (old, following):
        monkeypatch.setattr(hand_over_module, "os", kills)
        monkeypatch.setattr(hand_over_module, "_CHECK_S", 0.01)
        monkeypatch.setattr(hand_over_module, "_END_S", 0.1)
        monkeypatch.setattr(hand_over_module, limit, 0.1)
        monkeypatch.setattr(takeover_module, "_REPORT_S", 3600.0 if limit == "_SILENT_S" else 0.02)
        following.is_held = True
        await following.release()
        with pytest.raises(StartupError, match="The running daemon goes on, since this one has"):
            await complete(following.takeover, is_serving=lambda: False)
        await until(lambda: not old.lease.is_lent)
        assert kills.killed == [os.getpid()]
        assert old.num_given == 0


@in_loop
async def test_a_next_daemon_that_has_the_port_and_says_nothing_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with next_instead() as (old, following):
        monkeypatch.setattr(hand_over_module, "_CHECK_S", 0.01)
        monkeypatch.setattr(hand_over_module, "_SILENT_S", 0.2)
        monkeypatch.setattr(takeover_module, "_REPORT_S", 3600.0)
        following.is_held = True
        await following.release()
        following.state = State(Stage("ready"), False, engine_socket="/next.sock")
        await complete(following.takeover)
        await until(lambda: old.control.state.fault == "dead")
        following.state = msgspec.structs.replace(following.state, num_ends=1)
        await until(lambda: old.control.state.fault == "")


@in_loop
async def test_the_next_daemon_loads_at_once_if_the_running_one_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover_module, "_ORPHANS_S", 0.01)
    async with running() as old:
        following = Next(await ask(old.config))
        releasing = asyncio.create_task(following.release())
        await asyncio.sleep(0.05)
        old.hand_over.stop()
        await releasing
        assert following.is_activated
        assert await complete(following.takeover) is None
        await following.takeover.wait_guests()
        following.close()


@in_loop
async def test_an_engine_that_is_not_released_in_time_ends_the_next_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover_module, "_RELEASE_S", 0.05)
    async with running() as old:  # without a launcher that ends its engine
        following = Next(await ask(old.config))
        following.is_held = True
        with pytest.raises(StartupError, match="has not stopped its engine"):
            await following.release()
        following.close()
