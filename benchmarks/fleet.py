"""Fleet: simulates replicas under a load, as a discrete event simulation around the engine's own scheduler.

The scheduler is the real one (engine/core/scheduler.py: chunked prefill, KV blocks, prefix cache, preemption), and the
order of plan and commit follows engine/core/engine.py. The device is StepTimes, the clock is simulated, and tokens have
no value. Not simulated: drafts, grammars, clients that disconnect, and HTTP except for a constant per request.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import msgspec

from benchmarks.load_connection import RequestTiming
from benchmarks.step_times import StepTimes
from engine.core.planned_step import RowOutput
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.step import StepPlan, StepResult
from engine.interface.protocol import SamplingParams

POLICIES = ("least-requests", "round-robin")
_ARRIVAL, _TURN = 0, 1  # at equal times arrivals come first, as the engine reads its inbox before it plans


@dataclass(frozen=True, kw_only=True)
class Load:
    """Poisson arrivals at rate_per_s, or a closed loop if that is 0. Lengths are uniform over their range."""

    num_requests: int
    rate_per_s: float = 0.0
    concurrency: int = 1
    input_len: tuple[int, int] = (512, 512)
    output_len: tuple[int, int] = (128, 128)
    shared_prefix: int = 0  # tokens with which every prompt begins
    seed: int = 0


class Replica:
    """One engine: its scheduler, and the steps in flight with the times of their ends."""

    def __init__(self, times: StepTimes, *, has_prefix_cache: bool) -> None:
        self.times = times
        self.scheduler = Scheduler(msgspec.structs.replace(times.scheduler, enable_prefix_caching=has_prefix_cache))
        self.is_turning = False
        self.busy_s = 0.0
        self.num_steps = 0
        self.num_given = 0
        self.most_pages = 0
        self._in_flight: deque[tuple[StepPlan, float]] = deque()

    def add(self, request: Request) -> None:
        """Queue a request. Raises the scheduler's errors for requests that can never be served."""
        self.scheduler.add(request)
        self.num_given += 1

    def turn(self, now: float) -> tuple[list[RowOutput], float, float | None]:
        """Run one turn of the loop; return the committed rows, their time, and the next turn's time, if set."""
        outputs: list[RowOutput] = []
        committed_s = now
        if self.times.depth == 1 and self._in_flight:  # this turn is at the time when the step ends
            outputs, committed_s = self._commit()
        if plan := self.scheduler.schedule(now):
            self._launch(plan, now)
        if self.times.depth > 1 and (len(self._in_flight) > 1 or (plan is None and self._in_flight)):
            outputs, committed_s = self._commit()
        if not self._in_flight and not self.scheduler.has_work:
            return outputs, committed_s, committed_s if committed_s > now else None  # until then the loop waits
        next_s = self._in_flight[0][1] if self.times.depth == 1 else max(now, committed_s)
        return outputs, committed_s, next_s

    def _launch(self, plan: StepPlan, now: float) -> None:
        decodes = [row for row in plan.rows if not row.token_ids]
        step_s = self.times.step_s(
            num_decodes=len(decodes),
            num_context_tokens=sum(row.start + 1 for row in decodes),
            num_prompt_tokens=plan.num_tokens - len(decodes),
        )
        started_s = max([now, *(end_s for _, end_s in self._in_flight)])
        self._in_flight.append((plan, started_s + step_s))
        self.busy_s += step_s
        self.num_steps += 1
        self.most_pages = max(self.most_pages, self.scheduler.kv.pool.num_used)

    def _commit(self) -> tuple[list[RowOutput], float]:
        plan, end_s = self._in_flight.popleft()
        result = StepResult(plan.step_id, [0] * plan.num_samples)
        return self.scheduler.commit(result, end_s).rows(), end_s


