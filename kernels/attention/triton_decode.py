# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""Decode attention in Triton: one query token per row over the paged KV cache, split along the keys.

Flash decoding (Dao et al. 2023, crfm.stanford.edu/2023/10/12/flashdecoding.html) with two changes. The device cuts the
ranges of keys, so one CUDA graph serves all lengths: either a kernel once per step (cut_rows), in pieces of about equal
length over all rows, so that a long row among short ones causes no tail; or, without it, each row is cut into a number
of splits that depends only on the number of rows. The split that arrives last at a row's counter merges the others in
order, so there is no second launch and the result does not depend on which one is last. A row with a sliding window or
chunk is cut from its oldest visible key on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    prefetch_l2,
    reach_of,
    scale_arguments,
    split_dims,
    value_strides,
    widen,
    widen_values,
)
from kernels.attention.triton_cut_rows import MAX_SPLITS
from kernels.attention.triton_splits import FEW_PAIRS, DecodeScratch, add_shared, meet_splits
from kernels.elementwise.reference import INT8, UNSCALED, KVScales

if TYPE_CHECKING:
    from kernels.attention.triton_shared import SharedParts

_MIN_SPLIT = tl.constexpr(128)  # keys: below that, merging costs more than a split saves


@dataclass(frozen=True)
class DecodeConfig:
    """Tile size and launch settings of one program."""

    block_n: int  # keys per tile
    num_warps: int
    num_stages: int


