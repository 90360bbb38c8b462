"""The first phase of the chunked gated delta rule for Hopper in Gluon, for the scan in kernels.gluon_scan.

It computes what triton_chunk_systems does with one gate for each token, for all value heads of a key head in one
program: they share its queries and keys, which TMA brings to shared memory, and their norms, which are on the diagonals
of products. Products take their first operand from registers where it was computed; an inverse goes through shared
memory once a level, and systems leave by TMA.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.delta_rule.triton_chunks import prepare_lines, rows_of_prompts
from kernels.gluon_chunks import CHUNK, FACTORS, Systems, add, clear_rows, describe_rows, find_chunk
from kernels.gluon_common import allocate_barriers, grid_dependency
from kernels.gluon_scan import choose_consumers, scan_chunks
from kernels.states import StateMetadata, StateView

# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types)

_REGISTERS = 168  # of a thread: three programs fit a multiprocessor
_CHUNK = gl.constexpr(CHUNK)
_FACTORS = gl.constexpr(FACTORS)
_LOG2_E = gl.constexpr(1.4426950408889634)
_SQUARE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16]))
_OPERAND = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16]), 2))
_ROWS = gl.constexpr(gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])))
_COLUMNS = gl.constexpr(gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])))
_PAIRS = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))


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

    The first phase here shares what is of keys alone between value heads of a key head: where each has its own, it took
    153 us on an H100 that Triton's does in 137. consumers: as scan_chunks has them; None for the served ones.
    """
    rows = rows_of_prompts(metadata)
    (num_tokens, num_heads, d_v), num_rows = v.shape, rows[1]
    if num_rows == 0:
        return
    # Every row may have one chunk that is not full
    most = min(num_tokens // CHUNK + num_rows, num_rows * -(-metadata.max_query_len // CHUNK))
    step = (metadata.query_start_loc, metadata.seq_lens)
    # By heads alone: with rows or chunks in the rule, a request's bits would depend on what else is in the step
    prepare = prepare_systems if num_heads > q.shape[1] else prepare_by_triton
    systems = prepare(q, k, g, beta, step, rows, most, short=short, scale=scale, eps=eps, pdl=pdl)
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
    max_registers: int | None = _REGISTERS,
) -> Systems:
    """Launch for `most` chunks of tensors that gluon_scan.takes allows.

    step: query_start_loc, seq_lens; rows: the first that may have more than `short` tokens, and how many there are.
    """
    num_heads = beta.shape[1]
    transform = q.new_empty(most, num_heads, CHUNK, CHUNK)
    reads = torch.empty_like(transform)
    factors = q.new_empty(most, num_heads, FACTORS * CHUNK, dtype=torch.float32)
    matrices = [
        describe_rows(x) for x in (q.flatten(1), k.flatten(1), transform.view(-1, CHUNK), reads.view(-1, CHUNK))
    ]
    _systems_kernel[(q.shape[1], most)](
        *matrices, g, beta, factors, scale, eps, *step, *rows,
        NUM_HEADS=num_heads, REPEAT=num_heads // q.shape[1], D_K=q.shape[2], SHORT=short, PDL=pdl,
        num_warps=4, launch_pdl=pdl, maxnreg=max_registers,
    )  # fmt: skip
    return Systems(transform, reads, factors)


