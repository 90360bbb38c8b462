"""The inputs of a decode step, gathered by req_index from the device state: the torch specification. Any device.

Nothing here syncs. All outputs are fixed buffers, so a CUDA graph can hold the gathering and whatever reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DecodeInputs:
    """The tensors of decode rows, one token each; a step of R rows fills the first R entries."""

    # [max_rows] int64: each row's newest token, and its place in the request
    input_ids: torch.Tensor
    positions: torch.Tensor
    # [max_rows] int32: tokens attended to, positions + 1
    seq_lens: torch.Tensor
    # [max_rows] int64: where the token's key and value go
    slot_mapping: torch.Tensor
    # [max_rows, max_blocks] int32: defined as far as seq_lens needs
    block_table: torch.Tensor

    @classmethod
    def allocate(cls, *, max_rows: int, max_blocks: int, device: torch.device) -> DecodeInputs:
        """Allocate zeros: valid ids everywhere, also where no step has written yet."""
        return cls(
            input_ids=torch.zeros(max_rows, dtype=torch.int64, device=device),
            positions=torch.zeros(max_rows, dtype=torch.int64, device=device),
            seq_lens=torch.zeros(max_rows, dtype=torch.int32, device=device),
            slot_mapping=torch.zeros(max_rows, dtype=torch.int64, device=device),
            block_table=torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device),
        )


def gather_decode_inputs(
    req_index: torch.Tensor,
    *,
    last_token: torch.Tensor,
    num_computed: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    padding_row: int,
    out: DecodeInputs,
) -> None:
    """Fill the first R rows of out, and advance num_computed of the rows by one; the padding row stays at 0.

    req_index: [R] int64, distinct but for the padding row; last_token, num_computed: [rows] int64; block_table: [rows,
    max_blocks] int32. Nothing else of the step may read num_computed: it already counts this step's token.
    """
    num_rows = req_index.shape[0]
    positions = num_computed[req_index]
    tables = block_table[req_index]
    blocks = tables.gather(1, (positions // block_size)[:, None]).squeeze(1).to(torch.int64)
    out.input_ids[:num_rows] = last_token[req_index]
    out.positions[:num_rows] = positions
    out.seq_lens[:num_rows] = positions + 1
    out.slot_mapping[:num_rows] = blocks * block_size + positions % block_size
    out.block_table[:num_rows] = tables
    num_computed[req_index] = torch.where(req_index == padding_row, 0, positions + 1)
