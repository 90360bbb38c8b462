"""num_splits: into how many parts a product's K is cut. SplitKScratch: the buffers in which the parts are summed.

For kernels/linear/triton_split_k.py. Without Triton, so that it is tested and read where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Capacity in fp32 sums of the scratch that the splits of one product share, and in tiles
SCRATCH_SUMS = 1 << 22
GEMV_SUMS = 1 << 20  # enough for every config of gemv_config
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


@dataclass(frozen=True)
class SplitKScratch:
    """Buffers in which the splits of a tile are summed. One per stream."""

    # [capacity] fp32: partial sums
    partial: torch.Tensor
    # [SCRATCH_TILES] int32: splits arrived per tile; zero between launches
    arrivals: torch.Tensor

    @classmethod
    def allocate(cls, device: torch.device, *, capacity: int = SCRATCH_SUMS) -> SplitKScratch:
        """Allocate capacity fp32 sums, by default enough for every config whose splits are of num_splits (16 MB)."""
        return cls(
            partial=torch.empty(capacity, dtype=torch.float32, device=device),
            arrivals=torch.zeros(SCRATCH_TILES, dtype=torch.int32, device=device),
        )

    def check(self, *, num_tiles: int, splits: int, tile_sums: int) -> None:
        """Assert that there is room for num_tiles tiles of tile_sums fp32 sums, each split in splits."""
        if splits > 1:
            assert num_tiles <= self.arrivals.shape[0]
            assert num_tiles * splits * tile_sums <= self.partial.shape[0]


class LazyScratch:
    """The scratch of one stream's products, which is allocated for the first of them."""

    def __init__(self, capacity: int = SCRATCH_SUMS) -> None:
        """capacity: see SplitKScratch."""
        self._capacity = capacity
        self._allocated: SplitKScratch | None = None

    def on(self, device: torch.device) -> SplitKScratch:
        """Return the scratch, which is on the device of the first call."""
        if self._allocated is None:
            self._allocated = SplitKScratch.allocate(device, capacity=self._capacity)
        return self._allocated
