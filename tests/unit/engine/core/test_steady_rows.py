"""Requests that decode a plain token in every step: rows in columns, visited only when something is due."""

import msgspec

from engine.core.step import NO_TOKEN, StepPlan, StepResult
from engine.interface.config import HostTierConfig
from tests.support.stepping import STOP, add, commit, make_scheduler, pump, schedule, step


def start(*names, max_tokens=40, **changes):
    """Return a scheduler whose requests decode, and the requests."""
    limits = {"num_pages": 200, "max_num_seqs": 8, "max_num_batched_tokens": 64} | changes
    scheduler = make_scheduler(**limits)
    requests = [add(scheduler, name, [7, 8, 9, index], max_tokens) for index, name in enumerate(names)]
    step(scheduler)
    return scheduler, requests


def test_rows_that_only_go_on_are_columns_of_a_plan_that_is_a_plain_value():
    scheduler, requests = start("a", "b", "c")
    plan = step(scheduler)
    assert plan.singles == []
    assert [(row.req_index, row.start, row.num_tokens, row.token_ids) for row in plan.rows] == [
        (request.req_index, 4, 1, []) for request in requests
    ]
    assert [row.new_blocks[0][:2] for row in plan.rows] == [(0, 1)] * 3  # blocks have 4 tokens
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan
    assert (plan.num_rows, plan.num_tokens, plan.num_samples) == (3, 3, 3)
    following = step(scheduler)
    assert following.steady.req_index == plan.steady.req_index
    assert following.steady.new_blocks == []


def test_each_token_goes_to_its_request_while_others_leave_and_join():
    scheduler, (first, second, third) = start("a", "b", "c")
    expected = {first: [5], second: [5], third: [5]}
    in_flight = schedule(scheduler)
    for number in range(12):
        if number == 3:
            scheduler.abort("b")
        if number == 5:
            expected[add(scheduler, "d", range(20, 25), 9)] = []
        following = schedule(scheduler)
        requests = {request.req_index: request for request in [*scheduler.running, *scheduler.retiring]}
        tokens = [10 + (number + row.req_index) % 30 for row in in_flight.rows]
        for row, token_id in zip(in_flight.rows, tokens, strict=True):
            request = requests[row.req_index]
            if request.finish_reason is None and row.samples:
                expected[request].append(token_id)
        scheduler.commit(StepResult(in_flight.step_id, tokens), float(number))
        scheduler.check()
        in_flight = following
    assert {request: request.output_token_ids for request in expected} == expected
    assert len(expected) == 4
    assert len(second.output_token_ids) < len(first.output_token_ids)


def test_a_stop_token_ends_its_request_and_no_other():
    scheduler, (first, second, third) = start("a", "b", "c")
    second.params = msgspec.structs.replace(second.params, min_tokens=20)
    plan = schedule(scheduler)
    outputs = scheduler.commit(StepResult(plan.step_id, [5, STOP, STOP]), 1.0)
    scheduler.check()
    assert [request.finish_reason for request in (first, second, third)] == [None, None, "stop"]
    assert [output.request for output in outputs.singles] == [third]
    assert [part.request_ids for part in outputs.steady] == [["a", "b"]]
    assert third.last_token_s == 1.0


def test_a_token_that_is_not_finite_ends_its_request_alone():
    scheduler, (first, second) = start("a", "b")
    plan = schedule(scheduler)
    scheduler.commit(StepResult(plan.step_id, [NO_TOKEN, 5]), 0.0)
    scheduler.check()
    assert scheduler.invalid == [first]
    assert (first.finish_reason, second.finish_reason) == ("error", None)


def test_the_last_row_of_a_request_is_planned_by_itself():
    scheduler, (request,) = start("a", max_tokens=5)
    plans = []
    while request.finish_reason is None:
        plans.append(step(scheduler))
    assert [plan.steady.num_rows for plan in plans] == [1, 1, 1, 0]
    assert [len(plan.singles) for plan in plans] == [0, 0, 0, 1]
    assert (request.finish_reason, len(request.output_token_ids)) == ("length", 5)


def test_rows_with_log_probabilities_are_planned_by_themselves():
    scheduler = make_scheduler()
    add(scheduler, "a", range(3), logprobs=0)
    step(scheduler)
    plan = schedule(scheduler)
    assert (plan.steady.num_rows, len(plan.singles)) == (0, 1)


def test_where_the_budget_may_not_suffice_for_all_no_request_is_steady():
    scheduler, _ = start("a", "b", "c", max_num_batched_tokens=6)
    for _ in range(4):
        assert step(scheduler).steady.num_rows == 0


