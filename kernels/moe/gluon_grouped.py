"""Grouped products of 16-bit values for many tokens on Hopper, in Gluon: triton_grouped.py's, with wgmma and TMA.

TMA reads whole boxes, so the rows of a tile lie side by side: sort_rows copies each token to the rows of all its pairs.
The first product joins gate and up of 128 features in registers, and its rows stay in the order of the tiles; the
second writes each pair's row to its place. Two warpgroups have 64 rows each and share the weights; one warp loads.
Programs are persistent, so that its loads run ahead into the next tile.
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

from kernels.gluon_common import allocate_barriers, grid_dependency, skip_stages
from kernels.linear.gluon_blocks import place_of_tile
from kernels.moe.configs import HopperGroupedConfig
from kernels.moe.reference import Gate
from kernels.moe.storage import ExpertMatrix
from kernels.moe.triton_route import RowTiles, sort_rows

# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types: kernel arguments carry none)

_DEPTH = 64  # inputs of a step: 128 bytes, the widest swizzle
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def takes(x: torch.Tensor, gate_up: ExpertMatrix, down: ExpertMatrix, gate: Gate) -> bool:
    """Return True if the kernels support these experts, given a device of compute capability 9.0."""
    return (
        isinstance(gate_up, torch.Tensor)
        and isinstance(down, torch.Tensor)
        and x.dtype in (torch.bfloat16, torch.float16)
        and gate_up.dtype == down.dtype == x.dtype
        and gate.kind == "silu"
        and all(w.shape[2] % 8 == 0 and w.data_ptr() % 16 == 0 for w in (gate_up, down))  # rows of 16 bytes for TMA
    )


def multiply(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    tiles: RowTiles,
    config: HopperGroupedConfig,
    *,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    pdl: bool = False,
) -> torch.Tensor:
    """Return both products of each pair, [num_pairs, H], of x's dtype; undefined for pairs in no tile.

    x: [num_pairs / n, H], each row used by n successive pairs, dense in H; tiles: of 128 rows, with positions; biases:
    of gate_up [E, 2 * N] and down [E, H], contiguous.
    """
    assert tiles.positions is not None
    gathers = config.gathers and x.shape[1] % _DEPTH == 0 and x.stride(0) % _DEPTH == 0
    pairs_per_row = tiles.positions.shape[0] // x.shape[0] if gathers else None
    rows = x if gathers else sort_rows(x, tiles, pdl=pdl)
    inner = torch.empty(tiles.pairs.shape[0], gate_up.shape[1] // 2, dtype=x.dtype, device=x.device)
    _launch(rows, gate_up, biases[0], inner, tiles, config, pairs_per_row=pairs_per_row, is_up=True, pdl=pdl)
    out = torch.empty(tiles.positions.shape[0], down.shape[1], dtype=x.dtype, device=x.device)
    _launch(inner, down, biases[1], out, tiles, config, is_up=False, pdl=pdl)
    return out


def _launch(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tiles: RowTiles,
    config: HopperGroupedConfig, *, is_up: bool, pairs_per_row: int | None = None, pdl: bool,
) -> None:  # fmt: skip
    """Multiply rows in the order of the tiles by their experts' matrices: [E, 2 * n or n, K].

    pairs_per_row: of rows in the order of tokens, which the loading warps gather instead.
    """
    num_tiles, k = tiles.experts.shape[0], x.shape[1]
    assert config.block_m == tiles.pairs.shape[0] // num_tiles == 128
    n = w.shape[1] // (2 if is_up else 1)
    column_tiles, num_steps = triton.cdiv(n, 128 if is_up else 256), triton.cdiv(k, _DEPTH)
    x_desc, w_desc = (
        TensorDescriptor(each, list(each.shape), list(each.stride()), [height, _DEPTH], _LAYOUT)
        for each, height in ((x, 64), (w.view(-1, k), 128))
    )
    assert config.lag < config.num_stages
    # The second warpgroup cannot lag where the first could be a whole tile ahead: turns would be counted wrongly
    lag = config.lag if num_steps >= config.num_stages else 0
    num_sms = torch.cuda.get_device_properties(out.device).multi_processor_count
    _kernel[(min(num_tiles * column_tiles, num_sms),)](
        x_desc, w_desc, x, bias, out, tiles.pairs, tiles.experts, tiles.rows, num_tiles, column_tiles, n, num_steps,
        x.stride(0), PAIRS_PER_ROW=pairs_per_row or 0, IS_UP=is_up, STAGES=config.num_stages, GROUP_M=config.group_m,
        LAG=lag, HAS_BIAS=bias is not None, PDL=pdl, num_warps=4, launch_pdl=pdl, maxnreg=168,
    )  # fmt: skip


@jit
def multiply_tiles(
    problem, rings, work, num_tiles, column_tiles, IS_UP: gl.constexpr, GROUP_M: gl.constexpr, LAG: gl.constexpr,
    HAS_BIAS: gl.constexpr, GATHERS: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """One warpgroup: the outputs of its 64 rows of each tile."""
    experts_ptr, tile_rows_ptr = work
    num_steps = problem[4]
    x_tiles, _w_tiles, loaded, free, turn = rings
    STAGES: gl.constexpr = x_tiles.shape[0] // 2
    done = 0  # steps
    tiles = 0
    for tile in range(gl.program_id(0), num_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = place_of_tile(tile, num_tiles, column_tiles, GROUP_M)
        num_rows = gl.load(tile_rows_ptr + row_tile)
        if num_rows > 0:
            if LAG > 0 and WHICH == 1:
                mbarrier.wait(turn.index(0), tiles & 1)
            if num_rows > WHICH * 64:
                expert = gl.load(experts_ptr + row_tile)
                sums_a, sums_b, done = _sum(problem, rings, done, LAG, GATHERS, WHICH)
                _finish(sums_a, sums_b, problem, expert, row_tile, column_tile, num_rows, IS_UP, HAS_BIAS, WHICH)
            else:
                done = skip_stages(loaded, free, done, num_steps, STAGES)
            tiles += 1


@jit
def _sum(problem, rings, done, LAG: gl.constexpr, GATHERS: gl.constexpr, WHICH: gl.constexpr):
    """Sum over all inputs: both halves of a tile's outputs, [64, 128] fp32 each, and `done`."""
    num_steps = problem[4]
    x_tiles, w_tiles, loaded, free, turn = rings
    STAGES: gl.constexpr = x_tiles.shape[0] // 2
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    sums = gl.full([64, 256], 0.0, gl.float32, SUMS)
    for step in range(num_steps):
        if LAG > 0 and WHICH == 0:
            mbarrier.arrive(turn.index(0), pred=step == gl.minimum(LAG, num_steps - 1))
        stage = done % STAGES
        mbarrier.wait(loaded.index(stage), (done // STAGES) & 1)
        if GATHERS:
            hopper.fence_async_shared()  # rows were not written by TMA
        rows = x_tiles.index(stage * 2 + WHICH)
        more = hopper.warpgroup_mma(rows, w_tiles.index(stage).permute((1, 0)), sums, is_async=True)
        sums = hopper.warpgroup_mma_wait(0, [more])
        mbarrier.arrive(free.index(stage))
        done += 1
    sums_a, sums_b = sums.reshape([64, 2, 128]).permute([0, 2, 1]).split()
    sums_a = gl.convert_layout(sums_a, HALF, assert_trivial=True)
    return sums_a, gl.convert_layout(sums_b, HALF, assert_trivial=True), done


@jit
def _finish(
    sums_a, sums_b, problem, expert, row_tile, column_tile, num_rows, IS_UP: gl.constexpr, HAS_BIAS: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """Add biases and join gate and up; then write 128 features, or both halves of 256 outputs."""
    bias_ptr, out_ptr, _pairs_ptr, n, _num_steps = problem
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    first = column_tile * (128 if IS_UP else 256)
    if HAS_BIAS:
        features = gl.minimum(first + gl.arange(0, 128, gl.SliceLayout(0, sums_a.type.layout)), n - 1)
        features_b = n + features if IS_UP else gl.minimum(features + 128, n - 1)
        biases = bias_ptr + expert.to(gl.int64) * (2 * n if IS_UP else n)
        sums_a += gl.load(biases + features).to(gl.float32)[None, :]
        sums_b += gl.load(biases + features_b).to(gl.float32)[None, :]
    if IS_UP:
        gates, ups = sums_a.to(DTYPE).to(gl.float32), sums_b.to(DTYPE).to(gl.float32)
        gates = (gates / (1.0 + gl.exp(-gates))).to(DTYPE).to(gl.float32)  # as torch rounds
        _store((gates * ups).to(DTYPE), problem, row_tile, num_rows, first, IS_UP, WHICH)
    else:
        _store(sums_a.to(DTYPE), problem, row_tile, num_rows, first, IS_UP, WHICH)
        _store(sums_b.to(DTYPE), problem, row_tile, num_rows, first + 128, IS_UP, WHICH)


@jit
def _store(values, problem, row_tile, num_rows, column, IS_UP: gl.constexpr, WHICH: gl.constexpr):
    """Write 64 rows of 128 outputs, 16 bytes a thread: in the order of the tiles, or to the places of the pairs."""
    _bias_ptr, out_ptr, pairs_ptr, n, _num_steps = problem
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    members = WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, LINES))
    outputs = column + gl.arange(0, 128, gl.SliceLayout(0, LINES))
    is_row = members < num_rows
    rows = row_tile * 128 + members
    if not IS_UP:
        rows = gl.load(pairs_ptr + rows, mask=is_row, other=0)
    out = gl.convert_layout(values, LINES)
    gl.store(
        out_ptr + rows.to(gl.int64)[:, None] * n + outputs[None, :], out, mask=is_row[:, None] & (outputs < n)[None, :]
    )


@gluon.jit
def _load(
    x_desc, w_desc, w_boxes, rings, work, gathered, n, num_steps, num_tiles, column_tiles, IS_UP: gl.constexpr,
    GROUP_M: gl.constexpr, PAIRS_PER_ROW: gl.constexpr,
):  # fmt: skip
    """Load the rows and weights of each step of each tile, as soon as a stage is free."""
    experts_ptr, tile_rows_ptr = work
    x_tiles, _w_tiles, loaded, free, _turn = rings
    STAGES: gl.constexpr = x_tiles.shape[0] // 2
    GATHERS: gl.constexpr = PAIRS_PER_ROW > 0
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    whole_tiles = x_tiles._reinterpret(x_tiles.dtype, [STAGES, 128, 64], x_tiles.layout)
    x_ptr, pairs_ptr, stride_x = gathered
    done = 0
    for tile in range(gl.program_id(0), num_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = place_of_tile(tile, num_tiles, column_tiles, GROUP_M)
        num_rows = gl.load(tile_rows_ptr + row_tile)
        if num_rows > 0:
            lines, is_row = x_ptr, num_rows  # unused, unless rows are gathered
            if GATHERS:
                members = gl.arange(0, 128, gl.SliceLayout(1, LINES))
                pairs = gl.load(pairs_ptr + row_tile * 128 + members, mask=members < num_rows, other=0)
                columns = gl.arange(0, 64, gl.SliceLayout(0, LINES))
                lines = x_ptr + (pairs // PAIRS_PER_ROW).to(gl.int64)[:, None] * stride_x + columns[None, :]
                is_row = (members < num_rows)[:, None]
            expert = gl.load(experts_ptr + row_tile)
            first = expert * (2 * n if IS_UP else n) + column_tile * (128 if IS_UP else 256)
            second = first + (n if IS_UP else 128)
            for step in range(num_steps):
                stage = done % STAGES
                barrier = loaded.index(stage)
                mbarrier.wait(free.index(stage), ((done // STAGES) & 1) ^ 1)
                mbarrier.expect(barrier, (256 if GATHERS else 128 + 256) * 64 * 2)
                if GATHERS:
                    async_copy.async_copy_global_to_shared(whole_tiles.index(stage), lines + step * 64, mask=is_row)
                    async_copy.mbarrier_arrive(barrier, increment_count=False)
                else:
                    for i in gl.static_range(2):  # rows of each warpgroup
                        box = [row_tile * 128 + i * 64, step * 64]
                        tma.async_copy_global_to_shared(x_desc, box, barrier, x_tiles.index(stage * 2 + i))
                tma.async_copy_global_to_shared(w_desc, [first, step * 64], barrier, w_boxes.index(stage * 2))
                tma.async_copy_global_to_shared(w_desc, [second, step * 64], barrier, w_boxes.index(stage * 2 + 1))
                done += 1


@gluon.jit(do_not_specialize=["num_tiles"])
def _kernel(
    x_desc, w_desc, x_ptr, bias_ptr, out_ptr, pairs_ptr, experts_ptr, tile_rows_ptr, num_tiles, column_tiles, n,
    num_steps, stride_x,
    PAIRS_PER_ROW: gl.constexpr, IS_UP: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, LAG: gl.constexpr,
    HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Set up shared memory, then specialise: two warpgroups that multiply, and one loading warp."""
    GATHERS: gl.constexpr = PAIRS_PER_ROW > 0
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, 64, 64], x_desc.layout)
    w_boxes = gl.allocate_shared_memory(w_desc.dtype, [STAGES * 2, 128, 64], w_desc.layout)
    w_tiles = w_boxes._reinterpret(w_desc.dtype, [STAGES, 256, 64], w_desc.layout)
    turn = allocate_barriers(1, 1)
    rings = (x_tiles, w_tiles, allocate_barriers(STAGES, 129 if GATHERS else 1), allocate_barriers(STAGES, 2), turn)
    if PDL:
        grid_dependency("griddepcontrol.wait;")
        grid_dependency("griddepcontrol.launch_dependents;")
    problem = (bias_ptr, out_ptr, pairs_ptr, n, num_steps)
    work = (experts_ptr, tile_rows_ptr)
    gathered = (x_ptr, pairs_ptr, stride_x)
    gl.warp_specialize(
        [
            (
                multiply_tiles,
                (problem, rings, work, num_tiles, column_tiles, IS_UP, GROUP_M, LAG, HAS_BIAS, GATHERS, 0),
            ),
            (
                multiply_tiles,
                (problem, rings, work, num_tiles, column_tiles, IS_UP, GROUP_M, LAG, HAS_BIAS, GATHERS, 1),
            ),
            (
                _load,
                (
                    x_desc,
                    w_desc,
                    w_boxes,
                    rings,
                    work,
                    gathered,
                    n,
                    num_steps,
                    num_tiles,
                    column_tiles,
                    IS_UP,
                    GROUP_M,
                    PAIRS_PER_ROW,
                ),
            ),
        ],
        [4, 4 if GATHERS else 1],
        [224, 56] if GATHERS else [232, 40],  # registers; the first warpgroup gets the rest
    )
