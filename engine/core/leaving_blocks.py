"""LeavingBlocks: which blocks go to host memory shortly before the pool would reuse them. Plain Python; never torch.

Most blocks are asked for again while the pool has them, or never. So a block is looked at once, when the pool is about
to reuse it: it is copied, or left to be lost. A pool that is not full costs nothing.

The pool first reuses cached blocks that wait for nothing, and then, in order of use, those that have not been looked at
(ReuseOrder.awaited). When the pages of the first ones, and blank pages, become fewer than a lead, steps look at the
next blocks until they are as many again. The lead is a quarter of host memory: what an admission may take at once,
while most of host memory has blocks that the pool has lost. For a step without rows the lead is half of host memory.

Copies spend a credit in seconds, which a share of the time fills, and a share of what prompt tokens take. If more
blocks leave the pool than it pays for, whole requests are dropped, not some blocks of each, since a hit needs all
blocks before its end. For that each request has a rank, 0 ≤ rank < 1, and its blocks are copied if the rank is below
twice the share of the credit that is left. So the credit settles where copies take what it earns. Ranks are spread
evenly. A request most of whose prompt was found follows an earlier one, and has half of its rank: the longer a
conversation goes on, the surer it is kept before what comes once.
"""

from collections.abc import Iterable

from engine.core.cache_layout import CacheLayout
from engine.core.host_copies import Store
from engine.core.host_index import HostIndex
from engine.core.kv_events import Name
from engine.core.page_pool import PagePool
from engine.core.request import Request
from engine.interface.config import HostTierConfig

_CREDIT_S = 5.0  # of time without copies, after which the credit is full; with half of it all blocks are copied
_LEAST_BLOCK_S = 140e-6  # that a block costs: the host takes 10 to 15 µs for it, whatever its bytes
_LOW_SHARE = 0.75  # of the lead, below which steps begin to look, so that few steps do
_MOST_LOOKS = 512  # in a step
_SPREAD = 0.6180339887498949  # a step between ranks that spreads them evenly
_FOLLOWING_RANK = 0.25  # of a request that follows an earlier one, whose rank is not known


