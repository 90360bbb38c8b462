"""Blocks go to host memory and come back: what waits at the gate, what it holds, and how it ends."""

import pytest

from engine.core.copy_costs import CopyCosts
from engine.core.host_tier import HostTier
from engine.core.kv_snapshot import _tiers_of
from engine.core.page_pool import PagePool
from engine.interface.config import HostTierConfig, SharingRates
from tests.support.cache_traces import GrowingSlots
from tests.support.engine_harness import decode_plan
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


def evicted(**settings):
    """Return an engine that has answered PROMPT and has evicted all its blocks from the pool since."""
    harness = host_harness(**settings)
    evict_first(harness)
    return harness


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", GROUPS)
def test_the_next_turn_of_an_evicted_conversation_is_found(kind, depth):
    harness = evicted(groups=GROUPS[kind], num_pages=NUM_PAGES[kind], num_slots=200, depth=depth)
    tier = harness.scheduler.kv.tiers.host
    harness.add("again", next_turn(harness), 4)
    harness.drain()
    assert harness.seen["again"].num_cached_tokens >= 16
    assert 0 < tier.num_found_tokens <= harness.seen["again"].num_cached_tokens
    assert tier.num_pages_from_host == harness.executor.num_from_host > 0
    assert harness.scheduler.kv.num_hit_tokens >= tier.num_found_tokens


def test_the_report_tells_cached_tokens_by_tier():
    harness = evicted()
    started = []
    harness.add("again", next_turn(harness), 4)
    send = harness.transport.send
    harness.transport.send = lambda client, message: (
        started.extend(getattr(message, "started", [])),
        send(client, message),
    )
    harness.drain()
    (again,) = started
    assert again.num_cached_tokens == 20
    assert again.cache.num_host_tokens == 20
    assert again.queue_s > 0


def test_others_are_admitted_while_a_request_waits_at_the_gate():
    harness = evicted(max_copies=1)
    harness.add("again", next_turn(harness), 4)
    harness.add("behind", [1, 2, 3], 4)
    harness.turn(2)
    kv = harness.scheduler.kv
    assert kv.tiers.num_waiting == 1
    assert [request.request_id for request in harness.scheduler.running] == ["behind"]
    harness.drain()
    assert harness.seen["again"].num_cached_tokens == 20
    assert kv.tiers.host.waited_s > 0


def test_a_row_is_kept_for_a_request_at_the_gate():
    harness = evicted(max_copies=1, max_num_seqs=1)
    harness.add("again", next_turn(harness), 4)
    harness.add("behind", [1, 2, 3], 4)
    while harness.scheduler.kv.tiers.num_waiting or not harness.scheduler.running:
        harness.turn()
        assert [request.request_id for request in harness.scheduler.running] in ([], ["again"])
    harness.drain()


def test_an_abort_at_the_gate_frees_all():
    for turns in range(1, 6):
        harness = evicted(max_copies=1)
        harness.add("again", next_turn(harness), 4)
        harness.turn(turns)
        assert harness.scheduler.kv.tiers.num_waiting == 1
        harness.abort("again")
        harness.drain()
        assert harness.seen["again"].ends == ["abort"]
        assert harness.scheduler.kv.tiers.host.num_given_up == 1


def test_a_prefix_that_two_requests_wait_for_is_copied_once():
    harness = evicted(num_pages=29, num_slots=200, max_copies=1)
    for number in range(8):
        harness.add(f"more{number}", [40 + number] * 28, 4)
        harness.drain()
    before = harness.executor.num_from_host
    for name in ("a", "b"):
        harness.add(name, [*next_turn(harness), ord(name) % 50], 4)
    harness.turn()
    assert harness.scheduler.kv.tiers.num_waiting == 2
    harness.drain()
    assert harness.executor.num_from_host - before == 5
    assert [harness.seen[name].num_cached_tokens for name in ("a", "b")] == [20, 20]


@pytest.mark.parametrize("depth", [1, 2])
def test_rows_are_grouped_by_restored_blocks_only_once_these_are_in_the_pool(depth):
    sharing = SharingRates(chunk_tokens=4)
    harness = evicted(num_pages=29, num_slots=200, max_copies=1, depth=depth, sharing=sharing)
    for number in range(8):
        harness.add(f"more{number}", [40 + number] * 28, 4)
        harness.drain()
    num_plans = len(harness.executor.plans)
    for name in ("a", "b"):
        harness.add(name, [*next_turn(harness), ord(name) % 50], 8)
    harness.drain()
    plans = [decode_plan(plan) for plan in harness.executor.plans[num_plans:]]
    copied = [index for index, plan in enumerate(plans) if plan.copies_from_host]
    grouped = [index for index, plan in enumerate(plans) for _, number, _ in plan.shares if number]
    assert len(copied) == 5
    assert max(copied) < min(grouped)
    assert {tokens for plan in plans for _, number, tokens in plan.shares if number} == {20}
    assert harness.executor.num_grouped > 0


