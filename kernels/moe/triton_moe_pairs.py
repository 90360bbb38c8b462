# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""The experts of a few tokens: each (token, expert) pair is a matrix-vector product, and nothing is sorted.

Bound by reading the chosen experts' weights once. The second product sums a token's experts in their order, so that it
needs no launch of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.moe.configs import PairTile
from kernels.moe.triton_common import add_shared, gate_and_mul, weigh
from kernels.moe.triton_route import Routing


def pairs_gate_up(
    x: torch.Tensor, gate_up: torch.Tensor, routing: Routing, tile: PairTile, *, pdl: bool = False
) -> torch.Tensor:
    """Return [T * top_k, I]: silu(gate) * up of each pair. x: [T, H], dense in H; gate_up: [E, 2 * I, H]."""
    num_pairs, top_k = routing.experts.numel(), routing.experts.shape[1]
    n, k = gate_up.shape[1] // 2, gate_up.shape[2]
    out = torch.empty(num_pairs, n, dtype=x.dtype, device=x.device)
    assert gate_up.is_contiguous()
    assert x.stride(1) == 1
    _pairs_up_kernel[(triton.cdiv(n, tile.block_n), num_pairs)](
        x, gate_up, routing.experts, out, n, k, x.stride(0),
        TOP_K=top_k, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, STAGES=tile.num_stages,
        EVEN_N=n % tile.block_n == 0, EVEN_K=k % tile.block_k == 0, PDL=pdl, num_warps=tile.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def pairs_down(
    inner: torch.Tensor,
    down: torch.Tensor,
    routing: Routing,
    tile: PairTile,
    *,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Return [T, H], each token's experts summed by their weights. inner: [T * top_k, I]; down: [E, H, I].

    shared: see kernels.moe.reference.mix_experts; shared_gate: [T], before its sigmoid.
    """
    num_tokens, top_k = routing.experts.shape
    n, k = down.shape[1:]
    out = torch.empty(num_tokens, n, dtype=inner.dtype, device=inner.device)
    assert down.is_contiguous()
    _pairs_down_kernel[(triton.cdiv(n, tile.block_n), num_tokens)](
        inner, down, routing.experts, routing.weights, shared, shared_gate, out, n, k,
        0 if shared is None else shared.stride(0), 0 if shared_gate is None else shared_gate.stride(0),
        TOP_K=top_k, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, STAGES=tile.num_stages,
        EVEN_N=n % tile.block_n == 0, EVEN_K=k % tile.block_k == 0, HAS_SHARED=shared is not None,
        PDL=pdl, num_warps=tile.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit
def _pairs_up_kernel(
    x_ptr, w_ptr, experts_ptr, out_ptr, n, k, stride_x,
    TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_N values of one pair between both products."""
    pair = tl.program_id(1)
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sources = features if EVEN_N else tl.minimum(features, n - 1)
    x_row = x_ptr + (pair // TOP_K).to(tl.int64) * stride_x
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    gate_ptrs = w_ptr + expert * 2 * n * k + sources.to(tl.int64) * k
    up_ptrs = gate_ptrs + n.to(tl.int64) * k
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK_K)
        x = _load_row(x_row, columns, k, EVEN_K)
        gate += _load_rows(gate_ptrs, columns, k, EVEN_K) * x[None, :]
        up += _load_rows(up_ptrs, columns, k, EVEN_K) * x[None, :]
    values = gate_and_mul(tl.sum(gate, 1), tl.sum(up, 1), out_ptr.dtype.element_ty)
    tl.store(out_ptr + pair.to(tl.int64) * n + features, values, mask=features < n)


@triton.jit
def _pairs_down_kernel(
    x_ptr, w_ptr, experts_ptr, weights_ptr, shared_ptr, shared_gate_ptr, out_ptr, n, k, stride_shared, stride_gate,
    TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, HAS_SHARED: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_N outputs of one token, over all its experts."""
    token = tl.program_id(1).to(tl.int64)
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sources = (features if EVEN_N else tl.minimum(features, n - 1)).to(tl.int64) * k
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    mixed = tl.zeros([BLOCK_N], tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        expert = tl.load(experts_ptr + pair).to(tl.int64)
        w_ptrs = w_ptr + expert * n * k + sources
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in tl.range(0, k, BLOCK_K, num_stages=STAGES):
            columns = start + tl.arange(0, BLOCK_K)
            acc += _load_rows(w_ptrs, columns, k, EVEN_K) * _load_row(x_ptr + pair * k, columns, k, EVEN_K)[None, :]
        mixed += weigh(tl.sum(acc, 1), tl.load(weights_ptr + pair), out_ptr.dtype.element_ty)
    mask = features < n
    mixed = mixed.to(out_ptr.dtype.element_ty)
    if HAS_SHARED:
        shared = tl.load(shared_ptr + token * stride_shared + features, mask=mask, other=0.0)
        mixed = add_shared(mixed, shared, tl.load(shared_gate_ptr + token * stride_gate))
    tl.store(out_ptr + token * n + features, mixed, mask=mask)


@triton.jit
def _load_row(ptr, columns, k, EVEN_K: tl.constexpr):
    """Those columns in fp32, 0 past the end."""
    if EVEN_K:
        return tl.load(ptr + columns).to(tl.float32)
    else:
        return tl.load(ptr + columns, mask=columns < k, other=0.0).to(tl.float32)


@triton.jit
def _load_rows(row_ptrs, columns, k, EVEN_K: tl.constexpr):
    """Those columns of each row in fp32, 0 past the end. Each weight is read once: it need not stay in L2."""
    if EVEN_K:
        return tl.load(row_ptrs[:, None] + columns[None, :], eviction_policy="evict_first").to(tl.float32)
    else:
        mask = (columns < k)[None, :]
        return tl.load(row_ptrs[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
