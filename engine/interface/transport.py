"""Message frames over unix sockets, for asyncio and for the engine's loop. Imports msgspec only; never torch.

A frame is its length (4 bytes, little-endian) and one msgpack message. HTTP workers read the engine's messages by a
MessageProtocol; they and the launcher read other asyncio streams with read_messages(). The engine's single-threaded
loop polls non-blocking sockets with a selector (Connection, SocketTransport): no thread, no lock, no wait while a step
is in flight. Nothing is pickled; an invalid frame closes its connection.
"""

import asyncio
import contextlib
import logging
import os
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import msgspec

from engine.interface.protocol import ClientGone, EngineReady, FromEngine, QueueState, ToEngine

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 256 * 1024 * 1024
MAX_UNSENT_BYTES = 64 * 1024 * 1024
RECEIVE_BUDGET_S = 0.005  # of one SocketTransport.receive(): decoding rows wait for it
_MAX_BEHIND = 16  # calls for which control messages wait for the messages of workers
_READ_BYTES = 1 << 18
_WATCHED = object()  # in place of a client id
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

    def feed(self, data: bytes | memoryview) -> list[Any]:
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
            try:
                messages.append(self._decoder.decode(memoryview(self._buffer)[start + _LENGTH.size : end]))
            except (UnicodeDecodeError, RecursionError) as error:  # msgspec raises them as they are
                raise msgspec.DecodeError(f"bad text or nesting: {error}") from error
            start = end
        del self._buffer[:start]
        return messages


async def read_messages(reader: asyncio.StreamReader, message_type: Any) -> AsyncIterator[Any]:
    """Yield the messages of an asyncio stream until it ends."""
    decoder = FrameDecoder(message_type)
    while data := await reader.read(1 << 18):
        for message in decoder.feed(data):
            yield message


class MessageProtocol(asyncio.Protocol):
    """An asyncio connection that hands messages on in the turn of the loop in which they arrive: no task has to wake.

    closed: done when the peer has closed, or raises what ended the connection: a bad frame, or an error of on_message.
    Its owner then closes the transport.
    """

    def __init__(
        self,
        message_type: Any,
        *,
        on_open: Callable[[asyncio.WriteTransport], None],
        on_message: Callable[[Any], None],
    ) -> None:
        """on_open: gets the transport, before the first message."""
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._decoder = FrameDecoder(message_type)
        self._on_open = on_open
        self._on_message = on_message

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._on_open(cast(asyncio.WriteTransport, transport))  # which uvloop's is, but for its bases

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self.closed.done():
            return
        try:
            for message in self._decoder.feed(data):
                self._on_message(message)
        except Exception as error:  # handed to the owner, who awaits `closed`
            self.closed.set_exception(error)

    def eof_received(self) -> bool:
        """See asyncio.Protocol."""
        self.connection_lost(None)
        return True  # the owner closes it

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        if self.closed.done():
            return
        if exc is None:
            self.closed.set_result(None)
        else:
            self.closed.set_exception(exc)


class Connection:
    """One non-blocking socket of the engine's loop. Sends never block: unsent bytes are buffered."""

    def __init__(self, sock: socket.socket, message_type: Any) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._decoder = FrameDecoder(message_type)
        self._read = memoryview(bytearray(_READ_BYTES))  # a new one for each read would be mapped and unmapped
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
        """Read once; return the messages now complete, or None if the connection is closed."""
        try:
            if num_bytes := self.sock.recv_into(self._read):
                return self._decoder.feed(self._read[:num_bytes])
        except BlockingIOError:
            return []
        except (OSError, msgspec.MsgspecError) as error:
            logger.warning("connection lost error=%r", str(error))
        return None


