# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""The weighted sum over each token's experts, in their order; alone, or with what comes behind it in one launch.

sum_experts_add_rms_norm adds it to the residual stream and norms that, for the next layer: a program for each token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.elementwise.triton import rms_normed, row_warps
from kernels.linear.rounding import RoundedRows, Rounding
from kernels.linear.triton_rounded import allocate_rounded, store_rounded
from kernels.moe.reference import ExpertSum
from kernels.moe.triton_common import add_shared, weigh


def sum_experts(late: ExpertSum, *, pdl: bool = False) -> torch.Tensor:
    """Equal kernels.moe.reference.sum_experts, in the order of each token's experts. outputs: contiguous."""
    num_tokens, top_k = late.weights.shape
    size = late.outputs.shape[1]
    out = torch.empty(num_tokens, size, dtype=late.outputs.dtype, device=late.outputs.device)
    block = min(1024, triton.next_power_of_2(size))
    _combine_kernel[(num_tokens, triton.cdiv(size, block))](
        *_arguments(late), out, *_strides(late), SIZE=size, BLOCK=block, TOP_K=top_k,
        HAS_SHARED=late.shared is not None, HAS_ABSENT=late.has_absent, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def sum_experts_add_rms_norm(
    late: ExpertSum,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rounding: Rounding | None,
    *,
    pdl: bool = False,
) -> tuple[torch.Tensor | RoundedRows, torch.Tensor]:
    """Equal kernels.moe.reference.sum_experts_add_rms_norm, and two launches bit for bit. residual: dense rows."""
    num_tokens, top_k = late.weights.shape
    size = late.outputs.shape[1]
    new_residual = torch.empty(num_tokens, size, dtype=late.outputs.dtype, device=late.outputs.device)
    normed = torch.empty_like(new_residual) if rounding is None else allocate_rounded(new_residual, size, rounding)
    values, scales = (normed, None) if isinstance(normed, torch.Tensor) else (normed.values, normed.scales)
    scale, columns = (None, None) if rounding is None else (rounding.scale, rounding.columns)
    block = triton.next_power_of_2(size)
    _combine_norm_kernel[(num_tokens,)](
        *_arguments(late), residual, weight, scale, values, scales, new_residual, *_strides(late),
        residual.stride(0), eps,
        SIZE=size, BLOCK=max(block, columns or 0), TOP_K=top_k, HAS_SHARED=late.shared is not None,
        HAS_ABSENT=late.has_absent, ROUNDS=rounding is not None, COLUMNS=columns or 0, IS_KNOWN=scale is not None,
        PDL=pdl, num_warps=row_warps(block), launch_pdl=pdl,
    )  # fmt: skip
    return normed, new_residual


def _arguments(late: ExpertSum) -> tuple[torch.Tensor | None, ...]:
    return late.outputs, late.weights, late.experts, late.shared, late.shared_gate


def _strides(late: ExpertSum) -> tuple[int, int]:
    return (
        0 if late.shared is None else late.shared.stride(0),
        0 if late.shared_gate is None else late.shared_gate.stride(0),
    )


@triton.jit
def _combine_kernel(
    outputs_ptr, weights_ptr, experts_ptr, shared_ptr, shared_gate_ptr, out_ptr, stride_shared, stride_gate,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_ABSENT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One part of one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    mixed = _mix(
        outputs_ptr, weights_ptr, experts_ptr, shared_ptr, shared_gate_ptr, stride_shared, stride_gate, token, columns,
        mask, SIZE, TOP_K, HAS_SHARED, HAS_ABSENT,
    )  # fmt: skip
    tl.store(out_ptr + token * SIZE + columns, mixed, mask=mask)


@triton.jit
def _combine_norm_kernel(
    outputs_ptr, weights_ptr, experts_ptr, shared_ptr, shared_gate_ptr, residual_ptr, weight_ptr, scale_ptr,
    normed_ptr, scales_ptr, sum_ptr, stride_shared, stride_gate, stride_residual, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_ABSENT: tl.constexpr,
    ROUNDS: tl.constexpr, COLUMNS: tl.constexpr, IS_KNOWN: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One token; see _rms_norm_kernel of kernels/elementwise/triton.py."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    residual = tl.load(residual_ptr + token * stride_residual + columns, mask=mask, other=0.0)
    x = _mix(
        outputs_ptr, weights_ptr, experts_ptr, shared_ptr, shared_gate_ptr, stride_shared, stride_gate, token, columns,
        mask, SIZE, TOP_K, HAS_SHARED, HAS_ABSENT,
    )  # fmt: skip
    x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(sum_ptr + token * SIZE + columns, x, mask=mask)
    normed = rms_normed(x, weight, eps, SIZE).to(x.dtype)
    if ROUNDS:
        store_rounded(
            normed.to(tl.float32), normed_ptr, scales_ptr, scale_ptr, token, 0, SIZE, BLOCK, COLUMNS, IS_KNOWN
        )  # fmt: skip
    else:
        tl.store(normed_ptr + token * SIZE + columns, normed, mask=mask)


@triton.jit
def _mix(
    outputs_ptr, weights_ptr, experts_ptr, shared_ptr, shared_gate_ptr, stride_shared, stride_gate, token, columns,
    mask, SIZE: tl.constexpr, TOP_K: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_ABSENT: tl.constexpr,
):  # fmt: skip
    """Some columns of a token's sum, rounded to the dtype of outputs; zeros where mask is False."""
    dtype: tl.constexpr = outputs_ptr.dtype.element_ty
    mixed = tl.zeros([columns.shape[0]], tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        is_here = mask
        if HAS_ABSENT:
            is_here = mask & (tl.load(experts_ptr + pair) >= 0)
        value = tl.load(outputs_ptr + pair * SIZE + columns, mask=is_here, other=0.0).to(tl.float32)
        value = weigh(value, tl.load(weights_ptr + pair), dtype)
        mixed += tl.where(is_here, value, 0.0) if HAS_ABSENT else value
    mixed = mixed.to(dtype)
    if HAS_SHARED:
        shared = tl.load(shared_ptr + token * stride_shared + columns, mask=mask, other=0.0)
        mixed = add_shared(mixed, shared, tl.load(shared_gate_ptr + token * stride_gate))
    return mixed
