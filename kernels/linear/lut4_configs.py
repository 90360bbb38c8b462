"""Lut4GemmConfig: tile sizes of products with 4-bit weights that are looked up: triton_lut4.py, triton_float4.py.

Measured for Llama 3.1 8B on an H100 with NF4. To retune: python -m benchmarks.nf4_sweep, and for 4-bit floats, which
take NF4's so far, python -m benchmarks.quantized_linear_sweep.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernels.e2m1 import MXFP4_BLOCK
from kernels.linear.reference import LUT_TILE
from kernels.linear.splits import num_splits

# Rows up to which table lookups cost less than making the matrix dense: in shared memory, and in L1. At 64 rows a
# product costs at most half of that, and a second tile of rows at most as much again
MAX_ROWS = 128
MAX_ROWS_LOADED = 8
LEAST_STEPS = 2  # of a split of K, in tiles of the packed weights
_MAX_BLOCK_M = 64
_PROGRAMS = 264  # two for each multiprocessor of an H100: K is split into at most so many programs
# Rows of a tile → stages, with 128 outputs. Their tiles take more than 48 KB, because only then Triton requests
# more shared memory from the driver, and the lookup tables come on top; two programs fit a multiprocessor
_STAGES = {8: 6, 16: 6, 32: 4, 64: 3}


@dataclass(frozen=True)
class Lut4GemmConfig:
    """Tile sizes and number of splits for one shape."""

    block_m: int  # rows of x per program, padded
    block_n: int
    splits: int  # splits of K, in whole tiles of the packed weights; the last may be shorter
    num_warps: int
    num_stages: int
    prefetch: int = 0  # tiles of weights that a program prefetches into L2 before it waits for x
    is_shared: bool = True  # lookups in shared memory, by PTX; False: by Triton loads


def lut4_gemm_config(*, num_rows: int, n: int, k: int, is_shared: bool) -> Lut4GemmConfig | None:
    """Return the config of a shape; None: make the matrix dense. is_shared: see Lut4GemmConfig, Hopper only."""
    if num_rows > (MAX_ROWS if is_shared else MAX_ROWS_LOADED):
        return None
    # Tensor cores need a power of two, at least 8
    block_m = min(_MAX_BLOCK_M, max(8, 1 << (num_rows - 1).bit_length()))
    block_n, num_stages = (128, _STAGES[block_m]) if is_shared else (64, 4)
    splits = num_splits(
        num_rows=num_rows,
        n=n,
        num_steps=-(-k // LUT_TILE),
        block_m=block_m,
        block_n=block_n,
        programs=_PROGRAMS,
        least_steps=LEAST_STEPS,
    )
    return Lut4GemmConfig(block_m, block_n, splits, 4, num_stages, 2 if block_m <= 16 else 0, is_shared)


def float4_gemm_config(*, num_rows: int, n: int, k: int, block: int, is_shared: bool) -> Lut4GemmConfig | None:
    """Return the config of a product with 4-bit floats, scaled by `block`; see lut4_gemm_config."""
    config = lut4_gemm_config(num_rows=num_rows, n=n, k=k, is_shared=is_shared)
    if config is None or block == MXFP4_BLOCK or config.block_m > 8:
        return config
    # Triton loads x of narrower planes one stage less ahead, so that six stages would take less than 48 KB
    return replace(config, num_stages=config.num_stages + 1)
