"""InputBatchBuilder: builds the input tensors of a forward pass from a StepPlan. Imports torch.

It owns the input buffers and a cache of the decode rows' layout. Decode rows take token, position and block table from
DeviceState: while the same requests decode, no tensor is made from a Python list. For a step with prompt chunks, the
host sends all its values in one packed copy. There are three index spaces: req_index (row of DeviceState), row
(position in this step), slot (block_id * block_size + offset). Plans number pages; block tables on the device hold the
units of attention in them, which the builder writes (engine/device/page_plan.py).
A step begins with pack() or pack_decodes(), which bring the plan into DeviceState and return what later calls take.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch

from engine.core.shared_prefixes import MAX_GROUPS
from engine.core.step import NEWEST, StepPlan
from engine.device.device_state import DeviceState
from engine.device.page_plan import PagePlan
from engine.device.step_states import StateRows
from kernels.attention.base import AttentionMetadata, SharedRows
from kernels.inputs.reference import DecodeInputs, MixedInputs, PackedInputs
from kernels.ops import LoraTokens, gather_decode_inputs, gather_mixed_inputs
from models.context import StepStates

_NUM_VIEWS = 64  # views of the packed buffer that are kept: most steps with graphs have a shape that was before
_FEW_ENTRIES = 3  # so many runs of blocks are written to tables one by one, in less time than all at once


@dataclass(frozen=True)
class RowColumns:
    """The R rows of a plan in its order, as arrays on the host."""

    # [R] each
    req_index: np.ndarray
    start: np.ndarray
    num_tokens: np.ndarray
    num_samples: np.ndarray
    num_drafts: np.ndarray
    num_decodes: int  # the first rows, whose token only the device knows
    token_ids: np.ndarray  # of the other rows
    shape: MixedShape  # the smallest of a mixed step: without padding unless more positions are sampled than rows
    has_drafts: bool
    samples_once: bool  # every row

    @classmethod
    def of(cls, plan: StepPlan) -> RowColumns:
        """Make the columns of a plan."""
        num_decodes = num_steady = plan.steady.num_rows
        index, start = (np.frombuffer(column, np.int32) for column in (plan.steady.req_index, plan.steady.start))
        ones, zeros = np.ones(num_steady, np.int32), np.zeros(num_steady, np.int32)
        if not plan.singles:  # most steps, in which the device may wait for the host
            shape = MixedShape(num_steady, num_steady, 0)
            return cls(index, start, ones, ones, zeros, num_steady, zeros[:0], shape, False, True)
        fields, ids = list[int](), list[int]()
        for row in plan.singles:
            fields += (row.req_index, row.start, row.num_tokens, row.num_samples, row.num_drafts)
            ids += row.token_ids
            num_decodes += not row.token_ids
        num_rows, sampled, drafted = num_steady + len(plan.singles), num_steady + sum(fields[3::5]), any(fields[4::5])
        num_tokens, num_prefills = num_steady + sum(fields[2::5]), num_rows - num_decodes + (sampled > num_rows)
        shape = MixedShape(num_tokens, max(num_rows, sampled), num_prefills)
        columns = np.array(fields, np.int32).reshape(len(plan.singles), 5).T
        columns = np.concatenate([[index, start, ones, ones, zeros], columns], axis=1) if num_steady else columns
        once = sampled == num_rows and not drafted
        index, start, tokens, samples, drafts = columns
        return cls(index, start, tokens, samples, drafts, num_decodes, np.array(ids, np.int32), shape, drafted, once)

    @cached_property
    def ends(self) -> np.ndarray:
        """The number of tokens of each row's request up to the row's end. [R]"""
        return self.start + self.num_tokens

    def of_samples(self, column: np.ndarray) -> np.ndarray:
        """Return a column's [R] values once for each sampled position of its row."""
        return column if self.samples_once else column.repeat(self.num_samples)


@dataclass
class SamplingMetadata:
    """The S sampled positions of a step, on the host and on the device."""

    # [S] of each position its row's req_index and end, on the host
    host_req_index: np.ndarray
    host_ends: np.ndarray
    # [S] int64
    req_index: torch.Tensor
    # [S] int64: the index in its request of the token to sample
    positions: torch.Tensor


class MixedShape(NamedTuple):
    """The tensor sizes of a step with prompt chunks, at least as large as its rows need."""

    num_tokens: int
    num_rows: int  # also the maximum number of sampled positions
    num_prefills: int  # rows that may have more than one token


