"""Turns of tenants: deficit round-robin by tokens and weights, priority and arrival within a tenant."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.request import Request
from engine.core.waiting_queue import QUANTUM_TOKENS, WaitingQueue
from engine.interface.protocol import SamplingParams


class Queue(WaitingQueue):
    """A queue that numbers what is added, as the scheduler does."""

    num_added = 0

    def put(
        self, tenant: str, num_prompt: int = 100, *, weight: float = 1.0, priority: int = 0, num_expected: int = 0
    ) -> Request:
        request = Request(f"{tenant}{self.num_added}", [1] * num_prompt, SamplingParams(max_tokens=10))
        request.tenant_id, request.weight, request.num_expected_tokens = tenant, weight, num_expected
        request.sort_key = (priority, 0.0, self.num_added)
        self.num_added += 1
        self.add(request)
        self.check()
        return request

    def serve(self) -> Request:
        request = self.next(is_passed=lambda request: False)
        assert request is not None
        assert self.next(is_passed=lambda request: False) is request, "asking changes nothing"
        self.take(request, cost=request.cost)
        self.check()
        return request

    def serve_all(self) -> list[Request]:
        return [self.serve() for _ in range(len(self))]


def test_one_tenant_is_served_by_priority_and_arrival() -> None:
    queue = Queue()
    late, early, urgent = queue.put("a"), queue.put("a"), queue.put("a", priority=-1)
    assert queue.requests == [urgent, late, early] == queue.serve_all()


def test_a_flood_of_one_tenant_does_not_delay_another() -> None:
    queue = Queue()
    for _ in range(500):
        queue.put("flood")
    for _ in range(3):
        queue.serve()
    guest = queue.put("guest")
    turns = next(turn for turn in range(1, 500) if queue.serve() is guest)
    assert turns <= QUANTUM_TOKENS / 100


def test_tenants_get_tokens_and_not_requests() -> None:
    queue = Queue()
    for _ in range(40):
        queue.put("short", 50)
    for _ in range(40):
        queue.put("long", 500)
    tokens = Counter[str]()
    while queue.queue_of("short") is not None:
        request = queue.serve()
        tokens[request.tenant_id] += request.num_tokens
    assert abs(tokens["short"] - tokens["long"]) <= 2 * QUANTUM_TOKENS


@pytest.mark.parametrize("weight", [0.1, 0.5, 3.0])
def test_tokens_are_shared_by_weight(weight: float) -> None:
    queue = Queue()
    for _ in range(300):
        queue.put("one")
        queue.put("other", weight=weight)
    tokens = Counter[str]()
    while queue.queue_of("one") is not None and queue.queue_of("other") is not None:
        request = queue.serve()
        tokens[request.tenant_id] += request.num_tokens
    assert tokens["other"] / tokens["one"] == pytest.approx(weight, rel=0.15)


def test_a_request_far_over_the_quantum_has_its_turn() -> None:
    queue = Queue()
    whale = queue.put("whale", 20_000, weight=0.01)
    for _ in range(50):
        queue.put("fish")
    served = queue.serve_all()
    assert whale in served
    assert Counter(request.tenant_id for request in served) == {"whale": 1, "fish": 50}


def test_a_tenant_that_comes_back_has_saved_nothing() -> None:
    queue = Queue()
    queue.put("a")
    queue.serve()
    for _ in range(20):
        queue.put("a")
        queue.put("b")
    served = [queue.serve().tenant_id for _ in range(20)]
    assert abs(served.count("a") - served.count("b")) <= 2 * QUANTUM_TOKENS / 100


def test_an_expected_answer_is_charged_and_corrected() -> None:
    queue = Queue()
    for _ in range(30):
        queue.put("a", 100, num_expected=400)
        queue.put("b", 100)
    served = [queue.serve().tenant_id for _ in range(12)]
    assert served.count("b") >= 4 * served.count("a") - 5
    before = queue.queue_of("a").deficit
    queue.settle("a", -300)
    queue.settle("gone", 10)
    assert queue.queue_of("a").deficit == before + 300


def test_a_preempted_request_costs_nothing_again() -> None:
    queue = Queue()
    victim = queue.put("a")
    queue.take(victim, cost=victim.cost)
    victim.num_preemptions = 1
    for _ in range(5):
        queue.put("b")
    queue.add(victim)
    assert victim.cost == 0
    assert victim in [queue.serve() for _ in range(6)]


def test_requests_are_passed_over_and_tenants_held() -> None:
    queue = Queue()
    first, second, other = queue.put("a"), queue.put("a"), queue.put("b")
    assert queue.next(is_passed=lambda request: request is first) is second
    assert queue.next(is_passed=lambda request: False, is_held=lambda request: request is first) is other
    assert queue.next(is_passed=lambda request: True) is None
    assert queue.next(is_passed=lambda request: False) is first


def test_the_sums_of_a_queue_follow_its_requests() -> None:
    queue = Queue()
    assert not queue
    requests = [queue.put(tenant, size) for tenant, size in (("a", 10), ("b", 30), ("a", 20))]
    assert len(queue) == 3
    assert queue.num_tokens == 60 == queue.num_tokens_of_first(9)
    assert queue.num_tokens_of_first(1) == 20  # about: a third
    assert set(queue.requests) == set(requests)
    for request in requests:
        queue.remove(request)
        queue.check()
    assert (len(queue), queue.num_tokens, queue.tenants) == (0, 0, [])


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(1, 3000), st.sampled_from([0.05, 1.0, 7.0]), st.integers(0, 2)),
        min_size=1,
        max_size=60,
    ),
    st.randoms(use_true_random=False),
)
def test_whatever_is_queued_all_are_served_in_order_and_no_backlogged_tenant_falls_behind(arrivals, rng) -> None:
    queue = Queue()
    weights: dict[str, float] = {}
    for tenant, size, weight, priority in arrivals:
        queue.put(tenant, size, weight=weights.setdefault(tenant, weight), priority=priority)
    largest = max(size for _, size, _, _ in arrivals)
    served: list[Request] = []
    shares = dict.fromkeys(weights, 0.0)
    backlogged = set(weights)
    while queue:
        if rng.random() < 0.1:
            queue.remove(rng.choice(rng.choice(queue.tenants).requests))
            queue.check()
            backlogged &= {tenant.tenant_id for tenant in queue.tenants}
            continue
        request = queue.serve()
        served.append(request)
        shares[request.tenant_id] += request.cost / request.weight
        backlogged &= {tenant.tenant_id for tenant in queue.tenants}
        # Shreedhar and Varghese 1996, theorem 2: service by weight differs by a quantum and a largest request each
        bounds = {tenant: 2 * QUANTUM_TOKENS + 2 * largest / weights[tenant] for tenant in backlogged}
        for one in backlogged:
            for other in backlogged:
                assert shares[one] - shares[other] <= bounds[one] + bounds[other]
    for tenant in weights:
        own = [request for request in served if request.tenant_id == tenant]
        assert own == sorted(own, key=lambda request: request.sort_key)
