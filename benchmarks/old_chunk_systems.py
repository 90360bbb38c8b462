# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""What the chunks of the gated delta rule need before any state is known, for all chunks of all rows in parallel.

With A the matrix of a chunk's system:

    transform = (I + A)^-1 diag(beta),   reads = scale * (q_i.k_j decayed from j to i, for j <= i)

Queries and keys enter matrix products as they are, and their norms and decays as float32 factors of rows and columns;
with a gate for each key dimension the products take decayed copies, and each quarter of a chunk is a program of its
own. The blocks on the diagonal of A are inverted in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

CHUNK = 64


class ChunkSystems(NamedTuple):
    """What the scan reads, of each chunk and head.

    Factors are of keys and of queries that meet the chunk's first state, and of keys that enter its last: numbers, or
    by dimension the vectors themselves. The decay is that of the whole chunk.
    """

    transform: torch.Tensor  # [chunks, heads, CHUNK, CHUNK], as the inputs
    reads: torch.Tensor  # likewise
    factors: torch.Tensor  # [3, chunks, heads, CHUNK] fp32; by dimension [3, chunks, heads, CHUNK, d_k], as the inputs
    decays: torch.Tensor  # [chunks, heads] fp32; by dimension [chunks, heads, d_k]


def prepare_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    step: tuple[torch.Tensor, torch.Tensor],
    rows: tuple[int, int],
    most: int,
    sizes: dict[str, Any],
    *,
    scale: float,
    eps: float,
    num_warps: int,
) -> ChunkSystems:
    """Launch the first phase for `most` chunks. step: query_start_loc, seq_lens; rows: the first one, their number."""
    num_heads, d_k = beta.shape[1], q.shape[2]
    transform = q.new_empty(most, num_heads, CHUNK, CHUNK)
    if g.dim() == 2:
        factors = q.new_empty(3, most, num_heads, CHUNK, dtype=torch.float32)
        decays = q.new_empty(most, num_heads, dtype=torch.float32)
        systems = ChunkSystems(transform, torch.empty_like(transform), factors, decays)
        _scalars_kernel[(num_heads, most)](
            q, k, g, beta, *systems, q.stride(0), k.stride(0), scale, eps, *step, *rows, most,
            **sizes, num_warps=num_warps,
        )  # fmt: skip
        return systems
    factors = q.new_empty(3, most, num_heads, CHUNK, d_k)
    decays = q.new_empty(most, num_heads, d_k, dtype=torch.float32)
    systems = ChunkSystems(transform, torch.empty_like(transform), factors, decays)
    pairs = torch.empty_like(transform, dtype=torch.float32)
    _parts_kernel[(num_heads, most, 4)](
        q, k, g, beta, pairs, *systems[1:], q.stride(0), k.stride(0), scale, eps, *step, *rows, most,
        **sizes, num_warps=num_warps,
    )  # fmt: skip
    names = ("NUM_HEADS", "CHUNK", "ROWS_PAD", "SHORT", "PRECISION", "PDL", "launch_pdl")
    _transform_kernel[(num_heads, most)](
        pairs, beta, transform, *step, *rows, **{name: sizes[name] for name in names}, num_warps=4
    )
    return systems


