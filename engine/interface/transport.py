"""Message frames over unix sockets, for asyncio and for the engine's loop. Imports msgspec only; never torch.

A frame is its length (4 bytes, little-endian) and one msgpack message. HTTP workers and the launcher read asyncio
streams with read_messages(). The engine's single-threaded loop polls non-blocking sockets with a selector (Connection,
SocketTransport): no thread, no lock, no wait while a step is in flight. Nothing is pickled; an invalid frame closes its
connection.
"""

import asyncio
import contextlib
import logging
import os
import selectors
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec

from engine.interface.protocol import ClientGone, EngineReady, FromEngine, ToEngine

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 256 * 1024 * 1024
MAX_UNSENT_BYTES = 64 * 1024 * 1024
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: msgspec.Struct) -> bytes:
    """Return the frame of one message."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Decodes a byte stream into messages of the union `message_type`."""

    def __init__(self, message_type: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(message_type)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Add received bytes; return the messages now complete. Raises msgspec.DecodeError on a bad frame."""
        self._buffer += data
        messages: list[Any] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise msgspec.DecodeError(f"frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(self._decoder.decode(memoryview(self._buffer)[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return messages


async def read_messages(reader: asyncio.StreamReader, message_type: Any) -> AsyncIterator[Any]:
    """Yield the messages of an asyncio stream until it ends."""
    decoder = FrameDecoder(message_type)
    while data := await reader.read(1 << 18):
        for message in decoder.feed(data):
            yield message


class Connection:
    """One non-blocking socket of the engine's loop. Sends never block: unsent bytes are buffered."""

    def __init__(self, sock: socket.socket, message_type: Any) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._decoder = FrameDecoder(message_type)
        self._unsent = bytearray()

    @property
    def has_unsent(self) -> bool:
        """True while bytes wait for the peer."""
        return bool(self._unsent)

    def send(self, message: msgspec.Struct) -> None:
        """Queue one message and send as much as the socket accepts. receive() reports a broken connection."""
        self._unsent += encode_frame(message)
        self.flush()
        if len(self._unsent) > MAX_UNSENT_BYTES:  # the peer stopped reading: the buffer would grow without limit
            logger.error("connection dropped, since its peer does not read unsent_bytes=%d", len(self._unsent))
            self._unsent.clear()
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)

    def flush(self) -> None:
        """Send as many buffered bytes as the socket accepts."""
        try:
            while self._unsent:
                sent = self.sock.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()

    def receive(self) -> list[Any] | None:
        """Return the messages that have arrived, or None if the connection is closed."""
        messages: list[Any] = []
        try:
            while data := self.sock.recv(1 << 18):
                messages += self._decoder.feed(data)
                if len(data) < 1 << 18:
                    return messages
        except BlockingIOError:
            return messages
        except (OSError, msgspec.MsgspecError) as error:
            logger.warning("connection lost error=%r", str(error))
        return None  # messages before the close are dropped: their sender cannot receive a reply


class SocketTransport:
    """The engine's end of all worker connections and of the control connection, in one selector.

    receive() may return early without messages (after a control message or one second): the loop then calls it again.
    """

    def __init__(
        self,
        path: str,
        greeting: EngineReady,
        *,
        control: Connection | None = None,
        on_control: Callable[[list[Any] | None], None] | None = None,
    ) -> None:
        self._greeting = greeting
        self._on_control = on_control
        self._connections: dict[int, Connection] = {}
        self._next_client_id = 0
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # the rename replaces a dead engine's socket atomically: a worker never finds one that does not listen
        fresh = path + ".new"
        self._listener.bind(fresh)
        os.replace(fresh, path)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._control = control
        if control is not None:
            self._selector.register(control.sock, selectors.EVENT_READ, control)

    def receive(self, timeout_s: float | None) -> Iterator[tuple[int, ToEngine | ClientGone]]:
        """Yield (client id, message) pairs in order of arrival. timeout_s: None waits up to one second; 0 polls.

        Control messages are handled last, after the caller has handled every pair: a Flush then includes everything
        that workers sent before it.
        """
        has_control = False
        for key, events in self._selector.select(1.0 if timeout_s is None else timeout_s):
            if key.data is None:
                self._accept()
            elif key.data is self._control:
                self._control.flush()
                has_control = bool(events & selectors.EVENT_READ)
            else:
                yield from ((key.data, message) for message in self._serve(key.data, events))
        if has_control and self._control is not None and self._on_control is not None:
            self._on_control(self._control.receive())

    def send(self, client_id: int, message: FromEngine) -> None:
        """Send to one worker without blocking; a disconnected worker is ignored."""
        connection = self._connections.get(client_id)
        if connection is not None:
            connection.send(message)
            if connection.has_unsent:
                self._watch(connection, client_id, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def broadcast(self, message: FromEngine) -> None:
        """Send to every worker."""
        for client_id in list(self._connections):
            self.send(client_id, message)

    def close(self) -> None:
        """Close every worker connection and stop listening."""
        for connection in self._connections.values():
            connection.sock.close()
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        self._next_client_id += 1
        connection = self._connections[self._next_client_id] = Connection(sock, ToEngine)
        self._selector.register(sock, selectors.EVENT_READ, self._next_client_id)
        connection.send(self._greeting)

    def _serve(self, client_id: int, events: int) -> list[ToEngine | ClientGone]:
        connection = self._connections[client_id]
        if events & selectors.EVENT_WRITE:
            connection.flush()
            if not connection.has_unsent:
                self._watch(connection, client_id, selectors.EVENT_READ)
        if events & selectors.EVENT_READ:
            messages = connection.receive()
            if messages is not None:
                return messages
            self._selector.unregister(connection.sock)
            connection.sock.close()
            del self._connections[client_id]
            return [ClientGone()]
        return []

    def _watch(self, connection: Connection, client_id: int, events: int) -> None:
        self._selector.modify(connection.sock, events, client_id)
