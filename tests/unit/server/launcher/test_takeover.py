"""Who may take a port over, what is handed over, and that nothing changes if it fails: real sockets, no processes."""

import asyncio
import os
import socket
from functools import partial
from pathlib import Path

import pytest

from engine.interface.config import LaunchConfig
from engine.interface.control import Stage
from engine.interface.errors import StartupError
from engine.interface.metrics import Metrics
from server.config.value_types import UsageError
from server.http.launcher_link import LauncherLink
from server.launcher import hand_over as hand_over_module
from server.launcher import takeover as takeover_module
from server.launcher.control_server import ControlServer
from server.launcher.listener import bind, listeners_by_worker, owned_socket_file
from server.launcher.metrics_registry import MetricsRegistry
from server.launcher.port import Port
from server.launcher.run_dir import RunDir
from server.launcher.systemd import Notifier
from server.launcher.takeover import request_takeover
from tests.support.running_launcher import FACTS, ask, complete, make_lease, ready, running
from tests.unit.server.launcher.test_control import in_loop, until

pytestmark = pytest.mark.usefixtures("parent")


@in_loop
async def test_the_very_sockets_are_handed_over_and_never_close() -> None:
    async with running(num_copies=130) as old:
        takeover = await ask(old.config)
        assert len(takeover.listeners) == 131
        assert not any(os.get_inheritable(listener.fileno()) for listener in takeover.listeners)
        with socket.create_connection(old.listeners[0].getsockname()):  # waits in the queue
            assert await complete(takeover) is not None
            assert takeover.is_done
            assert old.hand_over.is_done
            assert old.num_given == 1
            assert [listener.fileno() for listener in old.listeners] == [-1] * 131
            connection, _ = takeover.listeners[5].accept()
            connection.close()
        for listener in takeover.listeners:
            listener.close()
        with pytest.raises(StartupError, match=r"nothing listens on .*: start without --takeover"):
            await ask(old.config)


@in_loop
async def test_the_running_daemon_goes_on_if_the_next_one_ends_before_it_is_ready() -> None:
    async with running() as old:
        for _ in range(2):
            takeover = await ask(old.config)
            assert old.hand_over.is_shared
            assert takeover.untouched == f"The daemon with process {os.getpid()} goes on serving."
            takeover.close()
            await until(lambda: not old.hand_over.is_shared)
        assert old.num_given == 0
        assert old.listeners[0].fileno() > 0


@in_loop
async def test_two_at_once_and_bad_moments_are_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as old:
        first = await ask(old.config)
        with pytest.raises(StartupError, match=f"process {os.getpid()} is taking it over already"):
            await ask(old.config)
        first.close()
        await until(lambda: not old.hand_over.is_shared)
        old.has_started = False
        with pytest.raises(StartupError, match="has not completed its own start"):
            await ask(old.config)
        old.has_started = True
        old.control.set_state(is_draining=True)
        with pytest.raises(StartupError, match="it is shutting down: start without --takeover when it has ended"):
            await ask(old.config)
        old.control.set_state(is_draining=False)
        with monkeypatch.context() as patch:
            patch.setattr(hand_over_module, "os", FirstProcess())
            with pytest.raises(StartupError, match="process 1 of its container"):
                await ask(old.config)
        takeover = await ask(old.config)
        takeover.close()


class FirstProcess:
    """The os module of a container's first process."""

    getuid = staticmethod(os.getuid)

    @staticmethod
    def getpid() -> int:
        return 1


@in_loop
async def test_only_the_same_user_gets_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as old:
        assert old.run_dir.takeover_socket.stat().st_mode & 0o777 == 0o600
        monkeypatch.setattr(hand_over_module, "peer_of", lambda connection: (os.getuid() + 1, 7))
        with pytest.raises(StartupError, match="cannot be taken over: it is that of another user"):
            await ask(old.config)


def test_a_process_of_another_pid_namespace_has_no_id_that_a_signal_could_go_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert takeover_module.peer_of(ours) == (os.getuid(), os.getpid())
        monkeypatch.setattr(takeover_module.struct, "unpack", lambda form, data: (0, os.getuid(), 0))
        assert takeover_module.peer_of(ours) == (os.getuid(), None)  # kill(0) would end this process group


