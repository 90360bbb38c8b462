"""KvCaches: lends pages to requests, for every kind of cache, and finds what earlier requests computed. Never torch.

A request has one BlockTable per group of layers (CacheGroup). The scheduler counts tokens and pages and names no kind:

    admit → (fit → begin_row → commit_row) per row … → free

admit() holds the blocks of the longest hit, and blocks of full groups for all tokens. fit() says where a row may end,
begin_row() takes the blocks that it writes. commit_row() publishes those that are full, then releases those that have
left a window: every later row starts at the committed end or behind it, also one in flight. Blocks are published at
commit only, so the keys and values of a hit always exist, and those of steady requests later (LateBlocks).
States are copied (engine/core/checkpoints.py): a StepKv has the copies of a step, and what it holds until end_step().
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

import msgspec

from engine.core.cache_layout import NEVER, CacheLayout, GroupLayout
from engine.core.checkpoints import Checkpoints, Save, StepKv
from engine.core.kv_events import KvEvents
from engine.core.late_blocks import LateBlocks, publish_next
from engine.core.lower_tiers import LowerTiers, TierTokens
from engine.core.page_pool import PagePool
from engine.core.pins import Pins
from engine.core.prefix_hits import Hit, PrefixFinder
from engine.core.prefix_misses import PrefixMisses
from engine.core.request import BlockTable, Request
from engine.core.steady_rows import SteadyRows
from engine.interface.config import SchedulerConfig
from engine.interface.protocol import CacheReport


class KvCaches:
    """Owns the pool of pages and the tables of all requests. Every operation is O(1) per block."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.layout = CacheLayout(config)
        self.pool = PagePool(config.cache_groups, num_pages=config.num_pages)
        self.max_num_tokens = self.layout.max_num_tokens(num_pages=self.pool.num_usable, most=config.max_model_len)
        has_tiers = config.host_tier is not None and config.enable_prefix_caching
        self.tiers = LowerTiers(config.host_tier if has_tiers else None, self.layout, self.pool)
        # pages of requests that go on, or of copies
        self.events: KvEvents | None = None  # described to: the blocks that are published
        self.gives_back_at_commit = bool(self.layout.windows or self.layout.states or has_tiers)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_limited_tokens: Counter[str] = Counter()  # by kind: tokens of the full groups' hits that it lacked
        self.num_by_reason: Counter[str] = Counter()  # requests, by why no more of their prompt was found
        self.late = LateBlocks(self.commit_row, self.layout, self.pool)
        self._finder = PrefixFinder(self.layout, self.pool, self.late)
        self._misses = PrefixMisses(self.layout, self.pool)
        self.checkpoints = Checkpoints(self.layout, self.pool)
        self._growing = self.layout.growing
        self._most_pages = self.layout.most_pages
        self._is_caching = config.enable_prefix_caching
        self.pins = Pins(self.layout, self.pool, self._finder, self.tiers, share=config.pin_share * self._is_caching)

    def admit(self, request: Request, *, num_reserved: int = 0, now: float = 0.0) -> bool:
        """Hold what a waiting request needs before its first row; set num_computed_tokens to the hit.

        The last token is never taken from the cache: it must be computed to sample the next one. Returns False and
        changes nothing if no block would remain free for each of num_reserved running requests, or if the request
        begins to wait for blocks from a lower tier.
        """
        pool, layout = self.pool, self.layout
        num_spare = pool.num_free - num_reserved * layout.reserve
        if num_spare <= 0:
            return False
        request.unpack_prompt()  # now its tokens are needed
        nothing = Hit(0, [[] for _ in layout.groups])
        hit = found = self._finder.find(request) if self._is_caching else nothing
        if self._num_pages(request, hit) > num_spare:
            # a saved state and the live one are two: a hit must not keep a request from running alone
            if num_reserved or not layout.states or self._num_pages(request, nothing) > num_spare:
                return False
            hit = nothing
        elif self.tiers.begin(request, found, num_spare=num_spare, now=now):
            return False
        for blocks in hit.blocks:
            pool.hold(blocks)
        request.tables = [self._new_table(group, hit) for group in layout.groups]
        self.checkpoints.begin(request, hit)
        for group in layout.full:
            blocks = request.tables[group.index].blocks
            blocks += pool.take_blocks(group.index, group.num_blocks(request.num_tokens) - len(blocks))
        request.num_held_tokens = self._num_held_tokens(request)
        request.num_computed_tokens = hit.num_tokens
        self._set_marks(request, hit)
        self.commit_row(request, hit.num_tokens)
        from_tiers = self.tiers.end_wait(request, hit.num_tokens)
        if not (request.num_preemptions or request.num_replayed_tokens):
            self._record_lookup(request, found, hit, from_tiers)
        return True

    def begin_step(self) -> StepKv:
        """Begin to plan a step."""
        self.tiers.take_news()
        return StepKv(self.pool.dirty)

    def fit(self, request: Request, end: int, *, num_reserved: int) -> int:
        """Return where a row may end that should end at `end`, with a block free for each of num_reserved requests.

        It may be the row's start: not now.
        """
        if self.layout.states and not request.is_decoding:
            end = self.checkpoints.end_of_chunk(request, end)
        held = request.num_held_tokens
        if end <= held:
            return end
        num_spare = self.pool.num_free - num_reserved * self.layout.reserve
        if self.num_missing(request, end) <= num_spare:
            return end
        low, high = max(held, request.num_computed_tokens), end - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.num_missing(request, middle) <= num_spare else (low, middle - 1)
        return low

    def num_missing(self, request: Request, end: int) -> int:
        """Return the number of pages that a row that ends at `end` takes."""
        num_pages = 0
        for group in self.layout.growing:
            num_blocks = -(-end // group.tokens) - request.tables[group.index].end
            if num_blocks > 0:
                num_pages += num_blocks * group.pages
        return num_pages

    @property
    def num_free_rows(self) -> int:
        """The number of decode rows that certainly have room."""
        return self.pool.num_free // max(self._most_pages, 1)

    def has_room(self, request: Request) -> bool:
        """Return whether enough pages are free for the request's next token."""
        num_free = self.pool.num_free
        return num_free >= self._most_pages or self.num_missing(request, request.num_computed_tokens + 1) <= num_free

    def begin_row(
        self, request: Request, end: int, step: StepKv, *, num_reserved: int
    ) -> list[tuple[int, int, list[int]]]:
        """Take the blocks of a row that ends at `end`, for which fit() or has_room() found room.

        Returns RowPlan.new_blocks: all entries that were added to the request's tables since its last row. States are
        saved while a block stays free for each of num_reserved running requests.
        """
        added: list[tuple[int, int, list[int]]] = []
        num_held = NEVER
        for group in self._growing:
            table = request.tables[group.index]
            blocks, num_tokens = table.blocks, group.tokens
            num_columns = table.first + len(blocks)
            while num_columns * num_tokens < end:
                blocks.append(self.pool.take(group.index))
                num_columns += 1
            if num_columns * num_tokens < num_held:
                num_held = num_columns * num_tokens
            if table.num_sent < num_columns:
                self._add_entries(added, table, group)
                table.num_sent = num_columns
        request.num_held_tokens = num_held
        if self.layout.states:
            added += self.checkpoints.begin_row(request, step, num_reserved=num_reserved)
        return added

    def extend(self, requests: Sequence[Request], step: StepKv) -> list[tuple[int, int, int, list[int]]]:
        """Begin decode rows that start behind all that their requests hold, for which there is room.

        Returns SteadyRowsPlan.new_blocks.
        """
        if not self.late.is_simple:
            return [
                (request.req_index, *entry)
                for request in requests
                for entry in self.begin_row(request, request.num_held_tokens + 1, step, num_reserved=0)
            ]
        added, tokens = [], self._growing[0].tokens
        taken = self.pool.take_blocks(0, len(requests))
        for request, block in zip(requests, taken, strict=True):  # as begin_row() does
            table = request.tables[0]
            blocks = table.blocks
            column = len(blocks)
            blocks.append(block)
            table.num_sent = column + 1
            request.num_held_tokens += tokens
            added.append((request.req_index, 0, column, [block]))
        return added

    def save_in_answer(self, request: Request, step: StepKv, *, num_reserved: int) -> None:
        """Save states before a decode row, which is planned for sure. Needed from request.next_save_tokens on."""
        self.checkpoints.save_in_answer(request, step, num_reserved=num_reserved)

    def commit_row(self, request: Request, end: int) -> None:
        """Publish and release blocks, now that the first `end` tokens are committed.

        Needed only from request.next_due_tokens on.
        """
        self.late.discard(request)
        next_due = NEVER
        for group in self._growing:
            table = request.tables[group.index]
            if self._is_caching:
                due = (table.num_published + 1) * group.tokens
                if due <= end:
                    self._publish(request, table, group, end)
                    due = (table.num_published + 1) * group.tokens
                if due < next_due:
                    next_due = due
            if group.is_window:
                first = group.first_block(end)
                if first > table.first:
                    self._release_until(first, request, table, group)
                next_due = min(next_due, group.last_start(table.first) + 1)
        request.next_due_tokens = next_due

    def commit_steady(self, rows: SteadyRows) -> None:
        """Publish and release blocks of the steady requests for which they are due, or let them be late."""
        requests = rows.committed()
        is_simple = self.late.is_simple and self.events is None  # which commit_row() describes the blocks to
        is_late = self.late.can_wait
        for request in requests:
            num_committed, due = rows.num_committed_tokens(request), request.next_due_tokens
            if is_late and num_committed >= due:
                self.late.add(request)
            elif is_simple and num_committed == due and publish_next(request, self.pool, self.layout.unit):
                continue
            elif num_committed >= due:
                self.commit_row(request, num_committed)
        rows.visit_after_commit([request for request in requests if request.late_prefix is None])

    def end_step(self, step: StepKv, published: Iterable[Save] = ()) -> None:
        """Release what a step held, when it is committed or given up; publish these of the states that it saved."""
        if step.saves or step.restored:
            self.checkpoints.end_step(step, published)

    def commit_copies(self, step: StepKv, now: float) -> None:
        """Publish what a committed step has copied from and to the host, after taint() and end_step()."""
        for group, block in self.tiers.commit(step.host, now):
            if self.layout.groups[group].kind == "state":
                self.checkpoints.adopt(block)

    def free(self, request: Request) -> None:
        """Release the request's blocks. Its last blocks are reused first, unpublished blocks before all published."""
        self.late.publish(request)
        last = max([0, request.checkpoint, *request.marks]) if self.layout.states else NEVER
        self.checkpoints.touch(request)
        for group in reversed(self.layout.groups):
            table = request.tables[group.index]
            first_of_answer = request.num_prompt_tokens // group.tokens
            if self._is_explained(group) and first_of_answer < table.num_published:
                self._misses.note_published(request, range(first_of_answer, table.num_published))
            num_spent = max(table.end - max(-(-last // group.tokens), table.first), 0)  # that no hit can reach
            self.pool.release(table.blocks[: -num_spent - 1 : -1], is_spent=True)
            self.pool.release(reversed(table.blocks[: len(table.blocks) - num_spent]), rank=request.copy_rank)
        self.pool.release(block for _, block in request.restores)
        request.tables, request.restores = [], []
        self.pins.keep(request)
        request.num_computed_tokens = request.num_held_tokens = request.next_due_tokens = 0
        self.tiers.note_freed(request)

    def taint(self, requests: list[Request]) -> None:
        """Take the requests' blocks out of the prefix cache, the hits too; once free, their pages are zeroed."""
        for request in requests:
            self.late.discard(request)
            self.pool.taint(_blocks(request))
            self.checkpoints.taint(request)
            for group in self.layout.windows:  # those that left it
                num_left = min(request.tables[group.index].first, len(request.block_hashes) // group.links)
                for column in range(num_left):
                    self.pool.expel(group.index, request.block_hashes[(column + 1) * group.links - 1])
            self.tiers.forget((group.index, key) for group in self.layout.groups for key in request.block_hashes)

    def num_held_alone(self, request: Request) -> int:
        """Return the number of pages that become free when this request's blocks are freed."""
        return self.pool.num_alone(_blocks(request))

    def pages_by_kind(self) -> list[tuple[str, int, int]]:
        """Return the kinds of groups, and of each the pages that are held, and those that only the cache has."""
        counts: dict[str, tuple[int, int]] = {}
        for group in self.layout.groups:
            held, cached = counts.get(group.kind, (0, 0))
            counts[group.kind] = held + self.pool.num_held[group.index], cached + self.pool.num_cached[group.index]
        return [(kind, *pages) for kind, pages in counts.items()]

    def state_events(self) -> dict[str, int]:
        """Return how many states were saved, not saved for want of pages, restored and overwritten."""
        evicted = sum(self.pool.num_evictions[group.index] for group in self.layout.states)
        return self.checkpoints.counts() | {"evicted": evicted}

    def check(self, requests: Mapping[Request, int], steps: Iterable[StepKv] = ()) -> None:
        """Assert invariants 1 and 2 (docs/explanation/architecture.md) of all requests and steps that hold blocks.

        requests: with the number of committed tokens of each.
        """
        steps = list(steps)
        held = Counter(block for request in requests for block in _blocks(request))
        held.update(block for step in steps for block in step.blocks)
        copies = [step.host for step in steps]
        held.update(self.tiers.blocks(copies))
        for save in chain.from_iterable(step.saves for step in steps):
            assert save.num_tokens % self.layout.step == 0
            assert held[save.block] == 1
        self.pool.check(held)
        self.tiers.check(copies)
        self.pins.check()
        for request in self.late.requests():
            assert request.next_due_tokens <= requests[request]
        for request, num_committed in requests.items():
            assert len(set(_blocks(request))) == sum(len(table.blocks) for table in request.tables)
            assert request.num_computed_tokens <= request.num_held_tokens == self._num_held_tokens(request)
            for group in self.layout.growing:
                table = request.tables[group.index]
                assert table.num_sent <= table.end
                assert table.num_published * group.tokens <= request.num_computed_tokens
                if request.finish_reason is None:
                    assert table.first == group.first_block(num_committed)
                for column, block in enumerate(table.blocks, table.first):
                    if held[block] > 1 and not self.pool.is_tainted(block):
                        assert column < table.num_published
                        key = request.block_hashes[(column + 1) * group.links - 1]
                        assert self.pool.find(group.index, key) == block

    def _record_lookup(self, request: Request, found: Hit, hit: Hit, from_tiers: TierTokens) -> None:
        """Count a request's first admission, and tell it why its hit is not longer. hit: what it took of `found`."""
        if not self._is_caching:
            request.cache_report = CacheReport("off", 0, 0)
            return
        self.num_queried_tokens += request.num_tokens
        self.num_hit_tokens += hit.num_tokens
        if self.layout.full:
            self.num_limited_tokens.update(dict(hit.limits))
        report = self._misses.explain(request, found, is_taken=hit is found)
        host, disk = from_tiers
        request.cache_report = msgspec.structs.replace(report, num_host_tokens=host, num_disk_tokens=disk)
        self.num_by_reason[request.cache_report.reason] += 1

    def _num_pages(self, request: Request, hit: Hit) -> int:
        """Return the free pages that the request needs, those of the hit included."""
        held = sum(len(hit.blocks[group.index]) * group.pages for group in self.layout.growing)
        new = self.pool.num_new(chain.from_iterable(hit.blocks))
        return self.layout.num_pages(request.num_tokens) - held + new

    def _new_table(self, group: GroupLayout, hit: Hit) -> BlockTable:
        first = group.first_block(hit.num_tokens)
        return BlockTable(hit.blocks[group.index], first, hit.num_tokens // group.tokens, first)

    def _set_marks(self, request: Request, hit: Hit) -> None:
        """Mark the end of the prompt, and where the full groups know a prefix of which the others have lost the end."""
        step = self.layout.step
        request.parting_point = self._misses.parting_point(request, hit)
        marks = {(request.num_prompt_tokens - 1) // step * step, request.parting_point}
        request.marks = sorted(mark for mark in marks if mark > hit.num_tokens) if self._is_caching else []
        is_saving = self._is_caching and self.layout.states and request.embedding is None
        request.next_save_tokens = self.checkpoints.next_save(request.num_tokens) if is_saving else NEVER

    def _num_held_tokens(self, request: Request) -> int:
        return min(
            (request.tables[group.index].end * group.tokens for group in self.layout.growing),
            default=NEVER,
        )

    def _add_entries(self, added: list[tuple[int, int, list[int]]], table: BlockTable, group: GroupLayout) -> None:
        """Add the entries that no plan has listed yet."""
        column, blocks = table.num_sent, table.blocks[table.num_sent - table.first :]
        if group.pages == 1:
            added.append((group.first_table, column, blocks))
            return
        pages = zip(*(self.pool.pages(block) for block in blocks), strict=True)
        added += [(group.first_table + i, column, list(column_pages)) for i, column_pages in enumerate(pages)]

    def _is_explained(self, group: GroupLayout) -> bool:
        """Return whether the group is the one whose blocks tell where prefixes part."""
        return bool(self.layout.full) and group is self.layout.full[0]

    def _publish(self, request: Request, table: BlockTable, group: GroupLayout, end: int) -> None:
        hashes, links, num_full = request.block_hashes, group.links, end // group.tokens
        if len(hashes) < num_full * links:
            request.extend_hashes(end, unit=self.layout.unit)
        if self._is_explained(group) and (table.num_published + 1) * group.tokens <= request.num_prompt_tokens:
            self._misses.note_published(request, range(table.num_published, num_full))  # those of the answer: free()
        if self.events is not None:
            self.events.describe(request, group, range(table.num_published, num_full))
        for column in range(table.num_published, num_full):
            self.pool.publish(group.index, hashes[(column + 1) * links - 1], table.blocks[column - table.first])
            table.num_published = column + 1

    def _release_until(self, first: int, request: Request, table: BlockTable, group: GroupLayout) -> None:
        """Release the blocks before column `first`. Those before no mark are reused first."""
        kept = [range(group.first_block(mark), mark // group.tokens) for mark in request.marks]
        for column in range(table.first, first):
            is_kept = any(column in columns for columns in kept)
            self.pool.release((table.blocks[column - table.first],), is_spent=not is_kept, rank=request.copy_rank)
        del table.blocks[: first - table.first]
        table.first = first


def _blocks(request: Request) -> Iterator[int]:
    return chain.from_iterable(table.blocks for table in request.tables)
