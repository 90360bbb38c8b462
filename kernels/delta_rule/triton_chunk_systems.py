# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""ChunkSystems: the part of the gated delta rule that needs no state, for all chunks of all rows in parallel.

With A the matrix of a chunk's system:

    transform = (I + A)^-1 diag(beta),   reads = scale * (q_i.k_j decayed from j to i, for j <= i)

Queries and keys enter matrix products as they are, and their norms and decays as float32 factors of rows and columns;
with a gate for each key dimension the products take decayed copies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

CHUNK = 64
_BLOCK_D = 128  # dimensions of which a program takes the decays at once


class ChunkSystems(NamedTuple):
    """What the scan reads, of each chunk and head.

    Factors are of keys and of queries that meet the chunk's first state, and of keys that enter its last: numbers, or
    by dimension the vectors themselves. The decay is that of the whole chunk.
    """

    transform: torch.Tensor  # [chunks, heads, CHUNK, CHUNK], as the inputs
    reads: torch.Tensor  # likewise
    # [3, chunks, heads, CHUNK] fp32; by dimension [3, chunks, heads, CHUNK, d_k], as the inputs
    factors: torch.Tensor
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
    max_registers: int | None,
) -> ChunkSystems:
    """Launch the first phase for `most` chunks. step: query_start_loc, seq_lens; rows: the first one, their number.

    max_registers: of a thread, with one gate for each token.
    """
    num_heads, d_k = beta.shape[1], q.shape[2]
    transform = q.new_empty(most, num_heads, CHUNK, CHUNK)
    arguments = (q.stride(0), k.stride(0), scale, eps, *step, *rows, most)
    if g.dim() == 2:
        factors = q.new_empty(3, most, num_heads, CHUNK, dtype=torch.float32)
        decays = q.new_empty(most, num_heads, dtype=torch.float32)
        systems = ChunkSystems(transform, torch.empty_like(transform), factors, decays)
        _scalars_kernel[(num_heads, most)](
            q, k, g, beta, *systems, *arguments, **sizes, num_warps=num_warps, maxnreg=max_registers
        )
        return systems
    factors = q.new_empty(3, most, num_heads, CHUNK, d_k)
    decays = q.new_empty(most, num_heads, d_k, dtype=torch.float32)
    systems = ChunkSystems(transform, torch.empty_like(transform), factors, decays)
    _dimensions_kernel[(num_heads, most)](
        q, k, g, beta, *systems, *arguments,
        **sizes, BLOCK_D=min(_BLOCK_D, sizes["K_PAD"]), num_warps=num_warps, num_stages=1,
    )  # fmt: skip
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
        keys = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        queries = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        sums, whole = tl.cumsum(g, 0), tl.sum(g, 0)
        # Above the diagonal the power may be infinite, and is not taken
        decay = tl.exp(sums[:, None] - sums[None, :]) * k_norm[None, :]
        place_of = index * NUM_HEADS + head
        queries = tl.where(places[:, None] >= places[None, :], queries * decay * q_norm[:, None], 0.0)
        _store_square(reads_ptr, place_of, queries, CHUNK)
        keys = tl.where(places[:, None] > places[None, :], keys * decay * (beta * k_norm)[:, None], 0.0)
        inverse = _invert(keys, CHUNK, k.dtype)
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
    ROWS_PAD: tl.constexpr, SHORT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    """One head of one chunk, with a gate for each key dimension."""
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
        q_ptr += head // REPEAT * D_K
        k_ptr += head // REPEAT * D_K
        q = tl.load(q_ptr + tokens[:, None] * stride_q + dims[None, :], mask=mask, other=0.0)
        k = tl.load(k_ptr + tokens[:, None] * stride_k + dims[None, :], mask=mask, other=0.0)
        q_norm, k_norm = _inverse_norms(q, eps) * scale, _inverse_norms(k, eps)
        rows, others = places[:, None], places[None, :]
        queries = tl.where(rows == others, tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)[:, None], 0.0)
        keys = tl.zeros((CHUNK, CHUNK), tl.float32)
        place_of = index * NUM_HEADS + head
        in_place = (place_of.to(tl.int64) * CHUNK + rows) * D_K
        stride = most.to(tl.int64) * NUM_HEADS * CHUNK * D_K
        dtype: tl.constexpr = reads_ptr.dtype.element_ty
        for dim in range(0, D_K, BLOCK_D):
            block = dim + tl.arange(0, BLOCK_D)
            in_head = (block < D_K)[None, :]
            in_tokens = is_token[:, None] & in_head
            # Powers of less than -1,000 are 0, and half precision holds such gates; what is no number stays so
            g = tl.load(g_ptr + (tokens[:, None] * NUM_HEADS + head) * D_K + block[None, :], mask=in_tokens, other=0.0)
            g = tl.maximum(g, -1000.0, propagate_nan=tl.PropagateNan.ALL)
            # Two halves of a gate have 22 bits; their products with ones are exact
            high = g.to(tl.float16)
            low = (g - high.to(tl.float32)).to(tl.float16)
            q_block = tl.load(q_ptr + tokens[:, None] * stride_q + block[None, :], mask=in_tokens, other=0.0)
            k_block = tl.load(k_ptr + tokens[:, None] * stride_k + block[None, :], mask=in_tokens, other=0.0)
            tl.store(decays_ptr + place_of.to(tl.int64) * D_K + block, tl.exp(tl.sum(g, 0)), mask=block < D_K)
            ones = (others <= rows).to(tl.float16)
            factor = tl.exp(tl.dot(ones, low, tl.dot(ones, high)))
            factors = factors_ptr + in_place + block[None, :]
            tl.store(factors, (k_block.to(tl.float32) * (k_norm[:, None] * factor)).to(dtype), mask=in_head)
            tl.store(factors + stride, (q_block.to(tl.float32) * (q_norm[:, None] * factor)).to(dtype), mask=in_head)
            ones = (others > rows).to(tl.float16)
            factor = tl.exp(tl.dot(ones, low, tl.dot(ones, high)))
            tl.store(
                factors + 2 * stride, (k_block.to(tl.float32) * (k_norm[:, None] * factor)).to(dtype), mask=in_head
            )
            for log in range(6):
                # Pairs whose highest differing bit is this one: decayed from the earlier token to the end of its
                # block of 2^log tokens, and from the start of the next block to the later token
                is_later = ((rows >> log) & 1) == 1
                is_between = is_later == (others <= rows)
                ones = (is_between & ((rows >> log) == (others >> log))).to(tl.float16)
                factor = tl.exp(tl.dot(ones, low, tl.dot(ones, high)))
                k_part = (k_block.to(tl.float32) * factor).to(dtype)
                q_part = (q_block.to(tl.float32) * factor).to(dtype)
                is_pair = ((rows >> log) ^ (others >> log)) == 1
                keys += tl.where(is_pair, tl.dot(k_part, tl.trans(k_part), input_precision=PRECISION), 0.0)
                queries += tl.where(is_pair, tl.dot(q_part, tl.trans(k_part), input_precision=PRECISION), 0.0)
        queries = tl.where(rows >= others, queries * q_norm[:, None] * k_norm[None, :], 0.0)
        _store_square(reads_ptr, place_of, queries, CHUNK)
        beta = tl.load(beta_ptr + tokens * NUM_HEADS + head, mask=is_token, other=0.0)
        keys = tl.where(rows > others, keys * (beta * k_norm)[:, None] * k_norm[None, :], 0.0)
        inverse = _invert(keys, CHUNK, dtype)
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
def _invert(lower, CHUNK: tl.constexpr, dtype: tl.constexpr):
    """Return (I + A)^-1 [CHUNK, CHUNK] of a strictly lower triangular A, `lower`, of inputs of that dtype.

    Blocks of two are known. Then, level by level, pairs of inverted blocks P and Q become one, [[P, 0], [-Q A P, Q]]:
    all of a level by two products of whole matrices, of which the blocks below the diagonal of each pair are kept.
    Powers of A would cost less, but cancel where keys are alike. Half precision has the digits of tf32, and the range:
    what is kept is at most 2, as updates turn and shrink a state, and a sum of 64 products of two such at most 256.
    """
    places = tl.arange(0, CHUNK)
    # From the highest bit in which row and column differ follows the level of a number
    level = places[:, None] ^ places[None, :]
    inverse = tl.where(level == 0, 1.0, tl.where(level == 1, 0.0 - lower, 0.0))
    for log in tl.static_range(1, 6):
        if dtype == tl.float32:
            merged = tl.dot(tl.dot(inverse, lower, input_precision="tf32x3"), inverse, input_precision="tf32x3")
        else:
            half = inverse.to(tl.float16)
            merged = tl.dot(tl.dot(half, lower.to(tl.float16)).to(tl.float16), half)
        inverse = tl.where((level >> log) == 1, 0.0 - merged, inverse)
    return inverse