def decode_config(
    head_dim: int,
    dtype: torch.dtype,
    *,
    num_pairs: int,
    is_split: bool,
    is_cut: bool = False,
    has_token_scales: bool = False,
) -> DecodeConfig:
    """Choose tiles (benchmarks/notes.md): 32 KiB of keys if latency limits, 16 if programs share an SM."""
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    if num_pairs <= FEW_PAIRS:
        stages = 5 if is_cut else 3
        return DecodeConfig(block_n=min(128, max(16, 32768 // row_bytes)), num_warps=4, num_stages=stages)
    if head_dim > 256 and row_bytes == 1024:
        return DecodeConfig(block_n=32, num_warps=4, num_stages=5 if is_split else 3)
    if head_dim > 128 and row_bytes == 512 and is_split:
        return DecodeConfig(block_n=64, num_warps=4, num_stages=3)
    num_warps = 2 if row_bytes <= (256 if has_token_scales else 512) else 4  # for the registers of the output
    return DecodeConfig(
        block_n=min(128, max(16, 16384 // row_bytes)), num_warps=num_warps, num_stages=5 if is_split else 3
    )


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    scratch: DecodeScratch,
    *,
    scale: float,
    sliding_window: int | None = None,
    chunk: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    kv_scales: KVScales = UNSCALED,
    query_start_loc: torch.Tensor | None = None,
    max_seq_len: int | None = None,
    pieces: torch.Tensor | None = None,
    shared: SharedParts | None = None,
    num_splits: int | None = None,
    config: DecodeConfig | None = None,
    pdl: bool = False,
) -> None:
    """Write the attention of R rows of one query token each into `out`. Never syncs.

    q, out: [R, num_heads, head_dim], the last two dimensions dense; caches and options as AttentionBackend.forward;
    query_start_loc: [R + 1] int32: the rows are ragged (q, out: [T, …]), and only those of one token are computed;
    block_table: [>= R, max_blocks] int32; seq_lens: [>= R] int32, 0 for a padding row (its output is zeros).
    max_seq_len: an upper bound of seq_lens, spares empty splits; pieces: cut_rows of these rows, instead of splits by
    the number of rows; not with a window or chunk. shared: the rows' attention over shared keys, to which it is added;
    the pieces are then of the keys behind these. num_splits, config: override the choice (benchmarks).
    pdl: launch early, under the kernel before it (Hopper's programmatic dependent launch), and ask L2 for the first
    keys meanwhile: block_table, seq_lens and pieces must then come from a kernel earlier than that one.
    """
    _, num_heads, head_dim = q.shape
    num_rows = q.shape[0] if query_start_loc is None else query_start_loc.shape[0] - 1
    block_size, num_kv_heads = k_cache.shape[1:3]
    num_pairs = num_rows * num_kv_heads
    if num_splits is None:
        num_splits = scratch.num_splits(num_pairs=num_pairs)
    # Also for fp8 and int8 caches by q's dtype, to which their tiles are converted
    config = config or decode_config(
        head_dim, q.dtype, num_pairs=num_pairs, is_split=num_splits > 1, is_cut=pieces is not None,
        has_token_scales=k_cache.dtype == INT8,
    )  # fmt: skip
    is_few = num_splits > 1
    reach, reach_kind = reach_of(sliding_window, chunk)
    if reach:
        num_splits = max(1, min(num_splits, -(-min(reach, max_seq_len or reach) // _MIN_SPLIT.value)))
    elif max_seq_len is not None:
        num_splits = max(1, min(num_splits, -(-max_seq_len // config.block_n)))
    if pieces is None:  # of pieces no length may choose the kernel: it would compile while serving
        is_few = num_splits > 1
    group = num_heads // num_kv_heads
    assert pieces is not None or num_splits == 1 or num_pairs * num_splits * group <= scratch.lse.shape[0]
    assert pieces is None or not reach
    assert shared is None or pieces is not None
    places = (num_splits, num_rows) if pieces is None else (pieces.shape[0], 1)
    k_main, k_rest = split_dims(head_dim)
    k_scale, v_scale, scales = scale_arguments(kv_scales, q.dtype)
    _decode_kernel[(num_kv_heads, *places)](
        q, k_cache, v_cache, out, block_table, seq_lens, query_start_loc, pieces, sinks,
        scratch.partial, scratch.lse, scratch.arrivals,
        *((None, None, None) if shared is None else (shared.rows, shared.partial, shared.lse)),
        k_scale * scale * (math.log2(math.e) if softcap == 0.0 else 1.0), softcap, v_scale, reach,
        q.stride(0), out.stride(0), *k_cache.stride()[:3], *value_strides(k_cache, v_cache), *scales,
        block_table.stride(0),
        GROUP=group, HEAD_DIM=head_dim, K_MAIN=k_main, K_REST=k_rest, VALUE_DIM=v_cache.shape[3],
        D_PAD=triton.next_power_of_2(v_cache.shape[3]),
        BLOCK_G=max(16, triton.next_power_of_2(group)), BLOCK_N=config.block_n, BLOCK_SIZE=block_size,
        IS_WIDE=is_wide(k_cache, v_cache),
        SPLIT=pieces is not None or num_splits > 1, FEW=is_few, MAX_SPLITS=MAX_SPLITS,
        SHARED_M=0 if shared is None else shared.block_m, REACH=reach_kind, HAS_SOFTCAP=softcap > 0.0,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", HAS_PTX=has_ptx(q), PDL=pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, seq_lens_ptr, query_start_ptr, pieces_ptr, sinks_ptr,
    partial_ptr, lse_ptr, arrivals_ptr,
    shared_rows_ptr, shared_ptr, shared_lse_ptr,  # see SharedParts; None: rows share no keys
    scale, softcap, v_scale, reach,  # scale holds k's, and log2(e) unless logits are capped
    stride_q_row, stride_out_row, stride_block, stride_slot, stride_head,
    stride_v_block, stride_v_slot, stride_v_head,  # None: values lie as keys do
    k_scales_ptr, v_scales_ptr, stride_scale_block, stride_scale_slot, stride_scale_head,  # see KVScales.for_kernel
    stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, K_MAIN: tl.constexpr, K_REST: tl.constexpr,
    VALUE_DIM: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_WIDE: tl.constexpr,
    SPLIT: tl.constexpr, FEW: tl.constexpr, MAX_SPLITS: tl.constexpr, SHARED_M: tl.constexpr, REACH: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, HAS_PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One (KV head, split, row), or (KV head, piece). KV heads vary fastest: neighbours in memory run together."""
    kv_head = tl.program_id(0)
    if pieces_ptr is None:
        split = tl.program_id(1)
        row = tl.program_id(2)
        seq_len = tl.load(seq_lens_ptr + row)
        oldest = 0
        if REACH != WHOLE:
            oldest = oldest_seen(seq_len - 1, reach, REACH)
        start, end, used_splits = _split_range(oldest, seq_len, split, BLOCK_N)
        entry = (row * tl.num_programs(0) + kv_head) * tl.num_programs(1)
        counter = row * tl.num_programs(0) + kv_head
    else:
        piece = tl.program_id(1)
        row, start, end, split, used_splits = _read_piece(pieces_ptr + piece * 4)
        entry = (piece - split) * tl.num_programs(0) + kv_head * used_splits
        counter = (piece - split) * tl.num_programs(0) + kv_head
    token = row.to(tl.int64)
    if query_start_ptr is not None:
        token = tl.load(query_start_ptr + row).to(tl.int64)
        if pieces_ptr is None:
            is_decode = tl.load(query_start_ptr + row + 1) - token == 1
            used_splits = tl.where(is_decode, used_splits, 0)
    table_row_ptr = table_ptr + row.to(tl.int64) * stride_table
    k_ptr += kv_head * stride_head
    if stride_v_head is None:
        v_ptr += kv_head * stride_head
    else:
        v_ptr += kv_head * stride_v_head
    if PDL:
        if FEW and split < used_splits:
            _prefetch_keys(
                k_ptr, v_ptr, table_row_ptr, start, end, stride_block, stride_slot, stride_v_block, stride_v_slot,
                HEAD_DIM, VALUE_DIM, BLOCK_SIZE, IS_WIDE,
            )  # fmt: skip
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if split >= used_splits:
        return

    if k_scales_ptr is not None:
        k_scales_ptr += kv_head * stride_scale_head
        v_scales_ptr += kv_head * stride_scale_head
        if stride_scale_block is None:  # constants of each head
            scale *= tl.load(k_scales_ptr)
            v_scale *= tl.load(v_scales_ptr)
    heads = tl.arange(0, BLOCK_G)
    q_row_ptr = q_ptr + token * stride_q_row
    q = _load_queries(q_row_ptr, kv_head, 0, GROUP, HEAD_DIM, BLOCK_G, K_MAIN)
    q_rest = q
    if K_REST > 0:
        q_rest = _load_queries(q_row_ptr, kv_head, K_MAIN, GROUP, HEAD_DIM, BLOCK_G, K_REST)
    q, q_rest, scale, _ = lower_queries(q, q_rest, scale, k_ptr.dtype.element_ty)
    acc, lse = attend_range(
        (q, q_rest, k_ptr, v_ptr, table_row_ptr, k_scales_ptr, v_scales_ptr), start, end, scale, softcap,
        stride_block, stride_slot, stride_v_block, stride_v_slot, stride_scale_block, stride_scale_slot,
        HEAD_DIM, K_MAIN, K_REST, VALUE_DIM, D_PAD, BLOCK_G, BLOCK_N, BLOCK_SIZE, IS_WIDE, HAS_SOFTCAP, PRECISION,
        HAS_PTX,
    )  # fmt: skip
    acc = acc * v_scale

    dims = tl.arange(0, D_PAD)
    in_tile = (heads < GROUP)[:, None] & (dims < VALUE_DIM)[None, :]
    out_row_ptr = out_ptr + token * stride_out_row + kv_head * GROUP * VALUE_DIM
    if sinks_ptr is not None:
        sinks_ptr += kv_head * GROUP
    shared = (shared_rows_ptr, shared_ptr, shared_lse_ptr, row, kv_head, tl.num_programs(0))
    if not SPLIT or used_splits == 1:
        if SHARED_M > 0:
            acc, lse = add_shared(acc, lse, shared, GROUP, VALUE_DIM, D_PAD, BLOCK_G, SHARED_M)
        if sinks_ptr is not None:
            acc = acc / (1.0 + tl.exp2(load_sinks(sinks_ptr, heads, heads < GROUP) - lse))[:, None]
        out_offsets = heads[:, None] * VALUE_DIM + dims[None, :]
        tl.store(out_row_ptr + out_offsets, acc.to(out_ptr.dtype.element_ty), mask=in_tile)
    else:
        meet_splits(
            acc, lse, out_row_ptr, partial_ptr, lse_ptr, arrivals_ptr + counter, sinks_ptr, shared, entry * GROUP,
            split, used_splits, GROUP, VALUE_DIM, D_PAD, BLOCK_G, MAX_SPLITS, SHARED_M,
        )  # fmt: skip


@triton.jit
def _load_queries(
    q_row_ptr, kv_head, first, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Dimensions first… of the query heads of a KV head, [BLOCK_G, SIZE]."""
    heads = tl.arange(0, BLOCK_G)
    dims = first + tl.arange(0, SIZE)
    in_tile = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    in_group = (kv_head * GROUP + heads[:, None]) * HEAD_DIM + dims[None, :]
    return tl.load(q_row_ptr + in_group, mask=in_tile, other=0.0)


@triton.jit
def _read_piece(piece_ptr):
    """Read a piece of cut_rows: row, first key, end, split, splits of the row."""
    splits = tl.load(piece_ptr + 3)
    return tl.load(piece_ptr), tl.load(piece_ptr + 1), tl.load(piece_ptr + 2), splits >> 16, splits & 0xFFFF


@triton.jit
def _split_range(oldest, seq_len, split, BLOCK_N: tl.constexpr):
    """Return this split's keys [start, end), and the number of non-empty splits: visible tiles are divided evenly."""
    num_tiles = tl.maximum(tl.cdiv(seq_len - oldest, BLOCK_N), 1)
    tiles_per_split = tl.maximum(tl.cdiv(num_tiles, tl.num_programs(1)), tl.cdiv(_MIN_SPLIT, BLOCK_N))
    start = oldest + split * tiles_per_split * BLOCK_N
    return start, tl.minimum(start + tiles_per_split * BLOCK_N, seq_len), tl.cdiv(num_tiles, tiles_per_split)


@triton.jit
def _prefetch_keys(
    k_ptr, v_ptr, table_ptr, start, end, stride_block, stride_slot, stride_v_block, stride_v_slot,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Prefetch the first 128 keys and values into L2, by line. Only a hint: the newest may not be written yet."""
    LINES: tl.constexpr = triton.next_power_of_2((HEAD_DIM * k_ptr.dtype.element_ty.primitive_bitwidth + 1023) // 1024)
    keys = start + tl.arange(0, 128)
    offsets = page_offsets(table_ptr, keys, keys < end, stride_block, stride_slot, BLOCK_SIZE, IS_WIDE)
    lines = (tl.arange(0, LINES) * (HEAD_DIM // LINES))[None, :]
    prefetch_l2(k_ptr + (offsets[:, None] + lines))
    if stride_v_block is not None:
        offsets = page_offsets(table_ptr, keys, keys < end, stride_v_block, stride_v_slot, BLOCK_SIZE, IS_WIDE)
    if VALUE_DIM != HEAD_DIM:
        lines = (tl.arange(0, LINES) * (VALUE_DIM // LINES))[None, :]
    prefetch_l2(v_ptr + (offsets[:, None] + lines))


@triton.jit
def attend_range(
    pointers, start, end, scale, softcap, stride_block, stride_slot, stride_v_block, stride_v_slot,
    stride_scale_block, stride_scale_slot,
    HEAD_DIM: tl.constexpr, K_MAIN: tl.constexpr, K_REST: tl.constexpr, VALUE_DIM: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    IS_WIDE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """Softmax over keys [start, end): normalised output [BLOCK_G, D_PAD] fp32 and log2 of the denominator [BLOCK_G]."""
    q, q_rest, k_ptr, v_ptr, table_ptr, k_scales_ptr, v_scales_ptr = pointers
    dims = tl.arange(0, D_PAD)
    main = tl.arange(0, K_MAIN)
    maximum = tl.full([BLOCK_G], MASKED, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, D_PAD], tl.float32)
    for tile_start in range(start, end, BLOCK_N):
        keys = tile_start + tl.arange(0, BLOCK_N)
        visible = keys < end
        offsets = page_offsets(table_ptr, keys, visible, stride_block, stride_slot, BLOCK_SIZE, IS_WIDE)
        in_main = visible[:, None] & (main < HEAD_DIM)[None, :]  # else 0 * NaN would count
        k = tl.load(k_ptr + (offsets[:, None] + main[None, :]), mask=in_main, other=0.0)
        k = widen(k, q.dtype, HAS_PTX)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if K_REST > 0:
            more = K_MAIN + tl.arange(0, K_REST)
            in_rest = visible[:, None] & (more < HEAD_DIM)[None, :]
            k_rest = tl.load(k_ptr + (offsets[:, None] + more[None, :]), mask=in_rest, other=0.0)
            k_rest = widen(k_rest, q.dtype, HAS_PTX)
            logits = tl.dot(q_rest, tl.trans(k_rest), logits, input_precision=PRECISION)
        places = offsets  # of scales, if tokens have any
        if stride_scale_block is not None:
            places = page_offsets(table_ptr, keys, visible, stride_scale_block, stride_scale_slot, BLOCK_SIZE, IS_WIDE)
            logits = logits * load_scales(k_scales_ptr + places, visible, MASK=True, LIFTED=False)[None, :]
        logits = logits * scale
        if HAS_SOFTCAP:
            logits = cap_logits(logits, softcap) * LOG2_E
        logits = tl.where(visible[None, :], logits, MASKED)
        new_maximum = tl.maximum(maximum, tl.max(logits, 1))
        shrink = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(logits - new_maximum[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if stride_scale_block is not None:
            weights *= load_scales(v_scales_ptr + places, visible, MASK=True, LIFTED=q.dtype == tl.float16)[None, :]
        if stride_v_block is not None:
            offsets = page_offsets(table_ptr, keys, visible, stride_v_block, stride_v_slot, BLOCK_SIZE, IS_WIDE)
        in_tile = visible[:, None] & (dims < VALUE_DIM)[None, :]
        v = tl.load(v_ptr + (offsets[:, None] + dims[None, :]), mask=in_tile, other=0.0)
        v = widen_values(v, q.dtype, HAS_PTX)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        maximum = new_maximum
    total = tl.maximum(total, 1.0e-30)  # a padding row has no key: zeros, not NaN
    return acc / total[:, None], maximum + tl.log2(total)
