"""HostIndex: which published blocks host memory has, and in which of its slots. Plain Python; never torch.

A slot has the bytes of one page. A block is named by its group and its key, as in the prefix cache, and has as many
slots as pages, which need not be neighbours. A slot's life: free → taken for a copy in flight → of a block that can be
found → free again, when the block is the least recently used one and a copy needs its slots, or is forgotten. Pinned
blocks leave after all others (engine/core/pins.py). While a copy reads a block its slots stay as they are.

On CUDA slots are pinned after the start, some at a time. Before it is pinned a slot is none of the free ones: a copy
from or to it would block the step. set_ready() tells how many are, and in the end how many there will ever be.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from engine.core.kv_events import KvEvents, Medium, Name
from engine.core.page_pool import PagePool

ON_HOST = -1  # in place of a block's number


@dataclass(slots=True, eq=False)
class HostBlock:
    """A block in host memory."""

    name: Name
    slots: list[int]  # one for each of its pages
    num_readers: int = 0  # copies that are due or in flight
    is_forgotten: bool = False  # it cannot be found any more


class HostIndex:
    """Owns the slots. Every operation is O(1) per slot, and O(1) per block that copies read."""

    def __init__(self, *, num_slots: int) -> None:
        """All slots are ready, unless set_ready() says otherwise before the first block."""
        self.num_slots = num_slots  # in the end
        self.num_ready = num_slots  # of them, those that can be taken, the first ones
        self.num_evictions = 0  # blocks
        self.num_freed = 0  # times that slots became free, or could be taken again
        self.events: KvEvents | None = None  # told of the blocks that can be found
        self._free = list(range(num_slots - 1, -1, -1))  # taken from the end: neighbours are copied at once
        self._blocks: OrderedDict[Name, HostBlock] = OrderedDict()  # the least recently used first
        self._kept: OrderedDict[Name, HostBlock] = OrderedDict()  # those that are pinned, in the same order
        self._pinned: set[Name] = set()  # also those that are not here
        self._leaving: dict[HostBlock, None] = {}  # forgotten ones that copies still read

    @property
    def num_blocks(self) -> int:
        """Blocks that can be found."""
        return len(self._blocks) + len(self._kept)

    @property
    def num_used(self) -> int:
        """Slots that are not free."""
        return self.num_ready - len(self._free)

    def set_ready(self, num_ready: int, *, is_growing: bool) -> None:
        """Let the first slots be taken, and no others yet. is_growing: more will follow, up to num_slots.

        They become fewer only while all are free.
        """
        num_ready = min(num_ready, self.num_slots)
        if num_ready < self.num_ready:
            assert len(self._free) == self.num_ready, "a slot that is used is not ready"
            self._free = list(range(num_ready - 1, -1, -1))
        elif num_ready > self.num_ready:
            self.give_back(range(self.num_ready, num_ready))
        self.num_ready = num_ready
        if not is_growing:
            self.num_slots = num_ready
            self.num_freed += 1  # blocks that wait for more slots than there will be are to be looked at again

    def find(self, name: Name) -> HostBlock | None:
        """Return the block of this name, or None."""
        return self._blocks.get(name) or self._kept.get(name)

    def names(self) -> list[Name]:
        """Return the names of the blocks that can be found, those that leave first in front."""
        return [*self._blocks, *self._kept]

    def pin(self, name: Name) -> None:
        """Let a block leave after all others, now or once it is here."""
        self._pinned.add(name)
        block = self._blocks.pop(name, None)
        if block is not None:
            self._kept[name] = block

    def unpin(self, name: Name) -> None:
        """Let a pinned block leave like the others, before those that were used later."""
        self._pinned.discard(name)
        block = self._kept.pop(name, None)
        if block is not None:
            self._blocks[name] = block
            self._blocks.move_to_end(name, last=False)

    def is_pinned(self, name: Name) -> bool:
        """Return whether a block leaves after all others, be it here or not."""
        return name in self._pinned

    def touch(self, name: Name) -> bool:
        """Make a block the most recently used one; return False if it is not here."""
        for blocks in (self._blocks, self._kept):
            if name in blocks:
                blocks.move_to_end(name)
                return True
        return False

    def take(self, count: int) -> list[int] | None:
        """Return `count` slots, of evicted blocks if needed; None and no change if copies read too many of them."""
        victims: list[HostBlock] = []
        slots: list[int] = []  # theirs, in the order in which they were filled: neighbours, mostly
        num_missing = count - len(self._free)
        if num_missing > 0:
            for block in chain(self._blocks.values(), self._kept.values()):
                if not block.num_readers:
                    victims.append(block)
                    slots += block.slots
                    if len(slots) >= num_missing:
                        break
            else:
                return None
        for block in victims:
            del (self._blocks if block.name in self._blocks else self._kept)[block.name]
            self._tell_removed(block.name)
        self.num_evictions += len(victims)
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        if victims:
            taken += slots[:num_missing]
            self.give_back(slots[num_missing:])
        return taken

    def add(self, name: Name, slots: list[int]) -> None:
        """Let a block be found, whose copy has ended."""
        assert self.find(name) is None
        (self._kept if name in self._pinned else self._blocks)[name] = HostBlock(name, slots)
        if self.events is not None:
            self.events.stored(Medium.HOST, name)

    def give_back(self, slots: Iterable[int]) -> None:
        """Free slots that were taken for a block that is not added after all."""
        self.num_freed += 1
        self._free += reversed(list(slots))

    def begin_reading(self, block: HostBlock) -> None:
        """Keep a block's slots, and make it the most recently used one."""
        block.num_readers += 1
        self.touch(block.name)

    def end_reading(self, block: HostBlock) -> None:
        """Let the slots of a block go, as far as this reader is concerned."""
        block.num_readers -= 1
        self.num_freed += 1
        if block.is_forgotten and not block.num_readers:
            del self._leaving[block]
            self.give_back(block.slots)

    def forget(self, name: Name) -> None:
        """Let a block, if it is here, no longer be found."""
        block = self._blocks.pop(name, None) or self._kept.pop(name, None)
        if block is None:
            return
        self._tell_removed(name)
        block.is_forgotten = True
        if block.num_readers:
            self._leaving[block] = None
        else:
            self.give_back(block.slots)

    def check(self, taken: Iterable[int]) -> None:
        """Assert that every slot is free, or of one block, or among `taken`: those of copies to the host."""
        blocks = [*self._blocks.values(), *self._kept.values(), *self._leaving]
        slots = [slot for block in blocks for slot in block.slots]
        assert sorted([*self._free, *slots, *taken]) == list(range(self.num_ready))
        here = [*self._blocks.items(), *self._kept.items()]
        assert all(name == block.name and not block.is_forgotten for name, block in here)
        assert self._kept.keys() <= self._pinned
        assert self._pinned.isdisjoint(self._blocks)
        assert all(block.is_forgotten and block.num_readers for block in self._leaving)

    def _tell_removed(self, name: Name) -> None:
        if self.events is not None:
            self.events.removed(Medium.HOST, name)


class BothTiers:
    """Finds blocks of the pool, and those of host memory as ON_HOST."""

    def __init__(self, pool: PagePool, index: HostIndex) -> None:
        self._pool = pool
        self._index = index

    def find(self, group: int, key: bytes) -> int | None:
        """See Blocks.find."""
        block = self._pool.find(group, key)
        if block is None and self._index.find((group, key)) is not None:
            return ON_HOST
        return block
