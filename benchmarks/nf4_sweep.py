"""Products with NF4 matrices of Llama 3.1 8B at few rows: every cut checked, then timed, within a number of seconds.

    python -m benchmarks.nf4_sweep --out nf4-sweep.json --seconds 120
    python -m benchmarks.nf4_sweep --choose nf4-sweep.json            the table for kernels/codes_configs.py

Beside them stand the products that bnb_ops takes, by lookups in memory and by a dense matrix, and bf16's. What does not
compile, does not fit the device or is wrong is listed, and left out; so is what the seconds do not suffice for.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from benchmarks.kernel_timing import compile_ahead, machine_facts, num_copies, time_graph
from benchmarks.nf4_candidates import (
    ROWS,
    SHAPES,
    Candidate,
    Launch,
    Result,
    as_result,
    candidates,
    choose,
    compile_jobs,
    launch,
    launches,
    make_weight,
    probes,
    random_codes,
)
from benchmarks.report import format_table
from kernels.codes_configs import block_rows
from kernels.quant_bnb import BLOCK, NF4_TABLE
from kernels.quant_codes import CodeWeight
from kernels.triton_gemv import GemvScratch

_MAX_ERROR = 3e-3  # of a result rounded to bf16, where the reference has the table so rounded
_COMPILE_SHARE = 0.5  # of the seconds
_LAST_S = 4.0  # kept for the table
_REPLAYS = 9


@dataclass(frozen=True)
class Problem:
    """One shape. As many copies as keep successive calls out of the L2 cache."""

    n: int
    k: int
    # NF4 as bitsandbytes stores it: codes, scales
    stored: list[tuple[torch.Tensor, torch.Tensor]]
    # (plane, is_paired) → the same matrices
    weights: dict[tuple[int, bool], list[CodeWeight]]
    dense: list[torch.Tensor]  # bf16
    exact: torch.Tensor  # the first, float64


def main() -> None:
    """Sweep, or choose from a sweep's file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write all numbers")
    parser.add_argument("--seconds", type=float, default=120.0, help="for everything")
    parser.add_argument("--choose", type=Path, help="print the best table of this file, and time nothing")
    options = parser.parse_args()
    if options.choose:
        print(choose(json.loads(options.choose.read_text())["results"]))
        return
    started_s = time.monotonic()
    failures = _compile(until_s=started_s + _COMPILE_SHARE * options.seconds)
    if not torch.cuda.is_available():
        sys.exit("benchmarks.nf4_sweep needs a CUDA device.")
    print(f"compiled in {time.monotonic() - started_s:.0f} s; not, or not to be launched: {len(failures)}", flush=True)
    results: list[Result] = []
    baselines: list[Result] = []
    try:
        _sweep(results, baselines, failures, until_s=started_s + options.seconds - _LAST_S)
    finally:
        if options.out:
            found = {"machine": machine_facts(), "baselines": baselines, "results": results}
            options.out.write_text(json.dumps(found, indent=1))
    print_results(results, baselines)
    print(f"{time.monotonic() - started_s:.0f} s")


def _compile(*, until_s: float) -> dict[Launch, str]:
    """Fill Triton's cache; returns what must not be launched, and why."""

    def run(found: Sequence[Launch], processes: int) -> dict[Launch, str]:
        errors = compile_ahead(compile_jobs(found, until_s=until_s), processes=processes)
        return {found[int(error.split()[1].rstrip(":"))]: _first_line(error) for error in errors}

    probed = probes()
    broken = {one.config.lookup: reason for one, reason in run(probed, len(probed)).items()}
    failures = {one: broken[one.config.lookup] for one in launches() if one.config.lookup in broken}
    return failures | run([one for one in launches() if one not in failures], 14)


@torch.inference_mode()
def _sweep(results: list[Result], baselines: list[Result], failures: dict[Launch, str], *, until_s: float) -> None:
    """The most promising candidates of all cases first, so that what time does not allow is what matters least."""
    from kernels.triton_codes_gemm import allocate_scratch

    scratch = allocate_scratch(torch.device("cuda"))
    scratch.partial.fill_(float("nan"))
    problems = {name: _make_problem(n, k) for name, (n, k) in SHAPES.items()}
    for name, problem in problems.items():
        for num_rows in ROWS:
            baselines.append({"shape": name, "rows": num_rows, **_time_baselines(problem, num_rows)})
    print("baselines timed", flush=True)
    done: dict[tuple[str, int, Launch], Result] = {}
    lists = {num_rows: candidates(block_rows(num_rows)) for num_rows in ROWS}
    for priority in range(max(map(len, lists.values()))):
        for name, problem in problems.items():
            for num_rows in ROWS:
                if priority >= len(lists[num_rows]) or time.monotonic() > until_s:
                    continue
                candidate = lists[num_rows][priority]
                one = launch(candidate, num_rows=num_rows, n=problem.n, k=problem.k)
                key = (name, num_rows, one)  # two candidates may be one launch
                if key not in done:
                    done[key] = _measure(problem, num_rows, candidate, one, scratch, failures)
                facts = {"shape": name, "n": problem.n, "k": problem.k, "rows": num_rows}
                facts |= {"block_m": one.config.block_m, "splits": one.config.splits}
                results.append(facts | as_result(candidate) | done[key])


