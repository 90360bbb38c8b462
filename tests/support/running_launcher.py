"""The launcher of a running daemon as far as its port and its engine go, and requests of a next daemon for them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from engine.interface.config import LaunchConfig
from engine.interface.control import Stage
from server.launcher.control_server import ControlServer
from server.launcher.engine_lease import EngineLease
from server.launcher.hand_over import HandOver
from server.launcher.listener import bind
from server.launcher.metrics_registry import MetricsRegistry
from server.launcher.run_dir import RunDir
from server.launcher.standby import Standby
from server.launcher.systemd import Notifier
from server.launcher.takeover import Takeover, request_takeover
from server.launcher.takeover_form import EngineFacts

CONFIG = LaunchConfig(port=0)
FACTS = EngineFacts(protocol="p", model="m")


class Running:
    """The launcher of a running daemon, as far as its port goes."""

    def __init__(self, config: LaunchConfig = CONFIG, *, num_copies: int = 0, notifier: Notifier | None = None) -> None:
        self.run_dir = RunDir()
        self.listeners = bind(config)
        self.listeners += [self.listeners[0].dup() for _ in range(num_copies)]
        self.config = config if config.uds else LaunchConfig(port=self.listeners[0].getsockname()[1])
        self.num_given = 0
        self.has_started = True
        self.notifier = notifier or Notifier(None)
        self.control = ControlServer(
            registry=MetricsRegistry(model_name="tiny", version="1"), on_message=lambda hello, message: None
        )
        self.num_drains = self.num_failed = 0
        self.lease = make_lease(self.control, on_drain=self._drain)
        self.facts = FACTS
        self.hand_over = HandOver(
            self.run_dir,
            self.listeners,
            control=self.control,
            notifier=self.notifier,
            has_started=lambda: self.has_started,
            on_given=self._give,
            lease=self.lease,
            facts=lambda: self.facts,
            on_failed=self._fail,
        )

    def _drain(self) -> None:
        self.num_drains += 1
        self.control.set_state(is_draining=True)

    def _fail(self) -> None:
        self.num_failed += 1

    async def keep_engine(self) -> None:
        """Keep no engine, as a launcher whose engine has ended."""
        while True:
            if self.lease.is_lent:
                self.control.end_engine(fault="restarting", was_killed=True, lets_wait=True)
                await self.lease.wait_own()
                self.control.set_state(stage=Stage("ready"), fault="")
            await asyncio.sleep(0.01)

    def _give(self) -> None:
        self.num_given += 1
        self.notifier.stopping()  # as the console does


@asynccontextmanager
async def running(**options: object) -> AsyncIterator[Running]:
    made = Running(**options)
    made.hand_over.start()
    try:
        yield made
    finally:
        made.hand_over.stop()
        for listener in made.listeners:
            listener.close()
        made.run_dir.remove()


def make_lease(control: ControlServer, on_drain: Callable[[], None] = lambda: None) -> EngineLease:
    return EngineLease({}, control=control, standby=Standby(no_standby), on_drain=on_drain)


async def no_standby() -> asyncio.subprocess.Process:
    raise AssertionError("nobody wants a standby")


async def ask(config: LaunchConfig) -> Takeover:
    return await asyncio.to_thread(request_takeover, config)


def ready() -> bool:
    return True


async def complete(takeover: Takeover, **options: Callable[[], bool]) -> object:
    return await takeover.complete(
        is_prepared=options.get("is_prepared", ready),
        accept=lambda: None,
        is_serving=options.get("is_serving", ready),
        notify_address="",
    )
