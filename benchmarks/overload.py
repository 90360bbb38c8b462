"""Measures the queue under overload: goodput, refusals and fairness between API keys.

    python -m benchmarks.overload [--load 3] [--max-queue-wait 2] [--json FILE]

The real engine loop runs over an executor without a model, in simulated time: a step takes a fixed time, and a time for
each row and prompt token, as on one H100 with 8 billion parameters. So the figures do not depend on the machine, and a
minute of load takes seconds. The server does not know how long an answer will be.

- capacity: requests answered in a second while twice as many are open as there are rows.
- goodput: requests in a second whose first token came within the limit, at a multiple of the capacity; once with
  --max-queue-wait and once without a limit of the wait.
- fairness: the time to the first token of one key's requests, one a second, after another key has sent 500 at once,
  divided by that time without them; the median over six such floods, since each lasts for a dozen requests only.

On the GPU a request waits for the rest of a step and for the next one, as where two steps are in flight.
Fairness is measured on a simulated CPU as well: the demo model, 16 rows, short prompts, one step at a time; with the
steps that leave out answers for newcomers (engine/core/step_budget.py) and without.
"""

import argparse
import heapq
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import msgspec

from engine.core.engine import Engine
from engine.core.engine_parts import EngineParts
from engine.core.local_client import LocalTransport
from engine.core.scheduler import Scheduler
from engine.core.step import StepPlan, StepResult, TokenMasks
from engine.interface.config import SchedulerConfig
from engine.interface.metrics import Metrics
from engine.interface.protocol import (
    AddRequest,
    ClientGone,
    QueueCosts,
    RequestFailed,
    SamplingParams,
    StepEvents,
    ToEngine,
    pack_token_ids,
)
from engine.interface.tenant import Charge, Tenant

NUM_ROWS = 64
NUM_PAGES = 8192
BLOCK_SIZE = 16
_STOP, _OTHER = 1, 2
_FLOOD = 500


class Machine(NamedTuple):
    """What a step takes, in seconds, and the scheduler's limits. is_blocking: the host waits where it launches one."""

    step_s: float
    row_s: float
    prompt_token_s: float
    num_rows: int = NUM_ROWS
    num_tokens: int = 2048  # of a step
    least_tokens: int | None = None  # SchedulerConfig.min_decode_step_tokens
    is_blocking: bool = False
    spares_newcomers: bool = False
    host_s: float = 0.0  # to plan and launch a step
    delays_launches: bool = True
    jitter: float = 0.0


GPU = Machine(0.007, 0.00005, 0.00004, host_s=0.001)
CPU = Machine(0.0075, 0.0005, 0.00022, 16, 512, 128, is_blocking=True, spares_newcomers=True)


class Arrival(NamedTuple):
    """A request of the load. num_answer: tokens after which it stops, which the engine does not know."""

    at_s: float
    number: int
    tenant: str
    num_prompt: int
    num_answer: int


class Outcome(msgspec.Struct):
    """What became of a request; times from its arrival, in seconds."""

    arrival: Arrival
    ttft_s: float | None = None
    end_s: float | None = None
    refused_s: float | None = None
    retry_after_s: int | None = None


class SimulatedExecutor:
    """Executor in simulated time. A request's seed is the length of its answer.

    The device begins a step when it is launched and the one before has ended. Launching takes the host's time.
    """

    def __init__(self, machine: Machine, before_step: Callable[[], None]) -> None:
        """before_step: called where the host waits for a step from its launch on, before its time passes."""
        self.now_s = self.idle_s = 0.0
        self._machine, self._before_step = machine, before_step
        self._end_s = 0.0  # of the last step that was launched
        self._rng = random.Random(5)
        self._rows: dict[int, tuple[int, int]] = {}  # by req_index: tokens of its prompt and answer

    def forward(self, plan: StepPlan) -> "_Step":
        """See Executor.forward."""
        for init in plan.inits:
            self._rows[init.req_index] = (init.num_prompt_tokens, init.params.seed)
        if self._machine.is_blocking:
            self._before_step()
        machine, num_more = self._machine, plan.num_tokens - plan.num_rows
        self.now_s += machine.host_s
        self.idle_s += max(self.now_s - self._end_s, 0.0)
        step_s = machine.step_s + machine.row_s * plan.num_rows + machine.prompt_token_s * num_more
        step_s *= 1 + machine.jitter * self._rng.random()
        self._end_s = max(self.now_s, self._end_s) + step_s
        if machine.is_blocking:
            self.now_s = self._end_s
        return _Step(self, self._end_s, self._result(plan))

    def close(self) -> None:
        """See Executor.close."""

    def _result(self, plan: StepPlan) -> StepResult:
        token_ids = []
        for row in plan.rows:
            num_prompt, num_answer = self._rows[row.req_index]
            if row.samples:
                token_ids.append(_STOP if row.start + row.num_tokens - num_prompt + 1 >= num_answer else _OTHER)
        return StepResult(plan.step_id, token_ids)


