"""num_splits: into how many parts a product's K is cut, and the size of the scratch in which the parts are summed.

For kernels/linear/triton_split_k.py. Plans without Triton, so that it is tested and read where there is none.
"""

from __future__ import annotations

# Capacity in fp32 sums of the scratch that the splits of one product share, and in tiles
SCRATCH_SUMS = 1 << 22
SCRATCH_TILES = 4096
_MAX_SPLITS = 16


def num_splits(
    *, num_rows: int, n: int, num_steps: int, block_m: int, block_n: int, programs: int, least_steps: int
) -> int:
    """Return the splits of K that fill the device, a power of two, limited by the scratch.

    num_steps: of the loop over all of K. programs: at most so many run. least_steps: each split has, otherwise its
    loop has nothing to overlap.
    """
    meetings = -(-num_rows // block_m) * -(-n // block_n)
    splits = 1
    while (
        splits < _MAX_SPLITS
        and meetings * splits * 2 <= programs
        and num_steps >= splits * 2 * least_steps
        and meetings <= SCRATCH_TILES
        and meetings * block_m * block_n * splits * 2 <= SCRATCH_SUMS
    ):
        splits *= 2
    return splits
