"""x @ w.T in 16 bits for Hopper in Gluon, with a gate or without: for many rows, where products bound the time.

gated_linear computes what gated_linear of kernels/linear/dense.py does. A tile has the same 128 outputs of gate and
of up as two products of equal layout, so that a thread holds both of a pair: the gate is applied to the accumulators,
and neither product is written. dense_linear has 256 outputs side by side instead.

Each warpgroup has 64 rows; three share the weights of a tile, since tiles of 192 x 256 read L2 a fifth less than those
of 128 x 256, and Triton 3.6 has no multicast. One warp loads. Programs are persistent, so that its loads run ahead into
the next tile while the last one is written, by TMA too.
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

from kernels.gluon_common import allocate_barriers, grid_dependency
from kernels.linear.dense import PART, ROWS, DenseConfig

# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types)

if not triton.__version__.startswith("3.6."):
    raise ImportError(f"the Hopper product of 16 bits needs Triton 3.6, whose Gluon it uses, not {triton.__version__}")

_STEP = 64  # inputs of a stage: 128 bytes, the widest swizzle
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_LOG2_E = gl.constexpr(1.4426950408889634)
_GELU = gl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi)
# Of the two products of a tile
_NO_GATE, _SILU, _GELU_TANH = (gl.constexpr(gate) for gate in range(3))


def takes(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Return True if the kernel supports these tensors, given a device of compute capability 9.0."""
    return (
        x.dtype == w.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(1) == w.stride(1) == 1
        and w.shape[0] % 16 == 0  # rows of the output are aligned to 16 bytes
        and all(each % 16 == 0 for each in (2 * x.stride(0), 2 * w.stride(0), x.data_ptr(), w.data_ptr()))
    )


def gated_linear(
    x: torch.Tensor, w: torch.Tensor, *, is_gelu: bool, config: DenseConfig | None = None, pdl: bool = False
) -> torch.Tensor:
    """Equal kernels.linear.dense.gated_linear, for tensors that `takes` allows; the products are not rounded."""
    return _launch(x, w, 2 if is_gelu else 1, config, pdl)


def dense_linear(
    x: torch.Tensor, w: torch.Tensor, *, config: DenseConfig | None = None, pdl: bool = False
) -> torch.Tensor:
    """Return x @ w.T, for tensors that `takes` allows. x: [T, K]; w: [N, K]; returns [T, N]."""
    return _launch(x, w, 0, config, pdl)


def _launch(x: torch.Tensor, w: torch.Tensor, gate: int, config: DenseConfig | None, pdl: bool) -> torch.Tensor:
    config = config or DenseConfig()
    (num_rows, k), size, width = x.shape, w.shape[0] // (2 if gate else 1), PART * (1 if gate else 2)
    out = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    row_tiles, tiles = triton.cdiv(num_rows, config.consumers * ROWS), triton.cdiv(size, width)
    num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    rows, weights, outputs = (
        TensorDescriptor(each, list(each.shape), list(each.stride()), block, _LAYOUT)
        for each, block in ((x, [ROWS, _STEP]), (w, [PART, _STEP]), (out, [ROWS, PART]))
    )
    _kernel[(min(row_tiles * tiles, num_sms),)](
        rows, weights, outputs, size if gate else PART, triton.cdiv(k, _STEP), row_tiles, tiles,
        CONSUMERS=config.consumers, STAGES=config.num_stages, GROUP=config.group, AHEAD=config.is_ahead,
        JOINT=config.is_joint, GATE=gate, PDL=pdl, num_warps=4, launch_pdl=pdl,
        maxnreg=128 if config.consumers == 3 else 168,
    )  # fmt: skip
    return out


@jit
def _place_of_tile(tile, row_tiles, tiles, GROUP: gl.constexpr):
    """Return the tile's place among those of rows, and of outputs: GROUP tiles of rows side by side share weights."""
    first = tile // (GROUP * tiles) * GROUP
    height = gl.minimum(row_tiles - first, GROUP)
    place = tile % (GROUP * tiles)
    return first + place % height, place // height


