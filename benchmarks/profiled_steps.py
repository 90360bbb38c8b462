"""Steps of a chosen kind in the engine's own loop, measured as they are and with torch's profiler. Imports torch.

    profile_steps(loaded, Kind(contexts=(131072, 512)), num_steps=20) → Profile

First the time of a turn and the host's part of it are measured without the profiler, which slows launches. Then as many
turns are traced: which kernels ran when, and the plans of the steps that ran them.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.device_time import Interval
from benchmarks.report import BenchError
from benchmarks.step_work import StepWork
from engine.core.step import StepHandle, StepPlan, StepResult, TokenMasks
from engine.interface.config import SchedulerConfig
from engine.interface.protocol import AddRequest, ClientGone, RequestFailed, SamplingParams, pack_token_ids
from engine.offline import OfflineEngine
from engine.startup.loaded_engine import LoadedEngine

_NUM_WARM_UP = 10  # turns
_NUM_IDS = 9000  # that prompts have, at most


@dataclass(frozen=True)
class Kind:
    """What each step of a kind computes. Prompts are sent with each step, or queued before all and then cut to fit."""

    contexts: tuple[int, ...] = ()  # tokens of each decoding row's prompt; it decodes for a while before it is measured
    prompts: tuple[int, ...] = ()  # tokens of the prompts of each step
    behind: int = 0  # tokens before each of these, which the prefix cache has
    queued: int = 0  # tokens of each of the prompts that are queued; 0: none
    step_tokens: int | None = None  # of a step with queued prompts beside rows
    is_alone: bool = False  # each of `prompts` is sent when nothing runs, and its turn ends with its first token

    def room(self, num_steps: int) -> int:
        """Return the tokens that a row may decode until it has been measured: also while others' prompts come in."""
        return 4 * _NUM_WARM_UP + 2 * num_steps + sum(sorted(self.contexts)[:-1]) // 128 + len(self.contexts)


@dataclass(frozen=True)
class HostTimes:
    """Mean seconds of a turn. launch_s: in the executor; wait_s: for the step before; the rest plans and commits."""

    turn_s: float
    launch_s: float
    wait_s: float

    @property
    def rest_s(self) -> float:
        """Seconds of planning, of commits and of outputs."""
        return self.turn_s - self.launch_s - self.wait_s


@dataclass(frozen=True)
class Profile:
    """Some steps of one kind. works, intervals: of the traced steps."""

    num_steps: int
    host: HostTimes
    works: list[StepWork]
    intervals: list[Interval]
    is_gpu: bool  # else `intervals` are of torch's operators, of which kernels in C are none


@dataclass
class _Spy:
    """Notes a runner's plans and the time that the loop spends in it."""

    plans: list[StepPlan] = field(default_factory=list)
    launch_s: float = 0.0
    wait_s: float = 0.0

    @contextmanager
    def on(self, loaded: LoadedEngine) -> Iterator[None]:
        """Listen to the runner of a model on one device."""
        forward = loaded.runner.forward

        def noted(plan: StepPlan) -> StepHandle:
            began_s = time.perf_counter()
            step = forward(plan)
            self.launch_s += time.perf_counter() - began_s
            self.plans.append(plan)
            return _NotedStep(step, self)

        with patch.object(loaded.runner, "forward", noted):
            yield


class _NotedStep:
    def __init__(self, step: StepHandle, spy: _Spy) -> None:
        self._step, self._spy = step, spy

    def sample(self, masks: TokenMasks | None = None) -> None:
        """See StepHandle.sample."""
        began_s = time.perf_counter()
        self._step.sample(masks)
        self._spy.launch_s += time.perf_counter() - began_s

    def is_done(self) -> bool:
        """See StepHandle.is_done."""
        return self._step.is_done()

    def wait(self) -> StepResult:
        """See StepHandle.wait."""
        began_s = time.perf_counter()
        result = self._step.wait()
        self._spy.wait_s += time.perf_counter() - began_s
        return result


def profile_steps(loaded: LoadedEngine, kind: Kind, *, num_steps: int) -> Profile:
    """Measure num_steps steps of a kind, and trace as many more. Blocks. Raises BenchError if the model cannot."""
    steps = _Steps(loaded, kind, num_steps)
    for _ in range(_NUM_WARM_UP):
        steps.turn()
    gc.collect()  # the engine of the kind before, which would take up to 12 ms of this one
    spy = _Spy()
    with spy.on(loaded):
        began_s = time.perf_counter()
        for _ in range(num_steps):
            steps.turn()
        turn_s = (time.perf_counter() - began_s) / num_steps
    host = HostTimes(turn_s, spy.launch_s / num_steps, spy.wait_s / num_steps)
    traced = _Spy()
    with traced.on(loaded):
        intervals = trace(steps.turn, num_steps, loaded.runner.device)
    steps.end()
    works = [StepWork.of(plan) for plan in traced.plans]
    _check(kind, works, num_steps=num_steps, num_behind=steps.num_behind)
    return Profile(num_steps, host, works, intervals, is_gpu=loaded.runner.device.type == "cuda")


