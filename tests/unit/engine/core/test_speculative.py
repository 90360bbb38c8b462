"""Speculation in the loop: who gets drafts, what a client sees of them, and what they may not cost the others."""

import logging

import pytest

from engine.core.speculative import Drafter, make_drafter
from engine.core.step import NEWEST, SteadyRowsPlan
from engine.interface.config import SpeculativeConfig
from engine.interface.protocol import SamplingParams, StepEvents
from server.structured_output.grammar_spec import regex_grammar
from tests.support.engine_harness import Harness, decode_plan, drafters
from tests.support.fake_executor import FakeProposer, expected_tokens
from tests.support.grammar_tokens import compiler

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


class ScriptedProposer:
    """Proposes one token again and again; None: nothing."""

    def __init__(self, token_id):
        self.token_id = token_id

    def propose(self, prompt_token_ids, output_token_ids, count):
        return [] if self.token_id is None else [self.token_id] * count


def always_right(params):
    return Drafter(FakeProposer(errs=False), num_tokens=4, min_tokens=params.min_tokens)


def plans_of(harness):
    return [decode_plan(plan) for plan in harness.executor.plans]


def drafted_rows(harness):
    return [row for plan in plans_of(harness) for row in plan.rows if row.num_drafts]


@DEPTHS
def test_accepted_drafts_arrive_together_and_every_token_is_counted_once(depth):
    harness = Harness(depth=depth, make_drafter=always_right, max_num_samples=20)
    harness.add("r", [1, 2, 3], 22, logprobs=1)
    harness.drain()
    seen = harness.seen["r"]
    assert len(seen.token_ids) == seen.num_logprobs == 22
    counts = [message.num_tokens for _, message in harness.messages if isinstance(message, StepEvents)]
    assert counts == [[1], [5], [5], [5], [5], [1]]
    counters = harness.metrics._delta.counters
    assert counters["generation_tokens_total", ""] == 22
    assert counters["spec_decode_num_drafts_total", ""] == 4
    assert counters["spec_decode_num_draft_tokens_total", ""] == 16
    assert counters["spec_decode_num_accepted_tokens_total", ""] == 16


@DEPTHS
def test_a_stop_token_among_accepted_drafts_is_the_last(depth):
    expected = expected_tokens([1, 2, 3], SamplingParams(max_tokens=30), max_num_tokens=64)
    stop_place = next(place for place in range(7, 30) if expected.index(expected[place]) == place)
    harness = Harness(depth=depth, make_drafter=always_right, max_num_samples=20)
    harness.add("r", [1, 2, 3], 30, stop_token_ids=[expected[stop_place]])
    harness.drain()
    assert harness.seen["r"].token_ids == expected[: stop_place + 1]
    assert harness.seen["r"].ends == ["stop"]


@DEPTHS
def test_answers_that_cannot_be_guessed_are_hardly_tried(depth):
    harness = Harness(
        depth=depth, make_drafter=lambda params: Drafter(ScriptedProposer(50), num_tokens=4), max_num_samples=20
    )
    harness.add("r", [1, 2, 3], 60)
    harness.drain()
    assert 3 <= len(drafted_rows(harness)) <= 6  # after 2, 4, 8, 16, 32 tokens
    assert harness.metrics._delta.counters["spec_decode_num_draft_tokens_total", ""] > 0
    assert ("spec_decode_num_accepted_tokens_total", "") not in harness.metrics._delta.counters


@DEPTHS
def test_where_nothing_is_proposed_plans_are_those_without_speculation(depth):
    plans = []
    for make in (None, lambda params: Drafter(ScriptedProposer(None), num_tokens=4)):
        harness = Harness(depth=depth, num_pages=14, max_num_seqs=6, make_drafter=make)
        for i in range(12):
            harness.add(f"r{i}", [i % 3] * (5 + i), 20, stop_token_ids=[1, 2, 3])
            harness.turn(i % 3)
        harness.drain()
        plans.append(plans_of(harness))
        for plan in plans[-1]:  # plain decode rows are steady in the first, single in the second
            rows = sorted(plan.rows, key=lambda row: (bool(row.token_ids), row.req_index))
            plan.singles, plan.steady = rows, SteadyRowsPlan()
    assert harness.scheduler.num_preemptions > 0
    assert plans[0] == plans[1]
    assert not any(row.num_drafts for plan in plans[0] for row in plan.rows)


