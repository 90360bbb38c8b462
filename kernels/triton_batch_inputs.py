# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""Triton twin of kernels/batch_inputs.py: a decode step's inputs in one launch instead of a dozen gathers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.batch_inputs import DecodeInputs


def gather_decode_inputs(
    req_index: torch.Tensor,
    *,
    last_token: torch.Tensor,
    num_computed: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    padding_row: int,
    out: DecodeInputs,
    pdl: bool = False,
) -> None:
    """Equal batch_inputs.gather_decode_inputs, but copy only the columns of block_table that a row's length needs.

    Columns past those keep what they held. pdl: launch early, under the kernel before (programmatic dependent launch).
    """
    _gather_kernel[(req_index.shape[0],)](
        req_index, last_token, num_computed, block_table,
        out.input_ids, out.positions, out.seq_lens, out.slot_mapping, out.block_table,
        padding_row, block_table.stride(0), out.block_table.stride(0),
        BLOCK_SIZE=block_size, BLOCK=512, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["padding_row"])
def _gather_kernel(
    req_index_ptr, last_token_ptr, num_computed_ptr, table_ptr,
    input_ids_ptr, positions_ptr, seq_lens_ptr, slots_ptr, out_table_ptr,
    padding_row, stride_table, stride_out,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row. A single program reads and advances its length: a second one could read it too late."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    req_index = tl.load(req_index_ptr + row)
    position = tl.load(num_computed_ptr + req_index)
    table_row_ptr = table_ptr + req_index * stride_table
    block = tl.load(table_row_ptr + position // BLOCK_SIZE).to(tl.int64)
    tl.store(input_ids_ptr + row, tl.load(last_token_ptr + req_index))
    tl.store(positions_ptr + row, position)
    tl.store(seq_lens_ptr + row, (position + 1).to(tl.int32))
    tl.store(slots_ptr + row, block * BLOCK_SIZE + position % BLOCK_SIZE)
    num_blocks = (position // BLOCK_SIZE + 1).to(tl.int32)
    for start in range(0, num_blocks, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        blocks = tl.load(table_row_ptr + columns, mask=columns < num_blocks, other=0)
        tl.store(out_table_ptr + row * stride_out + columns, blocks, mask=columns < num_blocks)
    # Every warp has read the length before one thread writes it
    tl.debug_barrier()
    tl.store(num_computed_ptr + req_index, tl.where(req_index == padding_row, 0, position + 1))