def test_one_of_two_that_wait_for_a_prefix_may_leave():
    for leaver in ("a", "b"):
        harness = evicted(num_pages=29, num_slots=200, max_copies=1)
        for number in range(8):
            harness.add(f"more{number}", [40 + number] * 28, 4)
            harness.drain()
        for name in ("a", "b"):
            harness.add(name, [*next_turn(harness), ord(name) % 50], 4)
        harness.turn(2)
        harness.abort(leaver)
        harness.drain()
        (stayed,) = {"a", "b"} - {leaver}
        assert harness.seen[stayed].num_cached_tokens == 20


def test_a_running_request_gets_the_pages_of_the_gate():
    harness = evicted(max_copies=1, num_pages=17)
    harness.add("long", [3] * 8, 50)
    harness.turn(18)  # it holds 6 pages or more of 16, of which the gate can take the rest
    harness.add("again", next_turn(harness), 4)
    harness.turn()
    assert harness.scheduler.kv.tiers.num_waiting == 1
    tier = harness.scheduler.kv.tiers.host
    tier.costs = CopyCosts(HostTierConfig(num_slots=60, max_copies=0))  # as slow as can be
    while harness.scheduler.kv.tiers.num_waiting:
        harness.turn()
    tier.costs = CopyCosts(HostTierConfig(num_slots=60, max_copies=1))
    harness.drain()
    assert tier.num_given_up == 1
    assert harness.seen["long"].ends == ["length"]


def test_it_computes_where_that_is_quicker():
    harness = evicted(page_s=1.0, token_s=0.1)
    harness.add("again", next_turn(harness), 4)
    harness.drain()
    tier = harness.scheduler.kv.tiers.host
    assert harness.executor.num_from_host == 0
    assert tier.num_too_costly > 0


def test_what_it_does_is_counted():
    harness = evicted()
    harness.engine._stats._host_page_bytes = 10
    harness.add("again", next_turn(harness), 4)
    harness.drain()
    delta, tier = harness.metrics.drain(), harness.scheduler.kv.tiers.host
    assert delta.gauges["kv_host_bytes", "total"] == 600
    assert delta.gauges["kv_host_bytes", "used"] == 10 * tier.index.num_used > 0
    assert delta.counters["kv_host_blocks_total", "stored"] == tier.num_stored
    assert delta.counters["kv_host_lookups_total", "longer"] == 1
    assert delta.counters["kv_host_lookups_total", "none"] == len(OTHERS) + 1
    assert delta.counters["kv_host_hit_tokens_total", ""] == 20
    assert delta.counters["kv_host_copied_bytes_total", "from_host"] == 50
    assert delta.counters["kv_host_wait_seconds_total", ""] == tier.waited_s > 0


def test_rates_decide_what_is_worth_a_copy():
    costs = CopyCosts(HostTierConfig(num_slots=1, max_copies=1, page_s=0.01, token_s=0.001))
    assert costs.is_worth_copying(num_tokens=16, num_pages=1)
    assert not costs.is_worth_copying(num_tokens=16, num_pages=2)
    unknown = CopyCosts(HostTierConfig(num_slots=1, max_copies=1))
    assert unknown.is_worth_copying(num_tokens=1, num_pages=99)


def test_an_engine_without_requests_copies_what_is_left():
    harness = host_harness(max_copies=1)
    harness.add("first", PROMPT, 4)
    harness.drain()
    assert any(not plan.num_rows for plan in map(decode_plan, harness.executor.plans))
    assert harness.scheduler.kv.tiers.host.num_stored == harness.executor.num_to_host == 5
    assert harness.engine.is_idle


def test_a_preempted_request_finds_its_blocks_again():
    harness = host_harness(num_pages=19, num_slots=100, max_copies=8, max_num_seqs=3)
    for name, first in (("a", 1), ("b", 2), ("c", 3)):
        harness.add(name, [first] * 12, 40)
    harness.drain()
    assert harness.scheduler.num_preemptions
    assert harness.executor.num_from_host


def test_values_that_are_not_finite_are_found_in_no_tier():
    harness = host_harness()
    harness.add("first", PROMPT, 4)
    harness.drain()
    kv = harness.scheduler.kv
    assert kv.tiers.host.index.num_blocks == 5
    harness.add("spoiled", next_turn(harness), 4)
    harness.turn(2)
    (request,) = harness.scheduler.running
    kv.taint([request])
    assert kv.tiers.host.index.num_blocks == 0
    harness.abort("spoiled")
    harness.drain()
    assert kv.tiers.host.index.num_blocks == 0


def test_a_tier_smaller_than_a_block_stays_empty():
    harness = host_harness(groups=GROUPS["state"], num_pages=29, num_slots=2)
    harness.add("first", PROMPT, 4)
    harness.drain()
    assert harness.engine.is_idle
    assert harness.executor.num_to_host > 0  # of the full group, whose blocks are one page


