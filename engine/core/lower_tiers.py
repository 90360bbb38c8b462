"""LowerTiers: what is behind the pool of pages, host memory and a disk, as KvCaches and the scheduler see it.

    KvCaches → LowerTiers ┬ HostTier ┬ HostIndex        what host memory has, and in which slots
                          │          ├ CopyQueue        what goes there: what was asked for, or all that is published,
                          │          └ LeavingBlocks    or what leaves the pool soon
                          └ DiskTier, Arrivals, Offers  a disk, and other engines
Plain Python; never torch. Both tiers may be missing; a disk needs host memory, through which its blocks pass. A
decode engine takes blocks of prefill engines into its host memory, too. A request that could be admitted waits first
for blocks of another engine or from the disk, then for blocks from the host, and is then admitted with an ordinary hit:
begin → is_waiting until it is not → end_wait. Steps carry the copies between host and pool: plan → commit, or drop.
"""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from engine.core.arrivals import Arrivals, LinksToPrefill
from engine.core.cache_layout import CacheLayout
from engine.core.disk_tier import DiskParts, DiskTier, HostPins
from engine.core.host_copies import HostCopies, SlotSource
from engine.core.host_tier import HostTier
from engine.core.kv_events import KvEvents, Name
from engine.core.offers import LinksToDecode, Offers
from engine.core.page_pool import PagePool
from engine.core.prefix_hits import Hit
from engine.core.request import Request
from engine.interface.config import HostTierConfig
from engine.peers.kv_transport import KvTransport

if TYPE_CHECKING:
    from engine.core.planned_step import PlannedStep
    from engine.core.queue_forecast import QueueForecast


class TierTokens(NamedTuple):
    """The tokens of a hit whose blocks came from host memory, and those of them that the disk had given it."""

    host: int
    disk: int


