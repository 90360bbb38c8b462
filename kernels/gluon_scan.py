"""The scan of chunks of states for Hopper in Gluon, with keys of 128 dimensions: gated delta rule, and Mamba-2.

A warpgroup holds 64 rows of one head's state, [value dimensions, key dimensions], in the registers of its tensor cores
from a row's first chunk to its last. Everything is transposed against the Triton kernels, so that each product takes
its first operand from the registers in which the product before it left it, and its second from shared memory as it
came from global memory:

    errors = v^T - (S k^T) scaled,   updates = errors transform^T        (Mamba-2: updates = v^T)
    S = S decayed + (updates scaled) k,   out^T = (S q^T) scaled + updates reads^T  (Mamba-2: + d v^T)

So nothing that a chunk computes goes through shared memory on its way to the next state. One warp loads, by TMA, as
many chunks ahead as fit. A program has one warpgroup, or two which share the loads of their head. Chunks follow each
other from a row's start, so a row that is cut at multiples of 64 gives the same bits.

Mamba-2 calls a head's x, b and c values, keys and queries here. What a chunk needs before any state is known is made
by the kernels in delta_rule.gluon_systems and mamba2.gluon_systems.

TMA boxes know no rows: a row's last chunk may bring tokens of others, or what is no number. Before its first product
its keys and values of other tokens are set to zero. Two warpgroups then write the same zeros to the same keys.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import PropagateNan

from kernels.gluon_chunks import CHUNK, FACTORS, Systems, chunks_before, clear_rows, describe_rows
from kernels.gluon_common import allocate_barriers, grid_dependency
from kernels.states import StateMetadata, StateView
from kernels.states_triton import place, row_writes, state_offsets, step_row

# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types)

_BLOCK = 64  # rows of a state in a warpgroup
_STAGES = 3  # chunks in shared memory
_D_K = 128
_LINE = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
_CHUNK = gl.constexpr(CHUNK)
_ROWS = gl.constexpr(_BLOCK)
_FACTORS = gl.constexpr(FACTORS)
_NAN = gl.constexpr(PropagateNan.ALL)
_STATE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _D_K, 16]))
_TOKENS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16]))
_OPERAND = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16]), 2))
_OPERAND_OF_STATE = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _D_K, 16]), 2))


def takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return True if the scan supports these tensors, given a device of compute capability 9.0."""
    is_half = q.dtype in (torch.bfloat16, torch.float16) and q.dtype == k.dtype == v.dtype
    is_aligned = all(x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 for x in (q, k, v))
    return is_half and is_aligned and q.shape[2] == _D_K and v.shape[2] % _BLOCK == 0


def choose_consumers(num_warpgroups: int, *, d_v: int, num_sms: int) -> int:
    """Choose for so many blocks of 64 rows of states, of all rows and heads, by measurement on an H100.

    Two warpgroups of one head share loads, by up to 4 % faster, but one each reaches more multiprocessors, by up to
    1.3 times faster. Both give the same bits.
    """
    return 2 if num_warpgroups > num_sms and d_v % (2 * _BLOCK) == 0 else 1


