"""Which tile of kernels/gluon_gemm.py, if any, beats cuBLAS for a product of 65 to 256 rows: checked, then timed.

Alone, and after a norm, as in a model: there a kernel may start beside the one before it, and that time decides.

    python -m benchmarks.gemm_sweep --out sweep.json [--shapes "0.6B qkv" ...]
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

from benchmarks.kernel_timing import compile_ahead, machine_facts, num_copies, time_graph
from benchmarks.kernels_linear import GEMV_SHAPES
from kernels.gluon_gemm import BLOCK_K, BLOCK_M, GemmCut, gemm, gemm_cut
from kernels.triton_elementwise import rms_norm

ROWS = (80, 96, 128, 160, 192, 224, 256)
_STAGES = {32: (8, 6), 64: (8, 6), 128: (8, 6), 256: (4, 3)}
_MIN_PROGRAMS = 64  # with fewer, most of the device idles
_MAX_ERROR = 4e-3  # a product rounded to bf16 is off by 1.7e-3
_BF16 = {"dtype": torch.bfloat16, "device": "cuda"}

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def candidates(*, num_rows: int, n: int) -> list[GemmCut]:
    """The cuts worth timing."""
    row_tiles = -(-num_rows // BLOCK_M)
    return [
        GemmCut(block_n, stages)
        for block_n, several in _STAGES.items() for stages in several
        if n % block_n == 0 and row_tiles * n // block_n >= _MIN_PROGRAMS
    ]  # fmt: skip


def sweep(shapes: list[str]) -> list[dict[str, object]]:
    """Time cuBLAS (cut None) and every candidate; one row a product, number of rows and cut."""
    pool = torch.empty(2 * max(n * k for n, k in (GEMV_SHAPES[shape] for shape in shapes)), **_BF16).normal_(std=0.05)
    results: list[dict[str, object]] = []
    for shape in shapes:
        n, k = GEMV_SHAPES[shape]
        copies = min(num_copies(n * k * 2), pool.numel() // (n * k))
        weights = pool[: copies * n * k].view(copies, n, k).unbind()
        for num_rows in ROWS:
            x = torch.randn(num_rows, k, **_BF16)
            chosen = gemm_cut(x, weights[0])
            for cut in (None, *candidates(num_rows=num_rows, n=n)):
                product = functional.linear if cut is None else functools.partial(gemm, cut=cut, pdl=True)
                _check(product, x, weights[-1])
                results.append({
                    "shape": shape, "n": n, "k": k, "rows": num_rows,
                    "cut": None if cut is None else [cut.block_n, cut.num_stages], "chosen": cut == chosen,
                    "us": time_graph([functools.partial(product, x, w) for w in weights]),
                    "after_norm_us": time_graph([functools.partial(_norm_and, product, x, w) for w in weights]),
                })  # fmt: skip
    return results


def lines(results: list[dict]) -> list[str]:
    """Per product and number of rows: cuBLAS, the best after a norm, and what gemm_cut chooses there."""
    told = []
    for shape, num_rows in dict.fromkeys((result["shape"], result["rows"]) for result in results):
        here = [result for result in results if (result["shape"], result["rows"]) == (shape, num_rows)]
        cublas = next(result for result in here if result["cut"] is None)
        chosen = next((result for result in here if result["chosen"]), cublas)
        best = min(here, key=lambda result: result["after_norm_us"])
        told.append(f"{shape} M{num_rows}: " + " | ".join(
            f"{name} {result['cut'] or 'cuBLAS'} {result['us']:.1f} norm+ {result['after_norm_us']:.1f}"
            for name, result in (("cuBLAS", cublas), ("best", best), ("chosen", chosen))
        ))  # fmt: skip
    return told


def _norm_and(product: Product, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return product(rms_norm(x, x[0], 1e-6, pdl=True), w)


def _check(product: Product, x: torch.Tensor, w: torch.Tensor) -> None:
    expected = x.float() @ w.float().T
    out = product(x, w)
    error = float((out.float() - expected).norm() / expected.norm())
    if not error < _MAX_ERROR or not torch.equal(out, product(x, w)):
        raise AssertionError(f"{product} of {tuple(x.shape)} and {tuple(w.shape)}: relative error {error:.2e}")


def _compile(cut: GemmCut) -> None:
    k = 4 * BLOCK_K
    gemm(torch.zeros(65, k, **_BF16), torch.zeros(2 * cut.block_n, k, **_BF16), cut=cut, pdl=True)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gemm-sweep.json"))
    parser.add_argument("--shapes", nargs="*", choices=list(GEMV_SHAPES), default=list(GEMV_SHAPES))
    arguments = parser.parse_args()
    cuts = [GemmCut(block_n, stages) for block_n, several in _STAGES.items() for stages in several]
    for error in compile_ahead([functools.partial(_compile, cut) for cut in cuts]):
        print(error, flush=True)
    results = sweep(arguments.shapes)
    arguments.out.write_text(json.dumps({"facts": machine_facts(), "results": results}, indent=1))
    print("\n".join(lines(results)))


if __name__ == "__main__":
    sys.exit(main())
