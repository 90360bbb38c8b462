"""Matrix-vector products of experts as PlanesMatrix, for few tokens: one, and two of many experts, unless
kernels/moe/gluon_few.py serves them.

A tensor core's product of 16 rows costs one row as much time as 16, and the products of an output wait for one another.
Here codes become bfloat16 as in kernels/moe/triton_planes_decode.py and are multiplied and summed in fp32 by the other
units, so that only the loads take time. planes_pairs_up: one (token, expert) pair and some outputs a program;
planes_pairs_down: one token and some outputs, over all of its experts at once, whose sum needs no launch of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.linear.triton_e2m1 import e2m1, scales_by_16, scales_by_32
from kernels.moe.configs import PlanesPairTile
from kernels.moe.planes import GROUP, PLANE, PlanesMatrix
from kernels.moe.reference import Gate
from kernels.moe.triton_common import add_shared, gate_and_mul, weigh
from kernels.moe.triton_planes import has_ptx, kind_of, load_int4_scales
from kernels.moe.triton_planes_decode import e4m3, int4, load_table, lut4
from kernels.moe.triton_route import Routing

# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)


def planes_pairs_up(
    x: torch.Tensor,
    gate_up: PlanesMatrix,
    routing: Routing,
    tile: PlanesPairTile,
    *,
    gate: Gate,
    bias: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Equal kernels.moe.triton_grouped.pairs_gate_up: [T * top_k, I]."""
    num_pairs, top_k = routing.experts.numel(), routing.experts.shape[1]
    n, k = gate_up.shape[1] // gate.num_halves, gate_up.shape[2]
    out = torch.empty(num_pairs, n, dtype=x.dtype, device=x.device)
    assert x.stride(1) == 1
    _planes_pairs_up_kernel[(triton.cdiv(n, tile.block_n), num_pairs)](
        x, gate_up.words, gate_up.scales, gate_up.constants, bias, routing.experts, out, n, k, x.stride(0),
        gate_up.scales.stride(0),
        KIND=kind_of(gate_up), ROWS=gate_up.rows, COLUMNS=gate_up.columns, HAS_PTX=has_ptx(x, gate_up),
        GROUP_K=GROUP, PLANE_K=PLANE, HAS_BIAS=bias is not None,
        GATE=gate.kind, ALPHA=gate.alpha, LIMIT=gate.limit, HALVES=gate.num_halves, HAS_ABSENT=routing.has_absent,
        TOP_K=top_k, BLOCK_N=tile.block_n, SPLITS=tile.splits, UNROLL=tile.unroll, EVEN_N=n % tile.block_n == 0,
        EVEN_K=k % (GROUP * tile.splits) == 0, PDL=pdl, num_warps=tile.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def planes_pairs_down(
    inner: torch.Tensor,
    down: PlanesMatrix,
    routing: Routing,
    tile: PlanesPairTile,
    *,
    bias: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Equal kernels.moe.triton_grouped.pairs_down but for the order of the experts' sum: [T, H]."""
    num_tokens, top_k = routing.experts.shape
    n, k = down.shape[1:]
    out = torch.empty(num_tokens, n, dtype=inner.dtype, device=inner.device)
    places = triton.next_power_of_2(top_k)
    _planes_pairs_down_kernel[(triton.cdiv(n, tile.block_n), num_tokens)](
        inner, down.words, down.scales, down.constants, bias, routing.experts, routing.weights, shared, shared_gate,
        out, n, k, down.scales.stride(0), 0 if shared is None else shared.stride(0),
        0 if shared_gate is None else shared_gate.stride(0),
        KIND=kind_of(down), ROWS=down.rows, COLUMNS=down.columns, HAS_PTX=has_ptx(inner, down),
        GROUP_K=GROUP, PLANE_K=PLANE, HAS_BIAS=bias is not None, HAS_SHARED=shared is not None,
        HAS_ABSENT=routing.has_absent or places > top_k, TOP_K=top_k, PLACES=places, BLOCK_N=tile.block_n,
        SPLITS=tile.splits, UNROLL=tile.unroll, EVEN_N=n % tile.block_n == 0,
        EVEN_K=k % (GROUP * tile.splits) == 0, PDL=pdl, num_warps=tile.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit
def _planes_pairs_up_kernel(
    x_ptr, words_ptr, scales_ptr, factors_ptr, bias_ptr, experts_ptr, out_ptr, n, k, stride_x, stride_scales,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_PTX: tl.constexpr, GROUP_K: tl.constexpr,
    PLANE_K: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    HALVES: tl.constexpr, HAS_ABSENT: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    UNROLL: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_N values of one pair between the two products; a row for each of them and split of the inputs."""
    pair = tl.program_id(1)
    rows = tl.arange(0, SPLITS * BLOCK_N)
    row_features = tl.program_id(0) * BLOCK_N + rows % BLOCK_N
    sources = row_features if EVEN_N else tl.minimum(row_features, n - 1)
    places = tl.arange(0, PLANE_K)
    x_ptrs = x_ptr + (pair // TOP_K).to(tl.int64) * stride_x + places[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    if HAS_ABSENT:  # noqa: SIM102 - Triton decides the outer one while it compiles
        if expert < 0:
            return
    RUNS: tl.constexpr = 2 if KIND == "fp8" else 1
    num_groups = tl.cdiv(k, GROUP_K)
    stride_run = HALVES * n * PLANE_K
    word_ptrs = words_ptr + expert * num_groups * RUNS * stride_run + sources[:, None] * PLANE_K + places[None, :]
    scale_ptrs = scales_ptr + expert * stride_scales
    if KIND == "fp8":
        columns = tl.cdiv(k, COLUMNS)
        scale_ptrs += sources // ROWS * columns
        stride_scale = 1
        scale_of_up = tl.cdiv(n, ROWS) * columns
    elif KIND == "nvfp4":
        scale_ptrs += (sources * 2)[:, None] + tl.arange(0, 2)[None, :]
        stride_scale = HALVES * n * 2
        scale_of_up = n * 2
    else:
        scale_ptrs += sources
        stride_scale = HALVES * n
        scale_of_up = n
    table = None
    if KIND == "nf4" or KIND == "fp4":
        table = load_table(factors_ptr)
    gates = tl.zeros([SPLITS * BLOCK_N, PLANE_K], tl.float32)
    ups = gates
    for step in tl.range(0, tl.cdiv(num_groups, SPLITS), loop_unroll_factor=UNROLL):
        group, start, offset = _place_group(step, rows // BLOCK_N, num_groups, RUNS * stride_run, GROUP_K, SPLITS)
        x0, x1, x2, x3 = _load_planes(x_ptrs, start, k, PLANE_K, EVEN_K)
        ptrs = word_ptrs + offset
        gates = _add_products(
            gates, ptrs, stride_run, None, scale_ptrs, stride_scale, group, table, x0, x1, x2, x3,
            KIND, GROUP_K, COLUMNS, SPLITS, HAS_PTX,
        )  # fmt: skip
        if HALVES == 2:
            ups = _add_products(
                ups, ptrs + n * PLANE_K, stride_run, None, scale_ptrs + scale_of_up, stride_scale, group, table,
                x0, x1, x2, x3, KIND, GROUP_K, COLUMNS, SPLITS, HAS_PTX,
            )  # fmt: skip
    gate_sum, up_sum = _sum_splits(gates, SPLITS), _sum_splits(ups, SPLITS)
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sources = features if EVEN_N else tl.minimum(features, n - 1)
    if KIND == "nvfp4":
        factor_ptrs = factors_ptr + expert * HALVES * n + sources
        gate_sum *= tl.load(factor_ptrs)
        if HALVES == 2:
            up_sum *= tl.load(factor_ptrs + n)
    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert * HALVES * n + sources
        gate_sum += tl.load(bias_ptrs).to(tl.float32)
        if HALVES == 2:
            up_sum += tl.load(bias_ptrs + n).to(tl.float32)
    values = gate_and_mul(gate_sum, up_sum, out_ptr.dtype.element_ty, GATE, ALPHA, LIMIT)
    tl.store(out_ptr + pair.to(tl.int64) * n + features, values, mask=features < n)


@triton.jit
def _planes_pairs_down_kernel(
    x_ptr, words_ptr, scales_ptr, factors_ptr, bias_ptr, experts_ptr, weights_ptr, shared_ptr, shared_gate_ptr, out_ptr,
    n, k, stride_scales, stride_shared, stride_gate,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_PTX: tl.constexpr, GROUP_K: tl.constexpr,
    PLANE_K: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_ABSENT: tl.constexpr,
    TOP_K: tl.constexpr, PLACES: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    UNROLL: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_N outputs of one token; a row for each output, expert and split of the inputs, in that order."""
    token = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_N
    SUMS: tl.constexpr = PLACES * BLOCK_N
    rows = tl.arange(0, SPLITS * SUMS)
    planes = tl.arange(0, PLANE_K)
    sources, row_pairs, is_place = _place_rows(rows % SUMS, token, first, n, TOP_K, BLOCK_N, EVEN_N)
    x_ptrs = x_ptr + (row_pairs * k)[:, None] + planes[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    experts = tl.load(experts_ptr + row_pairs).to(tl.int64)
    is_here = None
    if HAS_ABSENT:
        is_here = ((experts >= 0) & is_place)[:, None]
        experts = tl.maximum(experts, 0)
    RUNS: tl.constexpr = 2 if KIND == "fp8" else 1
    num_groups = tl.cdiv(k, GROUP_K)
    stride_run = n * PLANE_K
    word_ptrs = words_ptr + (experts * (num_groups * RUNS * stride_run) + sources * PLANE_K)[:, None] + planes[None, :]
    scale_ptrs = scales_ptr + experts * stride_scales
    if KIND == "fp8":
        scale_ptrs += sources // ROWS * tl.cdiv(k, COLUMNS)
        stride_scale = 1
    elif KIND == "nvfp4":
        scale_ptrs = (scale_ptrs + sources * 2)[:, None] + tl.arange(0, 2)[None, :]
        stride_scale = n * 2
    else:
        scale_ptrs += sources
        stride_scale = n
    table = None
    if KIND == "nf4" or KIND == "fp4":
        table = load_table(factors_ptr)
    acc = tl.zeros([SPLITS * SUMS, PLANE_K], tl.float32)
    for step in tl.range(0, tl.cdiv(num_groups, SPLITS), loop_unroll_factor=UNROLL):
        group, start, offset = _place_group(step, rows // SUMS, num_groups, RUNS * stride_run, GROUP_K, SPLITS)
        x0, x1, x2, x3 = _load_planes(x_ptrs, start, k, PLANE_K, EVEN_K)
        acc = _add_products(
            acc, word_ptrs + offset, stride_run, is_here, scale_ptrs, stride_scale, group, table,
            x0, x1, x2, x3, KIND, GROUP_K, COLUMNS, SPLITS, HAS_PTX,
        )  # fmt: skip
    values = _sum_splits(acc, SPLITS)
    if SPLITS > 1:
        sources, row_pairs, is_place = _place_rows(tl.arange(0, SUMS), token, first, n, TOP_K, BLOCK_N, EVEN_N)
        experts = tl.load(experts_ptr + row_pairs).to(tl.int64)
        if HAS_ABSENT:
            experts = tl.maximum(experts, 0)
    if KIND == "nvfp4":
        values *= tl.load(factors_ptr + experts * n + sources)
    if HAS_BIAS:
        values += tl.load(bias_ptr + experts * n + sources).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    values = weigh(values, tl.load(weights_ptr + row_pairs), dtype)
    if HAS_ABSENT:
        # what the products of an absent expert have read is no number, perhaps
        there = (tl.load(experts_ptr + row_pairs) >= 0) & is_place
        values = tl.where(there, values, 0.0)
    mixed = tl.sum(tl.reshape(values, [PLACES, BLOCK_N]), 0).to(dtype)
    features = first + tl.arange(0, BLOCK_N)
    mask = features < n
    if HAS_SHARED:
        shared = tl.load(shared_ptr + token * stride_shared + features, mask=mask, other=0.0)
        mixed = add_shared(mixed, shared, tl.load(shared_gate_ptr + token * stride_gate))
    tl.store(out_ptr + token * n + features, mixed, mask=mask)


@triton.jit
def _place_rows(rows, token, first, n, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr):
    """Return each row's output, its pair, and whether it has one: a place that is none reads the last one's expert."""
    features = first + rows % BLOCK_N
    sources = features if EVEN_N else tl.minimum(features, n - 1)
    return sources, token * TOP_K + tl.minimum(rows // BLOCK_N, TOP_K - 1), rows < TOP_K * BLOCK_N


@triton.jit
def _place_group(step, splits, num_groups, stride, GROUP_K: tl.constexpr, SPLITS: tl.constexpr):
    """Return a step's group, its first input, and the offset of its words; of each row, [rows, 1] the last two.

    Splits take turns. A group past the last reads that one's words, whose products with inputs past the end are 0.
    """
    if SPLITS == 1:
        return step, step * GROUP_K, step * stride
    else:
        group = step * SPLITS + splits
        here = tl.minimum(group, num_groups - 1)
        return here, (group * GROUP_K)[:, None], (here * stride)[:, None]


@triton.jit
def _sum_splits(products, SPLITS: tl.constexpr):
    """Add up the products of each row, [SPLITS * rows, 32] → [rows]."""
    sums = tl.sum(products, 1)
    return sums if SPLITS == 1 else tl.sum(tl.reshape(sums, [SPLITS, products.shape[0] // SPLITS]), 0)


@triton.jit
def _load_planes(x_ptrs, start, k, PLANE_K: tl.constexpr, EVEN_K: tl.constexpr):
    """Load the inputs of a group from `start` on by planes of 32, 0 past the end: four of x_ptrs' shape."""
    if EVEN_K:
        return (
            tl.load(x_ptrs + start),
            tl.load(x_ptrs + start + PLANE_K),
            tl.load(x_ptrs + start + 2 * PLANE_K),
            tl.load(x_ptrs + start + 3 * PLANE_K),
        )
    else:
        places = start + tl.arange(0, PLANE_K)[None, :]
        return (
            tl.load(x_ptrs + start, mask=places < k, other=0.0),
            tl.load(x_ptrs + start + PLANE_K, mask=places + PLANE_K < k, other=0.0),
            tl.load(x_ptrs + start + 2 * PLANE_K, mask=places + 2 * PLANE_K < k, other=0.0),
            tl.load(x_ptrs + start + 3 * PLANE_K, mask=places + 3 * PLANE_K < k, other=0.0),
        )


@triton.jit
def _add_products(
    acc, word_ptrs, stride_run, is_here, scale_ptrs, stride_scale, group, table, x0, x1, x2, x3,
    KIND: tl.constexpr, GROUP_K: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """acc plus the products of a group, [rows, 32]: those of its planes added up. is_here: None: all rows are."""
    words = _load_words(word_ptrs, is_here)
    dtype: tl.constexpr = x0.dtype
    if KIND == "mxfp4" or KIND == "nvfp4":
        if KIND == "mxfp4":
            scales = tl.load(scale_ptrs + group * stride_scale)
            s0, s1 = scales_by_32(scales, 0), scales_by_32(scales, 1)
            s2, s3 = scales_by_32(scales, 2), scales_by_32(scales, 3)
        else:
            scales = tl.load(scale_ptrs + (group if SPLITS == 1 else group[:, None]) * stride_scale)
            s0, s1 = scales_by_16(scales, 0), scales_by_16(scales, 1)
            s2, s3 = scales_by_16(scales, 2), scales_by_16(scales, 3)
        acc += _times(e2m1(words, s0, dtype, 0, HAS_PTX), x0) + _times(e2m1(words, s1, dtype, 1, HAS_PTX), x1)
        return acc + _times(e2m1(words, s2, dtype, 2, HAS_PTX), x2) + _times(e2m1(words, s3, dtype, 3, HAS_PTX), x3)
    elif KIND == "nf4" or KIND == "fp4":
        scales = tl.load(scale_ptrs + 2 * group * stride_scale)
        more = tl.load(scale_ptrs + (2 * group + 1) * stride_scale)
        w0, w1 = lut4(words, scales, table, x0, 0, KIND, HAS_PTX)
        w2, w3 = lut4(words, more, table, x2, 1, KIND, HAS_PTX)
        acc += (_times(w0, x0) + _times(w1, x1)) * scales[:, None]
        return acc + (_times(w2, x2) + _times(w3, x3)) * more[:, None]
    elif KIND == "fp8":
        scales = tl.load(scale_ptrs + group * GROUP_K // COLUMNS * stride_scale)
        more = _load_words(word_ptrs + stride_run, is_here)
        part = _times(e4m3(words, scales, x0, 0, HAS_PTX), x0) + _times(e4m3(words, scales, x1, 1, HAS_PTX), x1)
        part += _times(e4m3(more, scales, x2, 0, HAS_PTX), x2) + _times(e4m3(more, scales, x3, 1, HAS_PTX), x3)
        return acc + part * scales[:, None]
    else:
        PARTS: tl.constexpr = 4 if COLUMNS == 32 else (2 if COLUMNS == 64 else 1)
        s0, f0 = load_int4_scales(scale_ptrs, stride_scale, group, 0, PARTS, KIND, GROUP_K, COLUMNS)
        s1, f1 = load_int4_scales(scale_ptrs, stride_scale, group, PARTS // 4, PARTS, KIND, GROUP_K, COLUMNS)
        s2, f2 = load_int4_scales(scale_ptrs, stride_scale, group, PARTS // 2, PARTS, KIND, GROUP_K, COLUMNS)
        s3, f3 = load_int4_scales(scale_ptrs, stride_scale, group, PARTS - 1, PARTS, KIND, GROUP_K, COLUMNS)
        p0, p1 = _times(int4(words, s0, x0, 0, KIND, HAS_PTX), x0), _times(int4(words, s1, x1, 1, KIND, HAS_PTX), x1)
        p2, p3 = _times(int4(words, s2, x2, 2, KIND, HAS_PTX), x2), _times(int4(words, s3, x3, 3, KIND, HAS_PTX), x3)
        if PARTS == 4:
            return acc + p0 * f0[:, None] + p1 * f1[:, None] + p2 * f2[:, None] + p3 * f3[:, None]
        elif PARTS == 2:
            return acc + (p0 + p1) * f0[:, None] + (p2 + p3) * f3[:, None]
        else:
            return acc + (p0 + p1 + p2 + p3) * f0[:, None]


@triton.jit
def _load_words(ptrs, is_here):
    if is_here is None:
        return tl.load(ptrs, eviction_policy="evict_first")
    else:
        return tl.load(ptrs, mask=is_here, other=0, eviction_policy="evict_first")


@triton.jit
def _times(values, x):
    """The products in fp32: [rows, 32], of x [rows or 1, 32]."""
    return values.to(tl.float32) * x.to(tl.float32)
