"""Grouped products in FP8 for many tokens on Hopper, in Gluon: what triton_fp8.py computes, with wgmma and TMA.

TMA reads whole boxes, so the rows of a tile must lie side by side: activations are rounded in the order of the tiles,
once for each (token, expert) pair. The first product leaves bfloat16 in that order, which a kernel
of its own rounds; the second writes each pair's row to its place. Programs and warps are those of
kernels/linear/gluon_blocks.py; a group of 128 inputs is two runs of 64 bytes, as the planes have them.
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

from kernels.linear.gluon_blocks import barriers, grid_dependency, place_of_tile
from kernels.linear.reference import FP8
from kernels.moe.configs import HopperFp8Config
from kernels.moe.planes import GROUP, PlanesMatrix
from kernels.moe.reference import Gate
from kernels.moe.triton_fp8 import PlanesRows, quantize_planes
from kernels.moe.triton_route import RowTiles

# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types: kernel arguments carry none)

_RUN = 64  # bytes: half of a group
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)


def takes(gate_up: PlanesMatrix, down: PlanesMatrix, gate: Gate) -> bool:
    """Return True if the kernels support these experts of "fp8", given a device of compute capability 9.0."""
    has_blocks = all(w.rows == w.columns == GROUP for w in (gate_up, down))
    return has_blocks and gate.kind == "silu" and gate_up.shape[1] % 128 == down.shape[1] % 64 == 0


def multiply(
    x: torch.Tensor,
    gate_up: PlanesMatrix,
    down: PlanesMatrix,
    tiles: RowTiles,
    config: HopperFp8Config,
    *,
    num_pairs: int,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    pdl: bool = False,
) -> torch.Tensor:
    """Return both products of each pair, [num_pairs, H], of x's dtype; undefined for pairs in no tile.

    x: [num_pairs / n, H], each row used by n successive pairs; tiles: of config.block_m rows; biases: of gate_up
    [E, 2 * N] and down [E, H], contiguous.
    """
    rows = quantize_planes(x, tiles=tiles, pairs_per_row=num_pairs // x.shape[0], pdl=pdl)
    num_features = gate_up.shape[1] // 2
    inner = torch.empty(tiles.pairs.shape[0], num_features, dtype=x.dtype, device=x.device)
    _launch(rows, gate_up, biases[0], inner, tiles, config, num_features, is_up=True, pdl=pdl)
    out = torch.empty(num_pairs, down.shape[1], dtype=x.dtype, device=x.device)
    _launch(
        quantize_planes(inner, pdl=pdl), down, biases[1], out, tiles, config, down.shape[1], is_up=False, pdl=pdl
    )  # fmt: skip
    return out


def _launch(
    x: PlanesRows, w: PlanesMatrix, bias: torch.Tensor | None, out: torch.Tensor, tiles: RowTiles,
    config: HopperFp8Config, n: int, *, is_up: bool, pdl: bool,
) -> None:  # fmt: skip
    """Multiply rows in the order of the tiles by their experts' matrices: [E, 2 * n or n, K]."""
    num_groups, num_tiles = x.scales.shape[1], tiles.experts.shape[0]
    halves = 2 if is_up else 1
    x_rows = x.values.view(FP8).flatten(1)
    w_rows = w.words.view(FP8).view(-1, _RUN)  # of run r of group g of expert e: ((e * groups + g) * 2 + r) * outputs
    x_desc, w_desc = (
        TensorDescriptor(each, list(each.shape), list(each.stride()), [64, _RUN], _LAYOUT) for each in (x_rows, w_rows)
    )
    width = 128 // halves  # features of a tile
    column_tiles = triton.cdiv(n, width)
    num_sms = torch.cuda.get_device_properties(out.device).multi_processor_count
    _kernel[(min(num_tiles * column_tiles, num_sms),)](
        x_desc, w_desc, x.scales, w.scales, bias, out, tiles.pairs, tiles.experts, tiles.rows,
        num_tiles, column_tiles, n, num_groups, w.scales.stride(0),
        IS_UP=is_up, STAGES=config.num_stages, GROUP_M=config.group_m, HAS_BIAS=bias is not None, PDL=pdl,
        num_warps=4, launch_pdl=pdl, maxnreg=168,
    )  # fmt: skip