def scan_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    systems: Systems,
    view: StateView,
    metadata: StateMetadata,
    *,
    rows: tuple[int, int],
    short: int,
    consumers: int,
    pdl: bool,
    d: torch.Tensor | None = None,
) -> None:
    """Advance the states of rows of more than `short` tokens, and write what their tokens read to out.

    rows: the first that may be long, and how many there are from it on. Their chunks are numbered from it on.
    consumers: warpgroups of a program, 1 or 2; 64 * consumers divides d_v.
    d: [heads] fp32, the share of its values that a token reads.
    """
    (_, num_heads, d_v), (first_row, num_rows) = v.shape, rows
    matrices = (
        *(describe_rows(x.flatten(1)) for x in (q, k, v)),
        None if systems.transform is None else describe_rows(systems.transform.view(-1, CHUNK)),
        describe_rows(systems.reads.view(-1, CHUNK)),
        TensorDescriptor(
            systems.factors.view(-1, FACTORS * CHUNK), [systems.factors.numel() // (FACTORS * CHUNK), FACTORS * CHUNK],
            [FACTORS * CHUNK, 1], [1, FACTORS * CHUNK], _LINE,
        ),
    )  # fmt: skip
    _scan_kernel[(d_v // (_BLOCK * consumers), num_heads, num_rows)](
        *matrices, d, out, metadata.query_start_loc, metadata.seq_lens, metadata.req_index, metadata.writes, first_row,
        view.pool, metadata.pages, metadata.pages.stride(0), *place(view),
        NUM_HEADS=num_heads, REPEAT=num_heads // q.shape[1], D_V=d_v, CONSUMERS=consumers,
        STAGES=_STAGES, SHORT=short, PDL=pdl,
        num_warps=4, launch_pdl=pdl, maxnreg=168 if consumers == 2 else 144,
    )  # fmt: skip


@jit
def advance(
    scanning, scope, CONSUMERS: gl.constexpr, WHICH: gl.constexpr, NUM_LANES: gl.constexpr, PIECE: gl.constexpr,
    ROW_SIZE: gl.constexpr, HAS_ERRORS: gl.constexpr,
):  # fmt: skip
    """One warpgroup: all chunks of a row, 64 rows of one head's state."""
    d_ptr, out_ptr, out_tiles, rings, rest, stride_out, d_v = scanning
    pool_ptr, pages_ptr, first, num_tokens, num_chunks, column, has_state, may_write, first_piece, num_pages = scope
    column = column + WHICH * _ROWS
    tiles, _loaded, free = rings
    q_tiles, k_tiles, v_tiles, transform_tiles, read_tiles, factor_tiles = tiles
    STAGES: gl.constexpr = k_tiles.shape[0]
    dtype: gl.constexpr = k_tiles.dtype
    zeros = gl.full([_ROWS, _CHUNK], 0.0, gl.float32, _TOKENS)
    dims = gl.arange(0, ROW_SIZE, gl.SliceLayout(0, _STATE))
    rows = column + gl.arange(0, _ROWS, gl.SliceLayout(1, _STATE))
    # A row that neither has nor writes a state may have no page
    in_state = (rows >= 0) & (has_state | may_write)
    offsets = state_offsets(pages_ptr, rows, in_state, first_piece, num_pages, NUM_LANES, PIECE, ROW_SIZE)
    state_ptrs = pool_ptr + offsets[:, None] + dims[None, :]
    in_state = (rows >= 0)[:, None] & (dims >= 0)[None, :]
    state = gl.load(state_ptrs, mask=in_state & has_state, other=0.0)
    for chunk in range(num_chunks):
        stage = chunk % STAGES
        left = num_tokens - chunk * _CHUNK
        _wait_for(rings, rest, chunk, left, CONSUMERS, WHICH)
        start = gl.convert_layout(state.to(dtype), _OPERAND)
        queries = q_tiles.index(stage).permute((1, 0))
        v = v_tiles.index(stage * CONSUMERS + WHICH).permute((1, 0))
        factors = stage * _FACTORS
        if HAS_ERRORS:
            keys = k_tiles.index(stage).permute((1, 0))
            errors = hopper.warpgroup_mma(start, keys, zeros, use_acc=False, is_async=True)
            read = hopper.warpgroup_mma(start, queries, zeros, use_acc=False, is_async=True)
            k_first = factor_tiles.index(factors).load(gl.SliceLayout(0, _TOKENS))
            values = v.load(_TOKENS).to(gl.float32)
            errors = hopper.warpgroup_mma_wait(1, [errors])
            errors = gl.convert_layout((values - errors * k_first[None, :]).to(dtype), _OPERAND)
            transform = transform_tiles.index(stage).permute((1, 0))
            updates = hopper.warpgroup_mma(errors, transform, zeros, use_acc=False, is_async=True)
            state = state * factor_tiles.index(factors + 3).load(gl.SliceLayout(1, _STATE))[:, None]
            updates, read, start, errors = hopper.warpgroup_mma_wait(0, [updates, read, start, errors])
        else:
            read = hopper.warpgroup_mma(start, queries, zeros, use_acc=False, is_async=True)
            _decay_reads(read_tiles.index(stage), factor_tiles.index(factors), factor_tiles.index(factors + 1))
            updates = v.load(_TOKENS).to(gl.float32)
            state = state * factor_tiles.index(factors + 3).load(gl.SliceLayout(1, _STATE))[:, None]
        held = gl.convert_layout(updates.to(dtype), _OPERAND)
        reads = read_tiles.index(stage).permute((1, 0))
        within = hopper.warpgroup_mma(held, reads, zeros, use_acc=False, is_async=True)
        k_last = factor_tiles.index(factors + 2).load(gl.SliceLayout(0, _TOKENS))
        added = gl.convert_layout((updates * k_last[None, :]).to(dtype), _OPERAND_OF_STATE)
        state = hopper.warpgroup_mma(added, k_tiles.index(stage), state, is_async=True)
        if HAS_ERRORS:
            q_first = factor_tiles.index(factors + 1).load(gl.SliceLayout(0, _TOKENS))
            within, held = hopper.warpgroup_mma_wait(1, [within, held])
            out = read * q_first[None, :] + within
        else:
            q_first = gl.exp2(factor_tiles.index(factors).load(gl.SliceLayout(0, _TOKENS)))
            within, held, read, start = hopper.warpgroup_mma_wait(1, [within, held, read, start])
            out = read * q_first[None, :] + within + v.load(_TOKENS).to(gl.float32) * gl.load(d_ptr + column // d_v)
        first_token = first + chunk * _CHUNK
        _store(out, out_tiles.index(WHICH), out_ptr, stride_out, first_token, left, column)
        state, added = hopper.warpgroup_mma_wait(0, [state, added])
        mbarrier.arrive(free.index(stage))
    gl.store(state_ptrs, state, mask=in_state & may_write)


@jit
def _decay_reads(tile, sums, shifted) -> None:
    """Let a tile of Mamba-2's products c_i.b_j, zeros for j > i, be of reads: times the decay from j to i, and dt_j.

    sums: logarithms of the decay from the chunk's start; shifted: less that of dt.
    """
    rows, columns = sums.load(gl.SliceLayout(1, _TOKENS)), shifted.load(gl.SliceLayout(0, _TOKENS))
    # Above the diagonal the power may be infinite; below it is at most dt
    power = gl.exp2(gl.minimum(rows[:, None] - columns[None, :], 100.0, propagate_nan=_NAN))
    reads = (tile.load(_TOKENS).to(gl.float32) * power).to(tile.dtype)
    gl.thread_barrier()
    tile.store(reads)
    hopper.fence_async_shared()
    gl.thread_barrier()


@jit
def _wait_for(rings, rest, chunk, left, CONSUMERS: gl.constexpr, WHICH: gl.constexpr) -> None:
    """Wait until a chunk is loaded, and set to zero what its keys and values have of tokens behind the `left` ones."""
    tiles, loaded, _free = rings
    k_parts, v_parts = rest
    STAGES: gl.constexpr = tiles[1].shape[0]
    PANELS: gl.constexpr = tiles[1].shape[2] // 64
    stage = chunk % STAGES
    mbarrier.wait(loaded.index(stage), (chunk // STAGES) & 1)
    if left < _CHUNK:
        clear_rows(k_parts, stage * PANELS, left, PANELS)
        clear_rows(v_parts, stage * CONSUMERS + WHICH, left, 1)
        hopper.fence_async_shared()
        gl.thread_barrier()


@jit
def _store(out, tile, out_ptr, stride_out, first, left, column) -> None:
    """Write what a chunk's tokens read, [64 dimensions, CHUNK], by way of shared memory, 16 bytes a thread."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    gl.thread_barrier()  # all threads have read the chunk before
    tile.permute((1, 0)).store(out.to(tile.dtype))
    gl.thread_barrier()
    tokens = gl.arange(0, _CHUNK, gl.SliceLayout(1, LINES))
    dims = column + gl.arange(0, _ROWS, gl.SliceLayout(0, LINES))
    targets = out_ptr + (first + tokens).to(gl.int64)[:, None] * stride_out + dims[None, :]
    gl.store(targets, tile.load(LINES), mask=(tokens < left)[:, None] & (dims >= 0)[None, :])


@jit
def _load(
    loading, NUM_HEADS: gl.constexpr, REPEAT: gl.constexpr, CONSUMERS: gl.constexpr, HAS_ERRORS: gl.constexpr,
):  # fmt: skip
    """Load the chunks of a row, one after the other, as soon as a stage is free."""
    descs, boxes, rings, first, num_chunks, index, head, column = loading
    q_desc, k_desc, v_desc, transform_desc, reads_desc, factors_desc = descs
    q_boxes, k_boxes = boxes
    tiles, loaded, free = rings
    _q_tiles, k_tiles, v_tiles, transform_tiles, read_tiles, factor_tiles = tiles
    STAGES: gl.constexpr = k_tiles.shape[0]
    PANELS: gl.constexpr = k_tiles.shape[2] // 64
    SQUARES: gl.constexpr = 2 * PANELS + 1 + CONSUMERS + HAS_ERRORS
    key_column = head // REPEAT * (PANELS * 64)
    for chunk in range(num_chunks):
        stage = chunk % STAGES
        barrier = loaded.index(stage)
        mbarrier.wait(free.index(stage), ((chunk // STAGES) & 1) ^ 1)
        mbarrier.expect(barrier, SQUARES * _CHUNK * 128 + _FACTORS * _CHUNK * 4)
        token = first + chunk * _CHUNK
        system = (index + chunk) * NUM_HEADS + head
        for panel in gl.static_range(PANELS):
            box = [token, key_column + panel * 64]
            tma.async_copy_global_to_shared(k_desc, box, barrier, k_boxes.index(stage * PANELS + panel))
        tma.async_copy_global_to_shared(factors_desc, [system, 0], barrier, factor_tiles.index(stage))
        for i in gl.static_range(CONSUMERS):
            box = [token, column + i * 64]
            tma.async_copy_global_to_shared(v_desc, box, barrier, v_tiles.index(stage * CONSUMERS + i))
        if HAS_ERRORS:
            box = [system * _CHUNK, 0]
            tma.async_copy_global_to_shared(transform_desc, box, barrier, transform_tiles.index(stage))
        for panel in gl.static_range(PANELS):
            box = [token, key_column + panel * 64]
            tma.async_copy_global_to_shared(q_desc, box, barrier, q_boxes.index(stage * PANELS + panel))
        square = system
        if not HAS_ERRORS:  # products of a group
            square = (index + chunk) * (NUM_HEADS // REPEAT) + head // REPEAT
        tma.async_copy_global_to_shared(reads_desc, [square * _CHUNK, 0], barrier, read_tiles.index(stage))


@gluon.jit(do_not_specialize=["first_row", "first_piece"])
def _scan_kernel(
    q_desc, k_desc, v_desc, transform_desc, reads_desc, factors_desc, d_ptr, out_ptr,
    query_start_ptr, seq_lens_ptr, req_index_ptr, writes_ptr, first_row,
    pool_ptr, pages_ptr, stride_pages, first_piece, num_pages,
    NUM_LANES: gl.constexpr, PIECE: gl.constexpr, ROW_SIZE: gl.constexpr,
    NUM_HEADS: gl.constexpr, REPEAT: gl.constexpr, D_V: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    SHORT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """All chunks of one row, some rows of one head's state: set up shared memory, then specialise."""
    PANELS: gl.constexpr = ROW_SIZE // 64
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_boxes = gl.allocate_shared_memory(q_desc.dtype, [STAGES * PANELS, _CHUNK, 64], q_desc.layout)
    k_boxes = gl.allocate_shared_memory(k_desc.dtype, [STAGES * PANELS, _CHUNK, 64], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(v_desc.dtype, [STAGES * CONSUMERS, _CHUNK, 64], v_desc.layout)
    HAS_ERRORS: gl.constexpr = transform_desc is not None
    transform_tiles = v_tiles  # unused
    if HAS_ERRORS:
        transform_tiles = gl.allocate_shared_memory(v_desc.dtype, [STAGES, _CHUNK, _CHUNK], v_desc.layout)
    read_tiles = gl.allocate_shared_memory(reads_desc.dtype, [STAGES, _CHUNK, _CHUNK], reads_desc.layout)
    lines = gl.allocate_shared_memory(gl.float32, [STAGES, 1, _FACTORS * _CHUNK], factors_desc.layout)
    q_tiles = q_boxes._reinterpret(q_desc.dtype, [STAGES, _CHUNK, ROW_SIZE], q_desc.layout)
    k_tiles = k_boxes._reinterpret(k_desc.dtype, [STAGES, _CHUNK, ROW_SIZE], k_desc.layout)
    factor_tiles = lines._reinterpret(gl.float32, [STAGES * _FACTORS, _CHUNK], FLAT)
    out_tiles = gl.allocate_shared_memory(out_ptr.dtype.element_ty, [CONSUMERS, _CHUNK, 64], v_desc.layout)
    loaded, free = allocate_barriers(STAGES, 1), allocate_barriers(STAGES, CONSUMERS)
    hopper.fence_async_shared()  # barriers are set up, also for the copy engine
    if PDL:
        grid_dependency("griddepcontrol.wait;")
        grid_dependency("griddepcontrol.launch_dependents;")
    row, head = gl.program_id(2), gl.program_id(1)
    index = chunks_before(query_start_ptr, seq_lens_ptr, first_row, row, SHORT)
    first, num_tokens, has_state, is_padding = step_row(query_start_ptr, seq_lens_ptr, first_row + row)
    is_long = (num_tokens > SHORT) & (is_padding == 0)
    num_chunks = gl.where(is_long, gl.cdiv(num_tokens, _CHUNK), 0)
    may_write = row_writes(writes_ptr, first_row + row) & is_long
    has_state = has_state & is_long
    pages = pages_ptr + gl.load(req_index_ptr + first_row + row).to(gl.int64) * stride_pages
    columns = gl.program_id(0) * (CONSUMERS * 64)
    tiles = (q_tiles, k_tiles, v_tiles, transform_tiles, read_tiles, factor_tiles)
    loads = (q_tiles, k_tiles, v_tiles, transform_tiles, read_tiles, lines)
    parts = (
        k_boxes._reinterpret(k_desc.dtype, [STAGES * PANELS * 8, 8, 64], k_desc.layout),
        v_tiles._reinterpret(v_desc.dtype, [STAGES * CONSUMERS * 8, 8, 64], v_desc.layout),
    )
    scanning = (d_ptr, out_ptr, out_tiles, (tiles, loaded, free), parts, NUM_HEADS * D_V, D_V)
    scope = (
        pool_ptr, pages, first, num_tokens, num_chunks, head * D_V + columns, has_state, may_write,
        first_piece, num_pages,
    )  # fmt: skip
    loading = (
        (q_desc, k_desc, v_desc, transform_desc, reads_desc, factors_desc), (q_boxes, k_boxes), (loads, loaded, free),
        first, num_chunks, index, head, head * D_V + columns,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (advance, (scanning, scope, CONSUMERS, 0, NUM_LANES, PIECE, ROW_SIZE, HAS_ERRORS)),
            (advance, (scanning, scope, CONSUMERS, 1, NUM_LANES, PIECE, ROW_SIZE, HAS_ERRORS)),
            (_load, (loading, NUM_HEADS, REPEAT, CONSUMERS, HAS_ERRORS)),
        ]
        if CONSUMERS == 2
        else [
            (advance, (scanning, scope, CONSUMERS, 0, NUM_LANES, PIECE, ROW_SIZE, HAS_ERRORS)),
            (_load, (loading, NUM_HEADS, REPEAT, CONSUMERS, HAS_ERRORS)),
        ],
        [4, 1] if CONSUMERS == 2 else [1],
        # Registers; the first warpgroup gets the rest
        [232, 40] if CONSUMERS == 2 else [40],
    )
