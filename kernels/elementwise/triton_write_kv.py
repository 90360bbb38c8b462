# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""Triton twin of norm_rope_write_kv: all ops between QKV and attention fused, the write to the KV pool included.

It equals the composition of its torch specifications (kernels/elementwise/reference.py), rounding step by rounding
step. `pdl`: see kernels/elementwise/triton.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.elementwise.reference import INT8, INT8_LEAST, INT8_MAX, UNSCALED, KVScales
from kernels.elementwise.triton import round_to

_INT8_MAX, _INT8_LEAST = tl.constexpr(INT8_MAX), tl.constexpr(INT8_LEAST)
# 1.5 * 2^23: a sum with it has no bits below 1, so adding and subtracting it rounds to the nearest even integer
_ROUNDING = tl.constexpr(12582912.0)


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
    rotary_dim], of qkv's dtype or fp32; caches: [num_blocks, block_size, Hkv, D]. Writes the caches in place, and the
    scales of int8 ones.
    """
    num_tokens = qkv.shape[0]
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    half = cos_sin_cache.shape[1] // 2
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    # Few tokens: many small programs, for latency; many tokens: fewer, for the launch rate
    block_heads = 4 if num_tokens <= 64 else 16
    assert (q_weight is None) == (k_weight is None)
    assert k_cache.stride() == v_cache.stride()
    k_constant, v_constant, scales = kv_scales.for_kernel()
    assert (k_cache.dtype == INT8) == (scales[2] is not None), "an int8 pool has scales for each token and head"
    _norm_rope_write_kv_kernel[(triton.cdiv(num_heads + 2 * num_kv_heads, block_heads), num_tokens)](
        qkv, q_weight, k_weight, eps, positions, cos_sin_cache, k_cache, v_cache, slot_mapping, q,
        1.0 / k_constant, 1.0 / v_constant, *scales,
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


@triton.jit
def _norm_rope_write_kv_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, eps, positions_ptr, cos_sin_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, q_ptr,
    inverse_k_scale, inverse_v_scale,  # of an fp8 cache, constant for the layer
    k_scales_ptr, v_scales_ptr, stride_scale_block, stride_scale_slot, stride_scale_head,  # see KVScales.for_kernel
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
    if k_scales_ptr is not None:
        in_scales = None  # of an fp8 cache: constants of each head
        if stride_scale_block is not None:
            in_scales = (slot // BLOCK_SIZE) * stride_scale_block + (slot % BLOCK_SIZE) * stride_scale_slot
        amax_bits = tl.maximum(_amax_bits(y1), _amax_bits(y2))
        if REST > 0:
            amax_bits = tl.maximum(amax_bits, _amax_bits(rest))
        k_heads, v_heads = heads - NUM_HEADS, heads - NUM_HEADS - NUM_KV_HEADS
        inverse_scale = _inverse_scales(
            k_scales_ptr + k_heads * stride_scale_head, (k_heads >= 0) & (v_heads < 0),
            v_scales_ptr + v_heads * stride_scale_head, (v_heads >= 0) & (v_heads < NUM_KV_HEADS),
            in_scales, amax_bits.to(tl.float32, bitcast=True),
        )[:, None]  # fmt: skip
    _store_part(targets, dims, y1, inverse_scale, in_half, is_q, is_v)
    _store_part(targets, SECOND + dims, y2, inverse_scale, in_half, is_q, is_v)
    if REST > 0:
        _store_part(targets, rest_dims, rest, inverse_scale, in_rest, is_q, is_v)


@triton.jit
def _inverse_scales(k_ptrs, is_k, v_ptrs, is_v, in_scales, amax):
    """What heads are multiplied by: the inverse of constants of each head, or of their own scales, which it stores.

    in_scales: where the token's scales lie; None: constants.
    """
    if in_scales is None:
        scales = tl.load(k_ptrs, mask=is_k, other=1.0)
        scales = tl.where(is_v, tl.load(v_ptrs, mask=is_v, other=1.0), scales)
        return tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales)
    else:
        most = tl.full(amax.shape, _INT8_MAX, tl.float32)
        scales = tl.div_rn(amax, most)
        tl.store(k_ptrs + in_scales, scales, mask=is_k)
        tl.store(v_ptrs + in_scales, scales, mask=is_v)
        return tl.where(amax >= _INT8_LEAST, tl.div_rn(most, amax), 0.0)


@triton.jit
def _amax_bits(x):
    """The largest magnitude of each row, as the bits of its fp32, whose order puts NaN last: tl.max ignores NaN."""
    return tl.max(x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def _rotate(x1, x2, cos, sin, is_v):
    """Rotate both halves of each head, with the specification's roundings to cos's dtype; v passes unchanged."""
    cos_fp32, sin_fp32 = cos.to(tl.float32), sin.to(tl.float32)
    y1 = round_to(x1.to(tl.float32) * cos_fp32, cos.dtype) - round_to(x2.to(tl.float32) * sin_fp32, cos.dtype)
    y2 = round_to(x2.to(tl.float32) * cos_fp32, cos.dtype) + round_to(x1.to(tl.float32) * sin_fp32, cos.dtype)
    return tl.where(is_v, x1, y1.to(x1.dtype)), tl.where(is_v, x2, y2.to(x1.dtype))


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
    normed = round_to(x.to(tl.float32) * inverse_rms, q_weight_ptr.dtype.element_ty)
    normed = normed * tl.where(is_q, q_weight, k_weight)
    return tl.where(is_v, x, normed.to(x.dtype))


@triton.jit
def _store_part(targets, dims, x, inverse_scale, mask, is_q, is_v) -> None:
    """Store part of each head to q, k_cache or v_cache. inverse_scale: [heads, 1], for k and v in fp8 or int8."""
    q_ptrs, k_ptrs, v_ptrs = targets
    tl.store(q_ptrs + dims, x, mask=mask & is_q)
    stored = x
    if k_ptrs.dtype.element_ty == tl.float8e4nv:
        scaled = x.to(tl.float32) * inverse_scale
        stored = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    elif k_ptrs.dtype.element_ty == tl.int8:
        scaled = x.to(tl.float32) * inverse_scale
        scaled = tl.where(scaled == scaled, scaled, 0.0)  # NaN of a head whose scale is not finite
        stored = (scaled + _ROUNDING) - _ROUNDING
    stored = stored.to(k_ptrs.dtype.element_ty)
    tl.store(k_ptrs + dims, stored, mask=mask & (is_q == 0) & (is_v == 0))
    tl.store(v_ptrs + dims, stored, mask=mask & is_v)
