"""What layers with states read in a step: which rows write, what of the ring settles, and what padding touches."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.step import NEWEST, RequestInit, RowPlan, StepPlan
from engine.device.device_state import DeviceState, Staging
from engine.device.input_batch import InputBatchBuilder, MixedShape, RowColumns
from engine.device.kv_cache import KVPool
from engine.device.page_plan import plan_pages, views_of_states
from engine.device.step_states import StateRows, ring_bytes
from engine.interface.protocol import SamplingParams
from kernels.states import StateMetadata
from models.config.layer_cache import LayerCache
from models.config.layer_state import LayerState, StateTensor
from models.context import StepStates

CPU = torch.device("cpu")
NUM_REQUESTS, NUM_DRAFTS, NUM_INPUTS = 5, 3, 2
PARAMS = SamplingParams(max_tokens=9)
STATES = (None, LayerState(StateTensor(((1, NUM_INPUTS),), 3)))
PAGES = plan_pages((LayerCache(1, 4, 4), None), states=STATES, block_size=4, dtype=torch.float32)


@dataclass
class Device:
    """A device with one recurrent layer, whose inputs are [position, request]."""

    state: DeviceState
    builder: InputBatchBuilder
    pool: KVPool

    def step(self, rows: list[RowPlan], shape: MixedShape | None = None) -> StepStates:
        """Run a mixed step's gather."""
        plan = StepPlan(0, rows)
        columns = RowColumns.of(plan)
        packed = self.builder.pack(plan, columns, shape or columns.shape)
        batch = self.builder.mixed_batch(packed, max_query_len=64, max_seq_len=64)
        assert batch.states is not None
        rows_of_tokens = packed.inputs.req_index[packed.inputs.token_rows]
        inputs = torch.stack([batch.positions, rows_of_tokens], dim=1).float()
        self.settled: list[tuple[int, list[list[float]]]] = []
        batch.states.advance(1, inputs, self.advance)
        return batch.states

    def advance(self, inputs: torch.Tensor, views: tuple, metadata: StateMetadata) -> torch.Tensor:
        """Note the inputs of each row; the first call of a step settles."""
        starts = metadata.query_start_loc.tolist()
        rows = [
            (int(metadata.req_index[row]), seq_len, inputs[starts[row] : starts[row + 1]].tolist())
            for row, seq_len in enumerate(metadata.seq_lens.tolist())
            if seq_len
        ]
        self.settled, self.advanced = getattr(self, "advanced", []), rows
        return inputs


