"""A process that checks and times products for benchmarks/gemm_sweep.py: if a cut crashes or hangs, only it ends."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch.nn import functional

from benchmarks.gemm_candidates import Candidate, run
from benchmarks.kernel_timing import num_copies, time_calls, time_graph
from kernels.gemm_configs import GemmScratch
from kernels.triton_elementwise import rms_norm
from kernels.triton_gemv import GemvScratch

_MAX_ERROR = 4e-3  # a product rounded to bf16 is off by 1.7e-3
_MAX_ELEMENTS = 128256 * 4096  # of one matrix
_START_S = 60.0


@dataclass(frozen=True)
class Job:
    """One measurement of x @ w.T."""

    n: int
    k: int
    num_rows: int
    candidate: Candidate | None  # None: cuBLAS
    is_chain: bool  # after a norm, as in a model, which is timed too


@dataclass(frozen=True)
class Outcome:
    """us of a call, or why there is none."""

    us: float | None
    error: float = 0.0  # relative, against fp32
    failure: str = ""
    is_fatal: bool = False  # the process that saw it can measure no more


class Worker:
    """The process, started again after it was lost. Life: __init__ → measure … → close."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._start()

    def measure(self, job: Job, *, timeout_s: float) -> Outcome:
        """Check, then time; blocks."""
        try:
            self._pipe.send(job)
            if not self._pipe.poll(timeout_s):
                outcome = Outcome(None, failure=f"nothing came for {timeout_s:.0f} s", is_fatal=True)
            else:
                outcome = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            outcome = Outcome(None, failure="its process died", is_fatal=True)
        if outcome.is_fatal:
            self.close()
            self._start()
        return outcome

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._device), daemon=True)
        self._process.start()
        theirs.close()
        if not self._pipe.poll(_START_S) or self._pipe.recv() != "ready":
            raise RuntimeError(f"the measuring process was not ready within {_START_S:.0f} s")


class _Bench:
    """Weights and scratch on the device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.num_sms = 132
        elements = 1 << 22
        if self.device.type == "cuda":
            self.num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
            elements = 2 * _MAX_ELEMENTS
        self.pool = torch.empty(elements, dtype=torch.bfloat16, device=self.device).normal_(std=0.05)
        self.scratch = (
            GemmScratch.allocate(self.device, num_sms=self.num_sms),
            GemvScratch.allocate(self.device, capacity=1 << 23),
        )

    def measure(self, job: Job) -> Outcome:
        copies = max(1, min(num_copies(job.n * job.k * 2), self.pool.numel() // (job.n * job.k)))
        weights = self.pool[: copies * job.n * job.k].view(copies, job.n, job.k).unbind()
        x = torch.randn(job.num_rows, job.k, device=self.device).bfloat16()
        multiply = self._product(job.candidate)
        first = self._checked(job, multiply, x, weights[-1])
        if first.failure:
            return first
        before = multiply(x, weights[-1])
        self._synchronize()  # the graph runs on another stream, and no two launches may meet in the scratch
        calls = [self._call(job, multiply, x, w) for w in weights]
        is_cuda = self.device.type == "cuda"
        us = time_graph(calls, replays=8) if is_cuda else time_calls(calls, is_capturable=False, device=self.device)[0]
        if job.candidate is not None and not torch.equal(before, multiply(x, weights[-1])):
            return Outcome(None, failure="not the same bits again")
        return Outcome(us, first.error)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _product(self, candidate: Candidate | None) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        if candidate is None:
            return functional.linear
        pdl = self.device.type == "cuda"
        return lambda x, w: run(candidate, x, w, None, self.scratch, pdl=pdl)

    def _checked(self, job: Job, multiply: Callable, x: torch.Tensor, w: torch.Tensor) -> Outcome:
        """Compare with fp32, in memory that held NaN before; what is padding must stay out."""
        expected = x.float() @ w.float().T
        self.scratch[0].partial.fill_(float("nan"))
        worst = 0.0
        for _ in range(2):  # the second run finds what the first left in the scratch
            poison = torch.full((job.num_rows, job.n), float("nan"), dtype=x.dtype, device=x.device)
            del poison
            out = multiply(x, w)
            error = float((out.float() - expected).norm() / expected.norm())
            if job.candidate is not None and not error < _MAX_ERROR:
                return Outcome(None, error, f"wrong: relative error {error:.2e}")
            worst = max(worst, error)
        if self.scratch[0].arrivals.any() or self.scratch[1].arrivals.any():
            for scratch in self.scratch:
                scratch.arrivals.zero_()
            return Outcome(None, worst, "left arrivals behind")
        return Outcome(None, worst)

    def _call(self, job: Job, multiply: Callable, x: torch.Tensor, w: torch.Tensor) -> Callable[[], object]:
        if not job.is_chain:
            return functools.partial(multiply, x, w)
        scale, pdl = torch.ones(job.k, dtype=x.dtype, device=x.device), self.device.type == "cuda"
        return lambda: multiply(rms_norm(x, scale, 1e-6, pdl=pdl), w)


def _serve(pipe: Connection, device: str) -> None:
    torch.manual_seed(torch.seed() % (1 << 31))
    bench = _Bench(device)
    pipe.send("ready")
    while True:
        job = pipe.recv()
        try:
            outcome = bench.measure(job)
        except Exception as error:  # whatever the compiler or the device says is the result
            line = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0][:160]
            outcome = Outcome(None, failure=line, is_fatal="cuda" in line.lower())
        pipe.send(outcome)
