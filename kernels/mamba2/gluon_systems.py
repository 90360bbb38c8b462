"""What chunks of Mamba-2 need before any state is known, for Hopper in Gluon, and long rows by the scan in gluon_scan.

The products c_i.b_j of one chunk, for j <= i, once for all heads of a group, and of each head the decays; the scan
multiplies the two. So little goes through global memory.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.gluon_chunks import CHUNK, FACTORS, Systems, add, describe_rows, find_chunk
from kernels.gluon_common import allocate_barriers, grid_dependency
from kernels.gluon_scan import scan_chunks
from kernels.states import StateMetadata, StateView

# ruff: noqa: ANN001  (Triton reads annotations as types)

_HEADS = gl.constexpr(4)  # at once, one for each warp
_CHUNK = gl.constexpr(CHUNK)
_FACTORS = gl.constexpr(FACTORS)
_LOG2_E = gl.constexpr(1.4426950408889634)
# Least logarithm of a token's decay: smaller ones forget as well, but cost the digits of sums behind them
_LEAST = gl.constexpr(-40.0)
_SQUARE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16]))
_ROWS = gl.constexpr(gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])))
_COLUMNS = gl.constexpr(gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])))
_TOKENS = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))  # [heads, tokens]


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
    pdl: bool = False,
) -> None:
    """Equal triton_scan.scan_rows for c, b and x that gluon_scan.takes allows. Its arguments."""
    (num_tokens, num_heads, _), num_rows = x.shape, rows[1] - rows[0]
    # Every row may have one chunk that is not full
    most = min(num_tokens // CHUNK + num_rows, num_rows * -(-metadata.max_query_len // CHUNK))
    reads = x.new_empty(most, b.shape[1], CHUNK, CHUNK)
    factors = x.new_empty(most, num_heads, FACTORS * CHUNK, dtype=torch.float32)
    _systems_kernel[(b.shape[1], most)](
        *(describe_rows(matrix) for matrix in (c.flatten(1), b.flatten(1), reads.view(-1, CHUNK))),
        dt, a, factors, dt.stride(0), metadata.query_start_loc, metadata.seq_lens, rows[0], num_rows,
        NUM_HEADS=num_heads, REPEAT=num_heads // b.shape[1], ROW_SIZE=c.shape[2], SHORT=shortest - 1, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    scan_chunks(
        c, b, x, out, Systems(None, reads, factors), view, metadata,
        rows=(rows[0], num_rows), short=shortest - 1, consumers=1, pdl=pdl, d=d,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["first_row", "num_rows"])
def _systems_kernel(
    c_desc, b_desc, reads_desc, dt_ptr, a_ptr, factors_ptr, stride_dt,
    query_start_ptr, seq_lens_ptr, first_row, num_rows,
    NUM_HEADS: gl.constexpr, REPEAT: gl.constexpr, ROW_SIZE: gl.constexpr, SHORT: gl.constexpr, PDL: gl.constexpr,
) -> None:  # fmt: skip
    """One chunk of a group of heads."""
    PANELS: gl.constexpr = ROW_SIZE // 64
    dtype: gl.constexpr = c_desc.dtype
    c_boxes = gl.allocate_shared_memory(dtype, [PANELS, _CHUNK, 64], c_desc.layout)
    b_boxes = gl.allocate_shared_memory(dtype, [PANELS, _CHUNK, 64], b_desc.layout)
    c = c_boxes._reinterpret(dtype, [_CHUNK, ROW_SIZE], c_desc.layout)
    b = b_boxes._reinterpret(dtype, [_CHUNK, ROW_SIZE], b_desc.layout)
    tile = gl.allocate_shared_memory(dtype, [_CHUNK, _CHUNK], reads_desc.layout)
    loaded = allocate_barriers(1, 1)
    if PDL:
        grid_dependency("griddepcontrol.wait;")
        grid_dependency("griddepcontrol.launch_dependents;")
    group, index = gl.program_id(0), gl.program_id(1)
    first, end = find_chunk(query_start_ptr, seq_lens_ptr, first_row, num_rows, index, SHORT)
    if first < end:
        hopper.fence_async_shared()  # the barrier is set up, also for the copy engine
        gl.thread_barrier()
        mbarrier.expect(loaded.index(0), 2 * PANELS * _CHUNK * 128)
        for panel in gl.static_range(PANELS):
            box = [first, group * ROW_SIZE + panel * 64]
            tma.async_copy_global_to_shared(c_desc, box, loaded.index(0), c_boxes.index(panel))
            tma.async_copy_global_to_shared(b_desc, box, loaded.index(0), b_boxes.index(panel))
        zeros = gl.full([_CHUNK, _CHUNK], 0.0, gl.float32, _SQUARE)
        rows, columns = gl.arange(0, _CHUNK, _ROWS)[:, None], gl.arange(0, _CHUNK, _COLUMNS)[None, :]
        mbarrier.wait(loaded.index(0), 0)
        products = hopper.warpgroup_mma(c, b.permute((1, 0)), zeros, use_acc=False, is_async=True)
        places = gl.arange(0, _CHUNK, gl.SliceLayout(0, _TOKENS))
        for start in range(0, REPEAT, _HEADS):
            heads = start + gl.arange(0, _HEADS, gl.SliceLayout(1, _TOKENS))
            in_group = heads < REPEAT
            heads = group * REPEAT + heads
            dt_ptrs = dt_ptr + (first + places).to(gl.int64)[None, :] * stride_dt + heads[:, None]
            dt = gl.load(dt_ptrs, mask=in_group[:, None] & (first + places < end)[None, :], other=0.0)
            a = gl.load(a_ptr + heads, mask=in_group, other=0.0)
            logs = gl.maximum(dt * a[:, None], _LEAST) * _LOG2_E
            sums, whole = gl.associative_scan(logs, 1, add), gl.sum(logs, 1)[:, None]
            shifted = sums - gl.log2(dt)  # of no time, and behind the row: infinity, so that nothing is added
            factors = factors_ptr + (index * NUM_HEADS + heads).to(gl.int64)[:, None] * (_FACTORS * _CHUNK)
            factors = factors + places[None, :]
            in_group = in_group[:, None] & (places >= 0)[None, :]
            gl.store(factors, sums, mask=in_group)
            gl.store(factors + _CHUNK, shifted, mask=in_group)
            gl.store(factors + 2 * _CHUNK, gl.exp2(whole - shifted), mask=in_group)
            gl.store(factors + 3 * _CHUNK, gl.exp2(whole + 0.0 * sums), mask=in_group)
        # Tokens behind the row, which may be no numbers, are above the diagonal, or their rows are not stored
        products = gl.where(rows >= columns, hopper.warpgroup_mma_wait(0, [products]), 0.0)
        tile.store(products.to(dtype))
        hopper.fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(reads_desc, [(index * (NUM_HEADS // REPEAT) + group) * _CHUNK, 0], tile)
        tma.store_wait(0)
    # Used to the end, so that its memory holds nothing else: see gluon_prefill
    mbarrier.invalidate(loaded.index(0))
