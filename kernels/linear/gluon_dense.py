"""x @ w.T in 16 bits and the gate behind it, for Hopper in Gluon: for many rows, where products bound the time.

gated_linear computes what gated_linear of kernels/linear/late_norm.py does. A tile has the same 128 outputs of gate and
of up as two products of equal layout, so that a thread holds both of a pair: the gate is applied to the accumulators,
and neither product is written.

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

from kernels.gluon_common import allocate_barriers, grid_dependency, place_of_tile
from kernels.linear.dense import HEIGHT, PART, DenseConfig, pays

# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types)

if not triton.__version__.startswith("3.6."):
    raise ImportError(f"the Hopper product of 16 bits needs Triton 3.6, whose Gluon it uses, not {triton.__version__}")

_ROWS = 64  # of a warpgroup
_CONSUMERS = gl.constexpr(HEIGHT // _ROWS)
_STEP = 64  # inputs of a stage: 128 bytes, the widest swizzle
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_LOG2_E = gl.constexpr(1.4426950408889634)
_GELU = gl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi)


def takes(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Return True if the kernel supports these tensors, given a device of compute capability 9.0."""
    return (
        x.dtype == w.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(1) == w.stride(1) == 1
        and w.shape[0] % 16 == 0  # rows of the output are aligned to 16 bytes
        and all(each % 16 == 0 for each in (2 * x.stride(0), 2 * w.stride(0), x.data_ptr(), w.data_ptr()))
    )


