# ruff: noqa: ANN001  (Triton reads annotations as types: kernel arguments carry none)
"""The first phase of triton_chunk_systems for the scan in gluon_scan: one gate for each token, half precision.

Results are the same but for the factors' order, in which a chunk's are one line for TMA. Fewer instructions: powers of
two, signs that are in the system from the start, and blocks of an inverse that are added by the product itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.delta_rule.gluon_scan import CHUNK, FACTORS, Systems
from kernels.delta_rule.triton_chunk_systems import find_chunk

_LOG2_E = tl.constexpr(1.4426950408889634)
_REGISTERS = 128  # of a thread: four programs fit a multiprocessor


def prepare_systems(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    step: tuple[torch.Tensor, torch.Tensor],
    rows: tuple[int, int],
    most: int,
    *,
    rows_pad: int,
    short: int,
    scale: float,
    eps: float,
    pdl: bool,
    max_registers: int | None = _REGISTERS,
) -> Systems:
    """Launch for `most` chunks. step: query_start_loc, seq_lens; rows: the first one, their number."""
    num_heads = beta.shape[1]
    transform = q.new_empty(most, num_heads, CHUNK, CHUNK)
    factors = q.new_empty(most, num_heads, FACTORS * CHUNK, dtype=torch.float32)
    systems = Systems(transform, torch.empty_like(transform), factors)
    _systems_kernel[(num_heads, most)](
        q, k, g, beta, *systems, q.stride(0), k.stride(0), scale, eps, *step, *rows,
        NUM_HEADS=num_heads, REPEAT=num_heads // q.shape[1], D_K=q.shape[2], CHUNK=CHUNK, FACTORS=FACTORS,
        ROWS_PAD=rows_pad, SHORT=short, PDL=pdl, launch_pdl=pdl, num_warps=4, maxnreg=max_registers,
    )  # fmt: skip
    return systems


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _systems_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, transform_ptr, reads_ptr, factors_ptr, stride_q, stride_k, scale, eps,
    query_start_ptr, seq_lens_ptr, first_row, num_rows,
    NUM_HEADS: tl.constexpr, REPEAT: tl.constexpr, D_K: tl.constexpr, CHUNK: tl.constexpr, FACTORS: tl.constexpr,
    ROWS_PAD: tl.constexpr, SHORT: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One head of one chunk."""
    head, index = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first, end = find_chunk(query_start_ptr, seq_lens_ptr, first_row, num_rows, index, CHUNK, ROWS_PAD, SHORT)
    if first < end:
        places, dims = tl.arange(0, CHUNK), tl.arange(0, D_K)
        tokens = first.to(tl.int64) + places
        is_token = tokens < end
        columns = head // REPEAT * D_K + dims[None, :]
        q = tl.load(q_ptr + tokens[:, None] * stride_q + columns, mask=is_token[:, None], other=0.0)
        k = tl.load(k_ptr + tokens[:, None] * stride_k + columns, mask=is_token[:, None], other=0.0)
        beta = tl.load(beta_ptr + tokens * NUM_HEADS + head, mask=is_token, other=0.0)
        g = tl.load(g_ptr + tokens * NUM_HEADS + head, mask=is_token, other=0.0) * _LOG2_E
        q32, k32 = q.to(tl.float32), k.to(tl.float32)
        q_norm, k_norm = tl.rsqrt(tl.sum(q32 * q32, 1) + eps) * scale, tl.rsqrt(tl.sum(k32 * k32, 1) + eps)
        sums, whole = tl.cumsum(g, 0), tl.sum(g, 0)
        place_of = (index * NUM_HEADS + head).to(tl.int64)
        factors = factors_ptr + place_of * (FACTORS * CHUNK) + places
        from_start = tl.exp2(sums)
        tl.store(factors, k_norm * from_start)
        tl.store(factors + CHUNK, q_norm * from_start)
        tl.store(factors + 2 * CHUNK, k_norm * tl.exp2(whole - sums))
        tl.store(factors + 3 * CHUNK, tl.exp2(whole + 0.0 * sums))
        rows, others = places[:, None], places[None, :]
        square = place_of * (CHUNK * CHUNK) + rows * CHUNK + others
        # Above the diagonal the power may be infinite, and is not taken
        decay = tl.exp2(sums[:, None] - sums[None, :]) * k_norm[None, :]
        queries = tl.where(rows >= others, tl.dot(q, tl.trans(k)) * decay * q_norm[:, None], 0.0)
        tl.store(reads_ptr + square, queries.to(reads_ptr.dtype.element_ty))
        # As triton_chunk_systems._invert, of minus the system, in half precision
        keys = tl.where(rows > others, tl.dot(k, tl.trans(k)) * decay * (0.0 - beta * k_norm)[:, None], 0.0)
        level = rows ^ others
        inverse = tl.where(level <= 1, keys, 0.0) + tl.where(level == 0, 1.0, 0.0)
        keys = keys.to(tl.float16)
        for log in tl.static_range(1, 6):
            half = inverse.to(tl.float16)
            inverse = tl.where((level >> log) == 1, tl.dot(tl.dot(half, keys).to(tl.float16), half), inverse)
        tl.store(transform_ptr + square, (inverse * beta[None, :]).to(transform_ptr.dtype.element_ty))
