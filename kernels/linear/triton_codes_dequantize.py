# ruff: noqa: ANN001  (Triton reads annotations as types: kernel arguments carry none)
"""Codes (kernels/linear/quant_codes.py) as a dense matrix: for products of so many rows that cuBLAS pays for it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.linear.quant_bnb import BLOCK
from kernels.linear.quant_codes import LUT_PLANE, CodeWeight

_BLOCK_N = 32
_BLOCK = tl.constexpr(BLOCK)
_PLANE = tl.constexpr(LUT_PLANE)


def dequantize(weight: CodeWeight, dtype: torch.dtype) -> torch.Tensor:
    """See kernels.linear.quant_codes.dequantize."""
    n, k = weight.out_features, weight.in_features
    out = torch.empty(n, k, dtype=dtype, device=weight.packed.device)
    _dequantize_kernel[(weight.num_tiles, triton.cdiv(n, _BLOCK_N))](
        weight.packed.view(torch.int32), weight.scales, weight.table, out, n, k, BLOCK_N=_BLOCK_N, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _dequantize_kernel(words_ptr, scales_ptr, table_ptr, out_ptr, n, k, BLOCK_N: tl.constexpr) -> None:
    """One (tile of the packed codes, tile of outputs)."""
    HALF: tl.constexpr = _PLANE // 2
    t = tl.program_id(0)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = (outputs < n)[:, None]
    halves = tl.arange(0, HALF)
    words = tl.load(words_ptr + (t * n + outputs).to(tl.int64)[:, None] * HALF + halves[None, :], mask=in_n, other=0)
    for index in tl.static_range(4):
        start = (t * 4 + index) * _PLANE
        in_k = start < k  # k is a multiple of planes
        inputs = start + tl.arange(0, _PLANE)
        scales = tl.load(scales_ptr + (start // _BLOCK) * n + outputs, mask=(outputs < n) & in_k, other=0.0)
        codes = (words >> (8 * index)) & 255
        pairs = tl.interleave(tl.load(table_ptr + (codes >> 4)), tl.load(table_ptr + (codes & 15)))
        weights = pairs * scales[:, None]
        results = out_ptr + outputs.to(tl.int64)[:, None] * k + inputs[None, :]
        tl.store(results, weights.to(out_ptr.dtype.element_ty), mask=in_n & in_k)
