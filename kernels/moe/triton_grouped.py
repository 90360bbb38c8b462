"""Products of the mixture of experts: grouped GEMM for many tokens, matrix-vector products for few.

grouped_gemm multiplies each tile of rows with the weights of its expert. The grid has room for as many tiles as any
routing can need; a tile without rows ends at once. Rows of a tile past its last read the first pair instead: cheaper
in the loop than a mask, and their results are not stored.

pairs_gate_up and pairs_down compute each (token, expert) pair as a matrix-vector product, without sorting. They are
limited by reading the chosen experts' weights once. pairs_down sums a token's experts in their order, so that the sum
needs no launch of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.moe.configs import PairTile, Tile
from kernels.moe.reference import Gate
from kernels.moe.storage import ExpertMatrix
from kernels.moe.triton_common import add_shared, gate_and_mul, place_tile, weigh
from kernels.moe.triton_route import Routing, RowTiles
from kernels.moe.triton_storage import StoredTensors, load_tile

# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)


def grouped_gemm(
    x: torch.Tensor,
    w: ExpertMatrix,
    tiles: RowTiles,
    config: Tile,
    *,
    num_pairs: int,
    gate: Gate | None,
    swaps: bool,
    bias: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Return [num_pairs, N]: each pair's row of x times its expert's matrix, plus its bias; gate: activates it.

    The rows of pairs that are in no tile are undefined.
    x: [num_pairs / n, K], each row used by n successive pairs; w: [E, N or 2 * N, K], of x's dtype or packed; bias:
    [E, N or 2 * N], contiguous. x is dense in K.
    """
    num_rows, k = x.shape
    num_halves = 1 if gate is None else gate.num_halves
    n = w.shape[1] // num_halves
    out = torch.empty(num_pairs, n, dtype=x.dtype, device=x.device)
    num_tiles, stored = tiles.experts.shape[0], StoredTensors.of(w)
    assert x.stride(1) == 1
    _grouped_kernel[(num_tiles * triton.cdiv(n, config.block_n),)](
        x, stored.values, stored.scales, stored.factors, bias, out, tiles.pairs, tiles.experts, tiles.rows, num_tiles,
        n, k, x.stride(0), STORAGE=stored.storage, ROWS=stored.rows, COLUMNS=stored.columns,
        PAIRS_PER_ROW=num_pairs // num_rows, SWAPS=swaps, HAS_BIAS=bias is not None,
        GATE="" if gate is None else gate.kind, ALPHA=0.0 if gate is None else gate.alpha,
        LIMIT=0.0 if gate is None else gate.limit, HALVES=num_halves,
        BLOCK_M=tiles.pairs.shape[0] // num_tiles, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        GROUP_M=config.group_m, EVEN_N=n % config.block_n == 0, EVEN_K=k % config.block_k == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", PDL=pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tiles"])
def _grouped_kernel(
    x_ptr, w_ptr, scales_ptr, factors_ptr, bias_ptr, out_ptr, pairs_ptr, tile_experts_ptr, tile_rows_ptr, num_tiles,
    n, k, stride_x,
    STORAGE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr, SWAPS: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, HALVES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One (tile of rows, tile of output features). SWAPS: the product is computed transposed."""
    tile, features = place_tile(num_tiles, n, BLOCK_N, GROUP_M)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_rows = tl.load(tile_rows_ptr + tile)
    if num_rows == 0:
        return
    rows = tl.arange(0, BLOCK_M)
    pairs = tl.load(pairs_ptr + tile * BLOCK_M + rows, mask=rows < num_rows, other=0).to(tl.int64)
    x_ptrs = x_ptr + pairs // PAIRS_PER_ROW * stride_x
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    sources = features if EVEN_N else tl.minimum(features, n - 1)
    features_of_w = sources.to(tl.int64)
    x_dtype: tl.constexpr = x_ptr.dtype.element_ty

    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAPS else [BLOCK_M, BLOCK_N], tl.float32)
    up = acc
    for start in range(0, k, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        x = _load(x_ptrs, columns, k, EVEN_K)
        w = load_tile(
            w_ptr, scales_ptr, factors_ptr, expert * HALVES, n, k, features_of_w, start, x_dtype,
            STORAGE, ROWS, COLUMNS, BLOCK_K, EVEN_K, STREAMS=False,
        )  # fmt: skip
        acc = _multiply(x, w, acc, SWAPS, PRECISION)
        if HALVES == 2:
            w = load_tile(
                w_ptr, scales_ptr, factors_ptr, expert * HALVES + 1, n, k, features_of_w, start, x_dtype,
                STORAGE, ROWS, COLUMNS, BLOCK_K, EVEN_K, STREAMS=False,
            )  # fmt: skip
            up = _multiply(x, w, up, SWAPS, PRECISION)

    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert * n * HALVES + sources
        acc += _as_column(tl.load(bias_ptrs), SWAPS)
        if HALVES == 2:
            up += _as_column(tl.load(bias_ptrs + n), SWAPS)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    values = acc.to(dtype) if GATE == "" else gate_and_mul(acc, up, dtype, GATE, ALPHA, LIMIT)
    targets = out_ptr + pairs * n
    if SWAPS:
        tl.store(
            targets[None, :] + features[:, None], values, mask=(rows < num_rows)[None, :] & (features < n)[:, None]
        )
    else:
        tl.store(
            targets[:, None] + features[None, :], values, mask=(rows < num_rows)[:, None] & (features < n)[None, :]
        )


@triton.jit
def _as_column(bias, SWAPS: tl.constexpr):
    """Return a tile's biases in fp32, to be added to its product."""
    bias = bias.to(tl.float32)
    return bias[:, None] if SWAPS else bias[None, :]


@triton.jit
def _load(row_ptrs, columns, k, EVEN_K: tl.constexpr):
    """Load `columns` of each row, 0 past the end."""
    if EVEN_K:
        return tl.load(row_ptrs[:, None] + columns[None, :])
    else:
        return tl.load(row_ptrs[:, None] + columns[None, :], mask=(columns < k)[None, :], other=0.0)


@triton.jit
def _multiply(x, w, acc, SWAPS: tl.constexpr, PRECISION: tl.constexpr):
    """acc + x @ w.T, or transposed acc + w @ x.T."""
    if SWAPS:
        return tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    else:
        return tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)


def pairs_gate_up(
    x: torch.Tensor,
    gate_up: ExpertMatrix,
    routing: Routing,
    tile: PairTile,
    *,
    gate: Gate,
    bias: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Return [T * top_k, I]: gate and up of each pair, joined. x: [T, H], dense in H; gate_up: [E, 2 * I, H].

    bias: [E, 2 * I], contiguous. Without gates both have I instead of 2 * I. Rows of absent experts are undefined.
    """
    num_pairs, top_k = routing.experts.numel(), routing.experts.shape[1]
    n, k = gate_up.shape[1] // gate.num_halves, gate_up.shape[2]
    out = torch.empty(num_pairs, n, dtype=x.dtype, device=x.device)
    stored = StoredTensors.of(gate_up)
    assert x.stride(1) == 1
    _pairs_up_kernel[(triton.cdiv(n, tile.block_n), num_pairs)](
        x, stored.values, stored.scales, stored.factors, bias, routing.experts, out, n, k, x.stride(0),
        STORAGE=stored.storage, ROWS=stored.rows, COLUMNS=stored.columns,
        HAS_BIAS=bias is not None, GATE=gate.kind, ALPHA=gate.alpha, LIMIT=gate.limit, HALVES=gate.num_halves,
        HAS_ABSENT=routing.has_absent, TOP_K=top_k, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, STAGES=tile.num_stages,
        EVEN_N=n % tile.block_n == 0, EVEN_K=k % tile.block_k == 0, PDL=pdl, num_warps=tile.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def pairs_down(
    inner: torch.Tensor,
    down: ExpertMatrix,
    routing: Routing,
    tile: PairTile,
    *,
    bias: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Return [T, H], each token's experts summed with their weights. inner: [T * top_k, I]; down: [E, H, I].

    bias: [E, H], contiguous. shared: see kernels.moe.reference.fused_moe; shared_gate: [T], before its sigmoid.
    """
    num_tokens, top_k = routing.experts.shape
    n, k = down.shape[1:]
    out = torch.empty(num_tokens, n, dtype=inner.dtype, device=inner.device)
    stored = StoredTensors.of(down)
    _pairs_down_kernel[(triton.cdiv(n, tile.block_n), num_tokens)](
        inner, stored.values, stored.scales, stored.factors, bias, routing.experts, routing.weights, shared,
        shared_gate, out, n, k,
        0 if shared is None else shared.stride(0), 0 if shared_gate is None else shared_gate.stride(0),
        STORAGE=stored.storage, ROWS=stored.rows, COLUMNS=stored.columns,
        TOP_K=top_k, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, STAGES=tile.num_stages,
        EVEN_N=n % tile.block_n == 0, EVEN_K=k % tile.block_k == 0,
        HAS_BIAS=bias is not None, HAS_SHARED=shared is not None, HAS_ABSENT=routing.has_absent,
        PDL=pdl, num_warps=tile.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit
def _pairs_up_kernel(
    x_ptr, w_ptr, scales_ptr, factors_ptr, bias_ptr, experts_ptr, out_ptr, n, k, stride_x,
    STORAGE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, HALVES: tl.constexpr,
    HAS_ABSENT: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_N values of one pair between the two products."""
    pair = tl.program_id(1)
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sources = features if EVEN_N else tl.minimum(features, n - 1)
    x_row = x_ptr + (pair // TOP_K).to(tl.int64) * stride_x
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    if HAS_ABSENT:  # noqa: SIM102 - Triton decides the outer one while it compiles
        if expert < 0:
            return
    features_of_w = sources.to(tl.int64)
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK_K)
        x = _load_row(x_row, columns, k, EVEN_K)
        gate += x[None, :] * load_tile(
            w_ptr, scales_ptr, factors_ptr, expert * HALVES, n, k, features_of_w, start, tl.float32,
            STORAGE, ROWS, COLUMNS, BLOCK_K, EVEN_K, STREAMS=True,
        )  # fmt: skip
        if HALVES == 2:
            up += x[None, :] * load_tile(
                w_ptr, scales_ptr, factors_ptr, expert * HALVES + 1, n, k, features_of_w, start, tl.float32,
                STORAGE, ROWS, COLUMNS, BLOCK_K, EVEN_K, STREAMS=True,
            )  # fmt: skip
    gate_sum, up_sum = tl.sum(gate, 1), tl.sum(up, 1)
    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert * HALVES * n + sources
        gate_sum += tl.load(bias_ptrs).to(tl.float32)
        if HALVES == 2:
            up_sum += tl.load(bias_ptrs + n).to(tl.float32)
    values = gate_and_mul(gate_sum, up_sum, out_ptr.dtype.element_ty, GATE, ALPHA, LIMIT)
    tl.store(out_ptr + pair.to(tl.int64) * n + features, values, mask=features < n)


@triton.jit
def _pairs_down_kernel(
    x_ptr, w_ptr, scales_ptr, factors_ptr, bias_ptr, experts_ptr, weights_ptr, shared_ptr, shared_gate_ptr, out_ptr,
    n, k, stride_shared, stride_gate, STORAGE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SHARED: tl.constexpr,
    HAS_ABSENT: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_N outputs of one token, over all its experts that are here."""
    token = tl.program_id(1).to(tl.int64)
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sources = (features if EVEN_N else tl.minimum(features, n - 1)).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    mixed = tl.zeros([BLOCK_N], tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        expert = tl.load(experts_ptr + pair).to(tl.int64)
        is_here = expert >= 0
        depth = k
        if HAS_ABSENT:
            depth = tl.where(is_here, k, 0)  # nothing is read of an absent expert
            expert = tl.maximum(expert, 0)
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
            columns = start + tl.arange(0, BLOCK_K)
            acc += _load_row(x_ptr + pair * k, columns, k, EVEN_K)[None, :] * load_tile(
                w_ptr, scales_ptr, factors_ptr, expert, n, k, sources, start, tl.float32,
                STORAGE, ROWS, COLUMNS, BLOCK_K, EVEN_K, STREAMS=True,
            )  # fmt: skip
        value = tl.sum(acc, 1)
        if HAS_BIAS:
            value += tl.load(bias_ptr + expert * n + sources).to(tl.float32)
        value = weigh(value, tl.load(weights_ptr + pair), out_ptr.dtype.element_ty)
        mixed += tl.where(is_here, value, 0.0) if HAS_ABSENT else value
    mask = features < n
    mixed = mixed.to(out_ptr.dtype.element_ty)
    if HAS_SHARED:
        shared = tl.load(shared_ptr + token * stride_shared + features, mask=mask, other=0.0)
        mixed = add_shared(mixed, shared, tl.load(shared_gate_ptr + token * stride_gate))
    tl.store(out_ptr + token * n + features, mixed, mask=mask)


@triton.jit
def _load_row(ptr, columns, k, EVEN_K: tl.constexpr):
    """Load `columns` in fp32, 0 past the end."""
    if EVEN_K:
        return tl.load(ptr + columns).to(tl.float32)
    else:
        return tl.load(ptr + columns, mask=columns < k, other=0.0).to(tl.float32)
