"""A request whose logits are not finite ends with an error; nothing of it reaches other requests, then or later."""

import pytest

from engine.core.step import NO_TOKEN, StepResult
from engine.interface.errors import ModelOutputInvalid
from engine.interface.protocol import RequestFailed, SamplingParams
from tests.support.engine_harness import CheckedExecutor, Harness, decode_plan, drafters
from tests.support.fake_executor import expected_tokens
from tests.support.stepping import add, commit, make_scheduler, schedule

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
INVALID = [ModelOutputInvalid.code]
SPOILS = 13


class SpoiledExecutor(CheckedExecutor):
    """Computes nothing finite after one token, as a checkpoint with NaN in that token's embedding."""

    spoils = SPOILS


def zeroed(harness):
    return [page for plan in harness.executor.plans for page in decode_plan(plan).zeroed]


def counted(harness):
    counters = harness.metrics._delta.counters
    return counters.get(("nonfinite_requests_total", ""), 0), counters.get(("requests_finished_total", "error"), 0)


@DEPTHS
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_only_the_request_that_is_not_finite_ends(depth, num_drafts, caplog):
    harness = Harness(depth=depth, executor=SpoiledExecutor, make_drafter=drafters(num_drafts))
    harness.add("a", [1, 2, 3], 9)
    harness.add("bad", [1, SPOILS, 3], 9)
    harness.add("b", [4, 5], 9)
    harness.drain()
    assert {name: seen.ends for name, seen in harness.seen.items()} == {
        "a": ["length"],
        "bad": INVALID,
        "b": ["length"],
    }
    (failed,) = [message for _, message in harness.messages if isinstance(message, RequestFailed)]
    assert "not finite" in failed.message
    assert counted(harness) == (1, 1)
    assert "request_id=bad" in caplog.text


@DEPTHS
def test_a_stream_that_ceases_to_be_finite_keeps_its_tokens(depth):
    """Some answer of these comes to the token that spoils what follows, and the step launched with it is dropped."""
    harness = Harness(depth=depth, executor=SpoiledExecutor, max_num_seqs=8, num_pages=200)
    for number in range(30):
        harness.add(f"r{number}", [number % 7, number], 20)
    harness.drain()
    cut = [seen for seen in harness.seen.values() if seen.ends == INVALID and seen.token_ids]
    assert cut
    assert all(seen.token_ids[-1] == SPOILS and SPOILS not in seen.token_ids[:-1] for seen in cut)


@DEPTHS
def test_its_blocks_are_not_published_and_are_zeroed_before_reuse(depth):
    harness = Harness(depth=depth, executor=SpoiledExecutor, max_num_batched_tokens=8, num_pages=13)
    harness.add("bad", [SPOILS] + [1] * 30, 4)  # in four chunks: the first ones are committed long before the last
    harness.drain()
    assert harness.seen["bad"].ends == INVALID
    assert not harness.scheduler.kv.pool.published
    dirty = set(harness.scheduler.kv.pool.dirty)
    assert len(dirty) == 8
    harness.add("next", [2] * 40, 4)
    harness.drain()
    assert dirty == set(zeroed(harness))
    first = next(plan for plan in map(decode_plan, harness.executor.plans) if plan.zeroed)
    assert first.inits, "zeroed by the plan that reuses them"
    assert harness.seen["next"].ends == ["length"]
    assert not harness.scheduler.kv.pool.dirty


@DEPTHS
def test_a_prefix_that_an_ended_request_left_is_taken_out_when_it_spoils_another(depth):
    harness = Harness(depth=depth, executor=SpoiledExecutor, max_num_batched_tokens=8)
    prefix = [SPOILS] + [1] * 15
    harness.add("gone", [*prefix, *range(14, 40)], 4)
    harness.turn(4)
    harness.abort("gone")
    harness.turn(2)
    assert harness.scheduler.kv.pool.published  # nobody knows yet
    harness.add("bad", [*prefix, 2, 3], 4)
    harness.drain()
    assert harness.seen["bad"].ends == INVALID
    assert harness.seen["bad"].num_cached_tokens == 0  # its start was never told
    harness.executor.spoils = None  # what it computes now is good
    harness.add("good", [*prefix, 2, 3], 4)
    harness.turn(9)
    assert harness.seen["good"].ends == ["length"]
    assert harness.seen["good"].num_cached_tokens == 0


