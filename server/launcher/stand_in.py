"""StandIn: answers on the port, in the launcher, while no HTTP worker serves. Never torch.

Clients get 503 with Retry-After at once, instead of waiting for the next worker; /ready and /health answer as workers
do. Every connection gets one reply and closes. With TLS the replies are encrypted as those of the workers are.
Life: start (the last worker has ended) → stop (one serves) → start … → stop. Use inside one event loop.
Imports engine.interface, server.api.error_replies and server.errors.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

from engine.interface.config import LaunchConfig
from engine.interface.control import State
from server.api.error_replies import error_reply
from server.errors import Draining, NotReady

if TYPE_CHECKING:
    from ssl import SSLContext

logger = logging.getLogger(__name__)
_BACKLOG = 2048
_MAX_CONNECTIONS = 256  # at once; further ones are closed without a reply
_MAX_HEAD_BYTES = 65_536
_HEAD_S = 5.0
_LINGER_S = 1.0  # a client that still sends must read the reply before the connection is reset
_GIVEN_UP_AFTER = 5  # ends of a worker in a row without a minute of service, as for the engine
_DETAIL = "No HTTP worker runs. The launcher starts the next one."


class StandIn:
    """Serves the listeners of HTTP workers that have ended. state: the daemon's."""

    def __init__(
        self, listeners: Sequence[socket.socket], config: LaunchConfig, *, root_path: str, state: Callable[[], State]
    ) -> None:
        self._listeners = listeners
        self._config = config
        self._root_path = root_path
        self._state = state
        self._servers: list[asyncio.Server] = []
        self._is_wanted = False
        self._num_open = 0
        self._num_ended = 0

    @property
    def is_hopeless(self) -> bool:
        """True while no worker serves and the last ones ended soon after their start: a supervisor should act."""
        return self._is_wanted and self._num_ended > _GIVEN_UP_AFTER

    def supervised_state(self) -> State:
        """Return the state for supervisors: HTTP workers that do not come back are a fault as an engine is."""
        state = self._state()
        return msgspec.structs.replace(state, fault="dead") if self.is_hopeless and state.is_alive else state

    async def start(self, *, num_ended: int) -> None:
        """Answer from now on. num_ended: how many times in a row the worker has ended without a minute of service."""
        self._num_ended = num_ended
        if self._is_wanted:
            return
        self._is_wanted = True
        try:
            tls = self._tls()
            for listener in self._listeners:
                copy = listener.dup()  # closed by stop(); the listener itself goes to the next worker
                server = await asyncio.start_server(
                    self._serve, sock=copy, backlog=_BACKLOG, ssl=tls, limit=_MAX_HEAD_BYTES
                )
                self._servers.append(server)
        except OSError as error:
            logger.error("connections wait for the next HTTP worker: the launcher cannot answer reason=%r", str(error))
        if not self._is_wanted:  # a worker serves meanwhile
            self._close()

    def stop(self) -> None:
        """Leave new connections to the workers; replies that have begun are completed."""
        self._is_wanted = False
        self._close()

    def _close(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()

    def _tls(self) -> "SSLContext | None":
        if self._config.tls_cert is None:
            return None
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._config.tls_cert, self._config.tls_key)
        return context

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_open += 1
        try:
            if self._num_open <= _MAX_CONNECTIONS:
                await self._answer(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client left, was too slow (a TimeoutError is an OSError) or sent no HTTP
        finally:
            self._num_open -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_HEAD_S):
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(self._reply(head))
            await writer.drain()
        if writer.can_write_eof():  # TLS cannot
            writer.write_eof()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while await reader.read(_MAX_HEAD_BYTES):
                    pass

    def _reply(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        status, headers, body = self._content(path.removeprefix(self._root_path))
        headers |= {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{key}: {headers[key]}" for key in headers)]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + (b"" if method == "HEAD" else body)

    def _content(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body for a path. /health is 503 only if a supervisor should restart the daemon."""
        state = self._state()
        if path == "/ready":
            stage = "draining" if state.is_draining else "restarting"
            return 503, {}, json.dumps({"stage": stage, "done": 0.0}).encode()
        if path in ("/health", "/ping"):
            fault = f"engine {state.fault}" if not state.is_alive else "worker restarting"
            if state.is_alive and self.is_hopeless:
                fault = "worker dead"
            status = 200 if fault == "worker restarting" else 503
            return status, {}, json.dumps({"status": fault, "detail": _DETAIL}).encode()
        request_id = f"req-{secrets.token_hex(8)}"
        error = Draining("The server is shutting down.") if state.is_draining else NotReady(f"{_DETAIL} Try again.")
        reply = error_reply(error, request_id=request_id, path=path)
        return reply.status, {**reply.headers, "x-request-id": request_id}, reply.body
