"""ReuseOrder: the blocks of the prefix cache that nobody holds, in the order in which the pool reuses them. No torch.

settled, least recently used first, those that are hardly worth keeping (spent) in front → awaited: those that wait for
a copy to host memory, or to be looked at for one → kept: pinned ones (engine/core/pins.py).
PagePool adds and removes blocks; whoever copies them moves them from one part to the other.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice


class ReuseOrder:
    """Owns the order. Every operation is O(1) per block."""

    def __init__(self, sizes: Sequence[int], group_of: Sequence[int]) -> None:
        """sizes: pages of a block, by group. group_of: by block; both are the pool's own, which change."""
        self.settled: OrderedDict[int, None] = OrderedDict()
        self.awaited: OrderedDict[int, None] = OrderedDict()
        self.kept: OrderedDict[int, None] = OrderedDict()
        self.spent: set[int] = set()  # of the settled ones
        self.num_settled = 0  # pages
        self.num_spent = 0  # pages
        self.num_lost = 0  # blocks that were reused while they were awaited
        self._sizes = sizes
        self._group_of = group_of

    def __contains__(self, block: int) -> bool:
        return block in self.settled or block in self.awaited or block in self.kept

    def settle(self, blocks: Iterable[int]) -> None:
        """Let blocks be reused before those that wait for a copy; nothing is done for those that don't wait."""
        settled, awaited, sizes, group_of = self.settled, self.awaited, self._sizes, self._group_of
        for block in blocks:
            if block in awaited:
                del awaited[block]
                settled[block] = None
                self.num_settled += sizes[group_of[block]]

    def await_copy(self, block: int) -> None:
        """Let a settled block that is not spent be reused after all settled ones, until settle()."""
        if block in self.settled and block not in self.spent:
            del self.settled[block]
            self.num_settled -= self._sizes[self._group_of[block]]
            self.awaited[block] = None

    def first_awaited(self, count: int) -> list[int]:
        """Return so many blocks that wait for a copy, those that are reused first in front."""
        return list(islice(self.awaited, count))

    def spend(self, block: int) -> None:
        """Let a cached block that is not pinned be reused first."""
        self.settle([block])
        self.settled.move_to_end(block, last=False)
        if block not in self.spent:
            self.spent.add(block)
            self.num_spent += self._sizes[self._group_of[block]]

    def touch(self, block: int) -> None:
        """Let a cached block be reused after those that were used earlier, unless it is hardly worth keeping."""
        if block in self.settled and block not in self.spent:
            self.settled.move_to_end(block)
        elif block in self.awaited:
            self.awaited.move_to_end(block)

    def keep(self, block: int) -> None:
        """Let a cached block, which is pinned, be reused after all others."""
        self.remove(block)
        self.kept[block] = None

    def let_go(self, block: int) -> None:
        """Let a block that was pinned be reused before all others, if it is cached."""
        if block in self.kept:
            del self.kept[block]
            self.settled[block] = None
            self.settled.move_to_end(block, last=False)
            self.num_settled += self._sizes[self._group_of[block]]

    def remove(self, block: int) -> None:
        """Remove a block, which is held or blank from now on."""
        for others in (self.kept, self.awaited):
            if block in others:
                del others[block]
                return
        del self.settled[block]
        self.num_settled -= self._sizes[self._group_of[block]]
        if block in self.spent:
            self.spent.remove(block)
            self.num_spent -= self._sizes[self._group_of[block]]

    def pop(self) -> int:
        """Remove the block that is reused first, which there must be, and return it."""
        block = next(iter(self.settled or self.awaited or self.kept))
        self.num_lost += block in self.awaited
        self.remove(block)
        return block

    def pop_pages(self, count: int) -> list[int]:
        """Do as pop() so many times, where all blocks are a page, and so many are not pinned."""
        blocks = list(islice(self.settled, count))
        num_settled = len(blocks)
        if num_settled < count:
            blocks += islice(self.awaited, count - num_settled)
            self.num_lost += count - num_settled
        settled, awaited, spent = self.settled, self.awaited, self.spent
        for block in blocks[:num_settled]:
            del settled[block]
            if block in spent:
                spent.remove(block)
                self.num_spent -= 1
        for block in blocks[num_settled:]:
            del awaited[block]
        self.num_settled -= num_settled
        return blocks

    def check(self) -> None:
        """Assert that the counts are right."""
        sizes, group_of = self._sizes, self._group_of
        assert len({*self.settled, *self.awaited, *self.kept}) == sum(map(len, (self.settled, self.awaited, self.kept)))
        assert self.spent <= self.settled.keys()
        assert self.num_settled == sum(sizes[group_of[block]] for block in self.settled)
        assert self.num_spent == sum(sizes[group_of[block]] for block in self.spent)