@DEPTHS
def test_blocks_that_others_hold_are_zeroed_once_the_last_lets_go(depth):
    harness = Harness(depth=depth, executor=SpoiledExecutor)
    prompts = [[first] * 8 for first in range(SPOILS)]
    params = SamplingParams(max_tokens=30)
    prompt = next(p for p in prompts if SPOILS not in expected_tokens(p, params, max_num_tokens=64))
    harness.add("a", prompt, 30)
    harness.turn(3)
    harness.add("bad", [*prompt, SPOILS], 4)
    harness.turn(4)
    assert harness.seen["bad"].ends == INVALID
    assert harness.seen["a"].ends == []
    held = set(harness.scheduler.running[0].tables[0].blocks[:2])
    assert not held & (set(harness.scheduler.kv.pool.published) | set(zeroed(harness)))
    harness.drain()
    assert harness.seen["a"].ends == ["length"]
    assert held <= set(harness.scheduler.kv.pool.dirty)


@DEPTHS
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_that_are_not_finite_fail(depth, pooling):
    harness = Harness(depth=depth, executor=SpoiledExecutor, max_num_batched_tokens=8)
    harness.add("bad", [1] * 9 + [SPOILS] + [2] * 9, pooling=pooling)
    harness.add("good", [1] * 19, pooling=pooling)
    harness.drain()
    assert harness.seen["bad"].ends == INVALID
    assert harness.seen["good"].ends == ["stop"]
    assert counted(harness) == (1, 1)


@DEPTHS
def test_prompt_logprobs_that_are_not_finite_fail_before_the_first_token(depth):
    harness = Harness(depth=depth, executor=SpoiledExecutor, max_num_batched_tokens=8)
    harness.add("bad", [1] * 9 + [SPOILS] + [2] * 30, prompt_logprobs=1)
    harness.add("good", [1] * 9, prompt_logprobs=1)
    harness.drain()
    assert harness.seen["bad"].ends == INVALID
    assert len(harness.seen["bad"].prompt_logprobs) < 12
    assert len(harness.seen["good"].prompt_logprobs) == 8
    assert counted(harness) == (1, 1)


def test_an_aborted_request_is_not_counted_as_invalid():
    scheduler = make_scheduler()
    add(scheduler, "a", range(9))
    plan = schedule(scheduler)
    scheduler.abort("a")
    commit(scheduler, plan, NO_TOKEN)
    assert not scheduler.invalid
    assert not scheduler.kv.pool.dirty


def test_a_preempted_request_may_be_found_invalid_by_the_step_in_flight():
    scheduler = make_scheduler(num_pages=13, max_num_batched_tokens=8)
    keeper = add(scheduler, "keeper", range(7), arrival_s=1.0)
    victim = add(scheduler, "victim", range(36), arrival_s=2.0)
    plan = schedule(scheduler)
    while not plan.rows[-1].samples or plan.rows[-1].req_index != victim.req_index:
        following = schedule(scheduler)
        commit(scheduler, plan)
        plan = following
    following = schedule(scheduler)
    assert victim not in scheduler.running
    scheduler.commit(StepResult(plan.step_id, [5, NO_TOKEN]), 0.0)
    scheduler.check()
    assert scheduler.invalid == [victim]
    assert victim.finish_reason == "error"
    assert keeper.finish_reason is None
    assert scheduler.kv.pool.dirty or (following is not None and following.zeroed)


def test_a_dropped_step_that_was_to_clean_blocks_has_the_next_one_clean_them():
    scheduler = make_scheduler()
    add(scheduler, "bad", range(9))
    commit(scheduler, schedule(scheduler), NO_TOKEN)
    dirty = list(scheduler.kv.pool.dirty)
    assert len(dirty) == 3
    other = add(scheduler, "other", range(20, 25))
    assert schedule(scheduler).zeroed == dirty
    assert scheduler.drop_in_flight() == [other]  # out of memory
    add(scheduler, "next", range(30, 35))
    plan = schedule(scheduler)
    assert plan.zeroed == dirty
    commit(scheduler, plan)
    assert not schedule(scheduler).zeroed
