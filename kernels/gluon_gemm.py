# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""GEMM for a few hundred rows on Hopper, in Gluon: x @ w.T where neither bytes nor FLOPs alone are the cost.

One warp loads by TMA, a ring of stages ahead; each warpgroup multiplies 64 rows of x with the w tile that all of them
share. The grid fills the device about once, in one of two ways. Few tiles: K is split, and the warpgroups of a tile's
programs share the summing out, each adding up one 64-row part. Many tiles: programs stay (stream-K, arXiv:2301.03598),
each takes an equal run of K steps through successive tiles, and a tile cut by such a border is summed by its first
program. Who sums, and in which order, is fixed: the same inputs give the same bits.

Under programmatic dependent launch the first weights are in shared memory before the wait for x.

Programs wait for one another's sums, so all must be resident: a grid that splits has at most one program per SM, and
no two such kernels may run at once (one stream).
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.gemm_configs import MAX_SUMS, GemmScratch, HopperGemmConfig, num_programs
from kernels.gluon_gemm_sums import await_parts, hand_over, part, store

if not triton.__version__.startswith("3.6."):
    raise ImportError("Gluon changes between versions of Triton: this was written for 3.6")

# That a thread which multiplies needs, by block_n: no more, so that the kernel before leaves room to start beside it
_REGISTERS = {32: 64, 64: 72, 128: 112, 256: 224}
_LOADING_REGISTERS = gl.constexpr(24)
_TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def registers_of(config: HopperGemmConfig) -> tuple[int, int]:
    """Of a thread: at entry, and once the loading warpgroup has given its own to those that multiply."""
    wanted = config.consumers * _REGISTERS[config.block_n] + _LOADING_REGISTERS.value
    least = config.block_n // 2 + 26  # below, ptxas refuses the product
    at_entry = -(-max(-(-wanted // (config.consumers + 1)), least) // 8) * 8
    pool = at_entry * (config.consumers + 1) - _LOADING_REGISTERS.value
    return at_entry, min(240, pool // config.consumers // 8 * 8)


def hopper_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    scratch: GemmScratch,
    *,
    config: HopperGemmConfig,
    pdl: bool = False,
) -> torch.Tensor:
    """Return x @ w.T + bias. x: [M, K]; w: [N, K], K a multiple of block_k; bias: [N]; one 16-bit dtype; [M, N].

    Both 16-byte aligned with dense rows, x's stride a multiple of 8.
    """
    num_rows, k = x.shape
    n = w.shape[0]
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    programs = num_programs(config, num_rows=num_rows, n=n, k=k, num_sms=scratch.num_sms)
    assert programs > 0
    assert config.consumers * 64 * config.block_n <= MAX_SUMS
    rows = TensorDescriptor(x, [num_rows, k], [x.stride(0), 1], [64, config.block_k], _TILE_LAYOUT)
    weights = TensorDescriptor(w, [n, k], [k, 1], [config.block_n, config.block_k], _TILE_LAYOUT)
    at_entry, parted = registers_of(config)
    _gemm_kernel[(programs,)](
        rows, weights, bias, out, scratch.partial, scratch.arrivals, num_rows, n, k // config.block_k,
        triton.cdiv(num_rows, config.consumers * 64), triton.cdiv(n, config.block_n),
        CONSUMERS=config.consumers, SPLITS=config.splits, STAGES=config.num_stages, HAS_BIAS=bias is not None,
        REGISTERS=parted, PDL=pdl, num_warps=4, launch_pdl=pdl, maxnreg=at_entry,
    )  # fmt: skip
    return out


@gluon.jit(do_not_specialize=["num_rows", "k_steps", "num_row_tiles", "num_n_tiles"])
def _gemm_kernel(
    x_desc, w_desc, bias_ptr, out_ptr, partial_ptr, arrivals_ptr, num_rows, n, k_steps, num_row_tiles, num_n_tiles,
    CONSUMERS: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr,
    REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Take a run of K steps, numbered through all tiles, row tiles first; part into warps that multiply and load."""
    BLOCK_N: gl.constexpr = w_desc.block_shape[0]
    BLOCK_K: gl.constexpr = w_desc.block_shape[1]
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES * CONSUMERS, 64, BLOCK_K], x_desc.layout)
    w_tiles = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    loaded, free = _barriers(STAGES, 1), _barriers(STAGES, CONSUMERS)
    begin, end = _run_of_program(k_steps, num_row_tiles * num_n_tiles, SPLITS)
    run = (begin, end, k_steps, num_row_tiles)
    ring = (x_tiles, w_tiles, loaded, free)
    outputs = (bias_ptr, out_ptr, partial_ptr, arrivals_ptr, num_rows, n)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(_multiply, (ring, run, outputs, SPLITS, HAS_BIAS, 0)), (_load, (x_desc, w_desc, ring, run, PDL))],
            [1], [_LOADING_REGISTERS],
        )  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_multiply, (ring, run, outputs, SPLITS, HAS_BIAS, 0)),
                (_multiply, (ring, run, outputs, SPLITS, HAS_BIAS, 1)),
                (_load, (x_desc, w_desc, ring, run, PDL)),
            ],
            [4, 1], [REGISTERS, _LOADING_REGISTERS],
        )  # fmt: skip
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_multiply, (ring, run, outputs, SPLITS, HAS_BIAS, 0)),
                (_multiply, (ring, run, outputs, SPLITS, HAS_BIAS, 1)),
                (_multiply, (ring, run, outputs, SPLITS, HAS_BIAS, 2)),
                (_load, (x_desc, w_desc, ring, run, PDL)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, _LOADING_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (ring, run, outputs, SPLITS, HAS_BIAS, 0)),
                (_multiply, (ring, run, outputs, SPLITS, HAS_BIAS, 1)),
                (_multiply, (ring, run, outputs, SPLITS, HAS_BIAS, 2)),
                (_multiply, (ring, run, outputs, SPLITS, HAS_BIAS, 3)),
                (_load, (x_desc, w_desc, ring, run, PDL)),
            ],
            [4, 4, 4, 1], [REGISTERS, REGISTERS, REGISTERS, _LOADING_REGISTERS],
        )  # fmt: skip


@gluon.jit
def _run_of_program(k_steps, num_tiles, SPLITS: gl.constexpr):
    """The K steps of this program, numbered through all tiles: [begin, end)."""
    program = gl.program_id(0)
    if SPLITS == 0:
        each = num_tiles * k_steps // gl.num_programs(0)
        rest = num_tiles * k_steps % gl.num_programs(0)
        begin = program * each + gl.minimum(program, rest)
        end = begin + each + (program < rest).to(gl.int32)
    else:
        split = program % SPLITS
        begin = program // SPLITS * k_steps + split * k_steps // SPLITS
        end = program // SPLITS * k_steps + (split + 1) * k_steps // SPLITS
    return begin, end


@gluon.jit
def _barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """That many barriers in shared memory, each passed after so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def _grid_dependency(INSTRUCTION: gl.constexpr):
    gl.inline_asm_elementwise(INSTRUCTION + " mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _load(x_desc, w_desc, ring, run, PDL: gl.constexpr):
    """Load the tiles of each K step into the ring; the first weights before the wait for x."""
    _x_tiles, w_tiles, _loaded, free = ring
    begin, end, k_steps, num_row_tiles = run
    STAGES: gl.constexpr = w_tiles.shape[0]
    num_filled = gl.minimum(end - begin, STAGES)
    n_tile, row_tile, step = begin // k_steps // num_row_tiles, begin // k_steps % num_row_tiles, begin % k_steps
    w_n_tile, w_row_tile, w_step = n_tile, row_tile, step
    for stage in range(num_filled):
        _load_weights(w_desc, ring, stage, w_n_tile, w_step)
        w_n_tile, w_row_tile, w_step = _next(w_n_tile, w_row_tile, w_step, run)
    if PDL:
        _grid_dependency("griddepcontrol.wait;")
        _grid_dependency("griddepcontrol.launch_dependents;")
    for stage in range(num_filled):
        _load_rows(x_desc, ring, stage, row_tile, step)
        n_tile, row_tile, step = _next(n_tile, row_tile, step, run)
    for i in range(num_filled, end - begin):
        stage = i % STAGES
        mbarrier.wait(free.index(stage), (i // STAGES - 1) & 1)
        _load_weights(w_desc, ring, stage, n_tile, step)
        _load_rows(x_desc, ring, stage, row_tile, step)
        n_tile, row_tile, step = _next(n_tile, row_tile, step, run)


@gluon.jit
def _next(n_tile, row_tile, step, run):
    """Where the next K step is. Counted, not divided: the warp that loads must keep ahead."""
    _begin, _end, k_steps, num_row_tiles = run
    is_last_step = step + 1 == k_steps
    is_last_row = is_last_step & (row_tile + 1 == num_row_tiles)
    step = gl.where(is_last_step, 0, step + 1)
    row_tile = gl.where(is_last_row, 0, row_tile + is_last_step.to(gl.int32))
    return n_tile + is_last_row.to(gl.int32), row_tile, step


@gluon.jit
def _load_weights(w_desc, ring, stage, n_tile, step):
    """Begin a stage: say how much comes, and ask for the weights."""
    x_tiles, w_tiles, loaded, _free = ring
    CONSUMERS: gl.constexpr = x_tiles.shape[0] // w_tiles.shape[0]
    BLOCK_N: gl.constexpr = w_tiles.shape[1]
    BLOCK_K: gl.constexpr = w_tiles.shape[2]
    mbarrier.expect(loaded.index(stage), (BLOCK_N + CONSUMERS * 64) * BLOCK_K * 2)
    coordinates = [n_tile * BLOCK_N, step * BLOCK_K]
    tma.async_copy_global_to_shared(w_desc, coordinates, loaded.index(stage), w_tiles.index(stage))


@gluon.jit
def _load_rows(x_desc, ring, stage, row_tile, step):
    """Ask for each warpgroup's rows; those past the last are zeros."""
    x_tiles, w_tiles, loaded, _free = ring
    CONSUMERS: gl.constexpr = x_tiles.shape[0] // w_tiles.shape[0]
    BLOCK_K: gl.constexpr = w_tiles.shape[2]
    for i in gl.static_range(CONSUMERS):
        coordinates = [(row_tile * CONSUMERS + i) * 64, step * BLOCK_K]
        tma.async_copy_global_to_shared(x_desc, coordinates, loaded.index(stage), x_tiles.index(stage * CONSUMERS + i))


@gluon.jit
def _multiply(ring, run, outputs, SPLITS: gl.constexpr, HAS_BIAS: gl.constexpr, WHICH: gl.constexpr):
    """One warpgroup: its 64 rows of each tile in the run."""
    begin, end, k_steps, num_row_tiles = run
    program = gl.program_id(0)
    if SPLITS == 0:
        unit = begin
        while unit < end:
            first = unit % k_steps
            steps = gl.minimum(k_steps - first, end - unit)
            acc = _sum_products(ring, unit - begin, steps, WHICH)
            if first > 0:
                hand_over(acc, outputs, program - 1, WHICH)
            else:
                if steps < k_steps:
                    await_parts(outputs, program, WHICH, 1)
                    acc += gl.load(part(outputs, program + 1, acc, WHICH), cache_modifier=".cg")
                store(
                    acc, outputs, unit // k_steps, num_row_tiles, ring[0].shape[0] // ring[1].shape[0], HAS_BIAS, WHICH
                )
            unit += steps
    else:
        acc = _sum_products(ring, 0, end - begin, WHICH)
        first_program = program // SPLITS * SPLITS
        owner = first_program + WHICH % SPLITS
        if SPLITS > 1 and program != owner:
            hand_over(acc, outputs, owner, WHICH)
        else:
            if SPLITS > 1:
                await_parts(outputs, owner, WHICH, SPLITS - 1)
                for i in gl.static_range(SPLITS - 1):
                    other = first_program + i + (1 if i >= WHICH % SPLITS else 0)
                    acc += gl.load(part(outputs, other, acc, WHICH), cache_modifier=".cg")
            store(acc, outputs, program // SPLITS, num_row_tiles, ring[0].shape[0] // ring[1].shape[0], HAS_BIAS, WHICH)


@gluon.jit
def _sum_products(ring, done, steps, WHICH: gl.constexpr):
    """The sum over that many K steps, the ring's next; one product is always under way while the next is awaited."""
    x_tiles, w_tiles, loaded, free = ring
    STAGES: gl.constexpr = w_tiles.shape[0]
    CONSUMERS: gl.constexpr = x_tiles.shape[0] // STAGES
    BLOCK_N: gl.constexpr = w_tiles.shape[1]
    acc = gl.full([64, BLOCK_N], 0.0, gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
    for step in range(steps):
        stage = (done + step) % STAGES
        mbarrier.wait(loaded.index(stage), (done + step) // STAGES & 1)
        w = w_tiles.index(stage).permute((1, 0))
        product = hopper.warpgroup_mma(x_tiles.index(stage * CONSUMERS + WHICH), w, acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(1, [product])
        mbarrier.arrive(free.index((done + step + STAGES - 1) % STAGES), pred=step > 0)
    acc = hopper.warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(free.index((done + steps - 1) % STAGES))
    return acc
