"""A step that the device has no memory for: whoever made it large fails, the others get their tokens, nothing leaks."""

import logging
import random

import pytest

from engine.interface.errors import OutOfMemory
from engine.interface.protocol import RequestFailed
from server.structured_output.grammar_spec import regex_grammar
from tests.support.engine_harness import VOCAB_SIZE, Harness, decode_plan, drafters
from tests.support.grammar_tokens import compiler, text_of
from tests.support.scarce_executor import ScarceExecutor

pytestmark = pytest.mark.slow

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
PLACES = ("before forward", "after forward", "sample", "wait")


def fail_once(harness, place, when=lambda plan: True):
    """Run out of memory at the first step that `when` is true of, and never again."""
    failed = []

    def fails(at, plan):
        if at == place and not failed and when(plan):
            failed.append(plan)
            return True
        return False

    harness.executor.fails = fails
    return failed


def has_drafts(plan):
    return any(row.num_drafts for row in plan.rows)


def has_chunk(plan):
    return any(row.token_ids for row in plan.rows)


@DEPTHS
@pytest.mark.parametrize("place", PLACES)
def test_the_prompt_that_made_a_step_large_fails_and_the_decoding_requests_go_on(depth, place, caplog):
    harness = Harness(depth=depth, executor=ScarceExecutor)
    harness.add("old", [1, 2, 3], 12)
    harness.add("other", [4] * 9, 12)
    harness.turn(5)
    failed = fail_once(harness, place, has_chunk)
    harness.add("new", [5] * 6, 12)
    harness.drain()
    assert failed
    assert {name: seen.ends for name, seen in harness.seen.items()} == {
        "old": ["length"],
        "other": ["length"],
        "new": ["out_of_memory"],
    }
    assert harness.metrics._delta.counters["requests_finished_total", "error"] == 1
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "failed=1 recomputed=2" in record.getMessage()
    assert "\n" not in record.getMessage()


@DEPTHS
@pytest.mark.parametrize(
    "extras", [{"logprobs": 2}, {"prompt_logprobs": 2}, {"presence_penalty": 1.0}, {"logit_bias": {3: 1.0}}]
)
def test_without_prompts_those_that_ask_for_more_than_tokens_fail_first(depth, extras):
    harness = Harness(depth=depth, executor=ScarceExecutor)
    harness.add("plain", [1, 2, 3], 12)
    harness.add("extra", [4] * 9, 12, **extras)
    harness.turn(5)
    fail_once(harness, "sample", lambda plan: not has_chunk(plan) and len(plan.rows) == 2)
    harness.drain()
    assert harness.seen["plain"].ends == ["length"]
    assert harness.seen["extra"].ends == ["out_of_memory"]


@DEPTHS
def test_where_nobody_stands_out_all_rows_of_the_step_fail_and_later_requests_are_served(depth):
    harness = Harness(depth=depth, executor=ScarceExecutor)
    harness.add("a", [1, 2, 3], 12)
    harness.add("b", [4] * 9, 12)
    harness.turn(5)
    fail_once(harness, "before forward")
    harness.turn()
    harness.add("later", [5], 3)
    harness.drain()
    assert [harness.seen[name].ends for name in ("a", "b", "later")] == [["out_of_memory"]] * 2 + [["length"]]
    (first, _) = [message for _, message in harness.messages if isinstance(message, RequestFailed)]
    assert first.code == OutOfMemory.code
    assert first.message.endswith(".")


def test_a_device_that_stays_full_fails_every_request_and_hangs_none():
    harness = Harness(executor=ScarceExecutor)
    harness.executor.fails = lambda place, plan: place == "before forward"
    for i in range(9):
        harness.add(f"r{i}", [i] * 5, 5)
    harness.drain()
    assert all(seen.ends == ["out_of_memory"] for seen in harness.seen.values())


@DEPTHS
@pytest.mark.parametrize("place", PLACES)
def test_drafts_that_made_a_step_too_large_fail_nobody_and_come_no_more(depth, place):
    harness = Harness(depth=depth, executor=ScarceExecutor, make_drafter=drafters(3), max_num_samples=16)
    harness.add("a", [1, 2, 3], 20)
    harness.add("b", [4] * 9, 20)
    failed = fail_once(harness, place, has_drafts)
    while not failed:
        harness.turn()
    num_plans = len(harness.executor.plans)
    harness.drain()
    assert [harness.seen[name].ends for name in ("a", "b")] == [["length"]] * 2
    (plan,) = failed
    num_drafted = sum(row.num_drafts > 0 for row in plan.rows)
    later = [decode_plan(encoded) for encoded in harness.executor.plans[num_plans:]]
    assert len({row.req_index for plan in later for row in plan.rows if row.num_drafts}) == 2 - num_drafted


@DEPTHS
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.table
def test_whatever_fails_every_request_ends_once_with_its_own_tokens(depth, seed, num_drafts):
    rng = random.Random(seed)
    harness = Harness(
        depth=depth,
        executor=ScarceExecutor,
        num_pages=rng.randint(8, 33),
        max_num_seqs=rng.randint(1, 6),
        enable_prefix_caching=rng.random() < 0.5,
        make_drafter=drafters(num_drafts),
        max_num_samples=16,
    )
    harness.executor.fails = lambda place, plan: rng.random() < 0.06
    for i in range(20):
        extras = rng.choice(
            [{}, {}, {"logprobs": 1}, {"prompt_logprobs": 1}, {"presence_penalty": 1.0}, {"stop_token_ids": [1, 2, 3]}]
        )
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))]
        harness.add(f"r{i}", prompt, rng.randint(1, 10), client_id=i % 3, **extras)
        harness.turn(rng.randint(0, 4))
        if rng.random() < 0.1:
            harness.abort(f"r{rng.randrange(i + 1)}", rng.randrange(3))
        if rng.random() < 0.03:
            harness.leave(i % 3)
    harness.drain()  # compares every stream with the oracle, and looks for leaked blocks
    ends = [end for seen in harness.seen.values() for end in seen.ends]
    assert set(ends) <= {"length", "stop", "abort", "out_of_memory"}


@DEPTHS
@pytest.mark.parametrize("place", PLACES)
def test_constrained_answers_go_on_where_they_were_before_the_steps_given_up(depth, place):
    answers = []
    for fails in (False, True):
        harness = Harness(depth=depth, executor=ScarceExecutor, get_compiler=compiler)
        harness.add("bound", [1, 2, 3], 40, grammar=regex_grammar("(abc|cab){8}"))
        harness.turn(5)
        while len(harness.seen["bound"].token_ids) < 3:
            harness.turn()
        if fails:
            failed = fail_once(harness, place, has_chunk)
        harness.add("new", [5] * 6, 12)
        harness.drain()
        answers.append(harness.seen["bound"])
    assert failed
    assert answers[0].token_ids == answers[1].token_ids
    assert len(text_of(answers[1].token_ids)) == 24
    assert answers[1].ends == ["stop"]
