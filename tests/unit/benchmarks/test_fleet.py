"""The simulated fleet: nothing is lost, time goes forward, and more load or fewer replicas never makes it faster."""

import dataclasses

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fleet import POLICIES, Fleet, Load
from benchmarks.step_times import StepTimes
from engine.interface.config import SchedulerConfig
from engine.interface.errors import PromptTooLong

BLOCK_SIZE = 16
STEP_S, ROW_S, PROMPT_S = 0.010, 0.001, 0.0001  # of a step with one row, each further one, a prompt token


def step_times(*, depth: int = 1, num_pages: int = 1000, max_num_seqs: int = 8, budget: int = 256) -> StepTimes:
    scheduler = SchedulerConfig(
        num_pages=num_pages,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=4096,
    )
    return StepTimes(
        model="toy",
        device="toy",
        context=1,
        decode_s=[(1, STEP_S), (101, STEP_S + 100 * ROW_S)],
        context_s_per_token=0.0,
        prompt_s=[(1000, 1000 * PROMPT_S)],
        scheduler=scheduler,
        depth=depth,
    )


loads = st.builds(
    Load,
    num_requests=st.integers(1, 40),
    rate_per_s=st.sampled_from([0.0, 1.0, 20.0, 500.0]),
    concurrency=st.integers(1, 20),
    input_len=st.sampled_from([(1, 1), (10, 400), (300, 300)]),
    output_len=st.sampled_from([(1, 1), (1, 30), (20, 20)]),
    shared_prefix=st.sampled_from([0, 48]),
    seed=st.integers(0, 5),
)


@settings(max_examples=settings.default.max_examples)
@given(load=loads, depth=st.sampled_from([1, 2]), num_replicas=st.integers(1, 3), policy=st.sampled_from(POLICIES))
def test_every_request_ends_with_all_its_tokens_in_order(
    load: Load, depth: int, num_replicas: int, policy: str
) -> None:
    """The pool holds two of the longest requests, so that some must wait."""
    times = step_times(depth=depth, num_pages=60)
    fleet = Fleet(times, load, num_replicas=num_replicas, policy=policy, overhead_s=0.002).run()
    assert len(fleet.timings) == len(fleet.queue_s) == load.num_requests
    assert sum(replica.num_given for replica in fleet.replicas) == load.num_requests
    for timing in fleet.timings:
        assert load.output_len[0] <= timing.num_tokens <= load.output_len[1]
        assert len(timing.itl_s) == timing.num_tokens - 1
        assert timing.start_s + 0.001 + STEP_S <= timing.first_s + 1e-9
        assert timing.first_s <= timing.last_s == timing.end_s
        assert min(timing.itl_s, default=STEP_S) >= STEP_S - 1e-9
    for replica in fleet.replicas:
        replica.scheduler.check()
        assert replica.scheduler.kv.pool.num_used == 0
        assert replica.busy_s <= fleet.duration_s + max(timing.start_s for timing in fleet.timings) + 1e-9


def test_one_request_takes_the_times_of_its_steps() -> None:
    load = Load(num_requests=1, input_len=(100, 100), output_len=(5, 5))
    (timing,) = Fleet(step_times(), load).run().timings
    assert timing.first_s - timing.start_s == pytest.approx(STEP_S + 100 * PROMPT_S)
    assert timing.itl_s == pytest.approx([STEP_S] * 4)


def test_the_overhead_is_before_the_engine_and_differs_between_requests() -> None:
    load = Load(num_requests=20, concurrency=1, input_len=(1, 1), output_len=(2, 2))
    timings = Fleet(step_times(), load, overhead_s=0.5).run().timings
    waits = [timing.first_s - timing.start_s - STEP_S - PROMPT_S for timing in timings]
    assert len(set(waits)) == 20
    assert min(waits) >= 0.25
    assert max(waits) <= 0.75
    assert all(timing.itl_s == pytest.approx([STEP_S]) for timing in timings)


def test_a_long_prompt_is_computed_in_chunks() -> None:
    load = Load(num_requests=1, input_len=(1000, 1000), output_len=(1, 1))
    fleet = Fleet(step_times(budget=256), load).run()
    assert fleet.replicas[0].num_steps == 4
    assert fleet.timings[0].first_s == pytest.approx(4 * STEP_S + 1000 * PROMPT_S)


def test_rows_that_decode_together_share_their_steps() -> None:
    load = Load(num_requests=8, concurrency=8, input_len=(1, 1), output_len=(50, 50))
    alone = Fleet(step_times(), dataclasses.replace(load, concurrency=1)).run()
    together = Fleet(step_times(), load).run()
    assert together.duration_s < alone.duration_s / 4


@pytest.mark.parametrize("depth", [1, 2])
def test_a_higher_rate_never_shortens_the_wait(depth: int) -> None:
    means = []
    for rate in (2.0, 8.0, 32.0, 128.0):
        load = Load(num_requests=200, rate_per_s=rate, input_len=(50, 50), output_len=(20, 20))
        fleet = Fleet(step_times(depth=depth), load).run()
        means.append(sum(timing.end_s - timing.start_s for timing in fleet.timings) / 200)
    assert means == sorted(means)
    assert means[-1] > 2 * means[0]


def test_more_replicas_never_lengthen_it_and_share_the_work() -> None:
    load = Load(num_requests=200, rate_per_s=100.0, input_len=(50, 50), output_len=(20, 20))
    fleets = [Fleet(step_times(), load, num_replicas=number).run() for number in (1, 2, 4)]
    means = [sum(timing.end_s - timing.start_s for timing in fleet.timings) for fleet in fleets]
    assert means == sorted(means, reverse=True)
    given_out = [replica.num_given for replica in fleets[-1].replicas]
    assert min(given_out) > 200 / 4 / 2


def test_a_small_kv_cache_preempts_and_still_ends_everything() -> None:
    load = Load(num_requests=12, concurrency=8, input_len=(16, 16), output_len=(200, 200))
    wide, tight = Fleet(step_times(), load).run(), Fleet(step_times(num_pages=40), load).run()
    assert wide.replicas[0].scheduler.num_preemptions == 0
    assert tight.replicas[0].scheduler.num_preemptions > 0
    assert tight.duration_s > wide.duration_s
    assert all(timing.num_tokens == 200 for timing in tight.timings)


def test_a_shared_prefix_is_computed_once() -> None:
    load = Load(num_requests=10, concurrency=1, input_len=(400, 400), output_len=(2, 2), shared_prefix=320)
    fleet = Fleet(step_times(budget=512), load).run()
    cached = [timing.num_cached_tokens for timing in fleet.timings]
    assert cached == [0] + [320] * 9
    assert fleet.timings[1].first_s - fleet.timings[1].start_s == pytest.approx(STEP_S + 80 * PROMPT_S)


def test_what_can_never_be_served_is_refused() -> None:
    with pytest.raises(PromptTooLong):
        Fleet(step_times(), Load(num_requests=1, input_len=(5000, 5000))).run()


def test_the_same_seed_gives_the_same_run() -> None:
    load = Load(num_requests=50, rate_per_s=30.0, input_len=(10, 400), output_len=(1, 30), seed=3)
    first, again = (Fleet(step_times(depth=2), load, num_replicas=2).run().timings for _ in range(2))
    assert msgspec.msgpack.encode(first) == msgspec.msgpack.encode(again)
