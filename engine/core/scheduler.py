"""Scheduler: plans the rows of each step and commits its result. Plain Python; never torch, a clock or a socket.

There is no prefill phase: a request has num_tokens, of which num_computed_tokens are launched, and each step lets the
second catch up with the first. schedule() may run while an earlier step is still on the device: a request whose last
token is not read yet is planned nevertheless (num_pending_tokens); its row is dropped at commit if that token ended it.
Retire at commit: a request that leaves `running` (finish, abort, preemption) keeps its blocks and its req_index until
the last step that contains it is committed, since the device still reads and writes them.
Most decoding requests are steady: a step visits few of them (engine/core/steady_rows.py).
Everything that orders rows is a list, so the same inputs give the same plans.
"""

from collections import deque

from engine.core.kv_caches import KvCaches
from engine.core.planned_step import DraftCounts, PlannedStep, StepOutputs, add_drafts, apply_samples
from engine.core.request import Request, Status
from engine.core.request_factory import check_length
from engine.core.steady_rows import RunningRequests
from engine.core.step import RequestInit, RowPlan, StepPlan, StepResult
from engine.core.step_budget import Lead, prompt_budget
from engine.core.tenants import TenantShares
from engine.core.waiting_queue import WaitingQueue, by_order
from engine.interface.config import SchedulerConfig
from engine.interface.errors import InvalidParameter