class _Step:
    """A step in flight."""

    def __init__(self, executor: SimulatedExecutor, end_s: float, result: StepResult) -> None:
        self._executor, self._end_s, self._result = executor, end_s, result

    def sample(self, masks: TokenMasks | None = None) -> None:
        """See StepHandle.sample."""

    def is_done(self) -> bool:
        """See StepHandle.is_done."""
        return self._executor.now_s >= self._end_s

    def wait(self) -> StepResult:
        """See StepHandle.wait."""
        self._executor.now_s = max(self._executor.now_s, self._end_s)
        return self._result


class _Transport(LocalTransport):
    """A transport in simulated time."""

    def __init__(self, wait: Callable[[float], None]) -> None:
        super().__init__()
        self._wait = wait

    def receive(self, timeout_s: float | None) -> list[tuple[int, ToEngine | ClientGone]]:
        """Return what has come; if nothing has, let time pass until something comes."""
        if timeout_s and not self.inbox:
            self._wait(timeout_s)
        return super().receive(0)


class Simulation:
    """One engine, its load and what became of each request. The load may be longer than the time that is simulated."""

    def __init__(
        self, *, max_queue_wait_s: float | None, tenants: Sequence[Tenant] = (), machine: Machine = GPU
    ) -> None:
        config = SchedulerConfig(
            num_pages=NUM_PAGES,
            block_size=BLOCK_SIZE,
            max_num_seqs=machine.num_rows,
            max_num_batched_tokens=machine.num_tokens,
            min_decode_step_tokens=machine.least_tokens,
            spares_newcomers=machine.spares_newcomers,
            max_model_len=2048,
        )
        self.executor = SimulatedExecutor(machine, self._receive)
        self.transport, self.metrics = _Transport(self._wait), Metrics()
        self._load: Iterator[Arrival] = iter(())
        self._following: Arrival | None = None
        self._num_open: int | None = None
        self._tenants = {tenant.name: tenant for tenant in tenants}
        self.engine = Engine(
            EngineParts(
                executor=self.executor,
                scheduler=Scheduler(config),
                transport=self.transport,
                metrics=self.metrics,
                clock=lambda: self.executor.now_s,
                vocab_size=32_000,
                overlap_depth=1 if machine.is_blocking else 2,
                max_queued_requests=1_000_000,
                max_queue_wait_s=max_queue_wait_s,
            )
        )
        if self.engine.launch_delay is not None:
            self.engine.launch_delay.is_on = machine.delays_launches
        self.outcomes: dict[str, Outcome] = {}
        self.told: list[QueueCosts] = []  # what the next engine would be told

    def run(self, load: Iterator[Arrival], *, until_s: float, num_open: int | None = None) -> list[Outcome]:
        """Send a load in its order, and return the outcomes at the end.

        num_open: send a request whenever fewer are open, whatever its time of arrival.
        """
        executor, self._load, self._num_open = self.executor, load, num_open
        self._following = next(load, None)
        while executor.now_s < until_s:
            self._send_due()
            if self.engine.is_idle and not self.transport.inbox:
                if self._following is None:
                    break
                executor.now_s = max(self._following.at_s, executor.now_s)
                continue
            self.engine.run_once(0)
            self._receive()
        return list(self.outcomes.values())

    def _send_due(self) -> None:
        while self._following is not None and self._is_due(self._following, self._num_open):
            at_s = self._following.at_s if self._num_open is None else self.executor.now_s
            self._send(self._following._replace(at_s=at_s))
            self._following = next(self._load, None)

    def _wait(self, timeout_s: float) -> None:
        """Let time pass, at most until the next request comes."""
        end_s = self.executor.now_s + timeout_s
        if self._following is not None and self._num_open is None:
            end_s = min(end_s, max(self._following.at_s, self.executor.now_s))
        self.executor.now_s = end_s
        self._send_due()

    def _is_due(self, arrival: Arrival, num_open: int | None) -> bool:
        if num_open is None:
            return arrival.at_s <= self.executor.now_s
        return len(self.engine.scheduler.requests) + len(self.transport.inbox) < num_open

    def _send(self, arrival: Arrival) -> None:
        request_id = f"{arrival.tenant}-{arrival.number}"
        first = len(self.outcomes) * 7919 % 30_000  # prompts have no prefix in common, whatever their tenants
        self.outcomes[request_id] = Outcome(arrival)
        prompt = [first + 2 + i % 1000 for i in range(arrival.num_prompt)]
        params = SamplingParams(max_tokens=1024, seed=arrival.num_answer, stop_token_ids=[_STOP])
        message = AddRequest(
            request_id,
            pack_token_ids(prompt),
            params,
            arrival_s=arrival.at_s,
            tenant=self._tenants.get(arrival.tenant, Tenant(name=arrival.tenant)),
            charge=Charge(len(prompt), len(prompt) + params.max_tokens),
        )
        self.transport.inbox.append((0, message))

    def _receive(self) -> None:
        now_s = self.executor.now_s
        while self.transport.outbox:
            message = self.transport.outbox.popleft()
            if isinstance(message, RequestFailed):
                outcome = self.outcomes[message.request_id]
                outcome.refused_s = now_s - outcome.arrival.at_s
                outcome.retry_after_s = message.retry_after_s
            elif isinstance(message, StepEvents):
                for started in message.started:
                    outcome = self.outcomes[message.request_ids[started.row]]
                    outcome.ttft_s = now_s - outcome.arrival.at_s
                for finished in message.finished:
                    outcome = self.outcomes[message.request_ids[finished.row]]
                    outcome.end_s = now_s - outcome.arrival.at_s
            elif isinstance(message, QueueCosts):
                self.told.append(message)


