"""LateBlocks: steady requests with full blocks that are not published in the prefix cache yet. Never torch.

Publishing a block costs a link of the chain of hashes and cache misses, in every step for 1/16 of the rows, and most
blocks of answers are looked for by nobody while the answer grows. For those of a prompt it would delay the first token.
So blocks are published when a lookup comes to the prefix that they follow, while the loop would wait for the device, or
when the request is no longer steady: its next commit_row(), or KvCaches.free(), does it.
A request's life here: add() when its prompt is committed, or its first block is full → one of these → SteadyRows has it
visited when the next block is full → add() again.
"""

from collections.abc import Callable

from engine.core.cache_layout import CacheLayout
from engine.core.page_pool import PagePool
from engine.core.request import Request, link_hash


class LateBlocks:
    """Owns who is late, by the prefix that their first late block follows."""

    def __init__(self, commit_row: Callable[[Request, int], None], layout: CacheLayout, pool: PagePool) -> None:
        """commit_row: KvCaches.commit_row, which discards the request here."""
        group, *others = layout.groups
        # one table, whose blocks never leave it, and are a page and a link each
        self.is_simple = not others and group in layout.full and group.pages == group.links == 1
        self._commit_row = commit_row
        self._pool = pool
        self._by_prefix: dict[bytes, dict[Request, None]] = {}  # in the order of add()

    @property
    def can_wait(self) -> bool:
        """True if nobody else is told of published blocks."""
        return self.is_simple and self._pool.events is None and self._pool.news is None

    def add(self, request: Request) -> None:
        """Add a request with one table, of one link a block, that is not here."""
        num_published = request.tables[0].num_published
        prefix = request.block_hashes[num_published - 1] if num_published else request.root_hash()
        self._by_prefix.setdefault(prefix, {})[request] = None
        request.late_prefix = prefix

    def commit_row(self, request: Request, end: int) -> None:
        """Do as KvCaches.commit_row(), or let the blocks be late: those of a prompt, whose first token is not sent."""
        if request.steady is not None and self.can_wait:
            self.add(request)
        else:
            self._commit_row(request, end)

    def discard(self, request: Request) -> None:
        """Remove a request, if it is here."""
        if request.late_prefix is None:
            return
        requests = self._by_prefix[request.late_prefix]
        del requests[request]
        if not requests:
            del self._by_prefix[request.late_prefix]
        request.late_prefix = None

    def publish(self, request: Request) -> None:
        """Publish all late blocks of a request, if it is here."""
        if request.late_prefix is None:
            return
        rows = request.steady
        self._commit_row(request, request.left_tokens if rows is None else rows.num_committed_tokens(request))
        if rows is not None and request.commit_visit < rows.num_committed:  # else it will be looked at, and then again
            rows.visit_after_commit([request])

    def publish_after(self, prefix: bytes) -> None:
        """Publish the late blocks that follow a prefix."""
        for request in [*self._by_prefix.get(prefix, ())]:
            self.publish(request)

    def publish_while(self, has_time: Callable[[], bool]) -> None:
        """Publish late blocks, those of the first prefix first, while has_time(), which is asked for each request."""
        while self._by_prefix and has_time():
            self.publish(next(iter(next(iter(self._by_prefix.values())))))

    def requests(self) -> list[Request]:
        """Return all requests that are here."""
        return [request for requests in self._by_prefix.values() for request in requests]


def publish_next(request: Request, pool: PagePool, unit: int) -> bool:
    """Publish the next block of a request with one table, if it is of the answer alone; return whether it was.

    unit: tokens of a block. As KvCaches.commit_row() does, in less time.
    """
    (table,), hashes = request.tables, request.block_hashes
    num_published = table.num_published
    first = num_published * unit - request.num_prompt_tokens
    if first < 0 or not hashes or len(hashes) != num_published:
        return False
    key = link_hash(hashes[-1], request.output_token_ids[first : first + unit])
    hashes.append(key)
    pool.publish(0, key, table.blocks[num_published])
    table.num_published = num_published + 1
    request.next_due_tokens += unit
    return True
