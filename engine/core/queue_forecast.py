"""QueueForecast: predicts when a request that arrives now would have its first token. Plain Python; never a clock.

The wait is the work in the queue divided by the measured rate at which work is done. Work is time of the device: the
forecast measures what a prompt token and a generated token cost, by splitting the time of each step by its tokens, over
about the last ten seconds of steps. How many tokens a request will generate is guessed from what its tenant's requests
generated, and how much of its prompt the prefix cache has from recent prompts. A prompt that a prefill engine computed
is no work. As tenants take turns by weight
(engine/core/waiting_queue.py), of each other tenant's queue only so much comes first as its weight allows while the own
work is done.

A forecast is corrected by its own errors: none of the last 128 requests waited longer than prediction and margin. The
margin is a tenth of the prediction at least, since errors are known late, and at most the prediction, so that it never
refuses a request by itself.

costs() and begin_with() carry the measurements from one engine to the next. They count there as a little of its own:
as two seconds of steps, and eight answers of each tenant.
"""

import math
from collections import deque

from engine.core.planned_step import PlannedStep
from engine.core.request import Request
from engine.core.waiting_queue import TenantQueue, WaitingQueue
from engine.interface.protocol import QueueCosts

_MEMORY_S = 10.0  # time of steps after which a step counts for 1/e
_GUESSED_TOKENS = 256  # of an answer, as the first of those from which the mean is made
_MEMORY_REQUESTS = 32.0  # requests after which a request counts for 1/e
_NUM_ERRORS = 128
_LEAST_MARGIN = 0.1
_MAX_TENANTS = 1024
_MAX_TOLD_TENANTS = 64
_EARLIER_S = 2.0  # of steps, as which the costs of an earlier engine count
_EARLIER_REQUESTS = 8.0


class _Mean:
    """A mean in which older values count less. memory: as a sum of weights."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._total = self._weight = 0.0

    @classmethod
    def of(cls, told: tuple[float, float]) -> "_Mean":
        """Make the mean of an earlier engine's requests, from its value and its weight."""
        value, weight = told
        mean, weight = cls(_MEMORY_REQUESTS), min(weight, _EARLIER_REQUESTS)
        mean.add(value * weight, weight)
        return mean

    def add(self, total: float, weight: float) -> None:
        """Add values with their sum and their number."""
        kept = math.exp(-weight / self._memory)
        self._total, self._weight = self._total * kept + total, self._weight * kept + weight

    @property
    def value(self) -> float | None:
        """The mean, or None before the first value."""
        return self._total / self._weight if self._weight else None

    @property
    def value_and_weight(self) -> tuple[float, float]:
        """The mean, 0 before the first value, and its weight."""
        return self.value or 0.0, self._weight


class _Cost:
    """Seconds of the device per token."""

    def __init__(self) -> None:
        self.seconds = self.num_tokens = 0.0

    def add(self, kept: float, seconds: float, num_tokens: float) -> None:
        """Forget all but a part of what was measured, and add a step."""
        self.seconds = self.seconds * kept + seconds
        self.num_tokens = self.num_tokens * kept + num_tokens

    @property
    def per_token(self) -> float:
        """0 before the first measurement."""
        return self.seconds / self.num_tokens if self.num_tokens > 1e-3 else 0.0


