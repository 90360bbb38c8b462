"""Whoever leaves the running list keeps its blocks until its last step is committed: finish, abort, preemption."""

from engine.core.request import Status
from engine.interface.config import CacheGroup
from tests.support.stepping import STOP, add, commit, make_scheduler, make_shortage, pump, schedule, step


def test_a_stop_token_discards_the_row_in_flight_and_holds_blocks_until_its_commit():
    scheduler = make_scheduler()
    request = add(scheduler, "r", range(5))
    first, second = schedule(scheduler), schedule(scheduler)
    (output,) = commit(scheduler, first, STOP)
    assert (output.token_ids, request.finish_reason, request.stop_token_id) == ([STOP], "stop", STOP)
    assert request.status is Status.RETIRING
    assert scheduler.kv.pool.num_used == 2
    assert schedule(scheduler) is None
    assert commit(scheduler, second) == []
    assert request.status is Status.FINISHED
    assert request.output_token_ids == [STOP]
    assert scheduler.kv.pool.num_used == 0


def test_the_least_urgent_request_is_preempted_and_resumes_with_all_its_tokens():
    scheduler = make_scheduler(num_pages=6, enable_prefix_caching=False)
    keeper = add(scheduler, "keeper", range(8), arrival_s=1.0)
    victim = add(scheduler, "victim", range(7), arrival_s=2.0, presence_penalty=1.0)
    younger = add(scheduler, "younger", [1], arrival_s=3.0)
    while not scheduler.num_preemptions:
        step(scheduler)
    assert victim.status is Status.WAITING
    assert scheduler.waiting.requests == [victim, younger]
    kept = list(victim.output_token_ids)
    while keeper.status is Status.RUNNING:
        step(scheduler)
    plan = step(scheduler)
    assert plan.rows[0].token_ids == victim.prompt_token_ids + kept
    assert plan.inits[0].token_ids == victim.prompt_token_ids + kept
    assert plan.inits[0].num_prompt_tokens == 7


def test_a_less_urgent_request_is_preempted_before_a_later_one():
    scheduler = make_scheduler(num_pages=6, enable_prefix_caching=False)
    late = add(scheduler, "late", range(8), arrival_s=2.0, priority=0)
    patient = add(scheduler, "patient", range(7), arrival_s=1.0, priority=1)
    while not scheduler.num_preemptions:
        step(scheduler)
    assert patient.status is Status.WAITING
    assert late.status is Status.RUNNING


def test_a_preempted_request_keeps_the_token_in_flight_and_its_blocks_until_the_commit():
    scheduler, in_flight = make_shortage()
    keeper, victim = scheduler.running
    assert schedule(scheduler) is None  # the keeper waits for blocks that the victim has promised
    assert victim.status is Status.RETIRING
    assert len(victim.tables[0].blocks) == 9
    commit(scheduler, in_flight, 7)
    assert victim.status is Status.WAITING
    assert victim.output_token_ids == [7]
    assert scheduler.waiting.requests == [victim]
    assert [row.req_index for row in schedule(scheduler).rows] == [keeper.req_index]
    assert scheduler.num_preemptions == 1


def test_blocks_promised_by_an_aborted_request_spare_a_victim():
    scheduler = make_scheduler(num_pages=25, max_model_len=100)
    for i in range(2):
        add(scheduler, f"r{i}", [i] * 7)
    add(scheduler, "aborted", [9] * 72, arrival_s=1.0)
    in_flight = pump(scheduler, 5)
    assert scheduler.kv.pool.num_free == 0
    scheduler.abort("aborted")
    assert schedule(scheduler) is None  # both need a block, and 18 are on their way
    commit(scheduler, in_flight)
    assert len(schedule(scheduler).rows) == 2
    assert scheduler.num_preemptions == 0


def test_abort_while_waiting_forgets_the_request():
    scheduler = make_scheduler()
    request = add(scheduler, "r", [1])
    assert scheduler.abort("r") is request
    assert request.status is Status.FINISHED
    assert not scheduler.has_work


def test_abort_between_steps_frees_every_block_at_once():
    scheduler = make_scheduler()
    request = add(scheduler, "r", range(40))
    step(scheduler)
    scheduler.abort("r")
    assert request.status is Status.FINISHED
    assert scheduler.kv.pool.num_used == 0
    assert scheduler.abort("r") is None


def test_abort_during_prefill_frees_every_block_at_the_commit():
    scheduler = make_scheduler()
    request = add(scheduler, "r", range(40))
    plan = schedule(scheduler)
    scheduler.abort("r")
    assert request.status is Status.RETIRING
    assert scheduler.kv.pool.num_used == 10
    assert commit(scheduler, plan) == []
    assert request.status is Status.FINISHED
    assert scheduler.kv.pool.num_used == 0


def test_abort_of_a_retiring_preempted_request_ends_it_for_good():
    scheduler, in_flight = make_shortage()
    victim = scheduler.running[-1]
    assert schedule(scheduler) is None
    scheduler.abort("victim")
    outputs = commit(scheduler, in_flight)
    assert [output.request.request_id for output in outputs] == ["keeper"]
    assert victim.status is Status.FINISHED
    assert scheduler.waiting.requests == []


def test_a_token_in_flight_may_be_the_end_of_a_preempted_request():
    scheduler, in_flight = make_shortage()
    victim = scheduler.running[-1]
    assert schedule(scheduler) is None
    commit(scheduler, in_flight, STOP)
    assert victim.finish_reason == "stop"
    assert victim.status is Status.FINISHED
    assert scheduler.waiting.requests == []
    assert scheduler.kv.pool.num_used == 0


def test_abort_of_an_unknown_request_is_nothing():
    assert make_scheduler().abort("nobody") is None


def test_a_shortage_waits_for_the_steps_in_flight_where_windows_give_pages_back():
    window = CacheGroup("window", 4, window=4)
    scheduler = make_scheduler(groups=(window,), num_pages=5, max_num_seqs=2, enable_prefix_caching=False)
    request = add(scheduler, "a", range(8), max_tokens=30)
    in_flight = schedule(scheduler)
    for _ in range(24):
        following = schedule(scheduler)
        commit(scheduler, in_flight)
        in_flight = following or schedule(scheduler)
    assert request.num_preemptions == 0


def test_where_no_row_has_room_and_nothing_is_in_flight_the_last_request_is_preempted():
    window = CacheGroup("window", 4, window=16)
    scheduler = make_scheduler(groups=(window,), num_pages=30, max_num_batched_tokens=12)
    first, second = add(scheduler, "a", range(20)), add(scheduler, "b", range(100, 150))
    step(scheduler)
    step(scheduler)
    pool = scheduler.kv.pool
    taken = [pool.take(0) for _ in range(pool.num_free)]  # somehow there are no free pages
    first.num_computed_tokens = first.num_held_tokens = 16
    first.tables[0].blocks.pop()
    plan = scheduler.schedule(0.0)
    assert [row.req_index for row in plan.rows] == [first.req_index]
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert len(taken) > 20
