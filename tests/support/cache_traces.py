"""Random traces over drawn groups of layers: one engine's calls, replayed at a drawn depth, with drafts or without.

Trace.draw() makes one from a seed: adds, aborts, priorities, pools so small that requests are preempted, steps given
up, next turns of conversations, shared prefixes that part, salts and adapters, pins, groups of rows, small and slow
host memory, whose slots become ready meanwhile. replay() runs it and compares every token with the model's, checks the
invariants after some turns, and that nothing is held at the end.

Many small traces find more than few large ones in the same time, so sizes are drawn as well. For the same reason a
trace is replayed one way: each replay compares all tokens with the model's, which are one for all ways, so another way
of the same trace tells less than another trace. What the invariants say stays broken, or shows in a token: so a check
after every eighth turn finds most of it as well, and most of the time is left to the engine. Every 32nd trace is
a long one: replayed all ways, and checked after every turn. To find the turn in another: replay(check_every=1).
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from engine.core.cache_layout import CacheLayout
from engine.core.speculative import Drafter
from engine.interface.config import CacheGroup, HostTierConfig, SchedulerConfig, SharingRates
from engine.interface.protocol import SamplingParams
from tests.support.engine_harness import VOCAB_SIZE, Harness
from tests.support.layered_model import LayeredExecutor, LayeredModel, LayeredProposer
from tests.support.scarce_executor import ScarceExecutor

STATE_KINDS = ("full state", "full state", "state", "full window state", "full full state state", "window state")
KINDS = (
    "full", "window", "chunk", "full full", "full window", "full window window", "window window", "full chunk",
    "chunk window", *STATE_KINDS,
)  # fmt: skip

LONG_EVERY = 32  # of the traces, one is replayed all ways and checked after every turn
_WAYS = [(2, False), (2, True)] * 5 + [(1, False), (1, True)]  # depth, and whether it drafts


class GrowingSlots:
    """A SlotSource: some slots more are ready each time it is asked, up to the last."""

    def __init__(self, *, first: int, step: int, last: int) -> None:
        self._next, self._step, self._last = first, step, last

    @property
    def num_ready(self) -> int:
        """See SlotSource.num_ready."""
        now = min(self._next, self._last)
        self._next += self._step
        return now

    @property
    def is_growing(self) -> bool:
        """See SlotSource.is_growing."""
        return self._next < self._last


class TraceExecutor(ScarceExecutor, LayeredExecutor):
    """Computes from pages, and has too little memory for some steps."""


@dataclass
class Trace:
    """One engine's settings, and the calls to its harness."""

    groups: tuple[CacheGroup, ...]
    settings: dict[str, object]
    num_drafts: int
    failures: int  # of 100 steps
    check_every: int = 8  # turns between two checks of the invariants
    is_long: bool = False
    way: tuple[int, bool] = (2, False)  # depth, and whether it drafts: of the only replay, unless it is long
    answer_step: int = 0  # places for hits from one saved state of an answer to the next
    host_tier: HostTierConfig | None = None
    growth: tuple[int, int, int] | None = None  # first, step, last of the slots that are ready; None: all are
    calls: list[tuple[str, tuple[object, ...], dict[str, object]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = LayeredModel(self.groups)  # it knows what it generated before

    @classmethod
    def draw(
        cls, seed: int, kinds: Sequence[str] = KINDS, *, is_tiered: bool = False, is_crowded: bool = False
    ) -> Trace:
        """Make the trace of a seed. is_tiered: many requests find blocks in host memory alone.

        is_crowded: many requests are preempted, and host memory has room for all.
        """
        rng = random.Random(seed)
        unit = rng.choice([1, 2, 4])
        groups = tuple(_draw_group(rng, kind, unit) for kind in rng.choice(kinds).split())
        sizes = {
            "block_size": unit,
            "max_num_seqs": rng.randint(1, 6),
            "max_num_batched_tokens": rng.randint(3, 30),
            "max_model_len": rng.randint(30, 90),
        }
        config = SchedulerConfig(num_pages=1, groups=groups, **sizes)
        least = CacheLayout(config).num_pages(rng.randint(12, 45))
        settings = sizes | {
            "groups": groups,
            "num_pages": 1 + least + rng.choice([0, 0, rng.randint(0, least), rng.randint(0, 3 * least)]),
            "max_decode_step_tokens": rng.choice([None, None, rng.randint(3, 24)]),
            "max_num_samples": rng.choice([None, 24]),
        }
        trace = cls(groups, settings, rng.choice([1, 3, 7]), rng.choice([0, 0, 0, 4]))
        if is_tiered:
            settings["num_pages"] = 1 + least + rng.randint(0, least // 2)
        settings["pin_share"] = random.Random(seed).choice([0.25, 0.6])
        settings["sharing"] = random.Random(seed + 1).choice([None, *(SharingRates(chunk_tokens=n) for n in (1, 8))])
        trace.is_long = seed % LONG_EVERY == 0
        trace.check_every = 1 if trace.is_long else 8
        trace._draw_calls(rng, num_requests=rng.randint(12, 20) if is_tiered else None, is_crowded=is_crowded)
        trace.answer_step = rng.choice([1, 1, 2, 4])
        if is_crowded:
            settings |= {"num_pages": 1 + least, "max_num_seqs": 6}
            costs = random.Random(seed).choice([{}, {"page_s": 0.001, "token_s": 0.001}])
            trace.host_tier = HostTierConfig(num_slots=20 * least, max_copies=16, **costs)
        elif is_tiered or rng.random() < 0.6:
            num_slots = rng.choice([rng.randint(1, least), rng.randint(1, 6 * least)])
            max_copies, bounds = rng.choice([1, 1, 2, 4, 16]), random.Random(seed + 2)
            trace.host_tier = HostTierConfig(
                num_slots=num_slots,
                max_copies=max_copies,
                max_copies_beside=bounds.choice([None, 1, max_copies]),
                copies_per_token=bounds.choice([0.0, 0.3]),
                **bounds.choice([{}, {"page_s": 0.001, "token_s": 0.0005}]),
            )
        leaving = random.Random(seed + 4)
        if trace.host_tier is not None and leaving.random() < 0.5:
            share = leaving.choice([None, 0.01, 1.0])
            trace.host_tier = msgspec.structs.replace(trace.host_tier, copies_leaving=True, unasked_share=share)
        trace.way = rng.choice(_WAYS)
        growing = random.Random(seed + 3)
        if trace.host_tier is not None and growing.random() < 0.5:
            last = growing.choice([trace.host_tier.num_slots, growing.randint(0, trace.host_tier.num_slots)])
            trace.growth = (growing.randint(0, last), growing.choice([1, 1, 2, 7]), last)
        return trace

    def _draw_calls(self, rng: random.Random, *, num_requests: int | None, is_crowded: bool = False) -> None:
        """num_requests: that leave each other time, mostly; None: fewer, in a hurry, or many if is_crowded."""
        model = self.model
        stems = [[rng.randrange(VOCAB_SIZE) for _ in range(40)] for _ in range(2)]
        most_tokens = rng.choice([4, 8, 20])
        asked: list[tuple[list[int], SamplingParams, dict[str, object]]] = []
        pins = random.Random(sum(stems[0]))  # beside the other draws, which faults are known by
        times = [1, 2, 4, 9] if num_requests is None else [2, 9, 20, 30]
        if is_crowded:
            num_requests, most_tokens = rng.randint(8, 14), 30
        for number in range(num_requests or rng.randint(2, rng.choice([3, 6, 12]))):
            options: dict[str, object] = {
                "priority": rng.randint(0, 1),
                "cache_salt": rng.choice(["", "", "", "tenant"]),
                "lora_index": rng.choice([0, 0, 0, 1]),
            }
            suffix = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 10))]
            if asked and rng.random() < 0.4:  # the next turn, or the same one again
                before, params, options = rng.choice(asked)
                lora_index = options["lora_index"]
                answer = model.expected_tokens(before, params, max_num_tokens=90, lora_index=lora_index)
                prompt = before + answer[: rng.randint(0, len(answer))] + suffix[: rng.choice([0, 1, 10])]
            else:
                prompt = rng.choice(stems)[: rng.choice([0, 5, 16, 40])] + suffix
            stops = [rng.randrange(VOCAB_SIZE)] if rng.random() < 0.3 else []
            params = SamplingParams(max_tokens=rng.randint(1, most_tokens), stop_token_ids=stops)
            asked.append((prompt, params, options))
            more = {"stop_token_ids": stops, **options}
            more |= {"pin_s": pins.choice([0.0, 0.02, 0.2, 1000.0]), "open_salt": pins.choice(["", "", "other"])}
            self.calls.append(("add", (f"r{number}", prompt, params.max_tokens), more))
            for _ in range(rng.randint(0, 2)):
                self.calls.append(("turn", (rng.choice(times),), {}))
            if rng.random() < 0.1:
                self.calls.append(("abort", (f"r{rng.randint(0, number)}",), {}))

    def replay(
        self,
        *,
        depth: int,
        num_drafts: int = 0,
        is_caching: bool = True,
        has_tier: bool = True,
        check_every: int | None = None,
        change: Callable[[Harness], None] | None = None,
        crash_rate: float = 0.0,
    ) -> Harness:
        """Run the trace; raise AssertionError if a token is wrong or an invariant is broken. change: plants a fault.

        crash_rate: after so many of the calls the engine ends, and the requests go on with the next one.
        """

        def make_drafter(params: SamplingParams) -> Drafter:
            return Drafter(LayeredProposer(self.model), num_tokens=num_drafts)

        harness = Harness(
            depth=depth,
            executor=TraceExecutor,
            enable_prefix_caching=is_caching,
            make_drafter=make_drafter if num_drafts else None,
            host_tier=self.host_tier if has_tier else None,
            **self.settings,
        )
        harness.expected_tokens = self.model.expected_tokens
        harness.check_every = check_every or self.check_every
        self._prepare(harness)
        if change is not None:
            change(harness)
        crashes = random.Random(len(self.calls))
        for name, args, kwargs in self.calls:
            getattr(harness, name)(*args, **kwargs)
            if crashes.random() < crash_rate:
                harness.turn(crashes.randint(0, 9))
                harness.crash(is_fault=crashes.random() < 0.5)
                self._prepare(harness)
        harness.drain()
        return harness

    def replay_all(self) -> Counter[str]:
        """Replay one way, drawn; count what happened.

        A long one: at both depths, with drafts at both, without the cache, and each drafted one again: the same calls
        give the same plans.
        """
        counts: Counter[str] = Counter()
        most = self.num_drafts
        ways = [(self.way[0], most * self.way[1], True, True)]
        if self.is_long:
            ways = [(2, 0, True, True), (1, 0, True, True), (2, most, True, True), (1, most, True, True)]
            ways += [(2, 0, True, False), (2, 0, False, True)]
        salted = {args[0] for name, args, options in self.calls if name == "add" and options["cache_salt"]}
        for depth, num_drafts, is_caching, has_tier in ways:
            harness = self.replay(depth=depth, num_drafts=num_drafts, is_caching=is_caching, has_tier=has_tier)
            drafts, kv = harness.scheduler.drafts, harness.scheduler.kv
            if num_drafts and self.is_long:
                twin = self.replay(depth=depth, num_drafts=num_drafts)
                assert twin.executor.plans == harness.executor.plans
            counts += Counter(
                replays=1,
                requests=len(harness.seen),
                preemptions=harness.scheduler.num_preemptions,
                hit_tokens=harness.scheduler.kv.num_hit_tokens,
                evictions=sum(harness.scheduler.kv.pool.num_evictions),
                accepted_drafts=drafts.num_accepted,
                rejected_drafts=drafts.num_tokens - drafts.num_accepted,
                aborts=sum("abort" in seen.ends for seen in harness.seen.values()),
                salted_hit_tokens=sum(harness.seen[name].num_cached_tokens for name in salted),
                adapter_hit_tokens=sum(seen.num_cached_tokens for seen in harness.seen.values() if seen.lora_index),
                zeroed_pages=harness.executor.num_zeroed,
                failed_steps=harness.executor.num_failures,
                restored_pages=harness.executor.num_restored,
                saved_pages=harness.executor.num_saved,
                grouped_rows=harness.executor.num_grouped,
                pins_expired=kv.pins.num_ended["expired"],
                pins_over_budget=kv.pins.num_ended["over_budget"],
                pins_reused=kv.pins.num_ended["reused"],
                states_in_answers=harness.scheduler.kv.checkpoints.num_saved_in_answers,
            )
            tier = kv.tiers.host
            if tier is not None:
                counts += Counter(
                    pages_to_host=harness.executor.num_to_host,
                    pages_from_host=harness.executor.num_from_host,
                    host_tokens=tier.num_found_tokens,
                    host_evictions=tier.index.num_evictions,
                    missed_by_the_host=tier.num_missed,
                    gates_given_up=tier.num_given_up,
                    swaps=kv.tiers.num_resumed["swapped"],
                    computed_after_all=kv.tiers.num_resumed["computed"],
                )
        return counts

    def _prepare(self, harness: Harness) -> None:
        if self.failures:
            harness.executor.fails = self._fails
        kv = harness.scheduler.kv
        if self.growth is not None:
            first, step, last = self.growth
            kv.tiers.follow(GrowingSlots(first=first, step=step, last=last))
        kv.checkpoints.answer_step = self.answer_step * kv.layout.step

    def _fails(self, place: str, plan) -> bool:
        return zlib.crc32(f"{place} {plan.step_id} {len(plan.rows)}".encode()) % 400 < self.failures


def _draw_group(rng: random.Random, kind: str, unit: int) -> CacheGroup:
    if kind == "state":
        return CacheGroup("state", unit * rng.choice([1, 2, 4]), rng.randint(1, 4))
    reach = rng.choice([rng.randint(1, 8), rng.randint(8, 30)])
    sizes = unit * rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2, 3])
    if kind == "chunk":
        return CacheGroup("window", *sizes, chunk=reach)
    return CacheGroup(kind, *sizes, window=reach if kind == "window" else None)
