# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)
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
from kernels.linear.triton_fp8 import (
    larger,
    quantize_rows,
    quotient,
    scale_of,
    signals_first,
    to_e4m3,
    to_e4m3_by_largest,
    wait_for_rows,
)
from kernels.linear.triton_scaled8 import int8_scale_of, quantize_rows_int8, to_int8

_MAX_ROW = 16_384  # values of a row that one program holds
_LEAST_PART = 512  # values of a part of a row that one program holds
_MANY_ROWS = 4096  # from which on more programs of fewer warps each are 4 to 8 % faster
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
    early = signals_first(x, size, columns=rounding.columns)
    if needs_row:
        parts = _parts(size)
        num_warps = row_warps(parts[0])
        if num_rows >= _MANY_ROWS:
            num_warps = max(1, num_warps // 2)
        _gate_and_mul_row_kernel[(num_rows,)](
            x, rounded.values, rounded.scales, x.stride(0), SIZE=size, FIRST=parts[0], SECOND=parts[1], THIRD=parts[2],
            IS_GELU=is_gelu, PDL=pdl, EARLY=early, num_warps=num_warps, launch_pdl=pdl,
        )  # fmt: skip
        return rounded
    block = max(min(triton.next_power_of_2(size), _PIECE), rounding.columns or 0)
    _gate_and_mul_kernel[(num_rows, triton.cdiv(size, block))](
        x, rounding.scale, rounded.values, rounded.scales, x.stride(0),
        SIZE=size, BLOCK=block, COLUMNS=rounding.columns or 0, IS_KNOWN=rounding.scale is not None, IS_GELU=is_gelu,
        PDL=pdl, EARLY=early, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return rounded


def _parts(size: int) -> tuple[int, int, int]:
    """Return up to three powers of two that hold a row, the rest 0: 14,336 is 8,192 + 4,096 + 2,048.

    Zeros beyond a row take as long as its values. A single power of two holds up to twice as many places as a row has
    values; from 2,048 values on these hold at most 25 % more.
    """
    parts = [0, 0, 0]
    for place in range(3):
        whole = triton.next_power_of_2(size)
        half = whole // 2
        if place == 2 or size > whole - half // 4 or size <= _LEAST_PART:
            parts[place] = max(whole, min(_LEAST_PART, parts[0]))
            break
        parts[place], size = half, size - half
    return parts[0], parts[1], parts[2]


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
def _gate_and_mul_row_kernel(
    x_ptr, values_ptr, scales_ptr, stride_x,
    SIZE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, IS_GELU: tl.constexpr,
    PDL: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One row of one scale, in up to three parts."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr, values_ptr = x_ptr + row * stride_x, values_ptr + row * SIZE
    if PDL:
        wait_for_rows(EARLY)
    first = _gated_part(x_ptr, 0, SIZE, FIRST, IS_GELU)
    second, third = first, first  # read only where they are parts
    largest = tl.reduce(tl.abs(first), 0, larger)
    if SECOND > 0:
        second = _gated_part(x_ptr, FIRST, SIZE, SECOND, IS_GELU)
        largest = larger(largest, tl.reduce(tl.abs(second), 0, larger))
    if THIRD > 0:
        third = _gated_part(x_ptr, FIRST + SECOND, SIZE, THIRD, IS_GELU)
        largest = larger(largest, tl.reduce(tl.abs(third), 0, larger))
    scale = _scale_of_row(largest, values_ptr)
    tl.store(scales_ptr + row, scale)
    _store_part(first, scale, values_ptr, 0, SIZE, FIRST)
    if SECOND > 0:
        _store_part(second, scale, values_ptr, FIRST, SIZE, SECOND)
    if THIRD > 0:
        _store_part(third, scale, values_ptr, FIRST + SECOND, SIZE, THIRD)


@triton.jit
def _gated_part(x_ptr, START: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr, IS_GELU: tl.constexpr):
    """Return values START to START + PART of a gated row, rounded to its dtype, [PART] fp32, zeros beyond it."""
    columns = START + tl.arange(0, PART)
    if START + PART <= SIZE:
        gate, up = tl.load(x_ptr + columns), tl.load(x_ptr + SIZE + columns)
    else:
        gate = tl.load(x_ptr + columns, mask=columns < SIZE, other=0.0)
        up = tl.load(x_ptr + SIZE + columns, mask=columns < SIZE, other=0.0)
    return gated(gate, up, IS_GELU).to(gate.dtype).to(tl.float32)


@triton.jit
def _store_part(x, scale, values_ptr, START: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr) -> None:
    columns = START + tl.arange(0, PART)
    values = _by_largest(x, scale, values_ptr)
    if START + PART <= SIZE:
        tl.store(values_ptr + columns, values)
    else:
        tl.store(values_ptr + columns, values, mask=columns < SIZE)


@triton.jit
def store_rounded(
    x, values_ptr, scales_ptr, scale_ptr, row, piece,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, IS_KNOWN: tl.constexpr,
) -> None:  # fmt: skip
    """Round and store part `piece` of a row, [BLOCK] fp32, zeros beyond the row: all of it if the row has one scale."""
    columns = piece * BLOCK + tl.arange(0, BLOCK)
    if COLUMNS > 0:
        runs = tl.reshape(x, [BLOCK // COLUMNS, COLUMNS])
        scales = scale_of(tl.reduce(tl.abs(runs), 1, larger))
        values = tl.reshape(to_e4m3_by_largest(runs, scales[:, None]), [BLOCK])
        num_runs: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
        places = piece * (BLOCK // COLUMNS) + tl.arange(0, BLOCK // COLUMNS)
        tl.store(scales_ptr + row * num_runs + places, scales, mask=places < num_runs)
    elif IS_KNOWN:
        scale = tl.load(scale_ptr)
        values = to_int8(tl.div_rn(x, scale)) if values_ptr.dtype.element_ty == tl.int8 else to_e4m3(x, scale)
        tl.store(scales_ptr + row, scale, mask=piece == 0)
    else:
        scale = _scale_of_row(tl.reduce(tl.abs(x), 0, larger), values_ptr)
        values = _by_largest(x, scale, values_ptr)
        tl.store(scales_ptr + row, scale)
    tl.store(values_ptr + row * SIZE + columns, values, mask=columns < SIZE)


@triton.jit
def _scale_of_row(largest, values_ptr):
    """Return the scale at which values_ptr's type reaches `largest`."""
    return int8_scale_of(largest) if values_ptr.dtype.element_ty == tl.int8 else scale_of(largest)


@triton.jit
def _by_largest(x, scale, values_ptr):
    """x / scale in values_ptr's type. scale: of the largest of the row."""
    return to_int8(quotient(x, scale)) if values_ptr.dtype.element_ty == tl.int8 else to_e4m3_by_largest(x, scale)