@in_loop
async def test_what_listens_there_is_named_if_it_cannot_be_taken_over(parent: Path) -> None:
    with pytest.raises(UsageError, match="--takeover needs the port of the running daemon, and --port is 0"):
        request_takeover(LaunchConfig(port=0))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match=f"127.0.0.1:{port} is served by a program that cannot be taken over"):
            request_takeover(LaunchConfig(port=port))
    with pytest.raises(StartupError, match=f"nothing listens on unix:{parent}/q.sock: start without --takeover"):
        request_takeover(LaunchConfig(uds=f"{parent}/q.sock"))
    async with running() as old:
        port = old.config.port
        with pytest.raises(StartupError, match=rf"no daemon listens on 127.0.0.2:{port}, but one does on 127.0.0.1"):
            await ask(LaunchConfig(host="127.0.0.2", port=port))
        (parent / "quire-killed").mkdir()
        (parent / "quire-killed" / "address").write_text(f"127.0.0.1:{port}")
        takeover = await ask(old.config)  # one that was killed is passed over
        takeover.close()


@in_loop
async def test_the_next_one_has_the_port_if_the_running_one_ends_first() -> None:
    events: list[str] = []
    async with running() as old:
        takeover = await ask(old.config)
        completing = asyncio.create_task(
            takeover.complete(
                is_prepared=lambda: False,
                accept=lambda: events.append("accept"),
                is_serving=lambda: False,
                notify_address="",
            )
        )
        await asyncio.sleep(0.1)
        assert events == []
        old.hand_over.stop()  # as its process ends
        await asyncio.sleep(0.1)
        assert old.hand_over.is_shared  # so the file of its unix socket stays
    assert await completing is None
    assert events == ["accept"]
    assert takeover.is_done
    for listener in takeover.listeners:
        listener.close()


@in_loop
async def test_workers_wait_until_the_daemon_is_ready_and_those_of_the_old_one_hear_of_it(tmp_path: Path) -> None:
    async with running() as old:
        await old.control.start(str(tmp_path / "old.sock"))
        old_link = make_link(tmp_path / "old.sock")
        await old_link.start()
        assert await old_link.wait_accept()
        accepted: list[str] = []
        old_link.on_handed_over = lambda: accepted.append("no more")

        new = ControlServer(registry=MetricsRegistry(model_name="tiny", version="2"), on_message=lambda *_: None)
        takeover = await ask(old.config)
        run_dir = RunDir()
        port = Port(
            takeover.listeners,
            run_dir,
            num_workers=1,
            takeover=takeover,
            control=new,
            notifier=Notifier(None),
            has_started=ready,
            on_given=lambda: None,
            lease=make_lease(new),
            facts=lambda: FACTS,
            engine_socket="",
        )
        await new.start(str(tmp_path / "new.sock"))
        link = make_link(tmp_path / "new.sock")
        await link.start()
        taking = asyncio.create_task(port.take(watch=lambda: None))
        waiting = asyncio.create_task(link.wait_accept())
        port.prepare(("worker", 0))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert not port.needs_stand_in  # the other daemon answers
        new.set_state(stage=Stage("ready"), is_draining=True)  # one that ends takes nothing
        await asyncio.sleep(0.1)
        assert not waiting.done()
        new.set_state(is_draining=False)
        assert await waiting
        assert not port.is_owned
        assert accepted == []
        assert not port.needs_stand_in  # it accepts, and the other daemon still answers: no 503 beside that
        port.serve(("worker", 0))
        await taking
        assert accepted == ["no more"]
        assert old_link.handed_over.is_set()
        assert not old_link.state.accepts
        old.control.set_state(fault="restarting")  # a later state changes nothing of it
        await until(lambda: old_link.state.fault == "restarting")
        assert not old_link.state.accepts
        assert (port.is_taken, port.is_owned, port.is_given) == (True, True, False)
        second = await ask(old.config)  # of the new one, which now has the port
        assert second.offer.pid == os.getpid()
        second.close()
        for end in (old_link, link, old.control, new):
            await end.aclose()
        port.stop()
        port.close()
        run_dir.remove()
        for listener in takeover.listeners:
            listener.close()


