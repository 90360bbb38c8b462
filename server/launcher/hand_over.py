"""HandOver: gives the port of this daemon to the next one (quire serve --takeover). Never torch.

server/launcher/takeover.py has the messages. Life: start (this daemon has the port) → a next daemon connects, loads,
perhaps in the memory of this one's engine (server/launcher/engine_lease.py), and takes → the workers accept no more,
on_given, is_done; or stop. Only processes of the same user can connect.
A next daemon that has the memory and stands still is killed, and this one's engine starts again: _SILENT_S without a
word of its launcher, _STUCK_S without progress of its load. Imports engine.interface, server.config, server.launcher.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence

import msgspec

from engine.interface.control import LOAD_STALL_AFTER_S, Stage
from engine.interface.transport import encode_frame, read_messages
from server.config.version import package_version
from server.launcher.control_server import ControlServer
from server.launcher.engine_lease import EngineLease
from server.launcher.listener import bound_address
from server.launcher.processes import Tasks
from server.launcher.run_dir import RunDir
from server.launcher.systemd import Notifier
from server.launcher.takeover import (
    SOCKETS_PER_MESSAGE,
    GivenUp,
    Offer,
    Refused,
    Release,
    Released,
    Report,
    Take,
    Taken,
    ToRunning,
    peer_of,
)
from server.launcher.takeover_form import EngineFacts

logger = logging.getLogger(__name__)
_BACKLOG = 8
_RETRY_S = 1.0
_SILENT_S = 30.0  # a launcher reports each second
_STUCK_S = LOAD_STALL_AFTER_S
_END_S = 5.0  # for a next daemon that is told to end
_FREED_S = 1.0  # for the kernel to end the engine of a next daemon, and to free what it had
_CHECK_S = 0.5
_FACTS_S = 5.0


class HandOver:
    """Offers the listeners. Use inside one event loop.

    has_started: whether this daemon has served. on_given: called once, when the next daemon has the port. on_failed:
    when one has not got it. facts: reads what a next daemon's engine must have in common with this one's; may block,
    and raise OSError.
    """

    def __init__(
        self,
        run_dir: RunDir,
        listeners: Sequence[socket.socket],
        *,
        control: ControlServer,
        notifier: Notifier,
        has_started: Callable[[], bool],
        on_given: Callable[[], None],
        lease: EngineLease,
        facts: Callable[[], EngineFacts],
        on_failed: Callable[[], None] = lambda: None,
    ) -> None:
        self.is_done = False
        self._lease = lease
        self._read_facts = facts
        self._facts: EngineFacts | None = None
        self._on_failed = on_failed
        self._heard_s = self._progress_s = 0.0  # from the next daemon
        self._stage: Stage | None = None  # of its load
        self._has_given_up = False
        self._run_dir = run_dir
        self._listeners = listeners
        self._control = control
        self._notifier = notifier
        self._has_started = has_started
        self._on_given = on_given
        self._is_asked = False  # a next daemon is connected, and loads
        self._asker: int | None = None  # its process id
        self._is_stopped = False
        self._socket: socket.socket | None = None
        self._tasks = Tasks()

    @property
    def is_shared(self) -> bool:
        """True from the moment in which a next daemon has the sockets too, unless it gives up."""
        return self.is_done or self._is_asked

    def start(self) -> None:
        """Let next daemons ask from now on. Without listeners there is nothing to ask for."""
        if not self._listeners:
            return
        path = self._run_dir.takeover_socket
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.bind(str(path))
        os.chmod(path, 0o600)  # before listen(): until then nobody can connect
        self._socket.listen(_BACKLOG)
        self._run_dir.tell_address(bound_address(self._listeners[0]))
        self._tasks.spawn(self._learn_facts())
        self._tasks.spawn(self._accept(self._socket))

    def stop(self) -> None:
        """This daemon ends. A next one that has the sockets keeps them, and hears of it by the connection's end."""
        self._is_stopped = True
        self._tasks.cancel()
        if self._socket is not None:
            self._socket.close()

    async def _learn_facts(self) -> None:
        """Read them now: the files may be replaced before a next daemon asks."""
        try:
            self._facts = await asyncio.to_thread(self._read_facts)
        except OSError as error:
            logger.warning("no next daemon can load in this one's place reason=%r", str(error))
            self._facts = EngineFacts()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while not self.is_done:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:  # too many open files, say
                logger.warning("a next daemon cannot connect now reason=%r", error.strerror or str(error))
                await asyncio.sleep(_RETRY_S)
                continue
            self._tasks.spawn(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        uid, pid = peer_of(connection)
        reason = self._refusal() if uid == os.getuid() else "it is that of another user."
        try:
            if reason:
                connection.send(encode_frame(Refused(reason)))  # little, into an empty buffer
                return
            self._is_asked, self._asker, self._has_given_up = True, pid, False
            logger.info("takeover begins, this daemon serves until the next one is ready pid=%s", pid)
            await self._offer_to(connection, pid)
        except (OSError, msgspec.MsgspecError) as error:  # the next daemon has ended, or the engine does not
            logger.info("the connection to the next daemon ends reason=%r", str(error))
        finally:
            connection.close()
            if not reason and not self._is_stopped:
                await self._end_offer(pid)

    async def _end_offer(self, pid: int | None) -> None:
        """The connection to the next daemon has ended."""
        if not self.is_done:
            if self._lease.is_lent:
                await asyncio.sleep(_FREED_S)
            self._is_asked = False
            logger.warning("the takeover was given up, this daemon goes on pid=%s", pid)
            self._lease.take_back()
            self._on_failed()
        elif self._lease.is_lent:
            logger.warning("the daemon whose engine has the open requests has ended pid=%s", pid)
            self._lease.lose()

    def _refusal(self) -> str:
        """Return why the port is not given now; "" if it is."""
        if self._is_asked or self.is_done:
            who = "another process" if self._asker is None else f"process {self._asker}"
            return f"{who} is taking it over already."
        if os.getpid() == 1:
            return "it is process 1 of its container, which ends with it: replace the container."
        if self._control.state.is_draining:
            return "it is shutting down: start without --takeover when it has ended."
        if not self._has_started():
            return "it has not completed its own start: try again when it is ready, or stop it."
        return ""

    async def _offer_to(self, connection: socket.socket, pid: int | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FACTS_S):
                while self._facts is None:
                    await asyncio.sleep(_CHECK_S)
        offer = Offer(
            os.getpid(),
            package_version(),
            len(self._listeners),
            notify_address=self._notifier.address,
            watchdog_s=self._notifier.watchdog_s,
            engine=self._facts or EngineFacts(),
        )
        connection.send(encode_frame(offer))
        for i in range(0, len(self._listeners), SOCKETS_PER_MESSAGE):
            fds = [listener.fileno() for listener in self._listeners[i : i + SOCKETS_PER_MESSAGE]]
            socket.send_fds(connection, [b"\0"], fds)
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        watching: asyncio.Task[None] | None = None
        try:
            async for message in read_messages(reader, ToRunning):
                self._heard_s = time.monotonic()
                match message:
                    case Release():
                        logger.info("the engine ends for the next daemon, which loads in its place pid=%s", pid)
                        await self._lease.lend()
                        self._heard_s = self._progress_s = time.monotonic()
                        writer.write(encode_frame(Released()))
                        logger.info("the engine has ended, requests wait for the next daemon pid=%s", pid)
                        watching = asyncio.create_task(self._watch(writer, pid))
                    case Report(state):
                        if state.stage != self._stage:
                            self._stage, self._progress_s = state.stage, self._heard_s
                        self._lease.follow(state)
                    case Take() if not self._has_given_up:
                        writer.write(encode_frame(await self._give(message)))
                        await writer.drain()
                        if not self._lease.is_lent:
                            return
        finally:
            if watching is not None:
                watching.cancel()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _watch(self, writer: asyncio.StreamWriter, pid: int | None) -> None:
        """End a next daemon that has the memory and stands still; after it has the port, only tell the workers."""
        is_lost = False
        while True:
            await asyncio.sleep(_CHECK_S)
            now_s = time.monotonic()
            is_silent = now_s - self._heard_s >= _SILENT_S
            if self.is_done:
                if is_silent and not is_lost:
                    logger.error("the daemon whose engine has the open requests says nothing after_s=%g", _SILENT_S)
                    self._lease.lose()
                is_lost = is_silent
            elif is_silent or now_s - self._progress_s >= _STUCK_S:
                break
        self._has_given_up = True
        reason = f"has sent nothing for {_SILENT_S:g} s" if is_silent else f"has not got on for {_STUCK_S:g} s"
        logger.error("the next daemon %s while it loads, this daemon goes on pid=%s", reason, pid)
        writer.write(encode_frame(GivenUp(f"The running daemon goes on, since this one {reason} while it loads.")))
        await asyncio.sleep(_END_S)
        if pid is not None:  # it would have the memory
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        writer.close()

    async def _give(self, take: Take) -> Taken:
        """The next daemon accepts connections: leave them to it. Those that are open stay here."""
        self.is_done = True
        self._run_dir.forget_address()
        # before the end of this daemon begins, of which a service manager must not hear
        is_main = await self._notifier.hand_over(take.pid, address=take.notify_address)
        if self._lease.is_lent:
            self._lease.give()
        self._on_given()
        await self._control.hand_over()
        for listener in self._listeners:
            listener.close()
        where = "in the next daemon's engine" if self._lease.is_lent else "here"
        logger.info("the port is handed over, open requests go on %s until they end pid=%d", where, take.pid)
        return Taken(is_main)
