# ruff: noqa: ANN001  (Triton reads annotations as types: kernel arguments carry none)
"""Triton twin of Mamba-2's state space: short rows token by token here, long ones in chunks (triton_scan.py).

The host knows only bounds (StateMetadata), so a launch covers all rows, and a program leaves a row that is another's.
Nothing syncs, and CUDA graphs may have it. A step of decode rows is limited by memory: each state is read and written
once, by programs of a head's BLOCK_P rows each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.dispatch import is_hopper
from kernels.mamba2.triton_scan import ScanConfig, scan_rows
from kernels.states import StateMetadata, StateView
from kernels.states_triton import row_writes, state_offsets, step_row

try:
    from kernels import gluon_scan
    from kernels.mamba2 import gluon_systems

    HAS_GLUON = True
except ImportError:
    HAS_GLUON = False

SHORT = 16  # tokens: up to so many a row is computed token by token


class StepConfig(NamedTuple):
    """Numbers of a state in one program of the kernel of short rows, and its warps."""

    tile: int
    num_warps: int


# By measurement on an H100, for 1 to 256 rows at the shapes of Nemotron 3 Nano and Falcon-H1: the fastest in most cases
_ONE_TOKEN = StepConfig(1024, 1)
_FEW_TOKENS = StepConfig(4096, 4)


def mamba2(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    view: StateView,
    metadata: StateMetadata,
    *,
    segment: int | None = None,
    config: ScanConfig | None = None,
    step_config: StepConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Equal reference.mamba2, long rows in fp16 or bf16 but for the rounding of products' operands. Never syncs.

    x, b, c: the last two dimensions dense; dt: the last one. segment, config: override the choices for long rows
    (benchmarks); step_config: that for short rows. pdl: launch early; see _step_kernel for what is read before the
    kernel in front has ended.
    """
    assert all(tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2] for tensor in (x, b, c))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows, (num_heads, head_dim) = metadata.seq_lens.shape[0], x.shape[1:]
    if num_rows == 0 or x.shape[0] == 0:
        return out
    n_pad = triton.next_power_of_2(view.row_size)
    is_one = metadata.max_query_len == 1
    tile, num_warps = step_config or (_ONE_TOKEN if is_one else _FEW_TOKENS)
    block_p = min(triton.next_power_of_2(head_dim), max(1, tile // n_pad))
    blocks = triton.cdiv(head_dim, block_p)
    _step_kernel[(num_heads * blocks, num_rows)](
        x, b, c, dt, a, d, out,
        metadata.query_start_loc, metadata.seq_lens, metadata.req_index, metadata.writes,
        view.pool, metadata.pages, metadata.pages.stride(0), view.first_piece, view.pool.shape[1],
        x.stride(0), b.stride(0), c.stride(0), dt.stride(0),
        NUM_LANES=view.pool.shape[0], PIECE=view.pool.shape[2], ROW_SIZE=view.row_size,
        N_PAD=n_pad, HEAD_DIM=head_dim, BLOCK_P=block_p, BLOCKS=blocks,
        HEADS_OF_GROUP=num_heads // b.shape[1], MOST=1 if is_one else SHORT,
        PDL=pdl, num_warps=num_warps, launch_pdl=pdl,
    )  # fmt: skip
    first_row = metadata.num_decodes or 0
    end_row = num_rows if metadata.max_prefills is None else min(num_rows, metadata.max_prefills)
    if metadata.max_query_len > SHORT and end_row > first_row:
        rows, shortest = (first_row, end_row), SHORT + 1
        if segment is None and config is None and runs_on_hopper(x, b, c):
            gluon_systems.scan_on_hopper(
                x, b, c, dt, a, d, out, view, metadata, rows=rows, shortest=shortest, pdl=pdl
            )  # fmt: skip
        else:
            scan_rows(
                x, b, c, dt, a, d, out, view, metadata, rows=rows, shortest=shortest, segment=segment, config=config,
                pdl=pdl,
            )  # fmt: skip
    return out


def runs_on_hopper(x: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> bool:
    """Return True if the kernels for Hopper serve prompts of these tensors."""
    return HAS_GLUON and is_hopper(x.device) and gluon_scan.takes(c, b, x)


@triton.jit(do_not_specialize=["first_piece"])
def _step_kernel(
    x_ptr, b_ptr, c_ptr, dt_ptr, decay_ptr, skip_ptr, out_ptr,
    query_start_ptr, seq_lens_ptr, req_index_ptr, writes_ptr,
    pool_ptr, pages_ptr, stride_pages, first_piece, num_pages,
    stride_x, stride_b, stride_c, stride_dt,
    NUM_LANES: tl.constexpr, PIECE: tl.constexpr, ROW_SIZE: tl.constexpr, N_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_P: tl.constexpr, BLOCKS: tl.constexpr, HEADS_OF_GROUP: tl.constexpr,
    MOST: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_P rows of one head's state through all tokens of a row of at most MOST. A group's heads run together.

    The state is read before the wait: kernels/states_triton.py says why that is safe.
    """
    head, row = tl.program_id(0) // BLOCKS, tl.program_id(1)
    dims = tl.program_id(0) % BLOCKS * BLOCK_P + tl.arange(0, BLOCK_P)
    in_head = dims < HEAD_DIM
    columns = tl.arange(0, N_PAD)
    in_row = columns < ROW_SIZE
    first, num_tokens, has_state, is_padding = step_row(query_start_ptr, seq_lens_ptr, row)
    is_mine = (num_tokens <= MOST) & (num_tokens > 0) & (is_padding == 0)
    request = tl.load(req_index_ptr + row).to(tl.int64)
    offsets = state_offsets(  # of any row: the load of its pages need not wait for that of its length
        pages_ptr + request * stride_pages, head * HEAD_DIM + dims, in_head, first_piece, num_pages,
        NUM_LANES, PIECE, ROW_SIZE,
    )  # fmt: skip
    state_ptrs = pool_ptr + (offsets[:, None] + columns[None, :])
    in_tile = (in_head & is_mine)[:, None] & in_row[None, :]
    state = tl.load(state_ptrs, mask=in_tile & has_state, other=0.0)
    may_write = row_writes(writes_ptr, row)
    a = tl.load(decay_ptr + head)
    d = tl.load(skip_ptr + head)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    token = first.to(tl.int64)
    group = head // HEADS_OF_GROUP
    stride_out = tl.num_programs(0) // BLOCKS * HEAD_DIM
    out_ptrs = out_ptr + token * stride_out + head * HEAD_DIM + dims
    if is_mine:
        x_ptrs = x_ptr + token * stride_x + head * HEAD_DIM + dims
        b_ptrs = b_ptr + token * stride_b + group * ROW_SIZE + columns
        c_ptrs = c_ptr + token * stride_c + group * ROW_SIZE + columns
        dt_ptr += token * stride_dt + head
        if MOST == 1:
            num_tokens = 1
        for _ in range(0, num_tokens):
            x = tl.load(x_ptrs, mask=in_head, other=0.0).to(tl.float32)
            b = tl.load(b_ptrs, mask=in_row, other=0.0).to(tl.float32)
            c = tl.load(c_ptrs, mask=in_row, other=0.0).to(tl.float32)
            dt = tl.load(dt_ptr)
            state = state * tl.exp(dt * a) + (dt * x)[:, None] * b[None, :]
            y = tl.sum(state * c[None, :], 1) + d * x
            tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=in_head)
            x_ptrs += stride_x
            b_ptrs += stride_b
            c_ptrs += stride_c
            dt_ptr += stride_dt
            out_ptrs += stride_out
        tl.store(state_ptrs, state, mask=in_tile & may_write)
    if is_padding:
        zeros = tl.zeros([BLOCK_P], out_ptr.dtype.element_ty)
        for _ in range(0, num_tokens):
            tl.store(out_ptrs, zeros, mask=in_head)
            out_ptrs += stride_out
