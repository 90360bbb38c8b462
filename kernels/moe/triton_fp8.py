"""Grouped products in FP8 for many tokens: activations are rounded to e4m3, and tensor cores multiply 8 bits.

Twin of kernels/moe/reference.py with round_to_fp8. Weights are PlanesMatrix of "fp8", read as they are: the bytes of a
group of 128 inputs are in the planes' order, which a sum over the group does not depend on if the activations have the
same. So the kernels that round activations write them in that order: quantize_planes those of the tokens, fp8_up those
between the products, each run of 128 with a scale of its own. Each group's sum is scaled and added in fp32
(DeepSeek-V3, arXiv:2412.19437, §3.3.2). Needs e4m3 (Ada, Hopper or later).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.linear.reference import FP8
from kernels.linear.triton_fp8 import larger, scale_of, to_e4m3
from kernels.moe.configs import Fp8Tile
from kernels.moe.planes import GROUP, PlanesMatrix
from kernels.moe.reference import Gate
from kernels.moe.triton_common import gate_and_mul, place_of
from kernels.moe.triton_route import RowTiles

# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)

_GROUP = tl.constexpr(GROUP)
_RUN = tl.constexpr(GROUP // 2)  # bytes of a run of the planes, which hold two planes in turns
_PLANE = tl.constexpr(GROUP // 4)
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class PlanesRows:
    """Activations rounded by row and group, in the order of the planes. K: their number, not rounded up."""

    # [rows, K / 128 rounded up, 128] e4m3; past K zeros
    values: torch.Tensor
    # [rows, K / 128 rounded up] fp32
    scales: torch.Tensor

    @classmethod
    def empty(cls, num_rows: int, k: int, device: torch.device) -> PlanesRows:
        """Allocate num_rows rows of k values."""
        num_groups = triton.cdiv(k, GROUP)
        return cls(
            torch.empty(num_rows, num_groups, GROUP, dtype=FP8, device=device),
            torch.empty(num_rows, num_groups, dtype=torch.float32, device=device),
        )


def quantize_planes(x: torch.Tensor, *, tiles: RowTiles | None = None, pdl: bool = False) -> PlanesRows:
    """Round rows as kernels.linear.reference.quantize_groups does with groups of 128. x: [T, K], dense in K.

    tiles: with positions, of T * n pairs. Row t is then rounded once, and written to the places of its pairs t * n to
    t * n + n - 1 in the order of the tiles; rows past a tile's are undefined.
    """
    num_rows, k = x.shape
    assert x.stride(1) == 1
    positions = None if tiles is None else tiles.positions
    assert tiles is None or positions is not None
    out = PlanesRows.empty(num_rows if tiles is None else tiles.pairs.shape[0], k, x.device)
    num_groups = out.scales.shape[1]
    groups = min(16, triton.next_power_of_2(num_groups))
    _quantize_planes_kernel[(num_rows, triton.cdiv(num_groups, groups))](
        x, out.values, out.scales, positions, k, num_groups, x.stride(0),
        GROUPS=groups, EVEN=k % (groups * GROUP) == 0,
        COPIES=1 if positions is None else positions.shape[0] // num_rows, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def fp8_up(
    x: PlanesRows,
    w: PlanesMatrix,
    tiles: RowTiles,
    tile: Fp8Tile,
    *,
    num_pairs: int,
    gate: Gate,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    pdl: bool = False,
) -> PlanesRows:
    """Return [num_pairs, N], rounded: each pair's row of x times its expert's matrix, plus its bias, activated.

    x: [num_pairs / n] rows of K, each used by n successive pairs; w: [E, halves * N, K]; bias: [E, halves * N],
    contiguous. dtype: of the values before they are rounded to FP8. The rows of pairs in no tile are undefined.
    """
    n = w.shape[1] // gate.num_halves
    out = PlanesRows.empty(num_pairs, n, x.values.device)
    num_tiles, num_groups = tiles.experts.shape[0], out.scales.shape[1]
    _fp8_up_kernel[(num_tiles * num_groups,)](
        x.values, x.scales, w.words.view(FP8), w.scales, bias, out.values, out.scales,
        tiles.pairs, tiles.experts, tiles.rows, num_tiles, n, num_groups, x.scales.shape[1], w.scales.stride(0),
        ROWS=w.rows, COLUMNS=w.columns, SCALES=_scales_kind(w, GROUP),
        PAIRS_PER_ROW=num_pairs // x.values.shape[0], HAS_BIAS=bias is not None, DTYPE=_DTYPES[dtype],
        GATE=gate.kind, ALPHA=gate.alpha, LIMIT=gate.limit, HALVES=gate.num_halves,
        BLOCK_M=tiles.pairs.shape[0] // num_tiles, WIDTH=min(tile.width, GROUP * gate.num_halves),
        GROUP_M=tile.group_m, STAGES=tile.num_stages, EVEN_N=n % GROUP == 0, PDL=pdl,
        num_warps=tile.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def fp8_down(
    x: PlanesRows,
    w: PlanesMatrix,
    tiles: RowTiles,
    tile: Fp8Tile,
    *,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Return [num_pairs, N] of dtype: each pair's row of x times its expert's matrix, plus its bias.

    w: [E, N, K]; bias: [E, N], contiguous. The rows of pairs that are in no tile are undefined.
    """
    num_pairs, n = x.values.shape[0], w.shape[1]
    out = torch.empty(num_pairs, n, dtype=dtype, device=x.values.device)
    num_tiles = tiles.experts.shape[0]
    _fp8_down_kernel[(num_tiles * triton.cdiv(n, tile.width),)](
        x.values, x.scales, w.words.view(FP8), w.scales, bias, out,
        tiles.pairs, tiles.experts, tiles.rows, num_tiles, n, x.scales.shape[1], w.scales.stride(0),
        ROWS=w.rows, COLUMNS=w.columns, SCALES=_scales_kind(w, tile.width), HAS_BIAS=bias is not None,
        BLOCK_M=tiles.pairs.shape[0] // num_tiles, WIDTH=tile.width,
        GROUP_M=tile.group_m, STAGES=tile.num_stages, EVEN_N=n % tile.width == 0, PDL=pdl,
        num_warps=tile.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _scales_kind(w: PlanesMatrix, span: int) -> str:
    """Return how the outputs of a program, `span` of each half, share the scales of a matrix.

    "outputs": each has one for all inputs. "block": all have the same, one for each group. "mixed": any other.
    """
    if w.scales.shape[3] == 1:
        return "outputs"
    return "block" if w.rows % span == 0 else "mixed"


@triton.jit
def _quantize_planes_kernel(
    x_ptr, values_ptr, scales_ptr, positions_ptr, k, num_groups, stride_x,
    GROUPS: tl.constexpr, EVEN: tl.constexpr, COPIES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Several groups of one row, written to one or several."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    runs = tl.program_id(1) * (2 * GROUPS) + tl.arange(0, 2 * GROUPS)
    places = runs[:, None] * _RUN + tl.arange(0, _PLANE)[None, :]
    sources = x_ptr + row * stride_x + places
    if EVEN:
        low, high = tl.load(sources), tl.load(sources + _PLANE)
    else:
        low = tl.load(sources, mask=places < k, other=0.0)
        high = tl.load(sources + _PLANE, mask=places + _PLANE < k, other=0.0)
    low, high = low.to(tl.float32), high.to(tl.float32)
    largest = tl.reduce(larger(tl.abs(low), tl.abs(high)), 1, larger)
    scales = scale_of(tl.reduce(tl.reshape(largest, [GROUPS, 2]), 1, larger))
    divisors = tl.reshape(tl.broadcast_to(scales[:, None], [GROUPS, 2]), [2 * GROUPS])[:, None]
    values = tl.reshape(tl.join(to_e4m3(low, divisors), to_e4m3(high, divisors)), [2 * GROUPS, _RUN])
    targets = values_ptr + runs[:, None] * _RUN + tl.arange(0, _RUN)[None, :]
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    for copy in tl.static_range(COPIES):
        target = row
        is_run, is_group = runs < 2 * num_groups, groups < num_groups
        if positions_ptr is not None:
            target = tl.load(positions_ptr + row * COPIES + copy).to(tl.int64)
            is_run, is_group = is_run & (target >= 0), is_group & (target >= 0)
        tl.store(targets + target * (num_groups * _GROUP), values, mask=is_run[:, None])
        tl.store(scales_ptr + target * num_groups + groups, scales, mask=is_group)


@triton.jit(do_not_specialize=["num_tiles"])
def _fp8_up_kernel(
    x_ptr, x_scales_ptr, w_ptr, scales_ptr, bias_ptr, out_ptr, out_scales_ptr, pairs_ptr, tile_experts_ptr,
    tile_rows_ptr, num_tiles, n, num_groups, num_groups_in, stride_scales,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SCALES: tl.constexpr, PAIRS_PER_ROW: tl.constexpr,
    HAS_BIAS: tl.constexpr, DTYPE: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    HALVES: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
    EVEN_N: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of rows, one group of features between the products, in one or two pieces of WIDTH columns."""
    tile, group = place_of(num_tiles, num_groups, GROUP_M)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_rows = tl.load(tile_rows_ptr + tile)
    if num_rows == 0:
        return
    rows = tl.arange(0, BLOCK_M)
    pairs = tl.load(pairs_ptr + tile * BLOCK_M + rows, mask=rows < num_rows, other=0).to(tl.int64)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    sources = pairs // PAIRS_PER_ROW
    values = _activate_piece(
        x_ptr, x_scales_ptr, w_ptr, scales_ptr, bias_ptr, sources, expert, group, n, num_groups_in, stride_scales, 0,
        ROWS, COLUMNS, SCALES, HAS_BIAS, DTYPE, GATE, ALPHA, LIMIT, HALVES, BLOCK_M, WIDTH, STAGES, EVEN_N,
    )  # fmt: skip
    largest = tl.reduce(tl.abs(values), 1, larger)
    FEATURES: tl.constexpr = WIDTH // HALVES
    targets = out_ptr + (pairs * num_groups + group)[:, None] * _GROUP + tl.arange(0, FEATURES)[None, :]
    is_row = rows < num_rows
    if FEATURES < _GROUP:
        others = _activate_piece(
            x_ptr, x_scales_ptr, w_ptr, scales_ptr, bias_ptr, sources, expert, group, n, num_groups_in, stride_scales,
            1, ROWS, COLUMNS, SCALES, HAS_BIAS, DTYPE, GATE, ALPHA, LIMIT, HALVES, BLOCK_M, WIDTH, STAGES, EVEN_N,
        )  # fmt: skip
        scale = scale_of(larger(largest, tl.reduce(tl.abs(others), 1, larger)))
        tl.store(targets + FEATURES, to_e4m3(others, scale[:, None]), mask=is_row[:, None])
    else:
        scale = scale_of(largest)
    tl.store(targets, to_e4m3(values, scale[:, None]), mask=is_row[:, None])
    tl.store(out_scales_ptr + pairs * num_groups + group, scale, mask=is_row)


@triton.jit
def _activate_piece(
    x_ptr, x_scales_ptr, w_ptr, scales_ptr, bias_ptr, sources, expert, group, n, num_groups_in, stride_scales,
    PIECE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SCALES: tl.constexpr, HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, HALVES: tl.constexpr,
    BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """Return [BLOCK_M, WIDTH / HALVES] fp32, rounded to DTYPE: a part of a group, in the order of the planes.

    Gate and up take turns in the columns of the product, so that a thread has both of a feature.
    """
    FEATURES: tl.constexpr = WIDTH // HALVES
    columns = tl.arange(0, WIDTH)
    features = group * _GROUP + _feature_of(PIECE * FEATURES + columns // HALVES)
    halves = columns % HALVES
    features = features if EVEN_N else tl.minimum(features, n - 1)
    acc = _sum_groups(
        x_ptr, x_scales_ptr, w_ptr, scales_ptr, sources, expert, group * _GROUP, features, halves, n, num_groups_in,
        stride_scales, ROWS, COLUMNS, SCALES, HALVES, BLOCK_M, WIDTH, STAGES,
    )  # fmt: skip
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert * HALVES * n + halves * n + features).to(tl.float32)[None, :]
    if HALVES == 2:
        gates, ups = tl.split(tl.reshape(acc, [BLOCK_M, FEATURES, 2]))
        values = gate_and_mul(gates, ups, DTYPE, GATE, ALPHA, LIMIT).to(tl.float32)
    else:
        values = gate_and_mul(acc, acc, DTYPE, GATE, ALPHA, LIMIT).to(tl.float32)
    if not EVEN_N:
        places = group * _GROUP + _feature_of(PIECE * FEATURES + tl.arange(0, FEATURES))
        values = tl.where((places < n)[None, :], values, 0.0)
    return values


@triton.jit(do_not_specialize=["num_tiles"])
def _fp8_down_kernel(
    x_ptr, x_scales_ptr, w_ptr, scales_ptr, bias_ptr, out_ptr, pairs_ptr, tile_experts_ptr, tile_rows_ptr, num_tiles,
    n, num_groups, stride_scales,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SCALES: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr, EVEN_N: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One (tile of rows, tile of output features)."""
    tile, place = place_of(num_tiles, tl.cdiv(n, WIDTH), GROUP_M)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_rows = tl.load(tile_rows_ptr + tile)
    if num_rows == 0:
        return
    rows = tl.arange(0, BLOCK_M)
    pairs = tl.load(pairs_ptr + tile * BLOCK_M + rows, mask=rows < num_rows, other=0).to(tl.int64)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    features = place * WIDTH + tl.arange(0, WIDTH)
    columns = features if EVEN_N else tl.minimum(features, n - 1)
    acc = _sum_groups(
        x_ptr, x_scales_ptr, w_ptr, scales_ptr, pairs, expert, place * WIDTH, columns, features * 0, n, num_groups,
        stride_scales, ROWS, COLUMNS, SCALES, 1, BLOCK_M, WIDTH, STAGES,
    )  # fmt: skip
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert * n + columns).to(tl.float32)[None, :]
    targets = out_ptr + (pairs * n)[:, None] + features[None, :]
    tl.store(targets, acc.to(out_ptr.dtype.element_ty), mask=(rows < num_rows)[:, None] & (features < n)[None, :])


@triton.jit
def _feature_of(places):
    """Return the inputs of a group, 0 to 127, by their places among its bytes: two planes take turns in a run."""
    return places // _RUN * _RUN + places % 2 * _PLANE + places % _RUN // 2


@triton.jit
def _sum_groups(
    x_ptr, x_scales_ptr, w_ptr, scales_ptr, sources, expert, first, features, halves, n, num_groups, stride_scales,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SCALES: tl.constexpr, HALVES: tl.constexpr,
    BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return x @ w.T over all groups, [BLOCK_M, WIDTH] fp32.

    sources: [BLOCK_M] int64, rows of x. features, halves: [WIDTH], an expert's outputs and which of its matrices they
    are of; `first` is in the same block of scales as all of them if SCALES is "block".
    """
    places = tl.arange(0, _GROUP)
    x_ptrs = x_ptr + (sources * num_groups)[:, None] * _GROUP + places[None, :]
    x_scale_ptrs = x_scales_ptr + sources * num_groups
    stride_run = HALVES * n * _RUN
    w_ptrs = w_ptr + expert * num_groups * 2 * stride_run
    w_ptrs += (places // _RUN * stride_run + places % _RUN)[:, None] + ((halves * n + features) * _RUN)[None, :]
    scale_ptrs = scales_ptr + expert * stride_scales
    columns = 1 if SCALES == "outputs" else tl.cdiv(num_groups * _GROUP, COLUMNS)
    scales_of_half = tl.cdiv(n, ROWS) * columns
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for group in tl.range(0, num_groups, num_stages=STAGES):
        x = tl.load(x_ptrs)
        w = tl.load(w_ptrs)
        x_scales = tl.load(x_scale_ptrs + group)[:, None]
        if SCALES == "block":
            place = first // ROWS * columns + group * _GROUP // COLUMNS
            scales = tl.load(scale_ptrs + place)
            if HALVES == 2:
                scales = tl.where(halves == 0, scales, tl.load(scale_ptrs + scales_of_half + place))[None, :]
            acc += tl.dot(x, w) * (x_scales * scales)
        elif SCALES == "mixed":
            places_of = halves * scales_of_half + features // ROWS * columns + group * _GROUP // COLUMNS
            acc += tl.dot(x, w) * (x_scales * tl.load(scale_ptrs + places_of)[None, :])
        else:
            acc += tl.dot(x, w) * x_scales
        x_ptrs += _GROUP
        w_ptrs += 2 * stride_run
    if SCALES == "outputs":
        acc *= tl.load(scale_ptrs + halves * scales_of_half + features // ROWS)[None, :]
    return acc
