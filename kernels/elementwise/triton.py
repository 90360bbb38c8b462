# ruff: noqa: ANN001, ANN201  (Triton reads annotations as types: kernel arguments carry none)
"""Triton twins of the row-wise ops of kernels/elementwise/reference.py: norms and activations.

Each equals the composition of its torch specifications, rounding step by rounding step. All are limited by memory or,
for few tokens, by launch latency: one program per row or per few heads. `pdl` launches a kernel early, under the
previous one (Hopper's programmatic dependent launch); it must then run on the stream that produced its inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None, pdl: bool = False
) -> torch.Tensor:
    """Equal elementwise.rms_norm. x: [..., D], last dimension dense, the others flattenable; out: contiguous."""
    rows = x.view(-1, x.shape[-1])
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    block = triton.next_power_of_2(rows.shape[1])
    _rms_norm_kernel[(rows.shape[0],)](
        rows, None, weight, out, None, rows.stride(0), 0, eps,
        SIZE=rows.shape[1], BLOCK=block, HAS_RESIDUAL=False, PDL=pdl, num_warps=row_warps(block), launch_pdl=pdl,
    )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Equal elementwise.add_rms_norm: (normed, new_residual), both new and contiguous."""
    rows, residual_rows = x.view(-1, x.shape[-1]), residual.view(-1, x.shape[-1])
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    new_residual = torch.empty_like(x, memory_format=torch.contiguous_format)
    block = triton.next_power_of_2(rows.shape[1])
    _rms_norm_kernel[(rows.shape[0],)](
        rows, residual_rows, weight, normed, new_residual, rows.stride(0), residual_rows.stride(0), eps,
        SIZE=rows.shape[1], BLOCK=block, HAS_RESIDUAL=True, PDL=pdl, num_warps=row_warps(block), launch_pdl=pdl,
    )  # fmt: skip
    return normed, new_residual


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, *, pdl: bool = False
) -> torch.Tensor:
    """Equal elementwise.layer_norm. x: [..., D], last dimension dense, the others flattenable."""
    rows = x.view(-1, x.shape[-1])
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block = triton.next_power_of_2(rows.shape[1])
    _layer_norm_kernel[(rows.shape[0],)](
        rows, None, weight, bias, out, None, rows.stride(0), 0, eps, SIZE=rows.shape[1], BLOCK=block,
        HAS_RESIDUAL=False, HAS_BIAS=bias is not None, PDL=pdl, num_warps=row_warps(block), launch_pdl=pdl,
    )  # fmt: skip
    return out


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Equal elementwise.add_layer_norm: (normed, new_residual), both new and contiguous."""
    rows, residual_rows = x.view(-1, x.shape[-1]), residual.view(-1, x.shape[-1])
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    new_residual = torch.empty_like(x, memory_format=torch.contiguous_format)
    block = triton.next_power_of_2(rows.shape[1])
    _layer_norm_kernel[(rows.shape[0],)](
        rows, residual_rows, weight, bias, normed, new_residual, rows.stride(0), residual_rows.stride(0), eps,
        SIZE=rows.shape[1], BLOCK=block, HAS_RESIDUAL=True, HAS_BIAS=bias is not None, PDL=pdl,
        num_warps=row_warps(block), launch_pdl=pdl,
    )  # fmt: skip
    return normed, new_residual


def relu_squared(x: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """Equal elementwise.relu_squared. x: [T, I]; copied if it is not contiguous."""
    return _activate(x, None, pdl=pdl)


def xielu(x: torch.Tensor, constants: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """Equal elementwise.xielu. x: [T, I]; copied if it is not contiguous."""
    return _activate(x, constants, pdl=pdl)


def silu_and_mul(x: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """Equal elementwise.silu_and_mul. x: [T, 2 * I], last dimension dense; returns [T, I]."""
    return gate_and_mul(x, is_gelu=False, pdl=pdl)


def gelu_tanh_and_mul(x: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """Equal elementwise.gelu_tanh_and_mul. x: [T, 2 * I], last dimension dense; returns [T, I]."""
    return gate_and_mul(x, is_gelu=True, pdl=pdl)


def gate_and_mul(x: torch.Tensor, *, is_gelu: bool, pdl: bool) -> torch.Tensor:
    """Compute silu_and_mul, or gelu_tanh_and_mul."""
    num_tokens, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(size))
    _gate_and_mul_kernel[(num_tokens, triton.cdiv(size, block))](
        x, out, x.stride(0), SIZE=size, BLOCK=block, IS_GELU=is_gelu, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return out


def _activate(x: torch.Tensor, constants: torch.Tensor | None, *, pdl: bool) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    _activate_kernel[(triton.cdiv(x.numel(), 1024),)](
        x, constants, out, x.numel(), BLOCK=1024, IS_XIELU=constants is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
        enable_fp_fusion=False,  # as in norm_rope_write_kv
    )  # fmt: skip
    return out


def row_warps(block: int) -> int:
    """Return the warps that give each thread one 16-byte load of bf16, if possible."""
    return min(16, max(1, block // 256))


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, normed_ptr, sum_ptr, stride_x, stride_residual, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One row. The weight does not depend on the previous kernel, so it is loaded before the wait."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row * stride_x + columns, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * stride_residual + columns, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * SIZE + columns, x, mask=mask)
    product = rms_normed(x, weight, eps, SIZE)
    tl.store(normed_ptr + row * SIZE + columns, product.to(normed_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rms_normed(x, weight, eps, SIZE: tl.constexpr):
    """A row of SIZE values and zeros behind them, normed, in fp32."""
    x_fp32 = x.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x_fp32 * x_fp32, 0) / SIZE + eps)
    normed = (x_fp32 * inverse_rms).to(weight.dtype)
    return weight.to(tl.float32) * normed.to(tl.float32)


@triton.jit
def _layer_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, normed_ptr, sum_ptr, stride_x, stride_residual, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One row. As _rms_norm_kernel."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    bias = tl.load(bias_ptr + columns, mask=mask, other=0.0) if HAS_BIAS else weight
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row * stride_x + columns, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * stride_residual + columns, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * SIZE + columns, x, mask=mask)
    x_fp32 = x.to(tl.float32)
    centred = tl.where(mask, x_fp32 - tl.sum(x_fp32, 0) / SIZE, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / SIZE + eps) * weight
    if HAS_BIAS:
        normed += bias
    tl.store(normed_ptr + row * SIZE + columns, normed.to(normed_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _activate_kernel(
    x_ptr, constants_ptr, out_ptr, num_values, BLOCK: tl.constexpr, IS_XIELU: tl.constexpr, PDL: tl.constexpr
) -> None:  # fmt: skip
    """One part of all values. xIELU rounds after each op, as its specification."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < num_values
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + places, mask=mask, other=0.0)
    dtype = x.dtype
    value = x.to(tl.float32)
    if IS_XIELU:
        above = tl.load(constants_ptr).to(tl.float32)
        below = tl.load(constants_ptr + 1).to(tl.float32)
        slope = tl.load(constants_ptr + 2).to(tl.float32)
        least = tl.load(constants_ptr + 3).to(tl.float32)
        linear = round_to(slope * value, dtype)
        positive = round_to(round_to(above * value, dtype) * value, dtype) + linear
        power = tl.minimum(value, least)
        # Near 0 exp(x) - 1 cancels: there its series to the fifth power is exact to fp32
        series = power * (1 + power / 2 * (1 + power / 3 * (1 + power / 4 * (1 + power / 5))))
        powers = tl.where(power > -0.06, series, tl.exp(power) - 1.0)
        negative = round_to(round_to(round_to(powers, dtype) - value, dtype) * below, dtype) + linear
        out = tl.where(value > 0, positive, negative)
    else:
        kept = tl.where(value < 0, 0.0, value)  # relu of NaN is NaN
        out = kept * kept
    tl.store(out_ptr + places, out.to(dtype), mask=mask)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Round to dtype, in fp32: torch rounds after each op."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def _gate_and_mul_kernel(
    x_ptr, out_ptr, stride_x, SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_GELU: tl.constexpr, PDL: tl.constexpr
) -> None:  # fmt: skip
    """One part of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(x_ptr + row * stride_x + columns, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * stride_x + SIZE + columns, mask=mask, other=0.0)
    tl.store(out_ptr + row * SIZE + columns, gated(gate, up, IS_GELU).to(gate.dtype), mask=mask)


@triton.jit
def gated(gate, up, IS_GELU: tl.constexpr):
    """The activation of gate, rounded to its dtype, times up, in fp32."""
    gate_fp32 = gate.to(tl.float32)
    logit = gate_fp32
    if IS_GELU:  # (1 + tanh(u)) / 2 is the sigmoid of 2 * u; the factor is 2 * sqrt(2 / pi)
        logit = 1.5957691216057308 * (gate_fp32 + 0.044715 * gate_fp32 * gate_fp32 * gate_fp32)
    activated = (gate_fp32 / (1.0 + tl.exp(-logit))).to(gate.dtype)
    return activated.to(tl.float32) * up.to(tl.float32)
