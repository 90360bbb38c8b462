"""Grouped products in FP8 for many tokens on Hopper, in Gluon: what triton_fp8.py computes, with wgmma and TMA.

TMA reads whole boxes, so the rows of a tile lie side by side: quantize_planes rounds each token once and writes it to
the rows of all its pairs. A program of the first product has a group of 128 features of 128 rows, 64 after the other,
so it rounds them itself; the second writes each pair's row to its place. Programs and warps are those of
kernels/linear/gluon_blocks.py. The bytes of a group of weights are two panels of 64, as the planes have them, which is
how a tile of 64-byte swizzle lies in shared memory.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import PropagateNan

from kernels.gluon_common import allocate_barriers, grid_dependency, place_of_tile
from kernels.linear.reference import FP8, FP8_MAX, MIN_SCALE
from kernels.moe.configs import HopperFp8Config
from kernels.moe.planes import GROUP, PlanesMatrix
from kernels.moe.reference import Gate
from kernels.moe.triton_fp8 import PlanesRows, quantize_planes
from kernels.moe.triton_route import RowTiles

# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types: kernel arguments carry none)

_PANEL = 64  # bytes of a group's run
_X_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_W_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
_E4M3_MAX = gl.constexpr(FP8_MAX)
_MIN_SCALE = gl.constexpr(MIN_SCALE)
_NAN = gl.constexpr(PropagateNan.ALL)


def takes(x: torch.Tensor, gate_up: PlanesMatrix, down: PlanesMatrix, gate: Gate) -> bool:
    """Return True if the kernels support these experts of "fp8", given a device of compute capability 9.0."""
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    has_blocks = all(w.kind == "fp8" and w.rows == w.columns == GROUP for w in (gate_up, down))
    is_known = is_half and has_blocks and gate.kind == "silu"
    return is_known and gate_up.shape[1] % (2 * GROUP) == down.shape[1] % _PANEL == 0


def multiply(
    x: torch.Tensor,
    gate_up: PlanesMatrix,
    down: PlanesMatrix,
    tiles: RowTiles,
    config: HopperFp8Config,
    *,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    pdl: bool = False,
) -> torch.Tensor:
    """Return both products of each pair, [num_pairs, H], of x's dtype; undefined for pairs in no tile.

    x: [num_pairs / n, H], each row used by n successive pairs; tiles: of 128 rows, with positions; biases: of gate_up
    [E, 2 * N] and down [E, H], contiguous.
    """
    assert tiles.positions is not None
    rows = quantize_planes(x, tiles=tiles, pdl=pdl)
    inner = PlanesRows.empty(tiles.pairs.shape[0], gate_up.shape[1] // 2, x.device)
    _launch(rows, gate_up, biases[0], inner.values, inner.scales, tiles, config, x.dtype, is_up=True, pdl=pdl)
    out = torch.empty(tiles.positions.shape[0], down.shape[1], dtype=x.dtype, device=x.device)
    _launch(inner, down, biases[1], out, None, tiles, config, x.dtype, is_up=False, pdl=pdl)
    return out


def _launch(
    x: PlanesRows, w: PlanesMatrix, bias: torch.Tensor | None, out: torch.Tensor, out_scales: torch.Tensor | None,
    tiles: RowTiles, config: HopperFp8Config, dtype: torch.dtype, *, is_up: bool, pdl: bool,
) -> None:  # fmt: skip
    """Multiply rows in the order of the tiles by their experts' matrices: [E, 2 * n or n, K]."""
    num_groups, num_tiles = x.scales.shape[1], tiles.experts.shape[0]
    assert config.block_m == tiles.pairs.shape[0] // num_tiles == 128
    x_rows = x.values.view(FP8).flatten(1)
    # Rows of panel p of group g of expert e begin at ((e * groups + g) * 2 + p) * outputs
    w_rows = w.words.view(FP8).view(-1, _PANEL)
    x_desc, w_desc = (
        TensorDescriptor(each, list(each.shape), list(each.stride()), [64, each_layout.swizzle_byte_width], each_layout)
        for each, each_layout in ((x_rows, _X_LAYOUT), (w_rows, _W_LAYOUT))
    )
    n = w.shape[1] // (2 if is_up else 1)
    column_tiles = triton.cdiv(n, GROUP)
    num_sms = torch.cuda.get_device_properties(out.device).multi_processor_count
    _kernel[(min(num_tiles * column_tiles, num_sms),)](
        x_desc, w_desc, x.scales, w.scales, bias, out, out_scales, tiles.pairs, tiles.experts, tiles.rows,
        num_tiles, column_tiles, n, num_groups, w.scales.stride(0),
        IS_UP=is_up, STAGES=config.num_stages, GROUP_M=config.group_m, HAS_BIAS=bias is not None,
        DTYPE=gl.bfloat16 if dtype == torch.bfloat16 else gl.float16, PDL=pdl,
        num_warps=4, launch_pdl=pdl, maxnreg=168,
    )  # fmt: skip