def test_without_a_prefix_cache_there_is_no_tier():
    harness = host_harness(enable_prefix_caching=False)
    assert harness.scheduler.kv.tiers.host is None


def tier_with_a_replaced_block():
    """Return a tier whose block `name` was wanted and released, then evicted, and published anew in another block."""
    pool = PagePool(FULL, num_pages=6)
    tier = HostTier(HostTierConfig(num_slots=8, max_copies=8), host_harness().scheduler.kv.layout, pool)
    name = (0, b"name")
    first = pool.take(0)
    pool.publish(*name, first)
    return tier, pool, name, first


def test_a_wanted_block_is_copied_first_though_another_has_taken_its_place():
    tier, pool, name, _ = tier_with_a_replaced_block()
    assert tier.want(name)
    pool.expel(*name)
    second = pool.take(0)
    pool.publish(*name, second)
    other = pool.take(0)
    pool.publish(0, b"other", other)
    pool.release([other])
    assert tier.want(name)
    copies = tier.plan(most=1, num_reserved=0)
    assert [(store.name, store.block) for store in copies.stores] == [(name, second)]


def test_a_block_that_is_held_is_copied_though_one_of_its_name_was_released_and_evicted():
    tier, pool, name, first = tier_with_a_replaced_block()
    pool.release([first])
    tier.take_news()
    second = pool.take(0)
    pool.expel(*name)
    pool.publish(*name, second)
    copies = tier.plan(most=4, num_reserved=0)
    assert [(store.name, store.block) for store in copies.stores] == [(name, second)]


def test_blocks_that_nobody_waits_for_have_a_bound_of_their_own():
    tier, pool, name, _ = tier_with_a_replaced_block()
    others = [pool.take(0) for _ in range(2)]
    for number, block in enumerate(others):
        pool.publish(0, bytes([number]), block)
    assert tier.plan(most=3, most_unasked=0, num_reserved=0) is None
    assert tier.want(name)
    copies = tier.plan(most=3, most_unasked=1, num_reserved=0)
    assert [store.name for store in copies.stores] == [name, (0, b"\0")]


def growing(*, first, last, **settings):
    """Return an engine whose slots become ready one by one, for each time that its loop asks."""
    harness = host_harness(**settings)
    harness.scheduler.kv.tiers.follow(GrowingSlots(first=first, step=1, last=last))
    return harness


def test_blocks_wait_until_slots_are_ready():
    harness = growing(first=0, last=60)
    tier = harness.scheduler.kv.tiers.host
    assert tier.index.num_ready == 0
    harness.add("first", PROMPT, 4)
    harness.turn()
    assert tier.num_stored == 0
    harness.drain()
    assert 0 < tier.index.num_used <= tier.index.num_ready < 60
    for number, prompt in enumerate(OTHERS):
        harness.add(f"other{number}", prompt, 4)
        harness.drain()
    harness.add("again", next_turn(harness), 4)
    harness.drain()
    assert harness.seen["again"].num_cached_tokens == 20
    assert tier.num_found_tokens > 0


def test_slots_become_ready_while_nothing_runs():
    harness = growing(first=0, last=60)
    harness.add("first", PROMPT, 4)
    harness.drain()
    harness.turn(80)
    tiers = harness.scheduler.kv.tiers
    assert tiers.host.index.num_ready == 60
    assert not tiers.is_polled
    assert tiers.host.num_stored > 0


def test_an_engine_none_of_whose_slots_become_ready_computes():
    harness = growing(first=0, last=0)
    tiers = harness.scheduler.kv.tiers
    assert tiers.host.index.num_slots == 0
    assert not tiers.is_polled
    for name in ("first", "again"):
        harness.add(name, PROMPT, 4)
        harness.drain()
    assert tiers.host.num_stored == 0
    assert not tiers.has_copies


def test_a_block_of_more_pages_than_will_be_ready_is_let_go():
    harness = host_harness(groups=GROUPS["state"], num_pages=29)
    harness.scheduler.kv.tiers.follow(GrowingSlots(first=1, step=1, last=2))  # a state has three
    harness.add("first", PROMPT, 4)
    harness.drain()
    harness.turn(3)
    assert not harness.scheduler.kv.tiers.has_copies
    assert harness.scheduler.kv.tiers.host.num_stored > 0


def test_the_page_and_the_metrics_tell_the_memory_that_is_ready():
    harness = growing(first=5, last=60)
    harness.engine._stats._host_page_bytes = 7
    harness.engine.record_state()
    assert harness.metrics._delta.gauges["kv_host_bytes", "total"] == 5 * 7
    (tier,) = _tiers_of(harness.scheduler.kv, page_bytes=7)
    assert tier.max_bytes == 5 * 7