def is_faster(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Return True if the kernel takes these, and is expected to be faster than cuBLAS and a gate behind it."""
    num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    return pays(num_rows=x.shape[0], n=w.shape[0], k=w.shape[1], num_sms=num_sms) and takes(x, w)


def gated_linear(
    x: torch.Tensor, w: torch.Tensor, *, is_gelu: bool, config: DenseConfig | None = None, pdl: bool = False
) -> torch.Tensor:
    """Equal kernels.linear.late_norm.gated_linear, for tensors that `takes` allows; the products are not rounded."""
    config = config or DenseConfig()
    (num_rows, k), size = x.shape, w.shape[0] // 2
    out = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    row_tiles, tiles = triton.cdiv(num_rows, HEIGHT), triton.cdiv(size, PART)
    num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    rows, weights, outputs = (
        TensorDescriptor(each, list(each.shape), list(each.stride()), block, _LAYOUT)
        for each, block in ((x, [_ROWS, _STEP]), (w, [PART, _STEP]), (out, [_ROWS, PART]))
    )
    _kernel[(min(row_tiles * tiles, num_sms),)](
        rows, weights, outputs, size, triton.cdiv(k, _STEP), row_tiles, tiles,
        STAGES=config.num_stages, GROUP=config.group, IS_GELU=is_gelu, PDL=pdl,
        num_warps=4, launch_pdl=pdl, maxnreg=128,
    )  # fmt: skip
    return out


@jit
def multiply(
    out_desc, rings, outs, num_steps, row_tiles, tiles, GROUP: gl.constexpr, IS_GELU: gl.constexpr, WHICH: gl.constexpr
):  # fmt: skip
    """One warpgroup: the outputs of its 64 rows of each tile. While it waits for a step, the other two multiply."""
    x_tiles, w_tiles, loaded, free = rings
    STAGES: gl.constexpr = loaded.shape[0]
    PART: gl.constexpr = w_tiles.shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    out_tile = outs.index(WHICH)
    done = 0  # steps
    for tile in range(gl.program_id(0), row_tiles * tiles, gl.num_programs(0)):
        row_tile, column_tile = place_of_tile(tile, row_tiles, tiles, GROUP)
        gate = gl.full([64, PART], 0.0, gl.float32, SUMS)
        up = gl.full([64, PART], 0.0, gl.float32, SUMS)
        for step in range(num_steps):
            stage = done % STAGES
            mbarrier.wait(loaded.index(stage), (done // STAGES) & 1)
            rows = x_tiles.index(stage * _CONSUMERS + WHICH)
            gate = _add_product(gate, rows, w_tiles.index(stage * 2), step > 0)
            up = _add_product(up, rows, w_tiles.index(stage * 2 + 1), step > 0)
            gate, up = hopper.warpgroup_mma_wait(0, [gate, up])
            mbarrier.arrive(free.index(stage))
            done += 1
        row = (row_tile * _CONSUMERS + WHICH) * 64
        _store(_gated(gate, up, IS_GELU), out_desc, out_tile, row, column_tile * PART)
    tma.store_wait(0)


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
def _gated(gate, up, IS_GELU: gl.constexpr):
    """Return silu(gate) * up, or with gelu, by its tanh: x * (1 + tanh(y)) / 2 is x times the sigmoid of 2 y."""
    argument = gate
    if IS_GELU:
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
def _load(x_desc, w_desc, rings, size, num_steps, row_tiles, tiles, GROUP: gl.constexpr):
    """Load the rows and weights of each step of each tile, as soon as a stage is free."""
    x_tiles, w_tiles, loaded, free = rings
    STAGES: gl.constexpr = loaded.shape[0]
    PART: gl.constexpr = w_tiles.shape[1]
    done = 0
    for tile in range(gl.program_id(0), row_tiles * tiles, gl.num_programs(0)):
        row_tile, column_tile = place_of_tile(tile, row_tiles, tiles, GROUP)
        for step in range(num_steps):
            stage = done % STAGES
            barrier = loaded.index(stage)
            mbarrier.wait(free.index(stage), ((done // STAGES) & 1) ^ 1)
            mbarrier.expect(barrier, (_CONSUMERS * 64 + 2 * PART) * 128)
            for i in gl.static_range(_CONSUMERS):
                box = [(row_tile * _CONSUMERS + i) * 64, step * 64]
                tma.async_copy_global_to_shared(x_desc, box, barrier, x_tiles.index(stage * _CONSUMERS + i))
            for i in gl.static_range(2):
                box = [column_tile * PART + i * size, step * 64]
                tma.async_copy_global_to_shared(w_desc, box, barrier, w_tiles.index(stage * 2 + i))
            done += 1


@gluon.jit(do_not_specialize=["size", "num_steps", "row_tiles", "tiles"])
def _kernel(
    x_desc, w_desc, out_desc, size, num_steps, row_tiles, tiles,
    STAGES: gl.constexpr, GROUP: gl.constexpr, IS_GELU: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Set up shared memory, then specialise: three warpgroups that multiply, and one loading warp."""
    PART: gl.constexpr = w_desc.block_shape[0]
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES * _CONSUMERS, 64, 64], x_desc.layout)
    w_tiles = gl.allocate_shared_memory(w_desc.dtype, [STAGES * 2, PART, 64], w_desc.layout)
    outs = gl.allocate_shared_memory(out_desc.dtype, [_CONSUMERS, 64, PART], out_desc.layout)
    rings = (x_tiles, w_tiles, allocate_barriers(STAGES, 1), allocate_barriers(STAGES, _CONSUMERS))
    if PDL:
        grid_dependency("griddepcontrol.wait;")
        grid_dependency("griddepcontrol.launch_dependents;")
    loading = (x_desc, w_desc, rings, size, num_steps, row_tiles, tiles, GROUP)
    gl.warp_specialize(
        [
            (multiply, (out_desc, rings, outs, num_steps, row_tiles, tiles, GROUP, IS_GELU, 0)),
            (multiply, (out_desc, rings, outs, num_steps, row_tiles, tiles, GROUP, IS_GELU, 1)),
            (multiply, (out_desc, rings, outs, num_steps, row_tiles, tiles, GROUP, IS_GELU, 2)),
            (_load, loading),
        ],
        [4, 4, 1],
        [160, 160, 32],  # registers; the first warpgroup gets the rest
    )
