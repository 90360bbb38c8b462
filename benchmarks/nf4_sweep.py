"""Times NF4 products of Llama 3.1 8B with every config for kernels/linear/lut4_configs.py, checking each first.

    python -m benchmarks.nf4_sweep --out nf4-sweep.json

The table also shows the product after dequantising the matrix, and bf16's. Configs that do not fit the device, or give
wrong results, are left out.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn import functional

from benchmarks.kernel_timing import machine_facts, num_copies, precompile, time_graph
from benchmarks.report import Report, format_table
from kernels.linear.lut4_configs import LEAST_STEPS, Lut4GemmConfig, lut4_gemm_config
from kernels.linear.reference import (
    BLOCK,
    LUT_TILE,
    NF4_TABLE,
    Lut4Weight,
    dequantize_lut4,
    lut4_weight_bytes,
    make_lut4_weight,
)
from kernels.linear.splits import num_splits

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}  # N, K
ROWS = (1, 8, 16, 32, 64, 128)
_CUTS = (
    (64, 4, 4),
    (64, 4, 6),
    (128, 4, 3),
    (128, 4, 4),
    (128, 4, 5),
    (128, 4, 6),
    (256, 8, 4),
)  # outputs, warps, stages
_PROGRAMS = (264, 528)
_MAX_ERROR = 3e-3  # error of a result rounded to bf16, where the reference rounds its table the same way
_REPLAYS = 9
Result = Report


@dataclass(frozen=True)
class Problem:
    """One shape, with enough copies that successive calls miss the L2 cache."""

    weights: list[Lut4Weight]
    dense: list[torch.Tensor]  # [N, K] bf16
    exact: torch.Tensor  # the first weight, float64


def main() -> None:
    """Sweep, print the best of each case beside the served config, and write all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write all numbers")
    options = parser.parse_args()
    cases = [(name, num_rows) for name in SHAPES for num_rows in ROWS]
    jobs = [functools.partial(_run_once, name, rows, config) for name, rows in cases for config in _configs(name, rows)]
    errors = precompile(jobs)
    if not torch.cuda.is_available():
        sys.exit("benchmarks.nf4_sweep needs a CUDA device.")
    print(f"{len(jobs)} cuts compiled, of which {len(errors)} do not fit", flush=True)
    problems = {name: _make_problem(*shape) for name, shape in SHAPES.items()}
    results = [_time_case(problems[name], name, num_rows) for name, num_rows in cases]
    if options.out:
        options.out.write_text(json.dumps({"machine": machine_facts(), "results": results}, indent=1) + "\n")
    columns = ("shape", "rows", "dense_us", "bf16_us", "served_us")
    rows = [[*map(str, (result[name] for name in columns)), *_describe(result["cuts"])] for result in results]
    print(format_table([[*columns, "best_us", "TB/s", "best"], *rows]))


def _configs(name: str, num_rows: int) -> list[Lut4GemmConfig]:
    """Return the candidates, the served config first."""
    n, k = SHAPES[name]
    served = lut4_gemm_config(num_rows=num_rows, n=n, k=k, is_shared=True)
    assert served is not None
    found = [served]
    for block_n, num_warps, num_stages in _CUTS:
        for programs in _PROGRAMS:
            splits = num_splits(
                num_rows=num_rows, n=n, num_steps=-(-k // LUT_TILE), block_m=served.block_m, block_n=block_n,
                programs=programs, least_steps=LEAST_STEPS,
            )  # fmt: skip
            found.append(Lut4GemmConfig(served.block_m, block_n, splits, num_warps, num_stages, served.prefetch))
    return list(dict.fromkeys(found))


def _time_case(problem: Problem, name: str, num_rows: int) -> Result:
    from kernels.linear.splits import SplitKScratch
    from kernels.linear.triton_lut4 import dequantize as triton_dequantize
    from kernels.linear.triton_lut4 import lut4_gemm

    n, k = SHAPES[name]
    x, scratch = (
        torch.randn(num_rows, k, dtype=torch.bfloat16, device="cuda"),
        SplitKScratch.allocate(torch.device("cuda")),
    )
    expected = x.double() @ problem.exact.T
    cuts: list[Result] = []
    configs = _configs(name, num_rows)
    for config in configs:
        run = functools.partial(lut4_gemm, bias=None, scratch=scratch, config=config, pdl=True)
        try:
            error = float((run(x, problem.weights[0]).double() - expected).norm() / expected.norm())
            us = time_graph([functools.partial(run, x, weight) for weight in problem.weights], replays=_REPLAYS)
        except Exception as failure:  # this config does not fit the device
            print("skipped", name, num_rows, config, type(failure).__name__, flush=True)
            continue
        if not error < _MAX_ERROR:
            print("wrong", name, num_rows, config, f"relative error {error:.2e}", flush=True)
            continue
        measured = {"us": round(us, 2), "tb_s": round(lut4_weight_bytes(n, k) / us * 1e-6, 2)}
        cuts.append(asdict(config) | measured | {"is_served": config == configs[0]})
    dense = [lambda w=w: functional.linear(x, triton_dequantize(w, x.dtype)) for w in problem.weights]
    bf16 = [functools.partial(functional.linear, x, w) for w in problem.dense]
    return {
        "shape": name, "n": n, "k": k, "rows": num_rows,
        "dense_us": round(time_graph(dense, replays=_REPLAYS), 2),
        "bf16_us": round(time_graph(bf16, replays=_REPLAYS), 2),
        "served_us": next((cut["us"] for cut in cuts if cut["is_served"]), None),
        "cuts": cuts,
    }  # fmt: skip


def _describe(cuts: Sequence[Result]) -> list[str]:
    best = min(cuts, key=lambda cut: float(str(cut["us"])), default=None)
    if best is None:
        return ["", "", ""]
    names = ("block_m", "block_n", "num_warps", "num_stages", "splits")
    return [str(best["us"]), str(best["tb_s"]), " ".join(f"{name} {best[name]}" for name in names)]


def _make_weight(n: int, k: int) -> Lut4Weight:
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scales = torch.rand(n, k // BLOCK, device="cuda").add(0.5).mul(0.02)
    return make_lut4_weight(packed, scales, torch.tensor(NF4_TABLE, device="cuda").bfloat16().float(), torch.bfloat16)


def _make_problem(n: int, k: int) -> Problem:
    weights = [_make_weight(n, k) for _ in range(num_copies(lut4_weight_bytes(n, k)))]
    exact = dequantize_lut4(weights[0], torch.float32).double()
    return Problem(weights, [exact.bfloat16() for _ in range(num_copies(2 * n * k))], exact)


def _run_once(name: str, num_rows: int, config: Lut4GemmConfig) -> None:
    """Compile one config into Triton's cache."""
    from kernels.linear.splits import SplitKScratch
    from kernels.linear.triton_lut4 import lut4_gemm

    n, k = SHAPES[name]
    x = torch.zeros(num_rows, k, dtype=torch.bfloat16, device="cuda")
    lut4_gemm(x, _make_weight(n, k), None, SplitKScratch.allocate(x.device), config=config, pdl=True)


if __name__ == "__main__":
    main()
