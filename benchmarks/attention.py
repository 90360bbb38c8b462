"""`quire bench kernels`: attention over lengths, batches and contexts, Quire's kernels beside common implementations.

Every implementation is checked against float64 on the inputs it is timed on; a wrong result gets no time.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace

import torch

from benchmarks.attention_baselines import Call, page_loop, quadratic, sdpa, through_backend
from benchmarks.attention_problem import Heads, Problem, make_problem, relative_error
from benchmarks.attention_table import format_report
from benchmarks.kernel_timing import ROTATION_BYTES, machine_facts, num_copies, time_calls
from benchmarks.report import BenchError, Report, check_outputs, command_line, host_facts, now, write_report
from benchmarks.report_cli import read_old, show
from engine.startup.load import BACKENDS
from kernels.attention.base import AttentionSpec
from kernels.elementwise.reference import FP8

_MIB = 1024**2
_TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
_MAX_LOOPED_PAGES = 16_384  # a launch takes microseconds, and a page needs a dozen launches


@dataclass(frozen=True)
class Sizes:
    """Sizes measured on one kind of device."""

    heads: Heads
    lengths: list[int]  # prompt tokens of prefill
    batches: list[int]  # rows of decode
    contexts: list[int]  # tokens of each row


@dataclass(frozen=True)
class Implementation:
    """One implementation: a column of the report."""

    name: str
    prepare: Callable[[Problem], Call] | None = None
    block_size: int = 16
    is_capturable: bool = True  # does not sync, so a CUDA graph can capture it
    is_fp8: bool = False  # dtype of the pool
    refusal: str = ""  # reason for which it cannot run here


@dataclass(frozen=True)
class Result:
    """One cell. `us` is None without a measurement, and `skipped` gives the reason."""

    part: str  # prefill | decode
    case: str
    num_rows: int
    num_tokens: int  # of each row
    implementation: str
    us: float | None = None
    timed_by: str = ""  # graph (device time alone) | launches (device and launch time) | host clock
    tflop_s: float | None = None  # prefill
    tb_s: float | None = None  # decode: keys and values, read once
    memory_mib: float | None = None  # beside the inputs, CUDA only
    error: float | None = None  # relative, against float64
    skipped: str = ""


def run(arguments: argparse.Namespace) -> int:
    """Run `quire bench kernels` and return its exit code: 1 if a result was wrong. Raises BenchError."""
    check_outputs(json_path=arguments.json, plot_path=arguments.plot, html_path=arguments.html)
    old = read_old(arguments.compare, "kernels") if arguments.compare else None
    report = measure(_sizes(arguments), arguments.part or "prefill,decode")
    print(format_report(report))
    if arguments.json:
        write_report(arguments.json, report)
    show(report, old, arguments)
    return int(any(result["skipped"].startswith("wrong") for result in report["results"]))


@torch.inference_mode()
def measure(sizes: Sizes, parts: str) -> Report:
    """Check and time every case of the parts, which are separated by commas."""
    heads = sizes.heads
    torch.manual_seed(0)
    results: list[Result] = []
    if "prefill" in parts:
        columns = [Implementation("O(N²)", quadratic), Implementation("SDPA", sdpa), *_backends(heads, "prefill")]
        for length in sizes.lengths:
            results += _measure_row(columns, heads, num_rows=1, query_len=length, seq_len=length)
    if "decode" in parts:
        columns = [Implementation("page loop", page_loop, is_capturable=False), *_backends(heads, "decode")]
        for num_rows in sizes.batches:
            for context in sizes.contexts:
                results += _measure_row(columns, heads, num_rows=num_rows, query_len=1, seq_len=context)
    return {
        "benchmark": "kernels",
        "date": now(),
        "command": command_line(sys.argv[1:]),
        "host": host_facts(),
        "machine": {name: fact for name, fact in machine_facts().items() if name != "argv"},
        "heads": {
            "num_heads": heads.num_heads,
            "num_kv_heads": heads.num_kv_heads,
            "head_dim": heads.head_dim,
            "dtype": str(heads.dtype).removeprefix("torch."),
            "device": heads.device.type,
        },
        "results": [asdict(result) for result in results],
    }


def _sizes(arguments: argparse.Namespace) -> Sizes:
    has_cuda = torch.cuda.is_available()
    if arguments.device == "cuda" and not has_cuda:
        raise BenchError("--device cuda: torch finds no CUDA device here.", exit_code=2)
    if has_cuda and arguments.device != "cpu":
        heads = Heads(32, 8, 128, torch.bfloat16, torch.device("cuda"))
        sizes = Sizes(heads, [2**n for n in range(7, 15)], [1, 8, 64, 256], [128, 1024, 4096, 16384])
    else:
        heads = Heads(8, 2, 64, torch.float32, torch.device("cpu"))
        sizes = Sizes(heads, [128, 512], [1, 4], [128, 512])
        print("No CUDA device is used: small sizes in float32, and only what runs on the CPU.", file=sys.stderr)
    return Sizes(
        heads,
        arguments.lengths or sizes.lengths,
        arguments.batches or sizes.batches,
        arguments.contexts or sizes.contexts,
    )


def _backends(heads: Heads, part: str) -> Iterable[Implementation]:
    """Return the engine's backends in their order, refusals with reasons; for an fp8 pool, those that support it."""
    for backend_class, kv_dtype in itertools.product(BACKENDS, (heads.dtype, FP8)):
        spec = AttentionSpec(
            heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.dtype, heads.device, kv_dtype=kv_dtype
        )
        name = f"{backend_class.name}{' fp8' * spec.has_other_pool}"
        reason = backend_class.refuse(spec)
        if reason is not None:
            if not spec.has_other_pool:
                yield Implementation(name, refusal=reason)
            continue
        backend = backend_class()
        is_capturable = backend.is_graph_safe or part == "decode"  # torch waits for the device in prefill only
        block_size = max(16, backend.block_size_multiple)
        yield Implementation(name, through_backend(backend), block_size, is_capturable, spec.has_other_pool)


