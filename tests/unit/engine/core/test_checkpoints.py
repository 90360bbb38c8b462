"""States are saved where a row starts at a mark, found by all tokens before them, and held until their copy is made."""

import pytest

from engine.core.kv_caches import KvCaches
from engine.core.request import Request
from engine.core.speculative import Drafter
from engine.core.step import NO_TOKEN, StepResult
from engine.interface.config import CacheGroup, SchedulerConfig
from engine.interface.protocol import SamplingParams
from tests.support.stepping import add, commit, make_scheduler, schedule

STATE = CacheGroup("state", 8, pages_per_block=3)
GROUPS = (CacheGroup("full", 4), STATE)


@pytest.fixture
def kv():
    return make_kv()


def make_kv(*, num_pages=60, groups=GROUPS, **changes):
    config = SchedulerConfig(
        num_pages=num_pages, block_size=4, groups=groups, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256,
        **changes,
    )  # fmt: skip
    return KvCaches(config)


class Steps:
    """Rows of one request at a time, each a step of its own."""

    def __init__(self, kv):
        self.kv = kv
        self.ends = []  # of the rows of the last request

    def run(self, tokens, *, most=64, request=None):
        """Admit a request, compute and commit its tokens; return it."""
        request = request or Request("r", list(tokens), SamplingParams(max_tokens=1))
        assert self.kv.admit(request)
        request.num_prefill_tokens = request.num_tokens
        self.ends = []
        while request.num_computed_tokens < request.num_tokens:
            self.row(request, most)
        return request

    def row(self, request, most=64):
        """Plan and commit one row; return its step."""
        end = self.kv.fit(request, min(request.num_computed_tokens + most, request.num_tokens), num_reserved=0)
        step = self.kv.begin_step()
        self.kv.begin_row(request, end, step, num_reserved=1)
        request.num_computed_tokens = end
        self.kv.check({request: end}, [step])
        self.kv.commit_row(request, end)
        self.kv.end_step(step, step.saves)
        self.kv.check({request: end})
        self.ends.append(end)
        return step


def test_rows_end_at_marks_and_else_where_a_state_may_be_saved_later(kv):
    steps = Steps(kv)
    kv.free(steps.run(range(45), most=21))
    assert steps.ends == [16, 32, 40, 45]  # the last multiple of 8 that leaves a token is the mark
    steps.run([9] * 9, most=3)
    assert steps.ends == [3, 6, 8, 9]  # a short budget goes on


def test_a_saved_state_is_found_and_copied_back(kv):
    steps = Steps(kv)
    first = steps.run(range(45))
    assert kv.checkpoints.num_saved == 1
    kv.free(first)
    again = Request("r", [*range(45), 7, 7, 7], SamplingParams(max_tokens=1))
    assert kv.admit(again)
    assert again.num_computed_tokens == 40
    again.num_prefill_tokens = again.num_tokens
    (saved,) = [block for _, block in again.restores]
    step = steps.row(again)
    assert step.copies_in == list(zip(kv.pool.pages(saved), kv.pool.pages(again.tables[1].blocks[0]), strict=True))
    assert kv.checkpoints.num_restored == 1
    assert kv.num_limited_tokens == {}


def test_a_state_of_a_parting_point_is_saved_one_request_late(kv):
    steps = Steps(kv)
    stem = list(range(24))
    kv.free(steps.run([*stem, *[1] * 20]))
    second = steps.run([*stem, *[2] * 20])
    assert steps.ends == [24, 40, 44]
    assert kv.num_limited_tokens == {"state": 24}
    kv.free(second)
    third = Request("r", [*stem, *[3] * 20], SamplingParams(max_tokens=1))
    assert kv.admit(third)
    assert third.num_computed_tokens == 24


