# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""Triton twins of kernels/elementwise/reference.py, and norm_rope_write_kv: all ops between QKV and attention fused.

Each equals the composition of its torch specifications, rounding step by rounding step. All are limited by memory or,
for few tokens, by launch latency: one program per row or per few heads. `pdl` launches a kernel early, under the
previous one (Hopper's programmatic dependent launch); it must then run on the stream that produced its inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.elementwise.reference import UNSCALED, KVScales


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None, pdl: bool = False
) -> torch.Tensor:
    """Equal elementwise.rms_norm. x: [..., D], last dimension dense, the others flattenable; out: contiguous."""
    rows = x.view(-1, x.shape[-1])
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    block = triton.next_power_of_2(rows.shape[1])
    _rms_norm_kernel[(rows.shape[0],)](
        rows, None, weight, out, None, rows.stride(0), 0, eps,
        SIZE=rows.shape[1], BLOCK=block, HAS_RESIDUAL=False, PDL=pdl, num_warps=_row_warps(block), launch_pdl=pdl,
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
        SIZE=rows.shape[1], BLOCK=block, HAS_RESIDUAL=True, PDL=pdl, num_warps=_row_warps(block), launch_pdl=pdl,
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
        HAS_RESIDUAL=False, HAS_BIAS=bias is not None, PDL=pdl, num_warps=_row_warps(block), launch_pdl=pdl,
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
        num_warps=_row_warps(block), launch_pdl=pdl,
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
    return _gate_and_mul(x, is_gelu=False, pdl=pdl)


def gelu_tanh_and_mul(x: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """Equal elementwise.gelu_tanh_and_mul. x: [T, 2 * I], last dimension dense; returns [T, I]."""
    return _gate_and_mul(x, is_gelu=True, pdl=pdl)


def norm_rope_write_kv(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    num_heads: int,
    kv_scales: KVScales = UNSCALED,
    is_interleaved: bool = False,
    norms_rotated: bool = False,
    pdl: bool = False,
) -> torch.Tensor:
    """Split qkv, normalise each head of q and k, rotate them, write k and v to their slots; return q [T, H, D].

    Equals rms_norm (not if both weights are None; norms_rotated: after the rotation), apply_rope and write_kv one
    after another. qkv: [T, (H + 2 *
    Hkv) * D], last dimension dense; weights: [D]; positions, slot_mapping: [T] int64; cos_sin_cache: [max_positions,
    rotary_dim], of qkv's dtype or fp32; caches: [num_blocks, block_size, Hkv, D]. Writes the caches in place.
    """
    num_tokens = qkv.shape[0]
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    half = cos_sin_cache.shape[1] // 2
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    # Few tokens: many small programs, for latency; many tokens: fewer, for the launch rate
    block_heads = 4 if num_tokens <= 64 else 16
    assert (q_weight is None) == (k_weight is None)
    assert k_cache.stride() == v_cache.stride()
    _norm_rope_write_kv_kernel[(triton.cdiv(num_heads + 2 * num_kv_heads, block_heads), num_tokens)](
        qkv, q_weight, k_weight, eps, positions, cos_sin_cache, k_cache, v_cache, slot_mapping, q,
        1.0 / kv_scales.k, 1.0 / kv_scales.v,
        qkv.stride(0), cos_sin_cache.stride(0), *k_cache.stride()[:3],
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        HALF=half, HALF_PAD=triton.next_power_of_2(half),
        REST=head_dim - 2 * half, REST_PAD=triton.next_power_of_2(max(1, head_dim - 2 * half)),
        BLOCK_H=block_heads, HAS_NORM=q_weight is not None, NORMS_ROTATED=norms_rotated,
        STEP=2 if is_interleaved else 1, SECOND=1 if is_interleaved else half, PDL=pdl,
        num_warps=max(1, block_heads // 4), launch_pdl=pdl,
        # Else x1 * cos - x2 * sin becomes one bf16 fma, which skips a rounding of the specification
        enable_fp_fusion=False,
    )  # fmt: skip
    return q


def _gate_and_mul(x: torch.Tensor, *, is_gelu: bool, pdl: bool) -> torch.Tensor:
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


def _row_warps(block: int) -> int:
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
    x_fp32 = x.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x_fp32 * x_fp32, 0) / SIZE + eps)
    normed = (x_fp32 * inverse_rms).to(weight.dtype)
    product = weight.to(tl.float32) * normed.to(tl.float32)
    tl.store(normed_ptr + row * SIZE + columns, product.to(normed_ptr.dtype.element_ty), mask=mask)


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
        linear = _round(slope * value, dtype)
        positive = _round(_round(above * value, dtype) * value, dtype) + linear
        power = tl.minimum(value, least)
        # Near 0 exp(x) - 1 cancels: there its series to the fifth power is exact to fp32
        series = power * (1 + power / 2 * (1 + power / 3 * (1 + power / 4 * (1 + power / 5))))
        powers = tl.where(power > -0.06, series, tl.exp(power) - 1.0)
        negative = _round(_round(_round(powers, dtype) - value, dtype) * below, dtype) + linear
        out = tl.where(value > 0, positive, negative)
    else:
        kept = tl.where(value < 0, 0.0, value)  # relu of NaN is NaN
        out = kept * kept
    tl.store(out_ptr + places, out.to(dtype), mask=mask)


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
    gate_fp32 = gate.to(tl.float32)
    logit = gate_fp32
    if IS_GELU:  # (1 + tanh(u)) / 2 is the sigmoid of 2 * u; the factor is 2 * sqrt(2 / pi)
        logit = 1.5957691216057308 * (gate_fp32 + 0.044715 * gate_fp32 * gate_fp32 * gate_fp32)
    activated = (gate_fp32 / (1.0 + tl.exp(-logit))).to(gate.dtype)
    product = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, product.to(gate.dtype), mask=mask)


