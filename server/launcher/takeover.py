"""Takeover: the port of a running daemon, for the one that replaces it (quire serve --takeover). Never torch.

    running daemon (server/launcher/hand_over.py)         next daemon
    Offer, then the listening sockets   ───────────→      loads; its workers wait
                                        ←───────────      Take: its workers accept connections
    Taken: its workers accept no more   ───────────→      has the port
Both share the sockets (unix(7), SCM_RIGHTS), which never close, so no connection is refused at any moment. A next
daemon that ends before Take leaves the running one as it was. If the running one ends first, the next one has the port
from then on. Life: request_takeover → complete → close. Imports engine.interface, server.config and server.launcher.
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.interface.config import LaunchConfig
from engine.interface.errors import StartupError
from engine.interface.transport import FrameDecoder, encode_frame, read_messages
from server.config.value_types import UsageError
from server.launcher.listener import bound_address, wanted_address
from server.launcher.run_dir import find_takeover_sockets

logger = logging.getLogger(__name__)

_ANSWER_S = 10.0
_POLL_S = 0.02
_SERVE_S = 60.0  # for workers that may accept; both daemons do so meanwhile
_TAKEN_S = 15.0  # the running daemon waits 10 s for its service manager, and a second for its workers
_MAX_FRAME = 1 << 16
SOCKETS_PER_MESSAGE = 64  # below SCM_MAX_FD, which is 253


class Offer(msgspec.Struct, tag=True):
    """The running daemon's first message. As many listening sockets follow, some with each byte.

    notify_address: of its service manager, as in NOTIFY_SOCKET; "" without one. watchdog_s: that of its watchdog.
    """

    pid: int
    version: str
    num_listeners: int
    notify_address: str = ""
    watchdog_s: float | None = None


class Refused(msgspec.Struct, tag=True):
    """Why the daemon cannot be taken over now: a sentence."""

    reason: str


class Take(msgspec.Struct, tag=True):
    """The next daemon accepts connections. notify_address: of its own service manager, "" without one."""

    pid: int
    notify_address: str = ""


class Taken(msgspec.Struct, tag=True):
    """The running daemon accepts none any more. is_main: it has named the next one to their service manager."""

    is_main: bool = False


FromRunning = Offer | Refused | Taken


class Takeover:
    """The offered port. Use complete() in one event loop."""

    def __init__(self, connection: socket.socket, offer: Offer, listeners: list[socket.socket]) -> None:
        self.listeners = listeners
        self.offer = offer
        self.is_done = False  # this daemon has the port
        self._connection = connection
        self._taken: Taken | None = None

    @property
    def untouched(self) -> str:
        """A sentence for a start that has failed before it had the port."""
        return f"The daemon with process {self.offer.pid} goes on serving."

    async def complete(
        self,
        *,
        is_prepared: Callable[[], bool],
        accept: Callable[[], None],
        is_serving: Callable[[], bool],
        notify_address: str,
    ) -> Taken | None:
        """Wait until this daemon is prepared, let its workers accept, and tell the running daemon once they do.

        Returns its answer, None if it has ended before or does not answer. Raises StartupError if they do not serve
        in time.
        """
        reader, writer = await asyncio.open_unix_connection(sock=self._connection)
        reading = asyncio.create_task(self._read(reader))
        try:
            await _poll(lambda: reading.done() or is_prepared())
            accept()
            try:
                async with asyncio.timeout(_SERVE_S):
                    await _poll(lambda: reading.done() or is_serving())
            except TimeoutError:
                raise StartupError(f"The HTTP workers have not served for {_SERVE_S:g} s.") from None
            if not reading.done():
                writer.write(encode_frame(Take(os.getpid(), notify_address)))
                await asyncio.wait([reading], timeout=_TAKEN_S)
                if not reading.done():
                    logger.warning(
                        "the daemon that had the port does not answer, it may still accept pid=%d", self.offer.pid
                    )
        finally:
            reading.cancel()
            writer.close()
        self.is_done = True
        return self._taken

    def close(self) -> None:
        """Close the connection: without Take the running daemon goes on."""
        self._connection.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            async for message in read_messages(reader, FromRunning):
                if isinstance(message, Taken):
                    self._taken = message
                    return


def request_takeover(config: LaunchConfig) -> Takeover:
    """Ask the daemon that has the port of these flags for it. Blocks. Raises StartupError if there is none."""
    if config.uds is None and config.port == 0:
        raise UsageError("--takeover needs the port of the running daemon, and --port is 0.")
    wanted = wanted_address(config)
    found = find_takeover_sockets()
    for path, address in found.items():
        connection = _connect(path) if address == wanted else None
        if connection is not None:
            try:
                return _receive(connection, wanted)
            except BaseException:
                connection.close()
                raise
    raise StartupError(_not_found(config, wanted, others=[other for other in found.values() if other != wanted]))


def peer_of(connection: socket.socket) -> tuple[int, int | None]:
    """Return the user id of a unix socket's other end, and its process id where the system tells it."""
    if sys.platform == "linux":
        size = struct.calcsize("3i")
        pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        return uid, pid
    return os.getuid(), None  # the directory of the socket lets only this user in


