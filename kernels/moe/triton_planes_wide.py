"""Grouped products of 4-bit experts in planes for many tokens: x @ weight.T, each tile of weights unpacked once.

kernels/moe/triton_planes.py unpacks into the registers of tensor cores, which wait for each plane's values and hold
them for 128 rows at most. Here the values of a group, or of half of it, go to shared memory as one tile, scaled, which
all warps of a tile of rows read: with 256 rows half as many values are unpacked, and a tile is one product. Activations
are in the planes' order (arrange_rows, and the first product's own output), so that an unpacked pair stays a pair.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.moe.configs import WideTile
from kernels.moe.planes import GROUP, PLANE, PlanesMatrix
from kernels.moe.reference import Gate
from kernels.moe.triton_common import gate_and_mul, place_of
from kernels.moe.triton_planes import has_ptx, kind_of, load_int4_scales
from kernels.moe.triton_planes_decode import e2m1, int4, scale_values
from kernels.moe.triton_route import RowTiles

# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)

_GROUP = tl.constexpr(GROUP)
_PLANE = tl.constexpr(PLANE)


def arrange_rows(x: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """Return [T, K / 128 rounded up, 128]: x's values in the planes' order, past K zeros. x: [T, K], dense in K."""
    num_rows, k = x.shape
    assert x.stride(1) == 1
    out = torch.empty(num_rows, triton.cdiv(k, GROUP), GROUP, dtype=x.dtype, device=x.device)
    _arrange_rows_kernel[(num_rows, triton.cdiv(out.shape[1], 16))](
        x, out, k, out.shape[1], x.stride(0), GROUPS=16, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return out


def wide_gemm(
    x: torch.Tensor,
    w: PlanesMatrix,
    tiles: RowTiles,
    tile: WideTile,
    *,
    num_pairs: int,
    gate: Gate | None,
    bias: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Return each pair's row of x times its expert's matrix, plus its bias: [num_pairs, N].

    gate: activates it, and gives it in the planes' order: [num_pairs, N / 128 rounded up, 128]. x: as arrange_rows
    returns, each row used by num_pairs / T successive pairs; w: [E, N or 2 * N, K] of 4 bits; bias: [E, N or 2 * N],
    contiguous. The rows of pairs that are in no tile are undefined.
    """
    assert w.kind in ("mxfp4", "int4")
    num_halves = 1 if gate is None else gate.num_halves
    n = w.shape[1] // num_halves
    shape = (num_pairs, n) if gate is None else (num_pairs, triton.cdiv(n, GROUP), GROUP)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    num_tiles, span = tiles.experts.shape[0], tile.width // num_halves
    assert gate is None or span <= GROUP
    num_places = triton.cdiv(n if gate is None else shape[1] * GROUP, span)
    _wide_kernel[(num_tiles * num_places,)](
        x, w.words, w.scales, bias, out, tiles.pairs, tiles.experts, tiles.rows, num_tiles, num_places, n, x.shape[1],
        w.scales.stride(0), KIND=kind_of(w), COLUMNS=w.columns, HAS_PTX=has_ptx(x),
        PAIRS_PER_ROW=num_pairs // x.shape[0], HAS_BIAS=bias is not None,
        GATE="" if gate is None else gate.kind, ALPHA=0.0 if gate is None else gate.alpha,
        LIMIT=0.0 if gate is None else gate.limit, HALVES=num_halves,
        BLOCK_M=tiles.pairs.shape[0] // num_tiles, WIDTH=tile.width, DEPTH=tile.depth,
        STEPS=GROUP // tile.depth, GROUP_M=tile.group_m,
        STAGES=tile.num_stages,
        EVEN_N=n % (GROUP if gate is not None else span) == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", PDL=pdl, num_warps=tile.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit
def _arrange_rows_kernel(
    x_ptr, out_ptr, k, num_groups, stride_x, GROUPS: tl.constexpr, PDL: tl.constexpr
) -> None:  # fmt: skip
    """Several groups of one row."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * (GROUPS * _GROUP) + tl.arange(0, GROUPS * _GROUP)
    sources = places // _GROUP * _GROUP + _feature_of(places % _GROUP)
    values = tl.load(x_ptr + row * stride_x + sources, mask=sources < k, other=0.0)
    tl.store(out_ptr + row * (num_groups * _GROUP) + places, values, mask=places < num_groups * _GROUP)


@triton.jit
def _feature_of(places):
    """Return the inputs of a group, 0 to 127, by their places: pairs of neighbours, each plane's in turn."""
    return places % 8 // 2 * _PLANE + places // 8 * 2 + places % 2


@triton.jit(do_not_specialize=["num_tiles", "num_places"])
def _wide_kernel(
    x_ptr, words_ptr, scales_ptr, bias_ptr, out_ptr, pairs_ptr, tile_experts_ptr, tile_rows_ptr, num_tiles, num_places,
    n, num_groups, stride_scales, KIND: tl.constexpr, COLUMNS: tl.constexpr, HAS_PTX: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, HALVES: tl.constexpr,
    BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr, GROUP_M: tl.constexpr,
    STAGES: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One (tile of rows, tile of columns), STEPS steps a group.

    Gate and up take turns in the columns, so that a thread has both.
    """
    tile, place = place_of(num_tiles, num_places, GROUP_M)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_rows = tl.load(tile_rows_ptr + tile)
    if num_rows == 0:
        return
    rows = tl.arange(0, BLOCK_M)
    pairs = tl.load(pairs_ptr + tile * BLOCK_M + rows, mask=rows < num_rows, other=0).to(tl.int64)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    FEATURES: tl.constexpr = WIDTH // HALVES
    columns = tl.arange(0, WIDTH)
    halves = columns % HALVES
    places = place * FEATURES + columns // HALVES
    features = places
    if GATE != "":
        features = places // _GROUP * _GROUP + _feature_of(places % _GROUP)
    sources = halves * n + (features if EVEN_N else tl.minimum(features, n - 1))

    x_ptrs = x_ptr + (pairs // PAIRS_PER_ROW * num_groups * _GROUP)[:, None] + tl.arange(0, DEPTH)[None, :]
    stride_run = HALVES * n * _PLANE
    word_ptrs = words_ptr + expert * num_groups * stride_run
    WORDS: tl.constexpr = DEPTH // 4
    word_ptrs += sources[:, None] * _PLANE + tl.arange(0, WORDS)[None, :]
    scale_ptrs = scales_ptr + expert * stride_scales + sources
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for step in tl.range(0, num_groups * STEPS, num_stages=STAGES):
        x = tl.load(x_ptrs + step * DEPTH)
        words = tl.load(word_ptrs + (step // STEPS * stride_run + step % STEPS * WORDS))
        w = _unpack(words, scale_ptrs, HALVES * n, step // STEPS, x, KIND, COLUMNS, HAS_PTX, WIDTH, DEPTH)
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)

    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert * HALVES * n + sources).to(tl.float32)[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    is_row = (rows < num_rows)[:, None]
    if GATE == "":
        targets = out_ptr + (pairs * n)[:, None] + features[None, :]
        tl.store(targets, acc.to(dtype), mask=is_row & (features < n)[None, :])
    else:
        if HALVES == 2:
            gates, ups = tl.split(tl.reshape(acc, [BLOCK_M, FEATURES, 2]))
            values = gate_and_mul(gates, ups, dtype, GATE, ALPHA, LIMIT)
        else:
            values = gate_and_mul(acc, acc, dtype, GATE, ALPHA, LIMIT)
        targets = place * FEATURES + tl.arange(0, FEATURES)
        if not EVEN_N:  # zeros past the last feature: the next product reads them
            these = targets // _GROUP * _GROUP + _feature_of(targets % _GROUP)
            values = tl.where((these < n)[None, :], values, 0.0).to(dtype)
        row_size = tl.cdiv(n, _GROUP) * _GROUP
        tl.store(out_ptr + (pairs * row_size)[:, None] + targets[None, :], values, mask=is_row)


@triton.jit
def _unpack(
    words, scale_ptrs, stride_scale, group, x,
    KIND: tl.constexpr, COLUMNS: tl.constexpr, HAS_PTX: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Return a part of a group's weights in x's dtype, times their scales, in the planes' order: [WIDTH, DEPTH]."""
    if KIND == "mxfp4":
        scales = tl.load(scale_ptrs + group * stride_scale)
        v0, v1 = e2m1(words, scales, x, 0, HAS_PTX), e2m1(words, scales, x, 1, HAS_PTX)
        v2, v3 = e2m1(words, scales, x, 2, HAS_PTX), e2m1(words, scales, x, 3, HAS_PTX)
    else:
        PARTS: tl.constexpr = 4 if COLUMNS == 32 else (2 if COLUMNS == 64 else 1)
        s0, f0 = load_int4_scales(scale_ptrs, stride_scale, group, 0, PARTS, KIND, _GROUP, COLUMNS)
        s1, f1 = load_int4_scales(scale_ptrs, stride_scale, group, PARTS // 4, PARTS, KIND, _GROUP, COLUMNS)
        s2, f2 = load_int4_scales(scale_ptrs, stride_scale, group, PARTS // 2, PARTS, KIND, _GROUP, COLUMNS)
        s3, f3 = load_int4_scales(scale_ptrs, stride_scale, group, PARTS - 1, PARTS, KIND, _GROUP, COLUMNS)
        v0 = scale_values(int4(words, s0, x, 0, KIND, HAS_PTX), f0, HAS_PTX)
        v1 = scale_values(int4(words, s1, x, 1, KIND, HAS_PTX), f1, HAS_PTX)
        v2 = scale_values(int4(words, s2, x, 2, KIND, HAS_PTX), f2, HAS_PTX)
        v3 = scale_values(int4(words, s3, x, 3, KIND, HAS_PTX), f3, HAS_PTX)
    # place of input 32 * p + 2 * i + o: 8 * i + 2 * p + o
    low = tl.join(_as_pairs(v0, WIDTH, DEPTH), _as_pairs(v2, WIDTH, DEPTH))  # [WIDTH, i, o, p / 2]
    high = tl.join(_as_pairs(v1, WIDTH, DEPTH), _as_pairs(v3, WIDTH, DEPTH))
    values = tl.join(low, high)  # [WIDTH, i, o, p / 2, p % 2]
    return tl.reshape(tl.permute(values, (0, 1, 3, 4, 2)), [WIDTH, DEPTH])


@triton.jit
def _as_pairs(values, WIDTH: tl.constexpr, DEPTH: tl.constexpr):
    return tl.reshape(values, [WIDTH, DEPTH // 8, 2])