def poisson(rate: float, *, seed: int, tenant: str = "load") -> Iterator[Arrival]:
    """Yield an endless load: `rate` requests a second, prompts of 32 to 768 tokens, answers of 16 to 512."""
    rng, at_s, number = random.Random(seed), 0.0, 0
    while True:
        at_s += rng.expovariate(rate)
        yield Arrival(at_s, number, tenant, rng.randint(32, 768), min(16 + int(rng.expovariate(1 / 112)), 512))
        number += 1


def capacity(duration_s: float, *, seed: int) -> float:
    """Return the requests that are answered in a second while there are always more than rows."""
    simulation = Simulation(max_queue_wait_s=None)
    outcomes = simulation.run(poisson(1.0, seed=seed), until_s=duration_s, num_open=2 * NUM_ROWS)
    warm_s = duration_s / 4
    ends = [o.arrival.at_s + o.end_s for o in outcomes if o.end_s is not None]
    return sum(warm_s <= end_s for end_s in ends) / (duration_s - warm_s)


class Overload(msgspec.Struct, kw_only=True):
    """The outcome of a load. Ratios are of the capacity; seconds are from the arrival."""

    max_queue_wait_s: float | None
    requests_per_s: float
    goodput_per_s: float
    goodput_ratio: float
    refused_share: float
    late_share: float  # of the accepted requests: first token after the limit
    ttft_p50_s: float
    ttft_p99_s: float
    refusal_max_s: float  # the longest time from an arrival to its refusal


def overload(
    duration_s: float, *, rate: float, limit_s: float, max_queue_wait_s: float | None, base: float, seed: int
) -> Overload:
    """Send `rate` requests a second. limit_s: of the time to a first token that counts. base: the capacity."""
    simulation = Simulation(max_queue_wait_s=max_queue_wait_s)
    outcomes = simulation.run(poisson(rate, seed=seed), until_s=duration_s)
    counted = [o for o in outcomes if duration_s / 4 <= o.arrival.at_s < duration_s - limit_s]
    span_s = duration_s * 3 / 4 - limit_s
    refusals = [o.refused_s for o in outcomes if o.refused_s is not None]
    times = sorted(o.ttft_s if o.ttft_s is not None else duration_s for o in counted if o.refused_s is None)
    in_time = sum(time_s <= limit_s for time_s in times)
    return Overload(
        max_queue_wait_s=max_queue_wait_s,
        requests_per_s=rate,
        goodput_per_s=in_time / span_s,
        goodput_ratio=in_time / span_s / base,
        refused_share=len(refusals) / len(outcomes),
        late_share=1 - in_time / max(len(times), 1),
        ttft_p50_s=median(times),
        ttft_p99_s=quantiles(times, n=100)[98],
        refusal_max_s=max(refusals, default=0.0),
    )


