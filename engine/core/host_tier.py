"""HostTier: keeps published blocks in host memory, and brings them back for requests. Plain Python; never torch.

Blocks of any group are copied, named as in the prefix cache: keys and values, windows, saved states.

To the host: PagePool lists the blocks that were published or that nobody holds any more (PagePool.news). Each step
copies some of them (CopyCosts), first those that nobody holds, since they can be evicted. The step holds them until
its commit, and they can be found in host memory from then on. The pool reuses blocks that wait for their turn after
those that need no copy; one that is evicted nevertheless is lost. Spent blocks, and blocks of windows and states that a
request still holds, are not copied: most of them are never looked for.

From the host: when a request could be admitted, begin() looks for a longer hit with both tiers together. If it is worth
it, the tier takes pages for the missing blocks, and holds them with the blocks that the pool has: the request waits at
the gate, and others may be admitted meanwhile. Steps carry the copies. At their commits the blocks are published; with
the last one the tier releases all, as most recently used, and the request is admitted with an ordinary hit. They are
not held until then: what waits for pages must hold none. A block that several requests wait for is copied once.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator

from engine.core.cache_layout import CacheLayout
from engine.core.copy_costs import CopyCosts
from engine.core.host_copies import Arrival, Gate, HostCopies, Store
from engine.core.host_index import ON_HOST, BothTiers, HostIndex
from engine.core.kv_events import Name
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
        self.num_missed = 0  # blocks that were evicted before they could be copied
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
        self._is_full = [group.kind == "full" for group in layout.groups]
        self._released: OrderedDict[Name, int] = OrderedDict()  # blocks to copy that nobody holds: the next to go first
        self._published: OrderedDict[Name, int] = OrderedDict()  # blocks to copy that requests hold
        self._wanted: OrderedDict[Name, int] = OrderedDict()  # blocks to copy before all others, see want()
        self.storing: set[Name] = set()  # blocks on their way to host memory
        self._lacked_at = -1  # HostIndex.num_freed when a copy to the host last found no slots
        self.arriving: dict[Name, Arrival] = {}  # blocks on their way to the pool, or due
        self._due: deque[Arrival] = deque()  # not in a step yet; some may have lost their waiters
        self.on_stored: Callable[[Name], None] | None = None  # called with the blocks that can be found from now on
        pool.news = []

    @property
    def both(self) -> BothTiers:
        """Finds blocks of the pool and of host memory."""
        return BothTiers(self._pool, self.index)

    @property
    def has_copies(self) -> bool:
        """True if a step could carry copies."""
        is_stuck = self._lacked_at == self.index.num_freed
        is_left = self._wanted or self._released or self._published
        return bool(self._pool.news or self.gates or (is_left and not is_stuck))

    def want(self, name: Name) -> bool:
        """Copy a published block to the host before all others, whatever its kind; return False if it cannot come.

        It is lost if it is evicted first: ask again.
        """
        if name in self.storing or self.index.find(name) is not None:
            return True
        block = self._pool.find(*name)
        if block is None or len(self._pool.pages(block)) > self.index.num_slots:
            return False
        self._wanted[name] = block
        return True

    def swap_out(self, request: Request) -> None:
        """Copy what a preempted request would find, and nobody else holds, before other blocks, if it is worth it."""
        self.take_news()
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
        return name in self.storing or (name in self._wanted and self._pool.find(*name) == self._wanted[name])

    def begin(self, request: Request, found: Hit, *, num_spare: int, now: float) -> bool:
        """Let a request wait for blocks if its hit becomes longer than `found` by enough; return whether it waits.

        num_spare: the pages that it may use. Once for each admission, so nothing can keep a request waiting for ever.
        """
        if request.has_waited:
            return False
        self.num_asked += 1
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
        """Return how many tokens of an admitted request's hit are owed to the host."""
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

    def plan(self, *, most: int, num_reserved: int, most_unasked: int | None = None) -> HostCopies | None:
        """Return the copies of the step that is about to be launched, or None. Call it when its rows are planned.

        most: pages in each direction, see CopyCosts. num_reserved: running requests; for each a block stays free.
        most_unasked: pages to the host of blocks that nobody waits for; None: as many as of others.
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
        self.take_news()
        num_left = most
        num_unasked = most if most_unasked is None else most_unasked
        while num_left > 0 and (self._wanted or num_unasked > 0):
            is_wanted = bool(self._wanted)
            store = self._next_store(num_reserved, is_wanted=is_wanted)
            if store is None:
                if is_wanted and not self._wanted:
                    continue  # they need no copy any more
                break
            copies.stores.append(store)
            pages = self._pool.pages(store.block)
            copies.to_host += zip(pages, store.slots, strict=True)
            num_left -= len(pages)
            if not is_wanted:
                num_unasked -= len(pages)
                self.costs.spend(len(pages))
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
                arrived.append((group, arrival.block))
            self.num_pages_from_host += len(arrival.source.slots)
            self._end_arrival(arrival)
        self._pool.release(copies.blocks)
        for gate in [gate for arrival in copies.arrivals for gate in arrival.waiters]:
            gate.num_missing -= 1
            if not gate.num_missing:
                self._close(gate, now)
        return arrived

    def drop(self, copies: HostCopies) -> None:
        """Forget the copies of a step that was given up; the requests that wait for them compute instead."""
        for name, _, slots in copies.stores:
            self.storing.remove(name)
            self.index.give_back(slots)
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

    def take_news(self) -> None:
        """Queue the blocks that were published or released since the last call. Before the pool reuses blocks."""
        pool = self._pool
        news, pool.news = pool.news or [], []
        for block in news:
            key = pool.key_of(block)
            if key is None:
                continue  # evicted or tainted meanwhile
            name = (pool.group_of(block), key)
            if self.index.touch(name) or name in self.storing:
                continue
            if pool.is_cached(block):
                self._published.pop(name, None)
                self._released[name] = block
                self._released.move_to_end(name)
                pool.await_copy(block)
            elif self._is_full[name[0]] and self._released.get(name) != block:
                self._released.pop(name, None)  # of a block that was evicted
                self._published[name] = block
        if len(self._released) + len(self._published) > 2 * pool.num_usable:  # most of them are evicted
            for queue in (self._released, self._published):
                for name in [name for name, block in queue.items() if pool.find(*name) != block]:
                    del queue[name]
                    self.num_missed += 1

    def _next_store(self, num_reserved: int, *, is_wanted: bool) -> Store | None:
        """Take the next block to copy, of wanted ones or of the others, and slots for it; None: not now."""
        pool = self._pool
        while queue := self._wanted if is_wanted else self._released or self._published:
            name, block = next(iter(queue.items()))
            is_spent = queue is not self._wanted and pool.is_spent(block)
            if pool.find(*name) != block or self.index.touch(name) or name in self.storing or is_spent:
                del queue[name]
                if pool.find(*name) == block:
                    pool.settle(block)
                self.num_missed += name[1] in pool.evicted[name[0]] and pool.find(*name) is None
                continue
            num_pages = len(pool.pages(block))
            if num_pages > self.index.num_slots:
                del queue[name]
                pool.settle(block)
                continue
            if pool.is_cached(block) and num_pages > pool.num_free - num_reserved * self._layout.reserve:
                return None
            slots = self.index.take(num_pages)
            if slots is None:  # all that host memory has is being read, as by a disk that hangs
                self._lacked_at = self.index.num_freed
                return None
            del queue[name]
            self.storing.add(name)
            pool.hold([block])
            return Store(name, block, slots)
        return None

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
