"""What the service manager hears, on a socket of its kind and a clock of the tests' own."""

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.interface.control import Stage, State
from server.launcher.console import Summary
from server.launcher.systemd import Notifier

READY = State(stage=Stage("ready"), is_draining=False)
SUMMARY = Summary(model_name="a\nmodel", url="http://127.0.0.1:8000", facts={}, num_keys=0, elapsed_s=1.0)


@pytest.fixture(params=["file", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[socket.socket]:
    """Return a service manager's socket, at a path or with an abstract name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify") if request.param == "file" else f"\0quire-test-{os.getpid()}")
        listening.setblocking(False)
        yield listening


def heard(manager: socket.socket) -> list[str]:
    """Return the messages that have come."""
    messages = []
    while True:
        try:
            messages.append(manager.recv(4096).decode())
        except BlockingIOError:
            return messages


def environment(manager: socket.socket, **more: str) -> dict[str, str]:
    """Return what systemd sets."""
    name = manager.getsockname()
    return {"NOTIFY_SOCKET": name if isinstance(name, str) else "@" + name[1:].decode(), "PATH": "/bin", **more}


def test_stages_then_readiness_then_the_end(manager: socket.socket) -> None:
    notifier = Notifier.from_environment(environment(manager))
    notifier.loading(Stage("weights", 2**30, 2**31, unit="bytes"))
    notifier.loading(Stage("weights", 2**30, 2**31, unit="bytes"))
    notifier.loading(Stage("ready"))
    notifier.ready(SUMMARY)
    notifier.observe(READY)
    notifier.stopping()
    notifier.stopping()
    notifier.observe(READY)
    assert heard(manager) == [
        "STATUS=Loading weights: 1.0 of 2.0 GiB",
        "READY=1\nSTATUS=Serving a model on http://127.0.0.1:8000",
        "STOPPING=1\nSTATUS=Stopping: running requests may finish",
    ]


def test_the_watchdog_is_fed_while_health_is_good(manager: socket.socket) -> None:
    notifier = Notifier.from_environment(environment(manager, WATCHDOG_USEC="30000000", WATCHDOG_PID=str(os.getpid())))
    notifier.ready(SUMMARY)
    heard(manager)
    for stage, fault in [
        (Stage("ready"), ""),
        (Stage("ready"), "stalled"),
        (Stage("restarting"), "restarting"),
        (Stage("weights", 1, 4, unit="shards"), "restarting"),
        (Stage("weights", 1, 4, unit="shards"), "stalled"),
        (Stage("weights", 2, 4, unit="shards"), "dead"),
        (Stage("ready"), ""),
    ]:
        notifier.observe(State(stage, False, fault))
    assert heard(manager) == [
        "WATCHDOG=1",
        "STATUS=The engine makes no progress",
        "STATUS=Restarting the engine",
        "WATCHDOG=1",
        "STATUS=Restarting the engine: Loading weights: 1 of 4 shards",
        "WATCHDOG=1",
        "STATUS=The engine makes no progress",
        "STATUS=The engine does not come back: Loading weights: 2 of 4 shards",
        "STATUS=Serving a model on http://127.0.0.1:8000",
        "WATCHDOG=1",
    ]


@pytest.mark.parametrize(
    "more", [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "9", "WATCHDOG_PID": "1"}]
)
def test_no_watchdog_is_fed_that_is_not_ours(manager: socket.socket, more: dict[str, str]) -> None:
    notifier = Notifier.from_environment(environment(manager, **more))
    notifier.ready(SUMMARY)
    heard(manager)
    notifier.observe(READY)
    assert heard(manager) == []


def test_children_inherit_nothing_of_it(manager: socket.socket) -> None:
    variables = environment(manager, WATCHDOG_USEC="30000000", WATCHDOG_PID=str(os.getpid()))
    Notifier.from_environment(variables)
    assert variables == {"PATH": "/bin"}


@pytest.mark.parametrize("address", ["/nowhere/notify", "@quire-nobody", "/" + "long" * 64, "vsock:2:1234"])
def test_a_manager_that_cannot_be_told_is_one_warning(address: str, caplog: pytest.LogCaptureFixture) -> None:
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": address})
    notifier.ready(SUMMARY)
    notifier.stopping()
    assert len(caplog.records) == 1


def test_a_manager_that_cannot_be_told_of_the_next_process_does_not_know_it(caplog: pytest.LogCaptureFixture) -> None:
    notifier = Notifier("/nowhere/notify")
    assert not asyncio.run(notifier.hand_over(7, address=""))
    assert "does not hear which process has the port pid=7" in caplog.text


def test_a_manager_that_does_not_read_holds_nothing_up_and_hears_later(manager: socket.socket) -> None:
    notifier = Notifier(environment(manager)["NOTIFY_SOCKET"], watchdog_s=30.0)
    for _ in range(5000):  # more than the socket's buffer takes
        notifier.observe(READY)
    notifier.ready(SUMMARY)
    early = heard(manager)
    assert early[0].startswith("STATUS=")
    assert set(early[1:]) == {"WATCHDOG=1"}
    notifier.observe(READY)
    assert "READY=1\nSTATUS=Serving a model on http://127.0.0.1:8000" in "\n".join(heard(manager))


def test_without_a_manager_nothing_happens() -> None:
    notifier = Notifier.from_environment({})
    notifier.ready(SUMMARY)
    notifier.observe(READY)
    notifier.stopping()
    notifier.close()
