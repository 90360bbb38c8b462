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


@dataclass
class InputBatch:
    """The tensors of one step: R rows, T tokens, S rows that sample."""

    # [T] int64
    input_ids: torch.Tensor
    # [T] int64
    positions: torch.Tensor
    attention: AttentionMetadata
    # [R] int64
    req_index: torch.Tensor
    # [S] int64: index into the T hidden states of each sampling row's last token
    sample_tokens: torch.Tensor
    # [S] int64
    sample_req_index: torch.Tensor
    # [S] int64: the place in its request of the token to be chosen
    sample_positions: torch.Tensor
    # the sampling rows, for the host's decisions
    sample_rows: list[RowPlan]


class InputBatchBuilder:
    """Builds InputBatch after InputBatch over one DeviceState."""

    def __init__(self, state: DeviceState, *, block_size: int) -> None:
        self._state = state
        self._block_size = block_size
        self._num_blocks = [0] * state.last_token.shape[0]  # per req_index: length of its block table
        self._arange = torch.arange(state.last_token.shape[0] + 1, dtype=torch.int32, device=state.device)
        self._decode_key: list[int] = []
        self._decode_req_index = torch.empty(0, dtype=torch.int64, device=state.device)

    def build(self, plan: StepPlan) -> InputBatch:
        """Apply the plan's joins and table growth to the state, then gather one step's tensors. Does not sync."""
        if plan.inits:
            self._state.init(plan.inits)
            for init in plan.inits:
                self._num_blocks[init.req_index] = 0
        self._append_blocks(plan.rows)
        num_decodes = sum(1 for row in plan.rows if not row.token_ids)
        decode = self._decode_rows([row.req_index for row in plan.rows[:num_decodes]])
        if num_decodes == len(plan.rows):
            positions = self._state.num_computed[decode]
            return self._assemble(
                plan.rows,
                num_decodes,
                self._state.last_token[decode],
                positions,
                req_index=decode,
                token_req_index=decode,
                query_start_loc=self._arange[: num_decodes + 1],
                seq_lens=(positions + 1).to(torch.int32),
            )
        return self._build_mixed(plan.rows, num_decodes, decode)

    def _build_mixed(self, rows: list[RowPlan], num_decodes: int, decode: torch.Tensor) -> InputBatch:
        chunks = rows[num_decodes:]
        lengths = np.array([row.num_tokens for row in chunks])
        starts = np.array([row.start for row in chunks])
        req_index = np.array([row.req_index for row in chunks])
        ends = np.cumsum(lengths)
        offsets = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        token_ids = np.concatenate([np.array(row.token_ids) for row in chunks])
        positions = np.repeat(starts, lengths) + offsets
        packed = np.concatenate(
            [token_ids, positions, np.repeat(req_index, lengths), req_index, starts + lengths, num_decodes + ends]
        )
        device = self._state.device
        parts = torch.from_numpy(packed).to(device, non_blocking=True)
        t, r = int(ends[-1]), len(chunks)
        chunk_ids, chunk_positions, chunk_token_req, chunk_req, chunk_lens, chunk_ends = parts.split([t, t, t, r, r, r])
        decode_positions = self._state.num_computed[decode]
        return self._assemble(
            rows,
            num_decodes,
            torch.cat((self._state.last_token[decode], chunk_ids)),
            torch.cat((decode_positions, chunk_positions)),
            req_index=torch.cat((decode, chunk_req)),
            token_req_index=torch.cat((decode, chunk_token_req)),
            query_start_loc=torch.cat((self._arange[: num_decodes + 1], chunk_ends.to(torch.int32))),
            seq_lens=torch.cat((decode_positions + 1, chunk_lens)).to(torch.int32),
        )

    def _assemble(
        self,
        rows: list[RowPlan],
        num_decodes: int,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        req_index: torch.Tensor,
        token_req_index: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> InputBatch:
        state, size = self._state, self._block_size
        max_seq_len = max(row.start + row.num_tokens for row in rows)
        table = state.block_table[:, : -(-max_seq_len // size)].index_select(0, req_index)
        blocks = state.block_table[token_req_index, positions // size].to(torch.int64)
        metadata = AttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=table,
            slot_mapping=blocks * size + positions % size,
            max_query_len=max(row.num_tokens for row in rows[num_decodes:]) if num_decodes < len(rows) else 1,
            max_seq_len=max_seq_len,
            num_decodes=num_decodes,
        )
        last_tokens = (query_start_loc[1:] - 1).to(torch.int64)
        sample_rows = [row for row in rows if row.samples]
        sample_req_index, sample_positions = req_index, seq_lens
        if len(sample_rows) < len(rows):
            chosen = torch.tensor([i for i, row in enumerate(rows) if row.samples], dtype=torch.int64).to(state.device)
            last_tokens, sample_req_index, sample_positions = (
                last_tokens[chosen],
                req_index[chosen],
                seq_lens[chosen],
            )
        return InputBatch(
            input_ids,
            positions,
            metadata,
            req_index,
            sample_tokens=last_tokens,
            sample_req_index=sample_req_index,
            sample_positions=sample_positions.to(torch.int64),
            sample_rows=sample_rows,
        )

    def _decode_rows(self, key: list[int]) -> torch.Tensor:
        if key != self._decode_key:
            self._decode_key = key
            self._decode_req_index = torch.tensor(key, dtype=torch.int64).to(self._state.device, non_blocking=True)
        return self._decode_req_index

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
