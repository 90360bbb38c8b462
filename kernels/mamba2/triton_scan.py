# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""Long rows of Mamba-2 in chunks of 64 tokens, on tensor cores: at most three launches.

T. Dao, A. Gu, "Transformers are SSMs", 2024, section 6, with one more level: a row is cut into segments of several
chunks, counted from the row's start. A program goes through the chunks of one segment with the state in registers.

    1. all segments in parallel: the first with its outputs; of the others but the last, the state at its end, as if
       it began with zeros
    2. from segment to segment: the true states at their ends
    3. all segments but the first in parallel, each from the state before it: outputs

The last segment of a row writes its state to the pool: no program of that launch reads the state before the row.
States go through memory once a segment, not once a chunk. Rows of one segment need the first launch alone.
Operands of products are rounded to x's dtype; sums and states are fp32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.states import StateMetadata, StateView
from kernels.states_triton import row_writes, state_offsets, step_row

_SEGMENTS = (64, 128, 256, 512, 1024, 2048)  # tokens
_SLOTS = 264  # programs that run at once on an H100, two for each SM
_LAUNCHES = 2.0  # what launches 2 and 3 cost, and one end in launch 2, in the time of a program's chunk
_PASS = 0.3
# Least logarithm of a token's decay: smaller ones forget as well, but cost the digits of sums behind them
_LEAST = tl.constexpr(-40.0)


@dataclass(frozen=True)
class ScanConfig:
    """Tile sizes and launch settings of one program."""

    chunk: int  # tokens
    block_p: int  # of a head's dimensions
    num_warps: int
    num_stages: int


def scan_config(head_dim: int, state_size: int, dtype: torch.dtype) -> ScanConfig:
    """Choose tiles: a state of up to 32 KiB for four warps. float32 uses no tensor cores, so its tiles are small."""
    head_pad = max(16, triton.next_power_of_2(head_dim))
    if dtype == torch.float32:
        return ScanConfig(chunk=16, block_p=16, num_warps=4, num_stages=1)
    block_p = min(64, head_pad)
    return ScanConfig(chunk=64, block_p=block_p, num_warps=8 if block_p * state_size > 8192 else 4, num_stages=2)