class Fleet:
    """Replicas behind a router, and the clients of one load. `run` is the whole simulation."""

    def __init__(
        self, times: StepTimes, load: Load, *, num_replicas: int = 1, policy: str = POLICIES[0], overhead_s: float = 0.0
    ) -> None:
        """overhead_s: time of a request before the engine receives it: HTTP, the tokenizer, a router.

        Each request has from half to one and a half of it: requests that are sent together do not arrive together, and
        the first to arrive may start a step that the others must wait for.
        """
        self.replicas = [Replica(times, has_prefix_cache=load.shared_prefix > 0) for _ in range(num_replicas)]
        self.timings: list[RequestTiming] = []  # as the clients of `quire bench serve` record them
        self.queue_s: list[float] = []  # of ended requests: arrival to the first step that computes it
        self._load, self._policy, self._overhead_s = load, policy, overhead_s
        self._requests = _requests(load)
        self._spread = Random(load.seed + 2)
        self._events: list[tuple[float, int, float]] = []  # time, kind, when it was sent or the number of a replica

    @property
    def duration_s(self) -> float:
        """Return the time from the first request to the last end."""
        return max(timing.end_s for timing in self.timings) - min(timing.start_s for timing in self.timings)

    def run(self) -> "Fleet":
        """Serve the load to its end."""
        for sent_s in _first_arrivals(self._load):
            self._send(sent_s)
        while self._events:
            now, kind, value = heapq.heappop(self._events)
            if kind == _TURN:
                self._turn(int(value), now)
            elif (request := next(self._requests, None)) is not None:
                self._arrive(request, now, sent_s=value)
        return self

    def _send(self, now: float) -> None:
        heapq.heappush(self._events, (now + self._overhead_s * self._spread.uniform(0.5, 1.5), _ARRIVAL, now))

    def _arrive(self, request: Request, now: float, *, sent_s: float) -> None:
        if self._policy == "round-robin":
            number = len(self.timings) % len(self.replicas)
        else:
            number = min(range(len(self.replicas)), key=lambda i: len(self.replicas[i].scheduler.requests))
        request.arrival_s = now
        replica = self.replicas[number]
        replica.add(request)
        num_input_tokens = len(request.prompt_token_ids)
        self.timings.append(RequestTiming(sent_s, num_input_tokens=num_input_tokens, has_usage=True))
        if not replica.is_turning:
            replica.is_turning = True
            heapq.heappush(self._events, (now, _TURN, number))

    def _turn(self, number: int, now: float) -> None:
        outputs, committed_s, next_s = self.replicas[number].turn(now)
        for output in outputs:
            request, timing = output.request, self.timings[int(output.request.request_id)]
            if not timing.num_tokens:
                timing.first_s = committed_s
                timing.num_cached_tokens = request.num_cached_tokens
            else:
                timing.itl_s.append(committed_s - timing.last_s)
            timing.num_tokens += len(output.token_ids)
            timing.num_chunks += 1
            timing.last_s = committed_s
            if request.finish_reason is not None:
                timing.end_s = committed_s
                self.queue_s.append((request.first_scheduled_s or 0.0) - request.arrival_s)
                if not self._load.rate_per_s:  # its client sends the next one
                    self._send(committed_s)
        self.replicas[number].is_turning = next_s is not None
        if next_s is not None:
            heapq.heappush(self._events, (next_s, _TURN, number))


def _first_arrivals(load: Load) -> Iterator[float]:
    """Return the sending times of requests that do not wait for another's end."""
    if not load.rate_per_s:
        yield from [0.0] * min(load.concurrency, load.num_requests)
        return
    gaps, now = Random(load.seed + 1), 0.0
    for _ in range(load.num_requests):
        now += gaps.expovariate(load.rate_per_s)
        yield now


def _requests(load: Load) -> Iterator[Request]:
    """Return the requests in the order of arrival."""
    lengths = Random(load.seed)
    for number in range(load.num_requests):
        input_len, output_len = lengths.randint(*load.input_len), lengths.randint(*load.output_len)
        num_shared = min(load.shared_prefix, input_len)
        prompt = [0] * num_shared + [number + 1] * (input_len - num_shared)
        yield Request(str(number), prompt, SamplingParams(max_tokens=output_len))
