"""PrefillListener: lends this host's prefill engines to the daemons of other hosts. Never torch.

It listens on --disaggregate-listen. A connection that has shown a certificate and named an engine is joined to a unix
socket of that engine (server/launcher/host_wire.py). Imports engine.interface, server.config and server.launcher.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import time
from typing import NamedTuple

import msgspec

from engine.interface.config import HostLinksConfig, PrefillHost
from engine.interface.errors import StartupError
from engine.interface.transport import encode_frame
from server.config.version import package_version
from server.launcher.host_wire import (
    GREETING_S,
    Declined,
    Dial,
    Dialed,
    Stream,
    TlsFiles,
    accepted,
    carry,
    describe,
    keep_alive,
    read_message,
)
from server.launcher.processes import Tasks
from server.launcher.takeover_form import protocol_digest

logger = logging.getLogger(__name__)

MOST_GREETING = 64  # connections at once that have not said whom they want; a further one ends the oldest
MOST_JOINED = 1024
_BACKLOG = 128
_ACCEPT_PAUSE_S = 0.2  # while no socket can be had
_LOG_INTERVAL_S = 1.0


class LentEngine(NamedTuple):
    """The unix sockets of a prefill engine."""

    name: str
    socket: str
    peer_socket: str


def listen(address: PrefillHost) -> socket.socket:
    """Return a socket that listens there. Raises StartupError."""
    try:
        family, _, _, _, found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(found)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = "it is in use" if getattr(error, "errno", 0) == errno.EADDRINUSE else describe(error)
        raise StartupError(
            f"--disaggregate-listen {address.address} cannot be listened on: {reason}.", exit_code=2
        ) from error
    listener.setblocking(False)
    return listener


class PrefillListener:
    """Life: made → run, until it is cancelled. Use inside one event loop."""

    def __init__(
        self, listener: socket.socket, config: HostLinksConfig, engines: list[LentEngine], *, server: int
    ) -> None:
        """listener: from listen(); closed at the end of run(). engines: by number. server: see Dial."""
        self._listener = listener
        self._tls = TlsFiles(config, is_server=True)
        self._engines = engines
        self._server = server
        self._greeting: dict[asyncio.Task[None], str] = {}  # the tasks that greet, and whom; the oldest first
        self._num_joined = self._num_silent = 0
        self._next_log_s = 0.0
        self._tasks = Tasks()

    async def run(self) -> None:
        """Accept connections without end."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    sock, address = await loop.sock_accept(self._listener)
                except OSError as error:  # no descriptor is left, or the connection is gone already
                    self._complain("?", describe(error))
                    await asyncio.sleep(_ACCEPT_PAUSE_S)
                    continue
                if self._num_joined >= MOST_JOINED:
                    sock.close()
                    self._complain(address[0], f"{self._num_joined} connections run")
                else:
                    self._make_room()
                    self._tasks.spawn(self._serve(sock, address[0]))
                await asyncio.sleep(0)  # sock_accept() does not wait in a burst, and the task has to begin
        finally:
            self._tasks.cancel()
            self._listener.close()

    def _make_room(self) -> None:
        """End the oldest greeting if there are too many: silent connections must not keep others out."""
        if len(self._greeting) >= MOST_GREETING:
            oldest = next(iter(self._greeting))
            self._complain(self._greeting.pop(oldest), f"{MOST_GREETING} later connections greet")
            oldest.cancel()

    async def _serve(self, sock: socket.socket, address: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._greeting[task] = address
        try:
            joined = await self._greet(sock)
        except (OSError, EOFError, ValueError, msgspec.MsgspecError) as error:
            self._complain(address, describe(error))
            return
        finally:
            self._greeting.pop(task, None)
        if joined is None:
            return
        self._num_joined += 1
        try:
            await carry(*joined)
        finally:
            self._num_joined -= 1

    async def _greet(self, sock: socket.socket) -> tuple[Stream, Stream] | None:
        """Return the connection and that to the engine that it wants; None: it was declined."""
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(GREETING_S):
                with contextlib.ExitStack() as unused:
                    unused.callback(sock.close)
                    keep_alive(sock)
                    context = self._tls.context()
                    unused.pop_all()
                outer = await accepted(sock, context)
                stack.callback(outer.writer.transport.abort)
                dial = await read_message(outer.reader, Dial)
                if problem := self._problem(dial):
                    await self._decline(outer, problem)
                    return None
                engine = self._engines[dial.engine]
                try:
                    inner = Stream(
                        *await asyncio.open_unix_connection(engine.peer_socket if dial.is_peer else engine.socket)
                    )
                except OSError:
                    await self._decline(outer, f"{engine.name} does not serve now.")
                    return None
                stack.callback(inner.writer.transport.abort)
                outer.writer.write(encode_frame(Dialed(len(self._engines))))
                await outer.writer.drain()
            stack.pop_all()
            return outer, inner

    def _problem(self, dial: Dial) -> str:
        """Return why a connection is declined; "": it is not."""
        if dial.server and dial.server == self._server:
            return "It is the server itself, whose --prefill-hosts leads to its own --disaggregate-listen."
        if dial.version != package_version() or dial.protocol != protocol_digest():
            return (
                f"It has version {package_version()} of Quire and other messages than version {dial.version} here:"
                " both hosts need the same version."
            )
        if not 0 <= dial.engine < len(self._engines):
            return (
                f"Engine prefill-{dial.engine} is asked for, and it has {len(self._engines)}:"
                " --prefill-hosts Np@HOST:PORT names their number."
            )
        return ""

    async def _decline(self, outer: Stream, problem: str) -> None:
        outer.writer.write(encode_frame(Declined(problem)))
        await outer.writer.drain()
        await outer.aclose()

    def _complain(self, address: str, reason: str) -> None:
        """Log a connection that failed, one a second at most: anybody may connect."""
        now = time.monotonic()
        if now < self._next_log_s:
            self._num_silent += 1
            return
        logger.warning("connection of another host failed host=%s reason=%r more=%d", address, reason, self._num_silent)
        self._next_log_s, self._num_silent = now + _LOG_INTERVAL_S, 0
