"""The products with bitsandbytes's matrices that models call; each picks its Triton twin for few rows on CUDA.

Specification: kernels/linear/quant_codes.py and quant_bnb.py. For many rows the matrix is made dense for the time of
the
product: cuBLAS then takes longer than that.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from kernels.dispatch import HAS_TRITON, has_pdl, on_triton
from kernels.linear import quant_bnb, quant_codes
from kernels.linear.lut4_configs import codes_gemm_config
from kernels.linear.quant_codes import CodeWeight

if HAS_TRITON:
    from kernels.linear import triton_bitsandbytes as triton_quant_bnb
    from kernels.linear import triton_codes_dequantize
    from kernels.linear import triton_lut4 as triton_codes_gemm
    from kernels.linear.triton_split_k import SplitKScratch


class Linear4Bit:
    """See kernels.linear.quant_codes.codes_linear. Looks codes up on the way, or once for cuBLAS. Owns scratch: one
    stream."""

    def __init__(self) -> None:
        self._scratch: SplitKScratch | None = None

    def __call__(self, x: torch.Tensor, weight: CodeWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """x: [T, K]; bias: [N] or None; returns [T, N]."""
        if not on_triton(x):
            return quant_codes.codes_linear(x, weight, bias)
        config = None
        if triton_codes_gemm.can_codes_gemm(x, weight):
            config = codes_gemm_config(
                num_rows=x.shape[0], n=weight.out_features, k=weight.in_features, is_shared=_is_hopper(x.device)
            )
        if config is None:
            return functional.linear(x, triton_codes_dequantize.dequantize(weight, x.dtype), bias)
        if self._scratch is None:
            self._scratch = triton_codes_gemm.allocate_scratch(x.device)
        return triton_codes_gemm.codes_gemm(x, weight, bias, self._scratch, config=config, pdl=has_pdl(x.device))


def linear_int8(
    x: torch.Tensor, values: torch.Tensor, largest: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """See kernels.linear.quant_bnb.linear_int8."""
    if not on_triton(x):
        return quant_bnb.linear_int8(x, values, largest, bias)
    if x.dtype in (torch.bfloat16, torch.float16) and x.shape[0] <= triton_quant_bnb.MAX_ROWS:
        return triton_quant_bnb.linear_int8(x, values, largest, bias, pdl=has_pdl(x.device))
    return functional.linear(x, triton_quant_bnb.dequantize_int8(values, largest, x.dtype), bias)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    """Whether the lookups in PTX were tried there."""
    return torch.cuda.get_device_capability(device)[0] == 9
