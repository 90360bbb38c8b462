"""HostLinks: connects this daemon to those of other hosts, for prefill engines here and there. Never torch.

    HTTP worker, decode engine ── unix socket ── HostLinks ══ TLS ══ PrefillListener ── unix socket ── prefill engine
For each engine of --prefill-hosts there are two unix sockets in the daemon's private directory, in place of those that
an engine of this host has. Each connection to one of them is carried over a connection of its own to the other host
(server/launcher/host_wire.py), so workers and engines do not know that an engine is elsewhere. While that host cannot
be reached, the local connection stays open without an answer, and the host is tried again every second.

Imports engine.interface, server.config and server.launcher.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.interface.config import HostLinksConfig
from engine.interface.transport import encode_frame
from server.config.version import package_version
from server.launcher.engine_set import EngineSpec, RemoteEngine, peer_socket, remote_engines
from server.launcher.host_wire import (
    GREETING_S,
    Declined,
    Dial,
    Dialed,
    Stream,
    TlsFiles,
    carry,
    describe,
    keep_alive,
    read_message,
)
from server.launcher.prefill_listener import LentEngine, PrefillListener, listen
from server.launcher.processes import Tasks
from server.launcher.takeover_form import protocol_digest

logger = logging.getLogger(__name__)

RETRY_S = 1.0


class HostLinks:
    """Life: made → start → aclose. Without other hosts it does nothing. Use inside one event loop."""

    def __init__(self, config: HostLinksConfig | None, engines: list[EngineSpec], run_dir: Path) -> None:
        """engines: of this host. run_dir: where the sockets are."""
        self._config = config
        self._run_dir = run_dir
        self._engines = engines
        self._problems: dict[str, str] = {}  # of the engines that are not reached, as logged last
        self._tasks = Tasks()
        self._servers: list[asyncio.Server] = []

    @property
    def _server(self) -> int:
        """The number by which this server is known to others."""
        peer = self._engines[0].config.peer
        return 0 if peer is None else peer.first_decode

    async def start(self) -> None:
        """Listen for other hosts, and for what is to be carried to them. Raises StartupError."""
        config = self._config
        if config is None:
            return
        if config.listen is not None:
            lent = [
                LentEngine(peer.name, spec.socket, peer_socket(self._run_dir, peer.index))
                for spec in self._engines
                if (peer := spec.config.peer) is not None and peer.role == "prefill"
            ]
            listener = PrefillListener(listen(config.listen), config, lent, server=self._server)
            self._tasks.spawn(listener.run())
            logger.info("prefill engines are lent address=%s engines=%d", config.listen.address, len(lent))
        tls = TlsFiles(config, is_server=False)
        for remote in remote_engines(self._engines[0].config, self._run_dir):
            await self._offer(tls, remote, remote.socket, is_peer=False)
            await self._offer(tls, remote, remote.peer_socket, is_peer=True)

    async def aclose(self) -> None:
        """Close every connection, and listen no more."""
        for server in self._servers:
            server.close()
        self._tasks.cancel()

    async def _offer(self, tls: TlsFiles, remote: RemoteEngine, path: str, *, is_peer: bool) -> None:
        loop = asyncio.get_running_loop()

        def connected() -> _LocalProtocol:
            protocol = _LocalProtocol(
                lambda reader, writer: self._tasks.spawn(
                    self._serve(tls, remote, Stream(reader, writer), protocol.is_gone, is_peer=is_peer)
                )
            )
            return protocol

        self._servers.append(await loop.create_unix_server(connected, path))

    async def _serve(
        self, tls: TlsFiles, remote: RemoteEngine, local: Stream, is_gone: asyncio.Event, *, is_peer: bool
    ) -> None:
        """Carry a local connection to another host, once that is reached."""
        try:
            while not is_gone.is_set():
                far = await self._dial(tls, remote, is_peer=is_peer)
                if far is not None:
                    await carry(local, far)
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(is_gone.wait(), RETRY_S)
        finally:
            local.writer.close()

    async def _dial(self, tls: TlsFiles, remote: RemoteEngine, *, is_peer: bool) -> Stream | None:
        """Return a connection to an engine of another host; None: there is none now."""
        try:
            async with contextlib.AsyncExitStack() as stack, asyncio.timeout(GREETING_S):
                reader, writer = await asyncio.open_connection(
                    remote.host.host,
                    remote.host.port,
                    ssl=tls.context(),
                    server_hostname=remote.host.host,
                    ssl_handshake_timeout=GREETING_S,
                )
                stack.callback(writer.transport.abort)
                keep_alive(writer.get_extra_info("socket"))
                dial = Dial(package_version(), protocol_digest(), self._server, remote.index, is_peer)
                writer.write(encode_frame(dial))
                answer = await read_message(reader, Dialed | Declined)
                if isinstance(answer, Declined):
                    self._note(remote, answer.message)
                    return None
                stack.pop_all()
        except (OSError, EOFError, ValueError, msgspec.MsgspecError) as error:
            self._note(remote, describe(error))
            return None
        self._note(remote, "")
        if answer.num_engines > remote.host.num_engines:
            self._note_more(remote, answer.num_engines)
        return Stream(reader, writer)

    def _note(self, remote: RemoteEngine, problem: str) -> None:
        """Log that an engine is reached, or not, and why, when that changes."""
        if self._problems.get(remote.name) == problem:
            return
        self._problems[remote.name] = problem
        if problem:
            logger.warning(
                "prefill engine is not reached name=%s reason=%r; prompts go elsewhere", remote.name, problem
            )
        else:
            logger.info("prefill engine is reached name=%s", remote.name)

    def _note_more(self, remote: RemoteEngine, num_engines: int) -> None:
        """Log once that a host has more engines than are used."""
        name = remote.host.address
        if name not in self._problems:
            self._problems[name] = ""
            logger.warning(
                "prefill host has more engines than --prefill-hosts names: %dp@%s would use all", num_engines, name
            )


class _LocalProtocol(asyncio.StreamReaderProtocol):
    """A stream that also tells when its client has ended, while nobody reads."""

    def __init__(self, on_connected: Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]) -> None:
        self.is_gone = asyncio.Event()
        super().__init__(asyncio.StreamReader(), on_connected)

    def eof_received(self) -> bool | None:
        """See asyncio.Protocol."""
        self.is_gone.set()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self.is_gone.set()
        super().connection_lost(exc)