@DEPTHS
def test_every_decoding_request_gets_its_token_before_anyone_gets_drafts(depth):
    harness = Harness(depth=depth, make_drafter=always_right, max_num_batched_tokens=12, max_num_samples=100)
    for i in range(4):
        harness.add(f"r{i}", [i, 2, 3], 12)
    harness.drain()
    assert drafted_rows(harness)
    for plan in plans_of(harness):
        decoding = [row for row in plan.rows if row.num_drafts or not row.token_ids]
        if any(row.num_drafts for row in decoding):
            assert sum(row.num_drafts for row in decoding) <= 6 - len(decoding)


@DEPTHS
def test_drafts_leave_half_of_a_step_to_prompts(depth):
    harness = Harness(depth=depth, make_drafter=always_right, max_num_batched_tokens=10, max_num_samples=100)
    harness.add("old", [1, 2, 3], 50)
    harness.turn(3)
    harness.add("new", [4] * 25, 1)
    harness.turn(6 + depth)
    assert harness.seen["new"].ends == ["length"]
    assert not harness.seen["old"].ends
    harness.drain()


def test_drafts_take_no_block_that_a_running_request_may_need_next():
    harness = Harness(depth=1, num_pages=9, block_size=4, make_drafter=always_right, max_num_samples=100)
    for i in range(4):
        harness.add(f"r{i}", [i, 2, 3], 4)
    harness.drain()
    assert harness.scheduler.num_preemptions == 0
    plain = Harness(depth=1, num_pages=9, block_size=4)
    for i in range(4):
        plain.add(f"r{i}", [i, 2, 3], 4)
    plain.drain()
    assert plain.scheduler.num_preemptions == 0


def test_a_drafted_row_waits_for_its_commit_while_the_others_go_on():
    harness = Harness(
        depth=2,
        make_drafter=lambda params: None if params.has_penalties else always_right(params),
        max_num_samples=100,
    )
    harness.add("guessed", [1, 2, 3], 40)
    harness.add("plain", [4, 5, 6], 40, presence_penalty=1.0)
    harness.drain()
    rows = [{row.req_index: row for row in plan.rows} for plan in plans_of(harness)]
    guessed, plain = plans_of(harness)[0].rows
    drafted = [step for step, plan in enumerate(rows) if plan.get(guessed.req_index, guessed).num_drafts]
    assert drafted == [1, 3, 5, 7, 9, 11, 13, 15]
    assert all(guessed.req_index not in rows[step + 1] for step in drafted[:-1])
    assert all(plain.req_index in plan for plan in rows[:40])
    assert rows[1][guessed.req_index].token_ids[0] == NEWEST  # still on the device when it was planned
    assert rows[3][guessed.req_index].token_ids[0] == harness.seen["guessed"].token_ids[5]


def test_constrained_and_penalized_requests_are_not_guessed_ahead():
    harness = Harness(get_compiler=compiler, make_drafter=drafters(4), max_num_samples=100)
    harness.add("bound", [1, 2, 3], 40, grammar=regex_grammar("(abc|cab){8}"))
    harness.drain()
    assert harness.seen["bound"].ends == ["stop"]
    assert not drafted_rows(harness)
    config = SpeculativeConfig()
    assert make_drafter(config, SamplingParams(max_tokens=2, temperature=0.0)) is not None
    for params in (SamplingParams(max_tokens=2, presence_penalty=0.1), SamplingParams(2, repetition_penalty=1.1)):
        assert make_drafter(config, params) is None


def test_drafts_begin_once_min_tokens_are_out():
    harness = Harness(depth=1, make_drafter=always_right, max_num_samples=100)
    harness.add("r", [1, 2, 3], 20, min_tokens=9)
    harness.drain()
    assert min(row.start for row in drafted_rows(harness)) == 3 + 9 - 1


def test_the_log_says_how_many_guesses_were_right(caplog):
    caplog.set_level(logging.INFO, "engine")
    harness = Harness(make_drafter=always_right, max_num_samples=100)
    harness.add("r", [1, 2, 3], 61)
    harness.turn(3)
    harness.clock.now += 11
    harness.turn(3)
    (record,) = [record for record in caplog.records if "speculation" in record.getMessage()]
    assert "acceptance_rate=1.000 tokens_per_drafted_row=5.00" in record.getMessage()
