"""Blocks that leave the pool soon go to host memory: when, which of them, and how many."""

from functools import partial

import pytest

from engine.core import leaving_blocks
from engine.core.cache_layout import CacheLayout
from engine.core.host_index import HostIndex
from engine.core.host_tier import HostTier
from engine.core.leaving_blocks import LeavingBlocks
from engine.core.page_pool import PagePool
from engine.core.request import Request
from engine.interface.config import CacheGroup, HostTierConfig, SchedulerConfig
from engine.interface.protocol import SamplingParams
from tests.support.layered_harness import (
    FULL,
    GROUPS,
    NUM_PAGES,
    OTHERS,
    PROMPT,
    evict_first,
    host_harness,
    next_turn,
)

make = partial(host_harness, copies_leaving=True)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", GROUPS)
def test_the_next_turn_of_an_evicted_conversation_is_found(kind, depth):
    harness = make(groups=GROUPS[kind], num_pages=NUM_PAGES[kind], num_slots=200, depth=depth)
    evict_first(harness)
    harness.add("again", next_turn(harness), 4)
    harness.drain()
    assert harness.seen["again"].num_cached_tokens >= 16
    assert harness.scheduler.kv.tiers.host.num_found_tokens > 0
    harness.scheduler.check()


def test_a_pool_with_room_copies_nothing_and_publishes_as_if_there_were_no_host_memory():
    harness = make(num_pages=65, num_slots=60)
    for number, prompt in enumerate(OTHERS[:2]):
        harness.add(f"other{number}", prompt, 4)
    harness.drain()
    assert harness.executor.num_to_host == 0
    assert harness.engine.is_idle
    assert harness.scheduler.kv.late.can_wait


def test_an_idle_engine_copies_until_half_of_host_memory_has_what_leaves_next():
    harness = make(num_pages=65, num_slots=60)
    for number in range(9):
        harness.add(f"r{number}", [number] * 28, 4)
        harness.drain()
    host, pool = harness.scheduler.kv.tiers.host, harness.scheduler.kv.pool
    assert pool.num_soon >= 30
    assert host.num_stored == len(pool.order.settled) > 0


def tier(*, num_blocks, num_slots=8, ranks=None, groups=FULL, num_pages=None, **bounds):
    """Return a tier, its pool, whose blocks are cached, and their names, those that leave first in front."""
    num_pages = 1 + (num_blocks if num_pages is None else num_pages)
    pool = PagePool(groups, num_pages=num_pages)
    sizes = {"block_size": 4, "max_num_seqs": 1, "max_num_batched_tokens": 8, "max_model_len": 8}
    layout = CacheLayout(SchedulerConfig(num_pages=num_pages, groups=groups, **sizes))
    host = HostTier(HostTierConfig(num_slots=num_slots, max_copies=8, copies_leaving=True, **bounds), layout, pool)
    names = [(0, bytes([number])) for number in range(num_blocks)]
    for number, name in enumerate(names):
        block = pool.take(0)
        pool.publish(*name, block)
        pool.release([block], rank=0.0 if ranks is None else ranks[number])
    return host, pool, names


def stored(copies):
    return [] if copies is None else [store.name for store in copies.stores]


def test_a_step_fills_the_lead_with_the_blocks_that_leave_first():
    host, pool, names = tier(num_blocks=6)
    copies = host.plan(most=8, num_reserved=0)
    assert stored(copies) == names[:2]  # a quarter of eight slots
    assert host.plan(most=8, num_reserved=0) is None  # those in flight count
    host.commit(copies, 0.0)
    assert [pool.key_of(block) for block in pool.order.settled] == [key for _, key in names[:2]]
    assert host.plan(most=8, num_reserved=0) is None
    pool.release([pool.take(0)])  # one that was copied is lost to the pool
    assert pool.find(*names[0]) is None
    assert host.index.find(names[0]) is not None
    assert pool.order.num_lost == 0


