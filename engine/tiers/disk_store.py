"""DiskStore: a bounded store of blocks in a folder, which survives its process. Plain Python; never torch.

It decides when to leave a failing disk alone for a while; DiskOrder (engine/tiers/disk_order.py) has the order of use
and of pins, BlockFolder (engine/tiers/block_folder.py) the files. Life: made over an open folder → find_blocks(), until
which it knows no block → has, put, get, remove in any order, from several threads → close().

Which block is whose: its name is a hash of the identity (engine/tiers/identity.py), group and key, so blocks of another
model are never asked for. They count, and leave in their turn, as do those that other servers write to the same folder.
The bound holds with one server. With several, each looks at the folder again after a sixteenth of the bound, so it may
be exceeded by that much for each server. The order of use is that of the files' times, which every use sets.

Errors of the disk are misses and dropped blocks. After MAX_ERRORS in a row the store pauses, and then tries one call.
A full disk first loses the oldest blocks.

Of a model that is split over ranks a block is one file for each, with a name of its own. This store, of the first rank,
writes and reads the first of them, and knows all: a block is there if all are. The other ranks write and read theirs
(engine/tensor_parallel/disk_shares.py), which is told here.
"""

import logging
import time
from collections.abc import Callable, Sequence
from threading import Condition

from engine.tiers.block_file import name_of
from engine.tiers.block_folder import BlockFolder, DamagedBlock, FoundFile, bytes_on_disk
from engine.tiers.disk_order import SECOND_NS, DiskOrder, Entry, pin_time_ns
from engine.tiers.disk_state import FULL, PAUSE_S, DiskCounts, DiskHealth, DiskStatus, FolderLooks
from engine.tiers.store import BlockStore

logger = logging.getLogger(__name__)

_MAX_BLOCKS = 1 << 20  # 300 bytes of memory each
_LOOK_AGAIN_S = 30.0  # at most so often, if there are other servers
_LOOK_ANYWAY_S = 600.0
_SHARE_OF_LOOK = 16  # of the bound, written between two looks at a shared folder
_SCAN_PAUSE_S = 0.002  # between some files, so that a scan leaves the interpreter to the engine's loop


