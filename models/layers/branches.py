"""Branches of a layer (attention or an MLP) with something behind them, before they join the residual stream."""

from __future__ import annotations

import torch
from torch import nn

from kernels.linear.late_norm import LateNorm
from kernels.linear.rounding import RoundedRows, Rounding
from models.context import ForwardContext
from models.layers.norm import wanted_by
from models.parallel import LayerOutput, whole


class _Wrapper(nn.Module):
    """A branch with something behind it, which wants its input as the branch does."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    @property
    def rounding(self) -> Rounding | None:
        """How the norm before may round the hidden states."""
        return wanted_by(self.branch).rounding

    def takes_norm(self, hidden: torch.Tensor) -> bool:
        """Return True if the addition of hidden to the residual stream and its norm are better left to the branch."""
        takes_norm = wanted_by(self.branch).takes_norm
        return takes_norm is not None and takes_norm(hidden)


class Scaled(_Wrapper):
    """A branch whose output is multiplied by a constant."""

    def __init__(self, branch: nn.Module, factor: float) -> None:
        super().__init__(branch)
        self.factor = factor

    def forward(self, hidden: torch.Tensor | RoundedRows | LateNorm, *ctx: ForwardContext) -> LayerOutput:
        """hidden: [T, hidden_size] → [T, hidden_size]; ctx: passed on if the branch takes it."""
        return self.branch(hidden, *ctx) * self.factor


class Normed(_Wrapper):
    """A branch with a norm after it."""

    def __init__(self, branch: nn.Module, norm: nn.Module) -> None:
        super().__init__(branch)
        self.norm = norm

    def forward(self, hidden: torch.Tensor | RoundedRows | LateNorm, *ctx: ForwardContext) -> torch.Tensor:
        """hidden: [T, hidden_size] → [T, hidden_size]; ctx: passed on if the branch takes it."""
        return self.norm(whole(self.branch(hidden, *ctx)))
