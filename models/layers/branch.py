"""What some models do to the output of attention or MLP before it joins the residual stream."""

from __future__ import annotations

import torch
from torch import nn

from models.context import ForwardContext
from models.layers.norm import RMSNorm
from models.parallel import Branch, whole


class Scaled(nn.Module):
    """A branch times a constant."""

    def __init__(self, branch: nn.Module, factor: float) -> None:
        super().__init__()
        self.branch = branch
        self.factor = factor

    def forward(self, hidden: torch.Tensor, *ctx: ForwardContext) -> Branch:
        """hidden: [T, hidden_size] → [T, hidden_size]; ctx: if the branch takes it."""
        return self.branch(hidden, *ctx) * self.factor


class Normed(nn.Module):
    """A branch with a norm behind it."""

    def __init__(self, branch: nn.Module, norm: RMSNorm) -> None:
        super().__init__()
        self.branch = branch
        self.norm = norm

    def forward(self, hidden: torch.Tensor, *ctx: ForwardContext) -> torch.Tensor:
        """hidden: [T, hidden_size] → [T, hidden_size]; ctx: if the branch takes it."""
        return self.norm(whole(self.branch(hidden, *ctx)))
