"""StoreThreads: calls a BlockStore in threads of its own, so that the engine's loop never waits for it. Never torch.

One writer and a few readers. The loop gives them Transfers, and takes back those that are done:

    put, get → (queued → running) → take_done

A block's memory is in one part or several, as its pages lie. It is borrowed until the transfer is taken back: what is
written must not change, what is read is undefined before. Blocks to write are bounded in bytes: a block that finds no
room is dropped and counted, since a disk that is too slow once is likely to stay so. Reads are not bounded here: each
has memory of its caller's.

Calls to this object come from one thread, the loop's.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Protocol

from engine.tiers.store import BlockStore

logger = logging.getLogger(__name__)

MAX_CALLED = 1 << 17  # blocks, 100 bytes of memory each: a disk that hangs must not let them pile up


@dataclass(slots=True, eq=False)
class Transfer:
    """One block on its way to the store or from it."""

    group: int
    key: bytes
    parts: Sequence[memoryview]  # the block's memory, in order
    is_read: bool
    is_kept: bool = False  # once it is done: the block is in the store; of a read, it is in `parts`
    is_cancelled: bool = False  # nobody wants it any more: it is done without a call, unless that runs already
    slots: Sequence[int] = ()  # where other ranks have their shares; (): there is one rank

    @property
    def num_bytes(self) -> int:
        """The block's size."""
        return sum(part.nbytes for part in self.parts)


@dataclass(slots=True, eq=False)
class _Removal:
    names: Sequence[tuple[int, bytes]]


@dataclass(slots=True, eq=False)
class _Call:
    function: Callable[[], object]
    num_blocks: int


class Shares(Protocol):
    """The shares that other ranks have of the store's blocks. Calls come from threads, and raise nothing."""

    def begin_read(self, transfer: Transfer) -> Callable[[], bool]:
        """Let every other rank read its share into its slots. The result waits for them; True: all have theirs."""
        ...

    def write(self, transfer: Transfer) -> bool:
        """Let every other rank write its share, and wait for them; return whether all shares are kept."""
        ...


