"""Whatever happens, every request gets the tokens of its own text, for layers of any kinds, at both depths.

make test-full replays more of them. QUIRE_TRACE_SECONDS and QUIRE_TRACE_SEED of the environment make a longer run, of
other traces, of which nothing is required but the right tokens: how often something happens in a few is chance.
"""

import logging
import os
import time
from collections import Counter

import pytest

from engine.interface.config import CacheGroup
from tests.support.cache_traces import KINDS, STATE_KINDS, Trace
from tests.support.engine_harness import Harness
from tests.support.layered_model import LayeredExecutor, LayeredModel

SECONDS = float(os.environ.get("QUIRE_TRACE_SECONDS", "0"))
FIRST_SEED = int(os.environ.get("QUIRE_TRACE_SEED", "0"))
NUM_AT_LEAST = 200
FULL_SECONDS = 45
FULL_FIRST_SEED = 1_000_000


def run(kinds, seconds, num_at_least, first_seed, **options):
    """Replay traces until the time is over; return what happened in them. options: of Trace.draw()."""
    logging.disable(logging.CRITICAL)  # steps that were given up
    counts, began_s = Counter(), time.monotonic()
    try:
        while counts["traces"] < num_at_least or time.monotonic() - began_s < seconds:
            seed = first_seed + counts["traces"]
            try:
                counts += Trace.draw(seed, kinds, **options).replay_all()
            except Exception as error:
                raise AssertionError(f"trace {seed} of {kinds}") from error
            counts["traces"] += 1
    finally:
        logging.disable(logging.NOTSET)
    print(dict(counts))
    return counts


def assert_happened(names, counts, *, once_in):
    """Each of these happened more than once in so many traces; nothing is required of traces of another seed."""
    rare = {name for name in names if counts[name] <= counts["traces"] / once_in}
    assert FIRST_SEED != 0 or not rare


@pytest.mark.parametrize(("seed", "num_preemptions"), [(7_004_952, 0), (7_000_541, 7)])
def test_a_preempted_tenant_does_not_take_back_the_room_that_another_ones_prompt_needs(seed, num_preemptions):
    """Two tenants, prompts that have no room, and others admitted before them: the first went on without end."""
    counts = Trace.draw(seed, KINDS).replay_all()
    assert counts["preemptions"] == num_preemptions


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "first_seed"),
    [(SECONDS, FIRST_SEED), pytest.param(FULL_SECONDS, FULL_FIRST_SEED, marks=pytest.mark.full)],
    ids=["", "more"],
)
def test_every_trace_gives_the_models_tokens(seconds, first_seed):
    counts = run(KINDS, seconds, NUM_AT_LEAST, first_seed)
    names = (
        "preemptions", "hit_tokens", "evictions", "accepted_drafts", "zeroed_pages", "failed_steps", "restored_pages",
        "saved_pages", "pins_expired", "pins_over_budget", "pins_reused", "grouped_rows",
    )  # fmt: skip
    assert_happened(names, counts, once_in=24)


@pytest.mark.slow
@pytest.mark.parametrize("num_traces", [120, pytest.param(400, marks=pytest.mark.full)])
def test_all_that_can_happen_to_a_request_happens_to_states(num_traces):
    counts = run(STATE_KINDS, 0, num_traces, FIRST_SEED)
    assert_happened(("preemptions", "aborts", "salted_hit_tokens", "adapter_hit_tokens"), counts, once_in=41)
    names = (
        "hit_tokens", "evictions", "accepted_drafts", "rejected_drafts", "zeroed_pages", "failed_steps",
        "restored_pages", "saved_pages", "states_in_answers",
    )  # fmt: skip
    assert_happened(names, counts, once_in=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_traces", "first_seed"),
    [(30, FIRST_SEED), pytest.param(200, FULL_FIRST_SEED, marks=pytest.mark.full)],
    ids=["", "more"],
)
def test_blocks_that_were_in_host_memory_give_the_same_tokens(num_traces, first_seed):
    counts = run(KINDS, 0, num_traces, first_seed, is_tiered=True)
    names = (
        "pages_to_host", "pages_from_host", "host_tokens", "host_evictions", "missed_by_the_host", "preemptions",
        "failed_steps", "aborts", "restored_pages",
    )  # fmt: skip
    assert_happened(names, counts, once_in=12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_traces", "first_seed"),
    [(40, FIRST_SEED), pytest.param(200, FULL_FIRST_SEED, marks=pytest.mark.full)],
    ids=["", "more"],
)
def test_swapped_requests_have_the_same_tokens(num_traces, first_seed):
    counts = run(KINDS, 0, num_traces, first_seed, is_crowded=True)
    assert_happened(("preemptions", "swaps", "computed_after_all", "pages_from_host"), counts, once_in=8)


def test_what_each_kind_holds_and_lacks_is_counted():
    groups = (CacheGroup("full", 4), CacheGroup("window", 4, 2, window=8), CacheGroup("state", 8, 3))
    model = LayeredModel(groups)
    harness = Harness(groups=groups, executor=LayeredExecutor, num_pages=200)
    harness.expected_tokens = model.expected_tokens
    harness.engine._stats._bytes_per_page = 7
    stem = list(range(24))
    for name, prompt in (("a", [*stem, *[1] * 12]), ("b", [*stem, *[2] * 12]), ("c", [*stem, *[3] * 12])):
        harness.add(name, prompt, 4)
        harness.turn(3)
        harness.engine.record_state()
        gauges = harness.metrics._delta.gauges
        held = [gauges["kv_cache_pages_held", kind] for kind in ("full", "window", "state")]
        assert all(held)
        assert sum(held) == gauges["kv_cache_blocks_used", ""]
        assert gauges["kv_cache_states", "live"] == 1
        harness.drain()
    gauges, counters = harness.metrics._delta.gauges, harness.metrics._delta.counters
    assert not any(gauges["kv_cache_pages_held", kind] for kind in ("full", "window", "state"))
    assert gauges["kv_cache_pages_cached", "state"] == 4 * 3
    assert (gauges["kv_cache_states", "live"], gauges["kv_cache_states", "saved"]) == (0, 4)
    assert gauges["kv_cache_state_bytes", "saved"] == 4 * 3 * 7
    assert counters["prefix_cache_requests_total", "no_checkpoint"] == 1  # b
    assert counters["prefix_cache_limited_tokens_total", "state"] == 24  # b's; c begins at its parting point
    assert counters["prefix_cache_states_total", "saved"] == 4
    assert counters["prefix_cache_states_total", "restored"] == 1
    assert harness.seen["c"].num_cached_tokens == 24