def trace(turn: Callable[[], None], num_turns: int, device: torch.device) -> list[Interval]:
    """Take some turns under torch's profiler; return when each kernel and copy ran on the device, in no order.

    Nothing of before is on the device when it begins, and all has ended when it ends. CUDA: what CUPTI records of the
    device, each kernel on its own, inside CUDA graphs too. Elsewhere: torch's operators, without those inside others.
    """
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as profiler:
        for _ in range(num_turns):
            turn()
        if is_cuda:
            torch.cuda.synchronize(device)
    wanted = torch.autograd.DeviceType.CUDA if is_cuda else torch.autograd.DeviceType.CPU
    return [
        Interval(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == wanted and (is_cuda or event.cpu_parent is None)
    ]


class _Steps:
    """An engine that computes steps of one kind. Life: turn(), again and again → end()."""

    def __init__(self, loaded: LoadedEngine, kind: Kind, num_steps: int) -> None:
        self._kind, self._numbers = kind, itertools.count()
        limits = _limits(loaded, kind)
        self._offline = OfflineEngine(replace(loaded, scheduler_config=limits))
        self._num_ids = min(loaded.model_config.vocab_size, _NUM_IDS)
        self.num_behind = kind.behind // limits.block_size * limits.block_size
        self._behind = [(5 + 7 * j) % self._num_ids for j in range(self.num_behind)]
        self._decode(limits.max_model_len - kind.room(num_steps))
        if self._behind:  # its blocks are in the prefix cache when it has ended
            self._add(1, first=self._behind)
            self._run_until_ended()
        if kind.queued:
            per_step = kind.step_tokens or limits.max_num_batched_tokens
            for _ in range(per_step * (2 * num_steps + 2 * _NUM_WARM_UP) // kind.queued + 1):
                self._add(kind.queued)
        # made before they are sent, which takes the host milliseconds for long ones
        self._coming = iter(
            [
                [self._message(length, first=self._behind) for length in kind.prompts]
                for _ in range(_NUM_WARM_UP + 2 * num_steps)
            ]
        )

    def turn(self) -> None:
        """Compute a step with its prompts, and commit the one before or, if they are alone, this one."""
        self._offline.transport.inbox.extend(next(self._coming))
        if self._kind.is_alone:
            self._run_until_ended()
        else:
            self._run_once()

    def end(self) -> None:
        """End all requests."""
        self._offline.transport.inbox.append((0, ClientGone()))
        while not self._offline.engine.is_idle:
            self._offline.engine.run_once()

    def _decode(self, longest: int) -> None:
        """Run until all rows decode. The longest comes first, so that it does not decode while others' prompts come."""
        scheduler, contexts = self._offline.engine.scheduler, sorted(self._kind.contexts, reverse=True)
        if contexts and longest < 1:
            raise BenchError(f"{len(contexts)} decoding rows do not fit the model's longest context.")
        for context in contexts:
            self._add(min(context, longest), max_tokens=scheduler.max_num_tokens)
        while len(scheduler.running) < len(contexts) or any(not request.is_decoding for request in scheduler.running):
            self._run_once()
            has_room = scheduler.num_free_rows and scheduler.kv.pool.num_free >= len(contexts)
            if scheduler.num_preemptions or (scheduler.waiting and not has_room):
                raise BenchError(f"{len(contexts)} decoding rows do not fit, {len(scheduler.running)} do.")

    def _run_until_ended(self) -> None:
        """Run until there are no requests but the decoding rows; without these, until nothing is in flight."""
        engine, num_rows = self._offline.engine, len(self._kind.contexts)
        self._run_once()
        while len(engine.scheduler.requests) > num_rows or not (num_rows or engine.is_idle):
            self._run_once()

    def _run_once(self) -> None:
        self._offline.engine.run_once()
        for message in self._offline.transport.outbox:
            if isinstance(message, RequestFailed):
                raise BenchError(message.message)
        self._offline.transport.outbox.clear()

    def _add(self, num_tokens: int, *, first: Sequence[int] = (), max_tokens: int = 1) -> None:
        self._offline.transport.inbox.append(self._message(num_tokens, first=first, max_tokens=max_tokens))

    def _message(self, num_tokens: int, *, first: Sequence[int] = (), max_tokens: int = 1) -> tuple[int, AddRequest]:
        number = next(self._numbers)
        prompt = [*first, *((number * 31 + j) % self._num_ids for j in range(num_tokens))]
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        return 0, AddRequest(str(number), pack_token_ids(prompt), params, 0.0)


def _limits(loaded: LoadedEngine, kind: Kind) -> SchedulerConfig:
    """Return the scheduler's limits, with steps of just the tokens of this kind where prompts are beside answers."""
    limits = msgspec.structs.replace(loaded.scheduler_config, enable_prefix_caching=kind.behind > 0, sharing=None)
    num_tokens = kind.step_tokens or len(kind.contexts) + sum(kind.prompts)
    if not kind.contexts or not (kind.prompts or kind.queued):
        return limits
    return msgspec.structs.replace(
        limits, min_decode_step_tokens=num_tokens, max_decode_step_tokens=num_tokens, step_sizes=[]
    )


def _check(kind: Kind, works: Sequence[StepWork], *, num_steps: int, num_behind: int) -> None:
    """Raise BenchError unless each step had the rows and prompts of its kind."""
    if len(works) < num_steps:
        raise BenchError(f"Only {len(works)} of {num_steps} steps had something to compute.")
    if kind.queued and not any(work.prompts for work in works):
        raise BenchError("No prompt was computed: the decoding rows leave no row, or no tokens, for them.")
    prompts = sorted((length, num_behind) for length in kind.prompts)
    for work in works:
        if len(work.rows) != len(kind.contexts) and not kind.queued:
            raise BenchError(f"A step had {len(work.rows)} decoding rows instead of {len(kind.contexts)}.")
        if sorted(work.prompts) != prompts and not kind.queued:
            found = ", ".join(f"{length} behind {behind}" for length, behind in sorted(work.prompts)) or "none"
            raise BenchError(f"A step had other prompt tokens than --prompt and --behind say: {found}.")
