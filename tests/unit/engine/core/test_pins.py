"""Blocks of prompts that were asked to be kept outlast others, for their time and within the budget of their key."""

import pytest

from engine.core.request import Request
from engine.interface.config import HostTierConfig
from engine.interface.protocol import SamplingParams
from tests.support.engine_harness import Harness
from tests.support.layered_model import LayeredExecutor, LayeredModel
from tests.unit.engine.core.test_prefix_misses import FULL, STATE, WINDOW, make_kv, others, run

NUM_PAGES = 41  # 40 that can be lent, so a quarter is 10 blocks of 4 tokens


def ended(kv, tokens, *, at=100.0, reason="stop", **fields):
    """Compute a prompt, and end its request."""
    request = run(kv, tokens, keep=True, arrival_s=at, **fields)
    request.finish_reason = reason
    kv.free(request)
    kv.check({})


def num_cached(kv, tokens):
    """Return how many of a prompt's first tokens a hit would take now."""
    return kv._finder.find(Request("f", [*tokens, 0], SamplingParams(max_tokens=1))).num_tokens


def fill(kv, start=0):
    """Let other prompts take all pages once."""
    for number in range(4):
        ended(kv, others(start + 100 * number, 40))


def test_a_pinned_prompt_outlasts_others_and_goes_when_its_time_is_over():
    kv = make_kv(FULL, num_pages=NUM_PAGES)
    ended(kv, range(20), pin_s=300.0)
    assert kv.pins.num_pages == 4  # the last block has the token that is always computed
    fill(kv)
    assert num_cached(kv, range(16)) == 16
    kv.pins.expire(399.9)
    assert kv.pins.num_pages == 4
    kv.pins.expire(kv.pins.next_due_s)
    assert kv.pins.num_pages == 0
    assert kv.pins.num_ended == {"expired": 4, "over_budget": 0, "reused": 0}
    fill(kv, 1000)
    assert num_cached(kv, range(16)) == 0


def test_a_pin_takes_no_page_from_requests_that_need_all():
    kv = make_kv(FULL, num_pages=NUM_PAGES)
    ended(kv, range(20), pin_s=300.0)
    assert kv.pool.num_free == 40
    request = run(kv, others(0, 150), keep=True)
    assert kv.pool.num_free == 2
    kv.pins.check()
    assert kv.pins.num_ended["reused"] == 2
    assert num_cached(kv, range(16)) < 16
    kv.free(request)


def test_a_later_use_renews_a_pin_and_a_shorter_one_does_not_end_it():
    kv = make_kv(FULL, num_pages=NUM_PAGES)
    ended(kv, range(20), at=100.0, pin_s=300.0)
    ended(kv, range(20), at=200.0, pin_s=300.0)
    ended(kv, range(20), at=210.0, pin_s=1.0)
    kv.pins.expire(401.0)
    assert kv.pins.num_pages == 4
    kv.pins.expire(500.0)
    assert kv.pins.num_pages == 0


def test_a_prompt_over_its_budget_keeps_its_head():
    kv = make_kv(FULL, num_pages=NUM_PAGES)
    ended(kv, range(100), pin_s=300.0)
    assert kv.pins.num_pages == 10
    fill(kv)
    assert num_cached(kv, range(96)) == 40


def test_a_key_that_is_over_its_budget_loses_its_oldest_pins_and_no_others():
    kv = make_kv(FULL, num_pages=NUM_PAGES)
    ended(kv, others(0, 21), pin_s=300.0, open_salt="theirs", cache_salt="theirs")
    for number in range(3):
        ended(kv, range(100 * number, 100 * number + 21), pin_s=300.0, open_salt="mine")
    assert kv.pins.num_pages == 15
    assert kv.pins.num_ended["over_budget"] == 5
    fill(kv)
    assert [num_cached(kv, range(100 * number, 100 * number + 20)) for number in range(3)] == [0, 20, 20]


def test_all_keys_together_pin_half_of_the_pool_at_most():
    kv = make_kv(FULL, num_pages=NUM_PAGES)
    for number in range(3):
        ended(kv, others(100 * number, 60), pin_s=300.0, open_salt=str(number))
    assert kv.pins.num_pages == 20
    assert kv.pins.num_ended["over_budget"] == 10


@pytest.mark.parametrize("reason", [None, "error"])
def test_requests_that_failed_or_will_go_on_pin_nothing(reason):
    kv = make_kv(FULL, num_pages=NUM_PAGES)
    ended(kv, range(20), pin_s=300.0, reason=reason)
    assert kv.pins.num_pages == 0