def prepare_by_triton(
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
    """Equal prepare_systems, by the first phase in Triton."""
    systems = prepare_lines(q, k, g, beta, step, rows, most, short=short, scale=scale, eps=eps, pdl=pdl)
    return Systems(systems.transform, systems.reads, systems.factors)


@jit
def _norms(products, eps):
    """Return 1 / sqrt(x.x + eps) of each row, from the products of all rows with each other."""
    rows, columns = gl.arange(0, _CHUNK, _ROWS), gl.arange(0, _CHUNK, _COLUMNS)
    return gl.rsqrt(gl.sum(gl.where(rows[:, None] == columns[None, :], products, 0.0), 1) + eps)


@jit
def _invert(negative, tiles, lower):
    """Return (I + A)^-1 of a strictly lower triangular A, given minus A, in the way of triton_chunk_systems.

    lower: where minus A is in half precision; tiles: two more, which are free.
    """
    rows, columns = gl.arange(0, _CHUNK, _ROWS)[:, None], gl.arange(0, _CHUNK, _COLUMNS)[None, :]
    zeros = gl.full([_CHUNK, _CHUNK], 0.0, gl.float32, _SQUARE)
    inverse = gl.where(rows == columns, 1.0, gl.where((rows >> 1) == (columns >> 1), negative, 0.0))
    for log in gl.static_range(1, 6):
        half = inverse.to(gl.float16)
        tile = tiles.index(log % 2)
        tile.store(half)
        hopper.fence_async_shared()
        gl.thread_barrier()
        left = gl.convert_layout(half, _OPERAND)
        product = hopper.warpgroup_mma(left, lower, zeros, use_acc=False, is_async=True)
        product, left = hopper.warpgroup_mma_wait(0, [product, left])
        left = gl.convert_layout(product.to(gl.float16), _OPERAND)
        product = hopper.warpgroup_mma(left, tile, zeros, use_acc=False, is_async=True)
        product, left = hopper.warpgroup_mma_wait(0, [product, left])
        is_pair = ((rows >> log) ^ (columns >> log)) == 1
        inverse = gl.where(is_pair, product, inverse)
    return inverse


@gluon.jit(do_not_specialize=["first_row", "num_rows"])
def _systems_kernel(
    q_desc, k_desc, transform_desc, reads_desc, g_ptr, beta_ptr, factors_ptr, scale, eps,
    query_start_ptr, seq_lens_ptr, first_row, num_rows,
    NUM_HEADS: gl.constexpr, REPEAT: gl.constexpr, D_K: gl.constexpr, SHORT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One chunk, all value heads of one key head."""
    PANELS: gl.constexpr = D_K // 64
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = q_desc.dtype
    q_boxes = gl.allocate_shared_memory(dtype, [PANELS, _CHUNK, 64], q_desc.layout)
    k_boxes = gl.allocate_shared_memory(dtype, [PANELS, _CHUNK, 64], k_desc.layout)
    queries = q_boxes._reinterpret(dtype, [_CHUNK, D_K], q_desc.layout)
    keys = k_boxes._reinterpret(dtype, [_CHUNK, D_K], k_desc.layout)
    reads = gl.allocate_shared_memory(dtype, [_CHUNK, _CHUNK], reads_desc.layout)
    transform = gl.allocate_shared_memory(dtype, [_CHUNK, _CHUNK], transform_desc.layout)
    halves = gl.allocate_shared_memory(gl.float16, [2, _CHUNK, _CHUNK], transform_desc.layout)
    lower = transform._reinterpret(gl.float16, [_CHUNK, _CHUNK], transform_desc.layout)
    lines = gl.allocate_shared_memory(gl.float32, [4, _CHUNK], FLAT)
    loaded = allocate_barriers(1, 1)
    if PDL:
        grid_dependency("griddepcontrol.wait;")
        grid_dependency("griddepcontrol.launch_dependents;")
    key_head, index = gl.program_id(0), gl.program_id(1)
    first, end = find_chunk(query_start_ptr, seq_lens_ptr, first_row, num_rows, index, SHORT)
    if first < end:
        hopper.fence_async_shared()  # the barrier is set up, also for the copy engine
        gl.thread_barrier()
        mbarrier.expect(loaded.index(0), 2 * PANELS * _CHUNK * 128)
        for panel in gl.static_range(PANELS):
            box = [first, key_head * D_K + panel * 64]
            tma.async_copy_global_to_shared(k_desc, box, loaded.index(0), k_boxes.index(panel))
            tma.async_copy_global_to_shared(q_desc, box, loaded.index(0), q_boxes.index(panel))
        zeros = gl.full([_CHUNK, _CHUNK], 0.0, gl.float32, _SQUARE)
        rows, columns = gl.arange(0, _CHUNK, _ROWS)[:, None], gl.arange(0, _CHUNK, _COLUMNS)[None, :]
        places = gl.arange(0, _CHUNK, _PAIRS)
        tokens = (first + places).to(gl.int64) * NUM_HEADS + key_head * REPEAT
        is_token = first + places < end
        mbarrier.wait(loaded.index(0), 0)
        if end - first < _CHUNK:
            # What queries behind the row read is not stored, but the state takes sums over all keys
            clear_rows(k_boxes._reinterpret(dtype, [PANELS * 8, 8, 64], k_desc.layout), 0, end - first, PANELS)
            hopper.fence_async_shared()
            gl.thread_barrier()
        of_keys_alone = hopper.warpgroup_mma(keys, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)
        of_queries_alone = hopper.warpgroup_mma(queries, queries.permute((1, 0)), zeros, use_acc=False, is_async=True)
        k_norms = _norms(hopper.warpgroup_mma_wait(1, [of_keys_alone]), eps)
        q_norms = _norms(hopper.warpgroup_mma_wait(0, [of_queries_alone]), eps) * scale
        lines.index(0).store(k_norms)
        lines.index(1).store(q_norms)
        gl.thread_barrier()
        for head in range(REPEAT):
            of_keys = hopper.warpgroup_mma(keys, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)
            of_queries = hopper.warpgroup_mma(queries, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)
            system = index * NUM_HEADS + key_head * REPEAT + head
            beta = gl.load(beta_ptr + tokens + head, mask=is_token, other=0.0)
            g = gl.load(g_ptr + tokens + head, mask=is_token, other=0.0) * _LOG2_E
            sums, whole = gl.associative_scan(g, 0, add), gl.sum(g, 0)
            tma.store_wait(0)  # systems of the head before have left
            gl.thread_barrier()
            lines.index(2).store(sums)
            lines.index(3).store(beta)
            factors = factors_ptr + system.to(gl.int64) * (_FACTORS * _CHUNK) + places
            from_start = gl.exp2(sums)
            gl.store(factors, lines.index(0).load(_PAIRS) * from_start)
            gl.store(factors + _CHUNK, lines.index(1).load(_PAIRS) * from_start)
            gl.store(factors + 2 * _CHUNK, lines.index(0).load(_PAIRS) * gl.exp2(whole - sums))
            gl.store(factors + 3 * _CHUNK, gl.exp2(whole + 0.0 * sums))
            gl.thread_barrier()
            differences = lines.index(2).load(_ROWS)[:, None] - lines.index(2).load(_COLUMNS)[None, :]
            # Above the diagonal the power may be infinite, and is not taken
            decay = gl.exp2(differences) * lines.index(0).load(_COLUMNS)[None, :]
            of_keys = hopper.warpgroup_mma_wait(1, [of_keys])
            strengths = lines.index(3).load(_ROWS) * lines.index(0).load(_ROWS)
            negative = gl.where(rows > columns, of_keys * decay * (0.0 - strengths)[:, None], 0.0)
            lower.store(negative.to(gl.float16))
            of_queries = hopper.warpgroup_mma_wait(0, [of_queries])
            of_queries = gl.where(rows >= columns, of_queries * decay * lines.index(1).load(_ROWS)[:, None], 0.0)
            reads.store(of_queries.to(dtype))
            inverse = _invert(negative, halves, lower)
            gl.thread_barrier()  # the last product has read `lower`, in whose place the transform goes
            transform.store((inverse * lines.index(3).load(_COLUMNS)[None, :]).to(dtype))
            hopper.fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(reads_desc, [system * _CHUNK, 0], reads)
            tma.async_copy_shared_to_global(transform_desc, [system * _CHUNK, 0], transform)
        tma.store_wait(0)
    # Used to the end, so that its memory holds nothing else: see gluon_prefill
    mbarrier.invalidate(loaded.index(0))