class DiskStore(BlockStore):
    """See the module. Owns its folder and closes it."""

    def __init__(
        self,
        folder: BlockFolder,
        *,
        identity: bytes,
        other_identities: Sequence[bytes] = (),
        size_bytes: int,
        pin_share: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """identity: 32 bytes, of all on which the blocks' bytes depend; size_bytes: the bound, of all ranks together.

        other_identities: those of the ranks after the first. pin_share: of size_bytes, what pinned blocks of one owner
        may take; those of all owners take at most half of it, or one share if that is more.
        """
        self.counts = DiskCounts()
        self._folder = folder
        self._identities = (identity, *other_identities)
        self._size_bytes = size_bytes
        self._clock = clock
        self._sleep = sleep
        self._healths = [DiskHealth(clock) for _ in self._identities]
        self._looks = FolderLooks(clock())
        budget = int(pin_share * size_bytes)
        most = max(budget, size_bytes // 2) if budget else 0
        self._order = DiskOrder(budget_bytes=budget, most_bytes=most, wall_ns=wall_ns)
        self._wall_ns = wall_ns
        self._writing: set[bytes] = set()
        self._unremoved: set[bytes] = set()  # removed, but their files could not be deleted yet
        self._num_removed = 0
        self._watched: dict[bytes, tuple[int, bytes]] = {}  # group and key of blocks, by name
        self._lost: dict[bytes, None] = {}  # of them, those that have left the entries, perhaps for a moment
        self._changed = Condition()  # of everything above; never held while the disk works

    @property
    def status(self) -> DiskStatus:
        """The state now. Does not wait."""
        order, num_ranks, size = self._order, len(self._identities), self._size_bytes
        return DiskStatus(len(order), order.num_bytes, self._is_paused, size, num_ranks, order.num_pinned_bytes)

    def names(self, group: int, key: bytes) -> list[bytes]:
        """Return the names of a block's files, in the order of ranks."""
        return [name_of(identity, group, key) for identity in self._identities]

    def find_blocks(self, *, is_gentle: bool = False) -> None:
        """Look at the folder: learn which blocks it has, and delete leftovers. Waits for the disk.

        is_gentle: take some milliseconds more for every thousand files, and leave them to other threads.
        """
        with self._changed:
            self._looks = FolderLooks(self._clock(), was_shared=self._looks.was_shared)
        try:
            found = list(self._folder.scan(self._pause if is_gentle else lambda: None))
        except OSError as error:
            self.note_error("scan", error)
            return
        found.sort(key=lambda file: file.used_ns)
        with self._changed:
            known = self._order.clear()
            self._lost.update(dict.fromkeys(self._watched))
            for file in found:
                if file.name not in self._unremoved:
                    self._add(file)
            for name in self._looks.written_names:
                if name in known and name not in self._order:
                    self._order.add(name, known[name])
        try:
            self._make_room(0)
        except OSError as error:
            self.note_error("delete", error)

    def has(self, group: int, key: bytes) -> bool:
        """See BlockStore.has. False during a pause."""
        if self._is_paused:
            return False
        return all(name_of(identity, group, key) in self._order for identity in self._identities)

    def put(self, group: int, key: bytes, data: bytes | memoryview) -> bool:
        """See BlockStore.put."""
        name, block = name_of(self._identities[0], group, key), memoryview(data).cast("B")
        num_bytes = bytes_on_disk(len(block))
        if self._is_paused or num_bytes * len(self._identities) > self._size_bytes:
            self.counts.num_dropped += 1
            return False
        with self._changed:
            if name in self._writing or name in self._unremoved:
                self.counts.num_dropped += 1
                return False
            is_known = name in self._order
            self._writing.add(name)
        try:
            if is_known and self._touch(name):
                return True
            return self._write(name, block, num_bytes)
        finally:
            with self._changed:
                self._writing.remove(name)
                self._changed.notify_all()

    def get(self, group: int, key: bytes, out: memoryview) -> bool:
        """See BlockStore.get."""
        name, started, num_removed = name_of(self._identities[0], group, key), self._clock(), self._num_removed
        if self._is_paused or name in self._unremoved:
            return False
        used_ns = self._read(name, out)
        with self._changed:
            is_hit = used_ns is not None and num_removed == self._num_removed  # else it may be one that was removed
            if used_ns is not None and is_hit:
                self._note_use(FoundFile(name, bytes_on_disk(len(out)), used_ns), is_written=False)
                self.counts.read_bytes += len(out)
                self.counts.read_s += self._clock() - started
        return is_hit

    def remove(self, names: Sequence[tuple[int, bytes]]) -> None:
        """See BlockStore.remove."""
        removed = [file_name for name in names for file_name in self.names(*name)]
        with self._changed:
            self._unremoved.update(removed)
            self._num_removed += 1
            for name in removed:
                self._forget(name)
            self._changed.wait_for(lambda: self._writing.isdisjoint(removed))
            for name in removed:
                self._forget(name)
        self._remove_at_last(removed)

    def watch(self, group: int, key: bytes) -> bool:
        """Return whether there is a block; if so, take_lost() tells when it has left. Does not wait for the disk."""
        names = self.names(group, key)
        with self._changed:
            if any(name not in self._order for name in names):
                return False
            self._watched.update(dict.fromkeys(names, (group, key)))
        return True

    def take_lost(self) -> list[tuple[int, bytes]]:
        """Return group and key of the watched blocks that have left since, whoever deleted them."""
        if not self._lost:
            return []
        with self._changed:
            lost = dict.fromkeys(self._watched[name] for name in self._lost if name not in self._order)
            self._lost.clear()
            for block in lost:
                for name in self.names(*block):
                    self._watched.pop(name, None)
            return list(lost)

    def pin(self, names: Sequence[tuple[int, bytes]], *, owner: str, for_s: float) -> None:
        """Let blocks that are there leave after all others for a time, within the owner's budget. Waits for the disk.

        names: group and key in the order of their prompt, whose tail leaves first. A pin that lasts longer stays.
        """
        until_ns = self._wall_ns() + int(for_s * SECOND_NS)
        for num_behind, name in enumerate(file for block in reversed(names) for file in self.names(*block)):
            with self._changed:
                entry = self._order.find(name)
            if entry is None or self._is_paused:
                continue
            used_ns = max(self._order.pinned_until_ns(name), pin_time_ns(owner, until_ns, num_behind=num_behind))
            try:
                self._folder.set_time(name, used_ns)
            except OSError as error:
                if not isinstance(error, FileNotFoundError):  # the next use notices that it is gone
                    self.note_error("pin", error)
                continue
            with self._changed:
                if self._forget(name) is not None:
                    self._order.add(name, Entry(entry.num_bytes, used_ns))

    def pinned_for_s(self, group: int, key: bytes) -> float:
        """Return for how long a block is still pinned, by whichever process; 0: it is not. Does not wait."""
        return self._order.pinned_ns(name_of(self._identities[0], group, key)) / SECOND_NS

    def make_room(self, num_bytes: int, *, is_full: bool = False) -> bool:
        """Delete the oldest blocks, so that other ranks can write so many bytes; return False if that fails.

        is_full: the disk has no room left, whatever the bound is.
        """
        try:
            self._make_room(max(self._size_bytes - self._order.num_bytes, 0) + num_bytes if is_full else num_bytes)
        except OSError as error:
            self.note_error("delete", error)
            return False
        return True

    def note_share(self, rank: int, file: FoundFile, *, is_written: bool) -> None:
        """Note that another rank has written or read its file of a block."""
        self._healths[rank].note_success()
        with self._changed:
            if file.name in self._unremoved:
                self._forget(file.name)
            else:
                self._note_use(file, is_written=is_written)

    def lose_share(self, rank: int, name: bytes, *, is_damaged: bool) -> None:
        """Note that another rank found no file of its own, or a damaged one, which is deleted."""
        with self._changed:
            self._forget(name)
        self.counts.num_damaged += is_damaged
        if is_damaged:
            logger.warning("a damaged block on disk was deleted rank=%d name=%s", rank, name.hex()[:16])
            self._remove_at_last([name])
        else:
            self._healths[rank].note_success()

    def close(self) -> None:
        """See BlockStore.close."""
        self._folder.close()

    def _read(self, name: bytes, out: memoryview) -> int | None:
        """Read a block; return the time of this use, None for a miss."""
        try:
            used_ns = self._folder.read(name, out)
        except FileNotFoundError:  # evicted by another server, or the folder was deleted
            with self._changed:
                self._forget(name)
            self._healths[0].note_success()
            return None
        except DamagedBlock:
            logger.warning("a damaged block on disk was deleted name=%s", name.hex()[:16])
            self.counts.num_damaged += 1
            with self._changed:
                self._forget(name)
            self._remove_at_last([name])
            return None
        except OSError as error:
            self.note_error("read", error)
            return None
        self._healths[0].note_success()
        return used_ns

    def _write(self, name: bytes, block: memoryview, num_bytes: int) -> bool:
        """Write a block that is not known; return whether it is kept. The oldest blocks leave."""
        if self._unremoved:
            self._remove_at_last(list(self._unremoved))
        started = self._clock()
        try:
            self._look_again()
            self._make_room(num_bytes)
            file = self._write_file(name, block, num_bytes)
        except OSError as error:
            self.note_error("write", error)
            self.counts.num_dropped += 1
            return False
        self._healths[0].note_success()
        with self._changed:
            self._note_use(file, is_written=True)
            self.counts.num_written += 1
            self.counts.written_bytes += len(block)
            self.counts.written_s += self._clock() - started
        return True

    def _write_file(self, name: bytes, block: memoryview, num_bytes: int) -> FoundFile:
        """Write a file; if the disk is full, delete as much as it needs, and try once more."""
        try:
            return self._folder.write(name, block)
        except OSError as error:
            if error.errno not in FULL or not len(self._order):
                raise
        self._make_room(self._size_bytes - self._order.num_bytes + num_bytes)
        return self._folder.write(name, block)

    def _make_room(self, num_bytes: int) -> None:
        """Delete the blocks that leave first, until num_bytes more are within the bound."""
        while True:
            with self._changed:
                fits = self._order.num_bytes + num_bytes <= self._size_bytes and len(self._order) < _MAX_BLOCKS
                if fits or (first := self._order.first()) is None:
                    return
                name, entry = first
                self._forget(name)
            if self._looks.was_shared and self._was_used_since(name, entry):
                continue
            try:
                self._folder.remove(name)
            except OSError:
                with self._changed:
                    self._order.add(name, entry)  # it still counts
                raise
            self.counts.num_evicted += 1

    def _was_used_since(self, name: bytes, entry: Entry) -> bool:
        """Return whether another server used a block since; it is then the newest."""
        try:
            used_ns = self._folder.used_ns(name)
        except OSError:
            return False
        if used_ns <= entry.used_ns:
            return False
        with self._changed:
            self._add(FoundFile(name, entry.num_bytes, used_ns))
        return True

    def _touch(self, name: bytes) -> bool:
        """Make a known block the newest; return whether it is there."""
        try:
            used_ns = self._folder.touch(name)
        except OSError:
            return False
        with self._changed:
            entry = self._forget(name)
            if entry is not None:
                self._add(FoundFile(name, entry.num_bytes, used_ns))
        return entry is not None

    def _look_again(self) -> None:
        """Look at the folder, if other servers may have changed it by much."""
        looks, now = self._looks, self._clock()
        looks.was_shared |= self._folder.is_shared()
        is_much = looks.written_bytes * _SHARE_OF_LOOK > self._size_bytes or now - looks.at > _LOOK_AGAIN_S
        if (looks.was_shared and is_much) or now - looks.at > _LOOK_ANYWAY_S:
            looks.was_shared = self._folder.is_shared()
            self.find_blocks(is_gentle=True)

    def _remove_at_last(self, names: Sequence[bytes]) -> None:
        """Delete the files of removed or damaged blocks for good; if that fails, all again with the next write."""
        try:
            self._folder.remove_for_sure(names)
        except OSError as error:
            self._unremoved.update(names)
            self.note_error("remove", error)
        else:
            self._unremoved.difference_update(names)

    def note_error(self, call: str, error: OSError, *, rank: int = 0) -> None:
        """Note a call of a rank that failed."""
        self.counts.num_errors += 1
        if self._healths[rank].note_error():
            self.counts.num_pauses += 1
            text = "the disk of --kv-disk fails, and is left alone for %d s call=%s rank=%d error=%r"
            logger.warning(text, PAUSE_S, call, rank, str(error))

    @property
    def _is_paused(self) -> bool:
        return any(health.is_paused for health in self._healths)

    def _note_use(self, file: FoundFile, *, is_written: bool) -> None:
        """Make a file the newest that was written or read; a pin that it got since it was read stays."""
        pinned_ns = 0 if is_written else self._order.pinned_until_ns(file.name)
        self._forget(file.name)
        self._add(file._replace(used_ns=max(file.used_ns, pinned_ns)))
        if is_written:
            self._looks.written_names.add(file.name)
            self._looks.written_bytes += file.num_bytes

    def _add(self, file: FoundFile) -> None:
        self._order.add(file.name, Entry(file.num_bytes, file.used_ns))

    def _forget(self, name: bytes) -> Entry | None:
        entry = self._order.pop(name)
        if entry is not None and name in self._watched:
            self._lost[name] = None
        return entry

    def _pause(self) -> None:
        self._sleep(_SCAN_PAUSE_S)