def place_in_the_order_of_reuse(kv, tokens, num_tokens):
    """Return the place of the state saved after the first num_tokens."""
    request = Request("r", list(tokens), SamplingParams(max_tokens=1))
    request.extend_hashes(num_tokens, unit=kv.layout.unit)
    return list(kv.pool.order.settled).index(kv.pool.find(1, request.block_hashes[num_tokens // 4 - 1]))


def test_a_state_with_a_later_one_is_reused_first_unless_others_hit_it(kv):
    steps = Steps(kv)
    kv.free(steps.run([9] * 20))  # something older
    kv.free(steps.run(range(20)))
    older, first = place_in_the_order_of_reuse(kv, [9] * 20, 16), place_in_the_order_of_reuse(kv, range(20), 16)
    assert older < first
    kv.free(steps.run(range(40)))  # the next turn of the same conversation: hits 16, saves 32
    older, first = place_in_the_order_of_reuse(kv, [9] * 20, 16), place_in_the_order_of_reuse(kv, range(20), 16)
    assert first < older
    kv.free(steps.run([*range(20), *[8] * 20]))  # another conversation has the same beginning
    older, first = place_in_the_order_of_reuse(kv, [9] * 20, 16), place_in_the_order_of_reuse(kv, range(20), 16)
    assert older < first


def test_pages_for_a_state_are_taken_only_from_what_is_spare():
    kv = make_kv(num_pages=1 + 3 + 5 + 3)
    steps = Steps(kv)
    request = steps.run(range(20))  # 3 pages stay free, and one must for the running request
    assert kv.checkpoints.num_saved == 0
    assert kv.checkpoints.num_skipped == 1
    kv.free(request)
    assert kv.pool.num_used == 0


def test_a_hit_that_is_in_the_way_of_the_one_who_finds_it_is_not_taken():
    kv = make_kv(num_pages=1 + 2 * 3 + 5 + 1)
    steps = Steps(kv)
    kv.free(steps.run(range(17)))
    assert kv.checkpoints.num_saved == 1
    longer = Request("r", list(range(32)), SamplingParams(max_tokens=1))  # 8 + 3 pages, and 3 of the saved state
    assert not kv.admit(longer, num_reserved=1)
    assert kv.admit(longer)
    assert longer.num_computed_tokens == 0
    kv.check({longer: 0})


def test_blocks_behind_the_last_mark_are_reused_first(kv):
    steps = Steps(kv)
    request = steps.run(range(45))
    request.output_token_ids += range(20)
    steps.row(request)
    kv.free(request)
    order = list(kv.pool.order.settled)
    blocks = [kv.pool.find(0, key) for key in request.block_hashes[:16]]
    assert max(order.index(block) for block in blocks[10:]) < min(order.index(block) for block in blocks[:10])


def test_a_tainted_request_takes_its_states_with_it(kv):
    steps = Steps(kv)
    request = steps.run(range(45))
    kv.taint([request])
    assert not kv.pool.published
    kv.check({request: 45})


def test_without_the_cache_no_state_is_saved():
    kv = make_kv(enable_prefix_caching=False)
    steps = Steps(kv)
    steps.run(range(45), most=21)
    assert kv.checkpoints.num_saved == 0
    assert steps.ends == [16, 32, 45]


def test_a_step_given_up_publishes_nothing_and_holds_nothing():
    scheduler = make_scheduler(groups=GROUPS, num_pages=40, max_num_batched_tokens=64)
    add(scheduler, "a", range(20))
    commit(scheduler, schedule(scheduler))
    plan = schedule(scheduler)
    assert len(plan.copies_out) == 3
    scheduler.drop_in_flight()
    scheduler.check()
    assert scheduler.kv.checkpoints.num_saved == 0
    assert scheduler.kv.pool.num_used == 0


def test_a_request_that_ends_at_once_leaves_its_state():
    scheduler = make_scheduler(groups=GROUPS, num_pages=40, max_num_batched_tokens=64)
    add(scheduler, "a", range(20), max_tokens=1)
    commit(scheduler, schedule(scheduler))
    commit(scheduler, schedule(scheduler))
    assert not scheduler.requests
    assert scheduler.kv.checkpoints.num_saved == 1
    again = add(scheduler, "b", [*range(20), 5])
    assert len(schedule(scheduler).copies_in) == 3
    assert again.num_cached_tokens == 16


def answering(num_pages=80, drafter=None, **changes):
    """Return a scheduler whose request "a", with a prompt of 12 tokens, decodes; its answers are saved at 16, 32, …"""
    scheduler = make_scheduler(
        groups=GROUPS, num_pages=num_pages, max_num_batched_tokens=64, max_model_len=256, **changes
    )
    scheduler.kv.checkpoints.answer_step = 16
    request = add(scheduler, "a", range(12), max_tokens=100)
    request.drafter = drafter
    while request.num_computed_tokens < 12:
        commit(scheduler, schedule(scheduler))
    return scheduler, request


def test_a_long_answer_is_saved_where_its_rows_start():
    scheduler, request = answering()
    saved_at = []
    while request.num_computed_tokens < 60:
        start = request.num_computed_tokens
        plan = schedule(scheduler)
        saved_at += [start] * bool(plan.copies_out)
        commit(scheduler, plan)
    assert saved_at == [16, 32, 48]
    assert request.saved_tokens == [8, 16, 32, 48]
    assert scheduler.kv.checkpoints.num_saved_in_answers == 3
    scheduler.abort("a")
    later = add(scheduler, "b", [*range(12), *request.output_token_ids, *range(5)])
    assert len(schedule(scheduler).copies_in) == 3
    assert later.num_cached_tokens == 48


def test_states_of_an_answer_supersede_each_other_and_not_that_of_the_prompt():
    scheduler, request = answering()
    while request.num_computed_tokens < 60:
        commit(scheduler, schedule(scheduler))
    scheduler.abort("a")
    order, find = list(scheduler.kv.pool.order.settled), scheduler.kv.pool.find
    blocks = {place: find(1, request.block_hashes[place // 4 - 1]) for place in (8, 16, 32, 48)}
    assert {place for place, block in blocks.items() if block in scheduler.kv.pool.order.spent} == {16, 32}
    assert max(order.index(blocks[16]), order.index(blocks[32])) < min(order.index(blocks[8]), order.index(blocks[48]))


def test_an_answer_is_saved_only_into_pages_that_nobody_misses():
    scheduler, request = answering(num_pages=34)
    pool = scheduler.kv.pool
    others = [pool.take(0) for _ in range(pool.num_free)]
    for number, block in enumerate(others):
        pool.publish(0, bytes([number]), block)
    pool.release(others)  # free, and worth keeping
    while request.num_computed_tokens < 20:
        assert not schedule_and_commit(scheduler).copies_out
    assert pool.num_free > 20
    for block in others[-9:]:  # the last to be reused
        pool.spend(block)
    while request.num_computed_tokens < 32:
        assert not schedule_and_commit(scheduler).copies_out
    taken = {target for _, target in schedule_and_commit(scheduler).copies_out}
    assert len(taken) == 3
    assert taken <= set(others[-9:])


def schedule_and_commit(scheduler):
    """Run one step; return its plan."""
    plan = schedule(scheduler)
    commit(scheduler, plan)
    return plan


class Guesses:
    """Proposes what the test's device samples."""

    def propose(self, prompt_token_ids, output_token_ids, count):
        return [5] * count


def test_the_row_before_a_place_where_a_state_is_due_has_no_drafts():
    scheduler, request = answering(drafter=Drafter(Guesses(), num_tokens=7), max_num_samples=64)
    starts = []
    while request.num_computed_tokens < 50:
        starts.append(request.num_computed_tokens)
        plan = schedule(scheduler)
        (row,) = plan.rows
        assert bool(plan.copies_out) == (row.start in (16, 32, 48))
        assert not (row.num_drafts and row.start + row.num_tokens in (16, 32, 48))
        scheduler.commit(StepResult(plan.step_id, [5] * row.num_samples), 0.0)
        scheduler.check()
    assert {16, 32, 48} <= set(starts)
    assert scheduler.drafts.num_accepted > 20


def test_an_answer_that_is_tainted_takes_its_states_with_it():
    scheduler, request = answering()
    while request.num_computed_tokens < 60:
        commit(scheduler, schedule(scheduler))
    scheduler.kv.taint([request])
    assert not scheduler.kv.pool.published


@pytest.mark.parametrize("depth", [1, 2])
def test_pages_of_a_state_that_the_failing_step_saves_are_zeroed(depth):
    """They have the values of a request whose output is not finite, and were never published."""
    scheduler = make_scheduler(groups=GROUPS, num_pages=40, max_num_batched_tokens=64, max_model_len=256)
    add(scheduler, "a", range(20), max_tokens=3)
    commit(scheduler, schedule(scheduler))
    saving = schedule(scheduler)
    pages = {target for _, target in saving.copies_out}
    assert len(pages) == 3
    following = schedule(scheduler) if depth == 2 else None
    commit(scheduler, saving, NO_TOKEN)
    if following is not None:
        commit(scheduler, following)
    assert not scheduler.kv.pool.published
    add(scheduler, "b", range(20))
    assert pages <= set(schedule(scheduler).zeroed)


def test_without_the_cache_or_states_no_answer_is_saved():
    for changes in ({"enable_prefix_caching": False}, {"groups": (CacheGroup("full", 4),)}):
        scheduler = make_scheduler(**{"groups": GROUPS, "num_pages": 80, "max_model_len": 256, **changes})
        scheduler.kv.checkpoints.answer_step = 16
        request = add(scheduler, "a", range(12), max_tokens=60)
        while not request.finish_reason:
            assert not schedule_and_commit(scheduler).copies_out


def second_turn(**changes):
    """Answer a first turn, and begin to answer a second one, whose hit is a state of the first answer."""
    scheduler, request = answering(**changes)
    while request.num_computed_tokens < 35:
        commit(scheduler, schedule(scheduler))
    scheduler.abort("a")
    request = add(scheduler, "b", [*range(12), *request.output_token_ids, *range(12)], max_tokens=100)
    while not request.output_token_ids:
        commit(scheduler, schedule(scheduler))
    assert request.num_cached_tokens == 32
    return scheduler, request


def test_an_answer_supersedes_its_prompt_if_that_follows_upon_an_answer():
    scheduler, request = second_turn()
    pool, place = scheduler.kv.pool, (request.num_prompt_tokens - 1) // 8 * 8
    saved = pool.find(1, request.block_hashes[place // 4 - 1])
    assert (place, pool.is_spent(saved)) == (40, False)
    while request.num_computed_tokens < 70:
        commit(scheduler, schedule(scheduler))
    assert request.saved_tokens == [40, 64]
    assert pool.is_spent(saved)


def test_an_answer_that_follows_upon_another_may_take_any_free_page():
    scheduler, request = second_turn(num_pages=60)
    pool = scheduler.kv.pool
    others = [pool.take(0) for _ in range(pool.num_free)]
    for number, block in enumerate(others):
        pool.publish(0, bytes([number]), block)
    pool.release(others)  # free, and worth keeping
    assert pool.num_worthless == 0
    while request.num_computed_tokens < 70:
        commit(scheduler, schedule(scheduler))
    assert request.saved_tokens == [40, 64]


def make_turn(steps, tokens, num_answered):
    """Compute a prompt, and an answer that goes on as range() does; return the request."""
    request = steps.run(tokens)
    request.output_token_ids += range(len(tokens), len(tokens) + num_answered)
    while request.num_computed_tokens < request.num_tokens:
        steps.row(request)
    return request


def test_what_a_turn_computes_again_is_not_reused_before_the_rest_of_it(kv):
    steps = Steps(kv)
    kv.free(make_turn(steps, range(44), 20))  # no state is behind 40 tokens: the blocks from there on are reused first
    turn = steps.run(range(90))  # it hits 40, and computes them again
    assert steps.ends[0] > 40
    kv.free(turn)
    assert kv.checkpoints.saved_tokens(turn) == [88]
    others = steps.run([9] * 20)
    while len(kv.pool._blank) or kv.pool.order.spent:
        others.output_token_ids += [9]
        steps.row(others)
    kv.free(others)
    assert kv.admit(Request("r", list(range(100)), SamplingParams(max_tokens=1)))
    assert kv.num_hit_tokens == 40 + 88


def test_a_turn_that_follows_upon_an_answer_parts_from_nobody(kv):
    steps = Steps(kv)
    kv.free(make_turn(steps, range(44), 20))
    turn = steps.run(range(90))
    assert kv.num_limited_tokens == {"state": 24}
    assert (turn.parting_point, turn.saved_tokens) == (0, [88])
    kv.free(turn)
    other = steps.run([*range(64), *[7] * 20])  # goes on differently behind the first answer
    assert (other.parting_point, other.saved_tokens) == (64, [64, 80])


def test_the_states_of_a_request_are_reused_right_before_its_blocks():
    scheduler, first = answering()
    pool = scheduler.kv.pool
    scheduler.kv.checkpoints.answer_step = first.next_save_tokens = 1000
    second = add(scheduler, "b", [9] * 12, max_tokens=3)
    while second.finish_reason is None:
        commit(scheduler, schedule(scheduler))
    scheduler.abort("a")
    order = [(pool.group_of(block), pool.key_of(block) in first.block_hashes) for block in pool.order.settled]
    useful = [entry for block, entry in zip(pool.order.settled, order, strict=True) if not pool.is_spent(block)]
    assert useful == [(1, False), (0, False), (0, False), (1, True), (0, True), (0, True)]
