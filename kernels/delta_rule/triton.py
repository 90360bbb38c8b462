# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""Triton twin of kernels/delta_rule: rows of few tokens, one after the other; longer rows go to triton_chunks,
or to gluon_systems on Hopper.

A step of one token reads and writes a state of d_v * d_k numbers for each head, so it is limited by memory: a program
holds some rows of one head's state in registers. `pdl`: see kernels/elementwise/triton.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.delta_rule.triton_chunks import ChunkConfig, advance_by_chunks
from kernels.delta_rule.triton_gates import log_decay
from kernels.dispatch import is_hopper
from kernels.states import StateMetadata, StateView
from kernels.states_triton import place, row_writes, state_offsets, step_row

try:
    from kernels import gluon_scan
    from kernels.delta_rule import gluon_systems

    HAS_GLUON = True
except ImportError:
    HAS_GLUON = False

# Rows of at most as many tokens: a row with drafts has few, and a chunk of 64 would be mostly empty
SHORT = 16


class StepConfig(NamedTuple):
    """Rows of a state in one program of the kernel of short rows, and its warps."""

    block: int
    num_warps: int


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    view: StateView,
    metadata: StateMetadata,
    *,
    scale: float,
    eps: float = 1e-6,
    step_config: StepConfig | None = None,
    chunk_config: ChunkConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Equal gated_delta_rule of kernels.delta_rule.chunks. q, k, v: each token's heads dense; g, beta: contiguous.

    Configurations: None for the served ones.
    """
    for x in (q, k, v):
        assert x.stride()[1:] == (x.shape[2], 1)
    assert g.is_contiguous()
    assert beta.is_contiguous()
    # Padding of prompts may be thousands of tokens, which one program would set to zero one by one
    is_zeroed = metadata.max_query_len > SHORT
    out = (torch.zeros if is_zeroed else torch.empty)(v.shape, dtype=v.dtype, device=v.device)
    _launch_short_rows(
        q, k, v, _Gates(g, beta, None, None, 1.0), out, view, metadata,
        scale=scale, eps=eps, is_zeroed=is_zeroed, config=step_config, pdl=pdl,
    )  # fmt: skip
    if metadata.max_query_len > SHORT:
        if chunk_config is None and runs_on_hopper(q, k, v, g):
            gluon_systems.advance_on_hopper(
                q, k, v, g, beta, out, view, metadata, scale=scale, eps=eps, short=SHORT, pdl=pdl
            )
        else:
            advance_by_chunks(
                q, k, v, g, beta, out, view, metadata, scale=scale, eps=eps, short=SHORT, config=chunk_config, pdl=pdl
            )
    return out


def runs_on_hopper(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> bool:
    """Return True if the kernels for Hopper serve prompts of these tensors."""
    return HAS_GLUON and is_hopper(q.device) and g.dim() == 2 and gluon_scan.takes(q, k, v)


def gated_delta_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    view: StateView,
    metadata: StateMetadata,
    *,
    scale: float,
    max_beta: float = 1.0,
    eps: float = 1e-6,
    step_config: StepConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Equal gated_delta_step of kernels.delta_rule.chunks. Each token's heads dense in q, k, v, a and b."""
    for x in (q, k, v):
        assert x.stride()[1:] == (x.shape[2], 1)
    assert a.stride()[1:] == ((a.shape[2], 1) if a.dim() == 3 else (1,))
    assert b.stride(1) == 1
    assert metadata.max_query_len == 1
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    gates = _Gates(a, b, a_log, dt_bias, max_beta)
    _launch_short_rows(
        q, k, v, gates, out, view, metadata, scale=scale, eps=eps, is_zeroed=False, config=step_config, pdl=pdl
    )
    return out


class _Gates(NamedTuple):
    """Gates and betas; or what they are computed from, with the decays' logarithms and the biases of gates."""

    g: torch.Tensor
    beta: torch.Tensor
    a_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    max_beta: float


def _launch_short_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: _Gates,
    out: torch.Tensor,
    view: StateView,
    metadata: StateMetadata,
    *,
    scale: float,
    eps: float,
    is_zeroed: bool,
    config: StepConfig | None,
    pdl: bool,
) -> None:
    num_rows, num_heads, d_v = metadata.seq_lens.shape[0], *v.shape[1:]
    k_pad = triton.next_power_of_2(q.shape[2])
    is_one, by_dimension = metadata.max_query_len == 1, gates.g.dim() == 3
    has_vectors = by_dimension and gates.a_log is not None
    block, num_warps = config or _choose(d_v, k_pad, is_one=is_one, has_vectors=has_vectors)
    _short_rows_kernel[(triton.cdiv(d_v, block), num_heads, num_rows)](
        q, k, v, gates.g, gates.beta, gates.a_log, gates.dt_bias, out, q.stride(0), k.stride(0), v.stride(0),
        gates.g.stride(0), gates.beta.stride(0), gates.max_beta, scale, eps,
        metadata.query_start_loc, metadata.seq_lens, metadata.req_index, metadata.writes,
        view.pool, metadata.pages, metadata.pages.stride(0), *place(view),
        NUM_HEADS=num_heads, REPEAT=num_heads // q.shape[1], D_K=q.shape[2], K_PAD=k_pad, D_V=d_v, BLOCK=block,
        BY_DIMENSION=by_dimension, IS_ONE=is_one, IS_ZEROED=is_zeroed,
        SHORT=SHORT, PDL=pdl,
        num_warps=num_warps, launch_pdl=pdl,
    )  # fmt: skip