def test_a_lead_of_more_blocks_than_a_step_looks_at_is_filled_by_several(monkeypatch):
    monkeypatch.setattr(leaving_blocks, "_MOST_LOOKS", 3)
    host, _, names = tier(num_blocks=8, num_slots=16)  # a lead of four, of which three are enough for the time being
    copies = host.plan(most=8, num_reserved=0)
    assert stored(copies) == names[:3]
    assert stored(host.plan(most=8, num_reserved=0)) == names[3:4]


def test_a_block_that_the_host_has_is_not_copied_again():
    host, pool, names = tier(num_blocks=6, num_slots=16)
    host.commit(host.plan(most=8, num_reserved=0), 0.0)
    assert host.num_stored == 4
    first = pool.find(*names[0])
    pool.hold([first])  # a hit
    pool.release([first])
    assert [*pool.order.awaited][-1] == first
    copies = host.plan(most=8, num_reserved=0, is_idle=True)
    assert stored(copies) == names[4:]
    assert [*pool.order.settled][-1] == first
    assert host.index.names()[-1] == names[0]


def test_beyond_the_credit_whole_requests_are_dropped_by_their_rank():
    ranks = [0.9, 0.9, 0.1, 0.1, 0.9, 0.1]
    host, pool, names = tier(num_blocks=6, num_slots=24, ranks=ranks, page_s=0.01, unasked_share=0.1)
    host.leaving._credit_s = 0.15  # of 0.5 s: ranks below 0.6 are paid for
    copies = host.plan(most=8, num_reserved=0)
    assert stored(copies) == [names[2], names[3], names[5]]
    assert host.num_missed == host.leaving.num_dropped == 3
    assert host.leaving._credit_s == pytest.approx(0.12)
    dropped = [pool.find(*names[number]) for number in (0, 1, 4)]
    assert all(block in pool.order.settled for block in dropped)


def test_time_and_prompt_tokens_earn_credit_up_to_a_bound():
    host, _, _ = tier(num_blocks=1, page_s=0.01, unasked_share=0.1, copies_per_token=0.5)
    leaving = host.leaving
    leaving._credit_s = 0.0
    leaving.observe_commit(10.0)
    assert leaving._credit_s == 0.0
    leaving.observe_commit(10.5)
    assert leaving._credit_s == pytest.approx(0.05)
    leaving.observe_prompts(4)
    assert leaving._credit_s == pytest.approx(0.07)
    leaving.observe_commit(1000.0)
    assert leaving._credit_s == pytest.approx(0.5)


def test_without_credit_nothing_is_copied_but_by_steps_without_rows():
    host, _, names = tier(num_blocks=6, num_slots=8, page_s=0.01, unasked_share=0.1)
    host.leaving._credit_s = 0.0
    assert host.plan(most=8, num_reserved=0) is None
    assert host.leaving.num_dropped == 2
    assert stored(host.plan(most=8, num_reserved=0, is_idle=True)) == names[2:4]  # half of the slots, with the dropped
    assert host.leaving._credit_s == 0.0


def test_a_step_that_is_given_up_leaves_its_blocks_to_later_ones():
    host, _, names = tier(num_blocks=6)
    copies = host.plan(most=8, num_reserved=0)
    host.drop(copies)
    later = host.plan(most=8, num_reserved=0)
    assert len(stored(later)) == 2
    assert not set(stored(later)) & set(names[:2])  # they were released as most recently used
    host.check([later])


def test_blocks_that_are_reused_before_anybody_looked_are_counted():
    host, pool, _ = tier(num_blocks=6)
    pool.take_blocks(0, 3)
    assert host.num_missed == pool.order.num_lost == 3
    pool.take(0)
    assert host.num_missed == 4


def test_a_request_that_follows_another_has_half_of_its_rank_and_others_are_spread():
    leaving = tier(num_blocks=8)[0].leaving
    ranks = [leaving.rank(Request(str(number), PROMPT, SamplingParams(max_tokens=1)), 0) for number in range(100)]
    assert all(24 <= sum(low <= rank < low + 0.25 for rank in ranks) <= 26 for low in (0.0, 0.25, 0.5, 0.75))
    harness = make(num_pages=65)
    harness.add("first", PROMPT, 4)
    harness.drain()
    kv = harness.scheduler.kv
    first = {kv.pool.ranks[block] for block in kv.pool.published}
    harness.add("again", next_turn(harness), 4)
    harness.drain()
    assert {kv.pool.ranks[block] for block in kv.pool.published} == {rank / 2 for rank in first}


