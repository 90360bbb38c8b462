"""How products with 4-bit codes (kernels/triton_codes_gemm.py) are cut.

A table of measured cuts, by rows and by outputs; where it has none, the kernel is not taken. To retune it:
python -m benchmarks.nf4_sweep --out FILE, then --choose FILE, which prints its lines.
"""

from __future__ import annotations

from dataclasses import dataclass

# How codes become values → planes, of a word's 4, for which that is done by byte permutations; -1: from memory
LOOKUPS = {"permute": 4, "mixed": 2, "shared": 0, "load": -1}
# fp32 sums that splits of one product may leave for each other, and tiles in which they meet
SCRATCH_SUMS = 1 << 22
SCRATCH_TILES = 4096
_MAX_SPLITS = 16
_MAX_BLOCK_M = 64
_WIDE = 132 * 128  # outputs that fill an H100 with wide tiles


@dataclass(frozen=True)
class CodesGemmConfig:
    """How a shape is cut."""

    block_m: int  # rows of x per program, padded
    block_n: int
    splits: int  # of K, in whole tiles of the packed weights; the last may be shorter
    num_warps: int
    num_stages: int
    prefetch: int = 2  # tiles of weights that a program asks L2 for before it waits for x; 0: none
    lookup: str = "permute"  # one of LOOKUPS; "load" is for devices that know no PTX


@dataclass(frozen=True)
class CodesCut:
    """How all shapes of a class are cut; K is split for `programs` of them at most."""

    lookup: str
    block_n: int
    num_warps: int
    num_stages: int
    prefetch: int
    programs: int
    least_rows: int = 8  # of a tile: from 16 on Triton takes Hopper's own products, wgmma

    def config(self, *, num_rows: int, n: int, num_tiles: int) -> CodesGemmConfig:
        """The cut of one shape. num_tiles: packed, along K."""
        block_m = max(self.least_rows, block_rows(num_rows))
        meetings = -(-num_rows // block_m) * -(-n // self.block_n)
        splits = 1
        while (
            splits < _MAX_SPLITS
            and meetings * splits * 2 <= self.programs
            and num_tiles >= splits * 4  # or the loop has nothing to overlap
            and meetings <= SCRATCH_TILES
            and meetings * block_m * self.block_n * splits * 2 <= SCRATCH_SUMS
        ):
            splits *= 2
        return CodesGemmConfig(
            block_m, self.block_n, splits, self.num_warps, self.num_stages, self.prefetch, self.lookup
        )


# (rows of a tile, has many outputs) → cut; of weights with planes of PLANE inputs
PLANE = 32
_CUTS: dict[tuple[int, bool], CodesCut] = {}


def block_rows(num_rows: int) -> int:
    """Rows of x per program: a power of two, which tensor cores want to be 8 at least."""
    return min(_MAX_BLOCK_M, max(8, 1 << (num_rows - 1).bit_length()))


def is_wide(n: int) -> bool:
    """Whether a matrix of n outputs has many, for the table."""
    return n >= _WIDE


def codes_gemm_config(*, num_rows: int, n: int, num_tiles: int) -> CodesGemmConfig | None:
    """The cut of a shape; None: not measured. num_tiles: packed, along K."""
    cut = _CUTS.get((block_rows(num_rows), is_wide(n)))
    return cut and cut.config(num_rows=num_rows, n=n, num_tiles=num_tiles)