@dataclass
class InputBatch:
    """The tensors of one forward pass: R rows, T tokens."""

    # [T] int64
    input_ids: torch.Tensor
    # [T] int64
    positions: torch.Tensor
    attention: list[AttentionMetadata]  # of each block table; they differ in block_table and slot_mapping alone
    # [R] int64: indices into the T hidden states of the tokens that are sampled after, the rest arbitrary;
    # None: every token
    last_tokens: torch.Tensor | None
    states: StepStates | None = None  # None: no layer has a state


@dataclass(frozen=True)
class PackedStep:
    """A mixed step whose host values have been sent to the device. Valid until the next step is packed."""

    shape: MixedShape
    rows: RowColumns | None  # None: a step with padding only
    inputs: PackedInputs
    mixed: MixedInputs

    @cached_property
    def sampling(self) -> SamplingMetadata:
        """Its sampled positions, whose tensors are valid once mixed_batch() has gathered the inputs."""
        assert self.rows is not None
        on_host, ends = self.rows.of_samples(self.rows.req_index), self.rows.of_samples(self.rows.ends)
        mixed, count = self.mixed, len(ends)
        return SamplingMetadata(on_host, ends, mixed.sample_req_index[:count], mixed.sample_positions[:count])

    @property
    def row_lens(self) -> list[tuple[int, int]]:
        """Query tokens and seq_len of each attended row, in the order on the device."""
        if self.rows is None:
            return []
        counts, ends = _device_order(self.rows, self.rows.num_tokens), _device_order(self.rows, self.rows.ends)
        lens = list(zip(counts.tolist(), ends.tolist(), strict=True))
        if self.shape.num_rows > len(lens):
            lens.insert(0, (self.shape.num_tokens - int(counts.sum()), 0))
        return lens