class StoreThreads:
    """Owns the threads and the queues; the store is its caller's until close(), which closes it."""

    def __init__(
        self,
        store: BlockStore,
        *,
        max_queued_bytes: int,
        num_readers: int = 2,
        prepare: Callable[[], None] | None = None,
        on_done: Callable[[], None] | None = None,
        shares: Shares | None = None,
    ) -> None:
        """prepare: called by the writer before all else; on_done: called by a thread when something can be taken.

        shares: of other ranks; None: there is one rank.
        """
        self.num_dropped = 0  # blocks that were not queued
        self.dropped_bytes = 0
        self._store = store
        self._max_queued_bytes = max_queued_bytes
        self._on_done = on_done
        self._shares = shares
        self._to_write: deque[Transfer | _Removal | _Call] = deque()
        self._to_read: deque[Transfer] = deque()
        self._reading: set[Transfer] = set()  # queued, running, or not taken yet
        self._done: deque[Transfer] = deque()
        self._removing: Counter[tuple[int, bytes]] = Counter()
        self._num_queued_bytes = 0  # to write, the running one included
        self._num_called = 0  # blocks of the calls in the same queue
        self._is_closing = False
        self._is_ready = prepare is None
        self._changed = Condition()  # of everything above; never held during a call to the store
        self._threads = [Thread(target=self._write, args=(prepare,), name="kv-disk-writer", daemon=True)]
        self._threads += [
            Thread(target=self._read, name=f"kv-disk-reader-{i}", daemon=True) for i in range(num_readers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_queued_bytes(self) -> int:
        """The bytes of the blocks that wait to be written, or are being written."""
        return self._num_queued_bytes

    @property
    def is_ready(self) -> bool:
        """True once the writer is prepared."""
        return self._is_ready

    @property
    def num_reads(self) -> int:
        """The reads that were not taken back yet."""
        return len(self._reading)

    def has(self, group: int, key: bytes) -> bool:
        """Return whether get() would find the block now, as far as is known. Does not wait."""
        return (group, key) not in self._removing and self._store.has(group, key)

    def put(self, group: int, key: bytes, parts: Sequence[memoryview], *, slots: Sequence[int] = ()) -> Transfer | None:
        """Queue a block to be written; None, which is counted, if too much is queued. Does not wait.

        slots: where other ranks have their shares, as in get().
        """
        transfer = Transfer(group, key, parts, is_read=False, slots=slots)
        num_bytes = transfer.num_bytes
        with self._changed:
            if self._num_queued_bytes + num_bytes > self._max_queued_bytes or self._is_closing:
                self.num_dropped += 1
                self.dropped_bytes += num_bytes
                return None
            self._num_queued_bytes += num_bytes
            self._to_write.append(transfer)
            self._changed.notify_all()
        return transfer

    def get(self, group: int, key: bytes, parts: Sequence[memoryview], *, slots: Sequence[int] = ()) -> Transfer:
        """Queue a read into `parts`. Does not wait."""
        transfer = Transfer(group, key, parts, is_read=True, slots=slots)
        with self._changed:
            self._reading.add(transfer)
            if self._is_closing or (group, key) in self._removing:
                self._done.append(transfer)
            else:
                self._to_read.append(transfer)
            self._changed.notify_all()
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        """Let a transfer that has not begun be done without a call. It must still be taken back."""
        transfer.is_cancelled = True

    def remove(self, names: Iterable[tuple[int, bytes]]) -> None:
        """Forget blocks, (group, key): at once for has() and get(), on the disk after what is queued. Does not wait.

        O(blocks + queue), since all blocks of a long prompt may be forgotten at once.
        """
        forgotten = dict.fromkeys(names)
        with self._changed:
            self._removing.update(forgotten.keys())
            for job in (*self._reading, *self._to_write):
                if isinstance(job, Transfer) and (job.group, job.key) in forgotten:
                    job.is_cancelled = True
            if forgotten:
                self._to_write.append(_Removal(list(forgotten)))
            self._changed.notify_all()

    def call(self, function: Callable[[], object], *, num_blocks: int) -> bool:
        """Queue a call to the store, behind what is queued to be written. Does not wait.

        num_blocks: of which it holds the names. Returns False if the queued calls would hold more than MAX_CALLED.
        """
        with self._changed:
            if self._num_called + num_blocks > MAX_CALLED or self._is_closing:
                return False
            self._to_write.append(_Call(function, num_blocks))
            self._num_called += num_blocks
            self._changed.notify_all()
        return True

    def take_done(self) -> list[Transfer]:
        """Take back the transfers that are done. Does not wait."""
        with self._changed:
            taken = list(self._done)
            self._done.clear()
            self._reading.difference_update(taken)
        for transfer in taken:
            transfer.is_kept &= not (transfer.is_read and transfer.is_cancelled)
        return taken

    def close(self, timeout_s: float) -> bool:
        """Write what is queued for at most timeout_s, end the threads, and close the store; return whether it did.

        False: a call hangs. The threads are left to the end of the process, and the store stays open.
        """
        with self._changed:
            self._is_closing = True
            self._done += self._to_read
            self._to_read.clear()
            self._changed.notify_all()
            is_written = self._changed.wait_for(lambda: not self._to_write, timeout_s)
            self._to_write.clear()
        for thread in self._threads:
            thread.join(timeout_s if is_written else 0.05)
        if any(thread.is_alive() for thread in self._threads):
            logger.warning("the disk of --kv-disk did not end its calls in time timeout_s=%.1f", timeout_s)
            return False
        self._store.close()
        return True

    def _write(self, prepare: Callable[[], None] | None) -> None:
        if prepare is not None:
            prepare()  # has() says no until then, so nothing is read
            self._is_ready = True
        space = bytearray()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._to_write or self._is_closing)
                if not self._to_write:
                    return
                job = self._to_write[0]  # it leaves the queue when it is done, so that close() waits for it
            self._run(job, space)
            with self._changed:
                if self._to_write:  # close() may have given up
                    self._to_write.popleft()
                if isinstance(job, _Removal):
                    self._end_removal(job)
                elif isinstance(job, _Call):
                    self._num_called -= job.num_blocks
                else:
                    self._num_queued_bytes -= job.num_bytes
                    self._done.append(job)
                self._changed.notify_all()
            self._call_back(job)

    def _end_removal(self, removal: _Removal) -> None:
        for name in removal.names:
            self._removing[name] -= 1
            if not self._removing[name]:
                del self._removing[name]

    def _read(self) -> None:
        space = bytearray()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._to_read or self._is_closing)
                if not self._to_read:
                    return
                job = self._to_read.popleft()
            self._run(job, space)
            with self._changed:
                self._done.append(job)
            self._call_back(job)

    def _run(self, job: Transfer | _Removal | _Call, space: bytearray) -> None:
        """Do a job. A store raises nothing; if it has a fault, the block is lost, and not the thread.

        space: for blocks of several parts.
        """
        try:
            if isinstance(job, _Removal):
                self._store.remove(job.names)
            elif isinstance(job, _Call):
                job.function()
            elif job.is_cancelled:
                return
            elif job.is_read:
                end_shares = None if self._shares is None else self._shares.begin_read(job)
                try:
                    self._read_own(job, space)
                finally:  # the other ranks use slots until then
                    job.is_kept &= end_shares is None or end_shares()
            else:
                whole = whole_of(job.parts, space)
                gather(job.parts, whole)
                is_kept = self._store.put(job.group, job.key, whole)
                job.is_kept = is_kept and (self._shares is None or self._shares.write(job))
        except Exception:
            logger.exception("a store of blocks failed")

    def _read_own(self, job: Transfer, space: bytearray) -> None:
        whole = whole_of(job.parts, space)
        job.is_kept = self._store.get(job.group, job.key, whole)
        if job.is_kept:
            scatter(whole, job.parts)

    def _call_back(self, job: Transfer | _Removal | _Call) -> None:
        if self._on_done is not None and isinstance(job, Transfer):
            self._on_done()


def whole_of(parts: Sequence[memoryview], space: bytearray) -> memoryview:
    """Return contiguous memory for a block: its only part, else the beginning of `space`, which grows for it."""
    if len(parts) == 1:
        return parts[0].cast("B")
    num_bytes = sum(part.nbytes for part in parts)
    if len(space) < num_bytes:
        space.extend(bytes(num_bytes - len(space)))
    return memoryview(space)[:num_bytes]


def gather(parts: Sequence[memoryview], whole: memoryview) -> None:
    """Copy the parts of a block to whole_of() them."""
    for part, piece in _pieces(parts, whole):
        piece[:] = part


def scatter(whole: memoryview, parts: Sequence[memoryview]) -> None:
    """Copy a block from whole_of() its parts to them."""
    for part, piece in _pieces(parts, whole):
        part[:] = piece


def _pieces(parts: Sequence[memoryview], whole: memoryview) -> Iterator[tuple[memoryview, memoryview]]:
    """Return the parts, as bytes, each with its place in contiguous memory; none if there is one, which is that."""
    start = 0
    for part in parts if len(parts) > 1 else ():
        yield part.cast("B"), whole[start : start + part.nbytes]
        start += part.nbytes
