"""HostIndex: which published blocks host memory has, and in which of its slots. Plain Python; never torch.

A slot has the bytes of one page. A block is named by its group and its key, as in the prefix cache, and has as many
slots as pages, which need not be neighbours. A slot's life: free → taken for a copy in flight → of a block that can be
found → free again, when the block is the least recently used one and a copy needs its slots, or is forgotten. While a
copy reads a block its slots stay as they are.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from engine.core.page_pool import PagePool

ON_HOST = -1  # in place of a block's number
Name = tuple[int, bytes]  # a block's group and its key


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
        self.num_slots = num_slots
        self.num_evictions = 0  # blocks
        self._free = list(range(num_slots - 1, -1, -1))  # taken from the end: neighbours are copied at once
        self._blocks: OrderedDict[Name, HostBlock] = OrderedDict()  # the least recently used first
        self._leaving: dict[HostBlock, None] = {}  # forgotten ones that copies still read

    @property
    def num_blocks(self) -> int:
        """Blocks that can be found."""
        return len(self._blocks)

    @property
    def num_used(self) -> int:
        """Slots that are not free."""
        return self.num_slots - len(self._free)

    def find(self, name: Name) -> HostBlock | None:
        """Return the block of this name, or None."""
        return self._blocks.get(name)

    def touch(self, name: Name) -> bool:
        """Make a block the most recently used one; return False if it is not here."""
        if name not in self._blocks:
            return False
        self._blocks.move_to_end(name)
        return True

    def take(self, count: int) -> list[int] | None:
        """Return `count` slots, of evicted blocks if needed; None and no change if copies read too many of them."""
        victims: list[HostBlock] = []
        num_found = len(self._free)
        if num_found < count:
            for block in self._blocks.values():
                if not block.num_readers:
                    victims.append(block)
                    num_found += len(block.slots)
                    if num_found >= count:
                        break
            else:
                return None
        for block in victims:
            del self._blocks[block.name]
            self.give_back(block.slots)
        self.num_evictions += len(victims)
        return [self._free.pop() for _ in range(count)]

    def add(self, name: Name, slots: list[int]) -> None:
        """Let a block be found, whose copy has ended."""
        assert name not in self._blocks
        self._blocks[name] = HostBlock(name, slots)

    def give_back(self, slots: Iterable[int]) -> None:
        """Free slots that were taken for a block that is not added after all."""
        self._free += reversed(list(slots))

    def begin_reading(self, block: HostBlock) -> None:
        """Keep a block's slots, and make it the most recently used one."""
        block.num_readers += 1
        self._blocks.move_to_end(block.name)

    def end_reading(self, block: HostBlock) -> None:
        """Let the slots of a block go, as far as this reader is concerned."""
        block.num_readers -= 1
        if block.is_forgotten and not block.num_readers:
            del self._leaving[block]
            self.give_back(block.slots)

    def forget(self, name: Name) -> None:
        """Let a block, if it is here, no longer be found."""
        block = self._blocks.pop(name, None)
        if block is None:
            return
        block.is_forgotten = True
        if block.num_readers:
            self._leaving[block] = None
        else:
            self.give_back(block.slots)

    def check(self, taken: Iterable[int]) -> None:
        """Assert that every slot is free, or of one block, or among `taken`: those of copies to the host."""
        blocks = [*self._blocks.values(), *self._leaving]
        slots = [slot for block in blocks for slot in block.slots]
        assert sorted([*self._free, *slots, *taken]) == list(range(self.num_slots))
        assert all(name == block.name and not block.is_forgotten for name, block in self._blocks.items())
        assert all(block.is_forgotten and block.num_readers for block in self._leaving)


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
