"""SharedMemory: a KvTransport between processes of one Linux host. Never torch.

The slots are in a memfd, a file without a name: nothing is left of it when its processes have ended, however they end,
and the size of /dev/shm, 64 MiB in a container, does not matter. A peer of the same user opens it by /proc/PID/fd and
maps it for reading. Threads copy, with the interpreter's lock released. The owner's death takes nothing from a mapping:
a copy that has begun ends with the right bytes.
"""

import logging
import mmap
import os
import threading
from collections import deque

import msgspec
import numpy as np

from engine.peers.kv_transport import Reading

logger = logging.getLogger(__name__)

_NUM_THREADS = 4
HAS_MEMFD = hasattr(os, "memfd_create")


class _Memory(msgspec.Struct, frozen=True):
    pid: int
    fd: int
    inode: int  # of the memfd: a process of another host, or of another container, may have the same pid
    num_slots: int
    slot_bytes: int


class SharedSlots:
    """Host memory of slots that peers can map. Life: made → `array` is used by HostPages → close()."""

    def __init__(self, *, num_slots: int, slot_bytes: int) -> None:
        """Raises OSError if there is too little memory for it, as far as the system tells."""
        self._fd = os.memfd_create("quire-kv", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, num_slots * slot_bytes)
            self._map = mmap.mmap(self._fd, num_slots * slot_bytes)
        except BaseException:
            os.close(self._fd)
            raise
        self.array = np.frombuffer(self._map, np.uint8).reshape(num_slots, slot_bytes)
        self.description = msgspec.json.encode(
            _Memory(os.getpid(), self._fd, os.fstat(self._fd).st_ino, num_slots, slot_bytes)
        )

    def close(self) -> None:
        """Give the memory back once the last view of it is gone."""
        os.close(self._fd)
        del self.array, self._map


class SharedMemory:
    """KvTransport over SharedSlots. Life: made → used by the loop → close()."""

    def __init__(self, slots: SharedSlots) -> None:
        """slots: the engine's own, which stay its caller's."""
        self._slots = slots
        self._peers: dict[int, np.ndarray] = {}
        self._todo: deque[tuple[Reading, np.ndarray]] = deque()
        self._done: deque[Reading] = deque()
        self._changed = threading.Condition()  # of _todo and _is_closing
        self._is_closing = False
        self._threads: list[threading.Thread] = []

    @property
    def memory(self) -> bytes:
        """See KvTransport.memory."""
        return self._slots.description

    def connect(self, peer: int, memory: bytes) -> None:
        """See KvTransport.connect."""
        self.disconnect(peer)
        try:
            told = msgspec.json.decode(memory, type=_Memory)
        except msgspec.MsgspecError as error:
            raise OSError(f"the peer's memory is not described as expected: {error}") from error
        if told.slot_bytes != self._slots.array.shape[1]:
            raise OSError(f"its slots have {told.slot_bytes} bytes and those here {self._slots.array.shape[1]}")
        num_bytes = told.num_slots * told.slot_bytes
        fd = os.open(f"/proc/{told.pid}/fd/{told.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_ino != told.inode:
                raise OSError("its memory is not on this host, or in another container")
            if os.fstat(fd).st_size != num_bytes:
                raise OSError(f"its memory has {os.fstat(fd).st_size} bytes and should have {num_bytes}")
            mapped = mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self._peers[peer] = np.frombuffer(mapped, np.uint8).reshape(told.num_slots, told.slot_bytes)

    def disconnect(self, peer: int) -> None:
        """See KvTransport.disconnect. Copies that run keep the mapping until they are done."""
        self._peers.pop(peer, None)

    def read(self, peer: int, sources: list[int], targets: list[int]) -> Reading:
        """See KvTransport.read."""
        reading, source = Reading(peer, sources, targets), self._peers.get(peer)
        if source is None:
            reading.is_done = True
            self._done.append(reading)
            return reading
        if not self._threads:
            self._start()
        with self._changed:
            self._todo.append((reading, source))
            self._changed.notify()
        return reading

    def take_done(self) -> list[Reading]:
        """See KvTransport.take_done."""
        taken: list[Reading] = []
        while self._done:
            taken.append(self._done.popleft())
        return taken

    def close(self) -> None:
        """End the threads, after the copies that run."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._peers.clear()

    def _start(self) -> None:
        count = min(_NUM_THREADS, max((os.cpu_count() or 1) // 2, 1))
        self._threads = [threading.Thread(target=self._work, name=f"kv-copy-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._todo or self._is_closing)
                if self._is_closing:
                    return
                reading, source = self._todo.popleft()
            try:
                for slot, target in zip(reading.sources, reading.targets, strict=True):
                    np.copyto(self._slots.array[target], source[slot])
                reading.is_whole = True
            except Exception:  # a slot that does not exist: its request computes what it misses
                logger.exception("blocks of a peer were not copied peer=%d", reading.peer)
            del source  # or a thread that waits would keep the mapping of a dead peer
            reading.is_done = True
            self._done.append(reading)
