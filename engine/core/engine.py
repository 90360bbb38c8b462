"""Engine: the loop that connects clients, scheduler and executor. Plain Python, one thread; never torch.

    receive → schedule(n) → forward(n) → wait and commit(n-1) → send → sample(n)
With overlap depth 2, step n is launched before step n-1 ends and its tokens are read, so the device hardly waits.
Depth 1 moves the commit before schedule(); tests use it as their reference, and it helps debugging.
Every AddRequest ends exactly once: by a `finished` row, by RequestFailed, or when its client disconnects.
If the device has too little memory for a step, this step and all later launched ones are dropped: the requests that
made it large fail, the others are computed again.
"""

import logging
from collections import deque
from collections.abc import Callable

from engine.core.engine_parts import EngineParts
from engine.core.grammars import Grammars, no_compiler
from engine.core.kv_events import KvEvent, KvEvents
from engine.core.kv_snapshot import KvView
from engine.core.launch_delay import LaunchDelay
from engine.core.outputs import EngineStats, Outbox
from engine.core.queue_forecast import QueueForecast
from engine.core.queue_limits import TOO_LATE, QueueLimits, QueueNews, failure_of
from engine.core.request import Request
from engine.core.request_factory import RequestFactory
from engine.core.step import StepHandle, StepPlan, TokenMasks
from engine.core.suspects import Suspects
from engine.core.tenants import Tenants
from engine.interface.errors import InvalidParameter, ModelOutputInvalid, OutOfMemory, Overloaded, ServiceError
from engine.interface.protocol import (
    AbortRequest,
    Accepted,
    AddRequest,
    AskKv,
    ClientGone,
    GrammarUse,
    QueueCosts,
    RefuseDigest,
    TenantUse,
    ToEngine,
)

logger = logging.getLogger(__name__)

_INVALID_OUTPUT = ModelOutputInvalid(
    "The model's output for this request is not finite (NaN or infinite), so there is no next token."
)
_PENDING_POLL_S = 0.001  # poll interval while no request runs but a grammar compiles, or a disk or another engine reads
_MAX_LEAVING = 256  # requests of closed connections that one iteration ends, since decoding rows wait for it


