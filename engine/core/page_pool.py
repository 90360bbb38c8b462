"""PagePool: lends the pages of the KV pool to groups, as ref-counted blocks that stay findable once they are free.

Plain Python; never torch. A block is the pages_per_block pages of one group that are held, cached and reused together;
its number is that of its first page. Page 0 belongs to padding rows and is never lent.
A page's life: blank → of a held block (count 1) → of a published block, which others may hold, too (count 2, 3, …) → of
a cached block: held by nobody and still findable, reused in the order of ReuseOrder, mostly the least recently used one
first → blank again.
A page that is lent to a kind of group other than before is dirty: its bytes may be no finite numbers of this kind.
Blocks with values that are not finite are tainted: no longer published, and their pages dirty once they are free.
"""

from collections.abc import Collection, Iterable, Sequence

from engine.core.kv_events import KvEvents, Medium
from engine.core.recent_keys import RecentKeys
from engine.core.reuse_order import ReuseOrder
from engine.interface.config import CacheGroup


class PagePool:
    """Owns the pages and the prefix cache. Every operation is O(1) per page; no order depends on a hash."""

    def __init__(self, groups: Sequence[CacheGroup], *, num_pages: int) -> None:
        self.num_usable = num_pages - 1
        self.num_free = num_pages - 1  # pages that nobody holds, cached ones included
        self.dirty: list[int] = []  # pages to zero in the next step
        self.num_evictions = [0 for _ in groups]  # blocks that were cached and overwritten
        self.evicted = [RecentKeys() for _ in groups]  # the keys of such blocks
        self.num_held = [0 for _ in groups]  # pages
        self.num_cached = [0 for _ in groups]  # pages that nobody holds
        kinds = [group.kind for group in groups]
        self._kinds = [1 + kinds.index(group.kind) for group in groups]  # equal numbers for equal kinds
        self._is_mixed = len(set(kinds)) > 1
        self._kind_of = bytearray(num_pages)  # the kind that each page was last lent to; 0: none
        self._sizes = [group.pages_per_block for group in groups]
        self._blank = list(range(num_pages - 1, 0, -1))  # taken from the end
        self.lost_pins: list[int] = []  # blocks whose pins ended with their place in the cache, until Pins takes it
        self._pinned: set[int] = set()  # published blocks, held or cached
        self._ref_counts = [0] * num_pages  # by block
        self._group_of = [0] * num_pages  # by block
        self.order = ReuseOrder(self._sizes, self._group_of)  # of cached blocks
        self._pages_of: dict[int, list[int]] = {}  # of the blocks of several pages that are not blank
        self._hash_of: list[bytes | None] = [None] * num_pages  # by block: its key in _published
        self._published: list[dict[bytes, int]] = [{} for _ in groups]
        self._tainted: set[int] = set()  # held blocks with values that are not finite, perhaps
        # Blocks that were published, or cached again, since HostTier took the list; None: there is no tier behind
        self.news: list[int] | None = None
        # By block: the rank of its last holder. Cached blocks wait until LeavingBlocks looks at them. None: nobody does
        self.ranks: list[float] | None = None
        self.events: KvEvents | None = None  # told of the blocks that can be found

    @property
    def num_used(self) -> int:
        """Pages that are held."""
        return self.num_usable - self.num_free

    @property
    def num_worthless(self) -> int:
        """Free pages that are blank or hardly worth keeping."""
        return len(self._blank) + self.order.num_spent

    def num_holders(self) -> list[int]:
        """Return the number of holders of each page."""
        counts = self._ref_counts.copy()
        for block, pages in self._pages_of.items():
            for page in pages:
                counts[page] = counts[block]
        return counts

    @property
    def published(self) -> Collection[int]:
        """The blocks in the prefix cache, held or not."""
        return [block for published in self._published for block in published.values()]

    def num_published(self, group: int) -> int:
        """Return the number of the group's blocks in the prefix cache, held or not."""
        return len(self._published[group])

    def pages(self, block: int) -> list[int]:
        """Return the pages of a block that is held or cached."""
        return self._pages_of.get(block) or [block]

    def pages_of(self, blocks: Iterable[int]) -> list[int]:
        """Return the pages of blocks that are held or cached, block after block."""
        if not self._pages_of:
            return list(blocks)
        return [page for block in blocks for page in self.pages(block)]

    def group_of(self, block: int) -> int:
        """Return the group of a block that is held or cached."""
        return self._group_of[block]

    def key_of(self, block: int) -> bytes | None:
        """Return a block's key in the prefix cache; None: it is not published."""
        return self._hash_of[block]

    def is_cached(self, block: int) -> bool:
        """Return whether nobody holds a block, which can be found."""
        return block in self.order

    @property
    def num_soon(self) -> int:
        """Pages that are reused before those of blocks that wait for a copy."""
        return len(self._blank) + self.order.num_settled

    @property
    def num_pinned(self) -> int:
        """Pinned blocks."""
        return len(self._pinned)

    def is_pinned(self, block: int) -> bool:
        """Return whether a block is reused after all others."""
        return block in self._pinned

    def pin(self, block: int) -> None:
        """Let a published block be reused after all others, until unpin() or until its pages are needed after all."""
        if block in self._pinned:
            return
        if not self._ref_counts[block]:
            self.order.keep(block)
        self._pinned.add(block)

    def unpin(self, block: int) -> None:
        """Let a pinned block be reused like the others, and, if it is cached, before them."""
        self._pinned.remove(block)
        self.order.let_go(block)

    def is_spent(self, block: int) -> bool:
        """Return whether a block is cached and hardly worth keeping."""
        return block in self.order.spent

    def is_tainted(self, block: int) -> bool:
        """Return whether a held block may have values that are not finite."""
        return block in self._tainted

    def find(self, group: int, key: bytes) -> int | None:
        """Return the group's published block with this key, or None."""
        return self._published[group].get(key)

    def take(self, group: int) -> int:
        """Lend a new block to one holder. The caller has checked that its pages are free."""
        size = self._sizes[group]
        block = self._blank.pop() if self._blank else self._evict()
        if size > 1:
            self._pages_of[block] = [
                block,
                *(self._blank.pop() if self._blank else self._evict() for _ in range(1, size)),
            ]
        if self._is_mixed:
            self._lend(self.pages(block), self._kinds[group])
        self.num_free -= size
        self.num_held[group] += size
        self._ref_counts[block] = 1
        self._group_of[block] = group
        return block

    def take_blocks(self, group: int, count: int) -> list[int]:
        """Lend so many new blocks, as take() does one by one."""
        blank = self._blank
        num_missing = max(count - len(blank), 0)
        can_evict = (
            len(self._sizes) == 1
            and self.events is None
            and num_missing <= len(self.order.settled) + len(self.order.awaited)
        )
        if self._is_mixed or self._sizes[group] > 1 or (num_missing and not can_evict):
            return [self.take(group) for _ in range(count)]
        blocks = blank[: -count - 1 : -1]
        del blank[max(len(blank) - count, 0) :]
        if num_missing:
            blocks += self._evict_pages(num_missing)
        self.num_free -= count
        self.num_held[group] += count
        ref_counts, group_of = self._ref_counts, self._group_of
        for block in blocks:
            ref_counts[block] = 1
            group_of[block] = group
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to each of these blocks, which are held or cached."""
        for block in blocks:
            if not self._ref_counts[block]:
                self.order.remove(block)
                group = self._group_of[block]
                self.num_free -= self._sizes[group]
                self.num_held[group] += self._sizes[group]
                self.num_cached[group] -= self._sizes[group]
            self._ref_counts[block] += 1

    def release(self, blocks: Iterable[int], *, is_spent: bool = False, rank: float | None = None) -> None:
        """Take a holder from each of these blocks. The first ones are reused first, unpublished ones before all.

        is_spent: they are hardly worth keeping: of the published blocks they are reused first.
        rank: in `ranks`, if there are any; None: as they were.
        """
        ref_counts, tainted, order = self._ref_counts, self._tainted, self.order
        for block in blocks:
            ref_counts[block] -= 1
            if ref_counts[block]:
                continue
            group = self._group_of[block]
            self.num_free += self._sizes[group]
            self.num_held[group] -= self._sizes[group]
            if tainted and block in tainted:
                tainted.remove(block)
                self.dirty += self.pages(block)
            if self._hash_of[block] is None:
                self._blank += reversed(self._pages_of.pop(block, (block,)))
            else:
                if block in self._pinned:
                    order.kept[block] = None
                elif self.ranks is None:
                    order.settled[block] = None
                    order.num_settled += self._sizes[group]
                else:
                    order.awaited[block] = None
                    if rank is not None:
                        self.ranks[block] = rank
                self.num_cached[group] += self._sizes[group]
                if self.news is not None:
                    self.news.append(block)
                if is_spent:
                    self.spend(block)

    def spend(self, block: int) -> None:
        """Let a cached block be reused first; one that is held or pinned stays as it is."""
        if not self._ref_counts[block] and block not in self._pinned:
            self.order.spend(block)

    def publish(self, group: int, key: bytes, block: int) -> None:
        """Make a held block findable, unless another one with this key is held or pinned, too.

        One that is only cached leaves its place to the new block, and its pages are blank: its own place in the order
        of reuse may be the first, while the new block is as useful as the rest of its request.
        """
        published = self._published[group]
        other = published.get(key)
        if other is not None and (self._ref_counts[other] or other in self._pinned):
            return
        if other is not None:
            self._hash_of[other] = None
            self._make_blank(other)
        published[key] = block
        self._hash_of[block] = key
        if self.news is not None:
            self.news.append(block)
        if self.events is not None and other is None:
            self.events.stored(Medium.DEVICE, (group, key))

    def taint(self, blocks: Iterable[int]) -> None:
        """Take held blocks out of the prefix cache; once free, their pages are dirty."""
        for block in blocks:
            self._tainted.add(block)
            self._unpublish(block)

    def expel(self, group: int, key: bytes) -> None:
        """Taint the published block with this key, if there is one, held or not."""
        block = self.find(group, key)
        if block is None:
            return
        if self._ref_counts[block]:
            self.taint([block])
        else:
            self.dirty += self.pages(block)
            self._unpublish(block)
            self._make_blank(block)

    def num_new(self, blocks: Iterable[int]) -> int:
        """Return the number of pages that are free now and would be held if these blocks were."""
        return sum(self._sizes[self._group_of[block]] for block in blocks if not self._ref_counts[block])

    def num_alone(self, blocks: Iterable[int]) -> int:
        """Return the number of pages that become free if a holder of each of these blocks releases it."""
        return sum(self._sizes[self._group_of[block]] for block in blocks if self._ref_counts[block] == 1)

    def check(self, held: dict[int, int]) -> None:
        """Assert invariant 1 (docs/explanation/architecture.md). held: the number of holders, by block."""
        assert self._ref_counts == [held.get(block, 0) for block in range(len(self._ref_counts))]
        cached = [*self.order.settled, *self.order.awaited, *self.order.kept]
        lent = self._blank.copy()
        for blocks, num_pages in ((held, self.num_held), (cached, self.num_cached)):
            counts = [0] * len(self._sizes)
            for block in blocks:
                pages, group = self.pages(block), self._group_of[block]
                assert len(pages) == self._sizes[group]
                counts[group] += len(pages)
                lent += pages
            assert counts == num_pages
        assert sorted(lent) == list(range(1, self.num_usable + 1))
        assert self.num_free == len(self._blank) + sum(self.num_cached)
        for group, published in enumerate(self._published):
            assert all(self._hash_of[block] == key for key, block in published.items())
            assert all(self._group_of[block] == group for block in published.values())
        assert len(self.published) == sum(key is not None for key in self._hash_of)
        assert all(self._hash_of[block] is not None for block in [*cached, *self._pinned])
        assert set(self.order.kept) == self._pinned.intersection(cached)
        self.order.check()
        assert not any(self._hash_of[block] for block in self._tainted)
        assert all(self._ref_counts[block] for block in self._tainted)

    def _lend(self, pages: list[int], kind: int) -> None:
        for page in pages:
            if self._kind_of[page] not in (0, kind):
                self.dirty.append(page)
            self._kind_of[page] = kind

    def _evict(self) -> int:
        """Make the pages of a cached block blank, and take the first."""
        block = self.order.pop()
        group, key = self._group_of[block], self._hash_of[block]
        assert key is not None
        self.evicted[group].add(key)
        self._unpublish(block)
        self.num_evictions[group] += 1
        self.num_cached[group] -= self._sizes[group]
        pages = self._pages_of.pop(block, None)
        if pages is not None:
            self._blank += pages[:0:-1]
        return block

    def _evict_pages(self, count: int) -> list[int]:
        """Do as _evict() so many times, where all blocks are a page, and so many are cached and not pinned."""
        hash_of, published = self._hash_of, self._published[0]
        blocks = self.order.pop_pages(count)
        for block in blocks:
            key, hash_of[block] = hash_of[block], None
            assert key is not None
            del published[key]
            self.evicted[0].add(key)
        self.num_evictions[0] += count
        self.num_cached[0] -= count
        return blocks

    def _make_blank(self, block: int) -> None:
        """Take a block that is no longer published out of the cache."""
        group = self._group_of[block]
        self.order.remove(block)
        self.num_cached[group] -= self._sizes[group]
        self._blank += reversed(self._pages_of.pop(block, (block,)))

    def _unpublish(self, block: int) -> None:
        key, self._hash_of[block] = self._hash_of[block], None
        if key is not None:
            group = self._group_of[block]
            del self._published[group][key]
            if self.events is not None:
                self.events.removed(Medium.DEVICE, (group, key))
            if block in self._pinned:
                self._pinned.remove(block)
                self.lost_pins.append(block)