async def _poll(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(_POLL_S)


def _connect(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_ANSWER_S)
    try:
        connection.connect(str(path))
    except OSError:  # its daemon was killed, or has handed the port over just now
        connection.close()
        return None
    return connection


def _receive(connection: socket.socket, wanted: str) -> Takeover:
    uid, pid = peer_of(connection)
    if uid != os.getuid():
        raise StartupError(f"The daemon on {wanted} is that of another user: only its own can take it over.")
    named = f"The daemon on {wanted}" + ("" if pid is None else f" (process {pid})")
    try:
        offer = _read_frame(connection)
        if isinstance(offer, Refused):
            raise StartupError(f"{named} cannot be taken over: {offer.reason}")
        if not isinstance(offer, Offer):
            raise StartupError(f"{named} answers in a form that this version does not know.")
        listeners = _read_listeners(connection, offer.num_listeners)
    except TimeoutError:
        raise StartupError(f"{named} has not answered for {_ANSWER_S:g} s.") from None
    except (OSError, EOFError, msgspec.MsgspecError):
        raise StartupError(f"{named} has ended the takeover: try again, or start without --takeover.") from None
    if any(bound_address(listener) != wanted for listener in listeners):
        raise StartupError(f"{named} listens elsewhere.")
    connection.setblocking(False)
    return Takeover(connection, offer, listeners)


def _read_frame(connection: socket.socket) -> object:
    """Read one message, and not a byte of what follows: the sockets come with those."""
    head = _read_exactly(connection, 4)
    (length,) = struct.unpack("<I", head)
    if length > _MAX_FRAME:
        raise EOFError
    (message,) = FrameDecoder(FromRunning).feed(head + _read_exactly(connection, length))
    return message


def _read_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _read_listeners(connection: socket.socket, count: int) -> list[socket.socket]:
    listeners: list[socket.socket] = []
    while len(listeners) < count:
        data, fds, _, _ = socket.recv_fds(connection, 1, SOCKETS_PER_MESSAGE)
        if not data:
            raise EOFError
        for fd in fds:
            os.set_inheritable(fd, False)  # those of a message are, unlike all that Python opens
            listener = socket.socket(fileno=fd)
            listener.setblocking(False)
            listeners.append(listener)
    return listeners


def _not_found(config: LaunchConfig, wanted: str, *, others: list[str]) -> str:
    """Return why no daemon can be taken over, and what helps. others: addresses of other daemons."""
    same_port = [other for other in others if other.rpartition(":")[2] == wanted.rpartition(":")[2]]
    if same_port:
        return f"--takeover: no daemon listens on {wanted}, but one does on {', '.join(same_port)}: use its --host."
    if _is_served(config):
        return (
            f"--takeover: {wanted} is served by a program that cannot be taken over: it is no Quire daemon of this user"
            " with this TMPDIR, or one whose version has no takeover. Stop it, and start without --takeover."
        )
    return f"--takeover: nothing listens on {wanted}: start without --takeover."


def _is_served(config: LaunchConfig) -> bool:
    family = socket.AF_UNIX if config.uds is not None else socket.AF_INET6 if ":" in config.host else socket.AF_INET
    address = config.uds if config.uds is not None else (config.host, config.port)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(_ANSWER_S)
        try:
            probe.connect(address)
        except OSError:
            return False
    return True