class Scheduler:
    """Owns the queue, the running requests and the caches.

    schedule() and commit() alternate; with overlap depth n, schedule() is up to n steps ahead.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.kv = KvCaches(config)
        self.requests: dict[str, Request] = {}  # by request_id, until they end
        self.waiting = WaitingQueue()
        self.retiring: list[Request] = []
        self.with_prompt_logprobs: list[Request] = []  # with new prompt log-probabilities from the last commit
        self.embedded: list[Request] = []  # ended with an embedding in the last commit
        self.invalid: list[Request] = []  # ended in the last commit, since their output is not finite
        self.committed: PlannedStep | None = None  # the last one
        self.late: list[Request] = []  # ended since they could not meet their deadline; the engine empties it
        self.is_short_of_pages = False  # the request whose turn it was had no room at the last admission
        self.begun: list[Request] = []  # admitted for the first time by the last schedule()
        self.committed_step_id, self.num_preemptions = -1, 0
        self._in_flight: deque[PlannedStep] = deque()
        self._free_req_indices = list(range(config.max_num_seqs))[::-1]
        self._freed: list[int] = []  # req_indices to name in the next plan
        self._next_step_id = self._num_added = 0
        self.drafts = DraftCounts()  # of committed steps
        self._running, self._lead = RunningRequests(config), Lead()
        self._shares = TenantShares(self.kv, max_num_seqs=config.max_num_seqs)
        self._num_stalled = 0  # pages of rows that wait for promised ones in the current schedule()
        # The pool limits a request, as max_model_len does, so that a request that runs alone can always reach its end.
        self.max_num_tokens = self.kv.max_num_tokens

    @property
    def running(self) -> list[Request]:
        """The running requests, in scheduling order."""
        return self._running.requests

    @property
    def has_work(self) -> bool:
        """True until every request has ended, every step is committed, and nothing is left to copy to the host."""
        return bool(self.waiting or self.running or self._in_flight or self.kv.tiers.has_copies)

    @property
    def num_free_rows(self) -> int:
        """The number of free rows of device state: requests that could start now."""
        return len(self._free_req_indices)

    def add(self, request: Request) -> None:
        """Queue a request. Raises PromptTooLong or InvalidParameter for one that could never be served."""
        check_length(request, self.config, max_num_tokens=self.max_num_tokens, num_pages=self.kv.pool.num_usable)
        if request.request_id in self.requests:
            raise InvalidParameter(f"The request id {request.request_id!r} is already being served.")
        request.max_num_tokens = min(request.num_prompt_tokens + request.max_output_tokens, self.max_num_tokens)
        self._shares.check(request)
        request.sort_key = (request.priority, request.arrival_s, self._num_added)
        self._num_added += 1
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def abort(self, request_id: str, reason: str = "abort") -> Request | None:
        """End a request now and return it, or None if it is unknown. Its tokens in flight are dropped."""
        if (request := self.requests.get(request_id)) is not None:
            self._finish(request, reason)
        return request

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step, or return None if nothing can run before the next commit."""
        inits, self.begun = list[RequestInit](), []
        if now >= self.kv.pins.next_due_s:
            self.kv.pins.expire(now)
        step = PlannedStep(self._next_step_id, [], self._freed, self.kv.begin_step(), [], [])
        if self.kv.tiers.is_urgent:  # copies for which another engine waits go alone, before rows
            step.kv.host = self.kv.tiers.plan(step, num_reserved=len(self.running))
        if step.kv.host is None:
            step = self._plan(inits, now)
            while not step.num_rows and self.running and not self._in_flight:  # no row has room, no commit makes some
                if not self.kv.tiers.give_up_newest():
                    self._preempt_last()
                step = self._plan(inits, now, is_stuck=True)
            if step.num_rows or not self.running:
                step.kv.host = self.kv.tiers.plan(step, num_reserved=len(self.running))
            if not step.num_rows and step.kv.host is None:
                return None
        self._next_step_id += 1
        self._in_flight.append(step)
        self._freed, self.kv.pool.dirty = [], []
        return step.plan(inits, *(self._running.take_shares() if step.num_rows else ([], 0)))

    def _plan(self, inits: list[RequestInit], now: float, *, is_stuck: bool = False) -> PlannedStep:
        step = PlannedStep(self._next_step_id, [], self._freed, self.kv.begin_step(), [], [])
        self._num_stalled, most = 0, self.config.max_num_batched_tokens
        is_alone = not is_stuck and self._lead.leaves_out_answers(self._running, self.waiting)
        budget = most if is_alone else self._plan_decodes(step, most)
        begun = self._running.begun
        num_decodes = len(self.running) - len(begun) if is_alone else step.num_rows
        first = None if is_stuck else self._lead.first(begun, self.waiting, lambda: self._next(is_new=True))
        budget = prompt_budget(self.config, budget, num_decodes, begun, self.waiting, self.num_free_rows, first)
        for requests, is_new in self._lead.parts(begun, step, self.waiting, is_stuck=is_stuck, is_alone=is_alone):
            for request in requests:
                budget -= self._plan_chunk(step, request, budget) if budget else 0
            budget = self._admit(step, inits, budget, now, is_new=is_new)
        return self._plan(inits, now, is_stuck=True) if is_alone and not step.num_rows else step

    def commit(self, result: StepResult, now: float) -> StepOutputs:
        """Commit the oldest step in flight: append its tokens, publish full blocks, end and release requests."""
        self.committed = step = self._in_flight.popleft()
        assert step.step_id == result.step_id
        self.committed_step_id = step.step_id
        self.with_prompt_logprobs, self.embedded, self.invalid = step.apply_prompt_outputs(result, now)
        saves = [save for save in step.kv.saves if save.request.finish_reason is None]
        outputs, end = StepOutputs([], []), 0
        for part in step.steady:
            first, end = end, end + len(part.requests)
            token_ids = result.token_ids[first:end]
            for request in part.rows.ending(token_ids):
                self._running.make_single(request)
            output, singles = part.rows.commit(token_ids, now)
            outputs.steady.append(output)
            for place, request in singles:
                row = RowPlan(-1, part.starts()[place], 1)
                self._commit_row(request, row, result, outputs, first=first + place, now=now)
            self.kv.commit_steady(part.rows)
        for request, row in step.singles:
            first, end = end, end + row.num_samples
            self._commit_row(request, row, result, outputs, first=first, now=now)
        self.kv.taint(self.invalid)
        self.kv.end_step(step.kv, [save for save in saves if save.request.finish_reason != "error"])
        if step.kv.host is not None:
            self.kv.commit_copies(step.kv, now)
        for request in [*self.embedded, *self.invalid]:
            self._finish(request, request.finish_reason or "stop")
        self._release_retired()
        return outputs

    def _commit_row(
        self, request: Request, row: RowPlan, result: StepResult, outputs: StepOutputs, *, first: int, now: float
    ) -> None:
        """Commit a row by itself. first: index of its first sample in the result."""
        if request.finish_reason is not None:
            return  # it ended while this step was in flight
        num_committed, reason = row.start + row.num_tokens, None
        if row.num_samples:
            output, reason = apply_samples(request, row, result, first=first, now=now, counts=self.drafts)
            if reason == "error":
                self.invalid.append(request)
                return
            outputs.singles.append(output)
            num_committed -= row.num_samples - len(output.token_ids)
        if num_committed >= request.next_due_tokens:
            self.kv.late.commit_row(request, num_committed)
        if reason is not None:
            self._finish(request, reason)

    def drop_in_flight(self) -> list[Request]:
        """Drop all steps in flight, since the oldest ran out of memory; end and return the requests that caused it."""
        steps = list(self._in_flight)
        self._in_flight.clear()
        self.committed_step_id = self._next_step_id - 1
        victims = steps[0].oom_victims() if steps else []
        for step in steps:
            self.kv.end_step(step.kv)
            self.kv.tiers.drop(step.kv.host)
        self._running.drop_steps()
        for request in dict.fromkeys(request for step in steps for request, _ in step.starts()):
            request.num_pending_tokens = 0
            if request in victims:
                self._finish(request, "error")
            elif request.status is Status.RUNNING:
                request.num_preemptions += 1
                self._running.remove(request)
                self._retire(request)
        self._release_retired()
        self._freed = [req_index for step in steps for req_index in step.freed] + self._freed
        self.kv.pool.dirty += [page for step in steps for page in step.kv.zeroed]
        return victims

    def check(self) -> None:
        """Assert invariants 1 and 2 of docs/explanation/architecture.md; tests call it after every step."""
        holders = self.running + self.retiring
        committed = {request: request.num_computed_tokens for request in holders}
        for step in reversed(self._in_flight):
            committed |= {request: start for request, start in step.starts() if request in committed}
        self.kv.check(committed, [step.kv for step in self._in_flight])
        indices = [*(request.req_index for request in holders), *self._free_req_indices]
        assert sorted(indices) == list(range(self.config.max_num_seqs))
        for request in holders:
            assert request.num_computed_tokens <= request.num_tokens <= request.max_num_tokens
        self._running.check()
        assert all(request.status is Status.RETIRING for request in self.retiring)
        assert all(request.status is Status.WAITING and not request.tables for request in self.waiting.requests)
        assert all(request.last_step > self.committed_step_id for request in self.retiring)
        self.waiting.check()

    def _plan_decodes(self, step: PlannedStep, budget: int) -> int:
        """Plan one token, and drafts, of every decoding request that has room; return the remaining budget."""
        num_rows = len(self.running) + min(len(self.waiting), self.num_free_rows)  # upper bound for this step
        num_spare = min(budget // 2, self.config.max_num_samples or self.config.max_num_seqs) - num_rows
        host_token_rows: list[tuple[Request, RowPlan]] = []  # decode rows with token_ids
        for request in self._to_visit(step):
            if request.status is not Status.RUNNING or not budget:
                continue  # it was preempted for one before it
            start = request.num_computed_tokens
            if start < request.num_prefill_tokens or start + 1 >= request.max_num_tokens:
                continue  # its prompt is planned later; or the token in flight is its last
            drafter = request.drafter
            if drafter is not None and request.is_drafted and request.last_step > self.committed_step_id:
                continue  # the start of its next row is known once the drafts are verified
            new_blocks: list[tuple[int, int, list[int]]] = []
            if start == request.num_held_tokens:
                if not (self.kv.has_room(request) or self._make_room(request)):
                    self._running.make_single(request)
                    continue
                request.awaited_step = -1
                new_blocks = self.kv.begin_row(request, start + 1, step.kv, num_reserved=0)
            if start >= request.next_save_tokens:
                self.kv.save_in_answer(request, step.kv, num_reserved=len(self.running))
            if self._running.settle(request, start):
                step.new_blocks.extend((request.req_index, *entry) for entry in new_blocks)
                continue
            row = RowPlan(request.req_index, start, 1, [], new_blocks)
            if drafter is not None:
                add_drafts(row, request, drafter, self.kv, step.kv, most=num_spare, num_reserved=len(self.running))
                num_spare -= row.num_drafts
            (host_token_rows if row.token_ids else step.singles).append((request, row))
            request.num_computed_tokens = start + row.num_tokens
            request.num_pending_tokens += row.num_tokens
            request.last_step = step.step_id
            if row.num_drafts:
                request.drafted_step = step.step_id
            budget -= row.num_tokens
        step.singles.extend(host_token_rows)
        step.steady.extend(self._running.plan_steady(step.step_id))
        return budget - step.num_steady

    def _to_visit(self, step: PlannedStep) -> list[Request]:
        """Return the requests to look at before this step, in order unless all have room.

        Steady requests that only need pages get them, if all have room.
        """
        to_extend, visits = self._running.to_extend(), self._running.to_visit()
        num_visits = len(visits) + sum(len(requests) for _, requests in to_extend)
        is_free = self.kv.num_free_rows >= num_visits and not self.kv.layout.states
        for rows, requests in to_extend:
            if is_free:
                step.new_blocks.extend(self.kv.extend(requests, step.kv))
                rows.visit_before_plan(requests)
            else:
                visits += requests
        if not is_free or any(request.drafter for request in self._running.singles):
            visits.sort(key=by_order)  # pages are taken in this order, and preemption takes only requests behind it
        return visits

    def _plan_chunk(self, step: PlannedStep, request: Request, budget: int) -> int:
        """Plan the next prefill tokens of a request, at most `budget` and as pages allow; return their number."""
        start = request.num_computed_tokens
        end = self.kv.fit(request, min(start + budget, request.num_prefill_tokens), num_reserved=len(self.running) - 1)
        if end == start:
            return 0
        samples = end == request.num_prefill_tokens and request.embedding is None
        new_blocks = self.kv.begin_row(request, end, step.kv, num_reserved=len(self.running))
        row = RowPlan(request.req_index, start, end - start, request.token_ids(start, end), new_blocks, samples)
        row.prompt_logprobs, row.pool_span = request.prompt_logprobs_span(start, end), request.pool_span(start, end)
        step.singles.append((request, row))
        request.num_computed_tokens = end
        request.num_pending_tokens += samples
        request.last_step = step.step_id
        return end - start

    def _admit(self, step: PlannedStep, inits: list[RequestInit], budget: int, now: float, is_new: bool = False) -> int:
        """Admit waiting requests, strictly in order, each with blocks for all its tokens; return the remaining budget.

        One block per running request stays free, so that no request is admitted only to be preempted soon after.
        Requests at the gate are passed over, and a row is kept for each. is_new: newcomers alone (step_budget.py).
        """
        self.is_short_of_pages = False
        while budget and (request := self._next(is_new=is_new)) is not None:
            if now > request.latest_start_s and request.first_scheduled_s is None:
                self.late.append(request)
                self._finish(request, "error")
                continue
            if not self.kv.admit(request, num_reserved=len(self.running), now=now):
                if self.kv.tiers.is_waiting(request):
                    continue
                self.is_short_of_pages = True
                return budget
            self.waiting.take(request, cost=max(request.cost - request.num_computed_tokens, 0))
            self._running.add(request)
            self._lead.newcomers.update([request] if is_new else [])
            request.status = Status.RUNNING
            request.req_index = self._free_req_indices.pop()
            request.num_prefill_tokens = request.num_tokens
            if request.first_scheduled_s is None:
                request.first_scheduled_s = now
                request.num_cached_tokens = request.num_computed_tokens
                self.begun.append(request)
            inits.append(request.init())
            budget -= self._plan_chunk(step, request, budget)
        return budget

    def _next(self, *, is_new: bool) -> Request | None:
        """Return the waiting request that would start now, if any. is_new: newcomers alone."""
        return self._shares.next(self.waiting, self.running, self.num_free_rows, is_new=is_new)

    def _make_room(self, request: Request) -> bool:
        """Preempt requests until its next token has room; return False if it must wait, or was itself preempted.

        Preemption takes the last running requests, which are never planned already. Pages of retiring requests count
        as promised, each to one stalled row; otherwise one shortage would preempt a request in every step. Where
        commits give pages back, the steps in flight are awaited first; otherwise a request might preempt itself.
        """
        while not self.kv.has_room(request):
            num_missing = self.kv.num_missing(request, request.num_computed_tokens + 1)
            if sum(retiree.num_promised_pages for retiree in self.retiring) >= self._num_stalled + num_missing:
                self._num_stalled += num_missing
                return False
            if self.kv.tiers.give_up_newest():
                continue
            if self.kv.gives_back_at_commit and self._in_flight:
                if request.awaited_step < 0:
                    request.awaited_step = self._in_flight[-1].step_id
                if request.awaited_step > self.committed_step_id:
                    return False
            if self._preempt_last() is request:
                return False
        return True

    def _preempt_last(self) -> Request:
        victim = self.running[-1]
        self._running.remove(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._retire(victim)
        return victim

    def preempt_all(self) -> bool:
        """Preempt all running requests; return whether no step in flight has rows any more."""
        while self.running:
            self._preempt_last()
        return not self._in_flight

    def _release_retired(self) -> None:
        """Release the retiring requests whose last step has been committed or dropped."""
        retiring, self.retiring = self.retiring, []
        for request in retiring:
            self._retire(request)

    def _finish(self, request: Request, reason: str) -> None:
        """End a request in any state."""
        request.finish_reason = reason
        del self.requests[request.request_id]
        if request.first_scheduled_s is not None:
            num_generated = len(request.output_token_ids) - request.num_replayed_tokens
            self.waiting.settle(request.tenant_id, num_generated - request.num_expected_tokens)
        if request.status is Status.WAITING:
            self.kv.tiers.cancel(request)
            self.waiting.remove(request)
            request.status = Status.FINISHED
        elif request.status is Status.RUNNING:
            self._running.remove(request)
            self._retire(request)

    def _retire(self, request: Request) -> None:
        """Release a request that left `running`; if a step in flight contains it, at that step's commit."""
        if request.last_step > self.committed_step_id:
            request.status = Status.RETIRING
            request.num_promised_pages = self.kv.num_held_alone(request)
            self.retiring.append(request)
            return
        self.kv.free(request)
        self._freed.append(request.req_index)
        self._free_req_indices.append(request.req_index)
        request.req_index = -1
        request.status = Status.WAITING if request.finish_reason is None else Status.FINISHED
        if request.status is Status.WAITING:
            self.waiting.add(request)
