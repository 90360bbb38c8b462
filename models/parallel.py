"""TensorParallel: this rank's index among the ranks that split one model, and the collectives that layers call.

Layers know only these names. With one rank each collective is a no-op, so model files need no branch on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import distributed

from kernels.moe.reference import ExpertSum
from kernels.ops import sum_experts

try:
    from torch.distributed import all_gather_single as all_gather_into
except ImportError:  # before torch 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_into


class OneShotAllReduce(Protocol):
    """All-reduce of small tensors, fused with the kernel that follows it. See kernels/all_reduce/triton.py."""

    def takes(self, x: torch.Tensor) -> bool:
        """Return True if this object can reduce x; decided from host-side facts, the same on every rank."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over the ranks, in place, and return it. Requires takes(x)."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply kernels.elementwise.reference.add_rms_norm to the sum of x over the ranks. Requires takes(x)."""


@dataclass(frozen=True)
class TensorParallel:
    """Rank `rank` of `size`. group: the process group of its collectives.

    group None with size > 1: no communication, other ranks' values are made up; for measuring sizes and precompiling.
    one_shot_all_reduce: reduces the tensors that it takes; None: the group reduces all. All ranks have one, or none.
    is_expert_parallel: each rank has some of the experts, whole, instead of a part of each expert.
    """

    rank: int = 0
    size: int = 1
    group: distributed.ProcessGroup | None = None
    one_shot_all_reduce: OneShotAllReduce | None = field(default=None, repr=False)
    is_expert_parallel: bool = False

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size

    def share_of_experts(self, num_experts: int) -> ExpertShare:
        """Return this rank's share of a layer's experts. Whole ones are divided as evenly as their number allows."""
        if not self.is_expert_parallel:
            return ExpertShare(num_experts, range(num_experts), self.rank, self.size)
        start, stop = (rank * num_experts // self.size for rank in (self.rank, self.rank + 1))
        return ExpertShare(num_experts, range(start, stop))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over the ranks, in place, and return it."""
        if self.one_shot_all_reduce is not None and self.one_shot_all_reduce.takes(x):
            return self.one_shot_all_reduce.all_reduce(x)
        if self.group is not None:
            distributed.all_reduce(x, group=self.group)
        return x

    def sum_late(self, x: torch.Tensor) -> LayerOutput:
        """Return all_reduce(x), or a PartialSum if the addition and norm after it can be fused with the all-reduce."""
        if self.one_shot_all_reduce is not None and self.one_shot_all_reduce.takes(x):
            return PartialSum(x, self.one_shot_all_reduce)
        return self.all_reduce(x)

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Concatenate every rank's x (equal shapes) along dim, in rank order."""
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
        """Overwrite x with the x of rank src, in place, and return it. src counts within the group."""
        if self.group is not None:
            distributed.broadcast(x, group=self.group, group_src=src)
        return x


@dataclass(frozen=True)
class ExpertShare:
    """A rank's share of a layer's experts: some of them whole, or part `rank` of `size` of each one's inner size."""

    num_experts: int  # of all ranks
    here: range  # those of which this rank has weights
    rank: int = 0
    size: int = 1

    def cut(self, dim: int, length: int) -> tuple[int, int, int]:
        """Return (dim, start, stop): what this rank reads of a tensor of all experts, which come along dimension 0.

        dim, length: the dimension along which parts of experts are cut, and its length in the checkpoint.
        """
        if len(self.here) < self.num_experts:
            return 0, self.here.start, self.here.stop
        width = length // self.size
        return dim, self.rank * width, (self.rank + 1) * width


@dataclass(frozen=True)
class PartialSum:
    """The output of a branch before the sum over ranks. Its consumer computes the sum once, by one of two methods."""

    # [T, hidden_size]: this rank's part; owned by this object
    part: torch.Tensor
    sums: OneShotAllReduce

    def __mul__(self, factor: float) -> PartialSum:
        """Return the partial sum times a constant."""
        return PartialSum(self.part * factor, self.sums)

    def total(self) -> torch.Tensor:
        """Compute the sum, in place of the part."""
        return self.sums.all_reduce(self.part)

    def add_rms_norm(
        self, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the sum, add it to the residual stream and normalise that: (normed, new residual)."""
        return self.sums.add_rms_norm(self.part, residual, weight, eps)


@dataclass(frozen=True)
class LateExperts:
    """The output of a mixture of experts before the sum over each token's, which its consumer computes once."""

    experts: ExpertSum

    def __mul__(self, factor: float) -> torch.Tensor:
        """Return the sum times a constant."""
        return self.total() * factor

    def total(self) -> torch.Tensor:
        """Compute the sum, [T, hidden_size]."""
        return sum_experts(self.experts)


LayerOutput = torch.Tensor | PartialSum | LateExperts  # the output of attention and MLP


def whole(branch: LayerOutput) -> torch.Tensor:
    """Return the branch's output, summed over the ranks and over experts."""
    return branch if isinstance(branch, torch.Tensor) else branch.total()


ALONE = TensorParallel()
