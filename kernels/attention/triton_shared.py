# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""Attention of grouped decode rows over the keys that they share: many rows' queries in one tile.

Cascade attention (Ye et al. 2024, flashinfer.ai/2024/02/02/cascade-inference.html; Juravsky et al. 2024, Hydragen,
arXiv:2402.05099) with one level. shared_attention() reads a group's shared keys and values once for a tile of rows, and
keeps the normalised output and the log2 of the softmax denominator of each piece of the keys. Decode attention then
begins behind them, and merges them where it would store its output (triton_splits.add_shared): no launch of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.attention.base import GroupedRows
from kernels.attention.triton_common import has_ptx, is_wide, lower_queries, scale_arguments, split_dims, value_strides
from kernels.attention.triton_decode import attend_range
from kernels.elementwise.reference import UNSCALED, KVScales

MAX_SHARED_HEAD_DIM = 256  # a tile's queries, keys and values fill a multiprocessor's shared memory
_MANY_QUERIES = 256  # of a KV head, over all rows of the step: tiles of 128 keep the tensor cores busier


@dataclass(frozen=True)
class SharedConfig:
    """Tile sizes and launch settings of one program."""

    block_m: int  # queries per tile, row by row: those of the query heads of one KV head
    block_n: int  # keys per tile
    num_warps: int
    num_stages: int
    per_sm: int  # programs that share a multiprocessor


def shared_config(head_dim: int, dtype: torch.dtype, *, num_queries: int) -> SharedConfig:
    """Choose tiles. head_dim: of keys or values, the larger; num_queries: of a KV head in the step."""
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    if row_bytes > 512:
        return SharedConfig(block_m=64, block_n=16, num_warps=4, num_stages=2, per_sm=1)
    if row_bytes > 256:
        return SharedConfig(block_m=64, block_n=64, num_warps=4, num_stages=2, per_sm=1)
    if num_queries >= _MANY_QUERIES:
        return SharedConfig(block_m=128, block_n=64, num_warps=8, num_stages=3, per_sm=1)
    return SharedConfig(block_m=64, block_n=64, num_warps=4, num_stages=3, per_sm=1)


@dataclass(frozen=True)
class SharedParts:
    """The attention of a layer's rows over their shared keys, by piece."""

    # [R, 4] int32: GroupedRows.rows
    rows: torch.Tensor
    # [N * num_kv_heads * block_m, value_head_dim] and [N * num_kv_heads * block_m] fp32: normalised outputs, and the
    # log2 of their softmax denominators
    partial: torch.Tensor
    lse: torch.Tensor
    block_m: int
    own_pieces: torch.Tensor | None  # GroupedRows.own_pieces


