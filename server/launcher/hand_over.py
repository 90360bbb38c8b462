"""HandOver: gives the port of this daemon to the next one (quire serve --takeover). Never torch.

server/launcher/takeover.py has the messages. Life: start (this daemon has the port) → a next daemon connects, loads and
takes → the workers accept no more, on_given, is_done; or stop. Only processes of the same user can connect.
Imports engine.interface, server.config and server.launcher.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Sequence

import msgspec

from engine.interface.transport import encode_frame, read_messages
from server.config.version import package_version
from server.launcher.control_server import ControlServer
from server.launcher.listener import bound_address
from server.launcher.processes import Tasks
from server.launcher.run_dir import RunDir
from server.launcher.systemd import Notifier
from server.launcher.takeover import SOCKETS_PER_MESSAGE, Offer, Refused, Take, Taken, peer_of

logger = logging.getLogger(__name__)
_BACKLOG = 8
_RETRY_S = 1.0


class HandOver:
    """Offers the listeners. Use inside one event loop.

    has_started: whether this daemon has served. on_given: called once, when the next daemon has the port.
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
    ) -> None:
        self.is_done = False
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
        self._tasks.spawn(self._accept(self._socket))

    def stop(self) -> None:
        """This daemon ends. A next one that has the sockets keeps them, and hears of it by the connection's end."""
        self._is_stopped = True
        self._tasks.cancel()
        if self._socket is not None:
            self._socket.close()

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
            self._is_asked, self._asker = True, pid
            logger.info("takeover begins, this daemon serves until the next one is ready pid=%s", pid)
            await self._offer_to(connection)
        except (OSError, msgspec.MsgspecError):  # the next daemon has ended
            pass
        finally:
            connection.close()
            if not reason and not self.is_done and not self._is_stopped:
                self._is_asked = False
                logger.warning("the takeover was given up, this daemon goes on pid=%s", pid)

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

    async def _offer_to(self, connection: socket.socket) -> None:
        offer = Offer(
            os.getpid(),
            package_version(),
            len(self._listeners),
            notify_address=self._notifier.address,
            watchdog_s=self._notifier.watchdog_s,
        )
        connection.send(encode_frame(offer))
        for i in range(0, len(self._listeners), SOCKETS_PER_MESSAGE):
            fds = [listener.fileno() for listener in self._listeners[i : i + SOCKETS_PER_MESSAGE]]
            socket.send_fds(connection, [b"\0"], fds)
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        try:
            async for message in read_messages(reader, Take):
                writer.write(encode_frame(await self._give(message)))
                await writer.drain()
                return
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _give(self, take: Take) -> Taken:
        """The next daemon accepts connections: leave them to it. Those that are open stay here."""
        self.is_done = True
        self._run_dir.forget_address()
        # before the end of this daemon begins, of which a service manager must not hear
        is_main = await self._notifier.hand_over(take.pid, address=take.notify_address)
        self._on_given()
        await self._control.hand_over()
        for listener in self._listeners:
            listener.close()
        logger.info("the port is handed over, open requests go on here until they end pid=%d", take.pid)
        return Taken(is_main)
