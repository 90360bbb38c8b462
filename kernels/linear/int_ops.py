"""Products with integer weights, as models call them: Triton on CUDA, else torch. See kernels/linear/reference.py."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.dispatch import HAS_TRITON, has_pdl, on_triton
from kernels.linear import reference as quant_int
from kernels.linear.reference import IntWeight

if HAS_TRITON:
    from kernels.linear import triton_int as triton_int_gemm
    from kernels.linear import triton_int_dequantize
    from kernels.linear.triton_split_k import SplitKScratch


class IntLinear:
    """See kernels.linear.reference.int_linear. Dequantises in registers, or once for cuBLAS. Owns scratch: one
    stream."""

    def __init__(self) -> None:
        self._scratch: SplitKScratch | None = None

    def __call__(self, x: torch.Tensor, weight: IntWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """x: [T, K]; bias: [N] or None; returns [T, N]."""
        if not on_triton(x):
            return quant_int.int_linear(x, weight, bias)
        if weight.order is not None:
            x = x.index_select(1, weight.order)
        if not triton_int_gemm.can_int_gemm(x, weight):
            return functional.linear(x, triton_int_dequantize.dequantize(weight, x.dtype), bias)
        if self._scratch is None:
            self._scratch = triton_int_gemm.allocate_scratch(x.device)
        return triton_int_gemm.int_gemm(x, weight, bias, self._scratch, pdl=has_pdl(x.device))