def _measure(
    problem: Problem,
    num_rows: int,
    candidate: Candidate,
    one: Launch,
    scratch: GemvScratch,
    failures: dict[Launch, str],
) -> Result:
    """Check one launch with fresh inputs, then time it; or say why not."""
    from kernels.triton_codes_gemm import codes_gemm

    if one in failures:
        return {"failed": failures[one]}
    weights = problem.weights[candidate.plane, candidate.is_paired]
    try:
        x = torch.randn(num_rows, problem.k, dtype=torch.bfloat16, device="cuda")
        run = functools.partial(codes_gemm, bias=None, scratch=scratch, config=one.config, pdl=True)
        expected = x.double() @ problem.exact.T
        poison = torch.full((num_rows, problem.n), float("nan"), dtype=x.dtype, device=x.device)
        del poison  # what the product is written to next
        out = run(x, weights[0])
        error = float((out.double() - expected).norm() / expected.norm())
        if not error < _MAX_ERROR:
            return {"failed": f"relative error {error:.2e}"}
        if not torch.equal(out, run(x, weights[0])):
            return {"failed": "two runs differ"}
        us = time_graph([functools.partial(run, x, weight) for weight in weights], replays=_REPLAYS)
    except Exception as error:  # of the compiler, or of the driver
        return {"failed": _first_line(f"{type(error).__name__}: {error}")}
    num_bytes = weights[0].packed.numel() + 4 * weights[0].scales.numel()
    return {"us": us, "tb_s": num_bytes / us * 1e-6, "error": error}


def _make_problem(n: int, k: int) -> Problem:
    stored, dense = [], []
    weights: dict[tuple[int, bool], list[CodeWeight]] = {(32, True): [], (64, True): [], (32, False): []}
    table = torch.tensor(NF4_TABLE, device="cuda")
    for index in range(num_copies(n * k // 2)):
        codes, scales = random_codes(n, k)
        stored.append(((codes[:, 0::2] << 4) | codes[:, 1::2], scales))
        for (plane, is_paired), found in weights.items():
            found.append(make_weight(codes, scales, plane=plane, is_paired=is_paired))
        if index == 0:
            exact = table.bfloat16().double()[codes.int()] * scales.double().repeat_interleave(BLOCK, 1)
    dense = [exact.bfloat16() for _ in range(num_copies(2 * n * k))]
    return Problem(n, k, stored, weights, dense, exact)


def _time_baselines(problem: Problem, num_rows: int) -> Result:
    """µs of the ways that serving has now."""
    from kernels import triton_quant_bnb
    from kernels.triton_gemv import gemv

    x = torch.randn(num_rows, problem.k, dtype=torch.bfloat16, device="cuda")
    table = torch.tensor(NF4_TABLE, device="cuda")
    rounded, scratch = table.bfloat16(), GemvScratch.allocate(x.device)

    def stream(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return triton_quant_bnb.linear_4bit(x, packed, scales, rounded, None, pdl=True)

    def through_dense(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, triton_quant_bnb.dequantize_4bit(packed, scales, table, x.dtype))

    ways: dict[str, list[Callable[[], object]]] = {
        "streamed_us": [functools.partial(stream, *pair) for pair in problem.stored],
        "through_dense_us": [functools.partial(through_dense, *pair) for pair in problem.stored],
        "cublas_bf16_us": [functools.partial(functional.linear, x, w) for w in problem.dense],
        "gemv_bf16_us": [functools.partial(gemv, x, w, None, scratch, pdl=True) for w in problem.dense],
    }
    return {way: time_graph(calls, replays=_REPLAYS) for way, calls in ways.items()}


def print_results(results: Sequence[Result], baselines: Sequence[Result]) -> None:
    """What failed, the table that the results allow, and a line per case."""
    failed = Counter(_first_line(str(result["failed"])) for result in results if "failed" in result)
    for reason, count in failed.most_common(12):
        first = next(result for result in results if _first_line(str(result.get("failed"))) == reason)
        print(f"{count} × {reason}, e.g. {first['shape']} × {first['rows']}: {_describe(first)}")
    print(choose(results))
    lookups = (("permute", True), ("permute", False), ("shared", True), ("mixed", True))
    rows = [
        ["shape", "rows", "streamed", "dense", "cublas", "gemv", "permute", "any", "shared", "mixed", "TB/s", "best"]
    ]
    for base in baselines:
        timed = [
            result
            for result in results
            if (result["shape"], result["rows"]) == (base["shape"], base["rows"]) and "us" in result
        ]
        least = [_least(timed, lookup, is_paired=is_paired) for lookup, is_paired in lookups]
        best = min(timed, key=lambda result: result["us"], default=None)
        ways = ("streamed_us", "through_dense_us", "cublas_bf16_us", "gemv_bf16_us")
        rows.append([
            str(base["shape"]), str(base["rows"]), *(f"{base[way]:.1f}" for way in ways), *least,
            f"{best['tb_s']:.2f}" if best else "", _describe(best) if best else "",
        ])  # fmt: skip
    print(format_table(rows))


def _least(timed: Sequence[Result], lookup: str, *, is_paired: bool) -> str:
    found = [
        float(result["us"])
        for result in timed
        if result["cut"]["lookup"] == lookup and result["is_paired"] == is_paired
    ]
    return f"{min(found):.1f}" if found else ""


def _describe(result: Result) -> str:
    cut = result["cut"]
    kind = cut["lookup"] if result["is_paired"] else "any"
    return (
        f"{kind} p{result['plane']} m{result['block_m']} n{cut['block_n']} w{cut['num_warps']} st{cut['num_stages']}"
        f" s{result['splits']}"
    )


def _first_line(text: str) -> str:
    return text.split(": ", 1)[-1].strip().split("\n")[0][:140]


if __name__ == "__main__":
    main()
