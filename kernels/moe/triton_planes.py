"""Grouped products with experts as PlanesMatrix: weight @ x.T, codes become values in the registers of tensor cores.

Scales of MXFP4 and NVFP4 are part of the values, so the product sums all of K; those of FP8, of integers and of tables
multiply the sum of the inputs that share one, at most a group, in fp32. How codes become values:
kernels/linear/triton_e2m1.py and kernels/moe/triton_planes_decode.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.linear.triton_e2m1 import e2m1, scales_by_16, scales_by_32
from kernels.moe.configs import PlanesTile
from kernels.moe.planes import GROUP, PLANE, PlanesMatrix
from kernels.moe.reference import Gate
from kernels.moe.triton_common import gate_and_mul, place_tile
from kernels.moe.triton_planes_decode import e4m3, has_zeros, int4, int4_scale, load_table, lut4
from kernels.moe.triton_route import Routing, RowTiles

# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types: kernel arguments carry none)


def planes_gemm(
    x: torch.Tensor,
    w: PlanesMatrix,
    routed: RowTiles | Routing,
    tile: PlanesTile,
    *,
    block_m: int,
    num_pairs: int,
    gate: Gate | None,
    bias: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Return [num_pairs, N]: each pair's row of x times its expert's matrix, plus its bias; gate: activates it.

    x: [num_pairs / n, K], each row used by n successive pairs, dense in K; bias: [E, N or 2 * N], contiguous. routed:
    tiles of block_m rows, or the routing itself, whose pairs are then tiles of one row; those of experts that are not
    here are left unwritten.
    """
    num_halves = 1 if gate is None else gate.num_halves
    n = w.shape[1] // num_halves
    out = torch.empty(num_pairs, n, dtype=x.dtype, device=x.device)
    assert x.stride(1) == 1
    assert w.words.is_contiguous()
    assert w.scales.is_contiguous()
    assert w.constants is None or w.constants.is_contiguous()
    if isinstance(routed, Routing):
        experts = pairs = rows = routed.experts.view(-1)
    else:
        experts, pairs, rows = routed.experts, routed.pairs, routed.rows
    num_tiles = experts.shape[0]
    _planes_kernel[(num_tiles * triton.cdiv(n, tile.block_n),)](
        x, w.words, w.scales, w.constants, bias, out, pairs, experts, rows, num_tiles, n, w.shape[2], x.stride(0),
        w.scales.stride(0), KIND=kind_of(w), ROWS=w.rows, COLUMNS=w.columns, HAS_PTX=has_ptx(x, w),
        GROUP_K=GROUP, PLANE_K=PLANE, PAIRS_PER_ROW=num_pairs // x.shape[0],
        IS_DIRECT=isinstance(routed, Routing), HAS_BIAS=bias is not None,
        GATE="" if gate is None else gate.kind, ALPHA=0.0 if gate is None else gate.alpha,
        LIMIT=0.0 if gate is None else gate.limit, HALVES=num_halves,
        BLOCK_M=block_m, BLOCK_N=tile.block_n, GROUP_M=tile.group_m, STAGES=tile.num_stages,
        EVEN_N=n % tile.block_n == 0, EVEN_K=w.shape[2] % GROUP == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", PDL=pdl, num_warps=tile.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def kind_of(w: PlanesMatrix) -> str:
    """Return the KIND of kernels; of integers with what words of scales hold: "int4_fp16_zeros", "int4_bf16" etc."""
    if w.kind != "int4":
        return w.kind
    return f"int4_{'bf16' if w.scale_dtype == torch.bfloat16 else 'fp16'}" + ("_zeros" if w.has_zeros else "")


def has_ptx(x: torch.Tensor, w: PlanesMatrix) -> bool:
    """Return True if codes become values by PTX, which knows bfloat16, and of integers float16."""
    return x.is_cuda and (x.dtype == torch.bfloat16 or (w.kind == "int4" and x.dtype == torch.float16))


@triton.jit(do_not_specialize=["num_tiles"])
def _planes_kernel(
    x_ptr, words_ptr, scales_ptr, factors_ptr, bias_ptr, out_ptr, pairs_ptr, tile_experts_ptr, tile_rows_ptr, num_tiles,
    n, k, stride_x, stride_scales, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_PTX: tl.constexpr,
    GROUP_K: tl.constexpr, PLANE_K: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr, IS_DIRECT: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, HALVES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One (tile of rows, tile of output features). IS_DIRECT: tile i is the pair i alone."""
    tile, features = place_tile(num_tiles, n, BLOCK_N, GROUP_M)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.arange(0, BLOCK_M)
    if IS_DIRECT:
        num_rows = 1
        if tl.load(tile_experts_ptr + tile) < 0:  # an expert of another rank
            return
        pairs = tile + tl.zeros([BLOCK_M], tl.int64)
    else:
        num_rows = tl.load(tile_rows_ptr + tile)
        if num_rows == 0:
            return
        pairs = tl.load(pairs_ptr + tile * BLOCK_M + rows, mask=rows < num_rows, other=0).to(tl.int64)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    sources = features if EVEN_N else tl.minimum(features, n - 1)
    x_ptrs = x_ptr + (pairs // PAIRS_PER_ROW * stride_x)[:, None] + tl.arange(0, PLANE_K)[None, :]
    RUNS: tl.constexpr = 2 if KIND == "fp8" else 1
    num_groups = tl.cdiv(k, GROUP_K)
    stride_run = HALVES * n * PLANE_K
    word_ptrs = words_ptr + expert * num_groups * RUNS * stride_run
    word_ptrs += sources[:, None] * PLANE_K + tl.arange(0, PLANE_K)[None, :]
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
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = acc
    for group in tl.range(0, num_groups, num_stages=STAGES):
        x0 = _load_x(x_ptrs, group * GROUP_K, k, PLANE_K, EVEN_K)
        x1 = _load_x(x_ptrs, group * GROUP_K + PLANE_K, k, PLANE_K, EVEN_K)
        x2 = _load_x(x_ptrs, group * GROUP_K + 2 * PLANE_K, k, PLANE_K, EVEN_K)
        x3 = _load_x(x_ptrs, group * GROUP_K + 3 * PLANE_K, k, PLANE_K, EVEN_K)
        acc = _add_group(
            acc, word_ptrs, stride_run, scale_ptrs, stride_scale, group, table, x0, x1, x2, x3,
            KIND, GROUP_K, COLUMNS, HAS_PTX, PRECISION,
        )  # fmt: skip
        if HALVES == 2:
            up = _add_group(
                up, word_ptrs + n * PLANE_K, stride_run, scale_ptrs + scale_of_up, stride_scale, group, table,
                x0, x1, x2, x3, KIND, GROUP_K, COLUMNS, HAS_PTX, PRECISION,
            )  # fmt: skip
        word_ptrs += RUNS * stride_run

    if KIND == "nvfp4":
        factor_ptrs = factors_ptr + expert * n * HALVES + sources
        acc *= tl.load(factor_ptrs)[:, None]
        if HALVES == 2:
            up *= tl.load(factor_ptrs + n)[:, None]
    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert * n * HALVES + sources
        acc += tl.load(bias_ptrs).to(tl.float32)[:, None]
        if HALVES == 2:
            up += tl.load(bias_ptrs + n).to(tl.float32)[:, None]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    values = acc.to(dtype) if GATE == "" else gate_and_mul(acc, up, dtype, GATE, ALPHA, LIMIT)
    targets = out_ptr + (pairs * n)[None, :] + features[:, None]
    tl.store(targets, values, mask=(rows < num_rows)[None, :] & (features < n)[:, None])


@triton.jit
def _load_x(x_ptrs, start, k, PLANE_K: tl.constexpr, EVEN_K: tl.constexpr):
    """Load 32 inputs from `start` on, 0 past the end: [BLOCK_M, 32]."""
    if EVEN_K:
        return tl.load(x_ptrs + start)
    else:
        return tl.load(x_ptrs + start, mask=(start + tl.arange(0, PLANE_K) < k)[None, :], other=0.0)


@triton.jit
def _add_group(
    acc, word_ptrs, stride_run, scale_ptrs, stride_scale, group, table, x0, x1, x2, x3,
    KIND: tl.constexpr, GROUP_K: tl.constexpr, COLUMNS: tl.constexpr, HAS_PTX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + weight @ x.T over one group."""
    words = tl.load(word_ptrs, eviction_policy="evict_first")
    dtype: tl.constexpr = x0.dtype
    if KIND == "mxfp4":
        # One plane's factors at a time: with those of all four, the tile for prompts has 157 registers a thread instead
        # of 128, and one program fits a multiprocessor where two did
        scales = tl.load(scale_ptrs + group * stride_scale)
        w0 = e2m1(words, scales_by_32(scales, 0), dtype, 0, HAS_PTX)
        acc = tl.dot(w0, tl.trans(x0), acc, input_precision=PRECISION)
        w1 = e2m1(words, scales_by_32(scales, 1), dtype, 1, HAS_PTX)
        acc = tl.dot(w1, tl.trans(x1), acc, input_precision=PRECISION)
        w2 = e2m1(words, scales_by_32(scales, 2), dtype, 2, HAS_PTX)
        acc = tl.dot(w2, tl.trans(x2), acc, input_precision=PRECISION)
        w3 = e2m1(words, scales_by_32(scales, 3), dtype, 3, HAS_PTX)
        return tl.dot(w3, tl.trans(x3), acc, input_precision=PRECISION)
    elif KIND == "nvfp4":
        scales = tl.load(scale_ptrs + group * stride_scale)
        s0, s1 = scales_by_16(scales, 0), scales_by_16(scales, 1)
        s2, s3 = scales_by_16(scales, 2), scales_by_16(scales, 3)
        acc = tl.dot(e2m1(words, s0, dtype, 0, HAS_PTX), tl.trans(x0), acc, input_precision=PRECISION)
        acc = tl.dot(e2m1(words, s1, dtype, 1, HAS_PTX), tl.trans(x1), acc, input_precision=PRECISION)
        acc = tl.dot(e2m1(words, s2, dtype, 2, HAS_PTX), tl.trans(x2), acc, input_precision=PRECISION)
        return tl.dot(e2m1(words, s3, dtype, 3, HAS_PTX), tl.trans(x3), acc, input_precision=PRECISION)
    elif KIND == "nf4" or KIND == "fp4":
        scales = tl.load(scale_ptrs + 2 * group * stride_scale)
        more = tl.load(scale_ptrs + (2 * group + 1) * stride_scale)
        w0, w1 = lut4(words, scales, table, x0, 0, KIND, HAS_PTX)
        part = tl.dot(w0, tl.trans(x0), input_precision=PRECISION)
        acc += tl.dot(w1, tl.trans(x1), part, input_precision=PRECISION) * scales[:, None]
        w2, w3 = lut4(words, more, table, x2, 1, KIND, HAS_PTX)
        part = tl.dot(w2, tl.trans(x2), input_precision=PRECISION)
        return acc + tl.dot(w3, tl.trans(x3), part, input_precision=PRECISION) * more[:, None]
    elif KIND == "fp8":
        scales = tl.load(scale_ptrs + group * GROUP_K // COLUMNS * stride_scale)
        more = tl.load(word_ptrs + stride_run, eviction_policy="evict_first")
        part = tl.dot(e4m3(words, scales, x0, 0, HAS_PTX), tl.trans(x0), input_precision=PRECISION)
        part = tl.dot(e4m3(words, scales, x1, 1, HAS_PTX), tl.trans(x1), part, input_precision=PRECISION)
        part = tl.dot(e4m3(more, scales, x2, 0, HAS_PTX), tl.trans(x2), part, input_precision=PRECISION)
        part = tl.dot(e4m3(more, scales, x3, 1, HAS_PTX), tl.trans(x3), part, input_precision=PRECISION)
        return acc + part * scales[:, None]
    else:
        return _add_int4(
            acc, words, scale_ptrs, stride_scale, group, x0, x1, x2, x3, KIND, GROUP_K, COLUMNS, HAS_PTX, PRECISION
        )  # fmt: skip


@triton.jit
def _add_int4(
    acc, words, scale_ptrs, stride_scale, group, x0, x1, x2, x3,
    KIND: tl.constexpr, GROUP_K: tl.constexpr, COLUMNS: tl.constexpr, HAS_PTX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + weight @ x.T over one group of integers: the planes that share a scale are summed apart."""
    PARTS: tl.constexpr = 4 if COLUMNS == 32 else (2 if COLUMNS == 64 else 1)
    s0, f0 = load_int4_scales(scale_ptrs, stride_scale, group, 0, PARTS, KIND, GROUP_K, COLUMNS)
    s1, f1 = load_int4_scales(scale_ptrs, stride_scale, group, PARTS // 4, PARTS, KIND, GROUP_K, COLUMNS)
    s2, f2 = load_int4_scales(scale_ptrs, stride_scale, group, PARTS // 2, PARTS, KIND, GROUP_K, COLUMNS)
    s3, f3 = load_int4_scales(scale_ptrs, stride_scale, group, PARTS - 1, PARTS, KIND, GROUP_K, COLUMNS)
    part = tl.dot(int4(words, s0, x0, 0, KIND, HAS_PTX), tl.trans(x0), input_precision=PRECISION)
    if PARTS == 4:
        acc += part * f0[:, None]
        part = tl.zeros_like(part)
    part = tl.dot(int4(words, s1, x1, 1, KIND, HAS_PTX), tl.trans(x1), part, input_precision=PRECISION)
    if PARTS != 1:
        acc += part * f1[:, None]
        part = tl.zeros_like(part)
    part = tl.dot(int4(words, s2, x2, 2, KIND, HAS_PTX), tl.trans(x2), part, input_precision=PRECISION)
    if PARTS == 4:
        acc += part * f2[:, None]
        part = tl.zeros_like(part)
    part = tl.dot(int4(words, s3, x3, 3, KIND, HAS_PTX), tl.trans(x3), part, input_precision=PRECISION)
    return acc + part * f3[:, None]


@triton.jit
def load_int4_scales(
    ptrs, stride, group, PART: tl.constexpr, PARTS: tl.constexpr,
    KIND: tl.constexpr, GROUP_K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the words of the group's scales PART of PARTS, [N] int32, and the scales in fp32.

    Without zero points a word has two neighbouring scales; whether one or the other is known here if PARTS is not 1.
    """
    if has_zeros(KIND):
        place = group * GROUP_K // COLUMNS if PARTS == 1 else group * PARTS + PART
        words = tl.load(ptrs + place * stride)
        return words, int4_scale(words, 0, KIND)
    elif PARTS == 1:
        place = group * GROUP_K // COLUMNS
        words = tl.load(ptrs + place // 2 * stride)
        return words, int4_scale(words, place % 2, KIND)
    else:
        words = tl.load(ptrs + (group * (PARTS // 2) + PART // 2) * stride)
        return words, int4_scale(words, PART % 2, KIND)
