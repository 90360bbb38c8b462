"""Decode attention over an 8-bit pool in Gluon: computes what triton_decode.py does, for e4m3 and int8.

Triton reads values of 8 bits from shared memory byte by byte, since its second operand has neighbouring keys in a
register, and makes bfloat16 of e4m3 by an instruction of which few run at once. Here tiles go from memory to registers
and become float16 there (gluon_decode_tiles.py). Both products have keys and values first, so logits are [keys, query
heads], outputs [dimensions, query heads], and eight heads fill an instruction. Each warp attends to keys of its own,
with loads of the next ones in flight; at the end warps meet, then the pieces of a row, as in triton_splits.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from kernels.attention.gluon_attend import oldest_seen
from kernels.attention.gluon_decode_tiles import (
    dims_of,
    key_of,
    keys_layout,
    keys_of_values,
    load_queries,
    load_tile,
    scales_layout,
    score,
    sums_layout,
    tile_pointers,
    weigh,
)
from kernels.attention.triton_common import LOG2_E, LOWER, WHOLE, is_wide, reach_of, scale_arguments
from kernels.attention.triton_splits import DecodeScratch, warps_of_pairs
from kernels.elementwise.reference import FP8, INT8, UNSCALED, KVScales
from kernels.gluon_common import grid_dependency

# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types)

if not triton.__version__.startswith("3.6."):
    raise ImportError(f"the 8-bit decode kernel needs Triton 3.6, whose Gluon it uses, not {triton.__version__}")

WARPS_PER_SM = 8  # for which the registers of a multiprocessor suffice

_MASKED = gl.constexpr(-(2.0**100))
_LEAST_SCALE = gl.constexpr(2.0**-60)  # of an int8 value, in a logarithm
_MERGED_AT_ONCE = gl.constexpr(8)  # pieces
_UNIT = gl.constexpr(64)  # keys: a split's length is a multiple of it, without pieces
_MIN_UNITS = gl.constexpr(2)


@dataclass(frozen=True)
class Decode8Config:
    """Tile size and launch settings of one program."""

    keys: int  # of a warp at once: 16 or 32
    num_warps: int
    max_registers: int


def decode8_config(head_dim: int, *, num_pairs: int, num_sms: int) -> Decode8Config:
    """Choose tiles (benchmarks/notes.md). num_pairs: of rows and KV heads."""
    if head_dim > 128:
        return Decode8Config(keys=16, num_warps=4, max_registers=255)
    return Decode8Config(keys=32, num_warps=warps_of_pairs(num_pairs, num_sms=num_sms), max_registers=255)


def takes(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Return True if this kernel supports these tensors, given a device of compute capability 9."""
    head_dim, group = q.shape[2], q.shape[1] // k_cache.shape[2]
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and k_cache.dtype == v_cache.dtype
        and k_cache.dtype in (FP8, INT8)
        and head_dim == v_cache.shape[3]
        and head_dim in (64, 128, 256)
        and group <= (16 if head_dim <= 128 else 8)
        and k_cache.stride() == v_cache.stride()
        and all(_fits_words(cache) for cache in (k_cache, v_cache))
    )


def _fits_words(cache: torch.Tensor) -> bool:
    """Return True if 16 bytes of a head can be loaded at once, and sixteen slots are in one block."""
    is_aligned = cache.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in cache.stride()[:3])
    return is_aligned and cache.stride(3) == 1 and cache.shape[1] % 16 == 0


