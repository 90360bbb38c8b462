"""The connections between daemons of several hosts: how they begin, and how bytes are carried. Never torch.

    dialer → listener   TLS 1.3 handshake, in which both show certificates (server/config/host_links.py); Dial
    listener → dialer   Dialed, or Declined, which ends the connection
Then the connection stands for one to a unix socket of the listener's host: bytes are carried both ways, unread. Frames
are those of engine/interface/transport.py. Until Dialed a connection is bounded in time and size.
"""

import asyncio
import contextlib
import os
import socket
import ssl
import struct
from collections.abc import Coroutine
from typing import Any, NamedTuple, TypeVar

import msgspec

from engine.interface.config import HostLinksConfig
from server.config.host_links import tls_context

GREETING_S = 5.0  # until Dialed
_MOST_BYTES = 4096  # of a message until then
_PIECE_BYTES = 1 << 18
_CLOSE_S = 5.0  # to send what is left
_LENGTH = struct.Struct("<I")
# A host that is gone without a word is noticed within seconds, whether or not bytes are on their way to it
_IDLE_S, _INTERVAL_S, _NUM_PROBES = 3, 1, 3
_UNACKNOWLEDGED_S = 6

Message = TypeVar("Message")


class Dial(msgspec.Struct, tag=True):
    """Asks for a connection to a prefill engine.

    version, protocol: of Quire, and a digest of its messages; equal on both sides. server: PeerConfig.first_decode, by
    which a server knows itself. is_peer: to its socket for decode engines, else to that for HTTP workers.
    """

    version: str
    protocol: str
    server: int
    engine: int
    is_peer: bool


class Dialed(msgspec.Struct, tag=True):
    """The connection is made. num_engines: prefill engines of this host."""

    num_engines: int


class Declined(msgspec.Struct, tag=True):
    """It is not: one sentence."""

    message: str


class Stream(NamedTuple):
    """Both directions of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def aclose(self) -> None:
        """Send what is left, for some seconds, then close."""
        self.writer.close()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self.writer.wait_closed()
        except (OSError, ssl.SSLError):  # a TimeoutError is one too
            self.writer.transport.abort()


class TlsFiles:
    """The TLS context of one side of the connections, made anew when one of its files is another one.

    Reading them takes milliseconds, and the listener needs a context for everybody who connects.
    """

    def __init__(self, config: HostLinksConfig, *, is_server: bool) -> None:
        self._config = config
        self._is_server = is_server
        self._context: ssl.SSLContext | None = None
        self._stamps: list[tuple[int, int, int]] = []  # of the files, before they were read

    def context(self) -> ssl.SSLContext:
        """Return it. Raises OSError (ssl.SSLError is one) or ValueError, as tls_context() does."""
        found = [os.stat(name) for name in (self._config.cert, self._config.key, self._config.ca)]
        stamps = [(file.st_ino, file.st_size, file.st_mtime_ns) for file in found]
        if self._context is None or stamps != self._stamps:
            self._context = tls_context(self._config, is_server=self._is_server)
            self._stamps = stamps
        return self._context


async def accepted(sock: socket.socket, context: ssl.SSLContext) -> Stream:
    """Return the TLS stream of a socket that was accepted, and closes it if that fails. Raises OSError."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol, sock, ssl=context, ssl_handshake_timeout=GREETING_S
    )
    return Stream(reader, asyncio.StreamWriter(transport, protocol, reader, loop))


def keep_alive(sock: socket.socket) -> None:
    """Let the system end a connection whose other side does not answer for about six seconds."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE_S),
        ("TCP_KEEPINTVL", _INTERVAL_S),
        ("TCP_KEEPCNT", _NUM_PROBES),
        ("TCP_USER_TIMEOUT", _UNACKNOWLEDGED_S * 1000),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def read_message(reader: asyncio.StreamReader, message_type: type[Message] | Any) -> Any:
    """Read one message of a greeting. Raises msgspec.MsgspecError, or EOFError if the connection ends."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > _MOST_BYTES:
        raise msgspec.DecodeError(f"a message of {length} bytes exceeds {_MOST_BYTES}")
    body = await reader.readexactly(length)
    try:
        return msgspec.msgpack.decode(body, type=message_type)
    except (UnicodeDecodeError, RecursionError) as error:  # msgspec raises them as they are
        raise msgspec.DecodeError(f"bad text or nesting: {error}") from error


async def carry(first: Stream, second: Stream) -> None:
    """Carry bytes both ways until one side ends, then close both; what that side sent before still arrives."""
    ways = [_spawn(_carry(first.reader, second.writer)), _spawn(_carry(second.reader, first.writer))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        await asyncio.gather(first.aclose(), second.aclose())


def describe(error: BaseException) -> str:
    """Return why a connection failed, in a few words."""
    match error:
        case ssl.SSLCertVerificationError():
            return f"its certificate is refused: {error.verify_message}"
        case ssl.SSLError():
            return f"TLS: {(error.reason or str(error)).replace('_', ' ').lower()}"
        case TimeoutError():
            return f"no answer within {GREETING_S:g} s"
        case EOFError():
            return "it closed the connection"
        case OSError() if error.errno is not None and error.errno > 0:
            return os.strerror(error.errno).lower()  # asyncio's own text has no reason
        case OSError():
            return (error.strerror or str(error)).lower()  # of a name that is not found
    return str(error)


def _spawn(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return asyncio.create_task(coroutine)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # the end of a connection, and ssl.SSLError is one
        while data := await reader.read(_PIECE_BYTES):
            writer.write(data)
            await writer.drain()
