"""RunningRequests: the requests that hold blocks and may have rows, in order; each is steady or single. Never torch.

A single request is visited in every step: its prompt is being computed, or its rows carry more than a token, or it
waits for room, or its last row is planned. All others are steady (engine/core/steady_rows.py).
"""

from bisect import insort
from collections.abc import Iterator

from engine.core.request import Request, Status
from engine.core.steady_rows import SteadyRows, SteadyStep
from engine.core.waiting_queue import by_order


class RunningRequests:
    """Owns the order of the running requests, and which of them are steady."""

    def __init__(self, *, has_steady: bool) -> None:
        """has_steady: whether a request may be steady: then it has a row in every step."""
        self.requests: list[Request] = []  # in scheduling order; others only read it
        self.singles: list[Request] = []  # those that are not steady, in the same order; others only read it
        self._has_steady = has_steady
        self._rows: dict[int, SteadyRows] = {}  # by client id, in the order of a plan's rows

    def add(self, request: Request) -> None:
        """Take in an admitted request, as a single one."""
        insort(self.requests, request, key=by_order)
        insort(self.singles, request, key=by_order)

    def remove(self, request: Request) -> None:
        """Let a request go that ends or is preempted."""
        self.make_single(request)
        self.requests.remove(request)
        self.singles.remove(request)

    def make_single(self, request: Request) -> None:
        """Have a request visited in every step from now on."""
        if request.steady is not None:
            request.steady.leave(request)
            insort(self.singles, request, key=by_order)

    def settle(self, request: Request, start: int) -> bool:
        """Make a request steady if its row at `start` is plain and not the last, else single; return whether it is."""
        if not self._has_steady or start + 2 >= request.max_num_tokens or not request.is_plain:
            self.make_single(request)
            return False
        if request.steady is None:
            self.singles.remove(request)
            rows = self._rows.get(request.client_id)
            if rows is None:
                rows = self._rows[request.client_id] = SteadyRows(request.client_id)
            rows.join(request)
        assert request.steady is not None
        request.steady.visit_before_plan([request])
        return True

    def to_extend(self) -> list[tuple[SteadyRows, list[Request]]]:
        """Return the steady requests that only need pages before the next plan. Each is then to be visited again."""
        return [(rows, rows.to_extend()) for rows in self._rows.values()]

    def to_visit(self) -> list[Request]:
        """Return the other steady requests to visit before the next plan, and all single ones."""
        return [*(request for rows in self._rows.values() for request in rows.to_visit()), *self.singles]

    def plan_steady(self, step_id: int) -> list[SteadyStep]:
        """Plan a row of each steady request."""
        for client_id in [client_id for client_id, rows in self._rows.items() if rows.is_unused]:
            del self._rows[client_id]
        return [rows.plan(step_id) for rows in self._rows.values() if rows.requests]

    def drop_steps(self) -> None:
        """Make all requests single, since the steps in flight are dropped."""
        for request in [*self._steady()]:
            self.make_single(request)
        self._rows.clear()

    def check(self) -> None:
        """Assert that each request is where it belongs; tests call it after every step."""
        assert all(request.status is Status.RUNNING for request in self.requests)
        assert self.requests == sorted(self.requests, key=by_order)
        assert self.singles == [request for request in self.requests if request.steady is None]
        assert len(self.singles) + len(list(self._steady())) == len(self.requests)
        for rows in self._rows.values():
            rows.check()

    def _steady(self) -> Iterator[Request]:
        for rows in self._rows.values():
            yield from rows.requests