def decode8_attention(
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
    config: Decode8Config | None = None,
    pdl: bool = False,
) -> None:
    """Equal decode_attention for tensors that `takes` allows, but for rows that share keys. Never syncs."""
    _, num_heads, head_dim = q.shape
    num_rows = q.shape[0] if query_start_loc is None else query_start_loc.shape[0] - 1
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    reach, reach_kind = reach_of(sliding_window, chunk)
    assert pieces is None or not reach
    num_pairs = num_rows * num_kv_heads
    num_splits = scratch.num_splits(num_pairs=num_pairs)
    longest = min(reach or max_seq_len or 2**31, max_seq_len or 2**31)
    num_splits = max(1, min(num_splits, -(-longest // (_UNIT.value * _MIN_UNITS.value))))
    assert pieces is not None or num_splits == 1 or num_pairs * num_splits * group <= scratch.lse.shape[0]
    places = (num_splits, num_rows) if pieces is None else (pieces.shape[0], 1)
    config = config or decode8_config(head_dim, num_pairs=num_pairs, num_sms=scratch.num_sms)
    k_scale, v_scale, scales = scale_arguments(kv_scales, torch.float32)  # weights hold no scales
    k_words, v_words = k_cache.view(torch.int32), v_cache.view(torch.int32)
    _decode8_kernel[(num_kv_heads, *places)](
        q, k_words, v_words, out, block_table, seq_lens, query_start_loc, pieces, sinks,
        scratch.partial, scratch.lse, scratch.arrivals,
        k_scale * scale * (math.log2(math.e) if softcap == 0.0 else 1.0) / LOWER.value, softcap, v_scale, reach,
        q.stride(0), out.stride(0), *k_words.stride()[:3], *scales, block_table.stride(0),
        GROUP=group, HEADS=8 if group <= 8 else 16, HEAD_DIM=head_dim, KEYS=config.keys, BLOCK_SIZE=block_size,
        IS_INT8=k_cache.dtype == INT8, IS_WIDE=is_wide(k_words, v_words), REACH=reach_kind,
        HAS_SOFTCAP=softcap > 0.0, PDL=pdl, num_warps=config.num_warps, launch_pdl=pdl, maxnreg=config.max_registers,
    )  # fmt: skip


@gluon.jit
def _decode8_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, seq_lens_ptr, query_start_ptr, pieces_ptr, sinks_ptr,
    partial_ptr, lse_ptr, arrivals_ptr,
    scale, softcap, v_scale, reach,  # scale holds k's, that of queries, and log2(e) unless logits are capped
    stride_q_row, stride_out_row, stride_block, stride_slot, stride_head,  # of the pool in words
    k_scales_ptr, v_scales_ptr, stride_scale_block, stride_scale_slot, stride_scale_head,  # see KVScales.for_kernel
    stride_table,
    GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    IS_INT8: gl.constexpr, IS_WIDE: gl.constexpr, REACH: gl.constexpr, HAS_SOFTCAP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One (KV head, split, row), or (KV head, piece). KV heads vary fastest: neighbours in memory run together."""
    kv_head = gl.program_id(0)
    num_kv_heads = gl.num_programs(0)
    if pieces_ptr is None:
        split = gl.program_id(1)
        row = gl.program_id(2)
        seq_len = gl.load(seq_lens_ptr + row)
        oldest = 0
        if REACH != WHOLE:
            oldest = oldest_seen(seq_len - 1, reach, REACH)
        units = gl.maximum(gl.cdiv(seq_len - oldest, _UNIT), 1)
        share = gl.maximum(gl.cdiv(units, gl.num_programs(1)), _MIN_UNITS)
        start = oldest + split * share * _UNIT
        end = gl.minimum(start + share * _UNIT, seq_len)
        used_splits = gl.cdiv(units, share)
        entry = (row * num_kv_heads + kv_head) * gl.num_programs(1)
        counter = row * num_kv_heads + kv_head
    else:
        piece = gl.program_id(1)
        row = gl.load(pieces_ptr + piece * 4)
        start = gl.load(pieces_ptr + piece * 4 + 1)
        end = gl.load(pieces_ptr + piece * 4 + 2)
        splits = gl.load(pieces_ptr + piece * 4 + 3)
        split = splits >> 16
        used_splits = splits & 0xFFFF
        entry = (piece - split) * num_kv_heads + kv_head * used_splits
        counter = (piece - split) * num_kv_heads + kv_head
    token = row.to(gl.int64)
    if query_start_ptr is not None:
        token = gl.load(query_start_ptr + row).to(gl.int64)
        if pieces_ptr is None:
            used_splits = gl.where(gl.load(query_start_ptr + row + 1) - token == 1, used_splits, 0)
    if PDL:
        grid_dependency("griddepcontrol.wait;")
        grid_dependency("griddepcontrol.launch_dependents;")
    if split < used_splits:
        q_ptr += token * stride_q_row + kv_head * GROUP * HEAD_DIM
        k_ptr += kv_head * stride_head
        v_ptr += kv_head * stride_head
        if k_scales_ptr is not None:
            k_scales_ptr += kv_head * stride_scale_head
            v_scales_ptr += kv_head * stride_scale_head
            if not IS_INT8:  # constants of each head
                scale *= gl.load(k_scales_ptr)
                v_scale *= gl.load(v_scales_ptr)
        view = (q_ptr, k_ptr, v_ptr, table_ptr + row.to(gl.int64) * stride_table, k_scales_ptr, v_scales_ptr)
        strides = (stride_block, stride_slot, stride_scale_block, stride_scale_slot)
        acc, lse = _attend(
            view, start, end, scale, softcap, strides, GROUP, HEADS, HEAD_DIM, KEYS, BLOCK_SIZE, IS_INT8, IS_WIDE,
            HAS_SOFTCAP,
        )  # fmt: skip
        acc = acc * v_scale
        LAYOUT: gl.constexpr = acc.type.layout
        heads = gl.arange(0, HEADS, gl.SliceLayout(0, LAYOUT))
        dims = dims_of(gl.arange(0, HEAD_DIM, gl.SliceLayout(1, LAYOUT)), HEAD_DIM)
        places = gl.expand_dims(heads * HEAD_DIM, 0) + gl.expand_dims(dims, 1)
        is_head = gl.expand_dims(heads < GROUP, 0)
        out_ptr += token * stride_out_row + kv_head * GROUP * HEAD_DIM
        if sinks_ptr is not None:
            sinks_ptr += kv_head * GROUP
        if used_splits == 1:
            if sinks_ptr is not None:
                acc = acc / gl.expand_dims(1.0 + gl.exp2(_load_sinks(sinks_ptr, heads, GROUP) - lse), 0)
            gl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=is_head)
        else:
            mine = (entry + split) * GROUP
            gl.store(partial_ptr + (mine * HEAD_DIM + places), acc, mask=is_head)
            gl.store(lse_ptr + (mine + heads), lse, mask=heads < GROUP)
            # Every thread's stores before the one thread's release; its acquire before every thread's loads
            gl.thread_barrier()
            arrived = gl.atomic_add(arrivals_ptr + counter, 1, sem="acq_rel")
            if arrived == used_splits - 1:
                gl.store(arrivals_ptr + counter, 0)
                _merge(out_ptr, partial_ptr, lse_ptr, sinks_ptr, entry * GROUP, used_splits, GROUP, HEADS, HEAD_DIM)


@jit
def _load_sinks(sinks_ptr, heads, GROUP: gl.constexpr):
    return gl.load(sinks_ptr + heads, mask=heads < GROUP, other=0.0).to(gl.float32) * LOG2_E


@jit
def _attend(
    view, start, end, scale, softcap, strides,
    GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    IS_INT8: gl.constexpr, IS_WIDE: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Softmax over keys [start, end): normalised output [HEAD_DIM, HEADS] fp32, its rows as of dims_of, and log2 of the
    denominator [HEADS].
    """
    q_ptr, k_ptr, v_ptr, table_ptr, k_scales_ptr, v_scales_ptr = view
    WARPS: gl.constexpr = gl.num_warps()
    SUMS: gl.constexpr = sums_layout(WARPS)
    PLACES: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, keys_layout(WARPS, KEYS, HEAD_DIM)))
    STEP: gl.constexpr = WARPS * KEYS
    SETTINGS: gl.constexpr = (KEYS, BLOCK_SIZE, IS_INT8, IS_WIDE)
    # Sixteen keys that begin at a multiple of it are in one block
    begin = start // 16 * 16
    warps = gl.arange(0, WARPS, gl.SliceLayout(1, PLACES))
    groups = gl.arange(0, KEYS // 16, gl.SliceLayout(0, PLACES))
    firsts = begin + gl.expand_dims(warps * KEYS, 1) + gl.expand_dims(groups * 16, 0)
    pointers = tile_pointers(k_ptr, v_ptr, strides[1], KEYS, HEAD_DIM)
    scale_ptrs = (k_scales_ptr, v_scales_ptr)
    blocks = gl.load(table_ptr + firsts // BLOCK_SIZE, mask=firsts < end, other=0)
    tile = _load(pointers, scale_ptrs, blocks, firsts, True, strides, SETTINGS)
    blocks = gl.load(table_ptr + (firsts + STEP) // BLOCK_SIZE, mask=firsts + STEP < end, other=0)
    q = load_queries(q_ptr, GROUP, HEADS, HEAD_DIM)

    places = gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))
    own = gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, SUMS))) * KEYS, 1)
    own = own + gl.expand_dims(places // 16 * 16 + key_of(places % 16), 0)
    maximum = gl.full([WARPS, HEADS], _MASKED, gl.float32, gl.SliceLayout(1, SUMS))
    total = gl.zeros([WARPS, HEADS], gl.float32, gl.SliceLayout(1, SUMS))
    acc = gl.zeros([WARPS, HEAD_DIM, HEADS], gl.float32, SUMS)
    for first in range(begin, end, STEP):
        k, v, k_scales, v_scales = tile
        firsts += STEP
        tile = _load(pointers, scale_ptrs, blocks, firsts, first + STEP < end, strides, SETTINGS)
        blocks = gl.load(table_ptr + (firsts + STEP) // BLOCK_SIZE, mask=firsts + STEP < end, other=0)
        logits = score(k, q, IS_INT8) * scale
        if IS_INT8:
            logits = logits * gl.expand_dims(k_scales, 2)
        if HAS_SOFTCAP:  # tanh by exp2
            logits = softcap * LOG2_E * (1.0 - 2.0 / (gl.exp2(logits * (2.0 * LOG2_E / softcap)) + 1.0))
        if (first < start) | (first + STEP > end):
            keys = first + own
            visible = (keys >= start) & (keys < end)
            logits = gl.where(gl.expand_dims(visible, 2), logits, _MASKED)
            v_keys = keys_of_values(first, KEYS, HEAD_DIM)
            v = gl.where((v_keys >= start) & (v_keys < end), v, 0)  # 0 * NaN would count
            if IS_INT8:
                v_scales = gl.where(visible, v_scales, 0.0)
        heights = logits
        if IS_INT8:  # a weight times its scale is at most 1
            heights = heights + gl.expand_dims(gl.log2(gl.maximum(v_scales, _LEAST_SCALE)), 2)
        new_maximum = gl.maximum(maximum, gl.max(heights, 1))
        shrink = gl.exp2(maximum - new_maximum)
        weights = gl.exp2(logits - gl.expand_dims(new_maximum, 1))
        total = total * shrink + gl.sum(weights, 1)
        if IS_INT8:
            weights = weights * gl.expand_dims(v_scales, 2)
        acc = weigh(v, weights.to(gl.float16), acc * gl.expand_dims(shrink, 1), IS_INT8)
        maximum = new_maximum
    # Warps meet
    highest = gl.max(maximum, 0)
    shares = gl.exp2(maximum - gl.expand_dims(highest, 0))
    total = gl.maximum(gl.sum(total * shares, 0), 1.0e-30)  # a padding row has no key: zeros, not NaN
    acc = gl.sum(acc * gl.expand_dims(shares, 1), 0)
    HEAD: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    lse = gl.convert_layout(highest + gl.log2(total), HEAD)
    return acc / gl.expand_dims(gl.convert_layout(total, HEAD), 0), lse


@jit
def _load(pointers, scale_ptrs, blocks, firsts, is_any, strides, SETTINGS: gl.constexpr):
    """Load sixteen keys and values from each of firsts on, words, and the scales of both if they are int8."""
    KEYS: gl.constexpr = SETTINGS[0]
    BLOCK_SIZE: gl.constexpr = SETTINGS[1]
    WARPS: gl.constexpr = gl.num_warps()
    stride_block, stride_slot, stride_scale_block, stride_scale_slot = strides
    if SETTINGS[3]:
        blocks = blocks.to(gl.int64)
    slots = firsts % BLOCK_SIZE
    k, v = load_tile(pointers, blocks * stride_block + slots * stride_slot, is_any)
    k_scales = 0.0
    v_scales = 0.0
    if SETTINGS[2]:
        LAYOUT: gl.constexpr = scales_layout(WARPS, KEYS)
        offsets = gl.convert_layout(blocks * stride_scale_block + slots * stride_scale_slot, gl.SliceLayout(2, LAYOUT))
        rows = key_of(gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))) * stride_scale_slot
        offsets = gl.expand_dims(offsets, 2) + gl.expand_dims(gl.expand_dims(rows, 0), 0)
        OWN: gl.constexpr = gl.SliceLayout(2, sums_layout(WARPS))
        k_scales = gl.load(scale_ptrs[0] + offsets, mask=is_any).reshape([WARPS, KEYS])
        k_scales = gl.convert_layout(k_scales, OWN)
        v_scales = gl.load(scale_ptrs[1] + offsets, mask=is_any).reshape([WARPS, KEYS])
        v_scales = gl.convert_layout(v_scales, OWN)
    return k, v, k_scales, v_scales