def _measure_row(
    columns: Iterable[Implementation], heads: Heads, *, num_rows: int, query_len: int, seq_len: int
) -> list[Result]:
    """Measure one case in every column."""
    part = "decode" if query_len == 1 else "prefill"
    case = f"prefill {seq_len}" if part == "prefill" else f"decode {num_rows} × {seq_len}"
    print(f"{case} …", file=sys.stderr, flush=True)
    return [
        _measure(
            implementation,
            Result(part, case, num_rows, seq_len, implementation.name),
            heads,
            query_len=query_len,
        )
        for implementation in columns
    ]


def _measure(implementation: Implementation, empty: Result, heads: Heads, *, query_len: int) -> Result:
    """Check and time one cell. empty: the cell without figures."""
    if implementation.prepare is None:
        return replace(empty, skipped=implementation.refusal)
    num_pages = empty.num_rows * -(-empty.num_tokens // implementation.block_size)
    if implementation.prepare is page_loop and num_pages > _MAX_LOOPED_PAGES:
        return replace(empty, skipped=f"over {_MAX_LOOPED_PAGES:,} pages")
    try:
        result = _measure_on_problem(implementation.prepare, implementation, empty, heads, query_len=query_len)
    except torch.OutOfMemoryError:
        result = replace(empty, skipped="out of memory")
    if heads.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()  # the next cell has the whole device
    return result


def _measure_on_problem(
    prepare: Callable[[Problem], Call], implementation: Implementation, empty: Result, heads: Heads, *, query_len: int
) -> Result:
    """Check and time one cell. Raises torch.OutOfMemoryError."""
    num_bytes = 2 * empty.num_rows * empty.num_tokens * heads.num_kv_heads * heads.head_dim
    num_bytes *= FP8.itemsize if implementation.is_fp8 else heads.dtype.itemsize
    problem = make_problem(
        heads,
        num_rows=empty.num_rows,
        query_len=query_len,
        seq_len=empty.num_tokens,
        block_size=implementation.block_size,
        is_fp8=implementation.is_fp8,
        num_layers=1 if heads.device.type == "cpu" or num_bytes > ROTATION_BYTES else num_copies(num_bytes),
    )
    call = prepare(problem)
    torch.full_like(problem.q, float("nan"))  # fills memory that the output may reuse: unwritten parts show
    error = relative_error(problem, call(-1))
    if not error <= _TOLERANCE[heads.dtype]:
        return replace(empty, error=error, skipped=f"wrong: relative error {error:.1e}")
    memory_mib = _memory_mib(call, heads.device)
    calls = [functools.partial(call, layer) for layer in range(len(problem.caches))]
    us, timed_by = time_calls(calls, is_capturable=implementation.is_capturable, device=heads.device)
    result = replace(empty, us=us, timed_by=timed_by, memory_mib=memory_mib, error=error)
    if query_len == 1:
        return replace(result, tb_s=num_bytes / us * 1e-6)
    num_flops = 2 * heads.num_heads * heads.head_dim * query_len * (query_len + 1)
    return replace(result, tflop_s=num_flops / us * 1e-6)


def _memory_mib(call: Call, device: torch.device) -> float | None:
    """Return the peak memory of one call beyond what is allocated already, its output included."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(0)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / _MIB