class LeavingBlocks:
    """Owns the credit, and what it was spent on. O(1) per block that is looked at."""

    def __init__(self, config: HostTierConfig, layout: CacheLayout, pool: PagePool, index: HostIndex) -> None:
        """The pool must be empty."""
        self._block_tokens = layout.groups[0].tokens
        self._sizes = [group.pages for group in layout.groups]
        self.num_dropped = 0  # blocks that were looked at and are not copied
        self.pinned: dict[Name, None] = {}  # blocks to copy though they leave the pool last; some pins may have ended
        self._config = config
        self._pool = pool
        self._index = index
        pool.ranks = [0.0] * (pool.num_usable + 1)
        self._rank = 0.0  # of the newest request that follows no other
        self._most_s = self._credit_s = _CREDIT_S * (config.unasked_share or 0.0)
        self._earned_at_s: float | None = None
        self._is_bounded = config.unasked_share is not None and config.page_s > 0
        self._copying: dict[int, int] = {}  # blocks that steps copy, with their pages
        self._num_copying = 0  # their pages
        self._is_filling = False

    def rank(self, request: Request, num_hit_tokens: int) -> float:
        """Return the rank of a request that is admitted with such a hit."""
        assert self._pool.ranks is not None
        if num_hit_tokens * 2 >= request.num_prompt_tokens:
            blocks = request.tables[0].blocks
            last = num_hit_tokens // self._block_tokens - 1 - request.tables[0].first
            return self._pool.ranks[blocks[last]] / 2 if 0 <= last < len(blocks) else _FOLLOWING_RANK
        self._rank = (self._rank + _SPREAD) % 1.0
        return self._rank

    def note_arrived(self, block: int) -> None:
        """Rank a block that came from the host."""
        assert self._pool.ranks is not None
        self._pool.ranks[block] = 2 * _FOLLOWING_RANK  # the request's own is half of it

    def want_pinned(self, names: Iterable[Name]) -> None:
        """Copy blocks that the pool or host memory has pinned before others, if they are pinned when it is their turn.

        O(1) per name in the mean.
        """
        self.pinned.update(dict.fromkeys(names))
        if len(self.pinned) > 2 * self._pool.num_usable:  # pins end sooner than copies earn their time
            self.pinned = {name: None for name in self.pinned if self._find_pinned(name) is not None}

    def observe_commit(self, now: float) -> None:
        """Let time pass, in seconds of the engine's clock."""
        if self._earned_at_s is not None and self._config.unasked_share is not None:
            self._earn((now - self._earned_at_s) * self._config.unasked_share)
        self._earned_at_s = now

    def observe_prompts(self, num_tokens: int) -> None:
        """Count the prompt tokens of a step."""
        self._earn(num_tokens * self._config.copies_per_token * self._config.page_s)

    @property
    def is_due(self) -> bool:
        """True if a step without rows would look at blocks."""
        is_short = bool(self._pool.order.awaited) and self._num_soon < self._lead(is_idle=True)
        return bool(self.pinned) or is_short

    def would_look(self, *, is_idle: bool) -> bool:
        """Return whether a step looks at blocks. is_idle: it has no rows."""
        return (
            is_idle or self._is_filling or bool(self.pinned) or self._num_soon < _LOW_SHARE * self._lead(is_idle=False)
        )

    def look(self, storing: set[Name], *, most: int, num_spare: int, is_idle: bool) -> tuple[list[Store], bool]:
        """Return the copies of a step, whose blocks are held from now on, and whether host memory has no slots left.

        storing: blocks that are copied already; receives these. most, num_spare: pages. is_idle: the step has no rows.
        """
        stores: list[Store] = []
        pool, num_left = self._pool, most
        while self.pinned and num_left > 0 and (is_idle or self._credit_s > 0 or not self._is_bounded):
            name = next(iter(self.pinned))
            block = self._find_pinned(name)
            if block is not None and not self._index.touch(name) and name not in storing:
                num_pages = len(pool.pages(block))
                if pool.is_cached(block) and num_pages > num_spare:
                    return stores, False
                slots = self._index.take(num_pages) if num_pages <= self._index.num_slots else []
                if slots is None:
                    return stores, True
                if slots:
                    self._store(Store(name, block, slots), stores, storing)
                    num_left -= num_pages
                    num_spare -= num_pages
            del self.pinned[name]
        if self.would_look(is_idle=is_idle):
            self._is_filling = True
            is_lacking = self._fill(stores, storing, num_left=num_left, num_spare=num_spare, is_idle=is_idle)
            return stores, is_lacking
        return stores, False

    def end(self, stores: list[Store]) -> None:
        """Let the pool reuse blocks soon whose copies were committed, and which were released."""
        copied = [store.block for store in stores if store.block in self._copying]
        for block in copied:
            self._num_copying -= self._copying.pop(block)
        self._pool.order.settle(copied)

    def drop(self, stores: list[Store]) -> None:
        """Let blocks be looked at again whose step was given up."""
        for store in stores:
            self._num_copying -= self._copying.pop(store.block, 0)

    def _fill(self, stores: list[Store], storing: set[Name], *, num_left: int, num_spare: int, is_idle: bool) -> bool:
        """Look at blocks until the lead is full; return whether host memory has no slots left."""
        chosen, is_lacking = self._choose(storing, num_left=num_left, num_spare=num_spare, is_idle=is_idle)
        if not chosen:
            return is_lacking
        slots = self._index.take(sum(num_pages for _, _, num_pages in chosen))
        if slots is None:
            return True
        first = 0
        for name, block, num_pages in chosen:
            self._store(Store(name, block, slots[first : first + num_pages]), stores, storing)
            first += num_pages
        return False

    def _choose(
        self, storing: set[Name], *, num_left: int, num_spare: int, is_idle: bool
    ) -> tuple[list[tuple[Name, int, int]], bool]:
        """Return the blocks to copy, with their pages, and whether the next one lacks slots. Settles those to drop."""
        pool, index, ranks, sizes = self._pool, self._index, self._pool.ranks, self._sizes
        assert ranks is not None
        num_missing = self._lead(is_idle=is_idle) - self._num_soon
        is_free = is_idle or not self._is_bounded
        credit_s, paid = self._credit_s, 2 / (self._most_s or 1.0)
        below = 1.0 if is_free else credit_s * paid
        has_groups = len(sizes) > 1
        most = min(num_left, num_spare, index.num_ready)
        chosen: list[tuple[Name, int, int]] = []
        settled: list[int] = []
        is_lacking = False
        blocks = pool.order.first_awaited(_MOST_LOOKS)
        for block in blocks:
            if num_missing <= 0 or most <= 0:
                break
            group = pool.group_of(block) if has_groups else 0
            num_pages = sizes[group]
            num_missing -= num_pages
            if ranks[block] >= below or num_pages > index.num_slots:
                settled.append(block)
                self.num_dropped += 1
                continue
            key = pool.key_of(block)
            assert key is not None
            name = (group, key)
            if index.touch(name) or name in storing:
                settled.append(block)
                continue
            if num_pages > most and (chosen or num_pages > min(num_spare, index.num_ready)):
                num_missing, is_lacking = num_missing + num_pages, num_pages > index.num_ready
                break
            chosen.append((name, block, num_pages))
            most -= num_pages
            if not is_free:
                credit_s -= self._cost_s(num_pages)
                below = credit_s * paid
        else:
            if len(blocks) < _MOST_LOOKS:
                num_missing = 0  # all that there are
        pool.order.settle(settled)
        self._is_filling = num_missing > 0
        return chosen, is_lacking

    def _find_pinned(self, name: Name) -> int | None:
        block = self._pool.find(*name)
        is_pinned = block is not None and (self._pool.is_pinned(block) or self._index.is_pinned(name))
        return block if is_pinned else None

    @property
    def _num_soon(self) -> int:
        return self._pool.num_soon + self._num_copying

    def _lead(self, *, is_idle: bool) -> int:
        return self._index.num_ready // (2 if is_idle else 4)

    def _earn(self, seconds: float) -> None:
        self._credit_s = min(self._credit_s + seconds, self._most_s)

    def _store(self, store: Store, stores: list[Store], storing: set[Name]) -> None:
        self._pool.hold([store.block])
        self._copying[store.block] = len(store.slots)
        self._num_copying += len(store.slots)
        storing.add(store.name)
        stores.append(store)
        if self._is_bounded:
            self._credit_s = max(self._credit_s - self._cost_s(len(store.slots)), 0.0)

    def _cost_s(self, num_pages: int) -> float:
        """Return what a block takes of the credit."""
        return max(num_pages * self._config.page_s, _LEAST_BLOCK_S)
