"""What the scheduler plans: order, budget, chunks, prefix hits, limits."""

import pytest

from engine.interface.errors import InvalidParameter, PromptTooLong
from tests.support.stepping import STOP, add, commit, make_scheduler, pump, schedule, step


def test_nothing_to_do_is_no_plan():
    scheduler = make_scheduler()
    assert schedule(scheduler) is None
    assert not scheduler.has_work


def test_a_long_prompt_is_computed_in_chunks_and_samples_once_at_its_end():
    scheduler = make_scheduler()
    add(scheduler, "long", range(40))
    rows = [step(scheduler).rows[0] for _ in range(3)]
    assert [(row.start, row.num_tokens, row.samples) for row in rows] == [
        (0, 16, False),
        (16, 16, False),
        (32, 8, True),
    ]
    assert [token_id for row in rows for token_id in row.token_ids] == list(range(40))


def test_decode_rows_come_first_and_a_chunk_fills_the_rest_of_the_budget():
    scheduler = make_scheduler()
    chatty = add(scheduler, "decoding", range(3), priority=1)
    step(scheduler)
    long = add(scheduler, "long", range(40))  # more urgent, and yet its row comes second
    plan = schedule(scheduler)
    assert [row.req_index for row in plan.rows] == [chatty.req_index, long.req_index]
    assert plan.rows[0].token_ids == []
    assert plan.num_tokens == 16


def test_prompts_get_the_smaller_budget_while_others_decode():
    scheduler = make_scheduler(max_decode_step_tokens=6)
    add(scheduler, "decoding", range(14))
    assert step(scheduler).num_tokens == 14  # alone: the whole budget
    add(scheduler, "long", range(20, 60))
    assert [step(scheduler).num_tokens for _ in range(3)] == [6, 6, 6]
    scheduler.abort("decoding")
    assert step(scheduler).num_tokens == 16


@pytest.mark.parametrize(("num_decodes", "num_tokens"), [(1, 12), (2, 20), (3, 28), (4, 28)])
def test_prompts_get_more_the_more_decode_up_to_a_padded_size(num_decodes, num_tokens):
    """8 tokens per decoding request: at least 10, at most 28, rounded up to what costs as much."""
    sizes = {"min_decode_step_tokens": 10, "max_decode_step_tokens": 28, "step_sizes": [12, 20, 28, 40]}
    scheduler = make_scheduler(max_num_batched_tokens=64, max_num_seqs=8, **sizes)
    for i in range(num_decodes):
        add(scheduler, str(i), range(4))
    step(scheduler)
    add(scheduler, "long", range(60))
    assert schedule(scheduler).num_tokens == num_tokens


def test_a_long_prompt_gets_a_part_of_its_whole_length_in_each_step_beside_others():
    sizes = {"min_decode_step_tokens": 4, "max_decode_step_tokens": 40, "step_sizes": [4, 8, 12, 16, 40]}
    scheduler = make_scheduler(max_num_batched_tokens=64, num_pages=100, max_model_len=320, **sizes)
    add(scheduler, "decoding", range(3), max_tokens=30)
    step(scheduler)
    add(scheduler, "long", [token % 50 for token in range(300)])  # 300 / 32 tokens at least, beside one that decodes
    assert [step(scheduler).num_tokens for _ in range(20)] == [12] * 20


def test_prompts_get_the_less_beside_others_the_longer_the_context_before_them():
    sizes = {"min_decode_step_tokens": 4, "max_decode_step_tokens": 40, "step_sizes": [4, 8, 12, 16, 40]}
    costs = {"max_mixed_cost": 16, "costly_context": 20}
    scheduler = make_scheduler(
        max_num_batched_tokens=64, max_num_seqs=4, num_pages=400, max_model_len=1500, **sizes, **costs
    )
    add(scheduler, "decoding", range(3), max_tokens=90)
    step(scheduler)
    add(scheduler, "long", [token % 50 for token in range(1400)])  # which asks for 1400 / 32 in each step
    assert [step(scheduler).num_tokens for _ in range(7)] == [16, 8, 8, 8, 8, 4, 4]
    for _ in range(40):
        assert step(scheduler).num_tokens >= 4


def test_requests_are_admitted_by_priority_then_arrival():
    scheduler = make_scheduler(max_num_seqs=1)
    late = add(scheduler, "late", [1], 1, arrival_s=2.0)
    early = add(scheduler, "early", [2], 1, arrival_s=1.0)
    urgent = add(scheduler, "urgent", [3], 1, arrival_s=3.0, priority=-1)
    order = [step(scheduler).rows[0].token_ids for _ in range(3)]
    assert order == [urgent.prompt_token_ids, early.prompt_token_ids, late.prompt_token_ids]


