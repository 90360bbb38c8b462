"""Takeover: the port of a running daemon, for the one that replaces it (quire serve --takeover). Never torch.

    running daemon (server/launcher/hand_over.py)         next daemon
    Offer, then the listening sockets   ───────────→      its workers load, and wait
        [of the form "instead" only: memory does not hold both models]
                                        ←───────────      Release: all is done that needs no memory of the device
    Released: its engine has ended      ───────────→      loads
                                        ←───────────      Report: its state, at once and each second from now on
    GivenUp: that takes too long        ───────────→      ends
                                        ←───────────      Take: its workers accept connections
    Taken: its workers accept no more   ───────────→      has the port
Both share the sockets (unix(7), SCM_RIGHTS), which never close, so no connection is refused at any moment. A next
daemon that ends before Take leaves the running one as it was; that starts its engine again if it has released it. If
the running one ends first, the next one has the port from then on. After Take in the form "instead" the connection
stays: the running daemon's open requests go on in the next one's engine, and it must hear how that is.
Life: request_takeover → complete → close. Imports engine.interface, server.config and server.launcher.
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.interface.config import LaunchConfig
from engine.interface.control import State
from engine.interface.errors import StartupError
from engine.interface.transport import FrameDecoder, encode_frame, read_messages
from server.config.value_types import UsageError
from server.launcher.listener import bound_address, wanted_address
from server.launcher.processes import Tasks
from server.launcher.run_dir import find_takeover_sockets
from server.launcher.takeover_form import EngineFacts, Form

logger = logging.getLogger(__name__)

_ANSWER_S = 10.0
_POLL_S = 0.02
_SERVE_S = 60.0  # for workers that may accept; both daemons do so meanwhile
_TAKEN_S = 15.0  # the running daemon waits 10 s for its service manager, and a second for its workers
_RELEASE_S = 90.0  # the running daemon gives its engine 30 s, after a back-off of at most as much
_ORPHANS_S = 2.0  # for the kernel to end the children of a launcher that was killed, and to free what they had
_REPORT_S = 1.0
_MAX_FRAME = 1 << 16
SOCKETS_PER_MESSAGE = 64  # below SCM_MAX_FD, which is 253


class Offer(msgspec.Struct, tag=True):
    """The running daemon's first message. As many listening sockets follow, some with each byte.

    notify_address: of its service manager, as in NOTIFY_SOCKET; "" without one. watchdog_s: that of its watchdog.
    engine: None: of a version that cannot release it.
    """

    pid: int
    version: str
    num_listeners: int
    notify_address: str = ""
    watchdog_s: float | None = None
    engine: EngineFacts | None = None


class Refused(msgspec.Struct, tag=True):
    """Why the daemon cannot be taken over now: a sentence."""

    reason: str


class Release(msgspec.Struct, tag=True):
    """The next daemon needs the memory of the running one's engine: it is to end between two steps."""


class Released(msgspec.Struct, tag=True):
    """The running daemon's engine has ended."""


class Report(msgspec.Struct, tag=True):
    """The next daemon's state, with the socket of its engine: on change, and each second."""

    state: State


class GivenUp(msgspec.Struct, tag=True):
    """The running daemon waits no longer for the next one, and starts its engine again. reason: a sentence."""

    reason: str


class Take(msgspec.Struct, tag=True):
    """The next daemon accepts connections. notify_address: of its own service manager, "" without one."""

    pid: int
    notify_address: str = ""


class Taken(msgspec.Struct, tag=True):
    """The running daemon accepts none any more. is_main: it has named the next one to their service manager."""

    is_main: bool = False


FromRunning = Offer | Refused | Released | GivenUp | Taken
ToRunning = Release | Report | Take


