"""Measuring kernels: graph replays over rotated inputs, compiling ahead in parallel, and the facts of the machine."""

from __future__ import annotations

import multiprocessing
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import torch

# Inputs of successive calls together exceed the H100's 50 MB of L2, so that each call reads device memory
ROTATION_BYTES = 160_000_000
MAX_COPIES = 48


def num_copies(num_bytes: int) -> int:
    """How many sets of inputs of that size to rotate among."""
    return max(2, min(MAX_COPIES, -(-ROTATION_BYTES // max(1, num_bytes))))


def time_graph(calls: Sequence[Callable[[], object]], *, replays: int = 15) -> float:
    """Capture the calls, in order, in one CUDA graph; return the median time of a replay per call, in µs."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
        calls[-1]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        times = []
        for _ in range(replays):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            graph.replay()
            end.record(stream)
            times.append((start, end))
        torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in times) * 1000 / len(calls)


def compile_ahead(jobs: Sequence[Callable[[], object]], *, processes: int = 14) -> list[str]:
    """Run each job once in forked processes, which fills Triton's cache on disk. Call before CUDA starts here.

    Returns the jobs' errors: a configuration that does not fit the device is skipped by whoever times it.
    """
    global _jobs
    _jobs = jobs
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return [error for error in pool.map(_run_job, range(len(jobs)), chunksize=1) if error]


def machine_facts() -> dict[str, str]:
    """Hardware, versions and date, to stand beside every number."""
    import triton

    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "argv": " ".join(sys.argv[1:]),
    }


_jobs: Sequence[Callable[[], object]] = ()


def _run_job(index: int) -> str | None:
    try:
        _jobs[index]()
        torch.cuda.synchronize()
    except Exception as error:  # whatever the compiler or the device says is the result
        return f"job {index}: {type(error).__name__}: {str(error)[:200]}"
    return None
