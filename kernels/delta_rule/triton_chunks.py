# ruff: noqa: ANN001  (Triton reads annotations as types: kernel arguments carry none)
"""Long rows of the gated delta rule by chunks of 64 tokens, on tensor cores; the form is that of chunks.py.

After triton_chunk_systems, each row's chunks one after the other, a program for some rows of one head's state, which
stays in registers:

    u = transform (v - k S^T decayed),   o = q S^T decayed + reads u,   S = S decayed + u^T k decayed

The number of chunks is bounded by the host; which row a chunk belongs to is found on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.delta_rule.triton_chunk_systems import CHUNK, count_chunks, prepare_chunks
from kernels.dispatch import is_hopper
from kernels.states import StateMetadata, StateView
from kernels.states_triton import place, row_writes, state_offsets, step_row

_MIN_ROWS_PAD = 64
_REGISTERS = 168  # of a thread: three programs of the first phase fit a Hopper multiprocessor, and none spills
_SHARED_BYTES = 220 * 1024  # for the inputs of chunks, of a Hopper multiprocessor's 227 KiB


class ChunkConfig(NamedTuple):
    """Tiles and warps of both phases."""

    prepare_warps: int
    block: int  # rows of a state in one program of the scan; at least 16
    scan_warps: int
    scan_stages: int


_MULTIPROCESSORS = 132


def advance_by_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    out: torch.Tensor,
    view: StateView,
    metadata: StateMetadata,
    *,
    scale: float,
    eps: float,
    short: int,
    config: ChunkConfig | None,
    pdl: bool,
) -> None:
    """Advance the states of rows of more than `short` tokens, and write what their tokens read to out."""
    (num_tokens, num_heads, d_v), d_k = v.shape, q.shape[2]
    first_row, num_rows = rows_of_prompts(metadata)
    if num_rows == 0:
        return
    # Every row may have one chunk that is not full
    most = min(num_tokens // CHUNK + num_rows, num_rows * triton.cdiv(metadata.max_query_len, CHUNK))
    by_dimension = g.dim() == 3
    config = config or _choose(q, num_rows * num_heads, d_v, by_dimension=by_dimension)
    step = (metadata.query_start_loc, metadata.seq_lens)
    k_pad = max(16, triton.next_power_of_2(d_k))
    stage_bytes = q.element_size() * CHUNK * (2 * CHUNK + (3 if by_dimension else 2) * k_pad)
    sizes = _sizes(q, num_heads, num_rows, short=short, pdl=pdl)
    systems = prepare_chunks(
        q, k, g, beta, step, (first_row, num_rows), most, sizes,
        scale=scale, eps=eps, num_warps=config.prepare_warps,
        max_registers=_REGISTERS if k_pad <= 128 and q.element_size() == 2 and _fits_hopper(q.device) else None,
    )  # fmt: skip
    stages = max(1, min(config.scan_stages, _SHARED_BYTES // stage_bytes))
    block = min(config.block, max(16, triton.next_power_of_2(d_v)))
    _scan_kernel[(triton.cdiv(d_v, block), num_heads, num_rows)](
        q, k, v, out, *systems, q.stride(0), k.stride(0), v.stride(0), *step,
        metadata.req_index, metadata.writes, first_row, num_rows, most,
        view.pool, metadata.pages, metadata.pages.stride(0), *place(view),
        D_V=d_v, BLOCK=block, BY_DIMENSION=by_dimension, STAGES=stages, **sizes,
        num_warps=config.scan_warps, num_stages=stages,
    )  # fmt: skip


def _sizes(q: torch.Tensor, num_heads: int, num_rows: int, *, short: int, pdl: bool) -> dict[str, Any]:
    """Return the compile-time values of both phases."""
    return {
        "NUM_HEADS": num_heads, "REPEAT": num_heads // q.shape[1], "D_K": q.shape[2],
        "K_PAD": max(16, triton.next_power_of_2(q.shape[2])), "CHUNK": CHUNK,
        "ROWS_PAD": _rows_pad(num_rows), "SHORT": short,
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32", "PDL": pdl, "launch_pdl": pdl,
    }  # fmt: skip


def _choose(q: torch.Tensor, num_heads: int, d_v: int, *, by_dimension: bool) -> ChunkConfig:
    """Choose by measurement on an H100, for so many heads of all rows, of 128 × 128; small tiles for other GPUs."""
    if not _fits_hopper(q.device):
        return ChunkConfig(4, 32, 4, 2)
    has_few = num_heads * triton.cdiv(d_v, 32) <= _MULTIPROCESSORS
    return ChunkConfig(4, 32 if by_dimension or has_few else 64, 4, 3)


def _fits_hopper(device: torch.device) -> bool:
    """Return True if tiles may take a Hopper multiprocessor's shared memory; also without a GPU, to compile for it."""
    return device.type != "cuda" or is_hopper(device)


def rows_of_prompts(metadata: StateMetadata) -> tuple[int, int]:
    """Return the first row that may have several tokens, and the number of rows from there to the last such one."""
    num_rows = metadata.seq_lens.shape[0]
    if metadata.num_decodes is not None:
        return metadata.num_decodes, num_rows - metadata.num_decodes
    return 0, num_rows if metadata.max_prefills is None else min(metadata.max_prefills, num_rows)


def _rows_pad(num_rows: int) -> int:
    """Round up to a few distinct sizes: each one compiles a kernel."""
    return _MIN_ROWS_PAD if num_rows <= _MIN_ROWS_PAD else max(512, triton.next_power_of_2(num_rows))


