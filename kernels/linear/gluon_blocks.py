"""x @ w.T of e4m3 with scales by block of 128 x 128, for Hopper in Gluon: for many rows, where products bound the time.

Computes what blocks_linear (kernels/linear/reference.py) does, with wgmma, TMA and specialised warps. The tensor cores
add with about 14 bits, so the sum of each 128 inputs is scaled and added in fp32 (DeepSeek-V3, arXiv:2412.19437,
§3.3.2). Two warpgroups have 64 rows each and share the weights; while one scales, the tensor cores work for the other.
One warp loads. Programs are persistent, so that its loads run ahead into the next tile.
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

from kernels.gluon_common import allocate_barriers, grid_dependency, place_of_tile
from kernels.linear.scaled8_configs import BlocksConfig

# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types)

if not triton.__version__.startswith("3.6."):
    raise ImportError(
        f"the Hopper product of FP8 blocks needs Triton 3.6, whose Gluon it uses, not {triton.__version__}"
    )

BLOCK = 128  # inputs and outputs that share a scale
_ROWS = 64  # of a warpgroup
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


def takes(x: torch.Tensor, w: torch.Tensor, *, rows: int, columns: int) -> bool:
    """Return True if the kernel supports these values of 8 bits, given a device of compute capability 9.0.

    rows, columns: of w that share a scale.
    """
    return (
        rows == columns == BLOCK
        and x.dtype == w.dtype == torch.float8_e4m3fn
        and x.stride(1) == w.stride(1) == 1
        and all(each % 16 == 0 for each in (x.stride(0), w.stride(0), x.data_ptr(), w.data_ptr()))
    )


def blocks_linear(
    x: torch.Tensor, x_scales: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, bias: torch.Tensor | None,
    *, dtype: torch.dtype, config: BlocksConfig | None = None, pdl: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Equal kernels.linear.reference.blocks_linear with blocks of 128, for tensors that `takes` allows."""
    config = config or BlocksConfig()
    assert config.part * config.parts == BLOCK  # outputs of one scale
    (num_rows, k), n = x.shape, w.shape[0]
    out = torch.empty(num_rows, n, dtype=dtype, device=x.device)
    row_tiles, tiles = triton.cdiv(num_rows, 2 * _ROWS), triton.cdiv(n, config.part * config.parts)
    num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    rows, outputs = (
        TensorDescriptor(each, list(each.shape), list(each.stride()), [height, BLOCK], _LAYOUT)
        for each, height in ((x, _ROWS), (w, config.part))
    )
    _kernel[(min(row_tiles * tiles, num_sms),)](
        rows, outputs, x_scales, w_scales, bias, out, num_rows, n, triton.cdiv(k, BLOCK), row_tiles, tiles,
        PARTS=config.parts, STAGES=config.num_stages, GROUP=config.group, HAS_BIAS=bias is not None, PDL=pdl,
        num_warps=4, launch_pdl=pdl, maxnreg=168,
    )  # fmt: skip
    return out


