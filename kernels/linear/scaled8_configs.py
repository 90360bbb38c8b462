"""Scaled8Config: tile sizes of products of 8-bit values with scales (kernels/linear/triton_scaled8.py).

Up to 256 rows of FP8 blocks within 7 % of the best of those without the copy engine, on an H200, at shapes of Llama 3.1
8B; integers have the same there. More rows: integers within 5 % of the best on an H100; FP8 blocks have a kernel of
their own (gluon_blocks.py) where it can run. To retune: python -m benchmarks.quantized_linear_sweep.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.linear.splits import num_splits

# Rows of x up to which weights may be the wide side of a product, and K split
MAX_FEW_ROWS = 256
LEAST_STEPS = 4  # of a split of K
_PROGRAMS = 528  # four for each multiprocessor of an H100
_LEAST_TILES = 40  # of 64 x 128, for x @ w.T: faster than splits of K with 48 of them, slower with 32
_FEW_PROGRAMS = 132  # one for each multiprocessor: tiles of 64 rows are split into at most so many
_DEEP = 8192  # inputs from which more stages pay
_MOST_ROWS = 64  # of a tile of few rows
_MANY_ROWS = 1024  # more: wider tiles
# Rows up to which blocks have tiles of 64 rows, also where gluon_blocks.py could run: with 300 rows they take 0.66 to
# 1.10 of its time
MAX_SMALL_TILES = 416


@dataclass(frozen=True)
class Scaled8Config:
    """Tile sizes and number of splits for one shape."""

    block_m: int  # rows of x per program, padded
    block_n: int
    block_k: int  # the columns of a block, for scales by block
    num_warps: int
    num_stages: int
    splits: int = 1  # splits of K, in whole steps of block_k; only where is_few
    is_few: bool = True  # w @ x.T, so that w is the wide side; False: x @ w.T
    group: int = 8  # tiles of rows that run side by side, not is_few
    has_tma: bool = False  # the device's copy engine loads tiles; only where not is_few. Compute capability 9.0 on


@dataclass(frozen=True)
class BlocksConfig:
    """Tile sizes and pipeline depth of one program of gluon_blocks.py, whose tile has 128 rows and 128 outputs."""

    # With 64 and 2 an H100 has 1 to 6 % fewer TFLOP/s for Llama 3.1 8B, but 0.5 % more for down with 8,192 rows
    part: int = 128  # outputs of one product
    parts: int = 1  # of a tile: 1 or 2
    num_stages: int = 4  # of 128 inputs, in shared memory
    group: int = 16  # tiles of rows that run side by side


def scaled8_config(
    *, num_rows: int, n: int, k: int, block_k: int, has_tma: bool = False, by_block: bool = False
) -> Scaled8Config:
    """Return the config of a shape, the same for all rows up to a power of two, so that few kernels are compiled.

    block_k: columns of a step. has_tma: the device's copy engine can load x and w. by_block: the scales are.
    """
    if num_rows > MAX_FEW_ROWS:
        if not has_tma:
            return Scaled8Config(128, 128, block_k, 8, 4, is_few=False)
        if by_block:
            return Scaled8Config(64, 128, block_k, 4, 4, is_few=False, has_tma=True)
        if num_rows > _MANY_ROWS:
            return Scaled8Config(128, 256, block_k, 8, 3, is_few=False, group=32, has_tma=True)
        return Scaled8Config(128, 128, block_k, 8, 4 if k > _DEEP else 3, is_few=False, group=32, has_tma=True)
    most = max(8, 1 << (num_rows - 1).bit_length())  # tensor cores need a power of two, at least 8
    block_m = min(_MOST_ROWS, most)
    if block_m < _MOST_ROWS:
        block_n, num_warps, num_stages, programs = 64, 4, 6 if k > _DEEP else 4, _PROGRAMS
    elif -(-most // _MOST_ROWS) * -(-n // 128) >= _LEAST_TILES:
        return Scaled8Config(_MOST_ROWS, 128, block_k, 4, 4, is_few=False)
    else:
        block_n, num_warps, num_stages, programs = 128, 8, 4, _FEW_PROGRAMS
    splits = num_splits(
        num_rows=most,
        n=n,
        num_steps=-(-k // block_k),
        block_m=block_m,
        block_n=block_n,
        programs=programs,
        least_steps=LEAST_STEPS,
    )
    return Scaled8Config(block_m, block_n, block_k, num_warps, num_stages, splits)
