"""Shares of blocks on disk: each rank of a split model keeps the files of its own part of a block. Never torch.

The first rank has the store (engine/tiers/disk_store.py): which files there are, their order of use, the bound. A block
is there if the files of all ranks are. No bytes pass between ranks: the first one asks each other rank to write its
share from its slots of host memory, or to read it into them. Each rank checks what it reads.

    first rank:   StoreThreads → OtherShares.begin_read, write → ShareJob to each rank … ShareDone of each → its result
    other ranks:  run_plans → ShareFiles.begin → a thread of its own → ShareDone

A rank may be a step behind the first one, whose commit has freed or filled the slots of a job. So a job names the last
step that the first rank has committed; a rank begins it when it has ended that step, too. What a rank cannot read is a
miss for all, what it cannot write is not there, and its errors let the whole store pause.
"""

import errno
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from engine.tiers.block_folder import BlockFolder, DamagedBlock, FoundFile, bytes_on_disk
from engine.tiers.disk_state import FULL
from engine.tiers.disk_store import DiskStore
from engine.tiers.store_threads import Transfer, gather, scatter, whole_of

logger = logging.getLogger(__name__)

_NUM_THREADS = 3  # as many as jobs at once: the first rank has one writer and two readers
_DAMAGED = -1  # in place of an errno


class ShareJob(msgspec.Struct, frozen=True, tag=True):
    """Asks a rank to write its share of a block, or to read it."""

    job_id: int
    is_read: bool
    name: bytes  # of the rank's file
    slots: list[int]  # of host memory, in the order of the block's pages
    after_step: int  # the last step that the first rank has committed; -1: none


class ShareDone(msgspec.Struct, frozen=True, tag=True):
    """Answers a ShareJob."""

    job_id: int
    used_ns: int = 0  # when it was written or read, by the folder's clock
    fault: int = 0  # 0: it is kept; ENOENT of a read: no file; _DAMAGED: the file is not the block; else an errno


class _Asked:
    """The answers to one job, of several ranks."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.missing = set(ranks)
        self.answers: dict[int, ShareDone] = {}


class OtherShares:
    """The first rank's side. Its calls may come from several threads."""

    def __init__(
        self,
        store: DiskStore,
        tell: Callable[[int, ShareJob], None],
        *,
        num_ranks: int,
        committed_step: Callable[[], int],
    ) -> None:
        """tell: sends to a rank. committed_step: returns the last step that the first rank has committed, or -1."""
        self._store = store
        self._tell = tell
        self._ranks = range(1, num_ranks)
        self._committed_step = committed_step
        self._ids = itertools.count()
        self._asked: dict[int, _Asked] = {}
        self._changed = threading.Condition()

    def begin_read(self, transfer: Transfer) -> Callable[[], bool]:
        """See store_threads.Shares.begin_read."""
        if self._store.status.is_paused:
            return lambda: False
        names = self._store.names(transfer.group, transfer.key)
        job_id = self._ask(transfer, names, self._ranks)

        def end() -> bool:
            answers = self._wait(job_id)
            for rank, answer in answers.items():
                self._note(rank, names[rank], answer, transfer)
            return not any(answer.fault for answer in answers.values())

        return end

    def write(self, transfer: Transfer) -> bool:
        """See store_threads.Shares.write."""
        names = self._store.names(transfer.group, transfer.key)
        num_bytes = bytes_on_disk(transfer.num_bytes)
        if not self._store.make_room(num_bytes * len(self._ranks)):
            return False
        answers = self._wait(self._ask(transfer, names, self._ranks))
        full = [rank for rank, answer in answers.items() if answer.fault in FULL]
        if full and self._store.make_room(num_bytes * len(full), is_full=True):
            answers |= self._wait(self._ask(transfer, names, full))
        for rank, answer in answers.items():
            self._note(rank, names[rank], answer, transfer)
        return not any(answer.fault for answer in answers.values())

    def take(self, rank: int, answer: ShareDone) -> None:
        """Take a rank's answer; called in the thread that listens to it."""
        with self._changed:
            asked = self._asked.get(answer.job_id)
            if asked is not None:  # None: of an earlier engine over the same ranks
                asked.answers[rank] = answer
                asked.missing.discard(rank)
                self._changed.notify_all()

    def _ask(self, transfer: Transfer, names: Sequence[bytes], ranks: Sequence[int]) -> int:
        job_id = next(self._ids)
        with self._changed:
            self._asked[job_id] = _Asked(ranks)
        for rank in ranks:
            step = self._committed_step()
            self._tell(rank, ShareJob(job_id, transfer.is_read, names[rank], list(transfer.slots), step))
        return job_id

    def _wait(self, job_id: int) -> dict[int, ShareDone]:
        """Wait for the answers of all ranks: until then they use slots. A rank that dies ends this process."""
        with self._changed:
            self._changed.wait_for(lambda: not self._asked[job_id].missing)
            return self._asked.pop(job_id).answers

    def _note(self, rank: int, name: bytes, answer: ShareDone, transfer: Transfer) -> None:
        if not answer.fault:
            file = FoundFile(name, bytes_on_disk(transfer.num_bytes), answer.used_ns)
            self._store.note_share(rank, file, is_written=not transfer.is_read)
        elif answer.fault == _DAMAGED or (answer.fault == errno.ENOENT and transfer.is_read):
            self._store.lose_share(rank, name, is_damaged=answer.fault == _DAMAGED)
        else:
            error = OSError(answer.fault, os.strerror(answer.fault))
            self._store.note_error("read" if transfer.is_read else "write", error, rank=rank)


class ShareFiles:
    """A rank's side: reads and writes the files of its shares, in threads."""

    def __init__(
        self, folder: Path, slot_memory: Callable[[int], memoryview], answer: Callable[[ShareDone], None]
    ) -> None:
        """slot_memory: returns the bytes of a slot of host memory. answer: sends to the first rank, from any thread."""
        self._path = folder
        self._folder: BlockFolder | None = None
        self._opening = threading.Lock()
        self._slot_memory = slot_memory
        self._answer = answer
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="kv-disk")

    def begin(self, job: ShareJob) -> None:
        """Begin a job, whose slots no step uses any more. Does not wait."""
        self._threads.submit(self._run, job)

    def _run(self, job: ShareJob) -> None:
        try:
            done = ShareDone(job.job_id, self._do(job))
        except DamagedBlock:
            done = ShareDone(job.job_id, fault=_DAMAGED)
        except OSError as error:
            done = ShareDone(job.job_id, fault=error.errno or errno.EIO)
        except Exception:
            logger.exception("a rank's share of a block failed")
            done = ShareDone(job.job_id, fault=errno.EIO)
        self._answer(done)

    def _do(self, job: ShareJob) -> int:
        """Write or read the share; return when this use of it was. Raises DamagedBlock, OSError."""
        folder = self._open()
        parts = [self._slot_memory(slot) for slot in job.slots]
        whole = whole_of(parts, bytearray())
        if job.is_read:
            used_ns = folder.read(job.name, whole)
            scatter(whole, parts)
            return used_ns
        gather(parts, whole)
        return folder.write(job.name, whole).used_ns

    def _open(self) -> BlockFolder:
        with self._opening:
            if self._folder is None:
                self._folder = BlockFolder(self._path, is_member=True)
            return self._folder
