# ruff: noqa: ANN001  (Triton reads annotations as types: kernel arguments carry none)
"""Integer weights (kernels/linear/reference.py) as a dense matrix: for products of so many rows that cuBLAS pays for
it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.linear.reference import PLANE, IntWeight

_BLOCK_N = 64


def dequantize(weight: IntWeight, dtype: torch.dtype) -> torch.Tensor:
    """See kernels.linear.reference.dequantize."""
    num_tiles, n, _ = weight.packed.shape
    out = torch.empty(n, weight.in_features, dtype=dtype, device=weight.packed.device)
    _dequantize_kernel[(num_tiles, triton.cdiv(n, _BLOCK_N))](
        weight.packed, weight.groups, out, n, weight.in_features, weight.group_size,
        BLOCK_N=_BLOCK_N, PLANE=PLANE, BITS=weight.bits, SCALES_BF16=weight.scale_dtype == torch.bfloat16, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _dequantize_kernel(
    packed_ptr, groups_ptr, out_ptr, n, k, group_size,
    BLOCK_N: tl.constexpr, PLANE: tl.constexpr, BITS: tl.constexpr, SCALES_BF16: tl.constexpr,
) -> None:  # fmt: skip
    """One (tile of the packed weights, tile of outputs)."""
    PLANES: tl.constexpr = 16 // BITS
    t = tl.program_id(0)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = (outputs < n)[:, None]
    offsets = tl.arange(0, PLANE)
    word_ptrs = packed_ptr + (t * n + outputs).to(tl.int64)[:, None] * PLANE + offsets[None, :]
    words = tl.load(word_ptrs, mask=in_n, other=0)
    for index in tl.static_range(PLANES):
        inputs = (t * PLANES + index) * PLANE + offsets
        mask = in_n & (inputs < k)[None, :]
        # By input, not by plane: a group may be narrower
        groups = tl.load(groups_ptr + (inputs // group_size)[None, :] * n + outputs[:, None], mask=mask, other=0)
        scales = groups.to(tl.int16).to(tl.bfloat16 if SCALES_BF16 else tl.float16, bitcast=True).to(tl.float32)
        codes = (words.to(tl.int32) >> (index * BITS)) & ((1 << BITS) - 1)
        weights = (codes - (groups >> 16)).to(tl.float32) * scales
        results = out_ptr + outputs.to(tl.int64)[:, None] * k + inputs[None, :]
        tl.store(results, weights.to(out_ptr.dtype.element_ty), mask=mask)