@jit
def multiply(
    out_desc, rings, outs, num_steps, row_tiles, tiles, GROUP: gl.constexpr, AHEAD: gl.constexpr, GATE: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """One warpgroup: the outputs of its 64 rows of each tile. AHEAD: it starts a step before the last one is done."""
    x_tiles, w_tiles, loaded, free = rings
    STAGES: gl.constexpr = loaded.shape[0]
    CONSUMERS: gl.constexpr = x_tiles.shape[0] // STAGES
    PART: gl.constexpr = w_tiles.shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    out_tile = outs.index(WHICH)
    done = 0  # steps
    for tile in range(gl.program_id(0), row_tiles * tiles, gl.num_programs(0)):
        row_tile, column_tile = _place_of_tile(tile, row_tiles, tiles, GROUP)
        first = gl.full([64, PART], 0.0, gl.float32, SUMS)
        second = gl.full([64, PART], 0.0, gl.float32, SUMS)
        for step in range(num_steps):
            stage = done % STAGES
            mbarrier.wait(loaded.index(stage), (done // STAGES) & 1)
            rows = x_tiles.index(stage * CONSUMERS + WHICH)
            first = _add_product(first, rows, w_tiles.index(stage * 2), step > 0)
            second = _add_product(second, rows, w_tiles.index(stage * 2 + 1), step > 0)
            if AHEAD:
                first, second = hopper.warpgroup_mma_wait(2, [first, second])
                mbarrier.arrive(free.index((done + STAGES - 1) % STAGES), pred=step > 0)
            else:
                first, second = hopper.warpgroup_mma_wait(0, [first, second])
                mbarrier.arrive(free.index(stage))
            done += 1
        if AHEAD:
            first, second = hopper.warpgroup_mma_wait(0, [first, second])
            mbarrier.arrive(free.index((done + STAGES - 1) % STAGES))
        row = (row_tile * CONSUMERS + WHICH) * 64
        _store_tile(first, second, out_desc, out_tile, row, column_tile, GATE)
    tma.store_wait(0)


@jit
def multiply_jointly(
    out_desc, rings, outs, num_steps, row_tiles, tiles, GROUP: gl.constexpr, GATE: gl.constexpr, WHICH: gl.constexpr
):  # fmt: skip
    """Do what multiply does with one product of all columns of a tile."""
    x_tiles, w_boxes, loaded, free = rings
    STAGES: gl.constexpr = loaded.shape[0]
    CONSUMERS: gl.constexpr = x_tiles.shape[0] // STAGES
    WIDTH: gl.constexpr = 2 * w_boxes.shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    w_tiles = w_boxes._reinterpret(w_boxes.dtype, [STAGES, WIDTH, 64], w_boxes.layout)
    out_tile = outs.index(WHICH)
    done = 0  # steps
    for tile in range(gl.program_id(0), row_tiles * tiles, gl.num_programs(0)):
        row_tile, column_tile = _place_of_tile(tile, row_tiles, tiles, GROUP)
        sums = gl.full([64, WIDTH], 0.0, gl.float32, SUMS)
        for step in range(num_steps):
            stage = done % STAGES
            mbarrier.wait(loaded.index(stage), (done // STAGES) & 1)
            sums = _add_product(sums, x_tiles.index(stage * CONSUMERS + WHICH), w_tiles.index(stage), step > 0)
            sums = hopper.warpgroup_mma_wait(1, [sums])
            mbarrier.arrive(free.index((done + STAGES - 1) % STAGES), pred=step > 0)
            done += 1
        sums = hopper.warpgroup_mma_wait(0, [sums])
        mbarrier.arrive(free.index((done + STAGES - 1) % STAGES))
        first, second = sums.reshape([64, 2, WIDTH // 2]).permute(0, 2, 1).split()
        row = (row_tile * CONSUMERS + WHICH) * 64
        _store_tile(first, second, out_desc, out_tile, row, column_tile, GATE)
    tma.store_wait(0)


@jit
def _store_tile(first, second, out_desc, out_tile, row, column_tile, GATE: gl.constexpr):
    PART: gl.constexpr = first.shape[1]
    if GATE == _NO_GATE:
        _store(first, out_desc, out_tile, row, column_tile * (2 * PART))
        _store(second, out_desc, out_tile, row, column_tile * (2 * PART) + PART)
    else:
        _store(_gated(first, second, GATE), out_desc, out_tile, row, column_tile * PART)


@jit
def _add_product(sums, rows, weights, use_acc):
    """Start the product of a warpgroup's rows with 128 outputs of a stage's weights."""
    return hopper.warpgroup_mma(rows, weights.permute((1, 0)), sums, use_acc=use_acc, is_async=True)


@jit
def _store(sums, out_desc, out_tile, row, column):
    """Start writing 64 rows of 128 outputs, once the last ones have left the buffer."""
    out = sums.to(out_desc.dtype)
    tma.store_wait(0)
    out_tile.store(out)
    hopper.fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, column], out_tile)


@jit
def _gated(gate, up, GATE: gl.constexpr):
    """Return silu(gate) * up, or with gelu, by its tanh: x * (1 + tanh(y)) / 2 is x times the sigmoid of 2 y."""
    argument = gate
    if GATE == _GELU_TANH:
        argument = gate * _GELU * (1.0 + 0.044715 * gate * gate)
    # The bound keeps the product of two of them finite; what it changes is less than 2 ** -60 of the gate
    shares = 1.0 + gl.exp2(gl.minimum(argument * -_LOG2_E, 60.0))
    return gate * _inverse(shares) * up


@jit
def _inverse(x):
    """Return 1 / x, for two values by one reciprocal: these bind the gate's time."""
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 both, first;
        mul.f32 both, $2, $3;
        rcp.approx.ftz.f32 both, both;
        mul.f32 first, both, $3;
        mul.f32 $1, both, $2;
        mov.f32 $0, first;
        }""",
        "=f,=f,f,f", [x], dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _load(x_desc, w_desc, rings, distance, num_steps, row_tiles, tiles, GROUP: gl.constexpr, GATE: gl.constexpr):
    """Load the rows and weights of each step of each tile, as soon as a stage is free."""
    x_tiles, w_tiles, loaded, free = rings
    STAGES: gl.constexpr = loaded.shape[0]
    CONSUMERS: gl.constexpr = x_tiles.shape[0] // STAGES
    PART: gl.constexpr = w_tiles.shape[1]
    WIDTH: gl.constexpr = 2 * PART if GATE == _NO_GATE else PART
    done = 0
    for tile in range(gl.program_id(0), row_tiles * tiles, gl.num_programs(0)):
        row_tile, column_tile = _place_of_tile(tile, row_tiles, tiles, GROUP)
        for step in range(num_steps):
            stage = done % STAGES
            barrier = loaded.index(stage)
            mbarrier.wait(free.index(stage), ((done // STAGES) & 1) ^ 1)
            mbarrier.expect(barrier, (CONSUMERS * 64 + 2 * PART) * 128)
            for i in gl.static_range(CONSUMERS):
                box = [(row_tile * CONSUMERS + i) * 64, step * 64]
                tma.async_copy_global_to_shared(x_desc, box, barrier, x_tiles.index(stage * CONSUMERS + i))
            for i in gl.static_range(2):
                box = [column_tile * WIDTH + i * distance, step * 64]
                tma.async_copy_global_to_shared(w_desc, box, barrier, w_tiles.index(stage * 2 + i))
            done += 1


@gluon.jit(do_not_specialize=["distance", "num_steps", "row_tiles", "tiles"])
def _kernel(
    x_desc, w_desc, out_desc, distance, num_steps, row_tiles, tiles,  # distance: rows of w between a tile's products
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, AHEAD: gl.constexpr, JOINT: gl.constexpr,
    GATE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Set up shared memory, then specialise: two or three warpgroups that multiply, and one loading warp."""
    PART: gl.constexpr = w_desc.block_shape[0]
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES * CONSUMERS, 64, 64], x_desc.layout)
    w_tiles = gl.allocate_shared_memory(w_desc.dtype, [STAGES * 2, PART, 64], w_desc.layout)
    outs = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS, 64, PART], out_desc.layout)
    rings = (x_tiles, w_tiles, allocate_barriers(STAGES, 1), allocate_barriers(STAGES, CONSUMERS))
    if PDL:
        grid_dependency("griddepcontrol.wait;")
        grid_dependency("griddepcontrol.launch_dependents;")
    loading = (x_desc, w_desc, rings, distance, num_steps, row_tiles, tiles, GROUP, GATE)
    if JOINT:
        gl.warp_specialize(
            [
                (multiply_jointly, (out_desc, rings, outs, num_steps, row_tiles, tiles, GROUP, GATE, 0)),
                (multiply_jointly, (out_desc, rings, outs, num_steps, row_tiles, tiles, GROUP, GATE, 1)),
                (_load, loading),
            ],
            [4, 1],
            [232, 40],  # registers; the first warpgroup gets the rest
        )
    else:
        gl.warp_specialize(
            [
                (multiply, (out_desc, rings, outs, num_steps, row_tiles, tiles, GROUP, AHEAD, GATE, 0)),
                (multiply, (out_desc, rings, outs, num_steps, row_tiles, tiles, GROUP, AHEAD, GATE, 1)),
                (multiply, (out_desc, rings, outs, num_steps, row_tiles, tiles, GROUP, AHEAD, GATE, 2)),
                (_load, loading),
            ]
            if CONSUMERS == 3
            else [
                (multiply, (out_desc, rings, outs, num_steps, row_tiles, tiles, GROUP, AHEAD, GATE, 0)),
                (multiply, (out_desc, rings, outs, num_steps, row_tiles, tiles, GROUP, AHEAD, GATE, 1)),
                (_load, loading),
            ],
            [4, 4, 1] if CONSUMERS == 3 else [4, 1],
            [160, 160, 32] if CONSUMERS == 3 else [232, 40],
        )
