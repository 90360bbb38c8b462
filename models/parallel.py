"""TensorParallel: this rank's place among the ranks that split one model, and the collectives layers need.

Layers call these by name and know no more; with one rank each is a no-op, so a model file has no branch on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import distributed

try:
    from torch.distributed import all_gather_single as all_gather_into
except ImportError:  # before torch 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_into


@dataclass(frozen=True)
class TensorParallel:
    """Rank `rank` of `size`. group: the process group over which it talks.

    None with several ranks: it talks to nobody, and what others have is made up: for sizes, and to rehearse kernels.
    """

    rank: int = 0
    size: int = 1
    group: distributed.ProcessGroup | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over the ranks, in place, and return it."""
        if self.group is not None:
            distributed.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Concatenate every rank's x (of one shape) along dim, in rank order."""
        if self.size == 1:
            return x
        dim = dim % x.dim()
        gathered = x.new_empty(self.size, *x.shape)
        if self.group is None:
            gathered.copy_(x)
        else:
            all_gather_into(gathered.flatten(0, 1), x.contiguous(), group=self.group)
        return gathered.movedim(0, dim).flatten(dim, dim + 1)

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrite x with rank src's, in place, and return it. src counts within the group."""
        if self.group is not None:
            distributed.broadcast(x, group=self.group, group_src=src)
        return x


ALONE = TensorParallel()