@functools.lru_cache(maxsize=4096)
def choose_segment(num_tokens: int, *, longest: int, num_programs: int) -> int:
    """Return the tokens of a segment that an estimate finds fastest, as if all rows were as long as the longest.

    num_programs: of one segment. A chunk without its output takes half the time of one with it.
    """
    longest = min(longest, num_tokens)

    def estimate(size: int) -> float:
        segments, chunks = -(-longest // size), -(-min(size, longest) // 64)
        share = num_tokens / longest * num_programs * chunks / _SLOTS
        if segments == 1:
            return max(chunks, share)
        first = max(chunks, share * (1 + (segments - 2) / 2))
        return first + max(chunks, share * (segments - 1)) + _LAUNCHES + _PASS * segments

    return min(_SEGMENTS, key=estimate)


def scan_rows(
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
    segment: int | None = None,
    config: ScanConfig | None = None,
    pdl: bool = False,
) -> None:
    """Compute rows[0] to rows[1] - 1, those of at least `shortest` tokens that are no padding, into out.

    Rows before rows[0] have one token each. Arguments as kernels.mamba2.triton.mamba2. segment: a multiple of 64.
    """
    num_tokens, num_heads, head_dim = x.shape
    state_size = view.row_size
    config = config or scan_config(head_dim, state_size, x.dtype)
    blocks = triton.cdiv(head_dim, config.block_p)
    segment = segment or choose_segment(num_tokens, longest=metadata.max_query_len, num_programs=num_heads * blocks)
    first_row, num_rows = rows[0], rows[1] - rows[0]
    # Row i's segments begin at (its first token // segment) + i: always enough room, without a scan
    num_segments = num_tokens // segment + num_rows
    # Only the ends of whole segments are kept: the first token // segment is room enough
    num_ends = num_tokens // segment + 1 if metadata.max_query_len > segment else 0
    ends = torch.empty(num_ends, num_heads * head_dim, state_size, dtype=torch.float32, device=x.device)
    decays = torch.empty(num_ends, num_heads, dtype=torch.float32, device=x.device)
    rows_of_step = (metadata.query_start_loc, metadata.seq_lens, shortest, first_row, num_rows, segment)
    sizes = {"NUM_HEADS": num_heads, "HEAD_DIM": head_dim, "ROW_SIZE": state_size,
             "N_PAD": max(16, triton.next_power_of_2(state_size)), "PDL": pdl, "launch_pdl": pdl}  # fmt: skip

    def launch(*, is_last: bool) -> None:
        _segments_kernel[(num_heads * blocks, num_segments)](
            x, b, c, dt, a, d, out, ends, decays,
            *rows_of_step, num_rows.bit_length(), metadata.req_index, metadata.writes,
            view.pool, metadata.pages, metadata.pages.stride(0), view.first_piece, view.pool.shape[1],
            x.stride(0), b.stride(0), c.stride(0), dt.stride(0),
            **sizes, NUM_LANES=view.pool.shape[0], PIECE=view.pool.shape[2],
            BLOCK_P=config.block_p, BLOCKS=blocks, HEADS_OF_GROUP=num_heads // b.shape[1], CHUNK=config.chunk,
            IS_LAST=is_last, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip

    launch(is_last=False)
    if metadata.max_query_len > 2 * segment:
        blocks_of_16 = triton.cdiv(head_dim, 16)
        _pass_states_kernel[(num_heads * blocks_of_16, num_rows)](
            ends, decays, *rows_of_step, **sizes, BLOCK_P=16, BLOCKS=blocks_of_16, num_warps=4
        )
    if metadata.max_query_len > segment:
        launch(is_last=True)


@triton.jit
def _find_segment(query_start_ptr, first_row, num_rows, search_steps, segment_size):
    """Return this program's row, the number of its segment in the row, and the place of the row's first end."""
    flat = tl.program_id(1)
    base = tl.load(query_start_ptr + first_row)
    low = 0
    high = num_rows
    for _ in range(0, search_steps):  # the last row whose first segment is not past this one
        middle = tl.minimum((low + high) // 2, num_rows - 1)
        is_past = (tl.load(query_start_ptr + first_row + middle) - base) // segment_size + middle > flat
        low = tl.where(is_past, low, middle)
        high = tl.where(is_past, middle, high)
    first_end = (tl.load(query_start_ptr + first_row + low) - base) // segment_size
    return first_row + low, flat - low - first_end, first_end


@triton.jit
def _walk(
    state, pointers, strides, start, end, a, d,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROW_SIZE: tl.constexpr, N_PAD: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    HAS_OUTPUT: tl.constexpr,
):  # fmt: skip
    """Take a state, transposed to [N, BLOCK_P], through tokens [start, end). Return it, and the log of their decays.

    pointers: x, b, c, dt, out, at this program's head or group. HAS_OUTPUT: write what the tokens read.
    """
    x_ptr, b_ptr, c_ptr, dt_ptr, out_ptr = pointers
    stride_x, stride_b, stride_c, stride_dt = strides
    in_chunk = tl.arange(0, CHUNK)
    dims = tl.program_id(0) % BLOCKS * BLOCK_P + tl.arange(0, BLOCK_P)
    columns = tl.arange(0, N_PAD)
    decay = 0.0
    for first in range(start, end, CHUNK):
        is_token = first + in_chunk < end
        in_x = is_token[:, None] & (dims < HEAD_DIM)[None, :]
        in_b = is_token[:, None] & (columns < ROW_SIZE)[None, :]
        tokens = (first + in_chunk).to(tl.int64)[:, None]
        dt = tl.load(dt_ptr + (first + in_chunk).to(tl.int64) * stride_dt, mask=is_token, other=0.0)
        x = tl.load(x_ptr + tokens * stride_x + dims[None, :], mask=in_x, other=0.0)
        b = tl.load(b_ptr + tokens * stride_b + columns[None, :], mask=in_b, other=0.0)
        logs = tl.maximum(dt * a, _LEAST)
        sums = tl.cumsum(logs, 0)
        total = tl.sum(logs, 0)
        if HAS_OUTPUT:
            c = tl.load(c_ptr + tokens * stride_c + columns[None, :], mask=in_b, other=0.0)
            scores = tl.dot(c, tl.trans(b), input_precision=PRECISION)
            is_seen = in_chunk[:, None] >= in_chunk[None, :]
            between = tl.where(is_seen, sums[:, None] - sums[None, :], float("-inf"))
            weights = scores * tl.exp(between) * dt[None, :]
            y = tl.dot(weights.to(x.dtype), x, input_precision=PRECISION) + d * x.to(tl.float32)
            y += tl.dot(c, state.to(c.dtype), input_precision=PRECISION) * tl.exp(sums)[:, None]
            out_ptrs = out_ptr + tokens * (NUM_HEADS * HEAD_DIM) + dims[None, :]
            tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=in_x)
        weighted = (x.to(tl.float32) * (dt * tl.exp(total - sums))[:, None]).to(x.dtype)
        state = tl.dot(tl.trans(b), weighted, state * tl.exp(total), input_precision=PRECISION)
        decay += total
    return state, decay


@triton.jit(do_not_specialize=["shortest", "first_row", "num_rows", "segment_size", "search_steps", "first_piece"])
def _segments_kernel(
    x_ptr, b_ptr, c_ptr, dt_ptr, a_ptr, d_ptr, out_ptr, ends_ptr, decays_ptr,
    query_start_ptr, seq_lens_ptr, shortest, first_row, num_rows, segment_size, search_steps, req_index_ptr, writes_ptr,
    pool_ptr, pages_ptr, stride_pages, first_piece, num_pages,
    stride_x, stride_b, stride_c, stride_dt,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROW_SIZE: tl.constexpr, N_PAD: tl.constexpr,
    PDL: tl.constexpr, NUM_LANES: tl.constexpr, PIECE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCKS: tl.constexpr, HEADS_OF_GROUP: tl.constexpr, CHUNK: tl.constexpr,
    IS_LAST: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """A head's BLOCK_P rows through one segment, in launch 1 or (IS_LAST) 3. Heads of a group share b and c in L2."""
    head = tl.program_id(0) // BLOCKS
    dims = tl.program_id(0) % BLOCKS * BLOCK_P + tl.arange(0, BLOCK_P)
    columns = tl.arange(0, N_PAD)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, segment, first_end = _find_segment(query_start_ptr, first_row, num_rows, search_steps, segment_size)
    first, num_tokens, has_state, is_padding = step_row(query_start_ptr, seq_lens_ptr, row)
    start = segment * segment_size
    is_end = start + segment_size >= num_tokens
    if is_padding | (num_tokens < shortest) | (start >= num_tokens):
        return
    if IS_LAST and segment == 0:
        return
    if not IS_LAST and (segment > 0) & is_end:
        return

    a = tl.load(a_ptr + head)
    d = tl.load(d_ptr + head)
    request = tl.load(req_index_ptr + row).to(tl.int64)
    pages_ptr += request * stride_pages
    rows = head * HEAD_DIM + dims
    in_tile = (dims < HEAD_DIM)[None, :] & (columns < ROW_SIZE)[:, None]
    ends_ptr += (first_end + segment).to(tl.int64) * (NUM_HEADS * HEAD_DIM * ROW_SIZE)
    group_column = head // HEADS_OF_GROUP * ROW_SIZE
    pointers = (x_ptr + head * HEAD_DIM, b_ptr + group_column, c_ptr + group_column, dt_ptr + head,
                out_ptr + head * HEAD_DIM)  # fmt: skip
    strides = (stride_x, stride_b, stride_c, stride_dt)
    start += first
    stop = tl.minimum(start + segment_size, first + num_tokens)
    # The tiles' addresses are computed twice: kept through the walk they would take half of the registers
    if IS_LAST or segment == 0:
        if IS_LAST:
            places = (rows * ROW_SIZE)[None, :] + columns[:, None]
            state = tl.load(ends_ptr - NUM_HEADS * HEAD_DIM * ROW_SIZE + places, mask=in_tile, other=0.0)
        else:
            offsets = state_offsets(
                pages_ptr, rows, dims < HEAD_DIM, first_piece, num_pages, NUM_LANES, PIECE, ROW_SIZE
            )
            state = tl.load(pool_ptr + (offsets[None, :] + columns[:, None]), mask=in_tile & has_state, other=0.0)
        state, decay = _walk(
            state, pointers, strides, start, stop, a, d,
            NUM_HEADS, HEAD_DIM, ROW_SIZE, N_PAD, BLOCK_P, BLOCKS, CHUNK, PRECISION, True,
        )  # fmt: skip
    else:
        state, decay = _walk(
            tl.zeros([N_PAD, BLOCK_P], tl.float32), pointers, strides, start, stop, a, d,
            NUM_HEADS, HEAD_DIM, ROW_SIZE, N_PAD, BLOCK_P, BLOCKS, CHUNK, PRECISION, False,
        )  # fmt: skip
    if is_end:
        offsets = state_offsets(pages_ptr, rows, dims < HEAD_DIM, first_piece, num_pages, NUM_LANES, PIECE, ROW_SIZE)
        may_write = row_writes(writes_ptr, row)
        tl.store(pool_ptr + (offsets[None, :] + columns[:, None]), state, mask=in_tile & may_write)
    elif not IS_LAST:
        tl.store(ends_ptr + ((rows * ROW_SIZE)[None, :] + columns[:, None]), state, mask=in_tile)
        if tl.program_id(0) % BLOCKS == 0:
            tl.store(decays_ptr + (first_end + segment).to(tl.int64) * NUM_HEADS + head, decay)


@triton.jit(do_not_specialize=["shortest", "first_row", "num_rows", "segment_size"])
def _pass_states_kernel(
    ends_ptr, decays_ptr, query_start_ptr, seq_lens_ptr, shortest, first_row, num_rows, segment_size,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROW_SIZE: tl.constexpr, N_PAD: tl.constexpr,
    PDL: tl.constexpr, BLOCK_P: tl.constexpr, BLOCKS: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_P rows of one head's state from the first segment's end on, which is true, through those of a row."""
    head, row = tl.program_id(0) // BLOCKS, first_row + tl.program_id(1)
    dims = tl.program_id(0) % BLOCKS * BLOCK_P + tl.arange(0, BLOCK_P)
    columns = tl.arange(0, N_PAD)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first, num_tokens, _, is_padding = step_row(query_start_ptr, seq_lens_ptr, row)
    num_ends = (num_tokens - 1) // segment_size
    if is_padding | (num_tokens < shortest) | (num_ends < 2):
        return

    in_tile = (dims < HEAD_DIM)[:, None] & (columns < ROW_SIZE)[None, :]
    end = ((first - tl.load(query_start_ptr + first_row)) // segment_size).to(tl.int64)
    tile = ((head * HEAD_DIM + dims) * ROW_SIZE)[:, None] + columns[None, :]
    end_ptrs = ends_ptr + end * (NUM_HEADS * HEAD_DIM * ROW_SIZE) + tile
    decay_ptr = decays_ptr + end * NUM_HEADS + head
    state = tl.load(end_ptrs, mask=in_tile, other=0.0)
    added_ptrs = end_ptrs + NUM_HEADS * HEAD_DIM * ROW_SIZE
    added = tl.load(added_ptrs, mask=in_tile, other=0.0)
    for segment in range(1, num_ends):
        decay_ptr += NUM_HEADS
        state = state * tl.exp(tl.load(decay_ptr)) + added
        here_ptrs = added_ptrs
        added_ptrs += NUM_HEADS * HEAD_DIM * ROW_SIZE
        # The next end is on its way while this one is stored
        added = tl.load(added_ptrs, mask=in_tile & (segment + 1 < num_ends), other=0.0)
        tl.store(here_ptrs, state, mask=in_tile)
