"""KvPublisher: sends the changes of the prefix cache to routers, in vLLM's form, over ZeroMQ. Never torch.

A batch has what one iteration of the loop changed. As vLLM's, it is a message of three frames to the subscribers of a
PUB socket: the topic; the batch's number, 8 bytes, big-endian, from 0 in each process; and the batch as msgpack:

    [seconds since 1970, [event …], 0]                     the last: the rank of data parallelism
    ["BlockStored", hashes, parent hash, token ids, tokens of a block, adapter's number, medium, adapter's name, null,
     group, kind of group, its window, locality]           from the end, what is null is left out
    ["BlockRemoved", hashes, medium, group, locality]
    ["AllBlocksCleared"]                                   the first event of each process: its cache is empty

With "event_format": "map" an event is a map of field names instead, as vLLM has them since 0.23. A ROUTER socket at
replay_endpoint answers the number of a batch with that one and all later ones, of the last buffer_steps and 256 MiB,
and then with the number -1 and an empty frame.

A thread encodes and sends, so that the loop only appends to a bounded queue. A batch that finds it full is lost: its
number is skipped, by which subscribers notice. ZeroMQ drops what a subscriber does not take in, beyond hwm batches.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from threading import Condition, Thread
from typing import Any

import msgspec

from engine.core.kv_events import KvEvent, Medium, Stored
from engine.interface.config import CacheGroup, KvEventsConfig
from engine.interface.errors import StartupError

logger = logging.getLogger(__name__)

MAX_REPLAY_BYTES = 256 * 2**20
_CLOSE_S = 1.0
_END = (-1).to_bytes(8, "big", signed=True)
_NUMBER_BYTES = 8
_MEDIA = {Medium.DEVICE: "GPU", Medium.HOST: "CPU", Medium.DISK: "STORAGE"}
_STORED_FIELDS = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality",
)  # fmt: skip
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx", "locality")


class EventEncoder:
    """Encodes batches of events in vLLM's form."""

    def __init__(self, groups: Sequence[CacheGroup], lora_names: Sequence[str], *, is_map: bool) -> None:
        """groups: SchedulerConfig.cache_groups. lora_names: of the adapters, the first has the number 1."""
        self._groups = groups
        self._lora_names = lora_names
        self._is_map = is_map
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, events: Sequence[KvEvent] | None, time_s: float) -> bytes:
        """Return a batch. None: all blocks are cleared."""
        listed = [self._event("AllBlocksCleared", (), ())] if events is None else [self._of(event) for event in events]
        return self._encoder.encode([time_s, listed, 0])

    def _of(self, event: KvEvent) -> Any:
        group, medium = self._groups[event.group], _MEDIA[event.medium]
        locality = "LOCAL" if event.medium is Medium.DISK else None
        if not isinstance(event, Stored):
            return self._event("BlockRemoved", _REMOVED_FIELDS, (event.hashes, medium, event.group, locality))
        has_adapter = event.lora_index > 0
        values = (
            event.hashes,
            event.parent,
            event.token_ids.tolist(),
            group.block_tokens,
            event.lora_index if has_adapter else None,
            medium,
            self._lora_names[event.lora_index - 1] if has_adapter else None,
            None,
            event.group,
            _kind_of(group),
            group.window,
            locality,
        )
        return self._event("BlockStored", _STORED_FIELDS, values)

    def _event(self, tag: str, names: Sequence[str], values: Sequence[object]) -> Any:
        if self._is_map:
            return {"type": tag} | dict(zip(names, values, strict=True))
        count = len(values)
        while count and values[count - 1] is None:
            count -= 1
        return [tag, *values[:count]]


def _kind_of(group: CacheGroup) -> str:
    """Return vLLM's name of a group's kind."""
    if group.kind == "window":
        return "sliding_window" if group.chunk is None else "chunked_local_attention"
    return {"full": "full_attention", "state": "mamba"}[group.kind]


