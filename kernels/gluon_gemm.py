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
    total = num_row_tiles * num_n_tiles * k_steps
    begin = gl.program_id(0) * total // gl.num_programs(0)
    end = (gl.program_id(0) + 1) * total // gl.num_programs(0)
    run = (begin, end, k_steps, num_row_tiles)
    ring = (x_tiles, w_tiles, loaded, free)
    outputs = (bias_ptr, out_ptr, partial_ptr, arrivals_ptr, num_rows, n)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(_multiply, (ring, run, outputs, SPLITS, HAS_BIAS, 0)), (_load, (x_desc, w_desc, ring, run, PDL))],
            [1],
            [_LOADING_REGISTERS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_multiply, (ring, run, outputs, SPLITS, HAS_BIAS, 0)),
                (_multiply, (ring, run, outputs, SPLITS, HAS_BIAS, 1)),
                (_load, (x_desc, w_desc, ring, run, PDL)),
            ],
            [4, 1],
            [REGISTERS, _LOADING_REGISTERS],
        )
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_multiply, (ring, run, outputs, SPLITS, HAS_BIAS, 0)),
                (_multiply, (ring, run, outputs, SPLITS, HAS_BIAS, 1)),
                (_multiply, (ring, run, outputs, SPLITS, HAS_BIAS, 2)),
                (_load, (x_desc, w_desc, ring, run, PDL)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, _LOADING_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (ring, run, outputs, SPLITS, HAS_BIAS, 0)),
                (_multiply, (ring, run, outputs, SPLITS, HAS_BIAS, 1)),
                (_multiply, (ring, run, outputs, SPLITS, HAS_BIAS, 2)),
                (_multiply, (ring, run, outputs, SPLITS, HAS_BIAS, 3)),
                (_load, (x_desc, w_desc, ring, run, PDL)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, _LOADING_REGISTERS],
        )


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
    x_tiles, w_tiles, loaded, free = ring
    begin, end, k_steps, num_row_tiles = run
    STAGES: gl.constexpr = w_tiles.shape[0]
    filled = gl.minimum(end, begin + STAGES)
    for unit in range(begin, filled):
        _load_weights(w_desc, ring, unit, unit - begin, k_steps, num_row_tiles)
    if PDL:
        _grid_dependency("griddepcontrol.wait;")
        _grid_dependency("griddepcontrol.launch_dependents;")
    for unit in range(begin, filled):
        _load_rows(x_desc, ring, unit, unit - begin, k_steps, num_row_tiles)
    for unit in range(filled, end):
        stage = (unit - begin) % STAGES
        mbarrier.wait(free.index(stage), ((unit - begin) // STAGES - 1) & 1)
        _load_weights(w_desc, ring, unit, stage, k_steps, num_row_tiles)
        _load_rows(x_desc, ring, unit, stage, k_steps, num_row_tiles)


@gluon.jit
def _load_weights(w_desc, ring, unit, stage, k_steps, num_row_tiles):
    """Begin a stage: say how much comes, and ask for the weights."""
    x_tiles, w_tiles, loaded, _free = ring
    CONSUMERS: gl.constexpr = x_tiles.shape[0] // w_tiles.shape[0]
    BLOCK_N: gl.constexpr = w_tiles.shape[1]
    BLOCK_K: gl.constexpr = w_tiles.shape[2]
    mbarrier.expect(loaded.index(stage), (BLOCK_N + CONSUMERS * 64) * BLOCK_K * 2)
    feature = unit // k_steps // num_row_tiles * BLOCK_N
    tma.async_copy_global_to_shared(
        w_desc, [feature, unit % k_steps * BLOCK_K], loaded.index(stage), w_tiles.index(stage)
    )


@gluon.jit
def _load_rows(x_desc, ring, unit, stage, k_steps, num_row_tiles):
    """Ask for each warpgroup's rows; those past the last are zeros."""
    x_tiles, w_tiles, loaded, _free = ring
    CONSUMERS: gl.constexpr = x_tiles.shape[0] // w_tiles.shape[0]
    BLOCK_K: gl.constexpr = w_tiles.shape[2]
    row = unit // k_steps % num_row_tiles * (CONSUMERS * 64)
    for i in gl.static_range(CONSUMERS):
        tma.async_copy_global_to_shared(
            x_desc, [row + i * 64, unit % k_steps * BLOCK_K], loaded.index(stage), x_tiles.index(stage * CONSUMERS + i)
        )


@gluon.jit
def _multiply(ring, run, outputs, SPLITS: gl.constexpr, HAS_BIAS: gl.constexpr, WHICH: gl.constexpr):
    """One warpgroup: its 64 rows of each tile in the run."""
    x_tiles, w_tiles, _loaded, _free = ring
    begin, end, k_steps, num_row_tiles = run
    CONSUMERS: gl.constexpr = x_tiles.shape[0] // w_tiles.shape[0]
    BLOCK_N: gl.constexpr = w_tiles.shape[1]
    unit = begin
    while unit < end:
        tile = unit // k_steps
        first = unit % k_steps
        steps = gl.minimum(k_steps - first, end - unit)
        acc = _sum_products(ring, unit - begin, steps, WHICH)
        row = (tile % num_row_tiles * CONSUMERS + WHICH) * 64
        feature = tile // num_row_tiles * BLOCK_N
        program = gl.program_id(0)
        if SPLITS > 1:
            owner = program // SPLITS * SPLITS + WHICH % SPLITS
            if program == owner:
                _await_parts(outputs, owner, WHICH, SPLITS - 1)
                for i in gl.static_range(SPLITS - 1):
                    other = i + (1 if i >= WHICH % SPLITS else 0)
                    acc += gl.load(_part(outputs, program // SPLITS * SPLITS + other, acc, WHICH), cache_modifier=".cg")
                _store(acc, outputs, row, feature, HAS_BIAS)
            else:
                _hand_over(acc, outputs, owner, WHICH)
        elif SPLITS == 0 and first > 0:
            _hand_over(acc, outputs, program - 1, WHICH)
        else:
            if SPLITS == 0 and steps < k_steps:
                _await_parts(outputs, program, WHICH, 1)
                acc += gl.load(_part(outputs, program + 1, acc, WHICH), cache_modifier=".cg")
            _store(acc, outputs, row, feature, HAS_BIAS)
        unit += steps


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


@gluon.jit
def _part(outputs, program, acc, WHICH: gl.constexpr):
    """Where a program's 64 rows of sums stand. Scalar part first: what is left is a constant of each register."""
    _bias_ptr, _out_ptr, partial_ptr, _arrivals_ptr, _num_rows, _n = outputs
    BLOCK_N: gl.constexpr = acc.shape[1]
    lines = gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout))
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, acc.type.layout))
    return partial_ptr + (program * 32768 + WHICH * (64 * BLOCK_N)) + (lines[:, None] * BLOCK_N + columns[None, :])


