# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""Triton twins of kernels/inputs/reference.py: a step's inputs in one launch instead of a dozen gathers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.inputs.reference import DecodeInputs, DraftInputs, MixedInputs, PackedInputs

_TOKENS = 256  # per program


def gather_decode_inputs(
    req_index: torch.Tensor,
    *,
    last_token: torch.Tensor,
    num_computed: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    padding_row: int,
    out: DecodeInputs,
) -> None:
    """Equal reference.gather_decode_inputs, but copy only the columns of block tables that a row's length needs.

    Other columns keep their values.
    """
    _gather_kernel[(req_index.shape[0],)](
        req_index, last_token, num_computed, block_tables,
        out.input_ids, out.positions, out.seq_lens, out.state_lens, out.slot_mappings, out.block_tables,
        padding_row, block_tables.stride(0), block_tables.stride(1), out.block_tables.stride(0),
        out.block_tables.stride(1), out.slot_mappings.stride(0),
        NUM_TABLES=block_tables.shape[0], BLOCK_SIZE=block_size, BLOCK=512, num_warps=4,
    )  # fmt: skip


def gather_mixed_inputs(
    last_token: torch.Tensor,
    packed: PackedInputs,
    *,
    num_computed: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    out: MixedInputs,
) -> None:
    """Equal reference.gather_mixed_inputs, but copy only the columns of block tables that a row's length needs."""
    num_tokens, num_rows = packed.token_ids.shape[0], packed.req_index.shape[0]
    _gather_mixed_kernel[(num_rows + triton.cdiv(num_tokens, _TOKENS),)](
        packed.token_ids, packed.token_rows, packed.req_index, packed.seq_lens,
        packed.sample_rows, packed.sample_tokens, packed.query_start_loc, last_token, num_computed, block_tables,
        out.input_ids, out.positions, out.slot_mappings, out.block_tables,
        out.sample_req_index, out.sample_positions, out.sample_tokens,
        num_tokens, num_rows, block_tables.stride(0), block_tables.stride(1), out.block_tables.stride(0),
        out.block_tables.stride(1), out.slot_mappings.stride(0),
        NUM_TABLES=block_tables.shape[0], BLOCK_SIZE=block_size, BLOCK=512, TOKENS=_TOKENS, num_warps=4,
    )  # fmt: skip


def gather_draft_inputs(
    ring_start: torch.Tensor, packed: PackedInputs, *, ring_size: int, padding_row: int, out: DraftInputs
) -> None:
    """Equal reference.gather_draft_inputs up to out.settle_start_loc's last entry; other entries of source stay."""
    _gather_drafts_kernel[(1,)](
        ring_start, packed.req_index, packed.seq_lens, packed.sample_rows, packed.sample_tokens, packed.num_drafts,
        packed.query_start_loc, out.writes, out.settle_start_loc, out.settle_lens, out.source, out.target,
        packed.req_index.shape[0], padding_row,
        RING_SIZE=ring_size, BLOCK=triton.next_power_of_2(out.writes.shape[0]), num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["padding_row"])