class Takeover:
    """The offered port. Use complete() in one event loop."""

    def __init__(self, connection: socket.socket, offer: Offer, listeners: list[socket.socket]) -> None:
        self.listeners = listeners
        self.offer = offer
        self.form = Form(False, "asked for")
        self.is_done = False  # this daemon has the port
        self._connection = connection
        self._writer: asyncio.StreamWriter | None = None
        self._has_ended = asyncio.Event()  # the running daemon, or its end of the connection
        self._has_asked = False  # for the release of its engine
        self._released = False
        self._given_up: GivenUp | None = None
        self._taken: Taken | None = None
        self._state: Callable[[], State] | None = None  # of this daemon, from release() on
        self._tasks = Tasks()

    @property
    def untouched(self) -> str:
        """A sentence for a start that has failed before it had the port."""
        again = "starts its engine again and " if self._has_asked else ""
        return f"The daemon with process {self.offer.pid} {again}goes on serving."

    async def release(
        self, *, is_held: Callable[[], bool], activate: Callable[[], None], state: Callable[[], State]
    ) -> float:
        """Wait until this daemon's engine is held, let the running daemon end its own, and activate this one.

        From then on that daemon hears this one's state, with the socket of its engine. Before complete(). Returns when
        the engine was activated (time.monotonic). Raises StartupError if the other one does not end in time.
        """
        writer = await self._open()
        await _poll(lambda: self._has_ended.is_set() or is_held())
        if not self._has_ended.is_set():
            self._has_asked = True
            writer.write(encode_frame(Release()))
            logger.info("waits until the running daemon has stopped its engine pid=%d", self.offer.pid)
            try:
                async with asyncio.timeout(_RELEASE_S):
                    await _poll(lambda: self._has_ended.is_set() or self._released)
            except TimeoutError:
                raise StartupError(f"The running daemon has not stopped its engine for {_RELEASE_S:g} s.") from None
        if not self._released:  # it was killed, and its engine is by the kernel
            await asyncio.sleep(_ORPHANS_S)
        began_s = time.monotonic()
        self._state = state
        self._tasks.spawn(self._report(writer, state))
        activate()
        return began_s

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
        in time, or if the running daemon has given the takeover up.
        """
        writer = await self._open()
        await _poll(lambda: self._is_over() or is_prepared())
        accept()
        try:
            async with asyncio.timeout(_SERVE_S):
                await _poll(lambda: self._is_over() or is_serving())
        except TimeoutError:
            raise StartupError(f"The HTTP workers have not served for {_SERVE_S:g} s.") from None
        if not self._is_over():
            if self._state is not None:
                writer.write(encode_frame(Report(self._state())))
            writer.write(encode_frame(Take(os.getpid(), notify_address)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TAKEN_S):
                    await _poll(lambda: self._is_over() or self._taken is not None)
            if self._taken is None and not self._is_over():
                logger.warning(
                    "the daemon that had the port does not answer, it may still accept pid=%d", self.offer.pid
                )
        self.is_done = True
        if not self.form.is_instead:
            writer.close()
        return self._taken

    async def wait_guests(self) -> None:
        """Wait until no request of the daemon that had the port goes on in this one's engine."""
        if self.form.is_instead and self.is_done:
            await self._has_ended.wait()

    def close(self) -> None:
        """Close the connection: without Take the running daemon goes on."""
        self._tasks.cancel()
        if self._writer is None:
            self._connection.close()
        else:
            self._writer.close()

    def _is_over(self) -> bool:
        """Return whether the running daemon has ended. Raises StartupError if it has given the takeover up."""
        if self._given_up is not None:
            raise StartupError(self._given_up.reason)
        return self._has_ended.is_set()

    async def _open(self) -> asyncio.StreamWriter:
        if self._writer is None:
            reader, self._writer = await asyncio.open_unix_connection(sock=self._connection)
            self._tasks.spawn(self._read(reader))
        return self._writer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            async for message in read_messages(reader, FromRunning):
                match message:
                    case Released():
                        self._released = True
                    case GivenUp():
                        self._given_up = message
                    case Taken():
                        self._taken = message
        except (OSError, msgspec.MsgspecError):
            pass
        finally:
            self._has_ended.set()

    async def _report(self, writer: asyncio.StreamWriter, state: Callable[[], State]) -> None:
        told, told_s = None, 0.0
        while not self._has_ended.is_set():
            now_s = time.monotonic()
            if state() != told or now_s - told_s >= _REPORT_S:
                told, told_s = state(), now_s
                writer.write(encode_frame(Report(told)))
            await asyncio.sleep(_POLL_S)


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
    """Return the user id of a unix socket's other end, and its process id where the system tells it.

    Of a process in another pid namespace (two containers over one TMPDIR) Linux tells 0, which names none to kill().
    """
    if sys.platform == "linux":
        size = struct.calcsize("3i")
        pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        return uid, pid or None
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
