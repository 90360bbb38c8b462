"""The first phase of the chunked gated delta rule for Hopper in Gluon, for the scan in kernels.gluon_scan.

It computes what triton_chunk_systems does with one gate for each token, a warp for each chunk of a value head. Matrices
are in blocks of 16 x 16: those above the diagonal are left out, and an inverse is of small products, of which none
waits for another warp. Queries and keys come by TMA, and systems leave by it from where they were.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.delta_rule.triton_chunks import rows_of_prompts
from kernels.gluon_chunks import CHUNK, FACTORS, Systems, add, describe_rows, find_chunk
from kernels.gluon_common import allocate_barriers, grid_dependency
from kernels.gluon_scan import choose_consumers, scan_chunks
from kernels.states import StateMetadata, StateView

# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types)

_SIDE = gl.constexpr(16)  # of a block
_CHUNK = gl.constexpr(CHUNK)
_FACTORS = gl.constexpr(FACTORS)
_LOG2_E = gl.constexpr(1.4426950408889634)
_BLOCK = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
_LEFT = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]), 2))
_RIGHT = gl.constexpr(gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]), 2))
_ROWS = gl.constexpr(gl.SliceLayout(1, gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])))
_COLUMNS = gl.constexpr(gl.SliceLayout(0, gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])))
_PAIRS = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))
_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2))


def advance_on_hopper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    out: torch.Tensor,
    view: StateView,
    metadata: StateMetadata,
    *,
    scale: float,
    eps: float,
    short: int,
    num_sms: int = 132,
    consumers: int | None = None,
    pdl: bool = False,
) -> None:
    """Equal triton_chunks.advance_by_chunks for tensors that gluon_scan.takes allows, and one gate for each token.

    consumers: as scan_chunks has them; None for the served ones.
    """
    rows = rows_of_prompts(metadata)
    (num_tokens, num_heads, d_v), num_rows = v.shape, rows[1]
    if num_rows == 0:
        return
    # Every row may have one chunk that is not full
    most = min(num_tokens // CHUNK + num_rows, num_rows * -(-metadata.max_query_len // CHUNK))
    step = (metadata.query_start_loc, metadata.seq_lens)
    systems = prepare_systems(q, k, g, beta, step, rows, most, short=short, scale=scale, eps=eps, pdl=pdl)
    consumers = consumers or choose_consumers(num_rows * num_heads * (d_v // CHUNK), d_v=d_v, num_sms=num_sms)
    scan_chunks(q, k, v, out, systems, view, metadata, rows=rows, short=short, consumers=consumers, pdl=pdl)


def prepare_systems(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    step: tuple[torch.Tensor, torch.Tensor],
    rows: tuple[int, int],
    most: int,
    *,
    short: int,
    scale: float,
    eps: float,
    pdl: bool,
) -> Systems:
    """Launch for `most` chunks of tensors that gluon_scan.takes allows.

    step: query_start_loc, seq_lens; rows: the first that may have more than `short` tokens, and how many there are.
    """
    num_heads = beta.shape[1]
    transform = q.new_empty(most, num_heads, CHUNK, CHUNK)
    reads = torch.empty_like(transform)
    factors = q.new_empty(most, num_heads, FACTORS * CHUNK, dtype=torch.float32)
    _systems_kernel[(num_heads, most)](
        *(describe_rows(x) for x in (q.flatten(1), k.flatten(1), transform.view(-1, CHUNK), reads.view(-1, CHUNK))),
        g, beta, factors, scale, eps, *step, *rows,
        NUM_HEADS=num_heads, REPEAT=num_heads // q.shape[1], SHORT=short, PDL=pdl,
        num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return Systems(transform, reads, factors)


@jit
def _product(left, right, ROW: gl.constexpr, COLUMN: gl.constexpr):
    """Return a block of left times right transposed, [16, 16], each of two panels of 64 columns."""
    product = gl.full([_SIDE, _SIDE], 0.0, gl.float32, _BLOCK)
    for panel in gl.static_range(2):
        rows = left.index(panel).slice(_SIDE * ROW, _SIDE).load(_LEFT)
        columns = right.index(panel).slice(_SIDE * COLUMN, _SIDE).permute((1, 0)).load(_RIGHT)
        product = mma_v2(rows, columns, product)
    return product


@jit
def _norms(x, ROW: gl.constexpr, eps):
    """Return 1 / sqrt(x.x + eps) of a block of rows."""
    rows, columns = gl.arange(0, _SIDE, _ROWS)[:, None], gl.arange(0, _SIDE, _COLUMNS)[None, :]
    return gl.rsqrt(gl.sum(gl.where(rows == columns, _product(x, x, ROW, ROW), 0.0), 1) + eps)


@jit
def _join(a, b, c, d):
    """Return four blocks side by side."""
    joined = gl.join(gl.join(a, c), gl.join(b, d))  # [row, column, second bit, first bit]
    return gl.permute(joined, (0, 2, 3, 1)).reshape([_SIDE, _CHUNK])


@jit
def _times(left, right):
    """Return the product of a block in registers, as half precision, and a tile of a block."""
    zeros = gl.full([_SIDE, _SIDE], 0.0, gl.float32, _BLOCK)
    return mma_v2(gl.convert_layout(left.to(gl.float16), _LEFT), right.load(_RIGHT), zeros)


@jit
def _times_add(left, right, added):
    """Return that product plus added."""
    return mma_v2(gl.convert_layout(left.to(gl.float16), _LEFT), right.load(_RIGHT), added)


@jit
def _read_block(queries, keys, lines, ROW: gl.constexpr, COLUMN: gl.constexpr):
    """Return a block of what tokens read of updates before them; zeros above the diagonal."""
    block = gl.full([_SIDE, _SIDE], 0.0, gl.float32, _BLOCK)
    if ROW >= COLUMN:
        block = _product(queries, keys, ROW, COLUMN)
        rows, columns = lines.index(0).slice(_SIDE * ROW, _SIDE), lines.index(0).slice(_SIDE * COLUMN, _SIDE)
        decay = gl.exp2(rows.load(_ROWS)[:, None] - columns.load(_COLUMNS)[None, :])
        decay = decay * lines.index(2).slice(_SIDE * COLUMN, _SIDE).load(_COLUMNS)[None, :]
        block = block * decay * lines.index(3).slice(_SIDE * ROW, _SIDE).load(_ROWS)[:, None]
        if ROW == COLUMN:
            places, others = gl.arange(0, _SIDE, _ROWS), gl.arange(0, _SIDE, _COLUMNS)
            block = gl.where(places[:, None] >= others[None, :], block, 0.0)
    return block


@jit
def _system_block(keys, lines, end, first, ROW: gl.constexpr, COLUMN: gl.constexpr):
    """Return a block of minus the system's matrix, on or below the diagonal."""
    block = _product(keys, keys, ROW, COLUMN)
    rows, columns = lines.index(0).slice(_SIDE * ROW, _SIDE), lines.index(0).slice(_SIDE * COLUMN, _SIDE)
    decay = gl.exp2(rows.load(_ROWS)[:, None] - columns.load(_COLUMNS)[None, :])
    decay = decay * lines.index(2).slice(_SIDE * COLUMN, _SIDE).load(_COLUMNS)[None, :]
    strengths = lines.index(1).slice(_SIDE * ROW, _SIDE).load(_ROWS)
    strengths = strengths * lines.index(2).slice(_SIDE * ROW, _SIDE).load(_ROWS)
    block = block * decay * (0.0 - strengths)[:, None]
    # Behind the row's end a product may be no number
    places = _SIDE * ROW + gl.arange(0, _SIDE, _ROWS)[:, None]
    others = _SIDE * COLUMN + gl.arange(0, _SIDE, _COLUMNS)[None, :]
    return gl.where((places > others) & (first + places < end), block, 0.0)


