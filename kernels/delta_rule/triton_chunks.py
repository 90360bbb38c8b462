# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""Long rows of the gated delta rule by chunks of 64 tokens, on tensor cores; the form is that of chunks.py.

Two phases. First all chunks of all rows in parallel, since no state is needed: with A the matrix of a chunk's system,

    transform = (I + A)^-1 diag(beta),   reads = scale * (q_i.k_j decayed from j to i, for j <= i)

Then each row's chunks one after the other, a program for some rows of one head's state, which stays in registers:

    u = transform (v - k S^T decayed),   o = q S^T decayed + reads u,   S = S decayed + u^T k decayed

Queries and keys enter matrix products as they are, and their norms and decays as float32 factors of rows and columns;
with a gate for each key dimension the products take decayed copies. The system is solved in float32: each of its
products is three of tf32.
The number of chunks is bounded by the host; which row a chunk belongs to is found on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.states import StateMetadata, StateView
from kernels.states_triton import place, row_writes, state_offsets, step_row

CHUNK = 64
_MIN_ROWS_PAD = 64
_SHARED_BYTES = 220 * 1024  # for the inputs of chunks, of a Hopper multiprocessor's 227 KiB


class ChunkConfig(NamedTuple):
    """Tiles and warps of both phases."""

    prepare_warps: int
    block: int  # rows of a state in one program of the scan; at least 16
    scan_warps: int
    scan_stages: int


