"""RMS norm, alone or fused with the residual addition before it."""

from __future__ import annotations

import torch
from torch import nn

from kernels.ops import add_rms_norm, rms_norm
from models.weights import Weights


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, replicated on every rank."""

    def __init__(self, w: Weights, name: str, *, size: int, eps: float) -> None:
        super().__init__()
        self.weight = (w / name).tensor("weight", (size,))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size] → normed, of the same shape."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x to the residual stream and norm the sum: (normed, new residual), each [..., size]."""
        return add_rms_norm(x, residual, self.weight, self.eps)