@triton.jit
def count_chunks(
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
def find_chunk(
    query_start_ptr, seq_lens_ptr, first_row, num_rows, index,
    CHUNK: tl.constexpr, ROWS_PAD: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """Return the first token of chunk number `index` of the step, and its row's end; equal if there is none."""
    ends = tl.cumsum(count_chunks(query_start_ptr, seq_lens_ptr, first_row, num_rows, CHUNK, ROWS_PAD, SHORT), 0)
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
    first, end = find_chunk(query_start_ptr, seq_lens_ptr, first_row, num_rows, index, CHUNK, ROWS_PAD, SHORT)
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
        inverse = _invert(keys, CHUNK, PRECISION)
        _store_square(transform_ptr, place_of, inverse * beta[None, :], CHUNK)
        factors = factors_ptr + place_of * CHUNK + places
        stride = most * NUM_HEADS * CHUNK
        from_start = tl.exp(sums)
        tl.store(factors, k_norm * from_start)
        tl.store(factors + stride, q_norm * from_start)
        tl.store(factors + 2 * stride, k_norm * tl.exp(whole - sums))
        tl.store(decays_ptr + place_of, tl.exp(whole))


@triton.jit(do_not_specialize=["first_row", "num_rows", "most"])
def _parts_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, pairs_ptr, reads_ptr, factors_ptr, decays_ptr, stride_q, stride_k, scale, eps,
    query_start_ptr, seq_lens_ptr, first_row, num_rows, most,
    NUM_HEADS: tl.constexpr, REPEAT: tl.constexpr, D_K: tl.constexpr, K_PAD: tl.constexpr, CHUNK: tl.constexpr,
    ROWS_PAD: tl.constexpr, SHORT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """A quarter of one chunk of one head, its part, with a gate for each key dimension; see chunks.py.

    It writes its rows, [PART, CHUNK], of the chunk's system and of the reads.
    """
    PART: tl.constexpr = CHUNK // 4
    head, index, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first, end = find_chunk(query_start_ptr, seq_lens_ptr, first_row, num_rows, index, CHUNK, ROWS_PAD, SHORT)
    if first < end:
        places, dims = tl.arange(0, PART), tl.arange(0, K_PAD)
        in_head = (dims < D_K)[None, :]
        k_ptrs = k_ptr + head // REPEAT * D_K + dims[None, :]
        g_ptrs = g_ptr + head * D_K + dims[None, :]
        tokens = (first + part * PART + places).to(tl.int64)[:, None]
        mask = (tokens < end) & in_head
        q_ptrs = q_ptr + tokens * stride_q + head // REPEAT * D_K + dims[None, :]
        q = tl.load(q_ptrs, mask=mask, other=0.0).to(tl.float32)
        k = tl.load(k_ptrs + tokens * stride_k, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(g_ptrs + tokens * NUM_HEADS * D_K, mask=mask, other=0.0)
        beta = tl.load(beta_ptr + tokens * NUM_HEADS + head, mask=tokens < end, other=0.0)
        q *= scale * tl.rsqrt(tl.sum(q * q, 1) + eps)[:, None]
        k *= tl.rsqrt(tl.sum(k * k, 1) + eps)[:, None]
        sums, whole = tl.cumsum(g, 0), tl.sum(g, 0)[None, :]
        place_of = (index * NUM_HEADS + head).to(tl.int64)
        columns = tl.arange(0, PART)[None, :]
        rows = (place_of * CHUNK + part * PART + places[:, None]) * CHUNK
        # Pairs within the part, source by source: the power of a pair in the wrong order may be infinite
        keys, queries = tl.zeros((PART, PART), tl.float32), tl.zeros((PART, PART), tl.float32)
        so_far = tl.zeros((1, K_PAD), tl.float32)
        for place in range(PART):
            token = (first + part * PART + place).to(tl.int64)
            in_row = in_head & (token < end)
            source = tl.load(k_ptrs + token * stride_k, mask=in_row, other=0.0).to(tl.float32)
            source *= tl.rsqrt(tl.sum(source * source, 1) + eps)[:, None]
            so_far += tl.load(g_ptrs + token * NUM_HEADS * D_K, mask=in_row, other=0.0)
            decayed = tl.where((places >= place)[:, None], source * tl.exp(sums - so_far), 0.0)
            keys += tl.where(columns == place, tl.sum(decayed * k, 1)[:, None], 0.0)
            queries += tl.where(columns == place, tl.sum(decayed * q, 1)[:, None], 0.0)
        dtype: tl.constexpr = reads_ptr.dtype.element_ty
        keys = tl.where(places[:, None] > columns, keys, 0.0) * beta
        tl.store(pairs_ptr + rows + part * PART + columns, keys)
        tl.store(reads_ptr + rows + part * PART + columns, queries.to(dtype))
        # Other parts, the nearest first: from a token to its part's end, the parts between, from this part's start
        k_rows, q_rows = (k * tl.exp(sums)).to(dtype), (q * tl.exp(sums)).to(dtype)
        before, behind = tl.zeros((1, K_PAD), tl.float32), tl.zeros((1, K_PAD), tl.float32)
        for distance in tl.static_range(1, 4):
            other = (part - distance + 4) % 4
            tokens = (first + other * PART + places).to(tl.int64)[:, None]
            mask = (tokens < end) & in_head
            g = tl.load(g_ptrs + tokens * NUM_HEADS * D_K, mask=mask, other=0.0)
            source = tl.load(k_ptrs + tokens * stride_k, mask=mask, other=0.0).to(tl.float32)
            source *= tl.rsqrt(tl.sum(source * source, 1) + eps)[:, None]
            whole_other = tl.sum(g, 0)[None, :]
            is_before = other < part
            source = tl.where(is_before, source * tl.exp(whole_other - tl.cumsum(g, 0) + before), 0.0)
            source = tl.trans(source.to(dtype))
            keys = tl.dot(k_rows, source, input_precision=PRECISION) * beta
            tl.store(pairs_ptr + rows + other * PART + columns, keys)
            queries = tl.dot(q_rows, source, input_precision=PRECISION)
            tl.store(reads_ptr + rows + other * PART + columns, queries.to(dtype))
            before += tl.where(is_before, whole_other, 0.0)
            behind += tl.where(is_before, 0.0, whole_other)
        in_part = (place_of * CHUNK + part * PART + places[:, None]) * D_K + dims[None, :]
        factors = factors_ptr + in_part
        stride = most.to(tl.int64) * NUM_HEADS * CHUNK * D_K
        tl.store(factors, (k * tl.exp(sums + before)).to(dtype), mask=in_head)
        tl.store(factors + stride, (q * tl.exp(sums + before)).to(dtype), mask=in_head)
        tl.store(factors + 2 * stride, (k * tl.exp(whole - sums + behind)).to(dtype), mask=in_head)
        decays = decays_ptr + place_of * D_K + dims[None, :]
        tl.store(decays, tl.exp(whole + before + behind), mask=in_head & (part == 0))


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _transform_kernel(
    pairs_ptr, beta_ptr, transform_ptr, query_start_ptr, seq_lens_ptr, first_row, num_rows,
    NUM_HEADS: tl.constexpr, CHUNK: tl.constexpr, ROWS_PAD: tl.constexpr, SHORT: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Solve the system of one chunk and head, whose parts are in pairs_ptr."""
    head, index = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first, end = find_chunk(query_start_ptr, seq_lens_ptr, first_row, num_rows, index, CHUNK, ROWS_PAD, SHORT)
    if first < end:
        places = tl.arange(0, CHUNK)
        tokens = (first + places).to(tl.int64)
        place_of = index * NUM_HEADS + head
        squares = place_of.to(tl.int64) * CHUNK * CHUNK + places[:, None] * CHUNK + places[None, :]
        inverse = _invert(tl.load(pairs_ptr + squares), CHUNK, PRECISION)
        beta = tl.load(beta_ptr + tokens * NUM_HEADS + head, mask=tokens < end, other=0.0)
        _store_square(transform_ptr, place_of, inverse * beta[None, :], CHUNK)


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
def _invert(lower, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + A)^-1 [CHUNK, CHUNK] of a strictly lower triangular A, `lower`.

    Four blocks on the diagonal are inverted at once by substitution, column by column, in float32; then pairs of
    inverted blocks P and Q become one: [[P, 0], [-Q A P, Q]]. Powers of A would cost less, but cancel where keys are
    alike.
    """
    PART: tl.constexpr = CHUNK // 4
    blocks, places = tl.arange(0, 4), tl.arange(0, PART)
    is_diagonal = blocks[:, None, None, None] == blocks[None, None, :, None]
    rows, columns = places[None, :, None], places[None, None, :]
    diagonal = tl.sum(tl.where(is_diagonal, tl.reshape(lower, (4, PART, 4, PART)), 0.0), 2)
    inverse = tl.where(rows == columns, 1.0, 0.0) + tl.zeros((4, PART, PART), tl.float32)
    for eliminated in tl.static_range(PART - 1):
        column = tl.sum(tl.where(columns == eliminated, diagonal, 0.0), 2)
        row = tl.sum(tl.where(rows == eliminated, inverse, 0.0), 1)
        inverse -= column[:, :, None] * row[:, None, :]
    whole = tl.reshape(tl.where(is_diagonal, inverse[:, :, None, :], 0.0), (CHUNK, CHUNK))
    row, column = tl.arange(0, CHUNK)[:, None] // PART, tl.arange(0, CHUNK)[None, :] // PART
    of_pairs = tl.where((row // 2 == column // 2) & (row != column), lower, 0.0)
    step = tl.dot(whole, of_pairs, input_precision=PRECISION)
    whole -= tl.dot(step, whole, input_precision=PRECISION)
    between = tl.where(row // 2 != column // 2, lower, 0.0)
    step = tl.dot(whole, between, input_precision=PRECISION)
    return whole - tl.dot(step, whole, input_precision=PRECISION)