def test_each_client_has_its_tokens_in_one_piece():
    scheduler = make_scheduler(num_pages=200, max_num_seqs=8, max_num_batched_tokens=64)
    for index in range(6):
        add(scheduler, str(index), [index] * 5).client_id = index % 2
    step(scheduler)
    plan = schedule(scheduler)
    outputs = scheduler.commit(StepResult(plan.step_id, [10, 11, 12, 20, 21, 22]), 0.0)
    assert [(part.client_id, part.request_ids, part.token_ids) for part in outputs.steady] == [
        (0, ["0", "2", "4"], [10, 11, 12]),
        (1, ["1", "3", "5"], [20, 21, 22]),
    ]
    assert outputs.num_tokens == 6


def test_dropped_steps_make_all_requests_single_and_start_them_again():
    scheduler, requests = start("a", "b")
    schedule(scheduler)
    schedule(scheduler)
    requests[0].params = msgspec.structs.replace(requests[0].params, presence_penalty=1.0)
    assert scheduler.drop_in_flight() == [requests[0]]
    scheduler.check()
    assert requests[1].num_pending_tokens == 0
    in_flight = pump(scheduler, scheduler.committed_step_id + 4)
    assert in_flight.steady.num_rows == 1
    commit(scheduler, in_flight)
    assert len(requests[1].output_token_ids) >= 3


def answer_of(requests, num_tokens):
    """Return prompts that go on where the requests were after so many committed tokens of their answers."""
    return [[*request.prompt_token_ids, *request.output_token_ids[:num_tokens], 40, 41] for request in requests]


def test_blocks_of_steady_answers_are_published_when_a_prompt_comes_to_them():
    scheduler, requests = start("a", "b")
    for _ in range(13):
        step(scheduler)
    assert scheduler.kv.pool.num_published(0) == 2  # the prompts, a block each
    (following, _) = answer_of(requests, 14)
    again = add(scheduler, "again", following)
    step(scheduler)
    assert again.num_cached_tokens == 16  # all that is committed and full
    assert scheduler.kv.pool.num_published(0) == 2 + 3 + 1  # its own; the other answer's are looked for by nobody
    for _ in range(4):
        step(scheduler)
    later = add(scheduler, "later", answer_of(requests, 18)[0])
    step(scheduler)
    assert later.num_cached_tokens == 20


def test_late_blocks_are_published_when_a_request_ends_however_it_does():
    for end in ("abort", "length", "preempt", "drop"):
        scheduler, requests = start("a", "b", max_tokens=15)
        for _ in range(13):
            step(scheduler)
        prompt = answer_of(requests, 12)[1]
        if end == "abort":
            scheduler.abort("b")
        elif end == "length":
            step(scheduler)
        elif end == "preempt":
            scheduler._preempt_last()
            scheduler.abort("b")
        else:
            scheduler.drop_in_flight()
            scheduler.abort("b")
        again = add(scheduler, "again", prompt)
        step(scheduler)
        assert (end, again.num_cached_tokens) == (end, 16)


def test_an_answer_to_a_prompt_of_less_than_a_block_is_found_under_its_own_salt_alone():
    scheduler = make_scheduler(num_pages=200)
    request = add(scheduler, "a", [7, 8, 9], 40)
    request.cache_salt = "tenant"
    for _ in range(9):
        step(scheduler)
    prompt = [7, 8, 9, *request.output_token_ids, 40]
    other = add(scheduler, "other", prompt)
    ours = add(scheduler, "ours", prompt)
    ours.cache_salt = "tenant"
    step(scheduler)
    assert (other.num_cached_tokens, ours.num_cached_tokens) == (0, 8)


def test_late_blocks_are_published_while_there_is_time():
    scheduler, _ = start("a", "b", "c")
    for _ in range(10):
        step(scheduler)
    times = iter([True, False, True, True, True])
    scheduler.kv.late.publish_while(lambda: next(times))
    assert scheduler.kv.pool.num_published(0) == 3 + 2  # the oldest alone
    scheduler.kv.late.publish_while(lambda: next(times))
    assert scheduler.kv.pool.num_published(0) == 3 * 3
    for _ in range(4):
        step(scheduler)
    scheduler.kv.late.publish_while(lambda: True)
    assert scheduler.kv.pool.num_published(0) == 3 * 4
    scheduler.check()


def test_late_blocks_of_an_answer_that_is_not_finite_are_never_published():
    scheduler, (request,) = start("a")
    for _ in range(10):
        step(scheduler)
    plan = schedule(scheduler)
    scheduler.commit(StepResult(plan.step_id, [NO_TOKEN]), 0.0)
    scheduler.check()
    assert request.finish_reason == "error"
    assert scheduler.kv.pool.num_published(0) == 0


def test_with_host_memory_blocks_are_published_at_their_commits():
    scheduler, _ = start("a", host_tier=HostTierConfig(num_slots=50, max_copies=4))
    for _ in range(10):
        step(scheduler)
    assert scheduler.kv.pool.num_published(0) == 3
