"""RunningRequests, and SteadyRows: those of them that decode one plain token in every step, as columns. Never torch.

Most rows of most steps only go on: the device's last token in, one token out. An object for each of them in each step,
and a visit to its request, would be most of the host's time. So a step does not touch a steady request. Its counts
follow from the steps since it joined (Request.num_computed_tokens), and its output list gets the tokens of 16 steps by
one call in C, or sooner if they are read (Request.output_token_ids).
It is looked at in the steps that it waits for: before a plan, when it needs pages, saves a state, or nears its end;
after a commit, when blocks are due to be published or released. Stop tokens are searched in all tokens of a step.

A request joins when the scheduler plans a steady row of it, and leaves when it ends, is preempted, has no room, or
comes to its last row. The columns of a planned step are never changed: a change copies them first. A row in flight of a
request that left is committed by itself.

All other running requests are single, and visited in every step: a prompt is being computed, or rows carry more than a
token, or there is no room, or the last row is planned.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter, call
from typing import NamedTuple

import numpy as np

from engine.core.cache_layout import NEVER
from engine.core.request import Request, Status
from engine.core.shared_prefixes import SharedPrefixes
from engine.core.step import NO_TOKEN, RequestShare
from engine.core.waiting_queue import by_order
from engine.interface.config import SchedulerConfig

_MOST_UNSETTLED = 16  # steps
_by_joining = attrgetter("joined")


class SteadyStep(NamedTuple):
    """The steady rows of one client in a planned step. The lists are shared with other steps, and never changed."""

    rows: SteadyRows
    place: int  # SteadyRows.num_planned before it
    requests: list[Request]
    request_ids: list[str]
    extends: list[Callable[[Iterable[int]], None]]  # of their output_token_ids
    req_index: bytes  # [R] int32
    start: bytes  # [R] int32
    left: list[int]  # places in these lists of requests that left since

    def starts(self) -> array[int]:
        """Return the starts as numbers."""
        return array("i", self.start)


class SteadyOutput(NamedTuple):
    """A token each of steady requests of one client that go on, in columns."""

    client_id: int
    requests: list[Request]
    request_ids: list[str]
    token_ids: list[int]


class SteadyRows:
    """The steady requests of one client, in the order in which they joined."""

    def __init__(self, client_id: int) -> None:
        self.client_id = client_id
        self.num_planned = 0  # steps with these rows, in which each of them has a row
        self.num_committed = 0  # of these
        self.last_step = -1  # the newest of these
        self._last_commit_s = 0.0
        self._requests: list[Request] = []
        self._request_ids: list[str] = []
        self._extends: list[Callable[[Iterable[int]], None]] = []
        self._is_shared = False  # a planned step has these three lists
        self._req_index = array("i")
        self._start = array("i")  # less num_planned
        self._stops: dict[int, int] = {NO_TOKEN: 1}  # tokens that may end a request: the number of such requests
        self._in_flight: deque[SteadyStep] = deque()
        self._unsettled: list[list[int]] = []  # the tokens of committed steps that are not in the outputs yet,
        self._unsettled_extends: list[Callable[[Iterable[int]], None]] = []  # and where they belong
        # By num_planned, the requests to look at before that plan; of _to_extend only because they need a block each
        self._to_visit: dict[int, list[Request]] = {}
        self._to_extend: dict[int, list[Request]] = {}
        self._after_commit: dict[int, list[Request]] = {}  # by SteadyStep.place, those to look at after its commit

    @property
    def requests(self) -> Sequence[Request]:
        """The requests that are here, in the order in which they joined."""
        return self._requests

    @property
    def is_unused(self) -> bool:
        """True if neither a request nor a step in flight is here."""
        return not self._requests and not self._in_flight

    def num_in_flight(self, request: Request) -> int:
        """Return the number of uncommitted rows of a request that is here."""
        return self.num_planned - max(request.joined, self.num_committed)

    def join(self, request: Request) -> None:
        """Take in a request whose next row is a steady one."""
        self._unshare()
        self._requests.append(request)
        self._request_ids.append(request.request_id)
        self._extends.append(request.output_token_ids.extend)
        self._req_index.append(request.req_index)
        self._start.append(request.num_computed_tokens - self.num_planned)
        for token_id in request.params.stop_token_ids:
            self._stops[token_id] = self._stops.get(token_id, 0) + 1
        request.steady, request.joined = self, self.num_planned
        if request.late_prefix is None:
            self.visit_after_commit([request])

    def leave(self, request: Request) -> None:
        """Let a request go. Its rows in flight will be committed by themselves."""
        self.settle()
        for step in self._in_flight:
            if request.joined <= step.place:
                step.left.append(_place(step.requests, request))
        place = _place(self._requests, request)
        self._unshare()
        for column in (self._requests, self._request_ids, self._extends, self._req_index, self._start):
            del column[place]
        for token_id in request.params.stop_token_ids:
            self._stops[token_id] -= 1
            if not self._stops[token_id]:
                del self._stops[token_id]
        for calendar, visit in (
            (self._to_visit, request.plan_visit),
            (self._to_extend, request.plan_visit),
            (self._after_commit, request.commit_visit),
        ):
            if request in calendar.get(visit, ()):
                calendar[visit].remove(request)
        request.left_tokens, request.commit_visit = self.num_committed_tokens(request), -1
        if request.joined < self.num_committed:
            request.last_token_s = self._last_commit_s
        counts = request.num_computed_tokens, request.num_pending_tokens, request.last_step
        request.steady = None
        request.stored_computed_tokens, request.stored_pending_tokens, request.stored_last_step = counts

    def visit_before_plan(self, requests: list[Request]) -> None:
        """Have requests looked at before the next row that needs pages, saves a state, or is their last."""
        to_visit, to_extend = self._to_visit, self._to_extend
        for request in requests:
            held, last = request.num_held_tokens, request.max_num_tokens - 2
            base = request.joined - request.stored_computed_tokens
            if held < last and held < request.next_save_tokens:
                calendar, visit = to_extend, base + held
            else:
                calendar, visit = to_visit, base + min(held, last, request.next_save_tokens)
            request.plan_visit = visit
            if visit in calendar:
                calendar[visit].append(request)
            else:
                calendar[visit] = [request]

    def to_extend(self) -> list[Request]:
        """Return the requests that only need a block each before the next plan. Each is then to be visited again."""
        return self._to_extend.pop(self.num_planned, [])

    def to_visit(self) -> list[Request]:
        """Return the other requests to look at before the next plan."""
        requests = self._to_visit.pop(self.num_planned, [])
        for request in requests:
            request.plan_visit = -1
        return requests

    def committed(self) -> list[Request]:
        """Return the requests to look at after the newest commit. Each is then to be visited again."""
        return self._after_commit.pop(self.num_committed - 1, [])

    def num_committed_tokens(self, request: Request) -> int:
        """Return the number of tokens of a request behind its newest committed row."""
        return request.stored_computed_tokens + self.num_committed - request.joined

    def visit_after_commit(self, requests: list[Request]) -> None:
        """Have requests looked at after the commit of the next row behind which blocks are due."""
        calendar, next_commit = self._after_commit, self.num_committed
        for request in requests:
            due, joined = request.next_due_tokens, request.joined
            visit = -1 if due == NEVER else max(joined + due - 1 - request.stored_computed_tokens, joined, next_commit)
            request.commit_visit = visit
            if visit in calendar:
                calendar[visit].append(request)
            elif visit >= 0:
                calendar[visit] = [request]

    def plan(self, step_id: int) -> SteadyStep:
        """Plan a row of each request."""
        self._is_shared = True
        req_index = self._in_flight[-1].req_index if self._in_flight else b""
        if not self._in_flight or self._in_flight[-1].requests is not self._requests:
            req_index = self._req_index.tobytes()
        start = (np.frombuffer(self._start, np.int32) + np.int32(self.num_planned)).tobytes()
        lists = self._requests, self._request_ids, self._extends
        step = SteadyStep(self, self.num_planned, *lists, req_index, start, [])
        self._in_flight.append(step)
        self.num_planned += 1
        self.last_step = step_id
        return step

    def ending(self, token_ids: list[int]) -> list[Request]:
        """Return the requests that the oldest step's tokens end. They must leave before its commit."""
        if self._stops.keys().isdisjoint(token_ids):
            return []
        step = self._in_flight[0]
        places = [place for place, token_id in enumerate(token_ids) if token_id in self._stops]
        pairs = [(step.requests[place], token_ids[place]) for place in places if place not in step.left]
        return [
            request
            for request, token_id in pairs
            if token_id == NO_TOKEN or request.is_stop(token_id, len(request.output_token_ids) + 1)
        ]

    def commit(self, token_ids: list[int], now: float) -> tuple[SteadyOutput, list[tuple[int, Request]]]:
        """Commit the oldest step's tokens to the requests that go on.

        Returns them, and the places and requests of the rows to commit by themselves: those that left.
        """
        step = self._in_flight.popleft()
        assert step.place == self.num_committed
        requests, request_ids, extends = step.requests, step.request_ids, step.extends
        singles = [(place, requests[place]) for place in sorted(step.left)]
        if singles:
            requests, request_ids, extends = requests.copy(), request_ids.copy(), extends.copy()
            for place, _ in reversed(singles):
                del requests[place], request_ids[place], extends[place], token_ids[place]
        if self._unsettled_extends is not extends:
            self.settle()
            self._unsettled_extends = extends
        self._unsettled.append(token_ids)
        if len(self._unsettled) == _MOST_UNSETTLED:
            self.settle()
        self.num_committed += 1
        self._last_commit_s = now
        return SteadyOutput(self.client_id, requests, request_ids, token_ids), singles

    def settle(self) -> None:
        """Add the committed tokens to the outputs of their requests: of several steps at once."""
        if self._unsettled:
            deque(map(call, self._unsettled_extends, zip(*self._unsettled, strict=True)), maxlen=0)
            self._unsettled = []

    def check(self) -> None:
        """Assert that the columns are those of the requests; tests call it after every step."""
        assert self._request_ids == [request.request_id for request in self._requests]
        assert self._extends == [request.stored_output_token_ids.extend for request in self._requests]
        assert self._req_index.tolist() == [request.req_index for request in self._requests]
        starts = [start + self.num_planned for start in self._start]
        assert starts == [request.num_computed_tokens for request in self._requests]
        assert self.num_planned - self.num_committed == len(self._in_flight)
        for place, request in enumerate(self._requests):
            assert request.steady is self
            assert request.plan_visit >= self.num_planned
            assert request.num_computed_tokens <= request.num_held_tokens
            assert request.num_computed_tokens <= request.next_save_tokens
            num_unsettled = len(self._unsettled) if self._extends[place] in self._unsettled_extends else 0
            num_output = len(request.stored_output_token_ids) + num_unsettled + request.num_pending_tokens
            assert request.num_prompt_tokens + num_output == request.num_tokens

    def _unshare(self) -> None:
        if self._is_shared:
            self._is_shared = False
            self._requests, self._request_ids = self._requests.copy(), self._request_ids.copy()
            self._extends = self._extends.copy()


