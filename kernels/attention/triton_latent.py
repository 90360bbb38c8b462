# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""Latent attention in its absorbed form in Triton: all query heads over one latent of each token.

A key is [rank + rope_dim] numbers, whose first `rank` are the value, so a tile of latents is loaded once for both
products (FlashMLA and FlashInfer do the same). The queries of a row are one matrix of tokens x heads rows, cut in
tiles: member m is token m // heads, head m % heads, so that a tile of latents serves as many heads, and draft tokens,
as a program's registers hold outputs of. Any number of heads fits.

Short rows, of at most short_tokens(num_heads) query tokens, are cut along the keys in the pieces of cut_rows; a second
launch merges the pieces of each row (triton_latent_splits.py). Longer rows take one program a tile, as in
triton_prefill.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.attention.base import AttentionMetadata
from kernels.attention.triton_common import MASKED, has_ptx, is_wide, lower_queries, page_offsets, widen, widen_values
from kernels.attention.triton_latent_splits import (
    LatentConfig,
    LatentScratch,
    is_decode_step,
    merge_pieces,
    read_piece,
    short_config,
    short_tokens,
)
from kernels.elementwise.reference import UNSCALED, KVScales


def long_config(dtype: torch.dtype) -> LatentConfig:
    """Choose tiles of longer rows, whose products limit: 64 rows, so that the tensor cores run at full width."""
    if dtype == torch.float32:
        return LatentConfig(block_m=16, block_n=16, num_warps=4, num_stages=1)
    return LatentConfig(block_m=64, block_n=64, num_warps=8, num_stages=4)


def latent_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    metadata: AttentionMetadata,
    out: torch.Tensor,
    scratch: LatentScratch,
    pieces: torch.Tensor,
    *,
    scale: float,
    kv_scales: KVScales = UNSCALED,
    short: LatentConfig | None = None,
    long: LatentConfig | None = None,
    pdl: bool = False,
) -> None:
    """Write the causal attention of all rows of a step into `out`. Never syncs.

    q: [T, num_heads, rank + rope_dim]; out: [T, num_heads, rank], both contiguous; cache: [num_blocks, block_size, 1,
    rank + rope_dim], whose last dimension is dense, in q's dtype or fp8; pieces: scratch.cut of this metadata. A row of
    seq_len 0 is padding and yields zeros. short, long: override the choice of tiles (benchmarks).
    """
    assert q.is_contiguous(), "queries must be contiguous"
    assert out.is_contiguous(), "outputs must be contiguous"
    num_heads = q.shape[1]
    shared = (q, cache, out, metadata, scale, kv_scales)
    is_decode = is_decode_step(metadata)
    most = 1 if is_decode else short_tokens(num_heads)
    starts = None if is_decode else metadata.query_start_loc
    _launch_short(*shared, starts, scratch, pieces, most, short or short_config(num_heads, q.dtype), pdl)
    if not is_decode:
        _launch_long(*shared, most, long or long_config(q.dtype), pdl)