class QueueForecast:
    """Measures steps, answers and its own errors; the caller passes all times, in seconds."""

    def __init__(self) -> None:
        self.num_steps = 0  # that were measured
        self._prompt, self._answer = _Cost(), _Cost()
        self._answers: dict[str, _Mean] = {}  # tokens, by tenant
        self._computed = _Mean(_MEMORY_REQUESTS)  # share of a prompt that the prefix cache did not have
        self._errors: deque[float] = deque(maxlen=_NUM_ERRORS)
        self._margin_s = 0.0

    def observe_step(self, step: PlannedStep, seconds: float) -> None:
        """Learn from a committed step and the time that it took."""
        num_prompt, num_answer = step.num_tokens()
        total = num_prompt + num_answer
        if total and seconds > 0:
            kept = math.exp(-seconds / _MEMORY_S)
            self.num_steps += 1
            self._prompt.add(kept, seconds * num_prompt / total, num_prompt)
            self._answer.add(kept, seconds * num_answer / total, num_answer)

    @property
    def prompt_cost(self) -> tuple[float, float]:
        """Seconds of the device for prompt tokens, and their number, of late."""
        return self._prompt.seconds, self._prompt.num_tokens

    def observe_start(self, request: Request) -> None:
        """Learn from the first token of a request."""
        self._computed.add(1.0 - request.num_cached_tokens / request.num_prompt_tokens, 1.0)
        if request.expected_first_s is not None and request.first_token_s is not None:
            self._errors.append(request.first_token_s - request.expected_first_s)
            self._margin_s = max(*self._errors, 0.0)

    def observe_end(self, request: Request) -> None:
        """Learn from the length of an answer."""
        if request.finish_reason not in ("stop", "length") or request.embedding is not None:
            return
        mean = self._answers.pop(request.tenant_id, None)
        if mean is None:
            if len(self._answers) >= _MAX_TENANTS:
                del self._answers[next(iter(self._answers))]
            mean = _Mean(_MEMORY_REQUESTS)
            mean.add(_GUESSED_TOKENS, 1.0)
        self._answers[request.tenant_id] = mean  # the last one: of the tenant whose answer ended last
        mean.add(len(request.output_token_ids), 1.0)

    def costs(self) -> QueueCosts:
        """Return what was measured, for the next engine."""
        told = list(self._answers.items())[-_MAX_TOLD_TENANTS:]
        return QueueCosts(
            self._prompt.seconds,
            self._prompt.num_tokens,
            self._answer.seconds,
            self._answer.num_tokens,
            self._computed.value_and_weight,
            {tenant_id: mean.value_and_weight for tenant_id, mean in told},
        )

    def begin_with(self, costs: QueueCosts) -> None:
        """Take an earlier engine's measurements. Does nothing once steps have been measured."""
        if self.num_steps:
            return
        part = min(1.0, _EARLIER_S / max(costs.prompt_s + costs.answer_s, 1e-9))
        self._prompt, self._answer = _Cost(), _Cost()
        self._prompt.add(1.0, costs.prompt_s * part, costs.num_prompt_tokens * part)
        self._answer.add(1.0, costs.answer_s * part, costs.num_answer_tokens * part)
        self._computed = _Mean.of(costs.computed)
        self._answers = {tenant_id: _Mean.of(told) for tenant_id, told in costs.answers.items()}

    def num_expected_tokens(self, request: Request) -> int:
        """Return how many tokens a request will probably generate, without those that earlier engines made."""
        mean = self._answers.get(request.tenant_id)
        guess = _GUESSED_TOKENS if mean is None or mean.value is None else round(mean.value)
        num_made = request.num_replayed_tokens
        return min(request.max_output_tokens - num_made, max(guess - num_made, 1))

    def prefill_s(self, request: Request) -> float:
        """Return the time from a request's start to its first token; 0: unknown."""
        return self._work_s(request.num_prompt_tokens, 0)

    def prompts_s(self, num_tokens: int) -> float:
        """Return the time in which prompts of so many tokens are computed; 0: unknown."""
        return self._work_s(num_tokens, 0)

    def wait_s(self, request: Request, queue: WaitingQueue, *, num_free_rows: int) -> float:
        """Return the time to the first token of a request that is about to be queued.

        num_free_rows: those that queued requests can take at once; 0 if pages are short.
        """
        num_waiting = len(queue)
        if num_waiting < num_free_rows:
            return self._work_s(queue.num_work_tokens + request.num_prompt_tokens, 0)
        own = queue.queue_of(request.tenant_id)
        own_s = self._work_s(request.num_work_tokens, request.num_expected_tokens) + self._ahead_s(request, own)
        own_s /= max(request.kv_share, 1e-6)
        others_s = 0.0
        for other in queue.tenants:
            if other is not own:
                other_s = self._work_s(other.num_work_tokens, other.num_answer_tokens)
                others_s += min(other_s, own_s * other.weight / request.weight)
        part = 1.0 - num_free_rows / (num_waiting + 1)  # of the work; the rest fills rows, after its prompts
        first_s = self._work_s(queue.num_work_tokens, 0) * (1.0 - part)
        return (own_s + others_s) * part + first_s + self.prefill_s(request)

    def drain_s(self, queue: WaitingQueue) -> float:
        """Return the time in which the work of a queue is done; 0: unknown."""
        return self._work_s(queue.num_work_tokens, sum(other.num_answer_tokens for other in queue.tenants))

    def margin_s(self, wait_s: float) -> float:
        """Return what to add to a predicted wait so that most waits are shorter."""
        return min(max(self._margin_s, _LEAST_MARGIN * wait_s), wait_s)

    def _ahead_s(self, request: Request, own: TenantQueue | None) -> float:
        """Return the work of the tenant's requests that come first: those of the same or an earlier priority."""
        if own is None:
            return 0.0
        if request.priority >= own.requests[-1].priority:
            return self._work_s(own.num_work_tokens, own.num_answer_tokens)
        ahead = [other for other in own.requests if other.priority <= request.priority]
        return self._work_s(
            sum(other.num_work_tokens for other in ahead), sum(other.num_expected_tokens for other in ahead)
        )

    def _work_s(self, num_tokens: int, num_answer_tokens: int) -> float:
        computed = self._computed.value
        num_computed = num_tokens * (1.0 if computed is None else computed)
        return num_computed * self._prompt.per_token + num_answer_tokens * self._answer.per_token