def make_device(*, num_drafts: int = NUM_DRAFTS) -> Device:
    state = DeviceState(
        num_rows=NUM_REQUESTS, max_blocks=16, num_state_pages=PAGES.state_pages, vocab_size=10, device=CPU,
        staging=Staging(CPU, num_bytes=1 << 16),
    )  # fmt: skip
    rows = torch.zeros(PAGES.num_lanes, 9, PAGES.lane_bytes // 4)
    pool = KVPool(rows, [None, None], views_of_states(rows, STATES))
    states = StateRows(state, pool.states, STATES, num_drafts=num_drafts, max_rows=32, dtype=torch.float32)
    max_mixed = MixedShape(128, 32, 32)
    builder = InputBatchBuilder(state, pages=PAGES, num_pages=9, max_mixed=max_mixed, states=states)
    state.init([RequestInit(index, PARAMS, 4) for index in range(NUM_REQUESTS)])
    return Device(state, builder, pool)


@st.composite
def histories(draw: st.DrawFn) -> list[list[RowPlan]]:
    """Steps of requests that decode with and without drafts; after a drafted row any of its tokens may be rejected."""
    starts, kept = [0] * NUM_REQUESTS, [0] * NUM_REQUESTS
    steps = []
    for _ in range(draw(st.integers(1, 5))):
        requests = draw(st.lists(st.integers(0, NUM_REQUESTS - 1), min_size=1, unique=True))
        rows = []
        for index in requests:
            start = starts[index] - (draw(st.integers(0, kept[index] - 1)) if kept[index] else 0)
            num_drafts = draw(st.integers(0, NUM_DRAFTS)) if start else 0
            count = 1 + num_drafts if start else draw(st.integers(1, 5))
            rows.append(RowPlan(index, start, count, [NEWEST, 1, 2, 3, 4][:count], num_drafts=num_drafts))
            starts[index], kept[index] = start + count, count if num_drafts else 0
        steps.append(rows)
    return steps


@settings(deadline=None)
@given(steps=histories(), extra=st.integers(0, 4))
def test_a_row_settles_what_came_true_of_the_row_before_and_no_drafted_row_writes(
    steps: list[list[RowPlan]], extra: int
) -> None:
    device = make_device()
    drafted: dict[int, RowPlan] = {}
    for rows in steps:
        exact = RowColumns.of(StepPlan(0, rows)).shape
        shape = MixedShape(exact.num_tokens + extra, exact.num_rows + 1, exact.num_prefills + 1) if extra else exact
        states = device.step(rows, shape)
        expected = {
            row.req_index: list(range(drafted[row.req_index].start, row.start))
            for row in rows
            if row.req_index in drafted
        }
        settled = {index: [position for position, _ in inputs] for index, _, inputs in device.settled}
        assert settled == expected
        assert all(request == index for index, _, inputs in device.settled for _, request in inputs)
        assert {index: seq_len for index, seq_len, _ in device.settled} == {
            row.req_index: row.start for row in rows if row.req_index in drafted
        }
        assert states.rows.writes is not None
        is_real = states.rows.seq_lens > 0
        order = {int(index): row for row, index in enumerate(states.rows.req_index) if is_real[row]}
        for row in rows:
            assert bool(states.rows.writes[order[row.req_index]]) == (row.num_drafts == 0)
            if row.num_drafts:
                drafted[row.req_index] = row
            else:
                drafted.pop(row.req_index, None)


def test_a_new_request_settles_nothing_of_the_one_before() -> None:
    device = make_device()
    device.step([RowPlan(2, 8, 3, [NEWEST, 1, 2], num_drafts=2)])
    device.state.init([RequestInit(2, PARAMS, 4)])
    device.step([RowPlan(2, 9, 1, [1])])
    assert device.settled == []


def test_without_speculation_there_is_no_ring() -> None:
    states = make_device(num_drafts=0).step([RowPlan(1, 0, 3, [1, 2, 3])])
    assert states.ring is None
    assert states.rows.writes is None
    sizes = {"num_requests": 7, "dtype": torch.bfloat16}
    assert ring_bytes(STATES, num_drafts=0, **sizes) == 0
    assert ring_bytes(STATES, num_drafts=3, **sizes) == 8 * 4 * NUM_INPUTS * 2


def test_padding_rows_have_no_tokens_for_states() -> None:
    device = make_device()
    row = RowPlan(3, 6, 1, new_blocks=[(1, 0, [5])])
    assert device.builder.pack_decodes(StepPlan(0, [row])).tolist() == [3]
    device.state.num_computed[3] = 6
    padding = device.state.padding_row
    batch = device.builder.decode_batch(torch.tensor([3, padding, padding]), max_seq_len=16)
    assert batch.states is not None
    rows = batch.states.rows
    assert rows.seq_lens.tolist() == [7, 0, 0]
    assert rows.pages[rows.req_index].tolist() == [[5], [0], [0]]
    assert batch.states.ring is None
    assert rows.pages.data_ptr() == device.state.state_pages.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_pages_are_copied_bit_by_bit_in_all_lanes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randint(-(2**31), 2**31, (3, 8, 16), dtype=torch.int32).view(dtype)
    before = rows.view(torch.int32).clone()
    pairs = [(1, 4), (2, 5), (3, 6)]
    for num_bytes in (1 << 20, 2 * 3 * 16 * 4):  # the latter: two pages at once
        monkeypatch.setattr("engine.device.kv_cache._COPY_BYTES", num_bytes)
        rows.view(torch.int32).copy_(before)
        KVPool(rows, []).copy(pairs, Staging(CPU, num_bytes=64))
        after = rows.view(torch.int32)
        assert after[:, [4, 5, 6]].equal(before[:, [1, 2, 3]])
        assert after[:, [0, 1, 2, 3, 7]].equal(before[:, [0, 1, 2, 3, 7]])
