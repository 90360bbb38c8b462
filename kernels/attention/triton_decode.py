# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""Decode attention in Triton: one query token per row over the paged KV cache, split along the keys.

Flash decoding (Dao et al. 2023, crfm.stanford.edu/2023/10/12/flashdecoding.html) with two changes. The device cuts the
ranges of keys, so one CUDA graph serves all lengths: either a kernel once per step (cut_rows), in pieces of about equal
length over all rows, so that a long row among short ones causes no tail; or, without it, each row is cut into a number
of splits that depends only on the number of rows. The split that arrives last at a row's counter merges the others in
order, so there is no second launch and the result does not depend on which one is last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.attention.triton_common import LOG2_E, MASKED, cap_logits, is_wide, page_offsets, prefetch_l2
from kernels.attention.triton_cut_rows import MAX_SPLITS
from kernels.elementwise.reference import UNSCALED, KVScales

_FEW_PAIRS = 16  # (row, KV head) pairs of one or two rows: limited by latency, not bandwidth


@dataclass(frozen=True)
class DecodeConfig:
    """Tile size and launch settings of one program."""

    block_n: int  # keys per tile
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class DecodeScratch:
    """Buffers in which the splits of a row are merged. One per stream: two launches in flight must not share it."""

    # [capacity, head_dim] fp32: normalised output of each split and query head
    partial: torch.Tensor
    # [capacity] fp32: log2 of each output's softmax denominator
    lse: torch.Tensor
    # [capacity] int32: splits arrived per (row, KV head); zero between launches
    arrivals: torch.Tensor
    num_sms: int

    @classmethod
    def allocate(cls, *, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> DecodeScratch:
        """Allocate for any number of rows: splits shrink as rows grow, so their product is bounded."""
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16
        # num_splits aims at 3 programs per SM and rounds up, so rows * KV heads * splits stays under twice that. Of cut
        # rows, those longer than a piece have fewer than twice as many pieces as their share of at most 4 per SM
        num_programs = 8 * num_sms + 2 * num_kv_heads
        num_entries = num_programs * (num_heads // num_kv_heads)
        return cls(
            partial=torch.empty(num_entries, head_dim, dtype=torch.float32, device=device),
            lse=torch.empty(num_entries, dtype=torch.float32, device=device),
            arrivals=torch.zeros(num_programs, dtype=torch.int32, device=device),
            num_sms=num_sms,
        )

    def num_splits(self, *, num_pairs: int) -> int:
        """Return the splits of each of num_pairs (row, KV head) pairs, on the host: 1 once pairs fill the device."""
        if num_pairs <= _FEW_PAIRS:
            return max(1, min(MAX_SPLITS, self.num_sms // num_pairs))
        return min(MAX_SPLITS, -(-3 * self.num_sms // num_pairs))

    def num_pieces(self, *, num_rows: int, num_kv_heads: int) -> int:
        """Return how many pieces of num_rows rows run at once, one program per KV head, limited by an SM's memory."""
        num_pairs = num_rows * num_kv_heads
        per_sm = 1 if num_pairs <= _FEW_PAIRS else 3 if self.num_splits(num_pairs=num_pairs) > 1 else 4
        return max(1, per_sm * self.num_sms // num_kv_heads)


def decode_config(
    head_dim: int, dtype: torch.dtype, *, num_pairs: int, is_split: bool, is_cut: bool = False
) -> DecodeConfig:
    """Choose tiles (benchmarks/notes.md): 32 KiB of keys if latency limits, 16 if programs share an SM."""
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    if num_pairs <= _FEW_PAIRS:
        stages = 5 if is_cut else 3
        return DecodeConfig(block_n=min(128, max(16, 32768 // row_bytes)), num_warps=4, num_stages=stages)
    return DecodeConfig(block_n=min(128, max(16, 16384 // row_bytes)), num_warps=2, num_stages=5 if is_split else 3)


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
    softcap: float = 0.0,
    kv_scales: KVScales = UNSCALED,
    query_start_loc: torch.Tensor | None = None,
    max_seq_len: int | None = None,
    pieces: torch.Tensor | None = None,
    num_splits: int | None = None,
    config: DecodeConfig | None = None,
    pdl: bool = False,
) -> None:
    """Write the attention of R rows of one query token each into `out`. Never syncs.

    q, out: [R, num_heads, head_dim], the last two dimensions dense; caches, kv_scales as AttentionBackend.forward;
    query_start_loc: [R + 1] int32: the rows are ragged (q, out: [T, …]), and only those of one token are computed;
    block_table: [>= R, max_blocks] int32; seq_lens: [>= R] int32, 0 for a padding row (its output is zeros).
    max_seq_len: an upper bound of seq_lens, spares empty splits; pieces: cut_rows of these rows, instead of splits by
    the number of rows; not with a window. num_splits, config: override the choice (benchmarks).
    pdl: launch early, under the kernel before it (Hopper's programmatic dependent launch), and ask L2 for the first
    keys meanwhile: block_table, seq_lens and pieces must then come from a kernel earlier than that one.
    """
    _, num_heads, head_dim = q.shape
    num_rows = q.shape[0] if query_start_loc is None else query_start_loc.shape[0] - 1
    block_size, num_kv_heads = k_cache.shape[1:3]
    num_pairs = num_rows * num_kv_heads
    if num_splits is None:
        num_splits = scratch.num_splits(num_pairs=num_pairs)
    # Also for fp8 caches by q's dtype, to which their tiles are converted
    config = config or decode_config(
        head_dim, q.dtype, num_pairs=num_pairs, is_split=num_splits > 1, is_cut=pieces is not None
    )
    is_few = num_splits > 1
    if max_seq_len is not None:
        num_splits = max(1, min(num_splits, -(-max_seq_len // config.block_n)))
    if pieces is None:  # of pieces no length may choose the kernel: it would compile while serving
        is_few = num_splits > 1
    group = num_heads // num_kv_heads
    assert pieces is not None or num_splits == 1 or num_pairs * num_splits * group <= scratch.lse.shape[0]
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1  # noqa: PT018
    assert pieces is None or sliding_window is None
    places = (num_splits, num_rows) if pieces is None else (pieces.shape[0], 1)
    _decode_kernel[(num_kv_heads, *places)](
        q, k_cache, v_cache, out, block_table, seq_lens, query_start_loc, pieces,
        scratch.partial, scratch.lse, scratch.arrivals,
        kv_scales.k * scale * (math.log2(math.e) if softcap == 0.0 else 1.0), softcap, kv_scales.v, sliding_window or 0,
        q.stride(0), out.stride(0), *k_cache.stride()[:3], block_table.stride(0),
        GROUP=group, HEAD_DIM=head_dim, D_PAD=triton.next_power_of_2(head_dim),
        BLOCK_G=max(16, triton.next_power_of_2(group)), BLOCK_N=config.block_n, BLOCK_SIZE=block_size,
        IS_WIDE=is_wide(k_cache),
        SPLIT=pieces is not None or num_splits > 1, FEW=is_few, MAX_SPLITS=MAX_SPLITS,
        HAS_WINDOW=sliding_window is not None, HAS_SOFTCAP=softcap > 0.0,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", PDL=pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, seq_lens_ptr, query_start_ptr, pieces_ptr,
    partial_ptr, lse_ptr, arrivals_ptr,
    scale, softcap, v_scale, window,  # scale holds k's, and log2(e) unless logits are capped
    stride_q_row, stride_out_row, stride_block, stride_slot, stride_head, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_WIDE: tl.constexpr,
    SPLIT: tl.constexpr, FEW: tl.constexpr, MAX_SPLITS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One (KV head, split, row), or (KV head, piece). KV heads vary fastest: neighbours in memory run together."""
    kv_head = tl.program_id(0)
    oldest = 0
    if pieces_ptr is None:
        split = tl.program_id(1)
        row = tl.program_id(2)
        seq_len = tl.load(seq_lens_ptr + row)
        if HAS_WINDOW:
            oldest = tl.maximum(seq_len - window, 0)
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
    if PDL:
        if FEW and split < used_splits:
            _prefetch_keys(
                k_ptr + kv_head * stride_head, v_ptr + kv_head * stride_head, table_row_ptr, start, end,
                stride_block, stride_slot, HEAD_DIM, BLOCK_SIZE, IS_WIDE,
            )  # fmt: skip
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if split >= used_splits:
        return

    heads = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, D_PAD)
    in_tile = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    in_group = (kv_head * GROUP + heads[:, None]) * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + token * stride_q_row + in_group, mask=in_tile, other=0.0)
    acc, lse = _attend_range(
        q, k_ptr + kv_head * stride_head, v_ptr + kv_head * stride_head, table_row_ptr,
        start, end, oldest, scale, softcap, stride_block, stride_slot,
        HEAD_DIM, D_PAD, BLOCK_G, BLOCK_N, BLOCK_SIZE, IS_WIDE, HAS_WINDOW, HAS_SOFTCAP, PRECISION,
    )  # fmt: skip
    acc = acc * v_scale

    out_row_ptr = out_ptr + token * stride_out_row + kv_head * GROUP * HEAD_DIM
    out_offsets = heads[:, None] * HEAD_DIM + dims[None, :]
    if not SPLIT or used_splits == 1:
        tl.store(out_row_ptr + out_offsets, acc.to(out_ptr.dtype.element_ty), mask=in_tile)
    else:
        _meet_splits(
            acc, lse, out_row_ptr, partial_ptr, lse_ptr, arrivals_ptr + counter, entry * GROUP, split,
            used_splits, GROUP, HEAD_DIM, D_PAD, BLOCK_G, MAX_SPLITS,
        )  # fmt: skip


@triton.jit
def _read_piece(piece_ptr):
    """Read a piece of cut_rows: row, first key, end, split, splits of the row."""
    splits = tl.load(piece_ptr + 3)
    return tl.load(piece_ptr), tl.load(piece_ptr + 1), tl.load(piece_ptr + 2), splits >> 16, splits & 0xFFFF


@triton.jit
def _split_range(oldest, seq_len, split, BLOCK_N: tl.constexpr):
    """Return this split's keys [start, end), and the number of non-empty splits: visible tiles are divided evenly."""
    first_tile = oldest // BLOCK_N
    num_tiles = tl.maximum(tl.cdiv(seq_len, BLOCK_N) - first_tile, 1)
    # At least 128 keys: below that, merging costs more than a split saves
    tiles_per_split = tl.maximum(tl.cdiv(num_tiles, tl.num_programs(1)), tl.cdiv(128, BLOCK_N))
    start = (first_tile + split * tiles_per_split) * BLOCK_N
    return start, tl.minimum(start + tiles_per_split * BLOCK_N, seq_len), tl.cdiv(num_tiles, tiles_per_split)


@triton.jit
def _meet_splits(
    acc, lse, out_row_ptr, partial_ptr, lse_ptr, arrivals_ptr, entries, split, used_splits,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK_G: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Store this split's result; the last split of the (row, KV head) pair to arrive merges them all."""
    heads = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, D_PAD)
    mine = entries + split * GROUP + heads
    in_tile = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(partial_ptr + mine[:, None] * HEAD_DIM + dims[None, :], acc, mask=in_tile)
    tl.store(lse_ptr + mine, lse, mask=heads < GROUP)
    # Every thread's stores before the one thread's release; its acquire before every thread's loads
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel")
    if arrived == used_splits - 1:
        tl.store(arrivals_ptr, 0)
        _merge_splits(out_row_ptr, partial_ptr, lse_ptr, entries, used_splits, GROUP, HEAD_DIM, D_PAD, MAX_SPLITS)


@triton.jit
def _prefetch_keys(
    k_ptr, v_ptr, table_ptr, start, end, stride_block, stride_slot,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Prefetch the first 128 keys and values into L2, by line. Only a hint: the newest may not be written yet."""
    LINES: tl.constexpr = triton.next_power_of_2((HEAD_DIM * k_ptr.dtype.element_ty.primitive_bitwidth + 1023) // 1024)
    keys = start + tl.arange(0, 128)
    offsets = page_offsets(table_ptr, keys, keys < end, stride_block, stride_slot, BLOCK_SIZE, IS_WIDE)
    offsets = offsets[:, None] + (tl.arange(0, LINES) * (HEAD_DIM // LINES))[None, :]
    prefetch_l2(k_ptr + offsets)
    prefetch_l2(v_ptr + offsets)


@triton.jit
def _attend_range(
    q, k_ptr, v_ptr, table_ptr, start, end, oldest, scale, softcap, stride_block, stride_slot,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    IS_WIDE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Softmax over keys [start, end): normalised output [BLOCK_G, D_PAD] fp32 and log2 of the denominator [BLOCK_G]."""
    dims = tl.arange(0, D_PAD)
    maximum = tl.full([BLOCK_G], MASKED, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, D_PAD], tl.float32)
    for tile_start in range(start, end, BLOCK_N):
        keys = tile_start + tl.arange(0, BLOCK_N)
        visible = (keys < end) & (keys >= oldest) if HAS_WINDOW else keys < end
        offsets = page_offsets(table_ptr, keys, visible, stride_block, stride_slot, BLOCK_SIZE, IS_WIDE)
        tile = offsets[:, None] + dims[None, :]
        in_tile = visible[:, None] & (dims < HEAD_DIM)[None, :]  # else 0 * NaN would count
        k = tl.load(k_ptr + tile, mask=in_tile, other=0.0).to(q.dtype)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_SOFTCAP:
            logits = cap_logits(logits, softcap) * LOG2_E
        logits = tl.where(visible[None, :], logits, MASKED)
        new_maximum = tl.maximum(maximum, tl.max(logits, 1))
        shrink = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(logits - new_maximum[:, None])
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(v_ptr + tile, mask=in_tile, other=0.0).to(q.dtype)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        maximum = new_maximum
    total = tl.maximum(total, 1.0e-30)  # a padding row has no key: zeros, not NaN
    return acc / total[:, None], maximum + tl.log2(total)


@triton.jit
def _merge_splits(
    out_row_ptr, partial_ptr, lse_ptr, entries, used_splits,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Weigh the splits of one (row, KV head) by their denominators. Loads skip L1: other SMs wrote the data."""
    G_PAD: tl.constexpr = triton.next_power_of_2(GROUP)
    CHUNK: tl.constexpr = max(1, 8192 // (G_PAD * D_PAD))
    heads = tl.arange(0, G_PAD)
    dims = tl.arange(0, D_PAD)
    splits = tl.arange(0, MAX_SPLITS)
    all_lse = tl.load(
        lse_ptr + entries + splits[:, None] * GROUP + heads[None, :],
        mask=(splits < used_splits)[:, None] & (heads < GROUP)[None, :], other=MASKED, cache_modifier=".cg",
    )  # fmt: skip
    maximum = tl.max(all_lse, 0)
    total = tl.sum(tl.exp2(all_lse - maximum[None, :]), 0)
    acc = tl.zeros([G_PAD, D_PAD], tl.float32)
    for start in range(0, used_splits, CHUNK):
        chunk = start + tl.arange(0, CHUNK)
        live = (chunk < used_splits)[:, None] & (heads < GROUP)[None, :]
        rows = entries + chunk[:, None] * GROUP + heads[None, :]
        lse = tl.load(lse_ptr + rows, mask=live, other=MASKED, cache_modifier=".cg")
        parts = tl.load(
            partial_ptr + rows[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=live[:, :, None] & (dims < HEAD_DIM)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        acc += tl.sum(parts * tl.exp2(lse - maximum[None, :])[:, :, None], 0)
    mask = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    acc = acc / total[:, None]
    tl.store(out_row_ptr + heads[:, None] * HEAD_DIM + dims[None, :], acc.to(out_row_ptr.dtype.element_ty), mask=mask)