@triton.jit(do_not_specialize=["first_row", "num_rows", "most", "first_piece"])
def _scan_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, transform_ptr, reads_ptr, factors_ptr, decays_ptr, stride_q, stride_k, stride_v,
    query_start_ptr, seq_lens_ptr, req_index_ptr, writes_ptr, first_row, num_rows, most,
    pool_ptr, pages_ptr, stride_pages, first_piece, num_pages,
    NUM_LANES: tl.constexpr, PIECE: tl.constexpr, ROW_SIZE: tl.constexpr,
    D_V: tl.constexpr, BLOCK: tl.constexpr, BY_DIMENSION: tl.constexpr, STAGES: tl.constexpr, NUM_HEADS: tl.constexpr,
    REPEAT: tl.constexpr, D_K: tl.constexpr, K_PAD: tl.constexpr, CHUNK: tl.constexpr, ROWS_PAD: tl.constexpr,
    SHORT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """All chunks of one row, BLOCK rows of one head's state. The state is held as [K_PAD, BLOCK]."""
    row, head = tl.program_id(2), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunks = count_chunks(query_start_ptr, seq_lens_ptr, first_row, num_rows, CHUNK, ROWS_PAD, SHORT)
    index = tl.sum(tl.where(tl.arange(0, ROWS_PAD) < row, chunks, 0), 0)
    first, num_tokens, has_state, is_padding = step_row(query_start_ptr, seq_lens_ptr, first_row + row)
    if (num_tokens > SHORT) & (is_padding == 0):
        end = first + num_tokens
        places, dims = tl.arange(0, CHUNK), tl.arange(0, K_PAD)
        values = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        in_values, in_dims = values < D_V, dims < D_K
        may_write = row_writes(writes_ptr, first_row + row)
        pages = pages_ptr + tl.load(req_index_ptr + first_row + row).to(tl.int64) * stride_pages
        offsets = state_offsets(
            pages, head * D_V + values, in_values & (has_state | may_write), first_piece, num_pages,
            NUM_LANES, PIECE, ROW_SIZE,
        )  # fmt: skip
        state_ptrs = pool_ptr + offsets[None, :] + dims[:, None]
        in_state = in_dims[:, None] & in_values[None, :]
        state = tl.load(state_ptrs, mask=in_state & has_state, other=0.0)
        dtype: tl.constexpr = q_ptr.dtype.element_ty
        key_columns = head // REPEAT * D_K + dims[None, :]
        value_columns = head * D_V + values[None, :]
        square = places[:, None] * CHUNK + places[None, :]
        stride = most.to(tl.int64) * NUM_HEADS * CHUNK
        # With stages of its own the loop also has loads ahead that no product takes: factors of queries, and decays
        for chunk in tl.range(0, tl.cdiv(num_tokens, CHUNK), num_stages=STAGES):
            tokens = first.to(tl.int64) + chunk * CHUNK + places
            is_token = tokens < end
            place_of = (index + chunk).to(tl.int64) * NUM_HEADS + head
            transform = tl.load(transform_ptr + place_of * CHUNK * CHUNK + square)
            reads = tl.load(reads_ptr + place_of * CHUNK * CHUNK + square)
            in_tokens = is_token[:, None] & in_values[None, :]
            v = tl.load(v_ptr + tokens[:, None] * stride_v + value_columns, mask=in_tokens, other=0.0).to(tl.float32)
            start = state.to(dtype)
            if BY_DIMENSION:
                factors = factors_ptr + (place_of * CHUNK + places[:, None]) * D_K + dims[None, :]
                k_first = tl.load(factors, mask=in_dims[None, :], other=0.0)
                q_first = tl.load(factors + stride * D_K, mask=in_dims[None, :], other=0.0)
                k_last = tl.load(factors + 2 * stride * D_K, mask=in_dims[None, :], other=0.0)
                decay = tl.load(decays_ptr + place_of * D_K + dims, mask=in_dims, other=0.0)[:, None]
                errors = v - tl.dot(k_first, start, input_precision=PRECISION)
                updates = tl.dot(transform, errors.to(dtype), input_precision=PRECISION)
                out = tl.dot(q_first, start, input_precision=PRECISION)
                added = tl.dot(tl.trans(k_last), updates.to(dtype), input_precision=PRECISION)
            else:
                mask = is_token[:, None] & in_dims[None, :]
                k = tl.load(k_ptr + tokens[:, None] * stride_k + key_columns, mask=mask, other=0.0)
                q = tl.load(q_ptr + tokens[:, None] * stride_q + key_columns, mask=mask, other=0.0)
                factors = factors_ptr + place_of * CHUNK + places
                k_first, k_last = tl.load(factors)[:, None], tl.load(factors + 2 * stride)[:, None]
                q_first = tl.load(factors + stride)[:, None]
                decay = tl.load(decays_ptr + place_of + 0 * dims)[:, None]
                errors = v - k_first * tl.dot(k, start, input_precision=PRECISION)
                updates = tl.dot(transform, errors.to(dtype), input_precision=PRECISION)
                out = q_first * tl.dot(q, start, input_precision=PRECISION)
                added = tl.dot(tl.trans(k), (k_last * updates).to(dtype), input_precision=PRECISION)
            out += tl.dot(reads, updates.to(dtype), input_precision=PRECISION)
            state = state * decay + added
            out_ptrs = out_ptr + (tokens[:, None] * NUM_HEADS) * D_V + value_columns
            tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=in_tokens)
        tl.store(state_ptrs, state, mask=in_state & may_write)
