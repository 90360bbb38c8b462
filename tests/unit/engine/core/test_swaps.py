"""A preempted request is swapped or computed, by rates that are measured meanwhile; both are counted."""

import pytest

from engine.core.copy_costs import CopyCosts
from engine.interface.config import HostTierConfig
from tests.support.layered_harness import host_harness


def preempted(**settings):
    """Return an engine after three requests of which two preempt the third, more than once."""
    harness = host_harness(num_pages=19, num_slots=100, max_num_seqs=3, **{"max_copies": 8} | settings)
    for name, first in (("a", 1), ("b", 2), ("c", 3)):
        harness.add(name, [first] * 12, 40)
    harness.drain()
    assert harness.scheduler.num_preemptions
    return harness


def counters(harness):
    harness.engine.record_state()
    found = harness.metrics.drain().counters
    names = {"requests": "preempted_requests_resumed_total", "tokens": "preempted_tokens_resumed_total"}
    ways = ("swapped", "pool", "host", "computed")
    return {(what, way): found[name, way] for what, name in names.items() for way in ways if (name, way) in found}


def test_a_preempted_request_is_swapped_while_copies_are_quick():
    harness = preempted(page_s=1e-6, token_s=1.0)
    found = counters(harness)
    assert found["requests", "swapped"] > 0
    assert found["tokens", "host"] > 0
    tiers = harness.scheduler.kv.tiers
    assert sum(tiers.num_resumed.values()) == harness.scheduler.num_preemptions
    assert sum(tiers.num_resumed_tokens.values()) > 12 * harness.scheduler.num_preemptions


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_request_is_computed_where_copies_are_slow(depth):
    harness = preempted(page_s=1.0, token_s=1e-6, depth=depth)
    found = counters(harness)
    assert ("requests", "swapped") not in found
    assert found["requests", "computed"] == harness.scheduler.num_preemptions
    assert found["tokens", "computed"] > 0
    assert harness.executor.num_from_host == 0


def test_without_host_memory_all_is_computed():
    harness = preempted(enable_prefix_caching=False)
    assert counters(harness)["requests", "computed"] == harness.scheduler.num_preemptions


def test_what_a_preempted_request_alone_has_goes_to_the_host_first():
    harness = host_harness(num_pages=40, num_slots=100, max_copies=1, max_num_seqs=3)
    tier = harness.scheduler.kv.tiers.host
    tier.costs = CopyCosts(HostTierConfig(num_slots=100, max_copies=0))
    for name, first in (("a", 1), ("b", 2)):
        harness.add(name, [first] * 16, 30)
        harness.turn(2)
    harness.turn(4)
    harness.scheduler._preempt_last()
    while harness.scheduler.retiring:
        harness.turn()
    request = harness.scheduler.requests["b"]
    assert request.num_preemptions == 1
    names = {(0, key) for key in request.block_hashes[:4]}
    assert names <= tier._queue.wanted.keys() | tier.storing or request in harness.scheduler.running
    tier.costs = CopyCosts(HostTierConfig(num_slots=100, max_copies=1))
    harness.drain()


def test_rates_begin_with_those_of_the_start_and_follow_what_is_measured():
    costs = CopyCosts(HostTierConfig(num_slots=100, max_copies=10, page_s=0.001, token_s=0.01))
    assert (costs.page_s, costs.token_s) == pytest.approx((0.001, 0.01))
    assert costs.is_worth_swapping(num_tokens=16, num_pages=10)
    for _ in range(20):
        costs.observe_gate(num_pages=10, seconds=1.0)
    assert 0.08 < costs.page_s < 0.1
    assert not costs.is_worth_swapping(num_tokens=16, num_pages=10)
    costs.observe_prompts(seconds=800.0, num_tokens=8000)
    assert 0.09 < costs.token_s < 0.1
    assert costs.is_worth_swapping(num_tokens=16, num_pages=10)
    assert costs.is_worth_copying(num_tokens=1, num_pages=9), "a prompt that comes goes by the start's rates"


def test_a_bad_rate_is_forgotten_where_it_keeps_requests_from_being_swapped():
    costs = CopyCosts(HostTierConfig(num_slots=100, max_copies=10, page_s=0.001, token_s=0.01))
    costs.observe_gate(num_pages=1, seconds=30.0)
    refusals = 0
    while not costs.is_worth_swapping(num_tokens=16, num_pages=1):
        refusals += 1
    assert 0 < refusals < 100


def test_rates_that_are_not_known_swap_until_both_are_measured():
    costs = CopyCosts(HostTierConfig(num_slots=100, max_copies=10))
    costs.observe_gate(num_pages=1, seconds=5.0)
    assert costs.is_worth_swapping(num_tokens=1, num_pages=100)
    costs.observe_prompts(seconds=1.0, num_tokens=100)
    assert not costs.is_worth_swapping(num_tokens=1, num_pages=100)
    assert costs.is_worth_swapping(num_tokens=10_000, num_pages=1)


def test_the_engine_measures_both_rates():
    harness = preempted()
    costs = harness.scheduler.kv.tiers.host.costs
    assert costs.page_s > 0
    assert costs.token_s > 0