def _choose(d_v: int, k_pad: int, *, is_one: bool, has_vectors: bool) -> StepConfig:
    """Choose by measurement on an H100, for 1 to 256 rows of 32 heads of 128 × 128.

    For one token each, blocks of 8 in one warp are the fastest or within 4 % of it: a warp's sums need no barrier. Two
    warps where a vector of gates is computed in each program (has_vectors). More tokens read and normalise queries and
    keys in each program, so programs are fewer.
    """
    block = min(8 if is_one else 32, triton.next_power_of_2(d_v))
    return StepConfig(block, max(1, min(4, block * k_pad // (512 if has_vectors else 1024))))


@triton.jit(do_not_specialize=["first_piece"])
def _short_rows_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, a_log_ptr, dt_bias_ptr, out_ptr, stride_q, stride_k, stride_v,
    stride_g, stride_beta, max_beta, scale, eps,
    query_start_ptr, seq_lens_ptr, req_index_ptr, writes_ptr,
    pool_ptr, pages_ptr, stride_pages, first_piece, num_pages,
    NUM_LANES: tl.constexpr, PIECE: tl.constexpr, ROW_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr, REPEAT: tl.constexpr, D_K: tl.constexpr, K_PAD: tl.constexpr, D_V: tl.constexpr,
    BLOCK: tl.constexpr, BY_DIMENSION: tl.constexpr, IS_ONE: tl.constexpr, IS_ZEROED: tl.constexpr,
    SHORT: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One row of the step unless it is long, BLOCK rows of one head's state. Padding rows of any length get zeros.

    IS_ZEROED: all of out_ptr is zero already.
    """
    row, head = tl.program_id(2), tl.program_id(1)
    dims, values = tl.arange(0, K_PAD), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_head = values < D_V
    # The step's rows and pages, and the states, are older than the previous kernel, which may still write the inputs
    first, num_tokens, has_state, is_padding = step_row(query_start_ptr, seq_lens_ptr, row)
    first = first.to(tl.int64)
    may_write = row_writes(writes_ptr, row)
    is_short = (is_padding == 0) & (num_tokens <= SHORT) & (num_tokens > 0)
    pages = pages_ptr + tl.load(req_index_ptr + row).to(tl.int64) * stride_pages
    offsets = state_offsets(
        pages, head * D_V + values, in_head & is_short & (has_state | may_write), first_piece, num_pages,
        NUM_LANES, PIECE, ROW_SIZE,
    )  # fmt: skip
    state_ptrs = pool_ptr + offsets[:, None] + dims[None, :]
    mask = (in_head & is_short)[:, None] & (dims < D_K)[None, :]
    a_log, bias = 0.0, 0.0
    if a_log_ptr is not None:
        a_log = tl.load(a_log_ptr + head).to(tl.float32)
        if BY_DIMENSION:
            bias = tl.load(dt_bias_ptr + head * D_K + dims, mask=dims < D_K, other=0.0).to(tl.float32)
        else:
            bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    state = tl.load(state_ptrs, mask=mask & has_state, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    out_ptrs = out_ptr + (first * NUM_HEADS + head) * D_V + values
    if is_padding:
        if not IS_ZEROED:
            for token in range(num_tokens):
                zeros = tl.zeros((BLOCK,), out_ptr.dtype.element_ty)
                tl.store(out_ptrs + token * NUM_HEADS * D_V, zeros, mask=in_head)
    elif is_short:
        q_ptrs = q_ptr + first * stride_q + head // REPEAT * D_K + dims
        k_ptrs = k_ptr + first * stride_k + head // REPEAT * D_K + dims
        v_ptrs = v_ptr + first * stride_v + head * D_V + values
        g_ptrs = g_ptr + first * stride_g + head * (D_K if BY_DIMENSION else 1)
        beta_ptrs = beta_ptr + first * stride_beta + head
        if IS_ONE:
            num_tokens = 1
        for token in range(num_tokens):
            # All loads come first, so that none waits for a sum
            q = tl.load(q_ptrs, mask=dims < D_K, other=0.0)
            k = tl.load(k_ptrs, mask=dims < D_K, other=0.0)
            v = tl.load(v_ptrs, mask=in_head, other=0.0).to(tl.float32)
            beta = tl.load(beta_ptrs).to(tl.float32)
            if BY_DIMENSION:
                g = tl.load(g_ptrs + dims, mask=dims < D_K, other=0.0).to(tl.float32)
            else:
                g = tl.load(g_ptrs).to(tl.float32)
            q = _normalised(q, eps) * scale
            k = _normalised(k, eps)
            if a_log_ptr is not None:
                beta = max_beta * tl.sigmoid(beta)
                g = log_decay(g + bias, tl.exp(a_log))
            decay = tl.exp(g)
            state *= decay[None, :] if BY_DIMENSION else decay
            update = beta * (v - tl.sum(state * k[None, :], 1))
            state += update[:, None] * k[None, :]
            read = tl.sum(state * q[None, :], 1)
            tl.store(out_ptrs + token * NUM_HEADS * D_V, read.to(out_ptr.dtype.element_ty), mask=in_head)
            q_ptrs += stride_q
            k_ptrs += stride_k
            v_ptrs += stride_v
            g_ptrs += stride_g
            beta_ptrs += stride_beta
        tl.store(state_ptrs, state, mask=mask & may_write)


@triton.jit
def _normalised(x, eps):
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) + eps)