@jit
def _merge(
    out_ptr, partial_ptr, lse_ptr, sinks_ptr, entries, used_splits,
    GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
) -> None:  # fmt: skip
    """Weigh the pieces of one (row, KV head) by their denominators, in order. Loads skip L1: other SMs wrote them."""
    CHUNK: gl.constexpr = _MERGED_AT_ONCE
    LAYOUT: gl.constexpr = gl.BlockedLayout([CHUNK, 1, 4], [1, 1, 32], [1, gl.num_warps(), 1], [2, 1, 0])
    HEAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, LAYOUT))
    heads = gl.arange(0, HEADS, HEAD)
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    chunk = gl.arange(0, CHUNK, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    maximum = gl.full([HEADS], _MASKED, gl.float32, HEAD)
    total = gl.zeros([HEADS], gl.float32, HEAD)
    acc = gl.zeros([HEADS, HEAD_DIM], gl.float32, gl.SliceLayout(0, LAYOUT))
    for start in range(0, used_splits, CHUNK):
        live = gl.expand_dims(start + chunk < used_splits, 1) & gl.expand_dims(heads < GROUP, 0)
        places = entries + gl.expand_dims((start + chunk) * GROUP, 1) + gl.expand_dims(heads, 0)
        lse = gl.load(lse_ptr + places, mask=live, other=_MASKED, cache_modifier=".cg")
        offsets = gl.expand_dims(places * HEAD_DIM, 2) + gl.expand_dims(gl.expand_dims(dims, 0), 0)
        parts = gl.load(partial_ptr + offsets, mask=gl.expand_dims(live, 2), other=0.0, cache_modifier=".cg")
        new_maximum = gl.maximum(maximum, gl.max(lse, 0))
        shrink = gl.exp2(maximum - new_maximum)
        weights = gl.exp2(lse - gl.expand_dims(new_maximum, 0))
        total = total * shrink + gl.sum(weights, 0)
        acc = acc * gl.expand_dims(gl.convert_layout(shrink, ROWS), 1) + gl.sum(parts * gl.expand_dims(weights, 2), 0)
        maximum = new_maximum
    if sinks_ptr is not None:  # once for all pieces
        total += gl.exp2(_load_sinks(sinks_ptr, heads, GROUP) - maximum)
    acc = acc / gl.expand_dims(gl.convert_layout(total, ROWS), 1)
    heads = gl.arange(0, HEADS, ROWS)
    places = gl.expand_dims(heads * HEAD_DIM, 1) + gl.expand_dims(dims, 0)
    gl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=gl.expand_dims(heads < GROUP, 1))
