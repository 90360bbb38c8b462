"""What chunks of Mamba-2 need before any state is known, for Hopper in Gluon, and long rows by the scan in gluon_scan.

    reads = (c_i.b_j decayed from j to i) dt_j, for j <= i

A program computes the products of one chunk once for several heads of a group.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.gluon_common import allocate_barriers, grid_dependency
from kernels.gluon_scan import (
    CHUNK,
    FACTORS,
    ScanConfig,
    Systems,
    add,
    describe_rows,
    find_chunk,
    scan_chunks,
    scan_config,
)  # fmt: skip
from kernels.states import StateMetadata, StateView

# ruff: noqa: ANN001  (Triton reads annotations as types)

_MOST_HEADS = 8  # of a program
_CHUNK = gl.constexpr(CHUNK)
_FACTORS = gl.constexpr(FACTORS)
_LOG2_E = gl.constexpr(1.4426950408889634)
# Least logarithm of a token's decay: smaller ones forget as well, but cost the digits of sums behind them
_LEAST = gl.constexpr(-40.0)
_SQUARE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16]))
_ROWS = gl.constexpr(gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])))
_COLUMNS = gl.constexpr(gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])))
_PAIRS = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))


def scan_on_hopper(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    out: torch.Tensor,
    view: StateView,
    metadata: StateMetadata,
    *,
    rows: tuple[int, int],
    shortest: int,
    num_sms: int = 132,
    config: ScanConfig | None = None,
    pdl: bool = False,
) -> None:
    """Equal triton_scan.scan_rows for c, b and x that gluon_scan.takes allows. Its arguments."""
    (num_tokens, num_heads, head_dim), num_rows = x.shape, rows[1] - rows[0]
    # Every row may have one chunk that is not full
    most = min(num_tokens // CHUNK + num_rows, num_rows * -(-metadata.max_query_len // CHUNK))
    reads = x.new_empty(most, num_heads, CHUNK, CHUNK)
    factors = x.new_empty(most, num_heads, FACTORS * CHUNK, dtype=torch.float32)
    heads_of_group = num_heads // b.shape[1]
    heads = max(heads for heads in range(1, _MOST_HEADS + 1) if heads_of_group % heads == 0)
    _systems_kernel[(num_heads // heads, most)](
        *(describe_rows(matrix) for matrix in (c.flatten(1), b.flatten(1), reads.view(-1, CHUNK))),
        dt, a, factors, dt.stride(0), metadata.query_start_loc, metadata.seq_lens, rows[0], num_rows,
        NUM_HEADS=num_heads, HEADS=heads, REPEAT=heads_of_group, ROW_SIZE=c.shape[2], SHORT=shortest - 1, PDL=pdl,
        num_warps=4, launch_pdl=pdl, maxnreg=128,
    )  # fmt: skip
    config = config or scan_config(num_rows * num_heads * (head_dim // CHUNK), d_v=head_dim, num_sms=num_sms)
    scan_chunks(
        c, b, x, out, Systems(None, reads, factors), view, metadata,
        rows=(rows[0], num_rows), short=shortest - 1, config=config, pdl=pdl, d=d,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["first_row", "num_rows"])
def _systems_kernel(
    c_desc, b_desc, reads_desc, dt_ptr, a_ptr, factors_ptr, stride_dt,
    query_start_ptr, seq_lens_ptr, first_row, num_rows,
    NUM_HEADS: gl.constexpr, HEADS: gl.constexpr, REPEAT: gl.constexpr, ROW_SIZE: gl.constexpr, SHORT: gl.constexpr,
    PDL: gl.constexpr,
) -> None:  # fmt: skip
    """One chunk, HEADS heads of a group."""
    PANELS: gl.constexpr = ROW_SIZE // 64
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = c_desc.dtype
    c_boxes = gl.allocate_shared_memory(dtype, [PANELS, _CHUNK, 64], c_desc.layout)
    b_boxes = gl.allocate_shared_memory(dtype, [PANELS, _CHUNK, 64], b_desc.layout)
    c = c_boxes._reinterpret(dtype, [_CHUNK, ROW_SIZE], c_desc.layout)
    b = b_boxes._reinterpret(dtype, [_CHUNK, ROW_SIZE], b_desc.layout)
    tiles = gl.allocate_shared_memory(dtype, [2, _CHUNK, _CHUNK], reads_desc.layout)
    lines = gl.allocate_shared_memory(gl.float32, [4, _CHUNK], FLAT)
    loaded = allocate_barriers(1, 1)
    if PDL:
        grid_dependency("griddepcontrol.wait;")
        grid_dependency("griddepcontrol.launch_dependents;")
    first_head, index = gl.program_id(0) * HEADS, gl.program_id(1)
    first, end = find_chunk(query_start_ptr, seq_lens_ptr, first_row, num_rows, index, SHORT)
    if first < end:
        gl.thread_barrier()  # the barrier is set up
        mbarrier.expect(loaded.index(0), 2 * PANELS * _CHUNK * 128)
        for panel in gl.static_range(PANELS):
            box = [first, first_head // REPEAT * ROW_SIZE + panel * 64]
            tma.async_copy_global_to_shared(c_desc, box, loaded.index(0), c_boxes.index(panel))
            tma.async_copy_global_to_shared(b_desc, box, loaded.index(0), b_boxes.index(panel))
        zeros = gl.full([_CHUNK, _CHUNK], 0.0, gl.float32, _SQUARE)
        rows, columns = gl.arange(0, _CHUNK, _ROWS)[:, None], gl.arange(0, _CHUNK, _COLUMNS)[None, :]
        places = gl.arange(0, _CHUNK, _PAIRS)
        is_token = first + places < end
        dt_ptrs = dt_ptr + (first + places).to(gl.int64) * stride_dt + first_head
        mbarrier.wait(loaded.index(0), 0)
        products = hopper.warpgroup_mma(c, b.permute((1, 0)), zeros, use_acc=False, is_async=True)
        # Tokens behind the row, which may be no numbers, are above the diagonal, or their rows are not stored
        products = gl.where(rows >= columns, hopper.warpgroup_mma_wait(0, [products]), 0.0)
        for i in range(HEADS):
            head = first_head + i
            dt = gl.load(dt_ptrs + i, mask=is_token, other=0.0)
            logs = gl.maximum(dt * gl.load(a_ptr + head), _LEAST) * _LOG2_E
            sums, whole = gl.associative_scan(logs, 0, add), gl.sum(logs, 0)
            system = index * NUM_HEADS + head
            factors = factors_ptr + system.to(gl.int64) * (_FACTORS * _CHUNK) + places
            gl.store(factors + _CHUNK, gl.exp2(sums))
            gl.store(factors + 2 * _CHUNK, dt * gl.exp2(whole - sums))
            gl.store(factors + 3 * _CHUNK, gl.exp2(whole + 0.0 * sums))
            slot = i % 2
            tma.store_wait(1)  # what lay in this tile has left
            gl.thread_barrier()
            lines.index(slot * 2).store(sums)
            lines.index(slot * 2 + 1).store(dt)
            gl.thread_barrier()
            # Above the diagonal the power could be infinite
            sums_of_rows, sums_of_columns = lines.index(slot * 2).load(_ROWS), lines.index(slot * 2).load(_COLUMNS)
            decay = gl.exp2(gl.minimum(sums_of_rows[:, None] - sums_of_columns[None, :], 0.0))
            reads = products * decay * lines.index(slot * 2 + 1).load(_COLUMNS)[None, :]
            tiles.index(slot).store(reads.to(dtype))
            hopper.fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(reads_desc, [system * _CHUNK, 0], tiles.index(slot))
        tma.store_wait(0)
    # Used to the end, so that its memory holds nothing else: see gluon_prefill
    mbarrier.invalidate(loaded.index(0))