@jit
def multiply_tiles(
    problem, rings, work, num_tiles, column_tiles, IS_UP: gl.constexpr, GROUP_M: gl.constexpr, HAS_BIAS: gl.constexpr,
    DTYPE: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """One warpgroup: the outputs of its 64 rows of each tile."""
    experts_ptr, tile_rows_ptr = work
    num_groups = problem[6]
    x_tiles, _w_tiles, loaded, free = rings
    STAGES: gl.constexpr = x_tiles.shape[0] // 2
    done = 0  # groups of inputs
    for tile in range(gl.program_id(0), num_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = place_of_tile(tile, num_tiles, column_tiles, GROUP_M)
        num_rows = gl.load(tile_rows_ptr + row_tile)
        if num_rows > 0:
            expert = gl.load(experts_ptr + row_tile)
            if num_rows > WHICH * 64:
                done = _multiply_tile(
                    problem, rings, expert, row_tile, column_tile, num_rows, done, IS_UP, HAS_BIAS, DTYPE, WHICH
                )  # fmt: skip
            else:
                done = _skip_stages(loaded, free, done, num_groups * (2 if IS_UP else 1), STAGES)


@jit
def _skip_stages(loaded, free, done, num_steps, STAGES: gl.constexpr):
    """Pass num_steps stages of a ring unused, once each is loaded. done: steps before; returns those after."""
    for _step in range(num_steps):
        mbarrier.wait(loaded.index(done % STAGES), (done // STAGES) & 1)
        mbarrier.arrive(free.index(done % STAGES))
        done += 1
    return done


@jit
def _multiply_tile(
    problem, rings, expert, row_tile, column_tile, num_rows, done, IS_UP: gl.constexpr, HAS_BIAS: gl.constexpr,
    DTYPE: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """64 rows of a tile: a group of rounded features, or 128 outputs. Returns `done`."""
    if IS_UP:
        sums = _sum(problem, rings, expert, row_tile, column_tile, done, 0, IS_UP, HAS_BIAS, WHICH)
        first = _activate(sums[0], sums[1], DTYPE)
        sums = _sum(problem, rings, expert, row_tile, column_tile, sums[2], 1, IS_UP, HAS_BIAS, WHICH)
        second = _activate(sums[0], sums[1], DTYPE)
        _store_rounded(first, second, problem, row_tile, column_tile, num_rows, WHICH)
    else:
        sums = _sum(problem, rings, expert, row_tile, column_tile, done, 0, IS_UP, HAS_BIAS, WHICH)
        _store(sums[0], problem, row_tile, num_rows, column_tile * 128, DTYPE, WHICH)
        _store(sums[1], problem, row_tile, num_rows, column_tile * 128 + 64, DTYPE, WHICH)
    return sums[2]


@jit
def _sum(
    problem, rings, expert, row_tile, column_tile, done, PIECE: gl.constexpr, IS_UP: gl.constexpr,
    HAS_BIAS: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Sum over all groups: 64 gates and their ups of a piece of the tile's features, or both halves of 128 outputs.

    Returns two [64, 64] fp32, and `done`.
    """
    x_scales_ptr, w_scales_ptr, bias_ptr = problem[0], problem[1], problem[2]
    n, num_groups, stride_scales = problem[5], problem[6], problem[7]
    x_tiles, w_tiles, loaded, free = rings
    STAGES: gl.constexpr = x_tiles.shape[0] // 2
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    BOTH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    x_places = (row_tile * 128 + WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, SUMS))) * num_groups
    scales = w_scales_ptr + expert.to(gl.int64) * stride_scales
    place_a = column_tile * num_groups
    place_b = place_a
    if IS_UP:
        place_b += n // 128 * num_groups
    x_scale = gl.load(x_scales_ptr + x_places)
    scale_a, scale_b = gl.load(scales + place_a), gl.load(scales + place_b)
    sums_a = gl.full([64, 64], 0.0, gl.float32, SUMS)
    sums_b = gl.full([64, 64], 0.0, gl.float32, SUMS)
    for group in range(num_groups):
        stage = done % STAGES
        mbarrier.wait(loaded.index(stage), (done // STAGES) & 1)
        rows, weights = x_tiles.index(stage * 2 + WHICH), w_tiles.index(stage).permute((1, 0))
        zeros = gl.full([64, 128], 0.0, gl.float32, BOTH)
        products = hopper.warpgroup_mma(rows, weights, zeros, use_acc=False, is_async=True)
        factor_a, factor_b = (x_scale * scale_a)[:, None], (x_scale * scale_b)[:, None]
        following = gl.minimum(group + 1, num_groups - 1)  # its scales, while the tensor cores work
        x_scale = gl.load(x_scales_ptr + (x_places + following))
        scale_a, scale_b = gl.load(scales + (place_a + following)), gl.load(scales + (place_b + following))
        products = hopper.warpgroup_mma_wait(0, [products])
        mbarrier.arrive(free.index(stage))
        products_a, products_b = products.reshape([64, 2, 64]).permute([0, 2, 1]).split()
        sums_a += gl.convert_layout(products_a, SUMS, assert_trivial=True) * factor_a
        sums_b += gl.convert_layout(products_b, SUMS, assert_trivial=True) * factor_b
        done += 1
    if HAS_BIAS:
        features = column_tile * 128 + PIECE * 64 + gl.arange(0, 64, gl.SliceLayout(0, SUMS))
        biases = bias_ptr + expert.to(gl.int64) * (2 * n if IS_UP else n)
        sums_a += gl.load(biases + gl.minimum(features, n - 1)).to(gl.float32)[None, :]
        features_b = n + features if IS_UP else gl.minimum(features + 64, n - 1)
        sums_b += gl.load(biases + features_b).to(gl.float32)[None, :]
    return sums_a, sums_b, done


@jit
def _activate(gates, ups, DTYPE: gl.constexpr):
    """Return silu(gates) * ups, rounded to DTYPE where torch rounds."""
    gates, ups = gates.to(DTYPE).to(gl.float32), ups.to(DTYPE).to(gl.float32)
    gates = (gates / (1.0 + gl.exp(-gates))).to(DTYPE).to(gl.float32)
    return (gates * ups).to(DTYPE)


@jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=_NAN)


@jit
def _store_rounded(first, second, problem, row_tile, column_tile, num_rows, WHICH: gl.constexpr):
    """Round a group of features of 64 rows, given in two pieces, and write it in the order of the planes."""
    out_ptr, out_scales_ptr, n = problem[3], problem[4], problem[5]
    first, second = first.to(gl.float32), second.to(gl.float32)
    largest = gl.reduce(_larger(gl.abs(first), gl.abs(second)), 1, _larger)
    scale = _larger(gl.div_rn(largest, gl.full([64], _E4M3_MAX, gl.float32, largest.type.layout)), _MIN_SCALE)
    factor = (1.0 / scale)[:, None]
    first_row = row_tile * 128 + WHICH * 64
    places = (first_row + gl.arange(0, 64, largest.type.layout)).to(gl.int64) * (n // 128) + column_tile
    is_row = WHICH * 64 + gl.arange(0, 64, largest.type.layout) < num_rows
    gl.store(out_scales_ptr + places, scale, mask=is_row)
    LINES: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    members = gl.arange(0, 64, gl.SliceLayout(1, LINES))
    starts = (first_row + members).to(gl.int64) * n + column_tile * 128
    targets = out_ptr + starts[:, None] + gl.arange(0, 64, gl.SliceLayout(0, LINES))[None, :]
    is_member = (WHICH * 64 + members < num_rows)[:, None]
    gl.store(targets, gl.convert_layout(_codes(first * factor), LINES), mask=is_member)
    gl.store(targets + 64, gl.convert_layout(_codes(second * factor), LINES), mask=is_member)


@jit
def _codes(values):
    """Round [64, 64] to e4m3, beyond whose range nothing is, and let both planes of a panel take turns."""
    planes = values.to(gl.float8e4nv).reshape([64, 2, 32])
    return planes.permute([0, 2, 1]).reshape([64, 64])


@jit
def _store(sums, problem, row_tile, num_rows, column, DTYPE: gl.constexpr, WHICH: gl.constexpr):
    """Write 64 rows of 64 outputs to the places of their pairs, 16 bytes a thread."""
    out_ptr, pairs_ptr, n = problem[3], problem[8], problem[5]
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    members = WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, LINES))
    outputs = column + gl.arange(0, 64, gl.SliceLayout(0, LINES))
    is_row = members < num_rows
    rows = gl.load(pairs_ptr + row_tile * 128 + members, mask=is_row, other=0)
    out = gl.convert_layout(sums.to(DTYPE), LINES)
    gl.store(
        out_ptr + rows.to(gl.int64)[:, None] * n + outputs[None, :], out, mask=is_row[:, None] & (outputs < n)[None, :]
    )


@gluon.jit
def _load(
    x_desc, w_desc, w_boxes, rings, work, n, num_groups, num_tiles, column_tiles, IS_UP: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    """Load the rows and weights of each group of inputs of each tile, as soon as a stage is free."""
    experts_ptr, tile_rows_ptr = work
    x_tiles, _w_tiles, loaded, free = rings
    STAGES: gl.constexpr = x_tiles.shape[0] // 2
    PIECES: gl.constexpr = 2 if IS_UP else 1
    outputs = 2 * n if IS_UP else n
    second = n if IS_UP else 64
    done = 0
    for tile in range(gl.program_id(0), num_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = place_of_tile(tile, num_tiles, column_tiles, GROUP_M)
        num_rows = gl.load(tile_rows_ptr + row_tile)
        if num_rows > 0:
            first = gl.load(experts_ptr + row_tile) * num_groups * 2 * outputs + column_tile * 128
            for step in range(num_groups * PIECES):
                group = step % num_groups
                start = first + group * 2 * outputs + step // num_groups * 64
                stage = done % STAGES
                barrier = loaded.index(stage)
                mbarrier.wait(free.index(stage), ((done // STAGES) & 1) ^ 1)
                mbarrier.expect(barrier, 2 * 128 * 128)
                for i in gl.static_range(2):  # rows of each warpgroup
                    box = [row_tile * 128 + i * 64, group * 128]
                    tma.async_copy_global_to_shared(x_desc, box, barrier, x_tiles.index(stage * 2 + i))
                for i in gl.static_range(4):  # each panel, of both parts of the outputs
                    box = [start + i % 2 * second + i // 2 * outputs, 0]
                    tma.async_copy_global_to_shared(w_desc, box, barrier, w_boxes.index(stage * 4 + i))
                done += 1


@gluon.jit(do_not_specialize=["num_tiles"])
def _kernel(
    x_desc, w_desc, x_scales_ptr, w_scales_ptr, bias_ptr, out_ptr, out_scales_ptr, pairs_ptr, experts_ptr,
    tile_rows_ptr, num_tiles, column_tiles, n, num_groups, stride_scales, IS_UP: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, HAS_BIAS: gl.constexpr, DTYPE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Set up shared memory, then specialise: two warpgroups that multiply, and one loading warp."""
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, 64, 128], x_desc.layout)
    w_boxes = gl.allocate_shared_memory(w_desc.dtype, [STAGES * 4, 64, 64], w_desc.layout)
    w_tiles = w_boxes._reinterpret(w_desc.dtype, [STAGES, 128, 128], w_desc.layout)
    rings = (x_tiles, w_tiles, allocate_barriers(STAGES, 1), allocate_barriers(STAGES, 2))
    if PDL:
        grid_dependency("griddepcontrol.wait;")
        grid_dependency("griddepcontrol.launch_dependents;")
    problem = (
        x_scales_ptr, w_scales_ptr, bias_ptr, out_ptr, out_scales_ptr, n, num_groups, stride_scales, pairs_ptr,
    )  # fmt: skip
    work = (experts_ptr, tile_rows_ptr)
    gl.warp_specialize(
        [
            (multiply_tiles, (problem, rings, work, num_tiles, column_tiles, IS_UP, GROUP_M, HAS_BIAS, DTYPE, 0)),
            (multiply_tiles, (problem, rings, work, num_tiles, column_tiles, IS_UP, GROUP_M, HAS_BIAS, DTYPE, 1)),
            (_load, (x_desc, w_desc, w_boxes, rings, work, n, num_groups, num_tiles, column_tiles, IS_UP, GROUP_M)),
        ],
        [4, 1],
        [232, 40],  # registers; the first warpgroup gets the rest
    )
