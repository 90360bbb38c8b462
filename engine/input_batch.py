"""From a StepPlan to the tensors of one forward pass. Sees plans and tensors; owns nothing but caches of row layouts.

Decode rows take token, position and table from DeviceState: while the same requests decode, no tensor is made from a
Python list. Prompt chunks bring their tokens in one packed copy. Three index spaces: req_index (row of DeviceState),
row (place in this step), slot (block_id * block_size + offset).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.device_state import DeviceState
from engine.step import RowPlan, StepPlan
from kernels.attention.base import AttentionMetadata
from kernels.batch_inputs import DecodeInputs
from kernels.ops import gather_decode_inputs


@dataclass
class SampleRows:
    """The S rows of a step that sample: the host's view and the device's."""

    rows: list[RowPlan]
    # [S] int64
    req_index: torch.Tensor
    # [S] int64: the place in its request of the token to be chosen
    positions: torch.Tensor


@dataclass
class InputBatch:
    """The tensors of one forward pass: R rows, T tokens."""

    # [T] int64
    input_ids: torch.Tensor
    # [T] int64
    positions: torch.Tensor
    attention: AttentionMetadata
    # [R] int64
    req_index: torch.Tensor
    # [R] int64: index into the T hidden states of each row's last token; None: every token is its row's last
    last_tokens: torch.Tensor | None


class InputBatchBuilder:
    """Builds InputBatch after InputBatch over one DeviceState."""

    def __init__(self, state: DeviceState, *, block_size: int) -> None:
        self._state = state
        self._block_size = block_size
        self._num_blocks = [0] * state.last_token.shape[0]  # per req_index: length of its block table
        self._arange = torch.arange(state.last_token.shape[0] + 1, dtype=torch.int32, device=state.device)
        self._inputs = DecodeInputs.allocate(
            max_rows=state.last_token.shape[0], max_blocks=state.block_table.shape[1], device=state.device
        )
        self._decode_key: list[int] = []
        self._decode_req_index = torch.empty(0, dtype=torch.int64, device=state.device)

    def apply(self, plan: StepPlan) -> None:
        """Bring joins and table growth into the state; first thing of every step."""
        if plan.inits:
            self._state.init(plan.inits)
            for init in plan.inits:
                self._num_blocks[init.req_index] = 0
        self._append_blocks(plan.rows)

    def decode_req_index(self, rows: list[RowPlan]) -> torch.Tensor:
        """Return the req_index [R] int64 of decode rows: the same tensor while the rows are the same."""
        key = [row.req_index for row in rows]
        if key != self._decode_key:
            self._decode_key = key
            self._decode_req_index = torch.tensor(key, dtype=torch.int64).to(self._state.device, non_blocking=True)
        return self._decode_req_index

    def decode_batch(self, req_index: torch.Tensor, *, max_seq_len: int) -> InputBatch:
        """Gather decode rows, all from the state, which advances. Graph-safe: needs nothing of the host but the bound.

        The result lives in buffers that the next call fills again.
        """
        state, inputs, num_rows = self._state, self._inputs, req_index.shape[0]
        gather_decode_inputs(
            req_index,
            last_token=state.last_token,
            num_computed=state.num_computed,
            block_table=state.block_table,
            block_size=self._block_size,
            padding_row=state.padding_row,
            out=inputs,
        )
        metadata = AttentionMetadata(
            query_start_loc=self._arange[: num_rows + 1],
            seq_lens=inputs.seq_lens[:num_rows],
            block_table=inputs.block_table[:num_rows, : self._table_width(max_seq_len)],
            slot_mapping=inputs.slot_mapping[:num_rows],
            max_query_len=1,
            max_seq_len=max_seq_len,
            num_decodes=num_rows,
        )
        return InputBatch(inputs.input_ids[:num_rows], inputs.positions[:num_rows], metadata, req_index, None)

    def mixed_batch(self, rows: list[RowPlan], num_decodes: int) -> InputBatch:
        """Gather decode rows from the state and prompt chunks from the plan, which come in one packed copy."""
        state, chunks = self._state, rows[num_decodes:]
        lengths = np.array([row.num_tokens for row in chunks])
        starts = np.array([row.start for row in chunks])
        req_index = np.array([row.req_index for row in chunks])
        ends = np.cumsum(lengths)
        positions = np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)
        token_ids = np.concatenate([np.array(row.token_ids) for row in chunks])
        packed = np.concatenate(
            [token_ids, positions, np.repeat(req_index, lengths), req_index, starts + lengths, num_decodes + ends]
        )
        t, r = int(ends[-1]), len(chunks)
        parts = torch.from_numpy(packed).to(state.device, non_blocking=True).split([t, t, t, r, r, r])
        decode = self.decode_req_index(rows[:num_decodes])
        decode_positions = state.num_computed[decode]
        all_positions = torch.cat((decode_positions, parts[1]))
        all_req_index = torch.cat((decode, parts[3]))
        query_start_loc = torch.cat((self._arange[: num_decodes + 1], parts[5].to(torch.int32)))
        max_seq_len = max(row.start + row.num_tokens for row in rows)
        metadata = AttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=torch.cat((decode_positions + 1, parts[4])).to(torch.int32),
            block_table=self._tables(all_req_index, max_seq_len),
            slot_mapping=self._slots(torch.cat((decode, parts[2])), all_positions),
            max_query_len=int(lengths.max()),
            max_seq_len=max_seq_len,
            num_decodes=num_decodes,
        )
        input_ids = torch.cat((state.last_token[decode], parts[0]))
        return InputBatch(input_ids, all_positions, metadata, all_req_index, (query_start_loc[1:] - 1).to(torch.int64))

    def _tables(self, req_index: torch.Tensor, max_seq_len: int) -> torch.Tensor:
        """The block tables of rows, as wide as the longest needs."""
        return self._state.block_table[:, : self._table_width(max_seq_len)].index_select(0, req_index)

    def _table_width(self, max_seq_len: int) -> int:
        """Columns for max_seq_len tokens, in sixteens: kernels specialise on such strides."""
        return -(-max_seq_len // self._block_size // 16) * 16

    def _slots(self, token_req_index: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where each token's key and value go."""
        blocks = self._state.block_table[token_req_index, positions // self._block_size].to(torch.int64)
        return blocks * self._block_size + positions % self._block_size

    def _append_blocks(self, rows: list[RowPlan]) -> None:
        growing = [row for row in rows if row.new_block_ids]
        if not growing:
            return
        req_index: list[int] = []
        columns: list[int] = []
        block_ids: list[int] = []
        for row in growing:
            first = self._num_blocks[row.req_index]
            count = len(row.new_block_ids)
            req_index += [row.req_index] * count
            columns += range(first, first + count)
            block_ids += row.new_block_ids
            self._num_blocks[row.req_index] = first + count
        self._state.append_blocks(req_index, columns, block_ids)
