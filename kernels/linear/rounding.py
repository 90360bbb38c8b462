"""RoundedRows: the input of an 8-bit product that the op before it has rounded already. The torch specification.

A product that rounds its input to e4m3, or to integers, reads it, writes it and reads it again. The norm or the gated
activation before it can write the rounded values instead (add_rms_norm_rounded, gate_and_mul_rounded), for one kernel
and two passes over memory less. Rounding says how: what a linear layer wants of its input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.elementwise import reference as elementwise
from kernels.linear import reference, w8a8
from kernels.linear.reference import FP8


@dataclass(frozen=True)
class Rounding:
    """How a product rounds its input to 8 bits: by a scale for each row, each run of columns, or one known for all."""

    columns: int | None = None  # of a run: a power of two; e4m3 alone has runs
    scale: torch.Tensor | None = None  # [] fp32, known before; excludes columns
    dtype: torch.dtype = FP8  # or int8


@dataclass(frozen=True)
class RoundedRows:
    """Rows of 8 bits, as quantize_rows, _groups or _by of kernels.linear.reference or w8a8 return them."""

    # [T, K] e4m3 or int8
    values: torch.Tensor
    # [T] fp32, or [T, ceil(K / columns)] of a scale for each run of columns
    scales: torch.Tensor
    dtype: torch.dtype  # of the rows that were rounded, and of the product


def round_rows(x: torch.Tensor, rounding: Rounding) -> RoundedRows:
    """Round rows. x: [T, K]."""
    if rounding.dtype == torch.int8:
        by_row, known = w8a8.quantize_rows_int8, w8a8.quantize_by_int8
        values, scales = by_row(x) if rounding.scale is None else known(x, rounding.scale)
    elif rounding.columns is not None:
        values, scales = reference.quantize_groups(x, rounding.columns)
    elif rounding.scale is not None:
        values, scales = reference.quantize_by(x, rounding.scale)
    else:
        values, scales = reference.quantize_rows(x)
    return RoundedRows(values, scales, x.dtype)


def add_rms_norm_rounded(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, rounding: Rounding
) -> tuple[RoundedRows, torch.Tensor]:
    """Compute elementwise.add_rms_norm and round the normed rows: (rounded, new residual). x, residual: [T, D]."""
    normed, new_residual = elementwise.add_rms_norm(x, residual, weight, eps)
    return round_rows(normed, rounding), new_residual


def gate_and_mul_rounded(x: torch.Tensor, rounding: Rounding, *, is_gelu: bool) -> RoundedRows:
    """Compute elementwise.silu_and_mul, or gelu_tanh_and_mul, and round its rows. x: [T, 2 * I]."""
    gate_and_mul = elementwise.gelu_tanh_and_mul if is_gelu else elementwise.silu_and_mul
    return round_rows(gate_and_mul(x), rounding)
