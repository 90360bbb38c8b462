# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""Triton twin of norm_rope_write_latent: all of latent attention between its projections and the absorbed queries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK_HEADS = 8


def norm_rope_write_latent(
    latent: torch.Tensor,
    q_rope: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scale: float = 1.0,
    is_interleaved: bool = False,
    pdl: bool = False,
) -> torch.Tensor:
    """Equal elementwise.norm_rope_write_latent, rounding step by rounding step. Returns [T, H, rope_dim]."""
    num_tokens, num_heads, rope_dim = q_rope.shape
    rank, half = weight.shape[0], rope_dim // 2
    out = torch.empty(num_tokens, num_heads, rope_dim, dtype=q_rope.dtype, device=q_rope.device)
    _latent_kernel[(1 + triton.cdiv(num_heads, _BLOCK_HEADS), num_tokens)](
        latent, q_rope, weight, eps, positions, cos_sin_cache, cache, slot_mapping, out, 1.0 / scale,
        latent.stride(0), *q_rope.stride()[:2], cos_sin_cache.stride(0), *cache.stride()[:2],
        NUM_HEADS=num_heads, RANK=rank, RANK_PAD=triton.next_power_of_2(rank), BLOCK_SIZE=cache.shape[1],
        HALF=half, HALF_PAD=triton.next_power_of_2(half), BLOCK_H=_BLOCK_HEADS,
        STEP=2 if is_interleaved else 1, SECOND=1 if is_interleaved else half, PDL=pdl, num_warps=2, launch_pdl=pdl,
        enable_fp_fusion=False,  # as in norm_rope_write_kv
    )  # fmt: skip
    return out


@triton.jit
def _latent_kernel(
    latent_ptr, q_ptr, weight_ptr, eps, positions_ptr, cos_sin_ptr, cache_ptr, slots_ptr, out_ptr, inverse_scale,
    stride_latent, stride_q_token, stride_q_head, stride_position, stride_block, stride_slot,
    NUM_HEADS: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, BLOCK_H: tl.constexpr,
    STEP: tl.constexpr, SECOND: tl.constexpr,  # pair i is dimensions STEP * i and STEP * i + SECOND
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """A token's latent and key (program 0 of the first axis), or the queries of BLOCK_H of its heads."""
    token = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0)
    pairs = tl.arange(0, HALF_PAD)
    in_half = pairs < HALF
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    angles = cos_sin_ptr + tl.load(positions_ptr + token) * stride_position + pairs
    cos = tl.load(angles, mask=in_half, other=0.0)
    sin = tl.load(angles + HALF, mask=in_half, other=0.0)
    if part == 0:
        slot = tl.load(slots_ptr + token)
        target = cache_ptr + (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot
        source = latent_ptr + token * stride_latent
        columns = tl.arange(0, RANK_PAD)
        in_rank = columns < RANK
        x = tl.load(source + columns, mask=in_rank, other=0.0)
        weight = tl.load(weight_ptr + columns, mask=in_rank, other=0.0)
        x_fp32 = x.to(tl.float32)
        inverse_rms = tl.rsqrt(tl.sum(x_fp32 * x_fp32, 0) / RANK + eps)
        normed = weight.to(tl.float32) * _round(x_fp32 * inverse_rms, weight.dtype)
        _store_cached(target + columns, normed.to(x.dtype), inverse_scale, in_rank)
        key_ptrs = source + RANK + STEP * pairs
        key1 = tl.load(key_ptrs, mask=in_half, other=0.0)
        key2 = tl.load(key_ptrs + SECOND, mask=in_half, other=0.0)
        turned1, turned2 = _rotate(key1, key2, cos, sin)
        _store_cached(target + RANK + STEP * pairs, turned1, inverse_scale, in_half)
        _store_cached(target + RANK + STEP * pairs + SECOND, turned2, inverse_scale, in_half)
    else:
        heads = (part - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        in_tile = (heads < NUM_HEADS)[:, None] & in_half[None, :]
        query = q_ptr + token * stride_q_token + heads[:, None] * stride_q_head + STEP * pairs[None, :]
        x1 = tl.load(query, mask=in_tile, other=0.0)
        x2 = tl.load(query + SECOND, mask=in_tile, other=0.0)
        y1, y2 = _rotate(x1, x2, cos[None, :], sin[None, :])
        rotated = out_ptr + (token * NUM_HEADS + heads[:, None]) * (2 * HALF) + STEP * pairs[None, :]
        tl.store(rotated, y1, mask=in_tile)
        tl.store(rotated + SECOND, y2, mask=in_tile)


@triton.jit
def _rotate(x1, x2, cos, sin):
    """Rotate pairs, with the specification's roundings to cos's dtype."""
    cos_fp32, sin_fp32 = cos.to(tl.float32), sin.to(tl.float32)
    y1 = _round(x1.to(tl.float32) * cos_fp32, cos.dtype) - _round(x2.to(tl.float32) * sin_fp32, cos.dtype)
    y2 = _round(x2.to(tl.float32) * cos_fp32, cos.dtype) + _round(x1.to(tl.float32) * sin_fp32, cos.dtype)
    return y1.to(x1.dtype), y2.to(x1.dtype)


@triton.jit
def _round(x, dtype: tl.constexpr):
    """Round to dtype, in fp32: torch rounds after each op."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def _store_cached(pointers, x, inverse_scale, mask) -> None:
    """Store x in the cache's dtype. inverse_scale: of an fp8 cache."""
    stored = x
    if pointers.dtype.element_ty == tl.float8e4nv:
        scaled = x.to(tl.float32) * inverse_scale
        stored = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(pointers, stored.to(pointers.dtype.element_ty), mask=mask)
