"""Products with 4-bit integer weights: each config checked, then timed beside cuBLAS on the dense bf16 matrix."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn import functional

from benchmarks.kernel_timing import BF16_CUDA, num_copies, time_graph
from kernels.linear import triton_int
from kernels.linear.reference import IntWeight, dequantize_int, make_int_weight
from kernels.linear.splits import SCRATCH_SUMS, SCRATCH_TILES, SplitKScratch
from kernels.linear.triton_int import (
    MAX_ROWS,
    IntGemmConfig,
    int_gemm,
    int_gemm_config,
)

# name → (N, K)
INT_SHAPES = {
    "8B qkv": (6144, 4096), "8B o": (4096, 4096), "8B gate_up": (28672, 4096), "8B down": (4096, 14336),
    "0.6B qkv": (4096, 1024), "0.6B down": (1024, 3072),
}  # fmt: skip
INT_ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 513, 1024, 2048, 4096)
_GROUP_SIZE = 128


def int_candidates(num_rows: int, n: int, num_tiles: int) -> list[IntGemmConfig]:
    """Return the configs worth timing for a shape."""
    if num_rows > MAX_ROWS:
        return []
    if num_rows <= 64:
        padded = max(8, 1 << (num_rows - 1).bit_length())
        tiles = [(padded, *cut) for cut in ((32, 4, 4), (32, 4, 6), (64, 4, 3), (64, 4, 4), (64, 4, 6), (128, 4, 3),
                                           (128, 4, 4), (128, 8, 4), (64, 8, 4))]  # fmt: skip
        prefetches: tuple[int, ...] = (0, 2, 4)
    else:
        tiles = [(64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 3), (64, 128, 8, 3), (64, 128, 8, 4), (128, 64, 4, 3),
                 (128, 128, 8, 2), (128, 128, 8, 3), (128, 128, 8, 4), (128, 256, 8, 2), (256, 64, 8, 2),
                 (256, 128, 8, 2)]  # fmt: skip
        prefetches = (0, 2)
    found = []
    for block_m, block_n, warps, stages in tiles:
        for splits in (1, 2, 4, 8, 16):
            num_meetings = -(-num_rows // block_m) * -(-n // block_n)
            sums = num_meetings * splits * block_m * block_n
            fits = splits == 1 or (sums <= SCRATCH_SUMS and num_meetings <= SCRATCH_TILES)
            if fits and num_tiles >= 2 * splits and (splits == 1 or num_meetings * splits <= 1200):
                found += [IntGemmConfig(block_m, block_n, splits, warps, stages, prefetch) for prefetch in prefetches]
    return found


def bench_int(*, sweep: bool) -> list[dict[str, object]]:
    """Measure µs of x @ weight.T per shape and rows: the chosen path, the other, with `sweep` every config."""
    results: list[dict[str, object]] = []
    scratch = SplitKScratch.allocate(torch.device("cuda"))
    for name, (n, k) in INT_SHAPES.items():
        weights = _random_weights(n, k)
        dense = dequantize_int(weights[-1], torch.bfloat16)
        copies = [dense.clone() for _ in range(num_copies(n * k * 2))]
        for num_rows in INT_ROWS:
            x = torch.randn(num_rows, k, **BF16_CUDA)
            facts: dict[str, object] = {"kind": "int4", "case": f"{name} M{num_rows}"}
            facts["cublas_us"] = time_graph([functools.partial(functional.linear, x, w) for w in copies])
            us = time_graph([functools.partial(_through_dense, x, weight) for weight in weights])
            found = _time_cuts(x, weights, scratch, sweep=sweep) if num_rows <= MAX_ROWS else []
            results += [facts | row for row in (*found, {"config": "dequantised for cuBLAS", "us": us})]
        del copies
    return results


def _time_cuts(
    x: torch.Tensor, weights: list[IntWeight], scratch: SplitKScratch, *, sweep: bool
) -> list[dict[str, object]]:
    """Measure the chosen config first, then the others."""
    num_tiles, n, _ = weights[0].packed.shape
    num_bytes = weights[0].packed.numel() * 2 + weights[0].groups.numel() * 4
    expected = x.double() @ dequantize_int(weights[-1], torch.float64).T
    default = int_gemm_config(num_rows=len(x), n=n, num_tiles=num_tiles)
    results = []
    for config in dict.fromkeys([default, *(int_candidates(len(x), n, num_tiles) if sweep else [])]):
        try:
            out = int_gemm(x, weights[-1], None, scratch, config=config, pdl=True)
        except Exception as failure:  # this config does not fit the device
            print("int4", tuple(x.shape), n, config, type(failure).__name__, flush=True)
            continue
        error = float((out.double() - expected).norm() / expected.norm())
        assert error < 6e-3, (tuple(x.shape), n, config, error)
        us = time_graph([functools.partial(int_gemm, x, w, None, scratch, config=config, pdl=True) for w in weights])
        results.append({"config": str(config), "us": us, "tb_s": num_bytes / us * 1e-6, "error": error})
    return results


def compile_jobs(*, sweep: bool) -> list[Callable[[], object]]:
    """Launch every config that bench_int times, on tiny inputs."""

    def run(config: IntGemmConfig) -> None:
        weight = _random_weight(256, 256 * config.splits)
        x = torch.randn(config.block_m, weight.in_features, **BF16_CUDA)
        int_gemm(x, weight, None, SplitKScratch.allocate(x.device), config=config, pdl=True)

    wanted: dict[IntGemmConfig, None] = {}
    for n, k in INT_SHAPES.values():
        for num_rows in (rows for rows in INT_ROWS if rows <= MAX_ROWS):
            num_tiles = -(-k // 128)
            wanted[int_gemm_config(num_rows=num_rows, n=n, num_tiles=num_tiles)] = None
            wanted |= dict.fromkeys(int_candidates(num_rows, n, num_tiles) if sweep else [])
    return [functools.partial(run, config) for config in wanted]


def _through_dense(x: torch.Tensor, weight: IntWeight) -> torch.Tensor:
    return functional.linear(x, triton_int.dequantize(weight, x.dtype))


def _random_weights(n: int, k: int) -> list[IntWeight]:
    """Return a number of copies with which successive calls read device memory."""
    return [_random_weight(n, k) for _ in range(num_copies(n * k // 2))]


def _random_weight(n: int, k: int) -> IntWeight:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
    scales = torch.rand(k // _GROUP_SIZE, n, device="cuda").add(0.5).mul(0.01).half()
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, device="cuda")
    return make_int_weight(codes, scales, zeros, bits=4)
