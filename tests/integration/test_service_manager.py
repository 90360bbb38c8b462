"""A daemon under a service manager that only listens: readiness, stages, watchdog, the end."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import needs_proc
from tests.support.daemon import Daemon, wait_for
from tests.support.life_cycle import post

pytestmark = needs_proc


class Manager:
    """Hears what a service says on an abstract socket."""

    def __init__(self) -> None:
        self.name = f"@quire-test-manager-{os.getpid()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + self.name[1:])

    def wait(self, line: str, *, timeout_s: float = 60.0) -> list[str]:
        """Return the lines until one begins with `line`. Raises TimeoutError."""
        lines: list[str] = []
        while not any(other.startswith(line) for other in lines):
            lines += self._next(timeout_s)
        return lines

    def wait_silence(self, *, silence_s: float) -> list[str]:
        """Return the lines until none came for a while."""
        lines: list[str] = []
        while True:
            try:
                lines += self._next(silence_s)
            except TimeoutError:
                return lines

    def close(self) -> None:
        """Hear nothing any more."""
        self._socket.close()

    def _next(self, timeout_s: float) -> list[str]:
        self._socket.settimeout(timeout_s)
        return self._socket.recv(4096).decode().splitlines()


@pytest.fixture
def manager() -> Iterator[Manager]:
    manager = Manager()
    yield manager
    manager.close()


@pytest.fixture
def daemon(manager: Manager, tmp_path: Path) -> Iterator[Daemon]:
    """Return a daemon with a watchdog of half a second."""
    environment = {"NOTIFY_SOCKET": manager.name, "WATCHDOG_USEC": "500000"}
    with Daemon("--device", "cpu", folder=tmp_path, env=environment) as running:
        yield running


def test_ready_comes_after_the_stages_and_when_requests_are_answered(daemon: Daemon, manager: Manager) -> None:
    lines = manager.wait("READY=1")
    assert daemon.get("/ready").status_code == 200
    stages = [line for line in lines if line.startswith("STATUS=")]
    assert [line for line in stages if line.startswith("STATUS=Loading weights: ")]
    assert stages.index("STATUS=Generating a first token") < len(stages) - 1
    assert stages[-1] == f"STATUS=Serving quire-demo on {daemon.base_url}"
    assert not any("NOTIFY_SOCKET" in Path(f"/proc/{pid}/environ").read_text() for pid in daemon.children())
    daemon.process.send_signal(signal.SIGTERM)
    manager.wait("STOPPING=1")
    assert daemon.process.wait(60) == 0


# rule: Endpoints: `/health` is 503 only if the engine makes no progress or does not come back
@pytest.mark.full
def test_an_engine_that_hangs_is_unhealthy_and_starves_the_watchdog_until_it_goes_on(
    daemon: Daemon, manager: Manager
) -> None:
    manager.wait("READY=1")
    for _ in range(4):
        manager.wait("WATCHDOG=1")
    engine = daemon.child("engine.process")
    os.kill(engine, signal.SIGSTOP)
    try:
        assert manager.wait("STATUS=")[-1] == "STATUS=The engine makes no progress"
        assert manager.wait_silence(silence_s=2.0) == []
        health, metrics = daemon.get("/health"), daemon.metrics()
        assert (health.status_code, health.json()["status"]) == (503, "engine stalled")
        assert metrics["quire_engine_up"] == 0
        assert metrics["quire_engine_progress_age_seconds"] >= 10
    finally:
        os.kill(engine, signal.SIGCONT)
    manager.wait("WATCHDOG=1")
    wait_for(lambda: daemon.get("/health").status_code == 200, timeout_s=60, what="healthy again")
    assert post(daemon).status_code == 200
    assert daemon.metrics()["quire_engine_restarts_total"] == 0


@pytest.mark.full
def test_the_watchdog_is_fed_while_the_engine_is_replaced(daemon: Daemon, manager: Manager) -> None:
    manager.wait("READY=1")
    os.kill(daemon.child("engine.process"), signal.SIGKILL)
    lines = manager.wait("STATUS=Restarting the engine")
    lines += manager.wait(f"STATUS=Serving quire-demo on {daemon.base_url}")
    assert "WATCHDOG=1" in lines[lines.index("STATUS=Restarting the engine") :]
    wait_for(lambda: daemon.get("/ready").status_code == 200, timeout_s=60, what="ready again")