class LowerTiers:
    """Owns the tiers; see the module."""

    def __init__(self, config: HostTierConfig | None, layout: CacheLayout, pool: PagePool) -> None:
        """config: None: neither host memory nor a disk."""
        self.host = None if config is None else HostTier(config, layout, pool)
        self.disk: DiskTier | None = None
        self.host_pins: HostPins | None = None  # which the disk shares
        self.offers: Offers | None = None  # of a prefill engine
        self.arrivals: Arrivals | None = None  # of a decode engine
        self._growing: SlotSource | None = None  # while slots of host memory become ready
        # preempted requests that were admitted again: with blocks from the host, or without
        self.num_resumed: Counter[str] = Counter()
        self.num_resumed_tokens: Counter[str] = Counter()  # theirs, by where they came from
        self._pool = pool
        self._config = config
        self._layout = layout

    def follow(self, slots: SlotSource) -> None:
        """Take only slots of host memory that are ready, as they become it. Before the first request."""
        if self.host is not None:
            self._growing = slots
            self._take_ready()

    def open_disk(self, parts: DiskParts) -> None:
        """Put a disk behind host memory, which there must be. Before the first request."""
        assert self.host is not None
        assert self._config is not None
        self.disk = DiskTier(
            parts,
            self._layout,
            self.host.index,
            faster=self.host.both,
            storing=self.host.storing,
            token_s=self._config.token_s,
            host_pins=self.host_pins,
        )
        self.host.on_stored = self.disk.write

    def report_to(self, events: KvEvents) -> None:
        """Tell of the blocks that can be found in these tiers. Before the first request; a disk is open."""
        if self.host is not None:
            self.host.index.events = events
        if self.disk is not None:
            self.disk.events = events

    def open_offers(self, links: LinksToDecode) -> None:
        """Give the blocks of prompts to decode engines. Host memory must exist. Before the first request."""
        assert self.host is not None
        self.offers = Offers(links, self._layout, self.host)

    def open_arrivals(self, links: LinksToPrefill, transport: KvTransport, *, slot_bytes: int) -> None:
        """Take the blocks of prompts from prefill engines. Host memory must exist. Before the first request."""
        assert self.host is not None
        self.arrivals = Arrivals(
            links,
            transport,
            self._layout,
            self._pool,
            self.host.index,
            storing=self.host.storing,
            slot_bytes=slot_bytes,
            forget=self._expel,
        )

    def queued(self, request: Request) -> None:
        """Note a request that was queued."""
        if self.offers is not None:
            self.offers.begin(request)

    def begin(self, request: Request, found: Hit, *, num_spare: int, now: float) -> bool:
        """Let a request wait for blocks if its hit becomes longer than `found` by enough; return whether it waits.

        num_spare: the pages that it may use.
        """
        if self.host is None:
            return False
        if self.arrivals is not None and self.arrivals.begin(request, now):
            return True
        if self.disk is not None and self.disk.begin(request, now):
            return True
        return self.host.begin(request, found, num_spare=num_spare, now=now)

    def end_wait(self, request: Request, num_hit_tokens: int) -> TierTokens:
        """Return how many tokens of an admitted request's hit are owed to these tiers."""
        num_host = 0 if self.host is None else self.host.end_wait(request, num_hit_tokens)
        num_disk = 0 if self.disk is None else self.disk.end_wait(request, num_hit_tokens)
        if request.num_preemptions:
            self.num_resumed["swapped" if num_host else "computed"] += 1
            self.num_resumed_tokens["host"] += num_host
            self.num_resumed_tokens["pool"] += num_hit_tokens - num_host
            self.num_resumed_tokens["computed"] += request.num_tokens - num_hit_tokens
        return TierTokens(num_host, min(num_disk, num_host))

    def is_waiting(self, request: Request) -> bool:
        """Return whether a waiting request waits for blocks, before it can be admitted."""
        if self.disk is not None and request in self.disk.waits:
            return True
        if self.arrivals is not None and request in self.arrivals.waits:
            return True
        return self.host is not None and request in self.host.gates

    @property
    def num_waiting(self) -> int:
        """Requests that wait for blocks."""
        return (0 if self.host is None else len(self.host.gates)) + self.num_outside

    @property
    def num_outside(self) -> int:
        """Of them, those that wait for the disk or for a prefill engine: no step can do anything for them."""
        num_at_disk = 0 if self.disk is None else len(self.disk.waits)
        return num_at_disk + (0 if self.arrivals is None else len(self.arrivals.waits))

    @property
    def is_polled(self) -> bool:
        """True if something may come between two steps: there is a disk, or another engine, or slots become ready."""
        is_growing = self._growing is not None
        return is_growing or self.disk is not None or self.arrivals is not None or self.offers is not None

    def num_missing(self, request: Request) -> tuple[int, int]:
        """Return how many blocks a request waits for: those on their way from the host, and those from the disk."""
        gate = None if self.host is None else self.host.gates.get(request)
        wait = None if self.disk is None else self.disk.waits.get(request)
        return 0 if gate is None else gate.num_missing, 0 if wait is None else wait.num_missing

    @property
    def is_urgent(self) -> bool:
        """True if copies to the host should not wait for a step with rows: another engine waits for them."""
        return self.offers is not None and self.offers.is_urgent

    @property
    def is_exchanging(self) -> bool:
        """True while blocks are given to another engine, or taken of one."""
        is_taking = self.arrivals is not None and self.arrivals.is_active
        return is_taking or (self.offers is not None and self.offers.is_active)

    @property
    def is_lending(self) -> bool:
        """True while another engine may read blocks of host memory that were offered to it."""
        return self.offers is not None and self.offers.num_open > 0

    def cancel(self, request: Request) -> None:
        """Let a request that ends no longer wait, if it does."""
        if self.host is not None:
            self.host.cancel(request)
        if self.disk is not None:
            self.disk.cancel(request)
        if self.arrivals is not None:
            self.arrivals.cancel(request)

    def give_up_newest(self) -> bool:
        """Let a request wait no longer for blocks from the host, for its pages; return False if none does."""
        return self.host is not None and self.host.give_up_newest()

    def poll(self, now: float) -> None:
        """Take what the disk and other engines have done, and slots that are ready. Does not wait."""
        if self._growing is not None:
            self._take_ready()
        if self.disk is not None:
            self.disk.poll(now)
        if self.arrivals is not None:
            self.arrivals.poll(now)
        if self.offers is not None:
            self.offers.poll(now)

    @property
    def has_copies(self) -> bool:
        """True if a step could carry copies from or to the host, though nothing runs."""
        return self.host is not None and self.host.has_copies

    def copy_pinned(self, names: Iterable[Name]) -> None:
        """Copy pinned blocks to the host, which leave the pool after all others, and perhaps all at once."""
        if self.host is not None and self.host.leaving is not None:
            self.host.leaving.want_pinned(names)

    def note_freed(self, request: Request) -> None:
        """Note a request whose blocks were released: one that was preempted may need them again soon."""
        if self.host is not None and request.finish_reason is None:
            self.host.swap_out(request)

    def end_commit(self, now: float, forecast: "QueueForecast") -> None:
        """Take what other engines have done, if they wait for blocks of prompts, and learn what prompts take."""
        if self.offers is not None:  # now, so that blocks of a whole prompt go first
            self.poll(now)
        if self.host is not None:
            seconds, num_tokens = forecast.prompt_cost
            self.host.costs.observe_prompts(seconds=seconds, num_tokens=num_tokens)
            self.host.costs.observe_commit(now)
            if self.host.leaving is not None:
                self.host.leaving.observe_commit(now)

    def take_news(self) -> None:
        """Note what was published and released; before the pool lends pages of blocks that nobody holds."""
        if self.host is not None:
            self.host.take_news()

    def plan(self, step: "PlannedStep", *, num_reserved: int) -> HostCopies | None:
        """Return the copies of a step whose rows are planned; see HostTier.plan."""
        if self.host is None:
            return None
        num_prompt_tokens, num_decodes = step.num_tokens()
        if self.host.leaving is not None:
            self.host.leaving.observe_prompts(num_prompt_tokens)
            if not self.host.would_copy(is_idle=not step.num_rows):
                return None
        costs = self.host.costs
        most = costs.most_pages(num_prompt_tokens=num_prompt_tokens, num_decodes=num_decodes)
        unasked = costs.most_unasked(most=most, num_prompt_tokens=num_prompt_tokens, num_decodes=num_decodes)
        return self.host.plan(most=most, most_unasked=unasked, num_reserved=num_reserved, is_idle=not step.num_rows)

    def commit(self, copies: HostCopies | None, now: float) -> list[tuple[int, int]]:
        """Publish what a committed step has copied; return group and block of those that came from the host."""
        return [] if self.host is None or copies is None else self.host.commit(copies, now)

    def drop(self, copies: HostCopies | None) -> None:
        """Forget the copies of a step that was given up."""
        if self.host is not None and copies is not None:
            self.host.drop(copies)

    def forget(self, names: Iterable[Name]) -> None:
        """Let blocks no longer be found: their values are not finite, perhaps."""
        names = list(names)
        if self.host is not None:
            self.host.forget(names)
        if self.disk is not None:
            self.disk.forget(names)
        if self.offers is not None:
            self.offers.forget(names)

    def _take_ready(self) -> None:
        assert self.host is not None
        assert self._growing is not None
        is_growing = self._growing.is_growing  # read before the number: it may be the last one
        self.host.index.set_ready(self._growing.num_ready, is_growing=is_growing)
        if not is_growing:
            self._growing = None

    def _expel(self, names: list[Name]) -> None:
        """Let blocks no longer be found in any tier, as a prefill engine asks."""
        for group, key in names:
            self._pool.expel(group, key)
        self.forget(names)

    def blocks(self, copies: Iterable[HostCopies | None]) -> list[int]:
        """Return the pool's blocks that are held for requests that wait, and for copies in flight."""
        held = [] if self.host is None else list(self.host.blocks())
        return held + [block for step in copies if step is not None for block in step.blocks]

    def check(self, copies: Iterable[HostCopies | None]) -> None:
        """Assert the invariants of both tiers. copies: of the steps in flight."""
        if self.host is not None:
            slots = [] if self.disk is None else list(self.disk.slots)
            slots += [] if self.arrivals is None else self.arrivals.slots
            self.host.check([step for step in copies if step is not None], slots)
        for part in (self.disk, self.arrivals, self.offers):
            if part is not None:
                part.check()
