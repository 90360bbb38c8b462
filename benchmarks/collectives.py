"""Measures a decode step's all-reduce over GPUs with the norm after it: NCCL and two kernels, or the fused kernel.

    python -m benchmarks.collectives [--ranks 2] [--device cuda] [--json FILE]
Compares kernels/all_reduce/triton.py with NCCL and add_rms_norm: each shape is checked first, then timed. A time is of
one call among 50 in a CUDA graph, the slowest rank's, median of 15 replays, in µs. After 75 seconds the ranks are
killed. On CPUs gloo sums alone, at small sizes, which tries the script.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.kernel_timing import machine_facts, time_calls, time_graph
from benchmarks.rank_processes import run_ranks
from engine.tensor_parallel.process_group import join_ranks, least, share_one_shot_all_reduce
from kernels.all_reduce.reference import sum_add_rms_norm, sum_parts
from kernels.ops import add_rms_norm
from models.parallel import OneShotAllReduce, TensorParallel

# Hidden sizes of Qwen3-0.6B, Llama-3.1-8B and 70B
_SHAPES = [(rows, hidden) for hidden in (4096, 1024, 8192) for rows in (1, 8, 16, 32, 64, 128, 256)]
_CPU_SHAPES = [(rows, 64) for rows in (1, 8)]
_NUM_CALLS = 50
_TIMEOUT_S = 75.0
_EPS = 1e-5
_COLUMNS = ("hidden", "rows", "KiB", "nccl+norm", "nccl", "fused", "push")


def main() -> int:
    """Start the ranks, which print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    more = [arguments.device] if arguments.json is None else [arguments.device, str(arguments.json.resolve())]
    return run_ranks("benchmarks.collectives", ["--rank", *more], num_ranks=arguments.ranks, timeout_s=_TIMEOUT_S)


def run_rank(rank: int, size: int, rendezvous: str, device: torch.device, path: Path | None) -> None:
    """Check and time every shape, together with the other ranks."""
    faulthandler.dump_traceback_later(_TIMEOUT_S - 5)
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(device)
    tp = join_ranks(rank=rank, size=size, rendezvous=rendezvous, device=device)
    assert tp.group is not None
    shapes = _SHAPES if is_cuda else _CPU_SHAPES
    widest = max(hidden for _, hidden in shapes)
    sums = share_one_shot_all_reduce(tp.group, device, width=widest, max_pushed_bytes=1 << 40) if is_cuda else None
    if is_cuda and sums is None:
        raise SystemExit("these GPUs cannot write into each other's memory")
    results = []
    if rank == 0:
        print(*(f"{column:>9}" for column in _COLUMNS), flush=True)
    for rows, hidden in shapes:
        result = _measure(tp, sums, rows, hidden, device)
        results.append(result)
        if rank == 0:
            figures = [f"{value:9.2f}" for name, value in result.items() if name.endswith("_us")]
            print(f"{hidden:9d} {rows:9d} {rows * hidden / 512:9.0f}", *figures, flush=True)
        if rank == 0 and path is not None:  # after each shape, so that a timeout keeps the measured ones
            path.write_text(json.dumps({"machine": machine_facts(), "ranks": size, "sums": results}, indent=1))
    if is_cuda:
        torch.cuda.synchronize()


def _measure(
    tp: TensorParallel, sums: OneShotAllReduce | None, rows: int, hidden: int, device: torch.device
) -> dict[str, float]:
    generator = torch.Generator(device).manual_seed(rows * hidden + tp.rank)
    x = torch.randn(rows, hidden, generator=generator, device=device).bfloat16()
    same = torch.Generator(device).manual_seed(rows)
    residual = torch.randn(rows, hidden, generator=same, device=device).bfloat16()
    weight = torch.randn(hidden, generator=same, device=device).bfloat16()
    zeros = torch.zeros_like(x)  # summed in place again and again

    def sum_then_norm() -> None:
        add_rms_norm(tp.all_reduce(zeros), residual, weight, _EPS)

    calls: dict[str, Callable[[], object]] = {"nccl_norm_us": sum_then_norm, "nccl_us": partial(tp.all_reduce, zeros)}
    if sums is not None:
        _check(tp, sums, x, residual, weight)
        calls |= {
            "fused_us": partial(sums.add_rms_norm, x, residual, weight, _EPS),
            "push_us": partial(sums.all_reduce, zeros),
        }
        torch.cuda.synchronize()  # what is timed runs on another stream
    result: dict[str, float] = {"rows": rows, "hidden_size": hidden, "kib": rows * hidden / 512}
    for name, call in calls.items():
        if device.type == "cuda":
            us = time_graph([call] * _NUM_CALLS)
        else:
            us = time_calls([call] * _NUM_CALLS, is_capturable=False, device=device)[0]
        result[name] = -least(tp, -round(us * 1000), device) / 1000
    return result


def _check(
    tp: TensorParallel, sums: OneShotAllReduce, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> None:
    """Assert that both forms return the specification's values, and the same bits on every rank."""
    parts = tp.all_gather(x[None], 0).unbind()
    expected = (*sum_add_rms_norm(parts, residual, weight, _EPS), sum_parts(parts))
    for _ in range(3):  # both inboxes, and one again
        outputs = (*sums.add_rms_norm(x, residual, weight, _EPS), sums.all_reduce(x.clone()))
        for out, wanted in zip(outputs, expected, strict=True):
            torch.testing.assert_close(out, wanted, atol=2e-2, rtol=2e-2)
            everyones = tp.all_gather(out[None], 0)
            assert torch.equal(everyones, out.expand_as(everyones)), "ranks differ"


if __name__ == "__main__":
    if "--rank" in sys.argv:
        rank, size, rendezvous, _, kind, *paths = sys.argv[1:]
        device = torch.device(kind, int(rank)) if kind == "cuda" else torch.device(kind)
        run_rank(int(rank), int(size), rendezvous, device, Path(paths[0]) if paths else None)
    else:
        sys.exit(main())
