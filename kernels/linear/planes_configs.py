"""PlanesConfig: tile sizes of products with 4-bit floats in planes (kernels/linear/triton_planes.py), by rows of x.

planes_config() is the rule of what serves how many rows. To retune: python -m benchmarks.low_bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.linear.splits import num_splits

# Rows up to which codes are unpacked in registers, once for each 64 rows. For more the matrix is made dense once
MAX_ROWS = 256
LEAST_STEPS = 2  # of a split of K, in groups


@dataclass(frozen=True)
class PlanesTile:
    """Tile sizes for any shape."""

    block_n: int
    num_warps: int
    num_stages: int
    programs: int  # K is split into at most so many programs
    prefetch: int  # groups of weights that a program prefetches into L2 before it waits for x


@dataclass(frozen=True)
class PlanesConfig:
    """Tile sizes and number of splits for one shape."""

    block_m: int  # rows of x per program, padded
    block_n: int
    splits: int  # of K, in whole groups; the last may be shorter
    num_warps: int
    num_stages: int
    prefetch: int


# (most rows, rows of a tile, outputs from which on the tile is taken, tile): the first line that fits is served. From
# counts of instructions, not measured: two programs fill a multiprocessor with loads; tiles of few outputs keep more
# of them busy where a matrix has few
_WIDE = 132 * 128  # outputs that fill an H100 with wide tiles
RULE: tuple[tuple[int, int, int, PlanesTile], ...] = (
    (8, 8, 0, PlanesTile(128, 4, 5, programs=264, prefetch=2)),
    (16, 16, 0, PlanesTile(128, 4, 5, programs=264, prefetch=2)),
    (32, 32, _WIDE, PlanesTile(128, 4, 4, programs=264, prefetch=0)),
    (32, 32, 0, PlanesTile(64, 4, 5, programs=264, prefetch=0)),
    (MAX_ROWS, 64, _WIDE, PlanesTile(128, 4, 4, programs=264, prefetch=0)),
    (MAX_ROWS, 64, 0, PlanesTile(64, 4, 4, programs=264, prefetch=0)),
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
        least_steps=LEAST_STEPS,
    )
    return PlanesConfig(block_m, tile.block_n, splits, tile.num_warps, tile.num_stages, tile.prefetch)
