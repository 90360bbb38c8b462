"""Pins: cached blocks of prompts that their clients asked to keep, reused after all others for some time. Never torch.

When a request with `pin_s` ends, the blocks that a hit on its tokens would take are pinned for so long since its last
token. A pin takes no memory from anybody: a pinned block is free like every cached one, and is reused if no other is
left. What it changes is the order. Bounds keep one client from pushing out all others: each API key has a budget, and
all keys together at most half of the pool, or one budget if that is more (engine/core/pin_book.py). A block that loses
its place in the prefix cache loses its pin.

In host memory the same blocks are pinned by their names, within budgets of its own, which are the same shares of it:
whether they are there, come later or again, they leave it after all others. So a pinned block that the pool had to
reuse is still found there. A disk behind host memory pins the files of these blocks, within budgets of its own, and
tells how long a block is still pinned when a later process reads it.
"""

from collections.abc import Iterable

from engine.core.cache_layout import CacheLayout
from engine.core.kv_events import Name
from engine.core.lower_tiers import LowerTiers
from engine.core.page_pool import PagePool
from engine.core.pin_book import PinBook
from engine.core.prefix_hits import Hit, PrefixFinder
from engine.core.request import Request


class Pins:
    """Owns who pinned which block, and until when. O(1) per block."""

    def __init__(
        self, layout: CacheLayout, pool: PagePool, finder: PrefixFinder, tiers: LowerTiers, *, share: float
    ) -> None:
        """share: of the pool's pages, and of those of host memory, the budget of one key."""
        self._layout = layout
        self._pool = pool
        self._finder = finder
        budget = int(share * pool.num_usable)
        most = max(budget, pool.num_usable // 2)
        self.book: PinBook[int] = PinBook(pin=pool.pin, unpin=pool.unpin, budget=budget, most=most)
        self._tiers = tiers
        self.host: PinBook[Name] | None = None  # None: there is no host memory
        if tiers.host is not None:
            index = tiers.host.index
            budget = int(share * index.num_slots)
            most = max(budget, index.num_slots // 2)
            self.host = PinBook(pin=index.pin, unpin=index.unpin, budget=budget, most=most)
            tiers.host_pins = PinsOfHost(self.host, layout)

    @property
    def next_due_s(self) -> float:
        """When expire() is to be called."""
        due_s = self.book.next_due_s
        return due_s if self.host is None else min(due_s, self.host.next_due_s)

    @property
    def num_ended(self) -> dict[str, int]:
        """Blocks of the pool by why they are pinned no more."""
        return self.book.num_ended

    @property
    def num_pages(self) -> int:
        """Pages of pinned blocks of the pool."""
        self._drop_lost()
        return self.book.num_pages

    def keep(self, request: Request) -> None:
        """Pin what hits on a request's tokens would take, if it asks and has ended well, in the name of its key."""
        has_budget = self.book.budget or (self.host is not None and self.host.budget)
        if not request.pin_s or not has_budget or request.finish_reason in (None, "error"):
            return
        self._drop_lost()
        request.num_pending_tokens = 0  # those of dropped rows
        within = (request.num_prompt_tokens, None)  # the next turn may have another answer in place of this one
        ends = {block: end for limit in within for block, end in self._ends(self._finder.find(request, within=limit))}
        used_s = max(request.arrival_s, request.first_token_s or 0.0, request.last_token_s or 0.0)
        owner, deadline_s = request.open_salt, used_s + request.pin_s
        blocks = [(block, len(self._pool.pages(block))) for block in sorted(ends, key=ends.__getitem__)]
        self.book.keep(blocks, owner=owner, deadline_s=deadline_s)
        if self.host is not None:
            keys = [(self._pool.group_of(block), self._pool.key_of(block), num_pages) for block, num_pages in blocks]
            names = [((group, key), num_pages) for group, key, num_pages in keys if key is not None]
            self.host.keep(names, owner=owner, deadline_s=deadline_s)
            self._tiers.copy_pinned(name for name, _ in names)
            if self._tiers.disk is not None:
                self._tiers.disk.pin([name for name, _ in names], owner=owner, for_s=request.pin_s)

    def expire(self, now: float) -> None:
        """End the pins whose time is over."""
        self._drop_lost()
        self.book.expire(now)
        if self.host is not None:
            self.host.expire(now)

    def check(self) -> None:
        """Assert that the tiers' pins are these, and within their bounds."""
        self._drop_lost()
        self.book.check()
        assert all(self._pool.is_pinned(block) for block in self.book.blocks)
        assert self._pool.num_pinned == len(self.book.blocks)
        if self.host is not None:
            self.host.check()

    def _ends(self, hit: Hit) -> Iterable[tuple[int, int]]:
        """Yield each block of a hit, and the token at which it ends."""
        for group in self._layout.groups:
            blocks = hit.blocks[group.index]
            first = hit.num_tokens // group.tokens - len(blocks)
            yield from ((block, (first + place + 1) * group.tokens) for place, block in enumerate(blocks))

    def _drop_lost(self) -> None:
        """Forget the blocks that lost their place in the prefix cache."""
        lost, self._pool.lost_pins = self._pool.lost_pins, []
        for block in lost:
            self.book.lose(block)


class PinsOfHost:
    """What the disk knows of host memory's pins. See disk_tier.HostPins."""

    def __init__(self, book: PinBook[Name], layout: CacheLayout) -> None:
        self._book = book
        self._layout = layout

    def find(self, name: Name) -> tuple[str, float] | None:
        """See HostPins.find."""
        pin = self._book.find(name)
        return None if pin is None else (pin.owner, pin.deadline_s)

    def keep(self, name: Name, *, owner: str, deadline_s: float) -> None:
        """See HostPins.keep."""
        self._book.keep([(name, self._layout.groups[name[0]].pages)], owner=owner, deadline_s=deadline_s)
