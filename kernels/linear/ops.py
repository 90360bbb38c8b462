"""DenseLinear: products of 16- and 32-bit matrices. Imports Triton only where it is."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.dispatch import HAS_TRITON, has_pdl, on_triton

if HAS_TRITON:
    from kernels.linear.triton_gemv import allocate_scratch, can_gemv, gemv
    from kernels.linear.triton_split_k import SplitKScratch


class DenseLinear:
    """x @ w.T + bias: cuBLAS, or the skinny GEMM where that measured faster. Owns the latter's scratch: one stream."""

    def __init__(self) -> None:
        self._scratch: SplitKScratch | None = None

    def __call__(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x: [T, K]; w: [N, K]; bias: [N] or None; returns [T, N]."""
        if not (on_triton(x) and can_gemv(x, w)):
            return functional.linear(x, w, bias)
        if self._scratch is None:
            self._scratch = allocate_scratch(x.device)
        return gemv(x, w, bias, self._scratch, pdl=has_pdl(x.device))