@gluon.jit
def _hand_over(acc, outputs, owner, WHICH: gl.constexpr):
    """Leave the sums to that program."""
    _bias_ptr, _out_ptr, _partial_ptr, arrivals_ptr, _num_rows, _n = outputs
    gl.store(_part(outputs, gl.program_id(0), acc, WHICH), acc)
    gl.thread_barrier()
    gl.atomic_add(arrivals_ptr + owner * 4 + WHICH, 1, sem="release")


@gluon.jit
def _await_parts(outputs, owner, WHICH: gl.constexpr, NUMBER: gl.constexpr):
    """Wait until so many other programs have left their sums, which they all do; then make ready for the next launch."""
    _bias_ptr, _out_ptr, _partial_ptr, arrivals_ptr, _num_rows, _n = outputs
    arrivals = arrivals_ptr + owner * 4 + WHICH
    arrived = gl.atomic_add(arrivals, 0, sem="acquire")
    while arrived < NUMBER:
        arrived = gl.atomic_add(arrivals, 0, sem="acquire")
    gl.store(arrivals, 0)


@gluon.constexpr_function
def _line_layout(block_n):
    """Rows as wgmma's warps and lanes have them, but 8 columns in a thread: reached by shuffles within a quad."""
    columns = [[0, 1 << bit] for bit in range(block_n.bit_length() - 1)]
    registers = [*columns[:3], [8, 0], *columns[5:]]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, block_n])


@gluon.jit
def _store(acc, outputs, first_row, first_feature, HAS_BIAS: gl.constexpr):
    """Add the bias and store, rounded to the output's dtype."""
    bias_ptr, out_ptr, _partial_ptr, _arrivals_ptr, num_rows, n = outputs
    BLOCK_N: gl.constexpr = acc.shape[1]
    if HAS_BIAS:
        sources = first_feature + gl.arange(0, BLOCK_N, gl.SliceLayout(0, acc.type.layout))
        acc += gl.load(bias_ptr + sources, mask=sources < n, other=0.0).to(gl.float32)[None, :]
    LINES: gl.constexpr = _line_layout(BLOCK_N)
    lines = gl.arange(0, 64, gl.SliceLayout(1, LINES))
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LINES))
    values = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), LINES)
    rows = out_ptr + (first_row * n + first_feature) + lines * n
    in_rows, in_features = first_row + lines < num_rows, first_feature + columns < n
    gl.store(rows[:, None] + columns[None, :], values, mask=in_rows[:, None] & in_features[None, :])