def _gather_kernel(
    req_index_ptr, last_token_ptr, num_computed_ptr, tables_ptr,
    input_ids_ptr, positions_ptr, seq_lens_ptr, state_lens_ptr, slots_ptr, out_tables_ptr,
    padding_row, stride_table, stride_row, stride_out_table, stride_out_row, stride_slots,
    NUM_TABLES: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row. A single program reads and advances its length: a second one could read it too late."""
    row = tl.program_id(0).to(tl.int64)
    req_index = tl.load(req_index_ptr + row)
    position = tl.load(num_computed_ptr + req_index)
    tl.store(input_ids_ptr + row, tl.load(last_token_ptr + req_index))
    tl.store(positions_ptr + row, position)
    tl.store(seq_lens_ptr + row, (position + 1).to(tl.int32))
    if state_lens_ptr is not None:
        tl.store(state_lens_ptr + row, tl.where(req_index == padding_row, 0, position + 1).to(tl.int32))
    num_blocks = (position // BLOCK_SIZE + 1).to(tl.int32)
    for table in tl.static_range(NUM_TABLES):
        source_ptr = tables_ptr + table * stride_table + req_index * stride_row
        block = tl.load(source_ptr + position // BLOCK_SIZE).to(tl.int64)
        tl.store(slots_ptr + table * stride_slots + row, block * BLOCK_SIZE + position % BLOCK_SIZE)
        _copy_row(source_ptr, out_tables_ptr + table * stride_out_table + row * stride_out_row, num_blocks, BLOCK)
    # Every warp has read the length before one thread writes it
    tl.debug_barrier()
    tl.store(num_computed_ptr + req_index, tl.where(req_index == padding_row, 0, position + 1))


@triton.jit
def _copy_row(source_ptr, target_ptr, num_blocks, BLOCK: tl.constexpr):
    """Copy the first num_blocks entries of a block table."""
    for start in range(0, num_blocks, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        blocks = tl.load(source_ptr + columns, mask=columns < num_blocks, other=0)
        tl.store(target_ptr + columns, blocks, mask=columns < num_blocks)


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _gather_mixed_kernel(
    token_ids_ptr, token_rows_ptr, req_index_ptr, seq_lens_ptr, sample_rows_ptr, sample_tokens_ptr, query_start_ptr,
    last_token_ptr, num_computed_ptr, tables_ptr,
    input_ids_ptr, positions_ptr, slots_ptr, out_tables_ptr, out_req_index_ptr, out_positions_ptr, out_tokens_ptr,
    num_tokens, num_rows, stride_table, stride_row, stride_out_table, stride_out_row, stride_slots,
    NUM_TABLES: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The first programs take one row each, the rest TOKENS tokens each; neither reads the other's output."""
    program = tl.program_id(0)
    if program < num_rows:
        _gather_row(
            program.to(tl.int64), req_index_ptr, seq_lens_ptr, sample_rows_ptr, sample_tokens_ptr, query_start_ptr,
            num_computed_ptr, tables_ptr, out_tables_ptr, out_req_index_ptr, out_positions_ptr, out_tokens_ptr,
            stride_table, stride_row, stride_out_table, stride_out_row, NUM_TABLES, BLOCK_SIZE, BLOCK,
        )  # fmt: skip
    else:
        _gather_tokens(
            (program - num_rows) * TOKENS + tl.arange(0, TOKENS), num_tokens, token_ids_ptr, token_rows_ptr,
            req_index_ptr, seq_lens_ptr, query_start_ptr, last_token_ptr, tables_ptr,
            input_ids_ptr, positions_ptr, slots_ptr, stride_table, stride_row, stride_slots, NUM_TABLES, BLOCK_SIZE,
        )  # fmt: skip


@triton.jit
def _gather_row(
    row, req_index_ptr, seq_lens_ptr, sample_rows_ptr, sample_tokens_ptr, query_start_ptr,
    num_computed_ptr, tables_ptr, out_tables_ptr, out_req_index_ptr, out_positions_ptr, out_tokens_ptr,
    stride_table, stride_row, stride_out_table, stride_out_row,
    NUM_TABLES: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy length and block tables of one row, and the sampled position at the row's index."""
    req_index = tl.load(req_index_ptr + row).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + row)
    tl.store(num_computed_ptr + req_index, seq_len.to(tl.int64))
    num_blocks = tl.cdiv(seq_len, BLOCK_SIZE)
    for table in tl.static_range(NUM_TABLES):
        source_ptr = tables_ptr + table * stride_table + req_index * stride_row
        _copy_row(source_ptr, out_tables_ptr + table * stride_out_table + row * stride_out_row, num_blocks, BLOCK)
    sample_row, sample_token = tl.load(sample_rows_ptr + row), tl.load(sample_tokens_ptr + row)
    num_after = tl.load(query_start_ptr + sample_row + 1) - 1 - sample_token
    tl.store(out_req_index_ptr + row, tl.load(req_index_ptr + sample_row).to(tl.int64))
    tl.store(out_positions_ptr + row, (tl.load(seq_lens_ptr + sample_row) - num_after).to(tl.int64))
    tl.store(out_tokens_ptr + row, sample_token.to(tl.int64))


@triton.jit
def _gather_tokens(
    tokens, num_tokens, token_ids_ptr, token_rows_ptr, req_index_ptr, seq_lens_ptr, query_start_ptr, last_token_ptr,
    tables_ptr, input_ids_ptr, positions_ptr, slots_ptr, stride_table, stride_row, stride_slots,
    NUM_TABLES: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Compute id and position of each token, and its slot by each block table."""
    is_real = tokens < num_tokens
    row = tl.load(token_rows_ptr + tokens, mask=is_real, other=0)
    req_index = tl.load(req_index_ptr + row, mask=is_real, other=0).to(tl.int64)
    end = tl.load(query_start_ptr + row + 1, mask=is_real, other=0)
    seq_len = tl.load(seq_lens_ptr + row, mask=is_real, other=0)
    position = tl.where(seq_len > 0, seq_len - end + tokens, 0).to(tl.int64)
    token_id = tl.load(token_ids_ptr + tokens, mask=is_real, other=0).to(tl.int64)
    newest = tl.load(last_token_ptr + req_index, mask=is_real, other=0)
    tl.store(input_ids_ptr + tokens, tl.where(token_id < 0, newest, token_id), mask=is_real)
    tl.store(positions_ptr + tokens, position, mask=is_real)
    entry_ptr = tables_ptr + req_index * stride_row + position // BLOCK_SIZE
    for table in tl.static_range(NUM_TABLES):
        block = tl.load(entry_ptr + table * stride_table, mask=is_real, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(slots_ptr + table * stride_slots + tokens, slot, mask=is_real)


@triton.jit(do_not_specialize=["num_rows", "padding_row"])
def _gather_drafts_kernel(
    ring_start_ptr, req_index_ptr, seq_lens_ptr, sample_rows_ptr, sample_tokens_ptr, num_drafts_ptr, query_start_ptr,
    writes_ptr, settle_start_ptr, settle_lens_ptr, source_ptr, target_ptr,
    num_rows, padding_row,
    RING_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All rows in one program: each row's first place follows from the rows before it."""
    rows = tl.arange(0, BLOCK)
    is_row = rows < num_rows
    req_index = tl.load(req_index_ptr + rows, mask=is_row, other=0)
    seq_len = tl.load(seq_lens_ptr + rows, mask=is_row, other=0)
    first = tl.load(query_start_ptr + rows, mask=is_row, other=0)
    start = seq_len - (tl.load(query_start_ptr + rows + 1, mask=is_row, other=0) - first)
    is_drafted = tl.load(num_drafts_ptr + rows, mask=is_row, other=0) > 0
    kept = tl.load(ring_start_ptr + req_index, mask=is_row, other=-1)
    is_due = (seq_len > 0) & (kept >= 0)
    count = tl.minimum(tl.maximum(tl.where(is_due, start - kept, 0), 0), RING_SIZE)
    end = tl.cumsum(count)
    tl.store(writes_ptr + rows, tl.where(is_drafted, 0, 1), mask=is_row)
    tl.store(settle_start_ptr + 1 + rows, end, mask=is_row)
    tl.store(settle_lens_ptr + rows, tl.where(count > 0, start, 0), mask=is_row)
    for place in tl.static_range(RING_SIZE):
        source = req_index.to(tl.int64) * RING_SIZE + place
        tl.store(source_ptr + end - count + place, source, mask=is_row & (place < count))
    sample_row = tl.load(sample_rows_ptr + rows, mask=is_row, other=0)
    within = tl.load(sample_tokens_ptr + rows, mask=is_row, other=0) - tl.load(query_start_ptr + sample_row)
    target = tl.load(req_index_ptr + sample_row).to(tl.int64) * RING_SIZE + within
    is_kept = tl.load(num_drafts_ptr + sample_row) > 0
    padding = tl.zeros_like(target) + padding_row * RING_SIZE
    tl.store(target_ptr + rows, tl.where(is_kept, target, padding), mask=is_row)
    # Requests of two rows are the padding request, of which nothing is ever kept
    tl.store(ring_start_ptr + req_index, tl.where(is_drafted, start, -1), mask=is_row)