class InputBatchBuilder:
    """Builds the InputBatch of each step over one DeviceState. The next step reuses its buffers."""

    def __init__(
        self,
        state: DeviceState,
        *,
        pages: PagePlan,
        num_pages: int,
        max_mixed: MixedShape,
        lora_tokens: LoraTokens | None = None,
        states: StateRows | None = None,
    ) -> None:
        """num_pages: of the pool, page 0 included. states: None: no layer has a state."""
        self._state = state
        self._states = states
        self._staging = state.staging
        self._pages = pages
        self._num_pages = num_pages
        self._group_of = pages.table_groups  # by table
        self._num_tables = len(self._group_of)
        # of layers that see all tokens: the tables whose rows may share their beginning
        self._whole_tables = [
            table for table, group in enumerate(self._group_of) if pages.groups[group].cache.reach is None
        ]
        self._units_per_page = [pages.groups[group].units_per_page for group in self._group_of]
        self._block_size = pages.block_size
        self._lora_tokens = lora_tokens
        (num_tables, max_rows, max_blocks), device = state.block_tables.shape, state.device
        self._arange = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._inputs = DecodeInputs.allocate(
            num_tables=num_tables,
            max_rows=max_rows,
            max_blocks=max_blocks,
            device=device,
            has_states=states is not None,
        )
        self._decode_key = b""
        self._decode_req_index = torch.empty(0, dtype=torch.int64, device=device)
        self._mixed = MixedInputs.allocate(
            num_tables=num_tables,
            max_tokens=max_mixed.num_tokens,
            max_rows=max_mixed.num_rows,
            max_blocks=max_blocks,
            device=device,
        )
        self._has_drafts = states is not None and states.has_ring
        num_values = PackedInputs.num_values(max_mixed.num_tokens, max_mixed.num_rows, has_drafts=self._has_drafts)
        self._packed = torch.zeros(num_values, dtype=torch.int32, device=device)
        self._views = lru_cache(maxsize=_NUM_VIEWS)(partial(PackedInputs.view, self._packed))
        self._places = lru_cache(maxsize=_NUM_VIEWS)(partial(PackedInputs.places, has_drafts=self._has_drafts))

    def pack_decodes(self, plan: StepPlan) -> torch.Tensor:
        """Begin a step of decode rows. Return their req_index [R] int64: the same tensor while rows are the same."""
        self._begin_step(plan)
        key = plan.req_index
        if key != self._decode_key:
            self._decode_req_index = self._staging.send(np.frombuffer(key, np.int32).astype(np.int64))
            self._decode_key = key  # after send(), which may fail
        return self._decode_req_index

    def decode_batch(self, req_index: torch.Tensor, *, max_seq_len: int, is_grouped: bool = False) -> InputBatch:
        """Gather decode rows from the state and advance it. Graph-safe: the host only passes max_seq_len, a bound.

        is_grouped: attention is to read what rows of a group share once.
        """
        state, inputs, num_rows = self._state, self._inputs, req_index.shape[0]
        gather_decode_inputs(
            req_index,
            last_token=state.last_token,
            num_computed=state.num_computed,
            block_tables=state.block_tables,
            block_size=self._block_size,
            padding_row=state.padding_row,
            out=inputs,
        )
        self._gather_loras(req_index, None)
        width = self._table_width(max_seq_len)
        shared = SharedRows(req_index, state.shares, MAX_GROUPS) if is_grouped else None
        attention = [
            AttentionMetadata(
                query_start_loc=self._arange[: num_rows + 1],
                seq_lens=inputs.seq_lens[:num_rows],
                block_table=block_table[:num_rows, :width],
                slot_mapping=slot_mapping[:num_rows],
                max_query_len=1,
                max_seq_len=max_seq_len,
                num_decodes=num_rows,
                shared=shared if table in self._whole_tables else None,
            )
            for table, (block_table, slot_mapping) in enumerate(
                zip(inputs.block_tables, inputs.slot_mappings, strict=True)
            )
        ]
        states = None
        if self._states is not None:
            states = self._states.of_decodes(req_index, inputs, self._arange[: num_rows + 1])
        return InputBatch(inputs.input_ids[:num_rows], inputs.positions[:num_rows], attention, None, states)

    def pack(self, plan: StepPlan, rows: RowColumns, shape: MixedShape) -> PackedStep:
        """Begin a mixed step: send the host's values of its rows, padded to `shape`.

        Prompt chunks come first, then decode rows. If `shape` has more rows, the first is a padding row, which has all
        padding tokens.
        """
        self._begin_step(plan)
        self._send(rows, shape)
        return self._packed_step(shape, rows)

    def blank_step(self, shape: MixedShape) -> PackedStep:
        """Return a step without rows at the addresses that pack() uses for `shape`, to capture a graph."""
        return self._packed_step(shape, None)

    def mixed_batch(
        self,
        packed: PackedStep,
        *,
        max_query_len: int,
        max_seq_len: int,
        row_lens: list[tuple[int, int]] | None = None,
        is_grouped: bool = False,
    ) -> InputBatch:
        """Gather a packed step. Graph-safe: the host only passes bounds. is_grouped: as of decode_batch().

        row_lens: of the packed rows, which are then the only ones; None: any row may have tokens, for a graph.
        """
        state, inputs, host = self._state, self._mixed, packed.inputs
        num_tokens, num_rows, num_prefills = packed.shape
        attended = num_rows if row_lens is None else len(row_lens)
        gather_mixed_inputs(
            state.last_token,
            host,
            num_computed=state.num_computed,
            block_tables=state.block_tables,
            block_size=self._block_size,
            out=inputs,
        )
        self._gather_loras(host.req_index, host.token_rows)
        width = self._table_width(max_seq_len)
        shared = SharedRows(host.req_index[:attended], state.shares, MAX_GROUPS) if is_grouped else None
        attention = [
            AttentionMetadata(
                query_start_loc=host.query_start_loc[: attended + 1],
                seq_lens=host.seq_lens[:attended],
                block_table=block_table[:attended, :width],
                slot_mapping=slot_mapping[:num_tokens],
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
                num_decodes=None,
                max_prefills=num_prefills,
                row_lens=row_lens,
                shared=shared if table in self._whole_tables else None,
            )
            for table, (block_table, slot_mapping) in enumerate(
                zip(inputs.block_tables, inputs.slot_mappings, strict=True)
            )
        ]
        states = None
        if self._states is not None:
            states = self._states.of_mixed(
                host, inputs, num_rows=attended, max_query_len=max_query_len, max_prefills=num_prefills
            )
        last_tokens = inputs.sample_tokens[:num_rows]
        return InputBatch(inputs.input_ids[:num_tokens], inputs.positions[:num_tokens], attention, last_tokens, states)

    def _begin_step(self, plan: StepPlan) -> None:
        """Apply the plan's new requests and new blocks to the state."""
        self._staging.begin_step()
        if plan.inits:
            self._state.init(plan.inits)
        if plan.shares:
            self._state.write_shares(plan.shares)
        self._write_blocks(plan)

    def _packed_step(self, shape: MixedShape, rows: RowColumns | None) -> PackedStep:
        """Return the step of these rows, whose values are in the packed buffer or being copied to it."""
        return PackedStep(shape, rows, self._views(*shape[:2], has_drafts=self._has_drafts), self._mixed)

    def _send(self, rows: RowColumns, shape: MixedShape) -> None:
        """Fill the packed buffer with a plan's rows."""
        num_planned, num_paddings = len(rows.req_index), int(shape.num_rows > len(rows.req_index))
        lengths = _device_order(rows, rows.num_tokens)
        num_surplus = shape.num_tokens - rows.shape.num_tokens  # tokens, all of the padding row
        if num_paddings:
            lengths = np.concatenate([[num_surplus], lengths])
        sizes = (shape.num_tokens, shape.num_rows)
        packed = np.zeros(PackedInputs.num_values(*sizes, has_drafts=self._has_drafts), dtype=np.int32)
        sections = [packed[place] for place in self._places(*sizes)]
        token_ids, token_rows, req_index, seq_lens, sample_rows, sample_tokens, starts, *drafts = sections
        num_rows, num_given = len(lengths), num_surplus + len(rows.token_ids)
        token_ids[num_surplus:num_given] = rows.token_ids
        token_ids[num_given:] = NEWEST
        token_rows[:] = np.arange(num_rows).repeat(lengths)
        req_index[:] = self._state.padding_row
        req_index[num_paddings:num_rows] = _device_order(rows, rows.req_index)
        seq_lens[num_paddings:num_rows] = _device_order(rows, rows.ends)
        if drafts:
            drafts[0][num_paddings:num_rows] = _device_order(rows, rows.num_drafts)
        starts[1:] = shape.num_tokens
        starts[1 : num_rows + 1] = lengths.cumsum()
        # in plan order, which starts with the decode rows
        order, num_prefills = np.arange(num_paddings, num_rows), num_planned - rows.num_decodes
        sampling = rows.of_samples(np.concatenate([order[num_prefills:], order[:num_prefills]]))
        sample_rows[: len(sampling)] = sampling
        before_end = rows.of_samples(rows.num_samples.cumsum()) - np.arange(len(sampling)) if rows.has_drafts else 1
        sample_tokens[: len(sampling)] = starts[1:][sampling] - before_end
        self._staging.send(packed, self._packed[: len(packed)])

    def _gather_loras(self, req_index: torch.Tensor, token_rows: torch.Tensor | None) -> None:
        """Gather the adapter of each token. Graph-safe."""
        if self._lora_tokens is not None and self._state.lora_indices is not None:
            self._lora_tokens.gather(self._state.lora_indices, req_index, token_rows)

    def _table_width(self, max_seq_len: int) -> int:
        """Return the number of columns for max_seq_len tokens, a multiple of 16: kernels specialise on such strides."""
        return -(-max_seq_len // self._block_size // 16) * 16

    def _write_blocks(self, plan: StepPlan) -> None:
        """Write the units of the rows' new pages into their block tables, and the pages of new states."""
        tables, rows, columns, block_ids = list[int](), list[int](), list[int](), list[int]()
        states: dict[int, list[int]] = {}  # by req_index
        new_blocks = list(plan.new_blocks)
        for req_index, table, first, page_ids in new_blocks:
            if table == self._num_tables:  # of states, after those of keys and values
                states[req_index] = page_ids
                continue
            units, per_page = self._units(table, page_ids)
            if len(new_blocks) <= _FEW_ENTRIES:
                self._state.write_columns(table, req_index, first * per_page, units)
                continue
            tables += [table] * len(units)
            rows += [req_index] * len(units)
            columns += range(first * per_page, first * per_page + len(units))
            block_ids += units
        if block_ids:
            self._state.write_blocks(tables, rows, columns, block_ids)
        if states:
            self._state.write_state_pages(list(states), list(states.values()))

    def _units(self, table: int, page_ids: list[int]) -> tuple[list[int], int]:
        """Return the units of pages in a table's layers, and how many each page has."""
        per_page = self._units_per_page[table]
        if per_page == 1:
            return page_ids, 1
        group, pages = self._group_of[table], np.array(page_ids)
        return self._pages.unit_numbers(group, pages, num_pages=self._num_pages).tolist(), per_page


def _device_order(rows: RowColumns, column: np.ndarray) -> np.ndarray:
    """Return a column with the prompt chunks before the decode rows."""
    if not rows.num_decodes:
        return column
    return np.concatenate([column[rows.num_decodes :], column[: rows.num_decodes]])
