"""The products with bitsandbytes's matrices that models call; each picks its Triton twin for few rows on CUDA.

Specification: kernels/quant_bnb.py. For many rows the matrix is made dense for the time of the product: cuBLAS then
takes longer than that.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from kernels import quant_bnb

try:
    from kernels import triton_quant_bnb

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

# Rows of x up to which looking up codes for each product costs no more than making the matrix dense on an H100
_FEW_ROWS_4BIT = 8


def linear_4bit(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    table: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    rounded_table: torch.Tensor,
) -> torch.Tensor:
    """See kernels.quant_bnb.linear_4bit. rounded_table: the table in x's dtype."""
    if not (HAS_TRITON and x.is_cuda):
        return quant_bnb.linear_4bit(x, packed, scales, table, bias)
    if _streams(x, _FEW_ROWS_4BIT):
        return triton_quant_bnb.linear_4bit(x, packed, scales, rounded_table, bias, pdl=_has_pdl(x.device))
    return functional.linear(x, triton_quant_bnb.dequantize_4bit(packed, scales, table, x.dtype), bias)


def linear_int8(
    x: torch.Tensor, values: torch.Tensor, largest: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """See kernels.quant_bnb.linear_int8."""
    if not (HAS_TRITON and x.is_cuda):
        return quant_bnb.linear_int8(x, values, largest, bias)
    if _streams(x, triton_quant_bnb.MAX_ROWS):
        return triton_quant_bnb.linear_int8(x, values, largest, bias, pdl=_has_pdl(x.device))
    return functional.linear(x, triton_quant_bnb.dequantize_int8(values, largest, x.dtype), bias)


def _streams(x: torch.Tensor, most: int) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16) and x.shape[0] <= most


@functools.cache
def _has_pdl(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