@jit
def _start_inverse(negative):
    """Return the inverse of a diagonal block's pairs of tokens."""
    rows, columns = gl.arange(0, _SIDE, _ROWS)[:, None], gl.arange(0, _SIDE, _COLUMNS)[None, :]
    return gl.where(rows == columns, 1.0, gl.where((rows >> 1) == (columns >> 1), negative, 0.0))


@jit
def _store_row(tile, a, b, c, d, ROW: gl.constexpr) -> None:
    tile.slice(_SIDE * ROW, _SIDE).store(_join(a, b, c, d).to(tile.dtype))


@gluon.jit(do_not_specialize=["first_row", "num_rows"])
def _systems_kernel(
    q_desc, k_desc, transform_desc, reads_desc, g_ptr, beta_ptr, factors_ptr, scale, eps,
    query_start_ptr, seq_lens_ptr, first_row, num_rows,
    NUM_HEADS: gl.constexpr, REPEAT: gl.constexpr, SHORT: gl.constexpr, PDL: gl.constexpr,
) -> None:  # fmt: skip
    """One chunk of one value head."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = q_desc.dtype
    queries = gl.allocate_shared_memory(dtype, [2, _CHUNK, 64], q_desc.layout)
    keys = gl.allocate_shared_memory(dtype, [2, _CHUNK, 64], k_desc.layout)
    # Sums of gates, betas, norms of keys and of queries
    lines = gl.allocate_shared_memory(gl.float32, [4, _CHUNK], FLAT)
    # Blocks on and below the diagonal, row by row, where the second half of the queries and the first of the keys were
    lower = queries._reinterpret(gl.float16, [32, _SIDE, _SIDE], _TILE)
    inverse = keys._reinterpret(gl.float16, [32, _SIDE, _SIDE], _TILE)
    loaded = allocate_barriers(1, 1)
    if PDL:
        grid_dependency("griddepcontrol.wait;")
        grid_dependency("griddepcontrol.launch_dependents;")
    head, index = gl.program_id(0), gl.program_id(1)
    first, end = find_chunk(query_start_ptr, seq_lens_ptr, first_row, num_rows, index, SHORT)
    if first < end:
        hopper.fence_async_shared()  # the barrier is set up, also for the copy engine
        gl.thread_barrier()
        mbarrier.expect(loaded.index(0), 4 * _CHUNK * 128)
        for panel in gl.static_range(2):
            box = [first, head // REPEAT * 128 + panel * 64]
            tma.async_copy_global_to_shared(k_desc, box, loaded.index(0), keys.index(panel))
            tma.async_copy_global_to_shared(q_desc, box, loaded.index(0), queries.index(panel))
        places = gl.arange(0, _CHUNK, _PAIRS)
        tokens = (first + places).to(gl.int64) * NUM_HEADS + head
        is_token = first + places < end
        beta = gl.load(beta_ptr + tokens, mask=is_token, other=0.0)
        g = gl.load(g_ptr + tokens, mask=is_token, other=0.0) * _LOG2_E
        sums, whole = gl.associative_scan(g, 0, add), gl.sum(g, 0)
        lines.index(0).store(sums)
        lines.index(1).store(beta)
        mbarrier.wait(loaded.index(0), 0)
        for i in gl.static_range(4):
            lines.index(2).slice(_SIDE * i, _SIDE).store(_norms(keys, i, eps))
            lines.index(3).slice(_SIDE * i, _SIDE).store(_norms(queries, i, eps) * scale)
        gl.thread_barrier()
        k_norms = gl.where(is_token, lines.index(2).load(_PAIRS), 0.0)
        system = index * NUM_HEADS + head
        factors = factors_ptr + system.to(gl.int64) * (_FACTORS * _CHUNK) + places
        from_start = gl.exp2(sums)
        gl.store(factors, k_norms * from_start)
        gl.store(factors + _CHUNK, lines.index(3).load(_PAIRS) * from_start)
        gl.store(factors + 2 * _CHUNK, k_norms * gl.exp2(whole - sums))
        gl.store(factors + 3 * _CHUNK, gl.exp2(whole + 0.0 * sums))
        reads, transform = queries.index(0), keys.index(1)
        for i in gl.static_range(4):
            r0, r1 = _read_block(queries, keys, lines, i, 0), _read_block(queries, keys, lines, i, 1)
            r2, r3 = _read_block(queries, keys, lines, i, 2), _read_block(queries, keys, lines, i, 3)
            gl.thread_barrier()  # these queries are read, and reads take their place
            _store_row(reads, r0, r1, r2, r3, i)
        hopper.fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(reads_desc, [system * _CHUNK, 0], reads)
        for i in gl.static_range(4):
            for j in gl.static_range(i):
                block = _system_block(keys, lines, end, first, i, j)
                lower.index(16 + i * (i + 1) // 2 + j).store(block.to(gl.float16))
        n0, n1 = _system_block(keys, lines, end, first, 0, 0), _system_block(keys, lines, end, first, 1, 1)
        n2, n3 = _system_block(keys, lines, end, first, 2, 2), _system_block(keys, lines, end, first, 3, 3)
        lower.index(16).store(n0.to(gl.float16))
        lower.index(18).store(n1.to(gl.float16))
        lower.index(21).store(n2.to(gl.float16))
        lower.index(25).store(n3.to(gl.float16))
        p0, p1, p2, p3 = _start_inverse(n0), _start_inverse(n1), _start_inverse(n2), _start_inverse(n3)
        rows, columns = gl.arange(0, _SIDE, _ROWS)[:, None], gl.arange(0, _SIDE, _COLUMNS)[None, :]
        for log in gl.static_range(1, 4):
            gl.thread_barrier()
            inverse.index(0).store(p0.to(gl.float16))
            inverse.index(2).store(p1.to(gl.float16))
            inverse.index(5).store(p2.to(gl.float16))
            inverse.index(9).store(p3.to(gl.float16))
            gl.thread_barrier()
            m0, m1 = _times(p0, lower.index(16)), _times(p1, lower.index(18))
            m2, m3 = _times(p2, lower.index(21)), _times(p3, lower.index(25))
            m0, m1 = _times(m0, inverse.index(0)), _times(m1, inverse.index(2))
            m2, m3 = _times(m2, inverse.index(5)), _times(m3, inverse.index(9))
            is_pair = ((rows >> log) ^ (columns >> log)) == 1
            p0, p1 = gl.where(is_pair, m0, p0), gl.where(is_pair, m1, p1)
            p2, p3 = gl.where(is_pair, m2, p2), gl.where(is_pair, m3, p3)
        gl.thread_barrier()
        inverse.index(0).store(p0.to(gl.float16))
        inverse.index(2).store(p1.to(gl.float16))
        inverse.index(5).store(p2.to(gl.float16))
        gl.thread_barrier()
        x10 = _times(_times(p1, lower.index(17)), inverse.index(0))
        x32 = _times(_times(p3, lower.index(24)), inverse.index(5))
        inverse.index(1).store(x10.to(gl.float16))
        m20, m21 = _times(p2, lower.index(19)), _times(p2, lower.index(20))
        m30 = _times_add(p3, lower.index(22), _times(x32, lower.index(19)))
        m31 = _times_add(p3, lower.index(23), _times(x32, lower.index(20)))
        gl.thread_barrier()
        x20 = _times_add(m21, inverse.index(1), _times(m20, inverse.index(0)))
        x30 = _times_add(m31, inverse.index(1), _times(m30, inverse.index(0)))
        x21, x31 = _times(m21, inverse.index(2)), _times(m31, inverse.index(2))
        zeros = gl.full([_SIDE, _SIDE], 0.0, gl.float32, _BLOCK)
        b0 = lines.index(1).slice(0, _SIDE).load(_COLUMNS)[None, :]
        b1 = lines.index(1).slice(_SIDE, _SIDE).load(_COLUMNS)[None, :]
        b2 = lines.index(1).slice(2 * _SIDE, _SIDE).load(_COLUMNS)[None, :]
        b3 = lines.index(1).slice(3 * _SIDE, _SIDE).load(_COLUMNS)[None, :]
        _store_row(transform, p0 * b0, zeros, zeros, zeros, 0)
        _store_row(transform, x10 * b0, p1 * b1, zeros, zeros, 1)
        _store_row(transform, x20 * b0, x21 * b1, p2 * b2, zeros, 2)
        _store_row(transform, x30 * b0, x31 * b1, x32 * b2, p3 * b3, 3)
        hopper.fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(transform_desc, [system * _CHUNK, 0], transform)
        tma.store_wait(0)
    # Used to the end, so that its memory holds nothing else: see gluon_prefill
    mbarrier.invalidate(loaded.index(0))
