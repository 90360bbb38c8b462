"""Kernel timing: graph replays over rotated inputs, parallel compilation ahead, and the facts of the machine."""

from __future__ import annotations

import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from typing import TypedDict

import torch

from benchmarks.report import without_folders


class TensorOptions(TypedDict):
    """Arguments of torch's factory functions: dtype and device."""

    dtype: torch.dtype
    device: torch.device


BF16_CUDA: TensorOptions = {"dtype": torch.bfloat16, "device": torch.device("cuda")}
# Inputs of successive calls together exceed the H100's 50 MB of L2, so that each call reads device memory
ROTATION_BYTES = 160_000_000
MAX_COPIES = 48
# Calls that take longer are timed with their launches; those longer than the second limit only once
_LONG_US = 5_000
_VERY_LONG_US = 200_000


def nominal_rates() -> tuple[float, float]:
    """Return the bytes and the dense bf16 operations a second that the vendor states of this GPU; else an H100's."""
    is_h200 = torch.cuda.is_available() and "H200" in torch.cuda.get_device_name()
    return (4.8e12 if is_h200 else 3.35e12), 989e12


def num_copies(num_bytes: int) -> int:
    """Return the number of input sets of that size to rotate among."""
    return max(2, min(MAX_COPIES, -(-ROTATION_BYTES // max(1, num_bytes))))


def time_graph(calls: Sequence[Callable[[], object]], *, replays: int = 15) -> float:
    """Capture the calls, in order, in one CUDA graph; return the median time of a replay per call, in µs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which made the inputs
    with torch.cuda.stream(stream):
        calls[0]()
        calls[-1]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
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


def time_calls(
    calls: Sequence[Callable[[], object]], *, is_capturable: bool, device: torch.device
) -> tuple[float, str]:
    """Return the median time of a call in µs, and its kind: "graph" is device time, "launches" includes the host's.

    Short calls are timed in a graph if one can capture them; in long ones the launches are negligible. All are warm.
    """
    if device.type != "cuda":
        return _time_on_host(calls), "host clock"
    us = _time_launches(calls[:1], repeats=1)
    if us > _VERY_LONG_US:
        return us, "launches"
    if is_capturable and us < _LONG_US:
        return time_graph(calls), "graph"
    return _time_launches(calls, repeats=5), "launches"


def precompile(jobs: Sequence[Callable[[], object]], *, processes: int = 14) -> list[str]:
    """Run each job once in forked processes, which fills Triton's cache on disk. Call before CUDA starts here.

    Returns the jobs' errors: the caller skips configurations that do not fit the device.
    """
    global _jobs
    _jobs = jobs
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return [error for error in pool.map(_run_job, range(len(jobs)), chunksize=1) if error]


def machine_facts() -> dict[str, str]:
    """Return hardware, versions, date and arguments, to be saved with every figure."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton") if find_spec("triton") else "none",
        "cuda": str(torch.version.cuda),
        "argv": " ".join(without_folders(sys.argv[1:])),
    }


_jobs: Sequence[Callable[[], object]] = ()


def _time_launches(calls: Sequence[Callable[[], object]], *, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for call in calls:
            call()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in times) * 1000 / len(calls)


def _time_on_host(calls: Sequence[Callable[[], object]], *, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        for call in calls:
            call()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times) * 1e6 / len(calls)


def _run_job(index: int) -> str | None:
    try:
        _jobs[index]()
        torch.cuda.synchronize()
    except Exception as error:  # whatever the compiler or the device says is the result
        return f"job {index}: {type(error).__name__}: {str(error)[:200]}"
    return None
