"""PlanesConfig: tile sizes of products with 4-bit floats in planes (kernels/linear/triton_planes.py), by rows of x.

planes_config() is the rule of what serves how many rows. To retune: python -m benchmarks.low_bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.linear.splits import num_splits

# Rows up to which codes are unpacked in registers, once for each 64 rows. For more the matrix is made dense once: with
# 512 that takes 267 us for 28,672 x 4,096, of which cuBLAS has 160 alone, and unpacking in registers takes 245
MAX_ROWS = 512


@dataclass(frozen=True)
class PlanesTile:
    """Tile sizes for any shape."""

    block_n: int
    num_warps: int
    num_stages: int
    programs: int  # K is split into at most so many programs
    prefetch: int  # groups of weights that a program prefetches into L2 before it waits for x
    least_groups: int = 2  # of a split of K


@dataclass(frozen=True)
class PlanesConfig:
    """Tile sizes and number of splits for one shape."""

    block_m: int  # rows of x per program, padded
    block_n: int
    splits: int  # of K, in whole groups; the last may be shorter
    num_warps: int
    num_stages: int
    prefetch: int


# (most rows, rows of a tile, outputs from which on the tile is taken, tile): the first line that fits is served. Of six
# tiles each on an H100, for Llama 3.1 8B's layers in NVFP4, these are the fastest or up to 5 % behind. Of 33 to 64 rows
# of 4,096 x 4,096, 4 splits instead of 8 were not timed: in narrower tiles 8 take 16.6 us and 4 take 12.2
_WIDE = 132 * 128  # outputs that fill an H100 with wide tiles
RULE: tuple[tuple[int, int, int, PlanesTile], ...] = (
    (8, 8, _WIDE, PlanesTile(128, 4, 5, programs=264, prefetch=2)),
    (8, 8, 0, PlanesTile(64, 4, 5, programs=264, prefetch=2)),
    (16, 16, _WIDE, PlanesTile(64, 4, 6, programs=528, prefetch=2)),
    (16, 16, 0, PlanesTile(128, 4, 4, programs=264, prefetch=2)),
    (32, 32, 0, PlanesTile(64, 4, 4, programs=528, prefetch=0, least_groups=8)),
    (MAX_ROWS, 64, 0, PlanesTile(128, 8, 4, programs=264, prefetch=0, least_groups=8)),
)


def planes_config(*, num_rows: int, n: int, k: int) -> PlanesConfig | None:
    """Return the config that serves a shape; None: make the matrix dense, for cuBLAS."""
    for most_rows, block_m, least_n, tile in RULE:
        if num_rows <= most_rows and n >= least_n:
            return config_of(tile, block_m=block_m, num_rows=num_rows, n=n, k=k)
    return None


def config_of(tile: PlanesTile, *, block_m: int, num_rows: int, n: int, k: int) -> PlanesConfig:
    """Return the config of a tile for one shape."""
    splits = num_splits(
        num_rows=num_rows,
        n=n,
        num_steps=-(-k // 128),
        block_m=block_m,
        block_n=tile.block_n,
        programs=tile.programs,
        least_steps=tile.least_groups,
    )
    return PlanesConfig(block_m, tile.block_n, splits, tile.num_warps, tile.num_stages, tile.prefetch)