@in_loop
async def test_a_worker_that_waits_ends_when_it_is_told_to(tmp_path: Path) -> None:
    control = ControlServer(registry=MetricsRegistry(model_name="tiny", version="1"), on_message=lambda *_: None)
    control.set_state(accepts=False)
    await control.start(str(tmp_path / "control.sock"))
    link = make_link(tmp_path / "control.sock")
    await link.start()
    waiting = asyncio.create_task(link.wait_accept())
    await control.aclose()
    assert await waiting is False
    await link.aclose()


def make_link(path: Path) -> LauncherLink:
    return LauncherLink(str(path), worker_index=0, metrics=Metrics(), on_cancel=lambda request_id, *, key_hash: False)


@in_loop
async def test_the_service_manager_is_told_whom_to_watch(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        notifier = Notifier(str(tmp_path / "notify"), watchdog_s=30.0)
        async with running(notifier=notifier) as old:
            takeover = await ask(old.config)
            filled = 0
            while filled < 1000:  # a busy manager
                try:
                    old.notifier._socket.sendto(b"WATCHDOG=1", str(tmp_path / "notify"))
                except BlockingIOError:
                    break
                filled += 1
            assert (takeover.offer.notify_address, takeover.offer.watchdog_s) == (str(tmp_path / "notify"), 30.0)
            taking = asyncio.create_task(complete(takeover))
            await asyncio.sleep(0.2)
            assert not taking.done()
            assert old.num_given == 0
            for _ in range(filled):
                assert manager.recv(100) == b"WATCHDOG=1"
            assert (await taking).is_main
            assert manager.recv(100).decode() == f"MAINPID={os.getpid()}"
            notifier.stopping()
            notifier.observe(old.control.state)
            with pytest.raises(BlockingIOError):
                manager.recv(100)
            for listener in takeover.listeners:
                listener.close()


@pytest.mark.parametrize(
    ("num_listeners", "num_workers", "shares"),
    [
        (1, 1, [[0]]),
        (1, 3, [[0], [0], [0]]),
        (2, 2, [[0], [1]]),
        (2, 3, [[0], [1], [0]]),
        (5, 2, [[0, 2, 4], [1, 3]]),
    ],
)
def test_each_listener_has_a_worker_and_each_worker_one(
    num_listeners: int, num_workers: int, shares: list[list[int]]
) -> None:
    listeners = [socket.socket() for _ in range(num_listeners)]
    given = listeners_by_worker(listeners, num_workers=num_workers)
    assert [[listeners.index(listener) for listener in share] for share in given] == shares
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize("is_owned", [True, False])
def test_the_file_of_a_unix_socket_stays_for_the_daemon_that_has_it_now(parent: Path, is_owned: bool) -> None:
    config = LaunchConfig(uds=f"{parent}/q.sock")
    (listener,) = bind(config)
    with owned_socket_file(config, is_owned=partial(bool, is_owned)):
        pass
    assert Path(f"{parent}/q.sock").exists() is not is_owned
    listener.close()


@in_loop
async def test_a_fault_while_a_next_daemon_connects_does_not_end_the_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_over_module, "_RETRY_S", 0.01)
    loop = asyncio.get_running_loop()
    accept, faults = loop.sock_accept, [OSError(24, "Too many open files")]

    async def failing(listening: socket.socket) -> tuple[socket.socket, object]:
        if faults:
            raise faults.pop()
        return await accept(listening)

    monkeypatch.setattr(loop, "sock_accept", failing)
    async with running() as old:
        takeover = await ask(old.config)
        assert faults == []
        takeover.close()
        for listener in takeover.listeners:
            listener.close()


@in_loop
async def test_workers_that_never_serve_end_the_next_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover_module, "_SERVE_S", 0.05)
    async with running() as old:
        takeover = await ask(old.config)
        with pytest.raises(StartupError, match="have not served"):
            await complete(takeover, is_serving=lambda: False)
        takeover.close()
        await until(lambda: not old.hand_over.is_shared)
        assert old.num_given == 0
        for listener in takeover.listeners:
            listener.close()


@in_loop
async def test_a_running_daemon_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover_module, "_TAKEN_S", 0.05)
    async with running() as old:
        monkeypatch.setattr(old.hand_over, "_give", lambda take: asyncio.sleep(3600))
        takeover = await ask(old.config)
        assert await complete(takeover) is None
        assert takeover.is_done
        for listener in takeover.listeners:
            listener.close()
