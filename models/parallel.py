"""TensorParallel: this rank's place among the ranks that split one model, and the collectives layers need.

Layers call these by name and know no more; with one rank each is a no-op, so a model file has no branch on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import distributed

try:
    from torch.distributed import all_gather_single as all_gather_into
except ImportError:  # before torch 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_into


class OneShotAllReduce(Protocol):
    """Sums of few rows, each in one kernel with what comes behind it. kernels/all_reduce/triton.py, specification
    too."""

    def takes(self, x: torch.Tensor) -> bool:
        """Whether a sum of such parts is made here; by host-side facts, the same on every rank."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over the ranks, in place, and return it. takes(x)."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """kernels.elementwise.reference.add_rms_norm of the sum of x over the ranks. takes(x)."""


@dataclass(frozen=True)
class TensorParallel:
    """Rank `rank` of `size`. group: the process group over which it talks.

    None with several ranks: it talks to nobody, and what others have is made up: for sizes, and to precompile kernels.
    one_shot_all_reduce: makes the sums that it takes; None: the group makes all. Every rank has one, or none has.
    """

    rank: int = 0
    size: int = 1
    group: distributed.ProcessGroup | None = None
    one_shot_all_reduce: OneShotAllReduce | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over the ranks, in place, and return it."""
        if self.one_shot_all_reduce is not None and self.one_shot_all_reduce.takes(x):
            return self.one_shot_all_reduce.all_reduce(x)
        if self.group is not None:
            distributed.all_reduce(x, group=self.group)
        return x

    def sum_late(self, x: torch.Tensor) -> LayerOutput:
        """all_reduce(x), or the promise of it, where that is one kernel with an addition and a norm."""
        if self.one_shot_all_reduce is not None and self.one_shot_all_reduce.takes(x):
            return PartialSum(x, self.one_shot_all_reduce)
        return self.all_reduce(x)

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


@dataclass(frozen=True)
class PartialSum:
    """The output of a branch before the sum over ranks: whoever takes it in makes the sum, once, in one of two ways."""

    # [T, hidden_size]: this rank's part; its owner now
    part: torch.Tensor
    sums: OneShotAllReduce

    def __mul__(self, factor: float) -> PartialSum:
        """The same times a constant."""
        return PartialSum(self.part * factor, self.sums)

    def total(self) -> torch.Tensor:
        """Make the sum, in place of the part."""
        return self.sums.all_reduce(self.part)

    def add_rms_norm(
        self, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the sum, add it to the residual stream and norm that: (normed, new residual)."""
        return self.sums.add_rms_norm(self.part, residual, weight, eps)


LayerOutput = torch.Tensor | PartialSum  # what attention and MLP give


def whole(branch: LayerOutput) -> torch.Tensor:
    """The branch's output, summed over the ranks."""
    return branch.total() if isinstance(branch, PartialSum) else branch


ALONE = TensorParallel()