def shared_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    grouped: GroupedRows,
    config: SharedConfig,
    *,
    scale: float,
    softcap: float = 0.0,
    kv_scales: KVScales = UNSCALED,
    query_start_loc: torch.Tensor | None = None,
    pdl: bool = False,
) -> SharedParts:
    """Attend the grouped rows over their shared keys. Never syncs. Arguments as of decode_attention.

    config: grouped.tile_rows is config.block_m // the query heads of a KV head.
    """
    _, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    value_dim, num_pieces = v_cache.shape[3], grouped.pieces.shape[0]
    num_entries = num_pieces * num_kv_heads * config.block_m
    partial = torch.empty(num_entries, value_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(num_entries, dtype=torch.float32, device=q.device)
    k_main, k_rest = split_dims(head_dim)
    k_scale, v_scale, scales = scale_arguments(kv_scales, q.dtype)
    _shared_kernel[(num_kv_heads, num_pieces)](
        q, k_cache, v_cache, partial, lse, block_table, query_start_loc, grouped.pieces, grouped.members,
        k_scale * scale * (math.log2(math.e) if softcap == 0.0 else 1.0), softcap, v_scale,
        q.stride(0), *k_cache.stride()[:3], *value_strides(k_cache, v_cache), *scales, block_table.stride(0),
        GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, K_MAIN=k_main, K_REST=k_rest, VALUE_DIM=value_dim,
        D_PAD=triton.next_power_of_2(value_dim), TILE_ROWS=grouped.tile_rows, BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, BLOCK_SIZE=block_size, IS_WIDE=is_wide(k_cache, v_cache), HAS_SOFTCAP=softcap > 0.0,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", HAS_PTX=has_ptx(q), PDL=pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=pdl,
    )  # fmt: skip
    return SharedParts(grouped.rows, partial, lse, config.block_m, grouped.own_pieces)


@triton.jit
def _shared_kernel(
    q_ptr, k_ptr, v_ptr, partial_ptr, lse_ptr, table_ptr, query_start_ptr, pieces_ptr, members_ptr,
    scale, softcap, v_scale,  # scale holds k's, and log2(e) unless logits are capped
    stride_q_row, stride_block, stride_slot, stride_head,
    stride_v_block, stride_v_slot, stride_v_head,  # None: values lie as keys do
    k_scales_ptr, v_scales_ptr, stride_scale_block, stride_scale_slot, stride_scale_head,  # see KVScales.for_kernel
    stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, K_MAIN: tl.constexpr, K_REST: tl.constexpr,
    VALUE_DIM: tl.constexpr, D_PAD: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_WIDE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, HAS_PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One (KV head, piece of a tile). The first row's block table stands for all rows of the tile."""
    kv_head = tl.program_id(0)
    piece = tl.program_id(1)
    tile = tl.load(pieces_ptr + piece * 4)
    start = tl.load(pieces_ptr + piece * 4 + 1)
    end = tl.load(pieces_ptr + piece * 4 + 2)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if end == 0:
        return
    queries = tl.arange(0, BLOCK_M)
    place = queries // GROUP
    members_ptr += tile * TILE_ROWS
    row = tl.load(members_ptr + place, mask=place < TILE_ROWS, other=-1)
    is_query = row >= 0
    token = tl.where(is_query, row, 0).to(tl.int64)
    if query_start_ptr is not None:
        token = tl.load(query_start_ptr + token).to(tl.int64)
    q_row_ptrs = q_ptr + token * stride_q_row + (kv_head * GROUP + queries % GROUP) * HEAD_DIM
    q = _load_queries(q_row_ptrs, is_query, 0, HEAD_DIM, K_MAIN)
    q_rest = q
    if K_REST > 0:
        q_rest = _load_queries(q_row_ptrs, is_query, K_MAIN, HEAD_DIM, K_REST)
    q, q_rest, scale, rounds = lower_queries(q, q_rest, scale, k_ptr.dtype.element_ty)
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
    table_row_ptr = table_ptr + tl.load(members_ptr).to(tl.int64) * stride_table
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    lse = tl.zeros([BLOCK_M], tl.float32)
    for _ in range(0, rounds):
        acc, lse = attend_range(
            (q, q_rest, k_ptr, v_ptr, table_row_ptr, k_scales_ptr, v_scales_ptr), start, end, scale, softcap,
            stride_block, stride_slot, stride_v_block, stride_v_slot, stride_scale_block, stride_scale_slot,
            HEAD_DIM, K_MAIN, K_REST, VALUE_DIM, D_PAD, BLOCK_M, BLOCK_N, BLOCK_SIZE, IS_WIDE, HAS_SOFTCAP, PRECISION,
            HAS_PTX,
        )  # fmt: skip
        q, q_rest = tl.zeros_like(q), tl.zeros_like(q_rest)
    dims = tl.arange(0, D_PAD)
    entries = (piece * tl.num_programs(0) + kv_head).to(tl.int64) * BLOCK_M + queries
    in_tile = is_query[:, None] & (dims < VALUE_DIM)[None, :]
    tl.store(partial_ptr + entries[:, None] * VALUE_DIM + dims[None, :], acc * v_scale, mask=in_tile)
    tl.store(lse_ptr + entries, lse, mask=is_query)


@triton.jit
def _load_queries(q_row_ptrs, is_query, first, HEAD_DIM: tl.constexpr, SIZE: tl.constexpr):
    """Dimensions first… of the queries of a tile, [BLOCK_M, SIZE]."""
    dims = first + tl.arange(0, SIZE)
    in_tile = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(q_row_ptrs[:, None] + dims[None, :], mask=in_tile, other=0.0)