_BY_TOKEN, _BY_DIMENSION = ChunkConfig(4, 32, 4, 2), ChunkConfig(8, 32, 4, 2)


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
    first_row, num_rows = _rows_of_prompts(metadata)
    if num_rows == 0:
        return
    # Every row may have one chunk that is not full
    most = min(num_tokens // CHUNK + num_rows, num_rows * triton.cdiv(metadata.max_query_len, CHUNK))
    by_dimension = g.dim() == 3
    config = config or (_BY_DIMENSION if by_dimension else _BY_TOKEN)
    scratch = _allocate(q, most, num_heads, by_dimension=by_dimension)
    step = (metadata.query_start_loc, metadata.seq_lens)
    k_pad = max(16, triton.next_power_of_2(d_k))
    stage_bytes = q.element_size() * CHUNK * (2 * CHUNK + (3 if by_dimension else 2) * k_pad)
    sizes = {
        "NUM_HEADS": num_heads, "REPEAT": num_heads // q.shape[1], "D_K": d_k, "K_PAD": k_pad, "CHUNK": CHUNK,
        "ROWS_PAD": _rows_pad(num_rows), "SHORT": short,
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32", "PDL": pdl, "launch_pdl": pdl,
    }  # fmt: skip
    prepare = _dimensions_kernel if by_dimension else _scalars_kernel
    prepare[(num_heads, most)](
        q, k, g, beta, *scratch, q.stride(0), k.stride(0), scale, eps, *step,
        first_row, num_rows, most, **sizes, num_warps=config.prepare_warps,
    )  # fmt: skip
    block = min(config.block, max(16, triton.next_power_of_2(d_v)))
    _scan_kernel[(triton.cdiv(d_v, block), num_heads, num_rows)](
        q, k, v, out, *scratch, q.stride(0), k.stride(0), v.stride(0), *step,
        metadata.req_index, metadata.writes, first_row, num_rows, most,
        view.pool, metadata.pages, metadata.pages.stride(0), *place(view),
        D_V=d_v, BLOCK=block, BY_DIMENSION=by_dimension, **sizes,
        num_warps=config.scan_warps, num_stages=max(1, min(config.scan_stages, _SHARED_BYTES // stage_bytes)),
    )  # fmt: skip


def _allocate(q: torch.Tensor, most: int, num_heads: int, *, by_dimension: bool) -> tuple[torch.Tensor, ...]:
    """Return what the first phase leaves to the second, of each chunk and head: transform, reads, factors, decays.

    Factors are of keys and of queries that meet the chunk's first state, and of keys that enter its last: numbers, or
    by dimension the vectors themselves. The decay is that of the whole chunk.
    """
    transform = q.new_empty(most, num_heads, CHUNK, CHUNK)
    if by_dimension:
        factors = q.new_empty(3, most, num_heads, CHUNK, q.shape[2])
        decays = q.new_empty(most, num_heads, q.shape[2], dtype=torch.float32)
    else:
        factors = q.new_empty(3, most, num_heads, CHUNK, dtype=torch.float32)
        decays = q.new_empty(most, num_heads, dtype=torch.float32)
    return transform, torch.empty_like(transform), factors, decays


def _rows_of_prompts(metadata: StateMetadata) -> tuple[int, int]:
    """Return the first row that may have several tokens, and the number of rows from there to the last such one."""
    num_rows = metadata.seq_lens.shape[0]
    if metadata.num_decodes is not None:
        return metadata.num_decodes, num_rows - metadata.num_decodes
    return 0, num_rows if metadata.max_prefills is None else min(metadata.max_prefills, num_rows)


def _rows_pad(num_rows: int) -> int:
    """Round up to a few distinct sizes: each one compiles a kernel."""
    return _MIN_ROWS_PAD if num_rows <= _MIN_ROWS_PAD else max(512, triton.next_power_of_2(num_rows))


@triton.jit
def _count_chunks(
    query_start_ptr, seq_lens_ptr, first_row, num_rows,
    CHUNK: tl.constexpr, ROWS_PAD: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """Return the chunks of each long row: [ROWS_PAD] int32."""
    rows = tl.arange(0, ROWS_PAD)
    mask = rows < num_rows
    starts = tl.load(query_start_ptr + first_row + rows, mask=mask, other=0)
    ends = tl.load(query_start_ptr + first_row + rows + 1, mask=mask, other=0)
    seq_lens = tl.load(seq_lens_ptr + first_row + rows, mask=mask, other=0)
    return tl.where((seq_lens > 0) & (ends - starts > SHORT), (ends - starts + CHUNK - 1) // CHUNK, 0)


@triton.jit
def _find_chunk(
    query_start_ptr, seq_lens_ptr, first_row, num_rows, index,
    CHUNK: tl.constexpr, ROWS_PAD: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """Return the first token of chunk number `index` of the step, and its row's end; equal if there is none."""
    ends = tl.cumsum(_count_chunks(query_start_ptr, seq_lens_ptr, first_row, num_rows, CHUNK, ROWS_PAD, SHORT), 0)
    is_before = ends <= index
    row = tl.sum(is_before.to(tl.int32), 0)
    exists = row < num_rows
    row = first_row + tl.where(exists, row, 0)
    end = tl.load(query_start_ptr + row + 1)
    first = tl.load(query_start_ptr + row) + CHUNK * (index - tl.max(tl.where(is_before, ends, 0), 0))
    return tl.where(exists, first, end), end


@triton.jit(do_not_specialize=["first_row", "num_rows", "most"])
def _scalars_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, transform_ptr, reads_ptr, factors_ptr, decays_ptr, stride_q, stride_k, scale, eps,
    query_start_ptr, seq_lens_ptr, first_row, num_rows, most,
    NUM_HEADS: tl.constexpr, REPEAT: tl.constexpr, D_K: tl.constexpr, K_PAD: tl.constexpr, CHUNK: tl.constexpr,
    ROWS_PAD: tl.constexpr, SHORT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One head of one chunk, with one gate for each token."""
    head, index = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first, end = _find_chunk(query_start_ptr, seq_lens_ptr, first_row, num_rows, index, CHUNK, ROWS_PAD, SHORT)
    if first < end:
        places, dims = tl.arange(0, CHUNK), tl.arange(0, K_PAD)
        tokens = first.to(tl.int64) + places
        is_token = tokens < end
        mask = is_token[:, None] & (dims < D_K)[None, :]
        columns = head // REPEAT * D_K + dims[None, :]
        q = tl.load(q_ptr + tokens[:, None] * stride_q + columns, mask=mask, other=0.0)
        k = tl.load(k_ptr + tokens[:, None] * stride_k + columns, mask=mask, other=0.0)
        beta = tl.load(beta_ptr + tokens * NUM_HEADS + head, mask=is_token, other=0.0)
        g = tl.load(g_ptr + tokens * NUM_HEADS + head, mask=is_token, other=0.0)
        q_norm, k_norm = _inverse_norms(q, eps) * scale, _inverse_norms(k, eps)
        sums, whole = tl.cumsum(g, 0), tl.sum(g, 0)
        is_below = places[:, None] > places[None, :]
        # Above the diagonal the power may be infinite, and is not taken
        decay = tl.exp(sums[:, None] - sums[None, :]) * k_norm[None, :]
        keys = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        keys = tl.where(is_below, keys * decay * (beta * k_norm)[:, None], 0.0)
        queries = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        queries = tl.where(places[:, None] >= places[None, :], queries * decay * q_norm[:, None], 0.0)
        place_of = index * NUM_HEADS + head
        _store_square(reads_ptr, place_of, queries, CHUNK)
        blocks = tl.arange(0, 4)
        is_diagonal = blocks[:, None, None, None] == blocks[None, None, :, None]
        diagonal = tl.sum(tl.where(is_diagonal, tl.reshape(keys, (4, CHUNK // 4, 4, CHUNK // 4)), 0.0), 2)
        lower = tl.where(places[:, None] // (CHUNK // 4) > places[None, :] // (CHUNK // 4), keys, 0.0)
        inverse = _invert(diagonal, tl.reshape(lower, (4, CHUNK // 4, CHUNK)), CHUNK)
        _store_square(transform_ptr, place_of, inverse * beta[None, :], CHUNK)
        factors = factors_ptr + place_of * CHUNK + places
        stride = most * NUM_HEADS * CHUNK
        from_start = tl.exp(sums)
        tl.store(factors, k_norm * from_start)
        tl.store(factors + stride, q_norm * from_start)
        tl.store(factors + 2 * stride, k_norm * tl.exp(whole - sums))
        tl.store(decays_ptr + place_of, tl.exp(whole))


@triton.jit(do_not_specialize=["first_row", "num_rows", "most"])
def _dimensions_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, transform_ptr, reads_ptr, factors_ptr, decays_ptr, stride_q, stride_k, scale, eps,
    query_start_ptr, seq_lens_ptr, first_row, num_rows, most,
    NUM_HEADS: tl.constexpr, REPEAT: tl.constexpr, D_K: tl.constexpr, K_PAD: tl.constexpr, CHUNK: tl.constexpr,
    ROWS_PAD: tl.constexpr, SHORT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One head of one chunk, with a gate for each key dimension. The parts of a chunk are those of chunks.py.

    Queries and keys are read by parts, as [4, PART, K_PAD], since pairs within a part are computed one by one.
    """
    PART: tl.constexpr = CHUNK // 4
    head, index = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first, end = _find_chunk(query_start_ptr, seq_lens_ptr, first_row, num_rows, index, CHUNK, ROWS_PAD, SHORT)
    if first < end:
        parts, places, dims = tl.arange(0, 4), tl.arange(0, PART), tl.arange(0, K_PAD)
        in_chunk = parts[:, None] * PART + places[None, :]
        tokens = first.to(tl.int64) + in_chunk
        is_token = tokens < end
        mask = is_token[:, :, None] & (dims < D_K)[None, None, :]
        columns = head // REPEAT * D_K + dims[None, None, :]
        q = tl.load(q_ptr + tokens[:, :, None] * stride_q + columns, mask=mask, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + tokens[:, :, None] * stride_k + columns, mask=mask, other=0.0).to(tl.float32)
        of_head = tokens * NUM_HEADS + head
        beta = tl.load(beta_ptr + of_head, mask=is_token, other=0.0)
        g = tl.load(g_ptr + of_head[:, :, None] * D_K + dims[None, None, :], mask=mask, other=0.0)
        q *= scale * tl.rsqrt(tl.sum(q * q, 2) + eps)[:, :, None]
        k *= tl.rsqrt(tl.sum(k * k, 2) + eps)[:, :, None]
        sums, of_parts = tl.cumsum(g, 1), tl.sum(g, 1)
        # Gates from the chunk's start to the part's start, and from the part's end to the chunk's end
        before = tl.cumsum(of_parts, 0) - of_parts
        behind = tl.sum(of_parts, 0)[None, :] - before - of_parts
        to_end = of_parts[:, None, :] - sums
        place_of = (index * NUM_HEADS + head).to(tl.int64)
        factors = factors_ptr + (place_of * CHUNK + in_chunk[:, :, None]) * D_K + dims[None, None, :]
        stride = most.to(tl.int64) * NUM_HEADS * CHUNK * D_K
        dtype: tl.constexpr = factors_ptr.dtype.element_ty
        in_head = (dims < D_K)[None, None, :]
        tl.store(factors, (k * tl.exp(sums + before[:, None, :])).to(dtype), mask=in_head)
        tl.store(factors + stride, (q * tl.exp(sums + before[:, None, :])).to(dtype), mask=in_head)
        tl.store(factors + 2 * stride, (k * tl.exp(to_end + behind[:, None, :])).to(dtype), mask=in_head)
        tl.store(decays_ptr + place_of * D_K + dims, tl.exp(tl.sum(of_parts, 0)), mask=dims < D_K)
        # Between parts: from the token to its part's end, the parts between, from the other part's start
        k_rows, q_rows = (k * tl.exp(sums)).to(dtype), (q * tl.exp(sums)).to(dtype)
        keys = tl.zeros((4, PART, CHUNK), tl.float32)
        queries = tl.zeros((4, PART, CHUNK), tl.float32)
        for part in tl.static_range(1, 4):
            start = tl.sum(tl.where(parts[:, None] == part, before, 0.0), 0)
            between = tl.where(parts[:, None] < part, start[None, :] - before - of_parts, 0.0)
            sources = tl.where((parts < part)[:, None, None], k * tl.exp(to_end + between[:, None, :]), 0.0).to(dtype)
            sources = tl.trans(tl.reshape(sources, (CHUNK, K_PAD)))
            is_part = parts[:, None, None] == part
            k_part = tl.sum(tl.where(is_part, k_rows, 0.0), 0).to(dtype)
            q_part = tl.sum(tl.where(is_part, q_rows, 0.0), 0).to(dtype)
            keys += tl.where(is_part, tl.dot(k_part, sources, input_precision=PRECISION)[None, :, :], 0.0)
            queries += tl.where(is_part, tl.dot(q_part, sources, input_precision=PRECISION)[None, :, :], 0.0)
        key_pairs, query_pairs = tl.zeros((4, PART, PART), tl.float32), tl.zeros((4, PART, PART), tl.float32)
        for source_place in range(PART):
            is_source = (places == source_place)[None, :, None]
            k_source = tl.sum(tl.where(is_source, k, 0.0), 1)[:, None, :]
            decay = sums - tl.sum(tl.where(is_source, sums, 0.0), 1)[:, None, :]
            # Before the source the power may be infinite
            source = tl.where((places >= source_place)[None, :, None], k_source * tl.exp(decay), 0.0)
            is_column = (places == source_place)[None, None, :]
            key_pairs += tl.where(is_column, tl.sum(source * k, 2)[:, :, None], 0.0)
            query_pairs += tl.where(is_column, tl.sum(source * q, 2)[:, :, None], 0.0)
        diagonal = tl.where(places[None, :, None] > places[None, None, :], key_pairs * beta[:, :, None], 0.0)
        is_diagonal = parts[:, None, None, None] == parts[None, None, :, None]
        query_pairs = tl.reshape(tl.where(is_diagonal, query_pairs[:, :, None, :], 0.0), (4, PART, CHUNK))
        _store_square(reads_ptr, place_of, tl.reshape(queries + query_pairs, (CHUNK, CHUNK)), CHUNK)
        inverse = _invert(diagonal, keys * beta[:, :, None], CHUNK)
        flat = tl.arange(0, CHUNK)
        betas = tl.load(beta_ptr + (first.to(tl.int64) + flat) * NUM_HEADS + head, mask=first + flat < end, other=0.0)
        _store_square(transform_ptr, place_of, inverse * betas[None, :], CHUNK)


@triton.jit
def _inverse_norms(x, eps):
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + eps)


@triton.jit
def _store_square(target_ptr, place_of, square, CHUNK: tl.constexpr) -> None:
    """Store a [CHUNK, CHUNK] matrix of one chunk and head."""
    places = tl.arange(0, CHUNK)
    targets = target_ptr + place_of.to(tl.int64) * CHUNK * CHUNK + places[:, None] * CHUNK + places[None, :]
    tl.store(targets, square.to(target_ptr.dtype.element_ty))


@triton.jit
def _invert(diagonal, lower, CHUNK: tl.constexpr):
    """Return (I + A)^-1 [CHUNK, CHUNK] of a strictly lower triangular A, by substitution in float32.

    A by block rows: diagonal, its four blocks on the diagonal, [4, PART, PART]; lower, all else: [4, PART, CHUNK]. The
    blocks are inverted at once, column by column; then the rest is eliminated block column by block column. Powers of A
    would cost less, but cancel where keys are alike.
    """
    PART: tl.constexpr = CHUNK // 4
    blocks, places = tl.arange(0, 4), tl.arange(0, PART)
    rows, columns = places[None, :, None], places[None, None, :]
    inverse = tl.where(rows == columns, 1.0, 0.0) + tl.zeros((4, PART, PART), tl.float32)
    for eliminated in tl.static_range(PART - 1):
        column = tl.sum(tl.where(columns == eliminated, diagonal, 0.0), 2)
        row = tl.sum(tl.where(rows == eliminated, inverse, 0.0), 1)
        inverse -= column[:, :, None] * row[:, None, :]
    # (I + inverse lower) X = inverse
    system = tl.reshape(tl.dot(inverse, lower, input_precision="tf32x3"), (CHUNK, 4, PART))
    is_diagonal = blocks[:, None, None, None] == blocks[None, None, :, None]
    whole = tl.reshape(tl.where(is_diagonal, inverse[:, :, None, :], 0.0), (CHUNK, CHUNK))
    for block in tl.static_range(3):
        column = tl.sum(tl.where((blocks == block)[None, :, None], system, 0.0), 1)
        row = tl.sum(tl.where((blocks == block)[:, None, None], tl.reshape(whole, (4, PART, CHUNK)), 0.0), 0)
        whole -= tl.dot(column, row, input_precision="tf32x3")
    return whole


@triton.jit(do_not_specialize=["first_row", "num_rows", "most", "first_piece"])
def _scan_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, transform_ptr, reads_ptr, factors_ptr, decays_ptr, stride_q, stride_k, stride_v,
    query_start_ptr, seq_lens_ptr, req_index_ptr, writes_ptr, first_row, num_rows, most,
    pool_ptr, pages_ptr, stride_pages, first_piece, num_pages,
    NUM_LANES: tl.constexpr, PIECE: tl.constexpr, ROW_SIZE: tl.constexpr,
    D_V: tl.constexpr, BLOCK: tl.constexpr, BY_DIMENSION: tl.constexpr, NUM_HEADS: tl.constexpr,
    REPEAT: tl.constexpr, D_K: tl.constexpr, K_PAD: tl.constexpr, CHUNK: tl.constexpr, ROWS_PAD: tl.constexpr,
    SHORT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """All chunks of one row, BLOCK rows of one head's state. The state is held as [K_PAD, BLOCK]."""
    row, head = tl.program_id(2), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunks = _count_chunks(query_start_ptr, seq_lens_ptr, first_row, num_rows, CHUNK, ROWS_PAD, SHORT)
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
        for chunk in range(tl.cdiv(num_tokens, CHUNK)):
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
                k_first, q_first = tl.load(factors)[:, None], tl.load(factors + stride)[:, None]
                k_last, decay = tl.load(factors + 2 * stride)[:, None], tl.load(decays_ptr + place_of)
                errors = v - k_first * tl.dot(k, start, input_precision=PRECISION)
                updates = tl.dot(transform, errors.to(dtype), input_precision=PRECISION)
                out = q_first * tl.dot(q, start, input_precision=PRECISION)
                added = tl.dot(tl.trans(k), (k_last * updates).to(dtype), input_precision=PRECISION)
            out += tl.dot(reads, updates.to(dtype), input_precision=PRECISION)
            state = state * decay + added
            out_ptrs = out_ptr + (tokens[:, None] * NUM_HEADS) * D_V + value_columns
            tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=in_tokens)
        tl.store(state_ptrs, state, mask=in_state & may_write)