class Fairness(msgspec.Struct, kw_only=True):
    """The time to the first token of a key's requests, alone and beside another key's 500."""

    alone_p50_s: float
    beside_p50_s: float
    fairness_ratio: float
    alone_p95_s: float
    beside_p95_s: float
    of_the_flood_answered: int


def fairness(duration_s: float, *, seed: int, num_floods: int = 6, machine: Machine = GPU) -> Fairness:
    """Measure one key's requests, one a second, alone and after another key has sent 500 at once."""
    times: tuple[list[float], list[float]] = [], []
    num_prompt, prompts, most = (64, (12, 110), 48) if machine.is_blocking else (512, (32, 768), 224)
    num_answered = 0
    for number, has_flood in itertools.product(range(num_floods), (False, True)):
        rng = random.Random(seed + number)
        guest = [Arrival(1.0 + i + rng.random(), i, "guest", num_prompt, 32) for i in range(int(duration_s) - 1)]
        flood = [
            Arrival(0.0, i, "flood", rng.randint(*prompts), 16 + rng.randint(0, most))
            for i in range(_FLOOD * has_flood)
        ]
        simulation = Simulation(max_queue_wait_s=None, machine=machine)
        outcomes = simulation.run(heapq.merge(flood, guest), until_s=duration_s + 10)
        num_answered += sum(o.arrival.tenant == "flood" and (o.end_s or math.inf) <= duration_s for o in outcomes)
        found = [o.ttft_s for o in outcomes if o.arrival.tenant == "guest" and o.ttft_s is not None]
        times[has_flood].extend(found)
    alone, beside = times
    return Fairness(
        alone_p50_s=median(alone),
        beside_p50_s=median(beside),
        fairness_ratio=median(beside) / median(alone),
        alone_p95_s=quantiles(alone, n=20)[18],
        beside_p95_s=quantiles(beside, n=20)[18],
        of_the_flood_answered=num_answered,
    )


class Report(msgspec.Struct, kw_only=True):
    """All figures of one run."""

    load: float  # multiple of the capacity
    duration_s: float  # simulated
    capacity_per_s: float
    limited: Overload
    unlimited: Overload
    fairness: Fairness
    fairness_cpu: Fairness
    fairness_cpu_with_all_answers: Fairness  # no step leaves out answers


def measure(*, load: float, limit_s: float, duration_s: float, seed: int = 1) -> Report:
    """Run all three parts."""
    base = capacity(duration_s, seed=seed)
    limited, unlimited = (
        overload(duration_s, rate=load * base, limit_s=limit_s, max_queue_wait_s=max_wait_s, base=base, seed=seed + 1)
        for max_wait_s in (limit_s, None)
    )
    return Report(
        load=load,
        duration_s=duration_s,
        capacity_per_s=base,
        limited=limited,
        unlimited=unlimited,
        fairness=fairness(12.0, seed=seed + 2),
        fairness_cpu=fairness(12.0, seed=seed + 2, machine=CPU),
        fairness_cpu_with_all_answers=fairness(12.0, seed=seed + 2, machine=CPU._replace(spares_newcomers=False)),
    )


def main() -> int:
    """Print the report as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--load", type=float, default=3.0, help="multiple of the capacity (3)")
    parser.add_argument("--max-queue-wait", type=float, default=2.0, help="seconds to the first token (2)")
    parser.add_argument("--duration", type=float, default=120.0, help="simulated seconds of each load (120)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    arguments = parser.parse_args()
    report = measure(
        load=arguments.load,
        limit_s=arguments.max_queue_wait,
        duration_s=arguments.duration,
        seed=arguments.seed,
    )
    text = msgspec.json.format(msgspec.json.encode(report), indent=2).decode()
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
