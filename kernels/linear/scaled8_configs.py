"""Scaled8Config: tile sizes of products of 8-bit values with scales (kernels/linear/triton_scaled8.py).

Up to 256 rows of FP8 blocks within 7 % of the best of those without the copy engine, on an H200, at shapes of Llama 3.1
8B; integers and more rows have the same and were not measured. To retune: python -m benchmarks.quantized_linear_sweep.
"""

from __future__ import annotations

from dataclasses import dataclass

# Rows of x up to which weights may be the wide side of a product, and K split
MAX_FEW_ROWS = 256
# Capacity in fp32 sums of the scratch that the splits of one product share, and in tiles
SCRATCH_SUMS = 1 << 22
SCRATCH_TILES = 4096
_PROGRAMS = 528  # four for each multiprocessor of an H100
_LEAST_TILES = 40  # of 64 x 128, for x @ w.T: faster than splits of K with 48 of them, slower with 32
_FEW_PROGRAMS = 132  # one for each multiprocessor: tiles of 64 rows are split into at most so many
_DEEP = 8192  # inputs from which more stages pay
_MAX_SPLITS = 16
_MOST_ROWS = 64  # of a tile of few rows


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


def scaled8_config(*, num_rows: int, n: int, k: int, block_k: int) -> Scaled8Config:
    """Return the config of a shape, the same for all rows up to a power of two, so that few kernels are compiled.

    block_k: columns of a step.
    """
    if num_rows > MAX_FEW_ROWS:
        return Scaled8Config(128, 128, block_k, 8, 4, is_few=False)
    most = max(8, 1 << (num_rows - 1).bit_length())  # tensor cores need a power of two, at least 8
    block_m = min(_MOST_ROWS, most)
    if block_m < _MOST_ROWS:
        splits = num_splits(num_rows=most, n=n, k=k, block_m=block_m, block_n=64, block_k=block_k)
        return Scaled8Config(block_m, 64, block_k, 4, 6 if k > _DEEP else 4, splits)
    if -(-most // _MOST_ROWS) * -(-n // 128) >= _LEAST_TILES:
        return Scaled8Config(_MOST_ROWS, 128, block_k, 4, 4, is_few=False)
    splits = num_splits(num_rows=most, n=n, k=k, block_m=block_m, block_n=128, block_k=block_k, programs=_FEW_PROGRAMS)
    return Scaled8Config(block_m, 128, block_k, 8, 4, splits)


def num_splits(
    *, num_rows: int, n: int, k: int, block_m: int, block_n: int, block_k: int, programs: int = _PROGRAMS
) -> int:
    """Return the splits of K that fill the device, limited by the scratch."""
    num_steps = -(-k // block_k)
    meetings = -(-num_rows // block_m) * -(-n // block_n)
    splits = 1
    while (
        splits < _MAX_SPLITS
        and meetings * splits * 2 <= programs
        and num_steps >= splits * 8  # otherwise the loop has nothing to overlap
        and meetings <= SCRATCH_TILES
        and meetings * block_m * block_n * splits * 2 <= SCRATCH_SUMS
    ):
        splits *= 2
    return splits
