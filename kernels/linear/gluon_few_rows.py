"""x @ w.T of 8 bits and few rows, for Hopper in Gluon: weights are on their way before the rows are there.

Computes what rows_linear and blocks_linear (kernels/linear/reference.py) and int8_linear (kernels/linear/w8a8.py) do.
The weights are the wide side, w @ x.T, by wgmma from shared memory, where the device's copy engine puts them: no
instruction touches a weight. Under programmatic dependent launch a program requests its first weights before it waits
for x, and they arrive while the kernel before is running.

Programs have whole tiles, or equal shares of all steps of all tiles (Osama et al., "Stream-K", arXiv:2301.03598). The
parts of a tile that several programs share are summed by the last of them, in their order, so that results are equal
in every run.

The tensor cores add e4m3 products with about 14 bits, so that the sum of each 128 inputs is added in fp32
(DeepSeek-V3, arXiv:2412.19437, section 3.3.2).
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
from kernels.linear.few_rows_configs import FewRowsConfig
from kernels.linear.splits import SplitKScratch

# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types)

if not triton.__version__.startswith("3.6."):
    raise ImportError(f"the Hopper product of few rows needs Triton 3.6, whose Gluon it uses, not {triton.__version__}")

_LINE = 128  # inputs of a box, the widest swizzle, and of a block of scales
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=_LINE, element_bitwidth=8, rank=2)


def takes(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Return True if the kernel supports these values of 8 bits, given a device of compute capability 9.0."""
    return (
        x.dtype == w.dtype
        and x.stride(1) == w.stride(1) == 1
        and all(each % 16 == 0 for each in (x.stride(0), w.stride(0), x.data_ptr(), w.data_ptr()))
    )


def few_rows_linear(
    x: torch.Tensor, x_scales: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, bias: torch.Tensor | None,
    config: FewRowsConfig, *, dtype: torch.dtype, rows_per_scale: int = 0, scratch: SplitKScratch | None = None,
    pdl: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return x @ w.T + bias, [M, N], of tensors that `takes` allows. x: [M, K]; w: [N, K], both e4m3 or int8.

    x_scales, w_scales: [M] and [N]; or with rows_per_scale, of e4m3, [M, ceil(K / 128)] and one for each block of
    rows_per_scale x 128 of w. scratch: for a config that is not whole.
    """
    (num_rows, k), n = x.shape, w.shape[0]
    x_scales = x_scales.contiguous()  # a single scale is expanded to all rows
    out = torch.empty(num_rows, n, dtype=dtype, device=x.device)
    m_pad = max(8, triton.next_power_of_2(num_rows))
    boxes = triton.cdiv(k, _LINE)
    steps, tiles = triton.cdiv(boxes, config.boxes), triton.cdiv(n, config.block_n)
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    if config.is_whole:  # as few as have no more tiles than others
        programs = triton.cdiv(tiles, triton.cdiv(tiles, programs))
    else:
        programs = min(programs, steps * tiles)
        assert scratch is not None
        assert tiles <= scratch.arrivals.shape[0]
        assert programs * 2 * config.block_n * m_pad <= scratch.partial.shape[0]
    rows, weights = (
        TensorDescriptor(each, list(each.shape), list(each.stride()), [height, _LINE], _LAYOUT)
        for each, height in ((x, m_pad), (w, config.block_n))
    )
    parts = (None, None) if scratch is None or config.is_whole else (scratch.partial, scratch.arrivals)
    _kernel[(programs,)](
        rows, weights, x_scales, w_scales, bias, out, *parts, num_rows, n, boxes, steps, tiles, rows_per_scale,
        BOXES=config.boxes, STAGES=config.num_stages, BY_BLOCK=rows_per_scale > 0, HAS_BIAS=bias is not None,
        IS_WHOLE=config.is_whole, PDL=pdl,
        num_warps=config.num_warps, launch_pdl=pdl, maxnreg=config.max_registers,
    )  # fmt: skip
    return out


@gluon.jit(do_not_specialize=["num_rows", "boxes", "steps", "tiles", "rows_per_scale"])
def _kernel(
    x_desc, w_desc, x_scales_ptr, w_scales_ptr, bias_ptr, out_ptr, partial_ptr, arrivals_ptr,
    num_rows, n, boxes, steps, tiles, rows_per_scale,
    BOXES: gl.constexpr, STAGES: gl.constexpr, BY_BLOCK: gl.constexpr, HAS_BIAS: gl.constexpr,
    IS_WHOLE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Set up shared memory, then specialise: warps that multiply, and one that loads."""
    M_PAD: gl.constexpr = x_desc.block_shape[0]
    BLOCK_N: gl.constexpr = w_desc.block_shape[0]
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES * BOXES, M_PAD, 128], x_desc.layout)
    w_tiles = gl.allocate_shared_memory(w_desc.dtype, [STAGES * BOXES, BLOCK_N, 128], w_desc.layout)
    rings = (x_tiles, w_tiles, allocate_barriers(STAGES, 1), allocate_barriers(STAGES, 1))
    # Rows of no use, and their barrier
    unused = (gl.allocate_shared_memory(x_desc.dtype, [M_PAD, 128], x_desc.layout), allocate_barriers(1, 1))
    units = steps * tiles
    if IS_WHOLE:
        first = first_unit(gl.program_id(0), gl.num_programs(0), tiles) * steps
        last = first_unit(gl.program_id(0) + 1, gl.num_programs(0), tiles) * steps
    else:
        first = first_unit(gl.program_id(0), gl.num_programs(0), units)
        last = first_unit(gl.program_id(0) + 1, gl.num_programs(0), units)
    source = (x_scales_ptr, w_scales_ptr, boxes, num_rows, n, rows_per_scale)
    target = (x_scales_ptr, w_scales_ptr, bias_ptr, out_ptr, num_rows, n, partial_ptr, arrivals_ptr)
    gl.warp_specialize(
        [
            (_multiply, (rings, source, target, first, last, steps, units, BOXES, BY_BLOCK, HAS_BIAS, IS_WHOLE, PDL)),
            (_load, (x_desc, w_desc, rings, unused, first, last, steps, BOXES, PDL)),
        ],
        [1],
        [40],  # registers; the warps that multiply get the rest
    )


