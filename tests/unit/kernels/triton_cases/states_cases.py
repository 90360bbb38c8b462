"""Rows of a state are found in the pool where the specification puts them, through Triton's interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.states import StateMetadata, StateView, load_states
from kernels.states_triton import place, row_writes, state_offsets, step_row


@triton.jit
def _read_kernel(
    query_start_ptr, seq_lens_ptr, req_index_ptr, writes_ptr, pages_ptr, stride_pages, out_ptr, facts_ptr,
    pool_ptr, first_piece, num_pages, NUM_LANES: tl.constexpr, PIECE: tl.constexpr, ROW_SIZE: tl.constexpr,
    NUM_ROWS: tl.constexpr, ROWS_PAD: tl.constexpr, SIZE_PAD: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    first, num_tokens, has_state, is_padding = step_row(query_start_ptr, seq_lens_ptr, row)
    may_write = row_writes(writes_ptr, row)
    pages = pages_ptr + tl.load(req_index_ptr + row) * stride_pages
    rows, columns = tl.arange(0, ROWS_PAD), tl.arange(0, SIZE_PAD)
    is_read = (rows < NUM_ROWS) & has_state & (is_padding == 0)
    offsets = state_offsets(pages, rows, is_read, first_piece, num_pages, NUM_LANES, PIECE, ROW_SIZE)
    mask = is_read[:, None] & (columns < ROW_SIZE)[None, :]
    state = tl.load(pool_ptr + offsets[:, None] + columns[None, :], mask=mask, other=0.0)
    targets = out_ptr + row * NUM_ROWS * ROW_SIZE + rows[:, None] * ROW_SIZE + columns[None, :]
    tl.store(targets, state, mask=(rows < NUM_ROWS)[:, None] & (columns < ROW_SIZE)[None, :])
    tl.store(facts_ptr + row * 3 + 0, first)
    tl.store(facts_ptr + row * 3 + 1, num_tokens)
    tl.store(facts_ptr + row * 3 + 2, tl.where(may_write, 1, 0))


def test_a_kernel_finds_each_row_of_a_state_where_the_specification_puts_it():
    pool = torch.randn(3, 11, 50)  # rows of 12: four in a piece, and a rest of two numbers
    pool[:, 10] = torch.nan  # the page of the row that starts at 0, and of padding
    view = StateView(pool, first_piece=2, num_rows=13, row_size=12)
    pages = torch.tensor([[10, 10, 10], [3, 7, 1], [5, 0, 9]], dtype=torch.int32)
    metadata = StateMetadata(
        query_start_loc=torch.tensor([0, 1, 4, 4, 9], dtype=torch.int32),
        seq_lens=torch.tensor([6, 3, 0, 20], dtype=torch.int32),
        req_index=torch.tensor([2, 0, 0, 1]),
        pages=pages,
        writes=torch.tensor([1, 0, 1, 1], dtype=torch.int32),
        max_query_len=5,
        num_decodes=None,
    )
    out, facts = torch.full((4, 13, 12), 7.0), torch.zeros(4, 3, dtype=torch.int32)
    _read_kernel[(4,)](
        metadata.query_start_loc, metadata.seq_lens, metadata.req_index, metadata.writes, pages, pages.stride(0), out,
        facts, pool, *place(view), NUM_ROWS=13, ROWS_PAD=16, SIZE_PAD=16,
    )  # fmt: skip
    assert torch.equal(out, load_states(view, metadata))
    assert facts.tolist() == [[0, 1, 1], [1, 3, 0], [4, 0, 1], [4, 5, 1]]