@jit
def multiply(
    problem, rings, row_tiles, tiles, PARTS: gl.constexpr, GROUP: gl.constexpr, HAS_BIAS: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """One warpgroup: the outputs of its 64 rows of each tile."""
    x_scales_ptr, w_scales_ptr, _bias_ptr, _out_ptr, num_rows, _n, num_steps = problem
    x_tiles, w_tiles, loaded, free = rings
    STAGES: gl.constexpr = x_tiles.shape[0] // 2
    PART: gl.constexpr = w_tiles.shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 32])
    ROWS: gl.constexpr = gl.SliceLayout(1, SUMS)
    done = 0  # steps
    for tile in range(gl.program_id(0), row_tiles * tiles, gl.num_programs(0)):
        row_tile, column_tile = place_of_tile(tile, row_tiles, tiles, GROUP)
        first_row = (row_tile * 2 + WHICH) * 64
        column = column_tile * (PART * PARTS)
        x_places = gl.minimum(first_row + gl.arange(0, 64, ROWS), num_rows - 1) * num_steps
        w_place = column // 128 * num_steps
        x_scale, w_scale = gl.load(x_scales_ptr + x_places), gl.load(w_scales_ptr + w_place)
        sums = gl.full([64, PART], 0.0, gl.float32, SUMS)
        more_sums = gl.full([64, PART], 0.0, gl.float32, SUMS)  # of the second part
        for step in range(num_steps):
            stage = done % STAGES
            mbarrier.wait(loaded.index(stage), (done // STAGES) & 1)
            rows = x_tiles.index(stage * 2 + WHICH)
            products = _start(rows, w_tiles.index(stage * PARTS), SUMS)
            scale = (x_scale * w_scale)[:, None]
            following = gl.minimum(step + 1, num_steps - 1)  # its scales, while the tensor cores work
            x_scale, w_scale = (
                gl.load(x_scales_ptr + (x_places + following)),
                gl.load(w_scales_ptr + (w_place + following)),
            )
            products = hopper.warpgroup_mma_wait(0, [products])
            if PARTS == 2:
                # Sums go through a wait, lest the compiler scale both parts at the end
                sums = hopper.warpgroup_mma_wait(0, [sums + products * scale])
                products = hopper.warpgroup_mma_wait(0, [_start(rows, w_tiles.index(stage * PARTS + 1), SUMS)])
                mbarrier.arrive(free.index(stage))
                more_sums += products * scale
            else:
                mbarrier.arrive(free.index(stage))
                sums += products * scale
            done += 1
        _store(sums, problem, first_row, column, HAS_BIAS)
        if PARTS == 2:
            _store(more_sums, problem, first_row, column + PART, HAS_BIAS)


@jit
def _start(rows, weights, SUMS: gl.constexpr):
    """Start the product of a warpgroup's rows with one part of a stage's weights."""
    zeros = gl.full([64, weights.shape[0]], 0.0, gl.float32, SUMS)
    return hopper.warpgroup_mma(rows, weights.permute((1, 0)), zeros, use_acc=False, is_async=True)


@jit
def _store(sums, problem, first_row, column, HAS_BIAS: gl.constexpr):
    """Write 64 rows of one part, 16 bytes a thread."""
    _x_scales_ptr, _w_scales_ptr, bias_ptr, out_ptr, num_rows, n, _num_steps = problem
    PART: gl.constexpr = sums.shape[1]
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // PART, PART // 8], [4, 1], [1, 0])
    if HAS_BIAS:
        outputs = column + gl.arange(0, PART, gl.SliceLayout(0, sums.type.layout))
        sums += gl.load(bias_ptr + gl.minimum(outputs, n - 1)).to(gl.float32)[None, :]
    rows = first_row + gl.arange(0, 64, gl.SliceLayout(1, LINES))
    outputs = column + gl.arange(0, PART, gl.SliceLayout(0, LINES))
    out = gl.convert_layout(sums.to(out_ptr.dtype.element_ty), LINES)
    places = out_ptr + rows.to(gl.int64)[:, None] * n + outputs[None, :]
    gl.store(places, out, mask=(rows < num_rows)[:, None] & (outputs < n)[None, :])


@gluon.jit
def _load(x_desc, w_desc, rings, num_steps, row_tiles, tiles, PARTS: gl.constexpr, GROUP: gl.constexpr):
    """Load the rows and weights of each step of each tile, as soon as a stage is free."""
    x_tiles, w_tiles, loaded, free = rings
    STAGES: gl.constexpr = x_tiles.shape[0] // 2
    PART: gl.constexpr = w_tiles.shape[1]
    done = 0
    for tile in range(gl.program_id(0), row_tiles * tiles, gl.num_programs(0)):
        row_tile, column_tile = place_of_tile(tile, row_tiles, tiles, GROUP)
        for step in range(num_steps):
            stage = done % STAGES
            barrier = loaded.index(stage)
            mbarrier.wait(free.index(stage), ((done // STAGES) & 1) ^ 1)
            mbarrier.expect(barrier, (128 + PARTS * PART) * 128)
            for i in gl.static_range(2):
                box = [(row_tile * 2 + i) * 64, step * 128]
                tma.async_copy_global_to_shared(x_desc, box, barrier, x_tiles.index(stage * 2 + i))
            for part in gl.static_range(PARTS):
                box = [(column_tile * PARTS + part) * PART, step * 128]
                tma.async_copy_global_to_shared(w_desc, box, barrier, w_tiles.index(stage * PARTS + part))
            done += 1


@gluon.jit(do_not_specialize=["num_rows", "row_tiles"])
def _kernel(
    x_desc, w_desc, x_scales_ptr, w_scales_ptr, bias_ptr, out_ptr, num_rows, n, num_steps, row_tiles, tiles,
    PARTS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Set up shared memory, then specialise: two warpgroups that multiply, and one loading warp."""
    PART: gl.constexpr = w_desc.block_shape[0]
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, 64, 128], x_desc.layout)
    w_tiles = gl.allocate_shared_memory(w_desc.dtype, [STAGES * PARTS, PART, 128], w_desc.layout)
    rings = (x_tiles, w_tiles, allocate_barriers(STAGES, 1), allocate_barriers(STAGES, 2))
    if PDL:
        grid_dependency("griddepcontrol.wait;")
        grid_dependency("griddepcontrol.launch_dependents;")
    problem = (x_scales_ptr, w_scales_ptr, bias_ptr, out_ptr, num_rows, n, num_steps)
    gl.warp_specialize(
        [
            (multiply, (problem, rings, row_tiles, tiles, PARTS, GROUP, HAS_BIAS, 0)),
            (multiply, (problem, rings, row_tiles, tiles, PARTS, GROUP, HAS_BIAS, 1)),
            (_load, (x_desc, w_desc, rings, num_steps, row_tiles, tiles, PARTS, GROUP)),
        ],
        [4, 1],
        [232, 40],  # registers; the first warpgroup gets the rest
    )