@jit
def _multiply(
    rings, source, target, first, last, steps, units,
    BOXES: gl.constexpr, BY_BLOCK: gl.constexpr, HAS_BIAS: gl.constexpr, IS_WHOLE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply what the loading warp brings, and store each tile, or what this program has of it."""
    x_tiles, w_tiles, loaded, free = rings
    STAGES: gl.constexpr = loaded.shape[0]
    M_PAD: gl.constexpr = x_tiles.shape[1]
    BLOCK_N: gl.constexpr = w_tiles.shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, M_PAD, 32])
    TYPE: gl.constexpr = gl.int32 if w_tiles.dtype == gl.int8 else gl.float32
    if PDL:
        grid_dependency("griddepcontrol.wait;")
        grid_dependency("griddepcontrol.launch_dependents;")
    sums = gl.full([BLOCK_N, M_PAD], 0, TYPE, SUMS)
    zeros = sums
    x_scales, w_scales = _scales(source, first, 0, steps, BLOCK_N, M_PAD, BOXES, BY_BLOCK, SUMS)
    for unit in range(first, last):
        stage = (unit - first) % STAGES
        mbarrier.wait(loaded.index(stage), ((unit - first) // STAGES) & 1)
        for box in gl.static_range(BOXES):
            place = stage * BOXES + box
            rows, weights = x_tiles.index(place).permute((1, 0)), w_tiles.index(place)
            if gl.float32 == TYPE:
                products = hopper.warpgroup_mma(weights, rows, zeros, use_acc=False, is_async=True)
                if BY_BLOCK:
                    scale = w_scales[:, None] * x_scales[None, :]
                    # Those of the next box, while the tensor cores work
                    following = unit if box < BOXES - 1 else gl.minimum(unit + 1, last - 1)
                    x_scales, w_scales = _scales(
                        source, following, (box + 1) % BOXES, steps, BLOCK_N, M_PAD, BOXES, BY_BLOCK, SUMS
                    )
                    sums += hopper.warpgroup_mma_wait(0, [products]) * scale
                else:
                    sums += hopper.warpgroup_mma_wait(0, [products])
            else:
                sums = hopper.warpgroup_mma(weights, rows, sums, is_async=True)
                sums = hopper.warpgroup_mma_wait(0, [sums])
        mbarrier.arrive(free.index(stage))
        if (unit + 1 == last) | ((unit + 1) % steps == 0):
            if IS_WHOLE:
                _store(sums.to(gl.float32), target, unit // steps, BY_BLOCK, HAS_BIAS)
            else:
                _finish(sums.to(gl.float32), target, unit // steps, steps, units, BY_BLOCK, HAS_BIAS)
            sums = zeros


@jit
def _finish(sums, target, tile, steps, units, BY_BLOCK: gl.constexpr, HAS_BIAS: gl.constexpr):
    """Store a tile; if others have parts of it, store this part, and sum all as the last of them."""
    partial_ptr, arrivals_ptr = target[6], target[7]
    BLOCK_N: gl.constexpr = sums.shape[0]
    M_PAD: gl.constexpr = sums.shape[1]
    programs = gl.num_programs(0)
    owner = _owner_of(tile * steps, programs, units)
    last_owner = _owner_of(tile * steps + (steps - 1), programs, units)
    if owner == last_owner:
        _store(sums, target, tile, BY_BLOCK, HAS_BIAS)
    else:
        places = (gl.arange(0, BLOCK_N, gl.SliceLayout(1, sums.type.layout)) * M_PAD)[:, None]
        places += gl.arange(0, M_PAD, gl.SliceLayout(0, sums.type.layout))[None, :]
        slot = _slot_of(gl.program_id(0), programs, tile, steps, units)
        gl.store(partial_ptr + slot * (BLOCK_N * M_PAD) + places, sums)
        gl.thread_barrier()
        arrived = gl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel")
        if arrived == last_owner - owner:
            gl.store(arrivals_ptr + tile, 0)
            total = gl.full([BLOCK_N, M_PAD], 0.0, gl.float32, sums.type.layout)
            for program in range(owner, last_owner + 1):
                slot = _slot_of(program, programs, tile, steps, units)
                total += gl.load(partial_ptr + slot * (BLOCK_N * M_PAD) + places, cache_modifier=".cg")
            _store(total, target, tile, BY_BLOCK, HAS_BIAS)


@jit
def first_unit(program, programs, units):
    """Return the first unit of a program: a step of a tile. programs: at most as many as units."""
    return program * units // programs


@jit
def _owner_of(unit, programs, units):
    """Return the program whose unit it is."""
    return ((unit + 1) * programs - 1) // units


@jit
def _slot_of(program, programs, tile, steps, units):
    """Return where a program's part of a tile lies: it has two places, as tiles between its ends are whole."""
    return program * 2 + (first_unit(program, programs, units) // steps != tile).to(gl.int32)


@jit
def _load(x_desc, w_desc, rings, unused, first, last, steps, BOXES: gl.constexpr, PDL: gl.constexpr):
    """Load each unit as soon as a stage is free; the first ones' weights before the wait for the kernel before."""
    x_tiles, w_tiles, loaded, free = rings
    STAGES: gl.constexpr = loaded.shape[0]
    early = gl.minimum(first + STAGES, last)
    for unit in range(first, early):
        _load_weights(w_desc, x_tiles, w_tiles, loaded, unit, unit - first, steps, BOXES)
    if PDL:
        # The device has read the rows' descriptor, too, when they are there
        mbarrier.expect(unused[1].index(0), x_tiles.shape[1] * 128)
        tma.async_copy_global_to_shared(x_desc, [0, 0], unused[1].index(0), unused[0])
        grid_dependency("griddepcontrol.wait;")
        grid_dependency("griddepcontrol.launch_dependents;")
    for unit in range(first, early):
        _load_rows(x_desc, x_tiles, loaded, unit, unit - first, steps, BOXES)
    for unit in range(early, last):
        stage = (unit - first) % STAGES
        mbarrier.wait(free.index(stage), ((unit - first) // STAGES & 1) ^ 1)
        _load_weights(w_desc, x_tiles, w_tiles, loaded, unit, stage, steps, BOXES)
        _load_rows(x_desc, x_tiles, loaded, unit, stage, steps, BOXES)
    if PDL:
        mbarrier.wait(unused[1].index(0), 0)  # a program may not end before its shared memory has been written


@jit
def _load_weights(w_desc, x_tiles, w_tiles, loaded, unit, stage, steps, BOXES: gl.constexpr):
    """Request the weights of a unit, and expect its rows too."""
    BLOCK_N: gl.constexpr = w_desc.block_shape[0]
    mbarrier.expect(loaded.index(stage), BOXES * (BLOCK_N + x_tiles.shape[1]) * 128)
    for box in gl.static_range(BOXES):
        place = [unit // steps * BLOCK_N, (unit % steps * BOXES + box) * 128]
        tma.async_copy_global_to_shared(w_desc, place, loaded.index(stage), w_tiles.index(stage * BOXES + box))


@jit
def _load_rows(x_desc, x_tiles, loaded, unit, stage, steps, BOXES: gl.constexpr):
    """Request the inputs of a unit, of its rows."""
    for box in gl.static_range(BOXES):
        place = [0, (unit % steps * BOXES + box) * 128]
        tma.async_copy_global_to_shared(x_desc, place, loaded.index(stage), x_tiles.index(stage * BOXES + box))


@jit
def _scales(
    source, unit, box, steps,
    BLOCK_N: gl.constexpr, M_PAD: gl.constexpr, BOXES: gl.constexpr, BY_BLOCK: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Return the scales of a box of x and of w, where they are of blocks."""
    x_scales_ptr, w_scales_ptr, boxes, num_rows, n, rows_per_scale = source
    rows = gl.arange(0, M_PAD, gl.SliceLayout(0, SUMS))
    outputs = gl.arange(0, BLOCK_N, gl.SliceLayout(1, SUMS))
    if BY_BLOCK:
        block = gl.minimum(unit % steps * BOXES + box, boxes - 1)
        outputs = gl.minimum(unit // steps * BLOCK_N + outputs, n - 1)
        x_scales = gl.load(x_scales_ptr + gl.minimum(rows, num_rows - 1) * boxes + block)
        w_scales = gl.load(w_scales_ptr + outputs // rows_per_scale * boxes + block)
    else:
        x_scales, w_scales = rows.to(gl.float32), outputs.to(gl.float32)  # of no use
    return x_scales, w_scales


@jit
def _store(sums, target, tile, BY_BLOCK: gl.constexpr, HAS_BIAS: gl.constexpr):
    """Scale the sums of a tile, add the bias and write them."""
    x_scales_ptr, w_scales_ptr, bias_ptr, out_ptr, num_rows, n, _partial_ptr, _arrivals_ptr = target
    OUT: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, gl.num_warps()], [0, 1])
    values = gl.convert_layout(sums, OUT)
    outputs = tile * sums.shape[0] + gl.arange(0, sums.shape[0], gl.SliceLayout(1, OUT))
    rows = gl.arange(0, sums.shape[1], gl.SliceLayout(0, OUT))
    sources = gl.minimum(outputs, n - 1)
    if not BY_BLOCK:
        values *= gl.load(w_scales_ptr + sources)[:, None]
        values *= gl.load(x_scales_ptr + gl.minimum(rows, num_rows - 1))[None, :]
    if HAS_BIAS:
        values += gl.load(bias_ptr + sources).to(gl.float32)[:, None]
    places = out_ptr + rows.to(gl.int64)[None, :] * n + outputs[:, None]
    gl.store(places, values.to(out_ptr.dtype.element_ty), mask=(rows < num_rows)[None, :] & (outputs < n)[:, None])