def test_pinned_blocks_are_copied_though_they_leave_last():
    harness = make(num_pages=65, num_slots=60)
    harness.add("first", PROMPT, 4, pin_s=1000.0)
    harness.drain()
    host, pool = harness.scheduler.kv.tiers.host, harness.scheduler.kv.pool
    pinned = [(pool.group_of(block), pool.key_of(block)) for block in pool.order.kept]
    assert len(pinned) >= 4
    assert all(host.index.find(name) for name in pinned)
    assert harness.engine.is_idle


def test_blocks_that_are_not_pinned_after_all_are_not_copied_before_others():
    harness = make(num_pages=65, num_slots=60, pin_share=0.05)  # three pages of either tier
    harness.add("first", PROMPT, 4, pin_s=1000.0)
    harness.drain()
    host, pool = harness.scheduler.kv.tiers.host, harness.scheduler.kv.pool
    assert host.num_stored == pool.num_pinned == 3


def test_pins_that_end_before_their_copy_are_forgotten():
    host, pool, names = tier(num_blocks=6, page_s=0.01, unasked_share=0.0)  # no credit
    pool.pin(pool.find(*names[5]))
    for number in range(20):
        host.leaving.want_pinned([*names[5:], (0, bytes([100 + number]))])  # one that is evicted meanwhile
        assert host.plan(most=8, num_reserved=0) is None
        assert len(host.leaving.pinned) <= 2 * pool.num_usable
    assert names[5] in host.leaving.pinned
    assert stored(host.plan(most=8, num_reserved=0, is_idle=True))[0] == names[5]


def test_an_unknown_prompt_costs_a_lookup_one_link_of_its_hashes():
    harness = make(num_pages=17, num_slots=60)
    evict_first(harness)
    assert harness.scheduler.kv.tiers.host.index.num_blocks
    harness.add("new", [5] * 40, 4)
    harness.turn()
    (request,) = harness.scheduler.running
    assert len(request.block_hashes) <= 2
    harness.drain()


def test_a_block_of_more_pages_than_are_ready_waits_and_keeps_no_engine_busy():
    groups = (CacheGroup("state", 4, 3),)
    host, pool, _ = tier(num_blocks=0, num_slots=12, groups=groups, num_pages=3)
    host.index.set_ready(2, is_growing=True)
    block = pool.take(0)
    pool.publish(0, b"state", block)
    pool.release([block])
    assert host.plan(most=8, num_reserved=0, is_idle=True) is None
    assert not host.has_copies
    host.index.set_ready(12, is_growing=False)
    assert host.has_copies
    assert stored(host.plan(most=1, num_reserved=0, is_idle=True)) == [(0, b"state")]


def test_a_block_whose_name_is_being_copied_is_not_copied_beside():
    host, pool, names = tier(num_blocks=6, num_slots=24)
    copies = host.plan(most=1, num_reserved=0)
    pool.expel(*names[0])  # not finite
    pool.expel(*names[5])
    block = pool.take(0)
    pool.publish(*names[0], block)
    pool.release([block])
    more = host.plan(most=8, num_reserved=0, is_idle=True)
    assert stored(more) == names[1:5]
    host.commit(copies, 0.0)
    host.commit(more, 0.0)


def test_slots_are_filled_in_the_order_in_which_they_were_left():
    index = HostIndex(num_slots=6)
    for turn in range(5):
        slots = index.take(3)
        assert slots == [slots[0], slots[0] + 1, slots[0] + 2], "neighbours are one copy"
        for place, slot in enumerate(slots):
            index.add((0, bytes([turn, place])), [slot])
    index.check([])


def test_the_queue_of_published_blocks_is_empty_where_only_leaving_ones_are_copied():
    host, pool, _ = tier(num_blocks=2)
    assert pool.news is None
    host.take_news()
    assert isinstance(host.leaving, LeavingBlocks)