@triton.jit
def _norm_rope_write_kv_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, eps, positions_ptr, cos_sin_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, q_ptr,
    inverse_k_scale, inverse_v_scale,  # of an fp8 cache
    stride_token, stride_position, stride_block, stride_slot, stride_head,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr,
    BLOCK_H: tl.constexpr, HAS_NORM: tl.constexpr, NORMS_ROTATED: tl.constexpr,
    STEP: tl.constexpr, SECOND: tl.constexpr,  # pair i is dimensions STEP * i and STEP * i + SECOND
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_H heads of one token, in three parts: both members of the pairs, and the dimensions past rotary_dim."""
    token = tl.program_id(1).to(tl.int64)
    heads = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_v = (heads >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    is_q = (heads < NUM_HEADS)[:, None]
    in_half = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (tl.arange(0, HALF_PAD) < HALF)[None, :]
    in_rest = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (tl.arange(0, REST_PAD) < REST)[None, :]
    pairs = tl.arange(0, HALF_PAD)[None, :]
    dims = STEP * pairs
    rest_dims = 2 * HALF + tl.arange(0, REST_PAD)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    source = qkv_ptr + token * stride_token + heads[:, None] * HEAD_DIM
    x1 = tl.load(source + dims, mask=in_half, other=0.0)
    x2 = tl.load(source + SECOND + dims, mask=in_half, other=0.0)
    # Early, beside the loads of x: they depend on nothing else
    angles = cos_sin_ptr + tl.load(positions_ptr + token) * stride_position + pairs
    cos = tl.load(angles, mask=pairs < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=pairs < HALF, other=0.0)
    rest = tl.load(source + rest_dims, mask=in_rest, other=0.0) if REST > 0 else x1
    if HAS_NORM and not NORMS_ROTATED:
        x1, x2, rest = _norm_head(
            x1, x2, rest, q_weight_ptr, k_weight_ptr, eps, dims, SECOND + dims, pairs < HALF, rest_dims, is_q, is_v,
            HEAD_DIM, REST,
        )  # fmt: skip
    y1, y2 = _rotate(x1, x2, cos, sin, is_v)
    if HAS_NORM and NORMS_ROTATED:
        y1, y2, rest = _norm_head(
            y1, y2, rest, q_weight_ptr, k_weight_ptr, eps, dims, SECOND + dims, pairs < HALF, rest_dims, is_q, is_v,
            HEAD_DIM, REST,
        )  # fmt: skip

    slot = tl.load(slots_ptr + token)
    in_cache = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot
    k_target = k_cache_ptr + in_cache + (heads - NUM_HEADS)[:, None] * stride_head
    v_target = v_cache_ptr + in_cache + (heads - NUM_HEADS - NUM_KV_HEADS)[:, None] * stride_head
    q_target = q_ptr + token * NUM_HEADS * HEAD_DIM + heads[:, None] * HEAD_DIM
    targets, inverse_scale = (q_target, k_target, v_target), tl.where(is_v, inverse_v_scale, inverse_k_scale)
    _store_part(targets, dims, y1, inverse_scale, in_half, is_q, is_v)
    _store_part(targets, SECOND + dims, y2, inverse_scale, in_half, is_q, is_v)
    if REST > 0:
        _store_part(targets, rest_dims, rest, inverse_scale, in_rest, is_q, is_v)


@triton.jit
def _rotate(x1, x2, cos, sin, is_v):
    """Rotate both halves of each head, with the specification's roundings to cos's dtype; v passes unchanged."""
    cos_fp32, sin_fp32 = cos.to(tl.float32), sin.to(tl.float32)
    y1 = _round(x1.to(tl.float32) * cos_fp32, cos.dtype) - _round(x2.to(tl.float32) * sin_fp32, cos.dtype)
    y2 = _round(x2.to(tl.float32) * cos_fp32, cos.dtype) + _round(x1.to(tl.float32) * sin_fp32, cos.dtype)
    return tl.where(is_v, x1, y1.to(x1.dtype)), tl.where(is_v, x2, y2.to(x1.dtype))


@triton.jit
def _round(x, dtype: tl.constexpr):
    """Round to dtype, in fp32: torch rounds after each op."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def _norm_head(
    x1, x2, rest, q_weight_ptr, k_weight_ptr, eps, dims, second_dims, in_pair, rest_dims, is_q, is_v,
    HEAD_DIM: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Scale the three parts of each head by its inverse RMS and its q or k weight; v passes unchanged."""
    squares = tl.sum(x1.to(tl.float32) * x1.to(tl.float32) + x2.to(tl.float32) * x2.to(tl.float32), 1)
    if REST > 0:
        squares += tl.sum(rest.to(tl.float32) * rest.to(tl.float32), 1)
    inverse_rms = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
    x1 = _norm_part(x1, inverse_rms, q_weight_ptr, k_weight_ptr, dims, in_pair, is_q, is_v)
    x2 = _norm_part(x2, inverse_rms, q_weight_ptr, k_weight_ptr, second_dims, in_pair, is_q, is_v)
    if REST > 0:
        rest = _norm_part(rest, inverse_rms, q_weight_ptr, k_weight_ptr, rest_dims, rest_dims < HEAD_DIM, is_q, is_v)
    return x1, x2, rest


@triton.jit
def _norm_part(x, inverse_rms, q_weight_ptr, k_weight_ptr, dims, mask, is_q, is_v):
    """Scale part of each head by its inverse RMS and its q or k weight; v passes unchanged."""
    q_weight = tl.load(q_weight_ptr + dims, mask=mask, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + dims, mask=mask, other=0.0).to(tl.float32)
    # In the weights' dtype: see elementwise.rms_norm
    normed = _round(x.to(tl.float32) * inverse_rms, q_weight_ptr.dtype.element_ty)
    normed = normed * tl.where(is_q, q_weight, k_weight)
    return tl.where(is_v, x, normed.to(x.dtype))


@triton.jit
def _store_part(targets, dims, x, inverse_scale, mask, is_q, is_v) -> None:
    """Store part of each head to q, k_cache or v_cache. inverse_scale: [heads, 1], for k and v in an fp8 cache."""
    q_ptrs, k_ptrs, v_ptrs = targets
    tl.store(q_ptrs + dims, x, mask=mask & is_q)
    stored = x
    if k_ptrs.dtype.element_ty == tl.float8e4nv:
        scaled = x.to(tl.float32) * inverse_scale
        stored = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    stored = stored.to(k_ptrs.dtype.element_ty)
    tl.store(k_ptrs + dims, stored, mask=mask & (is_q == 0) & (is_v == 0))
    tl.store(v_ptrs + dims, stored, mask=mask & is_v)
