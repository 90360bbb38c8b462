"""Simulation: the real engine loop over an executor without a model, in simulated time. Never torch.

For benchmarks/overload.py and tests. A step takes a fixed time, and a time for each row and prompt token, so figures do
not depend on the machine, and a minute of load takes seconds. The device runs the steps in the order of their launches;
with two steps in flight the host plans one while another runs. A request's seed is the length of its answer, which the
engine does not know.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
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
_NUM_PAGES = 8192
_BLOCK_SIZE = 16
_STOP, _OTHER = 1, 2


class Machine(NamedTuple):
    """What a step takes, in seconds, and the scheduler's limits."""

    step_s: float
    row_s: float
    prompt_token_s: float
    num_rows: int = NUM_ROWS
    num_tokens: int = 2048  # of a step
    least_tokens: int | None = None  # SchedulerConfig.min_decode_step_tokens
    is_blocking: bool = False  # the host waits where it launches a step: one at a time, else two in flight
    host_s: float = 0.0  # of the host, to plan and launch a step
    step_sizes: tuple[int, ...] = ()  # SchedulerConfig.step_sizes; a step with prompts is padded to one
    prompts_s: tuple[tuple[int, float], ...] = ()  # of so many prompt tokens, ascending; else prompt_token_s each
    unevenness: float = 0.0  # steps take longer at random, by up to this share
    delays_launches: bool = True  # engine/core/launch_delay.py


GPU = Machine(0.007, 0.00005, 0.00004, host_s=0.001)
# results/steps-llama-3.1-8b-h100-2026-11-22.json, and the scheduler's limits there
H100 = Machine(
    0.0054,
    0.000035,
    0.0,
    num_tokens=2048,
    least_tokens=384,
    step_sizes=(32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048),
    prompts_s=((127, 0.0015), (255, 0.0027), (511, 0.0076), (1023, 0.019), (2047, 0.0448)),
    host_s=0.001,
)
CPU = Machine(0.0075, 0.0005, 0.00022, 16, 512, 128, is_blocking=True)


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
    """Executor in simulated time. The device begins a step once it is launched and the one before has ended."""

    def __init__(self, machine: Machine, before_step: Callable[[], None]) -> None:
        """before_step: called where the host waits for a step from its launch on, before its time passes."""
        self.now_s = 0.0
        self.idle_s = 0.0  # of the device, before the last launch
        self._machine, self._before_step = machine, before_step
        self._random = random.Random(1)
        self._end_s = 0.0  # of the last step that was launched
        self._rows: dict[int, tuple[int, int]] = {}  # by req_index: tokens of its prompt and answer

    def forward(self, plan: StepPlan) -> "_Step":
        """See Executor.forward."""
        for init in plan.inits:
            self._rows[init.req_index] = (init.num_prompt_tokens, init.params.seed)
        if self._machine.is_blocking:
            self._before_step()
        machine = self._machine
        self.now_s += machine.host_s
        self.idle_s += max(self.now_s - self._end_s, 0.0)
        step_s = machine.step_s + machine.row_s * plan.num_rows + self._prompts_s(plan)
        step_s *= 1 + machine.unevenness * self._random.random()
        self._end_s = max(self.now_s, self._end_s) + step_s
        if machine.is_blocking:
            self.now_s = self._end_s
        return _Step(self, self._end_s, self._result(plan))

    def close(self) -> None:
        """See Executor.close."""

    def _prompts_s(self, plan: StepPlan) -> float:
        num_tokens, points = plan.num_tokens - plan.num_rows, self._machine.prompts_s
        if num_tokens:
            sizes = (size for size in self._machine.step_sizes if size >= plan.num_tokens)
            num_tokens = next(sizes, plan.num_tokens) - plan.num_rows
        if not points:
            return self._machine.prompt_token_s * num_tokens
        (few, few_s), (many, many_s) = next(
            (pair for pair in itertools.pairwise([(0, 0.0), *points]) if pair[1][0] >= num_tokens), points[-2:]
        )
        return few_s + (many_s - few_s) * (num_tokens - few) / (many - few)

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
            num_pages=_NUM_PAGES,
            block_size=_BLOCK_SIZE,
            max_num_seqs=machine.num_rows,
            max_num_batched_tokens=machine.num_tokens,
            min_decode_step_tokens=machine.least_tokens,
            step_sizes=list(machine.step_sizes),
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
