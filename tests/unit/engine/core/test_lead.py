"""Newcomers' prompts go ahead of other tenants' prompts, and never keep them from more than half of the steps."""

import itertools
import random

import pytest

from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.speculative import Drafter
from engine.core.step import StepPlan
from engine.core.step_budget import MOST_AHEAD, STEPS_PER_PAUSE
from engine.interface.protocol import SamplingParams
from tests.support.stepping import commit, make_scheduler, schedule, step


class Crowd:
    """A scheduler with much room, and requests of tenants, which arrive one after the other."""

    def __init__(
        self,
        *,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 128,
        least_tokens: int | None = None,
        max_num_samples: int | None = None,
    ) -> None:
        self.scheduler: Scheduler = make_scheduler(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            min_decode_step_tokens=least_tokens,
            max_num_samples=max_num_samples,
            num_pages=8000,
            max_model_len=4096,
        )
        self.num_asked = 0

    def ask(self, tenant: str, num_prompt: int, max_tokens: int = 12, *, weight: float = 1.0) -> Request:
        """Queue a request whose prompt no other one has."""
        number = self.num_asked = self.num_asked + 1
        params = SamplingParams(max_tokens=max_tokens)
        request = Request(str(number), [number] * num_prompt, params, arrival_s=number)
        request.tenant_id, request.weight = tenant, weight
        self.scheduler.add(request)
        return request

    def has_open(self, tenant: str) -> bool:
        return any(request.tenant_id == tenant for request in self.scheduler.requests.values())

    def prompts(self, plan: StepPlan) -> set[Request]:
        """Return the requests of which a step computes a part of the prompt."""
        starts = {row.req_index: row.start for row in plan.rows}
        running = [request for request in self.scheduler.running if request.req_index in starts]
        return {request for request in running if starts[request.req_index] < request.num_prompt_tokens}


def test_a_newcomers_prompt_shares_its_step_with_no_others() -> None:
    crowd = Crowd()
    flood = [crowd.ask("flood", 60) for _ in range(20)]
    step(crowd.scheduler)
    guest = crowd.ask("guest", 30)
    plan = schedule(crowd.scheduler)
    assert crowd.prompts(plan) == {guest}
    commit(crowd.scheduler, plan)
    plan = schedule(crowd.scheduler)
    assert crowd.prompts(plan) < set(flood)
    assert sum(row.num_tokens for row in plan.rows) == 128


def test_the_rest_of_a_newcomers_prompt_goes_ahead_too() -> None:
    crowd = Crowd()
    for _ in range(20):
        crowd.ask("flood", 60)
    step(crowd.scheduler)
    guest = crowd.ask("guest", 200)
    assert crowd.prompts(step(crowd.scheduler)) == {guest}
    assert crowd.prompts(step(crowd.scheduler)) == {guest}
    assert guest.is_decoding


@pytest.mark.parametrize("is_running", [False, True])
def test_a_newcomers_prompt_is_computed_in_one_step_beside_answers(is_running: bool) -> None:
    crowd = Crowd(max_num_batched_tokens=1024, least_tokens=128)
    if is_running:
        crowd.ask("guest", 4, 40)
    for _ in range(20):
        crowd.ask("flood", 4, 40)
        step(crowd.scheduler)
    for _ in range(20):
        crowd.ask("flood", 60, 40)
    guest = crowd.ask("guest", 200)
    assert crowd.prompts(step(crowd.scheduler)) == {guest}
    assert guest.is_decoding
    assert sum(row.num_tokens for row in step(crowd.scheduler).rows) <= 160 + 21


def test_a_prompt_goes_ahead_beside_one_answer_of_its_tenant() -> None:
    crowd = Crowd()
    answer = crowd.ask("guest", 4, 40)
    step(crowd.scheduler)
    for _ in range(20):
        crowd.ask("flood", 60)
    step(crowd.scheduler)
    guest = crowd.ask("guest", 30)
    assert crowd.prompts(step(crowd.scheduler)) == {guest}
    assert answer.is_decoding
    late = crowd.ask("guest", 30)  # its tenant has two of 64 rows
    assert late not in crowd.prompts(step(crowd.scheduler))