@pytest.mark.parametrize("changes", [{"pin_share": 0.0}, {"enable_prefix_caching": False}])
def test_nothing_is_pinned_without_a_budget_or_a_cache(changes):
    kv = make_kv(FULL, num_pages=NUM_PAGES, **changes)
    ended(kv, range(20), pin_s=300.0)
    assert kv.pins.num_pages == 0


@pytest.mark.parametrize("groups", [(FULL, WINDOW), (FULL, STATE)])
def test_windows_and_states_are_kept_with_the_blocks_that_need_them(groups):
    kv = make_kv(*groups, num_pages=80)
    ended(kv, range(41), pin_s=300.0)
    expected = num_cached(kv, range(40))
    assert expected >= 32
    for number in range(12):
        ended(kv, others(100 * number, 60))
    assert num_cached(kv, range(40)) == expected


def test_blocks_whose_values_are_not_finite_lose_their_pin():
    kv = make_kv(FULL, num_pages=NUM_PAGES)
    ended(kv, range(20), pin_s=300.0)
    request = run(kv, range(20), keep=True)
    kv.taint([request])
    request.finish_reason = "error"
    kv.free(request)
    kv.check({})
    assert kv.pins.num_pages == 0


def test_pins_end_while_the_engine_runs():
    harness = Harness(num_pages=41, max_model_len=100)
    harness.add("first", list(range(20)), 4, pin_s=0.01)
    harness.drain()
    assert harness.scheduler.kv.pins.num_pages == 5
    harness.add("second", [30] * 20, 30)
    harness.drain()
    assert harness.scheduler.kv.pins.num_pages == 0
    harness.engine.record_state()
    assert harness.metrics._delta.counters["prefix_cache_pinned_blocks_total", "expired"] == 5


def test_renewing_pins_takes_no_more_memory():
    kv = make_kv(FULL, num_pages=NUM_PAGES)
    for number in range(200):
        ended(kv, range(20), at=100.0 + number, pin_s=300.0)
    assert len(kv.pins.book._due) == 4
    kv.pins.expire(450.0)
    assert kv.pins.num_pages == 4  # the last use was at 299
    assert len(kv.pins.book._due) == 4
    kv.pins.expire(599.0)
    assert kv.pins.num_pages == 0
    assert kv.pins.book._due == []


def with_host(num_slots, *, pin_share=0.25):
    """Return an engine whose pool is half as large as its host memory, which keeps what a request pins."""
    host_tier = HostTierConfig(num_slots=num_slots, max_copies=8)
    return Harness(num_pages=num_slots // 2 + 1, executor=LayeredExecutor, host_tier=host_tier, pin_share=pin_share)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_pinned_prompt_outlasts_others_in_host_memory_too(is_pinned):
    harness = with_host(40)
    harness.expected_tokens = LayeredModel(harness.scheduler.config.cache_groups).expected_tokens
    harness.add("first", list(range(20)), 4, pin_s=1000.0 if is_pinned else 0.0)
    harness.drain()
    for number in range(12):  # each takes 8 of the 20 pages, and of the 40 slots
        harness.add(f"other{number}", [25 + number] * 28, 4)
        harness.drain()
    # in the pool all pages are taken at last: the pin ends there, and not in host memory
    for number in range(3):
        harness.add(f"large{number}", [45 + number] * 60, 4)
    harness.drain()
    harness.add("again", [*range(20), 1, 2, 3], 4)
    harness.drain()
    assert (harness.seen["again"].num_cached_tokens >= 16) == is_pinned


def test_pins_in_host_memory_have_a_budget_of_their_own_and_end():
    harness = with_host(80)
    harness.expected_tokens = LayeredModel(harness.scheduler.config.cache_groups).expected_tokens
    for number in range(4):
        harness.add(f"mine{number}", [10 * number + place % 10 for place in range(28)], 1, pin_s=5.0, open_salt="mine")
        harness.drain()
    pins = harness.scheduler.kv.pins
    assert (pins.book.num_pages, pins.host.num_pages) == (10, 20)
    harness.clock.now += 6.0
    harness.add("later", [1, 2, 3], 1)
    harness.drain()
    assert (pins.book.num_pages, pins.host.num_pages) == (0, 0)
    assert harness.scheduler.kv.tiers.host.index._pinned == set()