def _sizes(q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, config: LatentConfig) -> dict[str, Any]:
    """Return the constants that both attending kernels take."""
    rank, rope_dim = out.shape[2], q.shape[2] - out.shape[2]
    return {
        "HEADS": q.shape[1],
        "RANK": rank,
        "RANK_PAD": max(16, triton.next_power_of_2(rank)),
        "ROPE": rope_dim,
        "ROPE_PAD": max(16, triton.next_power_of_2(rope_dim)),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_SIZE": cache.shape[1],
        "IS_WIDE": is_wide(cache),
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "HAS_PTX": has_ptx(q),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _launch_short(
    q: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    kv_scales: KVScales,
    starts: torch.Tensor | None,
    scratch: LatentScratch,
    pieces: torch.Tensor,
    most_tokens: int,
    config: LatentConfig,
    pdl: bool,
) -> None:
    num_heads = out.shape[1]
    _short_rows_kernel[(triton.cdiv(most_tokens * num_heads, config.block_m), pieces.shape[0])](
        q, cache, out, metadata.block_table, metadata.seq_lens, starts, pieces, scratch.partial, scratch.lse,
        kv_scales.k * scale * math.log2(math.e), kv_scales.v,
        cache.stride(0), cache.stride(1), metadata.block_table.stride(0),
        **_sizes(q, cache, out, config), MEMBERS=scratch.members, PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip
    merge_pieces(out, starts, pieces, scratch, pdl=pdl)


def _launch_long(
    q: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    kv_scales: KVScales,
    most_tokens: int,
    config: LatentConfig,
    pdl: bool,
) -> None:
    num_rows = metadata.seq_lens.shape[0]
    if metadata.max_prefills is not None:  # rows past them have one token at most
        num_rows = min(num_rows, metadata.max_prefills)
    # Row i's tiles begin at (its first member // block_m) + i: always enough room, without a scan
    num_tiles = q.shape[0] * q.shape[1] // config.block_m + num_rows
    _long_rows_kernel[(num_tiles,)](
        q, cache, out, metadata.block_table, metadata.seq_lens, metadata.query_start_loc, num_rows,
        num_rows.bit_length(), kv_scales.k * scale * math.log2(math.e), kv_scales.v,
        cache.stride(0), cache.stride(1), metadata.block_table.stride(0),
        **_sizes(q, cache, out, config), SHORT_TOKENS=most_tokens, PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _short_rows_kernel(
    q_ptr, cache_ptr, out_ptr, table_ptr, seq_lens_ptr, query_start_ptr, pieces_ptr, partial_ptr, lse_ptr,
    scale, value_scale,  # scale holds the cache's, and log2(e)
    stride_block, stride_slot, stride_table,
    HEADS: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_WIDE: tl.constexpr,
    PRECISION: tl.constexpr, HAS_PTX: tl.constexpr, MEMBERS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One (tile of members, piece). Tiles vary fastest: those of one piece read the same latents at one time."""
    piece = tl.program_id(1)
    row, start, end, _split, splits = read_piece(pieces_ptr + piece * 4)
    token = row
    query_len = 1
    if query_start_ptr is not None:
        token = tl.load(query_start_ptr + row)
        query_len = tl.load(query_start_ptr + row + 1) - token
    first = tl.program_id(0) * BLOCK_M
    context_len = tl.load(seq_lens_ptr + row) - query_len
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if (splits == 0) | (first >= query_len * HEADS):
        return
    acc, lse = _attend(
        q_ptr, cache_ptr, table_ptr + row.to(tl.int64) * stride_table, token.to(tl.int64), first, query_len,
        context_len, start, end, scale, stride_block, stride_slot,
        HEADS, RANK, RANK_PAD, ROPE, ROPE_PAD, BLOCK_M, BLOCK_N, BLOCK_SIZE, IS_WIDE, PRECISION, HAS_PTX,
    )  # fmt: skip
    acc = acc * value_scale
    members = first + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, RANK_PAD)
    in_row = members < query_len * HEADS
    in_tile = in_row[:, None] & (dims < RANK)[None, :]
    if splits == 1:
        rows = token.to(tl.int64) * HEADS + members
        tl.store(out_ptr + rows[:, None] * RANK + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=in_tile)
    else:
        entries = piece.to(tl.int64) * MEMBERS + members
        tl.store(partial_ptr + entries[:, None] * RANK + dims[None, :], acc, mask=in_tile)
        tl.store(lse_ptr + entries, lse, mask=in_row)


@triton.jit(do_not_specialize=["num_rows", "search_steps"])
def _long_rows_kernel(
    q_ptr, cache_ptr, out_ptr, table_ptr, seq_lens_ptr, query_start_ptr, num_rows, search_steps,
    scale, value_scale,  # scale holds the cache's, and log2(e)
    stride_block, stride_slot, stride_table,
    HEADS: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_WIDE: tl.constexpr,
    PRECISION: tl.constexpr, HAS_PTX: tl.constexpr, SHORT_TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of members of a row of more than SHORT_TOKENS tokens. A row's last tiles, of most keys, start first."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, tile = _find_tile(query_start_ptr, num_rows, search_steps, HEADS, BLOCK_M)
    token = tl.load(query_start_ptr + row)
    query_len = tl.load(query_start_ptr + row + 1) - token
    num_tiles = tl.cdiv(query_len * HEADS, BLOCK_M)
    if (query_len <= SHORT_TOKENS) | (tile >= num_tiles):
        return
    first = (num_tiles - 1 - tile) * BLOCK_M
    seq_len = tl.load(seq_lens_ptr + row)
    context_len = seq_len - query_len
    last_token = tl.minimum((first + BLOCK_M - 1) // HEADS, query_len - 1)
    acc, _lse = _attend(
        q_ptr, cache_ptr, table_ptr + row.to(tl.int64) * stride_table, token.to(tl.int64), first, query_len,
        context_len, 0, tl.minimum(context_len + last_token + 1, seq_len), scale, stride_block, stride_slot,
        HEADS, RANK, RANK_PAD, ROPE, ROPE_PAD, BLOCK_M, BLOCK_N, BLOCK_SIZE, IS_WIDE, PRECISION, HAS_PTX,
    )  # fmt: skip
    acc = acc * value_scale
    members = first + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, RANK_PAD)
    rows = token.to(tl.int64) * HEADS + members
    in_tile = (members < query_len * HEADS)[:, None] & (dims < RANK)[None, :]
    tl.store(out_ptr + rows[:, None] * RANK + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=in_tile)


@triton.jit
def _attend(
    q_ptr, cache_ptr, table_ptr, token, first, query_len, context_len, start, end, scale, stride_block, stride_slot,
    HEADS: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_WIDE: tl.constexpr,
    PRECISION: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """Members first… of a row over its keys [start, end): normalised output [BLOCK_M, RANK_PAD] fp32 and log2 of the
    denominator [BLOCK_M]. A member that sees none of the keys gets a denominator that counts nothing beside another.
    """
    members = first + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, RANK_PAD)
    rope = tl.arange(0, ROPE_PAD)
    in_row = members < query_len * HEADS
    q_row_ptrs = q_ptr + (token * HEADS + members) * (RANK + ROPE)
    q = tl.load(q_row_ptrs[:, None] + dims[None, :], mask=in_row[:, None] & (dims < RANK)[None, :], other=0.0)
    in_rope = in_row[:, None] & (rope < ROPE)[None, :]
    q_rope = tl.load(q_row_ptrs[:, None] + (RANK + rope)[None, :], mask=in_rope, other=0.0)
    q, q_rope, scale, rounds = lower_queries(q, q_rope, scale, cache_ptr.dtype.element_ty)
    positions = context_len + members // HEADS
    maximum = tl.full([BLOCK_M], MASKED, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, RANK_PAD], tl.float32)
    for _ in range(0, rounds):
        for tile_start in range(start, end, BLOCK_N):
            keys = tile_start + tl.arange(0, BLOCK_N)
            exists = keys < end  # of the others, 0 * NaN would count
            offsets = page_offsets(table_ptr, keys, exists, stride_block, stride_slot, BLOCK_SIZE, IS_WIDE)
            in_tile = exists[:, None]
            if RANK != RANK_PAD:
                in_tile = in_tile & (dims < RANK)[None, :]
            latents = tl.load(cache_ptr + (offsets[:, None] + dims[None, :]), mask=in_tile, other=0.0)
            latents = widen_values(latents, q.dtype, HAS_PTX)
            in_tile = exists[:, None]
            if ROPE != ROPE_PAD:
                in_tile = in_tile & (rope < ROPE)[None, :]
            rope_ptrs = cache_ptr + (offsets[:, None] + (RANK + rope)[None, :])
            k_rope = widen(tl.load(rope_ptrs, mask=in_tile, other=0.0), q.dtype, HAS_PTX)
            logits = tl.dot(q, tl.trans(latents), input_precision=PRECISION)
            logits = tl.dot(q_rope, tl.trans(k_rope), logits, input_precision=PRECISION)
            visible = exists[None, :] & (keys[None, :] <= positions[:, None])
            logits = tl.where(visible, logits * scale, MASKED)
            new_maximum = tl.maximum(maximum, tl.max(logits, 1))
            shrink = tl.exp2(maximum - new_maximum)
            weights = tl.exp2(logits - new_maximum[:, None])
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None]
            acc = tl.dot(weights.to(latents.dtype), latents, acc, input_precision=PRECISION)
            maximum = new_maximum
        q, q_rope = tl.zeros_like(q), tl.zeros_like(q_rope)
    total = tl.maximum(total, 1.0e-30)  # a padding row has no key: zeros, not NaN
    return acc / total[:, None], maximum + tl.log2(total)


@triton.jit
def _find_tile(query_start_ptr, num_rows, search_steps, HEADS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Find this program's row and tile: the last row i whose first tile, its members' first // BLOCK_M + i, is not
    past it."""
    flat = tl.program_id(0)
    low = 0
    high = num_rows
    for _ in range(0, search_steps):
        middle = tl.minimum((low + high) // 2, num_rows - 1)
        first_tile = tl.load(query_start_ptr + middle) * HEADS // BLOCK_M + middle
        low = tl.where(first_tile <= flat, middle, low)
        high = tl.where(first_tile <= flat, high, middle)
    return low, flat - (tl.load(query_start_ptr + low) * HEADS // BLOCK_M + low)
