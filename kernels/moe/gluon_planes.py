"""Grouped products with experts as PlanesMatrix for many tokens on Hopper, in Gluon: triton_planes.py's, with wgmma.

A tile is 128 rows of one expert by 256 outputs, or by 128 gates and their ups. The weights are the first operand and
stay in registers: each of two warpgroups turns the codes of its 128 outputs into 16-bit floats once for all 128 rows,
while the tensor cores work for the other. The codes arrive by TMA; the rows are gathered by the four warps that load. A
program goes from tile to tile, so that its loads run ahead into the next one.

Every value is rounded to x's dtype once, as the specification in that dtype rounds: scales of integers too are part of
the values, where triton_planes.py multiplies sums by them in float32.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.gluon_common import allocate_barriers, grid_dependency, place_of_tile
from kernels.moe.configs import HOPPER_PLANES_KINDS, HopperPlanesConfig
from kernels.moe.gluon_planes_decode import load_scales, load_table, values_of
from kernels.moe.planes import GROUP, PLANE, PlanesMatrix
from kernels.moe.reference import Gate
from kernels.moe.triton_planes import kind_of
from kernels.moe.triton_route import RowTiles

# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types: kernel arguments carry none)

_PLANES = gl.constexpr(GROUP // PLANE)
_GROUP = gl.constexpr(GROUP)
_PLANE = gl.constexpr(PLANE)
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)


def takes(x: torch.Tensor, gate_up: PlanesMatrix, down: PlanesMatrix, gate: Gate) -> bool:
    """Return True if the kernels support these experts, given a device of compute capability 9.0."""
    return (
        (x.dtype == torch.bfloat16 or _takes_half(x, gate_up, down))
        and gate.kind in ("silu", "clamped")
        and all(w.kind in HOPPER_PLANES_KINDS and w.shape[2] % PLANE == 0 for w in (gate_up, down))
        and down.shape[1] % 16 == 0  # rows of the output are aligned to 32 bytes
    )


def _takes_half(x: torch.Tensor, *matrices: PlanesMatrix) -> bool:
    """Return True for float16 if all values are integers times scales of it: as a bfloat16 a scale may be too large."""
    return x.dtype == torch.float16 and all(w.kind == "int4" and w.scale_dtype == torch.float16 for w in matrices)


def multiply(
    x: torch.Tensor,
    gate_up: PlanesMatrix,
    down: PlanesMatrix,
    tiles: RowTiles,
    config: HopperPlanesConfig,
    *,
    num_pairs: int,
    gate: Gate,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    pdl: bool = False,
) -> torch.Tensor:
    """Return both products of each pair, [num_pairs, H], of x's dtype; undefined for pairs in no tile.

    x: [num_pairs / n, H], each row used by n successive pairs, dense in H; biases: of gate_up [E, 2 * N] and down
    [E, H], contiguous.
    """
    if x.stride(0) % 16 or x.data_ptr() % 16:  # rows are read in 16 bytes
        x = x.contiguous()
    inner = torch.empty(num_pairs, gate_up.shape[1] // 2, dtype=x.dtype, device=x.device)
    _launch(x, gate_up, biases[0], inner, tiles, config, gate=gate, pdl=pdl)
    out = torch.empty(num_pairs, down.shape[1], dtype=x.dtype, device=x.device)
    _launch(inner, down, biases[1], out, tiles, config, gate=None, pdl=pdl)
    return out


def _launch(
    x: torch.Tensor, w: PlanesMatrix, bias: torch.Tensor | None, out: torch.Tensor, tiles: RowTiles,
    config: HopperPlanesConfig, *, gate: Gate | None, pdl: bool,
) -> None:  # fmt: skip
    """Multiply the rows of pairs by their experts' matrices: [E, 2 * n or n, K]."""
    num_tiles, n, k = tiles.experts.shape[0], out.shape[1], w.shape[2]
    assert config.block_m == tiles.pairs.shape[0] // num_tiles
    assert x.shape[1] == k
    assert w.scales.is_contiguous()
    words = w.words.view(-1, PLANE)  # row of output o of group g of expert e: (e * groups + g) * outputs + o
    w_desc = TensorDescriptor(words, list(words.shape), list(words.stride()), [128, PLANE], _LAYOUT)
    column_tiles = triton.cdiv(n, 256 if gate is None else 128)
    num_sms = torch.cuda.get_device_properties(out.device).multi_processor_count
    _kernel[(min(num_tiles * column_tiles, num_sms),)](
        x, w_desc, w.scales, w.constants, bias, out, tiles.pairs, tiles.experts, tiles.rows,
        num_tiles, column_tiles, n, k, triton.cdiv(k, GROUP), x.stride(0), w.scales.stride(0),
        KIND=kind_of(w), COLUMNS=w.columns, PAIRS_PER_ROW=out.shape[0] // x.shape[0],
        GATE="" if gate is None else gate.kind, ALPHA=0.0 if gate is None else gate.alpha,
        LIMIT=0.0 if gate is None else gate.limit,
        BLOCK_M=config.block_m, STAGES=config.num_stages, GROUP_M=config.group_m, HAS_BIAS=bias is not None,
        PDL=pdl, num_warps=4, launch_pdl=pdl, maxnreg=168,
    )  # fmt: skip


