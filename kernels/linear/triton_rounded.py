# ruff: noqa: ANN001  (Triton reads annotations as types: kernel arguments carry none)
"""Triton twins of kernels/linear/rounding.py: a norm and a gated activation that write 8 bits for a product.

Each equals the twin of its op followed by the twin of the rounding, bit for bit: the row is rounded to its dtype first.
Needs Ada, Hopper or later for e4m3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.elementwise.triton import gate_and_mul, gated, rms_normed, row_warps
from kernels.linear.rounding import RoundedRows, Rounding
from kernels.linear.triton_fp8 import larger, quantize_rows, scale_of, signals_first, to_e4m3, wait_for_rows
from kernels.linear.triton_scaled8 import int8_scale_of, quantize_rows_int8, to_int8

_MAX_ROW = 16_384  # values of a row that one program holds
_PIECE = 1024  # values of a part of a row, where the scales do not depend on the whole


def add_rms_norm_rounded(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rounding: Rounding,
    *,
    pdl: bool = False,
) -> tuple[RoundedRows, torch.Tensor]:
    """See kernels.linear.rounding.add_rms_norm_rounded. x, residual: last dimension dense."""
    num_rows, size = x.shape
    rounded = allocate_rounded(x, size, rounding)
    new_residual = torch.empty_like(x, memory_format=torch.contiguous_format)
    block = triton.next_power_of_2(size)
    _add_rms_norm_kernel[(num_rows,)](
        x, residual, weight, rounding.scale, rounded.values, rounded.scales, new_residual,
        x.stride(0), residual.stride(0), eps,
        SIZE=size, BLOCK=max(block, rounding.columns or 0), COLUMNS=rounding.columns or 0,
        IS_KNOWN=rounding.scale is not None, PDL=pdl,
        EARLY=signals_first(x, size, columns=rounding.columns), num_warps=row_warps(block), launch_pdl=pdl,
    )  # fmt: skip
    return rounded, new_residual


def gate_and_mul_rounded(x: torch.Tensor, rounding: Rounding, *, is_gelu: bool, pdl: bool = False) -> RoundedRows:
    """See kernels.linear.rounding.gate_and_mul_rounded. x: last dimension dense."""
    num_rows, size = x.shape[0], x.shape[1] // 2
    needs_row = rounding.columns is None and rounding.scale is None
    if needs_row and size > _MAX_ROW:
        quantize = quantize_rows_int8 if rounding.dtype == torch.int8 else quantize_rows
        values, scales = quantize(gate_and_mul(x, is_gelu=is_gelu, pdl=pdl), pdl=pdl)
        return RoundedRows(values, scales, x.dtype)
    rounded = allocate_rounded(x, size, rounding)
    block = triton.next_power_of_2(size)
    if not needs_row:
        block = max(min(block, _PIECE), rounding.columns or 0)
    _gate_and_mul_kernel[(num_rows, triton.cdiv(size, block))](
        x, rounding.scale, rounded.values, rounded.scales, x.stride(0),
        SIZE=size, BLOCK=block, COLUMNS=rounding.columns or 0, IS_KNOWN=rounding.scale is not None, IS_GELU=is_gelu,
        PDL=pdl, EARLY=signals_first(x, size, columns=rounding.columns),
        num_warps=row_warps(block) if needs_row else 4, launch_pdl=pdl,
    )  # fmt: skip
    return rounded


def allocate_rounded(x: torch.Tensor, size: int, rounding: Rounding) -> RoundedRows:
    """Allocate rounded rows of `size` values, one for each row of x."""
    num_rows = x.shape[0]
    shape = (num_rows,) if rounding.columns is None else (num_rows, triton.cdiv(size, rounding.columns))
    values = torch.empty(num_rows, size, dtype=rounding.dtype, device=x.device)
    return RoundedRows(values, torch.empty(shape, dtype=torch.float32, device=x.device), x.dtype)


@triton.jit
def _add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, scale_ptr, values_ptr, scales_ptr, sum_ptr, stride_x, stride_residual, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, IS_KNOWN: tl.constexpr, PDL: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One row; see _rms_norm_kernel of kernels/elementwise/triton.py."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    if PDL:
        wait_for_rows(EARLY)
    x = tl.load(x_ptr + row * stride_x + columns, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + row * stride_residual + columns, mask=mask, other=0.0)
    x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(sum_ptr + row * SIZE + columns, x, mask=mask)
    normed = rms_normed(x, weight, eps, SIZE).to(x.dtype).to(tl.float32)
    store_rounded(normed, values_ptr, scales_ptr, scale_ptr, row, 0, SIZE, BLOCK, COLUMNS, IS_KNOWN)


@triton.jit
def _gate_and_mul_kernel(
    x_ptr, scale_ptr, values_ptr, scales_ptr, stride_x,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, IS_KNOWN: tl.constexpr, IS_GELU: tl.constexpr,
    PDL: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One part of one row, or all of it."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = piece * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    if PDL:
        wait_for_rows(EARLY)
    gate = tl.load(x_ptr + row * stride_x + columns, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * stride_x + SIZE + columns, mask=mask, other=0.0)
    product = gated(gate, up, IS_GELU).to(gate.dtype).to(tl.float32)
    store_rounded(product, values_ptr, scales_ptr, scale_ptr, row, piece, SIZE, BLOCK, COLUMNS, IS_KNOWN)


@triton.jit
def store_rounded(
    x, values_ptr, scales_ptr, scale_ptr, row, piece,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, IS_KNOWN: tl.constexpr,
) -> None:  # fmt: skip
    """Round and store part `piece` of a row, [BLOCK] fp32, zeros beyond the row."""
    columns = piece * BLOCK + tl.arange(0, BLOCK)
    if values_ptr.dtype.element_ty == tl.int8:
        scale = tl.load(scale_ptr) if IS_KNOWN else int8_scale_of(tl.reduce(tl.abs(x), 0, larger))
        values = to_int8(x, scale)
        tl.store(scales_ptr + row, scale, mask=piece == 0)
    elif COLUMNS > 0:
        runs = tl.reshape(x, [BLOCK // COLUMNS, COLUMNS])
        scales = scale_of(tl.reduce(tl.abs(runs), 1, larger))
        values = tl.reshape(to_e4m3(runs, scales[:, None]), [BLOCK])
        num_runs: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
        places = piece * (BLOCK // COLUMNS) + tl.arange(0, BLOCK // COLUMNS)
        tl.store(scales_ptr + row * num_runs + places, scales, mask=places < num_runs)
    else:
        scale = tl.load(scale_ptr) if IS_KNOWN else scale_of(tl.reduce(tl.abs(x), 0, larger))
        values = to_e4m3(x, scale)
        tl.store(scales_ptr + row, scale, mask=piece == 0)
    tl.store(values_ptr + row * SIZE + columns, values, mask=columns < SIZE)
