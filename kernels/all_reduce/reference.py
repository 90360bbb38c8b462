"""Sums over ranks, alone or with the residual addition and RMS norm after them: the torch specification.

A rank holds only its own part; these functions take the parts of all ranks. kernels/all_reduce/triton.py is the twin
that transfers them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.elementwise.reference import add_rms_norm


def sum_parts(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add every rank's part, [..., D] each, in rank order: fp32 inside, rounded once to their dtype."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total = total + part.float()
    return total.to(parts[0].dtype)


def sum_add_rms_norm(
    parts: Sequence[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the sum of the parts to the residual stream and normalise it: (normed, new_residual), like add_rms_norm."""
    return add_rms_norm(sum_parts(parts), residual, weight, eps)