def test_half_of_the_kept_rows_are_for_tenants_without_any() -> None:
    crowd = Crowd(max_num_batched_tokens=1024)
    for tenant in ("flood", "some"):
        crowd.ask(tenant, 4, 400)
        step(crowd.scheduler)
    for _ in range(80):
        crowd.ask("flood", 4, 400)
    for _ in range(8):
        step(crowd.scheduler)
    assert crowd.scheduler.num_free_rows == 4
    for tenant, num_free in (("some", 3), ("some", 3), ("new", 2), ("new", 2), ("newer", 1), ("newest", 0)):
        crowd.ask(tenant, 4, 400)
        for _ in range(4):
            step(crowd.scheduler)
        assert crowd.scheduler.num_free_rows == num_free


class Guesses:
    """Proposes what the test's device samples."""

    def propose(self, prompt_token_ids: list[int], output_token_ids: list[int], count: int) -> list[int]:
        """Return the proposals."""
        return [5] * count


def flooded(num_waiting: int = 5, *, num_drafts: int = 0) -> tuple[Crowd, list[Request]]:
    """Return a scheduler of 16 rows of which a flood has all but the kept one, and the answers of these.

    num_waiting: requests of the flood that wait. num_drafts: of each row of an answer.
    """
    crowd = Crowd(max_num_seqs=16, max_num_samples=64)
    for tenant in ("guest", "flood"):
        crowd.ask(tenant, 4, 1)
    step(crowd.scheduler)
    answers = [crowd.ask("flood", 4, 400) for _ in range(15)]
    for answer in answers:
        answer.drafter = Drafter(Guesses(), num_tokens=num_drafts) if num_drafts else None
    for _ in range(num_waiting):
        crowd.ask("flood", 4, 400)
    while crowd.scheduler.num_free_rows > 1 or not all(request.output_token_ids for request in answers):
        step(crowd.scheduler)
    return crowd, answers


def test_answers_miss_the_step_of_a_newcomers_prompt_and_get_the_tokens_that_they_would_have_had() -> None:
    crowd, answers = flooded()
    before = [len(request.output_token_ids) for request in answers]
    guest = crowd.ask("guest", 30)
    plan = schedule(crowd.scheduler)
    assert crowd.prompts(plan) == {guest}
    assert plan.num_rows == 1
    commit(crowd.scheduler, plan)
    plan = schedule(crowd.scheduler)
    assert plan.num_rows == 16
    commit(crowd.scheduler, plan)
    assert [len(request.output_token_ids) for request in answers] == [number + 1 for number in before]
    assert len(guest.output_token_ids) == 2


def test_answers_miss_no_step_while_no_prompt_of_their_tenants_waits() -> None:
    crowd, answers = flooded(num_waiting=0)
    guest = crowd.ask("guest", 30)
    plan = schedule(crowd.scheduler)
    assert crowd.prompts(plan) == {guest}
    assert plan.num_rows == 1 + len(answers)


def test_answers_of_one_tenant_never_wait_for_its_own_prompts() -> None:
    crowd, answers = flooded(num_waiting=40)
    for number in range(2, 20):
        before = len(answers[0].output_token_ids)
        step(crowd.scheduler)
        assert len(answers[0].output_token_ids) == before + 1, number


def test_newcomers_without_end_take_one_step_of_32_from_answers() -> None:
    crowd, answers = flooded()
    have = []
    for number in range(10 * STEPS_PER_PAUSE):
        crowd.ask(f"small{number}", 4, 1)
        before = len(answers[0].output_token_ids)
        step(crowd.scheduler)
        have.append(len(answers[0].output_token_ids) > before)
    assert STEPS_PER_PAUSE == 32
    assert 9 <= have.count(False) <= 10
    missed = [number for number, has_token in enumerate(have) if not has_token]
    assert all(later - earlier >= STEPS_PER_PAUSE for earlier, later in itertools.pairwise(missed))


