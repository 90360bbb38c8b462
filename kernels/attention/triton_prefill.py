# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""Prefill attention in Triton: rows of any number of query tokens over the paged KV cache.

FlashAttention-2 (arXiv:2307.08691) with the query heads of one KV head packed into a tile: row m of a tile is
query token m // group, head m % group. A flat grid covers the ragged rows; each program finds its row by binary search
over query_start_loc, so the host needs no row's length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.attention.triton_common import (
    LOG2_E,
    MASKED,
    WHOLE,
    cap_logits,
    has_ptx,
    is_wide,
    load_scales,
    load_sinks,
    lower_queries,
    oldest_seen,
    page_offsets,
    reach_of,
    scale_arguments,
    split_dims,
    value_strides,
    widen,
    widen_values,
)
from kernels.elementwise.reference import INT8, UNSCALED, KVScales


@dataclass(frozen=True)
class PrefillConfig:
    """Tile sizes and launch settings of one program."""

    block_m: int  # query tokens x heads of a group, per tile
    block_n: int  # keys per tile
    num_warps: int
    num_stages: int
    maxnreg: int | None = None


def prefill_config(
    head_dim: int, dtype: torch.dtype, *, max_rows: int, total_rows: int, has_token_scales: bool = False
) -> PrefillConfig:
    """Choose tiles (benchmarks/notes.md). Rows here are query tokens x heads: of the longest row, and of all.

    Limited to 128 registers, two tiles of 128 rows share an SM, and one's softmax overlaps the other's products.
    has_token_scales: of an int8 pool; they need registers, so that these tiles would spill to local memory.
    """
    if dtype == torch.float32:
        return PrefillConfig(block_m=32, block_n=32, num_warps=4 if head_dim <= 256 else 8, num_stages=1)
    if head_dim > (128 if has_token_scales else 256):  # more rows would not leave registers for the output
        return PrefillConfig(block_m=64, block_n=32, num_warps=8, num_stages=2)
    if head_dim > 128:
        if max_rows <= 64:
            return PrefillConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)
        return PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=2)
    has_few_tiles = total_rows <= 264 * 128  # of 128 rows: fewer than two for each of 132 SMs
    if has_token_scales or max_rows <= 64 or has_few_tiles:
        return PrefillConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)
    return PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=3, maxnreg=128)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    first_row: int = 0,
    skips_decodes: bool = False,
    sliding_window: int | None = None,
    chunk: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    kv_scales: KVScales = UNSCALED,
    config: PrefillConfig | None = None,
    pdl: bool = False,
) -> None:
    """Write the causal attention of rows first_row… into `out`; tokens of earlier rows are not touched. Never syncs.

    q, out: [T, num_heads, head_dim], the last two dimensions dense; caches and options as AttentionBackend.forward;
    query_start_loc: [R + 1], seq_lens: [R] int32;
    block_table: [R, max_blocks] int32. Rows before first_row have one token each. skips_decodes: leave rows of one
    token to decode_attention. Query i of a row of n has position seq_len - n + i; a row of seq_len 0 is padding
    and yields zeros.
    """
    total_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    if config is None:
        config = prefill_config(
            max(head_dim, v_cache.shape[3]), q.dtype, max_rows=max_query_len * group,
            total_rows=total_tokens * num_heads, has_token_scales=k_cache.dtype == INT8,
        )  # fmt: skip
    tokens_per_tile = max(1, config.block_m // group)
    num_rows = seq_lens.shape[0] - first_row
    # Row i's tiles begin at (its first token // tokens_per_tile) + i: always enough room, without a scan
    num_tiles = (total_tokens - first_row) // tokens_per_tile + num_rows
    assert group <= config.block_m
    reach, reach_kind = reach_of(sliding_window, chunk)
    k_main, k_rest = split_dims(head_dim)
    k_scale, v_scale, scales = scale_arguments(kv_scales, q.dtype)
    _prefill_kernel[(num_kv_heads, num_tiles)](
        q, k_cache, v_cache, out, block_table, query_start_loc, seq_lens, sinks,
        first_row, num_rows, num_rows.bit_length(),
        k_scale * scale * (math.log2(math.e) if softcap == 0.0 else 1.0), softcap, v_scale, reach,
        q.stride(0), out.stride(0), *k_cache.stride()[:3], *value_strides(k_cache, v_cache), *scales,
        block_table.stride(0),
        GROUP=group, HEAD_DIM=head_dim, K_MAIN=k_main, K_REST=k_rest, VALUE_DIM=v_cache.shape[3],
        D_PAD=triton.next_power_of_2(v_cache.shape[3]), BLOCK_SIZE=block_size,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, TOKENS=tokens_per_tile,
        REACH=reach_kind, HAS_SOFTCAP=softcap > 0.0,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        IS_WIDE=is_wide(k_cache, v_cache), HAS_PTX=has_ptx(q), SKIPS_DECODES=skips_decodes, PDL=pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=pdl, maxnreg=config.maxnreg,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first_row", "num_rows", "search_steps"])
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, query_start_ptr, seq_lens_ptr, sinks_ptr,
    first_row, num_rows, search_steps,
    scale, softcap, v_scale, reach,  # scale holds k's, and log2(e) unless logits are capped
    stride_q_token, stride_out_token, stride_block, stride_slot, stride_head,
    stride_v_block, stride_v_slot, stride_v_head,  # None: values lie as keys do
    k_scales_ptr, v_scales_ptr, stride_scale_block, stride_scale_slot, stride_scale_head,  # see KVScales.for_kernel
    stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, K_MAIN: tl.constexpr, K_REST: tl.constexpr,
    VALUE_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr,
    REACH: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    IS_WIDE: tl.constexpr, HAS_PTX: tl.constexpr, SKIPS_DECODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One (KV head, tile of a row). A row's last tiles, which see the most keys, start first."""
    kv_head = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, tile = _find_tile(query_start_ptr, first_row, num_rows, search_steps, TOKENS)
    query_start = tl.load(query_start_ptr + row)
    query_len = tl.load(query_start_ptr + row + 1) - query_start
    num_tiles = tl.cdiv(query_len, TOKENS)
    # No early return: a tile past the row's end has no key to read and nothing to store
    is_live = tile < num_tiles
    if SKIPS_DECODES:
        is_live = is_live & (query_len > 1)
    first_token = tl.maximum(num_tiles - 1 - tile, 0) * TOKENS
    seq_len = tl.load(seq_lens_ptr + row)
    context_len = seq_len - query_len

    members = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, D_PAD)
    tokens = first_token + members // GROUP
    heads = kv_head * GROUP + members % GROUP
    in_row = is_live & (tokens < query_len) & (members < TOKENS * GROUP)
    token_index = (query_start + tokens).to(tl.int64)
    q_row_ptrs = q_ptr + token_index * stride_q_token + heads * HEAD_DIM
    q = _load_queries(q_row_ptrs, in_row, 0, HEAD_DIM, K_MAIN)
    q_rest = q
    if K_REST > 0:
        q_rest = _load_queries(q_row_ptrs, in_row, K_MAIN, HEAD_DIM, K_REST)
    q, q_rest, scale, rounds = lower_queries(q, q_rest, scale, k_ptr.dtype.element_ty)

    first_position = context_len + first_token
    k_ptr += kv_head.to(tl.int64) * stride_head
    if stride_v_head is None:
        v_ptr += kv_head.to(tl.int64) * stride_head
    else:
        v_ptr += kv_head.to(tl.int64) * stride_v_head
    if k_scales_ptr is not None:
        k_scales_ptr += kv_head * stride_scale_head
        v_scales_ptr += kv_head * stride_scale_head
        if stride_scale_block is None:  # constants of each head
            scale *= tl.load(k_scales_ptr)
            v_scale *= tl.load(v_scales_ptr)
    maximum = tl.full([BLOCK_M], MASKED, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:  # as one more key, whose value is zero
        maximum = load_sinks(sinks_ptr, heads, in_row)
        total += 1.0
    end = tl.where(is_live, tl.minimum(first_position + TOKENS, seq_len), 0)
    full_end = tl.where(is_live, (first_position + 1) // BLOCK_N * BLOCK_N, 0)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    for _ in range(0, rounds):
        view = (
            q, q_rest, k_ptr, v_ptr, table_ptr + row.to(tl.int64) * stride_table,
            context_len + tokens, first_position, seq_len, scale, softcap, reach,
            stride_block, stride_slot, stride_v_block, stride_v_slot,
            k_scales_ptr, v_scales_ptr, stride_scale_block, stride_scale_slot,
        )  # fmt: skip
        acc = _attend_query_tile(
            view, maximum, total, first_position, full_end, end,
            HEAD_DIM, K_MAIN, K_REST, VALUE_DIM, D_PAD,
            BLOCK_M, BLOCK_N, BLOCK_SIZE, REACH, HAS_SOFTCAP, PRECISION, IS_WIDE, HAS_PTX,
        )  # fmt: skip
        q, q_rest = tl.zeros_like(q), tl.zeros_like(q_rest)
    acc = acc * v_scale
    in_tile = in_row[:, None] & (dims < VALUE_DIM)[None, :]
    out_row_ptrs = out_ptr + token_index * stride_out_token + heads * VALUE_DIM
    tl.store(out_row_ptrs[:, None] + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=in_tile)


@triton.jit
def _load_queries(q_row_ptrs, in_row, first, HEAD_DIM: tl.constexpr, SIZE: tl.constexpr):
    """Dimensions first… of the queries of a tile, [BLOCK_M, SIZE]."""
    dims = first + tl.arange(0, SIZE)
    in_tile = in_row[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(q_row_ptrs[:, None] + dims[None, :], mask=in_tile, other=0.0)


@triton.jit
def _attend_query_tile(
    view, maximum, total, first_position, full_end, end,
    HEAD_DIM: tl.constexpr, K_MAIN: tl.constexpr, K_REST: tl.constexpr, VALUE_DIM: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, REACH: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, IS_WIDE: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """Attention of one tile of queries: keys visible to all of them run without masks, the borders with masks."""
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    full_start = 0
    if REACH != WHOLE:
        reach = view[10]
        start = oldest_seen(first_position, reach, REACH) // BLOCK_N * BLOCK_N
        full_start = tl.cdiv(oldest_seen(end - 1, reach, REACH), BLOCK_N) * BLOCK_N
        full_start = tl.minimum(full_start, tl.cdiv(end, BLOCK_N) * BLOCK_N)
        acc, maximum, total = _attend_tiles(
            acc, maximum, total, start, full_start, view,
            HEAD_DIM, K_MAIN, K_REST, VALUE_DIM, D_PAD,
            BLOCK_N, BLOCK_SIZE, REACH, HAS_SOFTCAP, PRECISION, IS_WIDE, HAS_PTX, MASK=True,
        )  # fmt: skip
    acc, maximum, total = _attend_tiles(
        acc, maximum, total, full_start, full_end, view,
        HEAD_DIM, K_MAIN, K_REST, VALUE_DIM, D_PAD,
        BLOCK_N, BLOCK_SIZE, REACH, HAS_SOFTCAP, PRECISION, IS_WIDE, HAS_PTX, MASK=False,
    )  # fmt: skip
    acc, maximum, total = _attend_tiles(
        acc, maximum, total, tl.maximum(full_start, full_end), end, view,
        HEAD_DIM, K_MAIN, K_REST, VALUE_DIM, D_PAD,
        BLOCK_N, BLOCK_SIZE, REACH, HAS_SOFTCAP, PRECISION, IS_WIDE, HAS_PTX, MASK=True,
    )  # fmt: skip
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]  # a row of padding sees no key


@triton.jit
def _find_tile(query_start_ptr, first_row, num_rows, search_steps, TOKENS: tl.constexpr):
    """Find this program's row and tile: the last row i whose first tile, start // TOKENS + i, is not past it."""
    flat = tl.program_id(1)
    base = tl.load(query_start_ptr + first_row)
    low = 0
    high = num_rows
    for _ in range(0, search_steps):
        middle = tl.minimum((low + high) // 2, num_rows - 1)
        first_tile = (tl.load(query_start_ptr + first_row + middle) - base) // TOKENS + middle
        low = tl.where(first_tile <= flat, middle, low)
        high = tl.where(first_tile <= flat, high, middle)
    first_tile = (tl.load(query_start_ptr + first_row + low) - base) // TOKENS + low
    return first_row + low, flat - first_tile


@triton.jit
def _attend_tiles(
    acc, maximum, total, start, end, view,
    HEAD_DIM: tl.constexpr, K_MAIN: tl.constexpr, K_REST: tl.constexpr, VALUE_DIM: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    REACH: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    IS_WIDE: tl.constexpr, HAS_PTX: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys [start, end). MASK: causal, window and row-end borders may cross these tiles."""
    q, q_rest, k_ptr, v_ptr, table_ptr, positions, first, seq_len, scale, softcap, reach = view[:11]
    stride_block, stride_slot, stride_v_block, stride_v_slot = view[11:15]
    k_scales_ptr, v_scales_ptr, stride_scale_block, stride_scale_slot = view[15:]
    dims = tl.arange(0, D_PAD)
    main = tl.arange(0, K_MAIN)
    for tile_start in range(start, end, BLOCK_N):
        keys = tile_start + tl.arange(0, BLOCK_N)
        seen = keys < seq_len  # by a query of this tile: of the others, 0 * NaN would count
        if MASK and REACH != WHOLE:
            seen = seen & (keys >= oldest_seen(first, reach, REACH))
        table_mask = seen if MASK else None
        offsets = page_offsets(table_ptr, keys, table_mask, stride_block, stride_slot, BLOCK_SIZE, IS_WIDE)
        in_main = seen[:, None] & (main < HEAD_DIM)[None, :]
        k = _load_tile(k_ptr + (offsets[:, None] + main[None, :]), in_main, MASK or HEAD_DIM < K_MAIN)
        k = widen(k, q.dtype, HAS_PTX)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if K_REST > 0:
            more = K_MAIN + tl.arange(0, K_REST)
            in_rest = seen[:, None] & (more < HEAD_DIM)[None, :]
            rest_ptrs = k_ptr + (offsets[:, None] + more[None, :])
            k_rest = _load_tile(rest_ptrs, in_rest, MASK or HEAD_DIM < K_MAIN + K_REST)
            k_rest = widen(k_rest, q.dtype, HAS_PTX)
            logits = tl.dot(q_rest, tl.trans(k_rest), logits, input_precision=PRECISION)
        places = offsets  # of scales, if tokens have any
        if stride_scale_block is not None:
            places = page_offsets(
                table_ptr, keys, table_mask, stride_scale_block, stride_scale_slot, BLOCK_SIZE, IS_WIDE
            )
            logits = logits * load_scales(k_scales_ptr + places, seen, MASK, LIFTED=False)[None, :]
        if HAS_SOFTCAP:
            logits = cap_logits(logits * scale, softcap)
            scale_log2 = LOG2_E
        else:
            scale_log2 = scale
        if MASK:
            visible = keys[None, :] <= positions[:, None]
            if REACH != WHOLE:
                visible = visible & (keys[None, :] >= oldest_seen(positions, reach, REACH)[:, None])
            logits = tl.where(visible, logits, MASKED)
        new_maximum = tl.maximum(maximum, tl.max(logits, 1) * scale_log2)
        shrink = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(logits * scale_log2 - new_maximum[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if stride_scale_block is not None:
            weights *= load_scales(v_scales_ptr + places, seen, MASK, LIFTED=q.dtype == tl.float16)[None, :]
        if stride_v_block is not None:
            offsets = page_offsets(table_ptr, keys, table_mask, stride_v_block, stride_v_slot, BLOCK_SIZE, IS_WIDE)
        in_tile = seen[:, None] & (dims < VALUE_DIM)[None, :]
        v = _load_tile(v_ptr + (offsets[:, None] + dims[None, :]), in_tile, MASK or VALUE_DIM != D_PAD)
        v = widen_values(v, q.dtype, HAS_PTX)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        maximum = new_maximum
    return acc, maximum, total


@triton.jit
def _load_tile(pointers, mask, MASK: tl.constexpr):
    """Load, masked only if necessary: a predicate costs registers in the inner loop."""
    if MASK:
        return tl.load(pointers, mask=mask, other=0.0)
    else:
        return tl.load(pointers)