def test_a_prefix_is_found_after_the_commit_of_its_step_and_not_before():
    scheduler = make_scheduler()
    add(scheduler, "first", range(9))
    first_plan = schedule(scheduler)
    too_soon = add(scheduler, "too soon", range(9))
    second_plan = schedule(scheduler)
    commit(scheduler, first_plan)
    commit(scheduler, second_plan)
    in_time = add(scheduler, "in time", range(9))
    plan = schedule(scheduler)
    assert too_soon.num_cached_tokens == 0
    assert in_time.num_cached_tokens == 8
    assert plan.rows[-1].start == 8
    assert [(table, first, len(pages)) for table, first, pages in plan.rows[-1].new_blocks] == [(0, 0, 3)]


def test_of_a_long_prompt_the_committed_chunks_are_found_while_the_next_is_in_flight():
    scheduler = make_scheduler()
    add(scheduler, "first", range(40))
    first = schedule(scheduler)
    schedule(scheduler)
    commit(scheduler, first)
    other = add(scheduler, "other", range(40))
    schedule(scheduler)  # the first one's last chunk, and the other's first
    assert other.num_cached_tokens == 16


def test_the_next_turn_of_a_conversation_finds_prompt_and_answer():
    scheduler = make_scheduler()
    first = add(scheduler, "first", range(9), 8)
    pump(scheduler, 7)
    assert len(first.output_token_ids) == 7
    follow_up = add(scheduler, "follow-up", [*range(9), *first.output_token_ids, 5, 40, 41])
    schedule(scheduler)
    assert follow_up.num_cached_tokens == 12  # 15 are computed and committed


def test_a_row_whose_last_token_is_in_flight_is_planned_without_it():
    scheduler = make_scheduler()
    request = add(scheduler, "r", range(5))
    first = schedule(scheduler)
    second = schedule(scheduler)
    assert [(row.start, row.num_tokens, row.token_ids, row.samples) for row in second.rows] == [(5, 1, [], True)]
    assert request.num_pending_tokens == 2
    commit(scheduler, first)
    assert request.num_pending_tokens == 1
    assert request.output_token_ids == [5]


def test_nothing_is_planned_beyond_max_tokens_or_the_context():
    scheduler = make_scheduler(max_model_len=7)
    by_max_tokens = add(scheduler, "a", range(3), 1)
    by_context = add(scheduler, "b", range(6), 50)
    plan = schedule(scheduler)
    assert schedule(scheduler) is None
    commit(scheduler, plan)
    assert by_max_tokens.finish_reason == by_context.finish_reason == "length"
    assert not scheduler.has_work


def test_a_stop_token_before_min_tokens_does_not_stop():
    scheduler = make_scheduler()
    request = add(scheduler, "r", range(5), min_tokens=3)
    for _ in range(3):
        step(scheduler, STOP)
    assert request.output_token_ids == [STOP] * 3
    assert request.finish_reason == "stop"


def test_a_free_req_index_is_named_once_in_the_next_plan_and_may_be_taken_in_the_same():
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, "first", range(5), 1)
    step(scheduler)
    add(scheduler, "second", range(5), 2)
    plan = step(scheduler)
    assert plan.freed == [0]
    assert [init.req_index for init in plan.inits] == [0]
    assert step(scheduler).freed == []


def test_inits_carry_tokens_only_for_penalties():
    scheduler = make_scheduler()
    add(scheduler, "plain", [1, 2, 3])
    add(scheduler, "penalised", [4, 5, 6], frequency_penalty=0.5)
    plan = step(scheduler)
    assert [init.token_ids for init in plan.inits] == [[], [4, 5, 6]]
    assert [init.num_prompt_tokens for init in plan.inits] == [3, 3]
    assert step(scheduler).inits == []


@pytest.mark.parametrize(
    ("changes", "num_prompt", "limit"), [({"max_model_len": 10}, 10, "9"), ({"num_pages": 3}, 8, "7")]
)
def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers(changes, num_prompt, limit):
    scheduler = make_scheduler(**changes)
    with pytest.raises(PromptTooLong, match=rf"has {num_prompt} tokens; at most {limit} "):
        add(scheduler, "too long", range(num_prompt))
    add(scheduler, "fits", range(num_prompt - 1))
    assert list(scheduler.requests) == ["fits"]


@pytest.mark.parametrize(("prompt", "max_tokens"), [([], 1), ([1], 0)])
def test_an_empty_request_is_refused(prompt, max_tokens):
    with pytest.raises(InvalidParameter):
        add(make_scheduler(), "r", prompt, max_tokens)


def test_a_request_id_in_use_is_refused_and_free_again_after_the_end():
    scheduler = make_scheduler()
    add(scheduler, "r", [1])
    with pytest.raises(InvalidParameter, match="'r'"):
        add(scheduler, "r", [2])
    schedule(scheduler)
    scheduler.abort("r")
    add(scheduler, "r", [3])  # though the first one's step is still in flight
    assert scheduler.requests["r"].prompt_token_ids == [3]


def test_max_tokens_beyond_the_pool_ends_with_length_at_the_pools_end():
    scheduler = make_scheduler(num_pages=3, max_model_len=1000)
    request = add(scheduler, "r", range(3), 900)
    while scheduler.has_work:
        step(scheduler)
    assert request.finish_reason == "length"
    assert len(request.output_token_ids) == 5  # 8 slots, 3 of them the prompt's