def test_plans_without_rows_do_not_count_as_steps_with_answers() -> None:
    """While rows with drafts are in flight there is nothing to plan; newcomers come before the next step."""
    crowd, _ = flooded(num_drafts=1)
    paused = []
    for number in range(3 * STEPS_PER_PAUSE):
        crowd.ask(f"small{number}", 4, 1)
        plan = schedule(crowd.scheduler)
        if plan.num_rows == 1:
            paused.append(number)
        else:
            assert schedule(crowd.scheduler) is None
        commit(crowd.scheduler, plan)
    assert len(paused) >= 2
    assert all(later - earlier >= STEPS_PER_PAUSE for earlier, later in itertools.pairwise(paused))


def test_a_newcomer_without_room_keeps_no_answer_waiting() -> None:
    crowd = Crowd(max_num_seqs=2)
    answers = [crowd.ask("flood", 4, 400), crowd.ask("other", 4, 400)]
    step(crowd.scheduler)
    for tenant in ("guest", "flood"):
        crowd.ask(tenant, 4)
    for _ in range(2 * STEPS_PER_PAUSE):
        assert step(crowd.scheduler).num_rows == 2
    assert {len(request.output_token_ids) for request in answers} == {1 + 2 * STEPS_PER_PAUSE}


@pytest.mark.parametrize("num_prompt", [4, 20])
@pytest.mark.parametrize("num_small", [1, 32])
def test_small_tenants_without_end_at_most_double_a_large_prompts_steps(num_small: int, num_prompt: int) -> None:
    """None of them has a row when its next prompt comes, and 32 prompts of 20 tokens would fill every step."""
    crowd = Crowd()
    large = crowd.ask("large", 2000, 4)  # its turn comes first
    step(crowd.scheduler)
    num_steps = 1
    while not large.output_token_ids:
        assert num_steps < 1000
        for place in range(num_small):
            if not crowd.has_open(f"small{place}"):
                crowd.ask(f"small{place}", num_prompt, 1)
        step(crowd.scheduler)
        num_steps += 1
    assert num_steps <= 2 * -(-2000 // 128) + MOST_AHEAD


def test_a_request_longer_than_all_others_has_its_turn_beside_32_tenants_of_any_weight() -> None:
    crowd = Crowd()
    places = [(f"small{place}", weight) for place, weight in enumerate([0.1, 1.0, 8.0, 1.0] * 8)]
    for tenant, weight in places:
        crowd.ask(tenant, 20, 1, weight=weight)
    large = crowd.ask("large", 1000, 4)
    num_steps = 0
    while not large.output_token_ids:
        assert num_steps < 10_000
        for tenant, weight in places:
            if not crowd.has_open(tenant):
                crowd.ask(tenant, 20, 1, weight=weight)
        step(crowd.scheduler)
        num_steps += 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.table(most=4)
def test_whoever_comes_the_first_prompt_in_order_goes_on_in_half_of_the_steps_and_all_requests_end(seed: int) -> None:
    rng = random.Random(seed)
    crowd = Crowd(
        max_num_seqs=rng.choice([16, 64]),
        max_num_batched_tokens=rng.choice([64, 128, 512]),
    )
    scheduler = crowd.scheduler
    weights = {f"tenant{place}": rng.choice([0.1, 1.0, 1.0, 8.0]) for place in range(rng.choice([2, 5, 33]))}
    crowd.ask("tenant0", 2000, 4, weight=weights["tenant0"])
    num_passed = most_passed = num_steps = 0  # steps that passed the first one over, less the others, in any span
    while num_steps < 50 or scheduler.requests:
        for _ in range(rng.choice([0, 0, 1, 3, 8]) if num_steps < 50 else 0):
            tenant = rng.choice(list(weights))
            crowd.ask(tenant, rng.choice([1, 4, 30, 200]), rng.choice([1, 1, 6]), weight=weights[tenant])
        begun = [request for request in scheduler.running if not request.is_decoding]
        plan = schedule(scheduler)
        if plan is not None:
            is_passed = bool(begun) and begun[0] not in crowd.prompts(plan)
            num_passed = num_passed + 1 if is_passed else max(num_passed - 1, 0)
            most_passed = max(most_passed, num_passed)
            commit(scheduler, plan)
        num_steps += 1
        assert num_steps < 20_000
    assert most_passed <= MOST_AHEAD