class SocketTransport:
    """The engine's end of all worker connections and of the control connection, in one selector.

    receive() may return early without messages (after a control message or one second): the loop then calls it again.
    A burst is taken in over several calls, one message of each worker in turn. A connection is read again when its
    messages are handled, so the rest of the burst waits in the socket, and its sender with it.
    """

    def __init__(
        self,
        path: str,
        greeting: EngineReady,
        *,
        control: Connection | None = None,
        on_control: Callable[[list[Any] | None], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._greeting = greeting
        self._queue_state: QueueState | None = None  # told last
        self._on_control = on_control
        self._clock = clock
        self._connections: dict[int, Connection] = {}  # by client id; that which was read last is last
        self._received: dict[int, deque[ToEngine | ClientGone]] = {}  # to yield; never empty; the next client is first
        self._num_behind = 0  # calls since all messages that had arrived were yielded
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
        """Yield (client id, message) pairs, those of one client in order of arrival. timeout_s: as in Transport.

        None waits up to one second. No further message is yielded after RECEIVE_BUDGET_S, in which the caller's work is
        counted. Control messages are handled last, after the caller has handled every pair: a Flush then includes
        everything that workers sent before it, unless that takes more than 16 calls.
        """
        if self._received:
            timeout_s = 0
        has_control, readable = False, set()
        for key, events in self._selector.select(1.0 if timeout_s is None else timeout_s):
            if key.data is None:
                self._accept()
            elif key.data is _WATCHED:
                pass  # its owner reads it after this call
            elif key.data is self._control:
                self._control.flush()
                has_control = bool(events & selectors.EVENT_READ)
            else:
                if events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if events & selectors.EVENT_READ:
                    readable.add(key.data)
        end_s = self._clock() + RECEIVE_BUDGET_S
        unread = [id_ for id_ in self._connections if id_ in readable and id_ not in self._received]
        while unread:
            self._read(unread.pop(0))
            if self._clock() >= end_s:
                break
        while self._received:
            client_id, messages = next(iter(self._received.items()))
            del self._received[client_id]
            message = messages.popleft()
            if messages:
                self._received[client_id] = messages  # behind the other clients
            yield client_id, message
            if self._clock() >= end_s:
                break
        self._num_behind = self._num_behind + 1 if self._received or unread else 0
        if 0 < self._num_behind <= _MAX_BEHIND:
            return
        if has_control and self._control is not None and self._on_control is not None:
            self._on_control(self._control.receive())

    def has_arrivals(self) -> bool:
        """Return whether anything has arrived since receive(): a message, a connection or a control message."""
        return bool(self._received) or any(events & selectors.EVENT_READ for _, events in self._selector.select(0))

    def send(self, client_id: int, message: FromEngine) -> None:
        """Send to one worker without blocking; a disconnected worker is ignored."""
        connection = self._connections.get(client_id)
        if connection is not None:
            connection.send(message)
            if connection.has_unsent:
                self._watch(connection, client_id, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def broadcast(self, message: FromEngine) -> None:
        """Send to every worker; a QueueState also to those that connect later."""
        if isinstance(message, QueueState):
            self._queue_state = message
        for client_id in list(self._connections):
            self.send(client_id, message)

    def watch(self, sock: socket.socket) -> None:
        """Let receive() return early when this socket can be read; its owner reads it."""
        self._selector.register(sock, selectors.EVENT_READ, _WATCHED)

    def unwatch(self, sock: socket.socket) -> None:
        """End watch(), before the socket is closed."""
        self._selector.unregister(sock)

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
        connection.send(msgspec.structs.replace(self._greeting, now_s=self._clock()))
        if self._queue_state is not None:
            connection.send(self._queue_state)

    def _flush(self, client_id: int) -> None:
        connection = self._connections[client_id]
        connection.flush()
        if not connection.has_unsent:
            self._watch(connection, client_id, selectors.EVENT_READ)

    def _read(self, client_id: int) -> None:
        """Read a connection once, and put it behind the others."""
        connection = self._connections.pop(client_id)
        messages = connection.receive()
        if messages is not None:
            self._connections[client_id] = connection
        else:
            self._selector.unregister(connection.sock)
            connection.sock.close()
            messages = [ClientGone()]
        if messages:
            self._received[client_id] = deque(messages)

    def _watch(self, connection: Connection, client_id: int, events: int) -> None:
        self._selector.modify(connection.sock, events, client_id)