class KvPublisher:
    """Owns the sockets, the queue and the thread. Life: made → start() → publish() … → close(); calls of one thread."""

    def __init__(self, config: KvEventsConfig) -> None:
        """Open the sockets. Raises StartupError if pyzmq is missing or an endpoint cannot be used."""
        try:
            self._zmq: Any = importlib.import_module("zmq")
        except ImportError as error:
            raise StartupError(
                "--kv-events-config publishes over ZeroMQ, and the package pyzmq is not installed: pip install pyzmq."
            ) from error
        self.num_published = 0  # batches that were queued
        self.num_lost = 0  # batches that found the queue full
        self._config = config
        self._queue: deque[tuple[int, float, Sequence[KvEvent] | None]] = deque()
        self._next_number = 0
        self._kept: deque[tuple[bytes, bytes]] = deque()  # for replays: number and batch
        self._kept_bytes = 0
        self._is_closing = False
        self._changed = Condition()  # of the queue and is_closing
        self._encoder: EventEncoder | None = None
        self._thread = Thread(target=self._run, name="kv-events", daemon=True)
        self._context = self._zmq.Context()
        self._pub = self._open(self._zmq.PUB, "endpoint", config.endpoint, hwm=config.hwm)
        self._router = None
        if config.replay_endpoint is not None:
            # room for a whole replay, which is sent at once
            hwm = config.buffer_steps + 16
            self._router = self._open(self._zmq.ROUTER, "replay_endpoint", config.replay_endpoint, hwm=hwm)
        self._wake_out, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def start(self, encoder: EventEncoder) -> None:
        """Begin to send, first that all blocks are cleared."""
        self._encoder = encoder
        self._thread.start()
        self._put(None)

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Queue a batch, if there are events. Does not wait."""
        if events:
            self._put(events)

    def close(self) -> None:
        """Send what is queued, for a second at most, and close the sockets."""
        with self._changed:
            self._is_closing = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():
                return  # it has the sockets; the process ends
        self._context.destroy(linger=int(_CLOSE_S * 1000))
        os.close(self._wake_in)
        os.close(self._wake_out)

    def _put(self, events: Sequence[KvEvent] | None) -> None:
        number, self._next_number = self._next_number, self._next_number + 1
        with self._changed:
            was_empty = not self._queue
            if len(self._queue) >= self._config.max_queue_size:
                self.num_lost += 1
                if self.num_lost == 1:
                    logger.warning("events of the KV cache are lost: the queue is full batches=%d", len(self._queue))
                return
            self._queue.append((number, time.time(), events))
        self.num_published += 1
        if was_empty:
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it will look at the queue anyway
            os.write(self._wake_in, b"\0")

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._wake_out, self._zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, self._zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wake_out in ready:
                os.read(self._wake_out, 4096)
            while (batch := self._next()) is not None:
                self._send(*batch)
            if self._router is not None and self._router in ready:
                self._replay()
            with self._changed:
                if self._is_closing and not self._queue:
                    return

    def _next(self) -> tuple[int, float, Sequence[KvEvent] | None] | None:
        with self._changed:
            return self._queue.popleft() if self._queue else None

    def _send(self, number: int, time_s: float, events: Sequence[KvEvent] | None) -> None:
        assert self._encoder is not None
        batch, frame = self._encoder.encode(events, time_s), number.to_bytes(_NUMBER_BYTES, "big")
        self._pub.send_multipart((self._config.topic.encode(), frame, batch))
        if self._router is None:
            return
        self._kept.append((frame, batch))
        self._kept_bytes += len(batch)
        while len(self._kept) > self._config.buffer_steps or self._kept_bytes > MAX_REPLAY_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _replay(self) -> None:
        """Answer one request for earlier batches; what is no request is ignored. Does not wait for who asks."""
        assert self._router is not None
        asker, *frames = self._router.recv_multipart()
        if len(frames) != 2 or len(frames[1]) != _NUMBER_BYTES:
            logger.warning("not a request for events of the KV cache frames=%d", len(frames))
            return
        delimiter, first = frames
        for number, batch in self._kept:
            if number >= first:
                self._router.send_multipart((asker, delimiter, number, batch), self._zmq.DONTWAIT)
        self._router.send_multipart((asker, delimiter, _END, b""), self._zmq.DONTWAIT)

    def _open(self, kind: int, field: str, endpoint: str, *, hwm: int) -> Any:
        """Open a socket; as in vLLM, it connects to an endpoint of PUB that names a host, and binds to any other."""
        sock = self._context.socket(kind)
        try:
            sock.set_hwm(hwm)
            binds = kind != self._zmq.PUB or any(part in endpoint for part in ("*", "::", "ipc://", "inproc://"))
            (sock.bind if binds else sock.connect)(endpoint)
        except self._zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise StartupError(
                f"--kv-events-config: {field} {endpoint!r} cannot be used: {self._zmq.strerror(error.errno)}."
            ) from error
        return sock
