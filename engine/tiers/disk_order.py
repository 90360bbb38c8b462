"""DiskOrder: which files of blocks a disk tier has, and which of them leaves first. Plain Python; never torch.

The order is that of the files' times, which every use sets. A pinned file has a time to come: the second in which its
pin ends, and within it a place that stands for the owner of the pin and for the block's place in its prompt. So pins
outlast their process, and servers that share a folder know each other's. Pinned files leave after all others. They are
bounded: those of one owner by a budget, all together by another one. Beyond them the oldest pins end, and their files
are as any that was used now.
"""

import heapq
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

from engine.tiers.block_folder import is_pinned

SECOND_NS = 10**9
_NUM_BEHIND = 4096
_NUM_OWNERS = SECOND_NS // _NUM_BEHIND  # two owners of one number share a budget


class Entry(NamedTuple):
    """A file."""

    num_bytes: int
    used_ns: int  # by the clock of the host; later than now: the end of its pin


def pin_time_ns(owner: str, until_ns: int, *, num_behind: int = 0) -> int:
    """Return the time of a file that is pinned by this owner. num_behind: files of its prompt that leave before."""
    number = int.from_bytes(blake2b(owner.encode(), digest_size=8).digest(), "little") % _NUM_OWNERS
    return until_ns // SECOND_NS * SECOND_NS + number * _NUM_BEHIND + min(num_behind, _NUM_BEHIND - 1)


def _owner_of(used_ns: int) -> int:
    return used_ns % SECOND_NS // _NUM_BEHIND


class DiskOrder:
    """Owns the index of the files. Every operation is O(1), but for the heap of pins. Its user holds a lock."""

    def __init__(self, *, budget_bytes: int, most_bytes: int, wall_ns: Callable[[], int] = time.time_ns) -> None:
        """budget_bytes: of the pinned files of one owner; most_bytes: of all owners together."""
        self.num_bytes = 0
        self.num_pinned_bytes = 0
        self._budget_bytes = budget_bytes
        self._most_bytes = most_bytes
        self._wall_ns = wall_ns
        self._files: OrderedDict[bytes, Entry] = OrderedDict()  # by name, those that leave first in front
        self._kept: OrderedDict[bytes, Entry] = OrderedDict()  # those that are pinned, the oldest pins in front
        # both by the number of the owner
        self._kept_of: defaultdict[int, OrderedDict[bytes, None]] = defaultdict(OrderedDict)
        self._bytes_of: defaultdict[int, int] = defaultdict(int)
        self._due: list[tuple[int, bytes]] = []  # a heap: when pins end, or ended

    def __contains__(self, name: bytes) -> bool:
        return name in self._files or name in self._kept

    def __len__(self) -> int:
        return len(self._files) + len(self._kept)

    def find(self, name: bytes) -> Entry | None:
        """Return a file, or None."""
        return self._files.get(name) or self._kept.get(name)

    def pinned_until_ns(self, name: bytes) -> int:
        """Return when the pin of a file ends, or has ended; 0: it has none."""
        entry = self._kept.get(name)
        return 0 if entry is None else entry.used_ns

    def pinned_ns(self, name: bytes) -> int:
        """Return for how long a file is still pinned; 0: it is not."""
        return max(self.pinned_until_ns(name) - self._wall_ns(), 0)

    def add(self, name: bytes, entry: Entry) -> None:
        """Add a file that is not here, as the last to leave of its kind."""
        now_ns = self._wall_ns()
        self.expire(now_ns)
        self.num_bytes += entry.num_bytes
        if not is_pinned(entry.used_ns, now_ns):
            self._files[name] = entry
            return
        owner = _owner_of(entry.used_ns)
        self._kept[name] = entry
        self._kept_of[owner][name] = None
        self._bytes_of[owner] += entry.num_bytes
        self.num_pinned_bytes += entry.num_bytes
        heapq.heappush(self._due, (entry.used_ns, name))
        while self._bytes_of.get(owner, 0) > self._budget_bytes:
            self._unpin(next(iter(self._kept_of[owner])))
        while self.num_pinned_bytes > self._most_bytes:
            self._unpin(next(iter(self._kept)))

    def pop(self, name: bytes) -> Entry | None:
        """Forget a file; return it if it was here."""
        entry = self._files.pop(name, None) or self._forget_pin(name)
        if entry is not None:
            self.num_bytes -= entry.num_bytes
        return entry

    def first(self) -> tuple[bytes, Entry] | None:
        """Return the file that leaves first."""
        self.expire(self._wall_ns())
        return next(iter((self._files or self._kept).items()), None)

    def clear(self) -> dict[bytes, Entry]:
        """Forget all files; return them."""
        files = {**self._files, **self._kept}
        for each in (self._files, self._kept, self._kept_of, self._bytes_of, self._due):
            each.clear()
        self.num_bytes = self.num_pinned_bytes = 0
        return files

    def expire(self, now_ns: int) -> None:
        """End the pins whose time is over."""
        while self._due and self._due[0][0] <= now_ns:
            due_ns, name = heapq.heappop(self._due)
            entry = self._kept.get(name)
            if entry is not None and entry.used_ns == due_ns:
                self._unpin(name)

    def check(self) -> None:
        """Assert that the sums are those of the files, and the pins within their bounds."""
        assert self.num_bytes == sum(entry.num_bytes for entry in [*self._files.values(), *self._kept.values()])
        assert self.num_pinned_bytes == sum(entry.num_bytes for entry in self._kept.values())
        assert self.num_pinned_bytes == sum(self._bytes_of.values()) <= self._most_bytes
        assert all(num_bytes <= self._budget_bytes for num_bytes in self._bytes_of.values())
        assert sorted(self._kept) == sorted(name for names in self._kept_of.values() for name in names)
        assert self._files.keys().isdisjoint(self._kept)

    def _unpin(self, name: bytes) -> None:
        entry = self._forget_pin(name)
        assert entry is not None
        self._files[name] = entry

    def _forget_pin(self, name: bytes) -> Entry | None:
        entry = self._kept.pop(name, None)
        if entry is None:
            return None
        owner = _owner_of(entry.used_ns)
        del self._kept_of[owner][name]
        self._bytes_of[owner] -= entry.num_bytes
        self.num_pinned_bytes -= entry.num_bytes
        if not self._kept_of[owner]:
            del self._kept_of[owner], self._bytes_of[owner]
        if len(self._due) > 2 * len(self._kept) + 64:  # most are of pins that were renewed
            self._due = [(kept.used_ns, kept_name) for kept_name, kept in self._kept.items()]
            heapq.heapify(self._due)
        return entry