@jit
def multiply_tiles(problem, rings, work, SETTINGS: gl.constexpr, WHICH: gl.constexpr):
    """One warpgroup: 128 outputs of each tile, or 64 gates and their ups."""
    experts_ptr, tile_rows_ptr, num_tiles, column_tiles = work
    KIND: gl.constexpr = SETTINGS[0]
    GATE: gl.constexpr = SETTINGS[2]
    GROUP_M: gl.constexpr = SETTINGS[5]
    DTYPE: gl.constexpr = problem[3].dtype.element_ty
    n = problem[5]
    done = 0  # groups of inputs
    for tile in range(gl.program_id(0), num_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = place_of_tile(tile, num_tiles, column_tiles, GROUP_M)
        num_rows = gl.load(tile_rows_ptr + row_tile)
        if num_rows > 0:
            expert = gl.load(experts_ptr + row_tile).to(gl.int64)
            first, second = _features(column_tile, n, GATE, WHICH)
            sums_a, sums_b, done = _sum(problem, rings, expert, first, second, done, SETTINGS, WHICH)
            sums_a = _finish(sums_a, problem, expert, first, KIND, GATE, SETTINGS[7])
            sums_b = _finish(sums_b, problem, expert, second, KIND, GATE, SETTINGS[7])
            if GATE == "":
                _store(sums_a.to(DTYPE), problem, row_tile, num_rows, first)
                _store(sums_b.to(DTYPE), problem, row_tile, num_rows, second)
            else:
                values = activate(sums_a, sums_b, GATE, SETTINGS[3], SETTINGS[4], DTYPE)
                _store(values, problem, row_tile, num_rows, first)


@jit
def _features(column_tile, n, GATE: gl.constexpr, WHICH: gl.constexpr):
    """Return the first output of each of a warpgroup's two sets of 64."""
    if GATE == "":
        first = column_tile * 256 + WHICH * 64
        return first, first + 128
    else:
        first = column_tile * 128 + WHICH * 64
        return first, n + first


@jit
def _sum(problem, rings, expert, first, second, done, SETTINGS: gl.constexpr, WHICH: gl.constexpr):
    """Sum over all inputs: two sets of 64 outputs of the tile's rows, [64, BLOCK_M] fp32 each, and `done`."""
    scales_ptr, num_groups, stride_scales = problem[0], problem[7], problem[8]
    x_tiles, w_tiles, loaded, free = rings
    KIND: gl.constexpr = SETTINGS[0]
    COLUMNS: gl.constexpr = SETTINGS[1]
    STAGES: gl.constexpr = w_tiles.shape[0] // 4
    BLOCK_M: gl.constexpr = x_tiles.shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    CODES: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    outputs = problem[5] * (1 if SETTINGS[2] == "" else 2)
    rows = gl.arange(0, 64, gl.SliceLayout(1, CODES))
    expert_scales = scales_ptr + expert * stride_scales
    # Outputs past the last are not stored
    places_a, places_b = gl.minimum(first + rows, outputs - 1), gl.minimum(second + rows, outputs - 1)
    table = load_table(problem[1], KIND)
    scales_a = load_scales(expert_scales, places_a, outputs, 0, KIND, COLUMNS)
    scales_b = load_scales(expert_scales, places_b, outputs, 0, KIND, COLUMNS)
    sums_a = gl.full([64, BLOCK_M], 0.0, gl.float32, SUMS)
    sums_b = gl.full([64, BLOCK_M], 0.0, gl.float32, SUMS)
    for group in range(num_groups):
        stage = done % STAGES
        mbarrier.wait(loaded.index(stage), (done // STAGES) & 1)
        hopper.fence_async_shared()  # rows were not written by TMA
        codes_a = w_tiles.index(stage * 4 + WHICH).load(CODES)
        codes_b = w_tiles.index(stage * 4 + 2 + WHICH).load(CODES)
        for plane in gl.static_range(_PLANES):
            values = values_of(codes_a, scales_a, table, group, x_tiles, plane, KIND, COLUMNS, CODES)
            rows_of = x_tiles.index(stage * _PLANES + plane).permute((1, 0))
            sums_a = hopper.warpgroup_mma(values, rows_of, sums_a, is_async=True)
        for plane in gl.static_range(_PLANES):
            values = values_of(codes_b, scales_b, table, group, x_tiles, plane, KIND, COLUMNS, CODES)
            rows_of = x_tiles.index(stage * _PLANES + plane).permute((1, 0))
            sums_b = hopper.warpgroup_mma(values, rows_of, sums_b, is_async=True)
        following = gl.minimum(group + 1, num_groups - 1)  # its scales, while the tensor cores work
        scales_a = load_scales(expert_scales, places_a, outputs, following, KIND, COLUMNS)
        scales_b = load_scales(expert_scales, places_b, outputs, following, KIND, COLUMNS)
        sums_a, sums_b = hopper.warpgroup_mma_wait(0, [sums_a, sums_b])
        mbarrier.arrive(free.index(stage))
        done += 1
    return sums_a, sums_b, done


@jit
def _finish(sums, problem, expert, first, KIND: gl.constexpr, GATE: gl.constexpr, HAS_BIAS: gl.constexpr):
    """Multiply a set of outputs by their factors, and add their biases."""
    factors_ptr, bias_ptr, n = problem[1], problem[2], problem[5]
    outputs = n * (1 if GATE == "" else 2)
    places = expert * outputs + gl.minimum(first + gl.arange(0, 64, gl.SliceLayout(1, sums.type.layout)), outputs - 1)
    if KIND == "nvfp4":
        sums = sums * gl.load(factors_ptr + places)[:, None]
    if HAS_BIAS:
        sums = sums + gl.load(bias_ptr + places).to(gl.float32)[:, None]
    return sums


@jit
def round_to(values, DTYPE: gl.constexpr):
    """Round fp32 values to those of 16 bits."""
    return values.to(DTYPE).to(gl.float32)


@jit
def activate(gates, ups, GATE: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, DTYPE: gl.constexpr):
    """Join gates and ups as kernels.moe.triton_common.gate_and_mul does."""
    gates, ups = round_to(gates, DTYPE), round_to(ups, DTYPE)
    if GATE == "clamped":
        gates, ups = gl.minimum(gates, LIMIT), gl.minimum(gl.maximum(ups, -LIMIT), LIMIT)
        sigmoids = round_to(1.0 / (1.0 + gl.exp(-round_to(gates * ALPHA, DTYPE))), DTYPE)
        return (round_to(ups + 1.0, DTYPE) * round_to(gates * sigmoids, DTYPE)).to(DTYPE)
    else:
        return (round_to(gates / (1.0 + gl.exp(-gates)), DTYPE) * ups).to(DTYPE)


@jit
def _store(values, problem, row_tile, num_rows, first):
    """Write 64 outputs of a tile's rows to the places of their pairs, 16 bytes a thread. values: [64, BLOCK_M]."""
    out_ptr, pairs_ptr, n = problem[3], problem[4], problem[5]
    BLOCK_M: gl.constexpr = values.shape[1]
    LINES: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    members = gl.arange(0, BLOCK_M, gl.SliceLayout(0, LINES))
    outputs = first + gl.arange(0, 64, gl.SliceLayout(1, LINES))
    is_row = members < num_rows
    pairs = gl.load(pairs_ptr + row_tile * BLOCK_M + members, mask=is_row, other=0).to(gl.int64)
    targets = out_ptr + pairs[None, :] * n + outputs[:, None]
    gl.store(targets, gl.convert_layout(values, LINES), mask=is_row[None, :] & (outputs < n)[:, None])


@gluon.jit
def _load(x_ptr, w_desc, rings, work, pairs_ptr, n, k, num_groups, stride_x, SETTINGS: gl.constexpr):
    """Load the rows and codes of each group of inputs of each tile, as soon as a stage is free."""
    experts_ptr, tile_rows_ptr, num_tiles, column_tiles = work
    x_tiles, w_tiles, loaded, free = rings
    GATE: gl.constexpr = SETTINGS[2]
    GROUP_M: gl.constexpr = SETTINGS[5]
    PAIRS_PER_ROW: gl.constexpr = SETTINGS[6]
    STAGES: gl.constexpr = w_tiles.shape[0] // 4
    BLOCK_M: gl.constexpr = x_tiles.shape[1]
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    members = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LINES))
    columns = gl.arange(0, _GROUP, gl.SliceLayout(0, LINES))
    whole_tiles = x_tiles._reinterpret(x_tiles.dtype, [STAGES, BLOCK_M, _GROUP], x_tiles.layout)  # its planes in turn
    boxes = w_tiles._reinterpret(w_tiles.dtype, [STAGES * 2, 128, _PLANE], w_tiles.layout)
    outputs = n * (1 if GATE == "" else 2)
    done = 0
    for tile in range(gl.program_id(0), num_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = place_of_tile(tile, num_tiles, column_tiles, GROUP_M)
        num_rows = gl.load(tile_rows_ptr + row_tile)
        if num_rows > 0:
            is_row = members < num_rows
            pairs = gl.load(pairs_ptr + row_tile * BLOCK_M + members, mask=is_row, other=0)
            lines = x_ptr + (pairs // PAIRS_PER_ROW).to(gl.int64)[:, None] * stride_x + columns[None, :]
            start = gl.load(experts_ptr + row_tile) * num_groups * outputs
            first, second = _features(column_tile, n, GATE, 0)  # each of both warpgroups, side by side
            for group in range(num_groups):
                stage = done % STAGES
                barrier = loaded.index(stage)
                mbarrier.wait(free.index(stage), ((done // STAGES) & 1) ^ 1)
                mbarrier.expect(barrier, 4 * 64 * _PLANE * 2)
                tma.async_copy_global_to_shared(w_desc, [start + first, 0], barrier, boxes.index(stage * 2))
                tma.async_copy_global_to_shared(w_desc, [start + second, 0], barrier, boxes.index(stage * 2 + 1))
                column = group * _GROUP
                is_here = is_row[:, None] & (columns + column < k)[None, :]
                async_copy.async_copy_global_to_shared(whole_tiles.index(stage), lines + column, mask=is_here)
                async_copy.mbarrier_arrive(barrier, increment_count=False)
                start += outputs
                done += 1


@gluon.jit(do_not_specialize=["num_tiles", "column_tiles", "num_groups", "stride_scales"])
def _kernel(
    x_ptr, w_desc, scales_ptr, factors_ptr, bias_ptr, out_ptr, pairs_ptr, experts_ptr, tile_rows_ptr,
    num_tiles, column_tiles, n, k, num_groups, stride_x, stride_scales,
    KIND: gl.constexpr, COLUMNS: gl.constexpr, PAIRS_PER_ROW: gl.constexpr, GATE: gl.constexpr, ALPHA: gl.constexpr,
    LIMIT: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Set up shared memory, then specialise: two warpgroups that multiply, and four warps that load."""
    x_tiles = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES * _PLANES, BLOCK_M, _PLANE], w_desc.layout)
    w_tiles = gl.allocate_shared_memory(w_desc.dtype, [STAGES * 4, 64, _PLANE], w_desc.layout)
    rings = (x_tiles, w_tiles, allocate_barriers(STAGES, 129), allocate_barriers(STAGES, 2))
    if PDL:
        grid_dependency("griddepcontrol.wait;")
        grid_dependency("griddepcontrol.launch_dependents;")
    problem = (scales_ptr, factors_ptr, bias_ptr, out_ptr, pairs_ptr, n, k, num_groups, stride_scales)
    work = (experts_ptr, tile_rows_ptr, num_tiles, column_tiles)
    SETTINGS: gl.constexpr = (KIND, COLUMNS, GATE, ALPHA, LIMIT, GROUP_M, PAIRS_PER_ROW, HAS_BIAS)
    gl.warp_specialize(
        [
            (multiply_tiles, (problem, rings, work, SETTINGS, 0)),
            (multiply_tiles, (problem, rings, work, SETTINGS, 1)),
            (_load, (x_ptr, w_desc, rings, work, pairs_ptr, n, k, num_groups, stride_x, SETTINGS)),
        ],
        [4, 4],
        [224, 56],  # registers; the first warpgroup gets the rest
    )
