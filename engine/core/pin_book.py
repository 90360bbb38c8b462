"""PinBook: who asked to keep which block of a tier, and until when, within budgets. Plain Python; never torch.

One for the pool, whose blocks are numbers, and one for host memory, whose blocks are names (engine/core/pins.py). What
a pin means is the tier's. Each owner has a budget, and all owners together have one. Beyond them the oldest pins end
first, and of one prompt its tail.
"""

import heapq
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Generic, NamedTuple, TypeVar

Block = TypeVar("Block", bound=int | tuple[int, bytes])


class Pin(NamedTuple):
    """Of one block."""

    owner: str
    deadline_s: float
    num_pages: int


class PinBook(Generic[Block]):
    """Owns the pins of one tier. O(1) per block."""

    def __init__(self, *, pin: Callable[[Block], None], unpin: Callable[[Block], None], budget: int, most: int) -> None:
        """pin: let a block leave its tier after all others; twice does nothing more. unpin: no longer.

        budget: pages for one owner; most: for all.
        """
        self.budget = budget
        self.next_due_s = math.inf  # when expire() is to be called
        self.num_ended = {"expired": 0, "over_budget": 0, "reused": 0}  # blocks
        self.num_pages = 0
        self._pin: Callable[[Block], None] = pin
        self._unpin: Callable[[Block], None] = unpin
        self._most = most
        self._pages_of: defaultdict[str, int] = defaultdict(int)  # by owner
        self._pins: OrderedDict[Block, Pin] = OrderedDict()  # those that were renewed least recently first
        self._blocks_of: defaultdict[str, OrderedDict[Block, None]] = defaultdict(OrderedDict)  # in the same order
        self._due: list[tuple[float, Block]] = []  # a heap: when to look at a block again, and the block
        self._looked_at_s: dict[Block, float] = {}  # of its entries in the heap the one that counts

    @property
    def blocks(self) -> Collection[Block]:
        """The pinned blocks."""
        return self._pins.keys()

    def find(self, block: Block) -> Pin | None:
        """Return the pin of a block, or None."""
        return self._pins.get(block)

    def keep(self, blocks: Sequence[tuple[Block, int]], *, owner: str, deadline_s: float) -> None:
        """Pin blocks of a prompt in their order, each with its pages; renew those that are pinned."""
        for block, num_pages in reversed(self._within_budget(blocks)):  # the tail first, since the first pins end first
            pin = self._pins.get(block)
            if pin is not None:
                self._forget(block)
            self._pin(block)
            until_s = deadline_s if pin is None else max(deadline_s, pin.deadline_s)
            self._remember(block, Pin(owner, until_s, num_pages))
            if self._looked_at_s.get(block, math.inf) > until_s:  # else its next look finds the later deadline
                self._look_again(block, until_s)
        self.next_due_s = self._due[0][0] if self._due else math.inf
        while self._pages_of.get(owner, 0) > self.budget:
            self._end(next(iter(self._blocks_of[owner])), "over_budget")
        while self.num_pages > self._most:
            self._end(next(iter(self._pins)), "over_budget")

    def expire(self, now: float) -> None:
        """End the pins whose time is over."""
        while self._due and self._due[0][0] <= now:
            due_s, block = heapq.heappop(self._due)
            if self._looked_at_s.get(block) != due_s:
                continue
            del self._looked_at_s[block]
            pin = self._pins.get(block)
            if pin is not None and pin.deadline_s <= now:
                self._end(block, "expired")
            elif pin is not None:
                self._look_again(block, pin.deadline_s)
        self.next_due_s = self._due[0][0] if self._due else math.inf

    def lose(self, block: Block) -> None:
        """Forget the pin of a block that the tier has given up."""
        self._forget(block)
        self.num_ended["reused"] += 1

    def check(self) -> None:
        """Assert that the pins are within their bounds, and will be looked at in time."""
        assert self.num_pages == sum(pin.num_pages for pin in self._pins.values()) <= self._most
        assert self.num_pages == sum(self._pages_of.values())
        assert all(num_pages <= self.budget for num_pages in self._pages_of.values())
        assert all(self._looked_at_s[block] <= pin.deadline_s for block, pin in self._pins.items())
        assert set(self._due) >= {(due_s, block) for block, due_s in self._looked_at_s.items()}

    def _within_budget(self, blocks: Sequence[tuple[Block, int]]) -> list[tuple[Block, int]]:
        """Return the first blocks, as many as the budget holds."""
        num_pages = 0
        for place, (_, pages) in enumerate(blocks):
            num_pages += pages
            if num_pages > self.budget:
                return list(blocks[:place])
        return list(blocks)

    def _look_again(self, block: Block, due_s: float) -> None:
        """Look at a block's pin at due_s, not at any time that was set before."""
        self._looked_at_s[block] = due_s
        heapq.heappush(self._due, (due_s, block))

    def _remember(self, block: Block, pin: Pin) -> None:
        self._pins[block] = pin
        self._blocks_of[pin.owner][block] = None
        self._pages_of[pin.owner] += pin.num_pages
        self.num_pages += pin.num_pages

    def _forget(self, block: Block) -> None:
        pin = self._pins.pop(block)
        del self._blocks_of[pin.owner][block]
        self._pages_of[pin.owner] -= pin.num_pages
        self.num_pages -= pin.num_pages
        if not self._blocks_of[pin.owner]:
            del self._blocks_of[pin.owner], self._pages_of[pin.owner]

    def _end(self, block: Block, why: str) -> None:
        self._forget(block)
        self._unpin(block)
        self.num_ended[why] += 1
