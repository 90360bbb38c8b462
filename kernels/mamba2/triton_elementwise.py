# ruff: noqa: ANN001  (Triton reads annotations as types: kernel arguments carry none)
"""Triton twins of mamba2_dt and grouped_gated_norm: one launch each, two if ranks share a group of channels.

Each equals its torch specification, rounding step by rounding step. pdl: as in kernels/elementwise/triton.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

# What a launch of the norm does: all of it, only the sums of squares, or all but these
_WHOLE = tl.constexpr(0)
_SUMS = tl.constexpr(1)
_SCALE = tl.constexpr(2)


def mamba2_dt(
    dt: torch.Tensor, dt_bias: torch.Tensor, limits: tuple[float, float], *, pdl: bool = False
) -> torch.Tensor:
    """Equal reference.mamba2_dt. dt: the last dimension dense; dt_bias: contiguous."""
    num_tokens, num_heads = dt.shape
    out = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=dt.device)
    if num_tokens:
        _dt_kernel[(triton.cdiv(num_tokens * num_heads, 512),)](
            dt, dt_bias, out, *map(float, limits), num_tokens * num_heads, dt.stride(0), NUM_HEADS=num_heads, BLOCK=512,
            PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
    return out


def grouped_gated_norm(
    y: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    group_size: int,
    has_norm_first: bool = False,
    all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Equal reference.grouped_gated_norm. y, z: the last dimension dense; weight: contiguous."""
    num_tokens, width = y.shape
    out = torch.empty(num_tokens, width, dtype=y.dtype, device=y.device)
    size = min(group_size, width)
    if weight is None:  # any parts of a row will do
        size = min(width, 1024)
    num_groups = triton.cdiv(width, size)
    block = triton.next_power_of_2(size)

    def launch(kind: tl.constexpr, sums: torch.Tensor | None) -> None:
        _gated_norm_kernel[(num_groups, num_tokens)](
            y, z, weight, out, sums, eps, 1.0 / group_size,
            y.stride(0), z.stride(0), 0 if sums is None else sums.stride(0),
            WIDTH=width, SIZE=size, BLOCK=block, HAS_NORM_FIRST=has_norm_first, KIND=kind, PDL=pdl,
            num_warps=min(16, max(1, block // 256)), launch_pdl=pdl,
        )  # fmt: skip

    if num_tokens == 0:
        return out
    if weight is None or all_reduce is None:
        launch(_WHOLE, None)
    else:
        sums = torch.empty(num_tokens, num_groups, dtype=torch.float32, device=y.device)
        launch(_SUMS, sums)
        launch(_SCALE, all_reduce(sums))  # may be a slice of more groups' sums
    return out


@triton.jit
def _dt_kernel(
    dt_ptr, bias_ptr, out_ptr, least, most, num_values, stride_dt,
    NUM_HEADS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """A part of all values."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = places < num_values
    heads = places % NUM_HEADS
    bias = tl.load(bias_ptr + heads, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tokens = (places // NUM_HEADS).to(tl.int64)
    value = tl.load(dt_ptr + tokens * stride_dt + heads, mask=mask, other=0.0).to(tl.float32) + bias
    power = tl.exp(tl.minimum(value, 20.0))
    small = tl.minimum(power, 0.1)
    # log(1 + u) loses the digits of a small u: there its series to the sixth power is exact to fp32
    series = small * (1 - small * (1 / 2 - small * (1 / 3 - small * (1 / 4 - small * (1 / 5 - small / 6)))))
    softplus = tl.where(power < 0.1, series, tl.log(1.0 + power))
    softplus = tl.where(value > 20.0, value, softplus)
    clamped = tl.minimum(tl.maximum(softplus, least, tl.PropagateNan.ALL), most, tl.PropagateNan.ALL)
    tl.store(out_ptr + places, clamped, mask=mask)


@triton.jit
def _gated_norm_kernel(
    y_ptr, z_ptr, weight_ptr, out_ptr, sums_ptr, eps, inverse_group_size, stride_y, stride_z, stride_sums,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM_FIRST: tl.constexpr, KIND: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One group of one token, or without a weight a part of a token."""
    group, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = group * SIZE + tl.arange(0, BLOCK)
    mask = (tl.arange(0, BLOCK) < SIZE) & (columns < WIDTH)
    weight = columns
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    y = tl.load(y_ptr + token * stride_y + columns, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + token * stride_z + columns, mask=mask, other=0.0).to(tl.float32)
    gates = z / (1.0 + tl.exp(-z))
    values = y if HAS_NORM_FIRST and weight_ptr is not None else y * gates
    if weight_ptr is None:
        product = values
    else:
        place = token * stride_sums + group
        total = tl.load(sums_ptr + place) if KIND == _SCALE else tl.sum(values * values, 0)
        if KIND == _SUMS:
            tl.store(sums_ptr + place, total)
            return
        normed = values * tl.rsqrt(total * inverse_group_size + eps)
        product = weight.to(tl.float32) * normed.to(weight.dtype).to(tl.float32)
        if HAS_NORM_FIRST:
            product = product * gates
    tl.store(out_ptr + token * WIDTH + columns, product.to(out_ptr.dtype.element_ty), mask=mask)
