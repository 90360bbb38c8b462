"""HostTier: keeps published blocks in host memory, and brings them back for requests. Plain Python; never torch.

Blocks of any group are copied, named as in the prefix cache: keys and values, windows, saved states.

To the host: each step copies some blocks (CopyCosts): first those that were asked for (want()), then those that leave
the pool soon (LeavingBlocks), or all that were published (CopyQueue), as a disk and other engines need them. The
step holds them until its commit, and they can be found in host memory from then on.

From the host: when a request could be admitted, begin() looks for a longer hit with both tiers together. If it is worth
it, the tier takes pages for the missing blocks, and holds them with the blocks that the pool has: the request waits at
the gate, and others may be admitted meanwhile. Steps carry the copies. At their commits the blocks are published; with
the last one the tier releases all, as most recently used, and the request is admitted with an ordinary hit. They are
not held until then: what waits for pages must hold none. A block that several requests wait for is copied once.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from engine.core.cache_layout import CacheLayout
from engine.core.copy_costs import CopyCosts
from engine.core.copy_queue import CopyQueue
from engine.core.host_copies import Arrival, Gate, HostCopies
from engine.core.host_index import ON_HOST, BothTiers, HostIndex
from engine.core.kv_events import Name
from engine.core.leaving_blocks import LeavingBlocks
from engine.core.page_pool import PagePool
from engine.core.prefix_hits import Hit, PrefixFinder, hit_names
from engine.core.request import Request
from engine.interface.config import HostTierConfig


class HostTier:
    """Owns host memory's index, the queue of copies to it, and the gate. O(1) per block, but for begin()."""

    def __init__(self, config: HostTierConfig, layout: CacheLayout, pool: PagePool) -> None:
        self.index = HostIndex(num_slots=config.num_slots)
        self.gates: dict[Request, Gate] = {}
        self.num_stored = 0  # blocks
        self.num_asked = 0  # admissions that looked for a longer hit
        self.num_gates = 0  # of them: requests that began to wait for one
        self.num_found_tokens = 0  # by which hits were longer
        self.num_too_costly = 0  # of num_asked: computing is quicker, or pages are lacking
        self.num_given_up = 0  # gates that ended before their last copy
        self.page_s = config.page_s  # to copy a page from the host; 0: unknown
        self.num_pages_to_host = 0
        self.num_pages_from_host = 0
        self.waited_s = 0.0  # at the gate, over all requests
        self.costs = CopyCosts(config)
        self._layout = layout
        self._pool = pool
        self._finder = PrefixFinder(layout, self.both)
        self.storing: set[Name] = set()  # blocks on their way to host memory
        self.arriving: dict[Name, Arrival] = {}  # blocks on their way to the pool, or due
        self._due: deque[Arrival] = deque()  # not in a step yet; some may have lost their waiters
        self.on_stored: Callable[[Name], None] | None = None  # called with the blocks that can be found from now on
        self._queue = CopyQueue(layout, pool, self.index, self.storing, has_published=not config.copies_leaving)
        self.leaving = LeavingBlocks(config, layout, pool, self.index) if config.copies_leaving else None

    @property
    def both(self) -> BothTiers:
        """Finds blocks of the pool and of host memory."""
        return BothTiers(self._pool, self.index)

    @property
    def num_missed(self) -> int:
        """Blocks that were evicted without a copy, or will be: their copy came too late or exceeded the credit."""
        return self._queue.num_missed if self.leaving is None else self.leaving.num_dropped + self._pool.order.num_lost

    @property
    def has_copies(self) -> bool:
        """True if a step could carry copies."""
        is_left = self._queue.is_left or (self.leaving is not None and self.leaving.is_due)
        return bool(self._pool.news or self.gates or (is_left and not self._queue.is_stuck))

    def would_copy(self, *, is_idle: bool) -> bool:
        """Return whether plan() may have copies. is_idle: for a step without rows."""
        return bool(self._due or self._queue.wanted or self.leaving is None or self.leaving.would_look(is_idle=is_idle))

    def take_news(self) -> None:
        """Note what was published and released; before the pool reuses blocks."""
        self._queue.take_news()

    def want(self, name: Name) -> bool:
        """Copy a published block to the host before all others, whatever its kind; return False if it cannot come.

        It is lost if it is evicted first: ask again.
        """
        if name in self.storing or self.index.find(name) is not None:
            return True
        block = self._pool.find(*name)
        if block is None or len(self._pool.pages(block)) > self.index.num_slots:
            return False
        self._queue.wanted[name] = block
        return True

    def swap_out(self, request: Request) -> None:
        """Copy what a preempted request would find, and nobody else holds, before other blocks, if it is worth it."""
        self._queue.take_news()
        hit, pool = self._finder.find(request), self._pool
        if not hit.num_tokens:
            return
        missing = list(self._missing(request, hit))
        for index, blocks in enumerate(hit.blocks):
            names = hit_names(request, self._layout.groups[index], hit.num_tokens)
            missing += [name for name, block in zip(names, blocks, strict=True) if pool.is_cached(block)]
        num_pages = sum(self._layout.groups[index].pages for index, _ in missing)
        if self.costs.is_worth_swapping(num_tokens=hit.num_tokens, num_pages=num_pages):
            for name in missing:
                self.want(name)

    def is_coming(self, name: Name) -> bool:
        """Return whether a block that is not on the host yet is about to be copied there."""
        return name in self.storing or self._queue.wanted.get(name, -1) == self._pool.find(*name)

    def begin(self, request: Request, found: Hit, *, num_spare: int, now: float) -> bool:
        """Let a request wait for blocks if its hit becomes longer than `found` by enough; return whether it waits.

        num_spare: the pages that it may use. Once for each admission, so nothing can keep a request waiting for ever.
        """
        if request.has_waited:
            return False
        self.num_asked += 1
        if not self.index.num_blocks or not self._finder.may_find_more(request, found):
            return False
        hit = self._finder.find(request)
        gain = hit.num_tokens - found.num_tokens
        if gain <= 0:
            return False
        here = [block for blocks in hit.blocks for block in blocks if block != ON_HOST]
        missing = list(self._missing(request, hit))
        num_pages = sum(self._layout.groups[index].pages for index, _ in missing)
        growing = sum(len(hit.blocks[group.index]) * group.pages for group in self._layout.growing)
        needed = self._layout.num_pages(request.num_tokens) - growing + self._pool.num_new(here) + num_pages
        is_worth = self.costs.is_worth_swapping if request.num_preemptions else self.costs.is_worth_copying
        if needed > num_spare or not is_worth(num_tokens=gain, num_pages=num_pages):
            self.num_too_costly += 1
            return False
        request.has_waited = True
        request.found_here, request.found_in_all = found.num_tokens, hit.num_tokens
        self._open_gate(request, hit, now)
        return True

    def end_wait(self, request: Request, num_hit_tokens: int) -> int:
        """Return how many tokens of an admitted request's hit are owed to the host; rank its blocks."""
        if self.leaving is not None:
            request.copy_rank = self.leaving.rank(request, num_hit_tokens)
        if not request.has_waited:
            return 0
        request.has_waited = False
        num_tokens = max(min(num_hit_tokens, request.found_in_all) - request.found_here, 0)
        self.num_found_tokens += num_tokens
        return num_tokens

    def _open_gate(self, request: Request, hit: Hit, now: float) -> None:
        gate = self.gates[request] = Gate(request, now, [])
        self.num_gates += 1
        # all that is here is held before pages are taken, which may evict
        self._pool.hold(block for blocks in hit.blocks for block in blocks if block != ON_HOST)
        for index, blocks in enumerate(hit.blocks):
            names = hit_names(request, self._layout.groups[index], hit.num_tokens)
            for block, name in zip(blocks, names, strict=True):
                gate.held.append(block if block != ON_HOST else self._await(gate, name))
        assert gate.num_missing

    def _await(self, gate: Gate, name: Name) -> int:
        """Let a gate wait for a block from the host; return the block that is to receive it, with a holder more."""
        arrival = self.arriving.get(name)
        if arrival is None:
            source = self.index.find(name)
            assert source is not None
            self.index.begin_reading(source)
            arrival = self.arriving[name] = Arrival(source, self._pool.take(name[0]), [])
            self._due.append(arrival)
        else:
            self._pool.hold([arrival.block])
        arrival.waiters.append(gate)
        gate.arrivals.append(arrival)
        gate.num_missing += 1
        return arrival.block

    def plan(
        self, *, most: int, num_reserved: int, most_unasked: int | None = None, is_idle: bool = False
    ) -> HostCopies | None:
        """Return the copies of the step that is about to be launched, or None. Call it when its rows are planned.

        most: pages in each direction, see CopyCosts. num_reserved: running requests; for each a block stays free.
        most_unasked: pages to the host of blocks that nobody waits for; None: as many as of others; with LeavingBlocks
        their credit is the bound. is_idle: the step has no rows.
        """
        copies = HostCopies()
        num_left = most
        while self._due and num_left > 0:
            arrival = self._due.popleft()
            if not arrival.waiters:
                continue
            self._pool.hold([arrival.block])
            arrival.is_planned = True
            copies.arrivals.append(arrival)
            pages = self._pool.pages(arrival.block)
            copies.from_host += zip(arrival.source.slots, pages, strict=True)
            num_left -= len(pages)
        self._queue.take_news()
        num_left = most
        num_unasked = 0 if self.leaving is not None else most if most_unasked is None else most_unasked
        num_kept = num_reserved * self._layout.reserve
        while num_left > 0 and (self._queue.wanted or num_unasked > 0):
            is_wanted = bool(self._queue.wanted)
            store = self._queue.next_store(num_kept, is_wanted=is_wanted)
            if store is None:
                if is_wanted and not self._queue.wanted:
                    continue  # they need no copy any more
                break
            copies.stores.append(store)
            pages = self._pool.pages(store.block)
            copies.to_host += zip(pages, store.slots, strict=True)
            num_left -= len(pages)
            if not is_wanted:
                num_unasked -= len(pages)
                self.costs.spend(len(pages))
        if self.leaving is not None:
            num_spare = self._pool.num_free - num_kept
            stores, is_lacking = self.leaving.look(self.storing, most=num_left, num_spare=num_spare, is_idle=is_idle)
            copies.stores += stores
            for store in stores:
                copies.to_host += zip(self._pool.pages(store.block), store.slots, strict=True)
            if is_lacking:
                self._queue.note_lack()
        return copies if copies.stores or copies.arrivals else None

    def commit(self, copies: HostCopies, now: float) -> list[tuple[int, int]]:
        """Publish what a committed step has copied; return group and block of those that came from the host."""
        arrived: list[tuple[int, int]] = []
        for name, block, slots in copies.stores:
            self.storing.remove(name)
            if self._pool.find(*name) == block:
                self.index.add(name, slots)
                self.num_stored += 1
                self.num_pages_to_host += len(slots)
                if self.on_stored is not None:
                    self.on_stored(name)
            else:  # its values are not finite
                self.index.give_back(slots)
        for arrival in copies.arrivals:
            group, key = arrival.source.name
            if arrival.source.is_forgotten:
                self._pool.taint([arrival.block])
            elif self._pool.find(group, key) is None:
                self._pool.publish(group, key, arrival.block)
                if self.leaving is not None:
                    self.leaving.note_arrived(arrival.block)
                arrived.append((group, arrival.block))
            self.num_pages_from_host += len(arrival.source.slots)
            self._end_arrival(arrival)
        self._pool.release(copies.blocks)
        if self.leaving is not None:
            self.leaving.end(copies.stores)
        for gate in [gate for arrival in copies.arrivals for gate in arrival.waiters]:
            gate.num_missing -= 1
            if not gate.num_missing:
                self._close(gate, now)
        return arrived

    def drop(self, copies: HostCopies) -> None:
        """Forget the copies of a step that was given up; the requests that wait for them compute instead."""
        for store in copies.stores:
            self.storing.remove(store.name)
            self.index.give_back(store.slots)
        if self.leaving is not None:
            self.leaving.drop(copies.stores)
        for arrival in copies.arrivals:
            self._end_arrival(arrival)
            for gate in list(arrival.waiters):
                self._give_up(gate)
        self._pool.release(copies.blocks)

    def cancel(self, request: Request) -> None:
        """Let a request wait no longer, which ended or will be computed."""
        gate = self.gates.get(request)
        if gate is not None:
            self._give_up(gate)

    def give_up_newest(self) -> bool:
        """Let the newest request at the gate wait no longer, for its pages; return False if there is none.

        Pages that a step in flight writes become free at its commit.
        """
        if not self.gates:
            return False
        self._give_up(next(reversed(self.gates.values())))
        return True

    def forget(self, names: Iterable[Name]) -> None:
        """Let blocks no longer be found in host memory: their values are not finite, perhaps."""
        for name in names:
            self.index.forget(name)

    def blocks(self) -> Iterator[int]:
        """Return the blocks that the gates hold, each as often as it is held."""
        for gate in self.gates.values():
            yield from gate.held

    def check(self, copies: list[HostCopies], others: Iterable[int] = ()) -> None:
        """Assert invariant 5 (docs/explanation/architecture.md). copies: of the steps in flight.

        others: slots that are taken for something else.
        """
        stores = [store for step in copies for store in step.stores]
        self.index.check([*others, *(slot for store in stores for slot in store.slots)])
        assert sorted(store.name for store in stores) == sorted(self.storing)
        assert not any(self.index.find(name) for name in self.storing)
        in_flight = [arrival for step in copies for arrival in step.arrivals]
        due = [arrival for arrival in self._due if arrival.waiters]
        assert {id(arrival) for arrival in self.arriving.values()} == {id(arrival) for arrival in in_flight + due}
        for arrival in in_flight + due:
            assert arrival.source.num_readers > 0
            assert len(arrival.source.slots) == len(self._pool.pages(arrival.block))
            assert self._pool.key_of(arrival.block) is None, "it can be found before its copy has ended"
        for gate in self.gates.values():
            waiting = [arrival for arrival in in_flight + due if gate in arrival.waiters]
            assert gate.num_missing == len(waiting) > 0
            assert {arrival.block for arrival in waiting} <= set(gate.held)

    def _missing(self, request: Request, hit: Hit) -> Iterator[Name]:
        """Return the names of the blocks for which the hit needs pages."""
        for index, blocks in enumerate(hit.blocks):
            names = hit_names(request, self._layout.groups[index], hit.num_tokens)
            for block, name in zip(blocks, names, strict=True):
                if block == ON_HOST and name not in self.arriving:
                    yield name

    def _end_arrival(self, arrival: Arrival) -> None:
        del self.arriving[arrival.source.name]
        self.index.end_reading(arrival.source)

    def _give_up(self, gate: Gate) -> None:
        """End a gate. Copies that others wait for, or that are in flight, go on."""
        self.num_given_up += 1
        for arrival in gate.arrivals:
            if gate in arrival.waiters:
                arrival.waiters.remove(gate)
                if not arrival.waiters and not arrival.is_planned:
                    self._end_arrival(arrival)
        self._release(gate)

    def _close(self, gate: Gate, now: float) -> None:
        self.waited_s += now - gate.began_s
        num_pages = sum(len(arrival.source.slots) for arrival in gate.arrivals)
        self.costs.observe_gate(num_pages=num_pages, seconds=now - gate.began_s)
        self._release(gate)

    def _release(self, gate: Gate) -> None:
        del self.gates[gate.request]
        self._pool.release(reversed(gate.held))