@jit
def multiply_tile(
    problem, rings, work, num_tiles, column_tiles, IS_UP: gl.constexpr, GROUP_M: gl.constexpr, HAS_BIAS: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """One warpgroup: the outputs of its 64 rows of each tile, 64 gates and their ups, or 128 features."""
    x_scales_ptr, w_scales_ptr, bias_ptr, out_ptr, _pairs_ptr, n, num_groups, stride_scales = problem
    experts_ptr, tile_rows_ptr = work
    x_tiles, w_tiles, loaded, free = rings
    STAGES: gl.constexpr = x_tiles.shape[0] // 4
    WIDTH: gl.constexpr = 64 if IS_UP else 128
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    ROWS: gl.constexpr = gl.SliceLayout(1, SUMS)
    done = 0
    for tile in range(gl.program_id(0), num_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = place_of_tile(tile, num_tiles, column_tiles, GROUP_M)
        num_rows = gl.load(tile_rows_ptr + row_tile)
        if num_rows > 0:
            expert = gl.load(experts_ptr + row_tile)
            first_row = (row_tile * 2 + WHICH) * 64
            column = column_tile * WIDTH
            x_places = (first_row + gl.arange(0, 64, ROWS)) * num_groups
            scales = w_scales_ptr + expert.to(gl.int64) * stride_scales
            place_a = column // 128 * num_groups
            place_b = place_a
            if IS_UP:
                place_b += (n + 127) // 128 * num_groups
            x_scale = gl.load(x_scales_ptr + x_places)
            scale_a, scale_b = gl.load(scales + place_a), gl.load(scales + place_b)
            sums_a = gl.full([64, 64], 0.0, gl.float32, SUMS)
            sums_b = gl.full([64, 64], 0.0, gl.float32, SUMS)
            for group in range(num_groups):
                stage = done % STAGES
                mbarrier.wait(loaded.index(stage), (done // STAGES) & 1)
                rows_a, rows_b = x_tiles.index((stage * 2 + WHICH) * 2), x_tiles.index((stage * 2 + WHICH) * 2 + 1)
                products = _start(rows_a, rows_b, w_tiles, stage * 4, SUMS)
                factor_a, factor_b = (x_scale * scale_a)[:, None], (x_scale * scale_b)[:, None]
                following = gl.minimum(group + 1, num_groups - 1)  # its scales, while the tensor cores work
                x_scale = gl.load(x_scales_ptr + (x_places + following))
                scale_a, scale_b = gl.load(scales + (place_a + following)), gl.load(scales + (place_b + following))
                products = hopper.warpgroup_mma_wait(0, [products])
                # Sums go through a wait, lest the compiler scale both parts at the end
                sums_a = hopper.warpgroup_mma_wait(0, [sums_a + products * factor_a])
                products = hopper.warpgroup_mma_wait(0, [_start(rows_a, rows_b, w_tiles, stage * 4 + 2, SUMS)])
                mbarrier.arrive(free.index(stage))
                sums_b += products * factor_b
                done += 1
            if HAS_BIAS:
                features = gl.arange(0, 64, gl.SliceLayout(0, SUMS))
                second = n if IS_UP else 64
                biases = bias_ptr + expert.to(gl.int64) * (2 * n if IS_UP else n)
                sums_a += gl.load(biases + gl.minimum(column + features, n - 1)).to(gl.float32)[None, :]
                last = 2 * n - 1 if IS_UP else n - 1
                sums_b += gl.load(biases + gl.minimum(column + second + features, last)).to(gl.float32)[None, :]
            if IS_UP:
                DTYPE: gl.constexpr = out_ptr.dtype.element_ty
                gates, ups = sums_a.to(DTYPE).to(gl.float32), sums_b.to(DTYPE).to(gl.float32)
                gates = (gates / (1.0 + gl.exp(-gates))).to(DTYPE).to(gl.float32)
                _store(gates * ups, problem, row_tile, first_row, num_rows, column, IS_UP, WHICH)
            else:
                _store(sums_a, problem, row_tile, first_row, num_rows, column, IS_UP, WHICH)
                _store(sums_b, problem, row_tile, first_row, num_rows, column + 64, IS_UP, WHICH)


@jit
def _start(rows_a, rows_b, w_tiles, first, SUMS: gl.constexpr):
    """Start the product of a group's two runs of inputs with 64 outputs."""
    zeros = gl.full([64, 64], 0.0, gl.float32, SUMS)
    sums = hopper.warpgroup_mma(rows_a, w_tiles.index(first).permute((1, 0)), zeros, use_acc=False, is_async=True)
    return hopper.warpgroup_mma(rows_b, w_tiles.index(first + 1).permute((1, 0)), sums, is_async=True)


@jit
def _store(sums, problem, row_tile, first_row, num_rows, column, IS_UP: gl.constexpr, WHICH: gl.constexpr):
    """Write 64 rows of 64 outputs, 16 bytes a thread: in the order of the tiles, or to the places of the pairs."""
    _x_scales_ptr, _w_scales_ptr, _bias_ptr, out_ptr, pairs_ptr, n, _num_groups, _stride_scales = problem
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    members = gl.arange(0, 64, gl.SliceLayout(1, LINES))
    outputs = column + gl.arange(0, 64, gl.SliceLayout(0, LINES))
    is_row = WHICH * 64 + members < num_rows
    rows = first_row + members
    if not IS_UP:
        rows = gl.load(pairs_ptr + rows, mask=is_row, other=0)
    out = gl.convert_layout(sums.to(out_ptr.dtype.element_ty), LINES)
    gl.store(
        out_ptr + rows.to(gl.int64)[:, None] * n + outputs[None, :], out, mask=is_row[:, None] & (outputs < n)[None, :]
    )


@gluon.jit
def _load(
    x_desc, w_desc, rings, work, n, num_groups, num_tiles, column_tiles, IS_UP: gl.constexpr, GROUP_M: gl.constexpr
):  # fmt: skip
    """Load the rows and weights of each group of inputs of each tile, as soon as a stage is free."""
    experts_ptr, tile_rows_ptr = work
    x_tiles, w_tiles, loaded, free = rings
    STAGES: gl.constexpr = x_tiles.shape[0] // 4
    WIDTH: gl.constexpr = 64 if IS_UP else 128
    outputs = 2 * n if IS_UP else n
    done = 0
    for tile in range(gl.program_id(0), num_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = place_of_tile(tile, num_tiles, column_tiles, GROUP_M)
        if gl.load(tile_rows_ptr + row_tile) > 0:
            first = gl.load(experts_ptr + row_tile) * num_groups * 2 * outputs + column_tile * WIDTH
            for group in range(num_groups):
                stage = done % STAGES
                barrier = loaded.index(stage)
                mbarrier.wait(free.index(stage), ((done // STAGES) & 1) ^ 1)
                mbarrier.expect(barrier, 2 * 128 * 128)
                for i in gl.static_range(4):  # rows of each warpgroup, each run
                    box = [(row_tile * 2 + i // 2) * 64, group * 128 + i % 2 * 64]
                    tma.async_copy_global_to_shared(x_desc, box, barrier, x_tiles.index(stage * 4 + i))
                second = n if IS_UP else 64
                for i in gl.static_range(4):  # both parts of the outputs, each run
                    start = first + (group * 2 + i % 2) * outputs + i // 2 * second
                    tma.async_copy_global_to_shared(w_desc, [start, 0], barrier, w_tiles.index(stage * 4 + i))
                done += 1


@gluon.jit(do_not_specialize=["num_tiles"])
def _kernel(
    x_desc, w_desc, x_scales_ptr, w_scales_ptr, bias_ptr, out_ptr, pairs_ptr, experts_ptr, tile_rows_ptr,
    num_tiles, column_tiles, n, num_groups, stride_scales,
    IS_UP: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Set up shared memory, then specialise: two warpgroups that multiply, and one loading warp."""
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 4, 64, 64], x_desc.layout)
    w_tiles = gl.allocate_shared_memory(w_desc.dtype, [STAGES * 4, 64, 64], w_desc.layout)
    rings = (x_tiles, w_tiles, barriers(STAGES, 1), barriers(STAGES, 2))
    if PDL:
        grid_dependency("griddepcontrol.wait;")
        grid_dependency("griddepcontrol.launch_dependents;")
    problem = (x_scales_ptr, w_scales_ptr, bias_ptr, out_ptr, pairs_ptr, n, num_groups, stride_scales)
    work = (experts_ptr, tile_rows_ptr)
    gl.warp_specialize(
        [
            (multiply_tile, (problem, rings, work, num_tiles, column_tiles, IS_UP, GROUP_M, HAS_BIAS, 0)),
            (multiply_tile, (problem, rings, work, num_tiles, column_tiles, IS_UP, GROUP_M, HAS_BIAS, 1)),
            (_load, (x_desc, w_desc, rings, work, n, num_groups, num_tiles, column_tiles, IS_UP, GROUP_M)),
        ],
        [4, 1],
        [232, 40],  # registers; the first warpgroup gets the rest
    )
