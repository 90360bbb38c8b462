"""CopyQueue: the blocks to copy to host memory that were asked for, and perhaps all that are published. Never torch.

PagePool lists the blocks that were published or that nobody holds any more (PagePool.news), if all are to be copied.
Those that nobody holds are copied first, since they can be evicted; the pool reuses blocks that wait for their turn
after those that need no copy, and one that is evicted nevertheless is lost. Spent blocks, and blocks of windows and
states that a request still holds, are not copied: most of them are never looked for.
"""

from collections import OrderedDict

from engine.core.cache_layout import CacheLayout
from engine.core.host_copies import Store
from engine.core.host_index import HostIndex
from engine.core.kv_events import Name
from engine.core.page_pool import PagePool


class CopyQueue:
    """Owns the queue. O(1) per block."""

    def __init__(
        self, layout: CacheLayout, pool: PagePool, index: HostIndex, storing: set[Name], *, has_published: bool
    ) -> None:
        """storing: names of blocks that steps copy. has_published: all published blocks are to be copied."""
        self.wanted: OrderedDict[Name, int] = OrderedDict()  # blocks to copy before all others
        self.num_missed = 0  # blocks that were evicted before they could be copied
        self._released: OrderedDict[Name, int] = OrderedDict()  # blocks that nobody holds: the next to go first
        self._held: OrderedDict[Name, int] = OrderedDict()  # blocks that requests hold
        self._is_full = [group.kind == "full" for group in layout.groups]
        self._pool = pool
        self._index = index
        self._storing = storing
        self._lacked_at = -1  # HostIndex.num_freed when a copy last found no slots
        if has_published:
            pool.news = []

    @property
    def is_left(self) -> bool:
        """True if blocks are to be copied, of those that were seen."""
        return bool(self.wanted or self._released or self._held)

    @property
    def is_stuck(self) -> bool:
        """True if there were no slots for a copy, and none has become free since."""
        return self._lacked_at == self._index.num_freed

    def note_lack(self) -> None:
        """Note that there are no slots for a copy."""
        self._lacked_at = self._index.num_freed

    def take_news(self) -> None:
        """Queue the blocks that were published or released since the last call. Before the pool reuses blocks."""
        pool, released, held = self._pool, self._released, self._held
        if pool.news is None:
            return
        news, pool.news = pool.news, []
        for block in news:
            key = pool.key_of(block)
            if key is None:
                continue  # evicted or tainted meanwhile
            name = (pool.group_of(block), key)
            if self._index.touch(name) or name in self._storing:
                continue
            if pool.is_cached(block):
                held.pop(name, None)
                released[name] = block
                released.move_to_end(name)
                pool.order.await_copy(block)
            elif self._is_full[name[0]] and released.get(name) != block:
                released.pop(name, None)  # of a block that was evicted
                held[name] = block
        if len(released) + len(held) > 2 * pool.num_usable:  # most of them are evicted
            for queue in (released, held):
                for name in [name for name, block in queue.items() if pool.find(*name) != block]:
                    del queue[name]
                    self.num_missed += 1

    def next_store(self, num_kept: int, *, is_wanted: bool) -> Store | None:
        """Take the next block to copy, of wanted ones or of the others, and slots for it; None: not now.

        num_kept: free pages that are not to be held.
        """
        pool = self._pool
        while queue := self.wanted if is_wanted else self._released or self._held:
            name, block = next(iter(queue.items()))
            is_spent = queue is not self.wanted and pool.is_spent(block)
            if pool.find(*name) != block or self._index.touch(name) or name in self._storing or is_spent:
                del queue[name]
                if pool.find(*name) == block:
                    pool.order.settle([block])
                self.num_missed += name[1] in pool.evicted[name[0]] and pool.find(*name) is None
                continue
            num_pages = len(pool.pages(block))
            if num_pages > self._index.num_slots:
                del queue[name]
                pool.order.settle([block])
                continue
            if pool.is_cached(block) and num_pages > pool.num_free - num_kept:
                return None
            slots = self._index.take(num_pages)
            if slots is None:  # all that host memory has is being read, as by a disk that hangs
                self.note_lack()
                return None
            del queue[name]
            self._storing.add(name)
            pool.hold([block])
            return Store(name, block, slots)
        return None
