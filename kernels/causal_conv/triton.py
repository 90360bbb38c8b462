# ruff: noqa: ANN001, ANN202, RUF005  (Triton reads annotations as types: kernel arguments carry none; no * in tuples)
"""Triton twin of kernels/causal_conv/reference.py, limited by memory. One launch, whatever the rows' lengths.

A step of one token a row has a kernel of its own, without loops and with one barrier. In other steps, a row's
first width - 1 tokens read its old state, so one program computes them, and then writes the new state. Later
tokens need no state: they are cut into tiles, whatever rows they belong to. `pdl`: see kernels/elementwise/triton.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.states import StateMetadata, StateView
from kernels.states_triton import place, row_writes, state_offsets, step_row

_TILE = 16  # tokens
_BLOCK = 256  # channels
_STEP_BLOCK = 256  # of a step of one token: each of 8 warps' threads has one channel
_MIN_ROWS_PAD = 64


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    view: StateView,
    metadata: StateMetadata,
    *,
    has_silu: bool,
    pdl: bool = False,
) -> torch.Tensor:
    """Equal causal_conv of the reference. x: last dimension dense; weight, bias: contiguous."""
    (num_tokens, num_channels), width = x.shape, weight.shape[1]
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    num_rows = metadata.seq_lens.shape[0]
    out = torch.empty(num_tokens, num_channels, dtype=x.dtype, device=x.device)
    if metadata.max_query_len == 1:
        block = max(32, min(_STEP_BLOCK, triton.next_power_of_2(num_channels)))
        _step_kernel[(triton.cdiv(num_channels, block), num_rows)](
            x, weight, bias, out, metadata.query_start_loc, metadata.seq_lens, metadata.req_index, metadata.writes,
            x.stride(0), view.pool, metadata.pages, metadata.pages.stride(0), *place(view),
            CHANNELS=num_channels, WIDTH=width, BLOCK=block, HAS_SILU=has_silu, PDL=pdl,
            num_warps=block // 32, launch_pdl=pdl,
        )  # fmt: skip
        return out
    num_tiles = triton.cdiv(num_tokens, _TILE) if metadata.max_query_len >= width else 0
    block = min(_BLOCK, triton.next_power_of_2(num_channels))
    _causal_conv_kernel[(num_rows + num_tiles, triton.cdiv(num_channels, block))](
        x, weight, bias, out, metadata.query_start_loc, metadata.seq_lens, metadata.req_index, metadata.writes,
        num_rows, x.stride(0), view.pool, metadata.pages, metadata.pages.stride(0), *place(view),
        CHANNELS=num_channels, WIDTH=width, HEAD=min(width - 1, metadata.max_query_len), TILE=_TILE, BLOCK=block,
        ROWS_PAD=_rows_pad(num_rows), HAS_SILU=has_silu, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _rows_pad(num_rows: int) -> int:
    """Round up to a few distinct sizes: each one compiles a kernel."""
    return _MIN_ROWS_PAD if num_rows <= _MIN_ROWS_PAD else max(512, triton.next_power_of_2(num_rows))


@triton.jit(do_not_specialize=["first_piece"])
def _step_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, query_start_ptr, seq_lens_ptr, req_index_ptr, writes_ptr,
    stride_x, pool_ptr, pages_ptr, stride_pages, first_piece, num_pages,
    NUM_LANES: tl.constexpr, PIECE: tl.constexpr, ROW_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_SILU: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One row of at most one token, BLOCK channels. Taps are added as in rows of any length, so no bit differs.

    Weights and states are read behind the wait, like x: read before it they made no chain faster (benchmarks/notes.md).
    """
    row, channels = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_block = channels < CHANNELS
    first, num_tokens, has_state, is_padding = step_row(query_start_ptr, seq_lens_ptr, row)
    first = first.to(tl.int64)
    has_token = in_block & (num_tokens > 0)
    is_read = has_token & (is_padding == 0)
    may_write = is_read & row_writes(writes_ptr, row)
    offsets = state_offsets(
        pages_ptr + tl.load(req_index_ptr + row).to(tl.int64) * stride_pages, channels,
        (is_read & has_state) | may_write, first_piece, num_pages, NUM_LANES, PIECE, ROW_SIZE,
    )  # fmt: skip
    state_ptrs = pool_ptr + offsets
    weight_ptrs = weight_ptr + channels * WIDTH
    y = tl.zeros((BLOCK,), tl.float32)
    if bias_ptr is not None:
        y = tl.load(bias_ptr + channels, mask=in_block, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # All loads come first, so that none waits for a sum
    weights, inputs = (), ()
    for tap in tl.static_range(WIDTH):
        weights = weights + (tl.load(weight_ptrs + tap, mask=in_block, other=0.0),)  # type: ignore[assignment]
    for tap in tl.static_range(WIDTH - 1):
        inputs = inputs + (tl.load(state_ptrs + tap, mask=is_read & has_state, other=0.0),)  # type: ignore[assignment]
    x = tl.load(x_ptr + first * stride_x + channels, mask=is_read, other=0.0).to(tl.float32)
    inputs = inputs + (x,)  # type: ignore[assignment]
    for tap in tl.static_range(WIDTH):
        y += weights[tap].to(tl.float32) * inputs[tap]
    y = y * tl.sigmoid(y) if HAS_SILU else y
    y = tl.where(is_padding, 0.0, y)
    tl.store(out_ptr + first * CHANNELS + channels, y.to(out_ptr.dtype.element_ty), mask=has_token)
    tl.debug_barrier()  # Other threads of the program may still read what this one overwrites
    for tap in tl.static_range(WIDTH - 1):
        tl.store(state_ptrs + tap, inputs[tap + 1], mask=may_write)


@triton.jit(do_not_specialize=["num_rows", "first_piece"])
def _causal_conv_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, query_start_ptr, seq_lens_ptr, req_index_ptr, writes_ptr,
    num_rows, stride_x, pool_ptr, pages_ptr, stride_pages, first_piece, num_pages,
    NUM_LANES: tl.constexpr, PIECE: tl.constexpr, ROW_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    ROWS_PAD: tl.constexpr, HAS_SILU: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The first tokens and the state of one row, or a tile of later tokens; one block of channels."""
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_block = channels < CHANNELS
    bias = tl.zeros((BLOCK,), tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channels, mask=in_block, other=0.0).to(tl.float32)
    # A function for each, as Triton lets no variable differ in shape between branches
    if HEAD < WIDTH - 1 or tl.program_id(0) < num_rows:
        _begin_row(
            x_ptr, weight_ptr, bias, out_ptr, query_start_ptr, seq_lens_ptr, req_index_ptr, writes_ptr,
            tl.program_id(0), stride_x, pool_ptr, pages_ptr, stride_pages, first_piece, num_pages, channels, in_block,
            NUM_LANES, PIECE, ROW_SIZE, CHANNELS, WIDTH, HEAD, HAS_SILU, PDL,
        )  # fmt: skip
    else:
        _convolve_tile(
            x_ptr, weight_ptr, bias, out_ptr, query_start_ptr, seq_lens_ptr, tl.program_id(0) - num_rows, num_rows,
            stride_x, channels, in_block, CHANNELS, WIDTH, TILE, BLOCK, ROWS_PAD, HAS_SILU, PDL,
        )  # fmt: skip


@triton.jit
def _begin_row(
    x_ptr, weight_ptr, bias, out_ptr, query_start_ptr, seq_lens_ptr, req_index_ptr, writes_ptr,
    row, stride_x, pool_ptr, pages_ptr, stride_pages, first_piece, num_pages, channels, in_block,
    NUM_LANES: tl.constexpr, PIECE: tl.constexpr, ROW_SIZE: tl.constexpr, CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr, HEAD: tl.constexpr, HAS_SILU: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Convolve a row's first HEAD tokens, then write its state."""
    first, num_tokens, has_state, is_padding = step_row(query_start_ptr, seq_lens_ptr, row)
    pages = pages_ptr + tl.load(req_index_ptr + row).to(tl.int64) * stride_pages
    reads = in_block & has_state & (is_padding == 0)
    may_write = row_writes(writes_ptr, row) & (is_padding == 0) & (num_tokens > 0)
    has_page = reads | (in_block & may_write)
    offsets = state_offsets(pages, channels, has_page, first_piece, num_pages, NUM_LANES, PIECE, ROW_SIZE)
    x_ptrs = x_ptr + first.to(tl.int64) * stride_x + channels
    if PDL:  # The step's rows and pages are older than the previous kernel
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    out_ptrs = out_ptr + first.to(tl.int64) * CHANNELS + channels
    for token in tl.static_range(HEAD):
        y = _convolve_head(
            x_ptrs, pool_ptr + offsets, weight_ptr, bias, channels, stride_x,
            in_block & (is_padding == 0) & (token < num_tokens), reads, token, WIDTH, HAS_SILU,
        )  # fmt: skip
        y = tl.where(is_padding, 0.0, y)
        tl.store(out_ptrs + token * CHANNELS, y.to(out_ptr.dtype.element_ty), mask=in_block & (token < num_tokens))
    for column in tl.static_range(WIDTH - 1):
        place_in_row = num_tokens - (WIDTH - 1) + column
        is_new = in_block & may_write & (place_in_row >= 0)
        is_old = reads & may_write & (place_in_row < 0)
        new = tl.load(x_ptrs + place_in_row.to(tl.int64) * stride_x, mask=is_new, other=0.0).to(tl.float32)
        old = tl.load(pool_ptr + offsets + column + num_tokens, mask=is_old, other=0.0)
        tl.debug_barrier()  # Other threads of the program may still read what this one overwrites
        tl.store(pool_ptr + offsets + column, tl.where(place_in_row >= 0, new, old), mask=in_block & may_write)


@triton.jit
def _convolve_tile(
    x_ptr, weight_ptr, bias, out_ptr, query_start_ptr, seq_lens_ptr, tile, num_rows, stride_x, channels, in_block,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, ROWS_PAD: tl.constexpr,
    HAS_SILU: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Convolve those tokens of a tile that are not among the first WIDTH - 1 of their row."""
    tokens = tile * TILE + tl.arange(0, TILE)
    all_rows = tl.arange(0, ROWS_PAD)
    starts = tl.load(query_start_ptr + all_rows, mask=all_rows < num_rows, other=2147483647)
    rows = tl.sum((starts[None, :] <= tokens[:, None]).to(tl.int32), 1) - 1
    first, num_tokens, _, is_padding = step_row(query_start_ptr, seq_lens_ptr, rows)
    is_later = (tokens - first >= WIDTH - 1) & (tokens - first < num_tokens)
    mask = is_later[:, None] & in_block[None, :]
    reads = mask & (is_padding == 0)[:, None]
    x_ptrs = x_ptr + tokens.to(tl.int64)[:, None] * stride_x + channels[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    y = tl.zeros((TILE, BLOCK), tl.float32) + bias[None, :]
    for tap in tl.static_range(WIDTH):
        weight = tl.load(weight_ptr + channels * WIDTH + tap, mask=in_block, other=0.0).to(tl.float32)
        x = tl.load(x_ptrs + (tap - (WIDTH - 1)) * stride_x, mask=reads, other=0.0).to(tl.float32)
        y += weight[None, :] * x
    y = y * tl.sigmoid(y) if HAS_SILU else y
    y = tl.where(is_padding[:, None], 0.0, y)
    out_ptrs = out_ptr + tokens.to(tl.int64)[:, None] * CHANNELS + channels[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _convolve_head(
    x_ptrs, state_ptrs, weight_ptr, bias, channels, stride_x, mask, reads,
    TOKEN: tl.constexpr, WIDTH: tl.constexpr, HAS_SILU: tl.constexpr,
):  # fmt: skip
    """Convolve the row's token number TOKEN, less than WIDTH - 1, whose oldest inputs are in the state."""
    y = bias
    for tap in tl.static_range(WIDTH):
        weight = tl.load(weight_ptr + channels * WIDTH + tap, mask=mask, other=0.0).to(tl.float32)
        if TOKEN + tap >= WIDTH - 1:
            x = tl.load(x_ptrs + (TOKEN + tap - (WIDTH - 1)) * stride_x, mask=mask, other=0.0).to(tl.float32)
        else:
            x = tl.load(state_ptrs + TOKEN + tap, mask=mask & reads, other=0.0)
        y += weight * x
    return y * tl.sigmoid(y) if HAS_SILU else y
