"""QueueLimits: refuses requests for which there is no room in the queue, or whose first token would come too late.

QueueNews: tells the HTTP workers of it. Plain Python; never torch. A request whose grammar compiles is not in the queue
yet and counts as if it were, and so does one behind an isolated request (suspects.py).
"""

from dataclasses import dataclass
from math import ceil

from engine.core.grammars import Grammars
from engine.core.outputs import Transport
from engine.core.queue_forecast import QueueForecast
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.suspects import Suspects
from engine.interface.errors import Overloaded, RateLimited, ServiceError
from engine.interface.protocol import AddRequest, QueueState, RequestFailed

_NEWS_S = 1.0  # between two tellings of the costs
TOO_LATE = "This request waited so long that its first token would have come after its timeout."


@dataclass(kw_only=True)
class QueueLimits:
    """The limits of one queue. max_wait_s: of the predicted time to the first token; None: any."""

    scheduler: Scheduler
    grammars: Grammars
    suspects: Suspects
    forecast: QueueForecast
    max_requests: int
    max_tokens: int | None  # None: any number
    max_wait_s: float | None

    @property
    def is_full(self) -> bool:
        """True while no request can be queued."""
        num_queued, limit = self._num_tokens, self.max_tokens
        return self._has_max_requests or (limit is not None and num_queued > 0 and num_queued >= limit)

    def check_room(self, message: AddRequest) -> None:
        """Raise Overloaded if a prompt would exceed a limit; an empty queue accepts any prompt.

        What has waited for this engine was bounded by its HTTP worker.
        """
        if message.has_waited:
            return
        if self._has_max_requests:
            raise Overloaded(
                f"The queue is full: {self.max_requests} requests are waiting.", retry_after_s=self.retry_after_s()
            )
        num_queued, num_prompt, limit = self._num_tokens, message.num_prompt_tokens, self.max_tokens
        if limit is not None and num_queued and num_queued + num_prompt > limit:
            raise Overloaded(
                f"The queue is full: {num_queued} tokens are waiting, and {num_prompt} more would be over the "
                f"limit of {limit}.",
                retry_after_s=self.retry_after_s(),
            )

    def check_wait(self, request: Request, message: AddRequest, now: float, *, is_let_in: bool = False) -> None:
        """Predict when a request has its first token, and note it. Raises Overloaded if that is too late.

        is_let_in: it was held behind an isolated request, and measured by max_wait_s when it came.

        Only what begins an HTTP request is measured by max_wait_s: its other choices are not refused any more. One
        that goes on after the end of an earlier engine, or behind a prefill engine's token, is refused for nothing; one
        that has waited for this engine for its deadline alone.
        """
        num_free_rows = 0 if self.scheduler.is_short_of_pages else self.scheduler.num_free_rows
        wait_s = self.forecast.wait_s(request, self.scheduler.waiting, num_free_rows=num_free_rows)
        if not is_let_in:
            wait_s += self.forecast.prompts_s(self.suspects.num_tokens)
        request.expected_first_s = now + wait_s if wait_s and message.grammar is None else None
        longest_s, limit_s = wait_s + self.forecast.margin_s(wait_s), self.max_wait_s
        is_first = not (message.num_replays or message.output)  # else its client has tokens already, or was let in
        if message.deadline_s is not None and is_first:
            left_s = message.deadline_s - now
            if wait_s > left_s:
                raise Overloaded(
                    f"The first token would come in about {_shown(wait_s)} s, and this request has "
                    f"{_shown(max(left_s, 0))} s until its timeout.",
                    retry_after_s=max(ceil(wait_s - left_s), 1),
                )
            request.latest_start_s = message.deadline_s - self.forecast.prefill_s(request)
        may_refuse = message.charge is not None and is_first and not (is_let_in or message.has_waited)
        if limit_s is not None and longest_s > limit_s and may_refuse:
            raise Overloaded(
                f"The first token would come in about {_shown(longest_s)} s; the limit is {limit_s:g} s.",
                retry_after_s=max(ceil(longest_s - limit_s), 1),
            )

    def retry_after_s(self) -> int:
        """Return after how many seconds a full queue has room again, for a request or more."""
        queue = self.scheduler.waiting
        return max(ceil(self.forecast.drain_s(queue) / max(len(queue), 1)), 1)

    @property
    def _num_tokens(self) -> int:
        return self.scheduler.waiting.num_tokens + self.grammars.num_pending_prompt_tokens + self.suspects.num_tokens

    @property
    def _has_max_requests(self) -> bool:
        # requests for free rows are not counted: a burst into an idle engine starts at once and is no queue
        num_waiting = len(self.scheduler.waiting) + len(self.grammars.pending) + self.suspects.num_requests
        return num_waiting >= self.max_requests + self.scheduler.num_free_rows


class QueueNews:
    """Tells every HTTP worker whether the queue is full, and what the forecast has measured.

    Workers refuse requests while it is full. They hand the costs to the next engine, whose first forecasts would know
    nothing otherwise.
    """

    def __init__(self, limits: QueueLimits, forecast: QueueForecast, transport: Transport) -> None:
        self._limits = limits
        self._forecast = forecast
        self._transport = transport
        self._is_full = False
        self._num_steps = 0  # measured when the costs were told
        self._next_costs_s = 0.0

    def tell(self, now: float, *, is_leaving: bool = False) -> None:
        """Send QueueState when the queue becomes full or has room again, and QueueCosts if there are new ones.

        is_leaving: the queue is called full, for other engines to take what comes.
        """
        is_full = is_leaving or self._limits.is_full
        if is_full != self._is_full:
            self._is_full = is_full
            self._transport.broadcast(QueueState(is_full, self._limits.retry_after_s()))
        if now >= self._next_costs_s and self._forecast.num_steps > self._num_steps:
            self._next_costs_s = now + _NEWS_S
            self._num_steps = self._forecast.num_steps
            self._transport.broadcast(self._forecast.costs())


def failure_of(request_id: str, error: ServiceError) -> RequestFailed:
    """Return the message that ends a request with an error."""
    failure = RequestFailed(request_id, error.code, error.message, error.param)
    if isinstance(error, Overloaded):
        failure.retry_after_s = error.retry_after_s
    if isinstance(error, RateLimited):
        failure.rates = error.rates
    return failure


def _shown(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.3f}"