class Engine:
    """Owns the loop and the outgoing messages. A device fault raises out of run_once(); a request's fault does not."""

    def __init__(self, parts: EngineParts) -> None:
        self.scheduler = parts.scheduler
        self.clock = parts.clock
        self.overlap_depth = parts.overlap_depth
        self.max_queued_requests = parts.max_queued_requests
        self.tenants, self.forecast = Tenants(parts.metrics), QueueForecast()
        self.is_leaving = False  # set by the process: workers are told that the queue is full
        self._executor = parts.executor
        self._transport = parts.transport
        self._request_factory = RequestFactory(
            vocab_size=parts.vocab_size,
            num_loras=parts.num_loras,
            can_generate=parts.can_generate,
            make_drafter=parts.make_drafter,
            adapter_digests=parts.adapter_digests,
        )
        self._memory_error = parts.memory_error
        self._release_memory = parts.release_memory
        self._grammars = parts.grammars or Grammars(no_compiler, vocab_size=parts.vocab_size)
        self._suspects = Suspects(
            self._find,
            self.scheduler,
            is_empty=lambda: self._in_flight is None and not self._open_requests(),
            transport=self._transport,
            announce=lambda requests: self._outbox.announce(requests),  # noqa: PLW0108 - there is no _outbox yet
        )
        self._limits = QueueLimits(
            scheduler=self.scheduler,
            grammars=self._grammars,
            suspects=self._suspects,
            forecast=self.forecast,
            max_requests=parts.max_queued_requests,
            max_tokens=parts.max_queued_tokens,
            max_wait_s=parts.max_queue_wait_s,
        )
        self._queue_news = QueueNews(self._limits, self.forecast, self._transport)
        self._is_speculative = parts.make_drafter is not None
        self._launched_s = self._committed_s = 0.0  # the step in flight, and the last commit
        delay = LaunchDelay(parts.scheduler, parts.transport, parts.clock, num_ranks=parts.num_ranks)
        self.launch_delay = delay if parts.overlap_depth > 1 else None
        self._stats = EngineStats(
            parts.metrics,
            self.scheduler,
            tenants=self.tenants,
            forecast=self.forecast,
            bytes_per_page=parts.bytes_per_block,
            num_ranks=parts.num_ranks,
        )
        self._spare_work = parts.spare_work
        self._in_flight: StepHandle | None = None
        self._events: KvEvents | None = None
        self._publish: Callable[[list[KvEvent]], None] = lambda events: None
        self._is_at_tier = False  # nothing can be done, perhaps until a disk or another engine has done something
        self._leaving: deque[Request] = deque()  # their connection is closed; ended by the next iterations
        self._outbox = Outbox(self._transport, self._stats)
        self._kv_view = KvView(
            self.scheduler,
            self._grammars.pending,
            bytes_per_block=parts.bytes_per_block,
            clock=parts.clock,
            num_ranks=parts.num_ranks,
        )

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to do until a message arrives."""
        return self._has_only_copies and not self.scheduler.has_work

    @property
    def _has_only_copies(self) -> bool:
        """True if there is nothing to do but to copy blocks to the host, perhaps not even that."""
        return (
            self._in_flight is None
            and not self.scheduler.requests
            and self._outbox.is_empty
            and not self._grammars.pending
            and not self.scheduler.kv.tiers.is_exchanging
            and not self._suspects.is_holding
        )

    def run_once(self, idle_timeout_s: float | None = None) -> None:
        """Run one iteration of the loop. Blocks for messages while idle or before copies, else at most for a step."""
        was_idle = self.is_idle
        is_only_compiling = bool(self._grammars.pending) and self._in_flight is None and not self.scheduler.has_work
        is_patient = is_only_compiling or self._is_at_tier
        if not was_idle and self.launch_delay is not None:
            is_patient &= not self.launch_delay.rest(self._handle, while_=lambda: self._has_only_copies)
        idle_s = idle_timeout_s if self._spare_work is None else self._spare_work.patience_s(idle_timeout_s)
        patience_s = idle_s if was_idle else _PENDING_POLL_S if is_patient else 0
        for client_id, message in self._transport.receive(patience_s):
            was_idle = False
            self._handle(client_id, message)
        if self._in_flight is not None and self.launch_delay is not None:
            begun_s = max(self._committed_s, self._launched_s)
            self.launch_delay.receive(self._in_flight, begun_s, self._handle)
        self._end_leaving()
        self._let_in()
        if self._grammars.pending or self._grammars.compiling:
            self._queue_compiled()
        if self.scheduler.kv.tiers.is_polled:
            self.scheduler.kv.tiers.poll(self.clock())
        plan = failure = None
        try:
            plan = self._turn()
        except self._memory_error as error:
            failure = str(error).partition("\n")[0]
        if failure is not None:  # outside `except`, since the error references the step's tensors
            self._drop_in_flight(failure)
        self._send_events()
        if self._events is not None:
            self._publish(self._events.take())
        self._end_late()
        self._stats.record_turn(plan, self.clock())
        self._queue_news.tell(self.clock(), is_leaving=self.is_leaving)
        if self._kv_view.askers:
            self._kv_view.answer(self._transport)
        self._spare_work = self._spare_work and self._spare_work.end_turn(had_nothing=was_idle, is_idle=self.is_idle)

    def report_kv_events(self, publish: Callable[[list[KvEvent]], None]) -> KvEvents:
        """Call `publish` after each iteration with what changed in the prefix cache. Before the first request.

        A disk is open by then. publish: must not wait. Returns the changes' owner.
        """
        kv = self.scheduler.kv
        self._events = kv.events = kv.pool.events = KvEvents(kv.layout)
        self._publish = publish
        kv.tiers.report_to(self._events)
        return self._events

    def record_state(self) -> None:
        """Update the metrics that are not counted immediately. Call it before draining the metrics."""
        self.tenants.settle(self.clock())
        self._stats.record_state(num_deferred=len(self._grammars.pending))

    def _turn(self) -> StepPlan | None:
        """Launch one step and commit the previous one; return the launched plan."""
        if self.overlap_depth == 1:
            self._commit()
        self._suspects.set_others_aside()
        now = self.clock()
        plan = self.scheduler.schedule(now)
        if plan is None and self._is_speculative:
            self._commit()  # all requests wait for the verification of their drafts; here the device waits for the host
            now = self.clock()
            plan = self.scheduler.schedule(now)
        if self.scheduler.begun:
            self._outbox.announce(self.scheduler.begun)
        step = self._executor.forward(plan) if plan else None
        if self.launch_delay is not None:
            self.launch_delay.note_launch(self._in_flight, plan)
            self._commit()
        if step is not None and plan is not None:
            step.sample(self._masks(plan) if self._grammars.live else None)
        self._in_flight, self._launched_s = step, now
        self._is_at_tier = plan is None and self.scheduler.kv.tiers.is_polled
        return plan

    def _drop_in_flight(self, reason: str) -> None:
        """Fail the requests that made the oldest uncommitted step too large; requeue the others of all such steps."""
        try:
            self._commit()  # a step launched before the failed one is complete
        except self._memory_error as error:
            reason = str(error).partition("\n")[0]
        self._release_memory()
        self._send_events()  # first: no message of a request may follow its end
        failed = self.scheduler.drop_in_flight()
        logger.error(
            "out of memory in a step failed=%d recomputed=%d reason=%r",
            len(failed),
            len(self.scheduler.waiting),
            reason,
        )
        shortage = OutOfMemory("The device has too little free memory for this request now; try again shortly.")
        for request in failed:
            self._send_failure(request.client_id, request.request_id, shortage)
            self._stats.record_finished(request)

    def _handle(self, client_id: int, message: ToEngine | ClientGone) -> None:
        match message:
            case AddRequest():
                self._try_add(client_id, message)
            case RefuseDigest():
                self._suspects.refuse(message, self.clock())
            case QueueCosts():
                self.forecast.begin_with(message)
            case AbortRequest(request_id, reason) if self._suspects.drop(request_id, client_id):
                self._outbox.send_end(client_id, request_id, reason, step_id=self.scheduler.committed_step_id)
            case AbortRequest(request_id, reason):
                request = self._find(request_id)
                if request is not None and request.client_id == client_id:
                    self._abort(request_id, "stop" if reason == "stop" else "abort")
            case AskKv():
                self._kv_view.ask(client_id)
            case GrammarUse() | TenantUse():
                if (limit := self.tenants.spend(client_id, message, self.clock())) is not None:
                    self._transport.broadcast(limit)
            case ClientGone():
                self._leaving += [request for request in self._open_requests() if request.client_id == client_id]
                self._outbox.drop(client_id)
                self._suspects.drop_client(client_id)
                self.tenants.drop_client(client_id)

    def _end_leaving(self) -> None:
        """End the next requests of closed connections. Nobody receives their rows."""
        for _ in range(min(len(self._leaving), _MAX_LEAVING)):
            request = self._leaving.popleft()
            if request.finish_reason is None and self._end(request.request_id, "abort") is not None:
                self._stats.record_finished(request)

    def _end_late(self) -> None:
        """Report the requests that the scheduler ended because they could not meet their deadline any more."""
        for request in self.scheduler.late:
            error = Overloaded(TOO_LATE, retry_after_s=self._limits.retry_after_s())
            self._send_failure(request.client_id, request.request_id, error)
            self._stats.record_failed(request)
        self.scheduler.late.clear()

    def _let_in(self) -> None:
        """Add the requests that need no longer wait for a suspect."""
        while self._suspects.is_holding and (held := self._suspects.next()) is not None:
            self._try_add(*held, is_let_in=True)

    def _try_add(self, client_id: int, message: AddRequest, *, is_let_in: bool = False) -> None:
        try:
            self._add(client_id, message, is_let_in=is_let_in)
        except ServiceError as error:  # the HTTP worker counts refused requests
            self._send_failure(client_id, message.request_id, error)
            if message.charge is not None and not message.is_charged:
                self.tenants.count_refused(message.tenant)

    def _add(self, client_id: int, message: AddRequest, *, is_let_in: bool) -> None:
        if self._find(message.request_id) is not None:
            raise InvalidParameter(f"The request id {message.request_id!r} is already being served.")
        self._suspects.check(message, self.clock())
        if not (message.num_replays or message.output or is_let_in):  # there was room for the others
            self._limits.check_room(message)
        request = self._request_factory.make(message, client_id=client_id)
        now = self.clock()
        self.tenants.check(message, now)
        request.tenant_name = self.tenants.name_of(message.tenant)
        request.num_expected_tokens = self.forecast.num_expected_tokens(request)
        self._limits.check_wait(request, message, now, is_let_in=is_let_in)
        if not is_let_in and self._suspects.holds(message):
            self._suspects.hold(client_id, message)
            self._let_in()
            return
        if message.grammar is None:
            self.scheduler.add(request)
            self.scheduler.kv.tiers.queued(request)
            self._grammars.follow(request)
        else:
            self._outbox.announce([request])
            self._grammars.defer(request, message.grammar, now)
        rates = self.tenants.open(request, message, now)
        if message.charge is not None and not message.is_charged:
            self._outbox.accept(request, Accepted(request.request_id, rates))

    def _queue_compiled(self) -> None:
        """Queue the requests whose grammar has been compiled; fail those whose grammar has an error."""
        for request, error in self._grammars.pop_compiled(self.clock()):
            try:
                if error is not None:
                    raise error
                self.scheduler.add(request)
                self.scheduler.kv.tiers.queued(request)
            except ServiceError as failure:
                self._fail(request, failure)

    def _masks(self, plan: StepPlan) -> TokenMasks | None:
        """Return the token masks of a plan's constrained rows. End the requests that have no allowed token."""
        masks, ended = self._grammars.masks(plan)
        for request, error in ended:
            if error is None:
                self._abort(request.request_id, "stop")
            else:
                self._fail(request, error)
        return masks

    def _fail(self, request: Request, error: ServiceError) -> None:
        """End a request with RequestFailed. The outbox must contain no row of it."""
        if self.scheduler.abort(request.request_id, "error") is None:
            request.finish_reason = "error"  # it was never queued
        self._send_failure(request.client_id, request.request_id, error)
        self._stats.record_failed(request)

    def _send_failure(self, client_id: int, request_id: str, error: ServiceError) -> None:
        self._transport.send(client_id, failure_of(request_id, error))

    def _open_requests(self) -> list[Request]:
        return [*self.scheduler.requests.values(), *self._grammars.pending.values()]

    def _find(self, request_id: str) -> Request | None:
        """Return a request that has not ended (running, queued, or waiting for its grammar), or None."""
        return self.scheduler.requests.get(request_id) or self._grammars.pending.get(request_id)

    def _abort(self, request_id: str, reason: str = "abort") -> None:
        request = self._end(request_id, reason)
        if request is not None:
            self._outbox.add_end(request, reason)

    def _end(self, request_id: str, reason: str) -> Request | None:
        return self.scheduler.abort(request_id, reason) or self._grammars.drop(request_id, reason)

    def _commit(self) -> None:
        """Wait for the step in flight, if any, commit it and send its tokens."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return
        self.scheduler.kv.late.publish_while(lambda: not step.is_done())
        result = step.wait()
        now = self.clock()
        outputs = self.scheduler.commit(result, now)
        for part in outputs.steady:
            self._outbox.add_steady(part)
        for request, error in self._grammars.advance(outputs.singles) if self._grammars.live else ():
            if error is None:
                self.scheduler.abort(request.request_id, "stop")
            else:
                self._fail(request, error)
        for output in outputs.singles:
            if output.request.finish_reason != "error":
                self._outbox.add_tokens(output)
        for request in self.scheduler.with_prompt_logprobs:
            # otherwise they were sent with its token, or the request has ended
            if request.unsent_prompt_logprobs and request.finish_reason is None:
                self._outbox.add_prompt_logprobs(request)
        for request in self.scheduler.embedded:
            self._outbox.add_embedding(request)
        for request in self.scheduler.invalid:
            self._send_failure(request.client_id, request.request_id, _INVALID_OUTPUT)
            self._stats.record_invalid(request)
        # No token waits for the books, nor for sampling to be launched, with whose layers the device is busy
        self._send_events()
        if self.scheduler.committed is not None:
            begun_s = max(self._committed_s, self._launched_s)
            step_s = now - begun_s
            if self.launch_delay is not None:
                self.launch_delay.note_commit(self.scheduler.committed, begun_s, now)
            self.forecast.observe_step(self.scheduler.committed, step_s)
            self.tenants.record_step(self.scheduler.committed, step_s)
        self._committed_s = now
        self._stats.record_commit(outputs.num_tokens, now)
        self.scheduler.kv.tiers.end_commit(now, self.forecast)

    def _send_events(self) -> None:
        self._outbox.send(self.scheduler.committed_step_id)
