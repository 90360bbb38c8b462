"""Pins: cached blocks of prompts that their clients asked to keep, reused after all others for some time. Never torch.

When a request with `pin_s` ends, the blocks that a hit on its tokens would take are pinned for so long since its last
token. A pin takes no memory from anybody: a pinned block is free like every cached one, and is reused if no other is
left. What it changes is the order. Bounds keep one client from pushing out all others: each API key has a budget, and
all keys together at most half of the pool, or one budget if that is more. Beyond them the oldest pins end first, and of
one prompt its tail. A block that loses its place in the prefix cache loses its pin.
"""

import heapq
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from engine.core.cache_layout import CacheLayout
from engine.core.page_pool import PagePool
from engine.core.prefix_hits import Hit, PrefixFinder
from engine.core.request import Request


class _Pin(NamedTuple):
    owner: str
    deadline_s: float
    num_pages: int


class Pins:
    """Owns who pinned which block, and until when. O(1) per block."""

    def __init__(self, layout: CacheLayout, pool: PagePool, finder: PrefixFinder, *, share: float) -> None:
        """share: of the pool's pages, the budget of one key."""
        self.next_due_s = math.inf  # when expire() is to be called
        self.num_ended = {"expired": 0, "over_budget": 0, "reused": 0}  # blocks
        self._layout = layout
        self._pool = pool
        self._finder = finder
        self._budget = int(share * pool.num_usable)
        self._most = max(self._budget, pool.num_usable // 2)
        self._num_pages = 0
        self._pages_of: defaultdict[str, int] = defaultdict(int)  # by owner
        self._pins: OrderedDict[int, _Pin] = OrderedDict()  # by block, those that were renewed least recently first
        self._blocks_of: defaultdict[str, OrderedDict[int, None]] = defaultdict(OrderedDict)  # in the same order
        self._due: list[tuple[float, int]] = []  # a heap: when to look at a block again, and the block
        self._looked_at_s: dict[int, float] = {}  # by block, of its entries in the heap the one that counts

    @property
    def num_pages(self) -> int:
        """Pages of pinned blocks."""
        self._drop_lost()
        return self._num_pages

    def keep(self, request: Request) -> None:
        """Pin what hits on a request's tokens would take, if it asks and has ended well, in the name of its key."""
        if not request.pin_s or not self._budget or request.finish_reason in (None, "error"):
            return
        self._drop_lost()
        request.num_pending_tokens = 0  # those of dropped rows
        ends = (request.num_prompt_tokens, None)  # the next turn may have another answer in place of this one
        hits = [self._finder.find(request, within=end) for end in ends]
        owner = request.open_salt
        used_s = max(request.arrival_s, request.first_token_s or 0.0, request.last_token_s or 0.0)
        deadline_s = used_s + request.pin_s
        blocks = self._within_budget({block: end for hit in hits for block, end in self._ends(hit)})
        for block in reversed(blocks):  # the tail first, since the first pins end first
            pin = self._pins.get(block)
            if pin is not None:
                self._forget(block)
            self._pool.pin(block)
            until_s = deadline_s if pin is None else max(deadline_s, pin.deadline_s)
            self._remember(block, _Pin(owner, until_s, len(self._pool.pages(block))))
            if self._looked_at_s.get(block, math.inf) > until_s:  # else its next look finds the later deadline
                self._look_again(block, until_s)
        self.next_due_s = self._due[0][0] if self._due else math.inf
        while self._pages_of.get(owner, 0) > self._budget:
            self._end(next(iter(self._blocks_of[owner])), "over_budget")
        while self._num_pages > self._most:
            self._end(next(iter(self._pins)), "over_budget")

    def expire(self, now: float) -> None:
        """End the pins whose time is over."""
        self._drop_lost()
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

    def check(self) -> None:
        """Assert that the pool's pins are these, and within their bounds."""
        self._drop_lost()
        assert all(self._pool.is_pinned(block) for block in self._pins)
        assert self._pool.num_pinned == len(self._pins)
        assert self._num_pages == sum(len(self._pool.pages(block)) for block in self._pins) <= self._most
        assert self._num_pages == sum(self._pages_of.values())
        assert all(num_pages <= self._budget for num_pages in self._pages_of.values())
        assert all(self._looked_at_s[block] <= pin.deadline_s for block, pin in self._pins.items())
        assert set(self._due) >= {(due_s, block) for block, due_s in self._looked_at_s.items()}

    def _ends(self, hit: Hit) -> Iterable[tuple[int, int]]:
        """Yield each block of a hit, and the token at which it ends."""
        for group in self._layout.groups:
            blocks = hit.blocks[group.index]
            first = hit.num_tokens // group.tokens - len(blocks)
            yield from ((block, (first + place + 1) * group.tokens) for place, block in enumerate(blocks))

    def _within_budget(self, ends: dict[int, int]) -> list[int]:
        """Return the first blocks by their ends, as many as the budget holds."""
        kept: list[int] = []
        num_pages = 0
        for block in sorted(ends, key=ends.__getitem__):
            num_pages += len(self._pool.pages(block))
            if num_pages > self._budget:
                break
            kept.append(block)
        return kept

    def _look_again(self, block: int, due_s: float) -> None:
        """Look at a block's pin at due_s, not at any time that was set before."""
        self._looked_at_s[block] = due_s
        heapq.heappush(self._due, (due_s, block))

    def _remember(self, block: int, pin: _Pin) -> None:
        self._pins[block] = pin
        self._blocks_of[pin.owner][block] = None
        self._pages_of[pin.owner] += pin.num_pages
        self._num_pages += pin.num_pages

    def _forget(self, block: int) -> None:
        pin = self._pins.pop(block)
        del self._blocks_of[pin.owner][block]
        self._pages_of[pin.owner] -= pin.num_pages
        self._num_pages -= pin.num_pages
        if not self._blocks_of[pin.owner]:
            del self._blocks_of[pin.owner], self._pages_of[pin.owner]

    def _end(self, block: int, why: str) -> None:
        self._forget(block)
        self._pool.unpin(block)
        self.num_ended[why] += 1

    def _drop_lost(self) -> None:
        """Forget the blocks that lost their place in the prefix cache."""
        lost, self._pool.lost_pins = self._pool.lost_pins, []
        for block in lost:
            self._forget(block)
            self.num_ended["reused"] += 1
