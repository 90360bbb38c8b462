"""What an engine says in its last moment is taken in before its end is, however late the launcher reads it."""

import asyncio
import os
import socket
from collections.abc import Callable, Iterator

import pytest

from engine.interface.config import EngineConfig, LaunchConfig, ServerConfig
from engine.interface.control import Hello, Stage, State
from engine.interface.transport import encode_frame
from server.config.model_source import DEMO_FOLDER
from server.launcher import launcher as launch
from server.launcher.launcher import Launcher
from server.launcher.run_dir import RunDir
from server.launcher.systemd import Notifier


class Watcher(Notifier):
    """Keeps what the launcher lets a service manager look at."""

    async def watch(self, *, state: Callable[[], State]) -> None:
        self.state = state


class Blink:
    """An engine process that gets ready and is gone at once: what it said is there to be read, and so is its end."""

    returncode = 1

    def __init__(self, control_socket: str) -> None:
        self._control_socket = control_socket
        self._has_spoken = False

    async def wait(self) -> int:
        if not self._has_spoken:
            self._has_spoken = True
            with socket.socket(socket.AF_UNIX) as control:
                control.connect(self._control_socket)
                control.sendall(encode_frame(Hello("engine", 0, os.getpid())) + encode_frame(Stage("ready")))
        return self.returncode


@pytest.fixture
def run_dir() -> Iterator[RunDir]:
    made = RunDir()
    yield made
    made.remove()


@pytest.mark.slow
def test_an_engine_that_ends_as_it_gets_ready_is_gone(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LaunchConfig(http_workers=0)
    server_config = ServerConfig(model=str(DEMO_FOLDER), served_model_names=["blink"])
    watcher = Watcher(None)
    seen: list[tuple[str, str]] = []

    async def start(*_: object, **__: object) -> Blink:
        state = watcher.state()
        seen.append((state.stage.name, state.fault))
        if len(seen) == 3:
            raise InterruptedError("enough")
        return Blink(launcher.app_config.control_socket)

    monkeypatch.setattr(launch, "start_child", start)
    engine_config = EngineConfig(model=str(DEMO_FOLDER))
    launcher = Launcher(config, engine_config, server_config, [], run_dir, notifier=watcher)
    with pytest.raises(InterruptedError, match="enough"):
        asyncio.run(launcher.run())
    assert seen == [("imports", ""), ("restarting", "restarting"), ("restarting", "restarting")]