class RunningRequests:
    """Owns the order of the running requests, which of them are steady, and which share prefixes."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.requests: list[Request] = []  # in scheduling order; others only read it
        self.singles: list[Request] = []  # those that are not steady, in the same order; others only read it
        # A steady request has a row in every step, so the budget must suffice for all
        self._has_steady = config.max_num_batched_tokens >= config.max_num_seqs
        self._shared = SharedPrefixes.of(config)
        self._rows: dict[int, SteadyRows] = {}  # by client id, in the order of a plan's rows

    @property
    def begun(self) -> list[Request]:
        """The requests whose prompt is partly computed, or not at all, in the same order."""
        return [request for request in self.singles if not request.is_decoding]

    def add(self, request: Request) -> None:
        """Take in an admitted request, as a single one."""
        insort(self.requests, request, key=by_order)
        insort(self.singles, request, key=by_order)
        if self._shared is not None:
            self._shared.join(request)

    def remove(self, request: Request) -> None:
        """Let a request go that ends or is preempted."""
        self.make_single(request)
        self.requests.remove(request)
        self.singles.remove(request)
        if self._shared is not None:
            self._shared.leave(request)

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
        if self._shared is not None:
            self._shared.send_again()

    def take_shares(self) -> tuple[list[RequestShare], int]:
        """Return what the next plan says of groups (SharedPrefixes.take)."""
        return ([], 0) if self._shared is None else self._shared.take()

    def check(self) -> None:
        """Assert that each request is where it belongs; tests call it after every step."""
        assert all(request.status is Status.RUNNING for request in self.requests)
        assert self.requests == sorted(self.requests, key=by_order)
        assert self.singles == [request for request in self.requests if request.steady is None]
        assert len(self.singles) + len(list(self._steady())) == len(self.requests)
        for rows in self._rows.values():
            rows.check()
        if self._shared is not None:
            self._shared.check(self.requests)

    def _steady(self) -> Iterator[Request]:
        for rows in self._rows.values():
            yield from rows.requests


def _place(requests: list[Request], request: Request) -> int:
    """Return where a request is in a list that is nearly always in the order of joining."""
    try:
        return requests.index(request, bisect_left(requests, request.joined, key=_by_joining))
    except ValueError:  # others of a step in flight left and joined again
        return requests.index(request)
