"""WaitingQueue: the queued requests, in the order in which they are served. Plain Python; never torch.

Tenants take turns by deficit round-robin over tokens (Shreedhar and Varghese 1996, §III): a visit gives a tenant
QUANTUM_TOKENS times its weight, and it is served while what it was given covers the cost of its next request. A
tenant's own requests go by priority, arrival and number. Rounds in which nobody can be served are skipped at once, so
that a choice costs as much as there are tenants with queued requests. With one tenant there are no turns to take.
Deviations: a request costs what it is expected to cost, and settle() corrects that at its end; what was found in the
prefix cache is not charged; a preempted request costs nothing the second time.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter

from engine.core.request import Request

QUANTUM_TOKENS = 512.0

by_order = attrgetter("sort_key")


class TenantQueue:
    """The queued requests of one tenant, in order, and its account of tokens."""

    __slots__ = ("deficit", "num_answer_tokens", "num_tokens", "num_work_tokens", "quantum", "requests", "tenant_id")

    def __init__(self, tenant_id: str) -> None:
        self.tenant_id = tenant_id
        self.quantum = QUANTUM_TOKENS
        self.requests: list[Request] = []
        self.deficit = 0.0  # tokens that it may still be served in this visit; below 0: it was served more
        self.num_tokens = 0  # of its requests
        self.num_work_tokens = 0  # see Request.num_work_tokens
        self.num_answer_tokens = 0  # that they are expected to generate

    @property
    def weight(self) -> float:
        """The weight of its newest request."""
        return self.quantum / QUANTUM_TOKENS


class WaitingQueue:
    """Queued requests by tenant, with the sum of their tokens. The first tenant has had its quantum for this visit."""

    def __init__(self) -> None:
        self.tenants: list[TenantQueue] = []  # with requests, in the order of their visits; others only read it
        self.num_tokens = 0
        self.num_work_tokens = 0  # see Request.num_work_tokens
        self.only: str | None = None  # the request_id of the only one that may be served; None: all may
        self._num_requests = 0
        self._by_id: dict[str, TenantQueue] = {}
        self._seen: set[str] = set()  # the first two tenants

    def __len__(self) -> int:
        """Return the number of queued requests."""
        return self._num_requests

    @property
    def has_several_tenants(self) -> bool:
        """True once requests of two tenants have been seen."""
        return len(self._seen) > 1

    @property
    def requests(self) -> list[Request]:
        """The queued requests, in order; those of several tenants in about the order of service, as a new list."""
        if len(self.tenants) == 1:
            return self.tenants[0].requests
        shares: list[tuple[float, int, Request]] = []
        for place, queue in enumerate(self.tenants):
            served = -queue.deficit
            for request in queue.requests:
                served += request.cost
                shares.append((served / queue.quantum, place, request))
        return [request for _, _, request in sorted(shares, key=lambda share: share[:2])]

    def add(self, request: Request) -> None:
        """Insert a request behind those of its tenant that come before it. A new tenant is visited last."""
        queue = self._by_id.get(request.tenant_id)
        if queue is None:
            queue = self._by_id[request.tenant_id] = TenantQueue(request.tenant_id)
            self.tenants.append(queue)
            if len(self._seen) < 2:
                self._seen.add(request.tenant_id)
        queue.quantum = QUANTUM_TOKENS * request.weight
        insort(queue.requests, request, key=by_order)
        queue.num_tokens += request.num_tokens
        queue.num_answer_tokens += request.num_expected_tokens
        self.num_tokens += request.num_tokens
        queue.num_work_tokens += request.num_work_tokens
        self.num_work_tokens += request.num_work_tokens
        self._num_requests += 1
        if len(self.tenants) == 1 and len(queue.requests) == 1:
            queue.deficit = queue.quantum

    def next(
        self, *, is_passed: Callable[[Request], bool], is_held: Callable[[Request], bool] | None = None
    ) -> Request | None:
        """Return the request whose turn it is; None if there is none. Changes nothing.

        is_passed: whether a request is left out, and the next one of its tenant takes its place. is_held: whether its
        tenant is left out because of its first request.
        """
        if self.only is not None:
            alone = (request for queue in self.tenants for request in queue.requests if request.request_id == self.only)
            return next((request for request in alone if not is_passed(request)), None)
        best: Request | None = None
        best_turn = (math.inf, 0)
        for place, queue in enumerate(self.tenants):
            first = next((request for request in queue.requests if not is_passed(request)), None)
            if first is None or (is_held is not None and is_held(first)):
                continue
            if len(self.tenants) == 1:
                return first
            turn = (self._num_rounds(place, first), place)
            if turn < best_turn:
                best, best_turn = first, turn
        return best

    def take(self, request: Request, *, cost: int) -> None:
        """Remove the request that next() returned, since it is served, and charge its tenant for `cost` tokens."""
        queue = self._by_id[request.tenant_id]
        if len(self.tenants) > 1:
            self._visit(self.tenants.index(queue), request)
        queue.deficit -= cost
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Remove a queued request, found by its key: a search for the object itself would visit the whole queue."""
        queue = self._by_id[request.tenant_id]
        del queue.requests[bisect_left(queue.requests, request.sort_key, key=by_order)]
        queue.num_tokens -= request.num_tokens
        queue.num_answer_tokens -= request.num_expected_tokens
        self.num_tokens -= request.num_tokens
        queue.num_work_tokens -= request.num_work_tokens
        self.num_work_tokens -= request.num_work_tokens
        self._num_requests -= 1
        if not queue.requests:  # what it was given and did not use is lost
            del self._by_id[request.tenant_id]
            is_first = self.tenants[0] is queue
            self.tenants.remove(queue)
            if is_first and self.tenants:
                self.tenants[0].deficit += self.tenants[0].quantum

    def settle(self, tenant_id: str, num_tokens: int) -> None:
        """Charge a tenant for tokens beyond the expected ones of a request that has ended; below 0: give back."""
        queue = self._by_id.get(tenant_id)
        if queue is not None:
            queue.deficit -= num_tokens

    def queue_of(self, tenant_id: str) -> TenantQueue | None:
        """Return the queue of a tenant; None if it has no queued requests."""
        return self._by_id.get(tenant_id)

    def num_tokens_of_first(self, count: int) -> int:
        """Return the sum of the tokens of the first `count` requests; with several tenants about that sum."""
        if count >= self._num_requests:
            return self.num_tokens
        if len(self.tenants) == 1:
            return sum(request.num_tokens for request in self.tenants[0].requests[:count])
        return self.num_tokens * count // self._num_requests

    def check(self) -> None:
        """Assert that order and sums are right; tests call it after every step."""
        assert set(self._by_id.values()) == set(self.tenants)
        for queue in self.tenants:
            assert queue.requests == sorted(queue.requests, key=by_order) != []
            assert queue.num_tokens == sum(request.num_tokens for request in queue.requests)
            assert queue.num_work_tokens == sum(request.num_work_tokens for request in queue.requests)
            assert queue.num_answer_tokens == sum(request.num_expected_tokens for request in queue.requests)
        assert self.num_tokens == sum(queue.num_tokens for queue in self.tenants)
        assert self.num_work_tokens == sum(queue.num_work_tokens for queue in self.tenants)
        assert self._num_requests == sum(len(queue.requests) for queue in self.tenants)

    def _num_rounds(self, place: int, request: Request) -> int:
        """Return in which round from now the tenant at a place can be served this request."""
        queue = self.tenants[place]
        num_visits = math.ceil((request.cost - queue.deficit) / queue.quantum)
        return max(num_visits, 0) if place == 0 else max(num_visits, 1) - 1

    def _visit(self, place: int, request: Request) -> None:
        """Visit tenants in turn until the one at a place can be served this request; it is the first then."""
        num_rounds = self._num_rounds(place, request)
        for other_place, queue in enumerate(self.tenants):
            num_visits = num_rounds + (0 < other_place <= place)
            most = queue.requests[0].cost + queue.quantum  # one that is left out does not save up
            if num_visits and queue.deficit < most:
                queue.deficit = min(queue.deficit + num_visits * queue.quantum, most)
        self.tenants = self.tenants[place:] + self.tenants[:place]
