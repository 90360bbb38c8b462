"""The inputs of steps with prompt chunks: what was planned arrives, at its exact shape and padded alike."""

from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.step import NEWEST, RowPlan, SteadyRowsPlan, StepPlan
from engine.device.device_state import DeviceState, Staging
from engine.device.input_batch import InputBatch, InputBatchBuilder, MixedShape, PackedStep, RowColumns
from engine.device.page_plan import PagePlan, plan_pages
from models.config.layer_cache import LayerCache

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_REQUESTS, MAX_BLOCKS, NUM_PAGES = 4, 6, 16, 50
FULL, WINDOW = LayerCache(2, 8, 8), LayerCache(2, 8, 8, window=6)


def pages_of(*caches: LayerCache) -> PagePlan:
    return plan_pages(caches, block_size=BLOCK_SIZE, dtype=torch.float32)


ONE_KIND = pages_of(FULL, FULL)
TWO_KINDS = pages_of(WINDOW, WINDOW, FULL)


def make_builder(pages: PagePlan = ONE_KIND) -> tuple[InputBatchBuilder, DeviceState]:
    """A builder over a state in which every request has another newest token and other blocks."""
    staging = Staging(CPU, num_bytes=1 << 16)
    state = DeviceState(
        num_rows=NUM_REQUESTS,
        max_blocks=MAX_BLOCKS,
        vocab_size=100,
        device=CPU,
        staging=staging,
        num_tables=len(pages.table_groups),
    )
    state.last_token[:NUM_REQUESTS] = torch.arange(1000, 1000 + NUM_REQUESTS)
    block_ids = torch.arange(1, 1 + NUM_REQUESTS * MAX_BLOCKS).view(NUM_REQUESTS, MAX_BLOCKS)
    for table, block_table in enumerate(state.block_tables):
        block_table[:NUM_REQUESTS] = block_ids + 1000 * table
    max_mixed = MixedShape(128, 128, 128)
    return InputBatchBuilder(state, pages=pages, num_pages=NUM_PAGES, max_mixed=max_mixed), state


@st.composite
def plans(draw: st.DrawFn) -> list[RowPlan]:
    """Rows of distinct requests, decode rows first, at least one with tokens: a prompt chunk, or one with drafts."""
    requests = draw(st.permutations(range(NUM_REQUESTS)))
    num_decodes = draw(st.integers(0, NUM_REQUESTS - 1))
    num_chunks = draw(st.integers(1, NUM_REQUESTS - num_decodes))
    rows = [RowPlan(index, draw(st.integers(1, 60)), 1) for index in requests[:num_decodes]]
    for index in requests[num_decodes : num_decodes + num_chunks]:
        start, count = draw(st.integers(0, 40)), draw(st.integers(1, 18))
        token_ids = draw(st.lists(st.integers(0, 99), min_size=count, max_size=count))
        num_drafts = draw(st.integers(0, count - 1))
        if num_drafts and draw(st.booleans()):
            token_ids[0] = NEWEST
        rows.append(RowPlan(index, start, count, token_ids, samples=num_drafts > 0 or draw(st.booleans())))
        rows[-1].num_drafts = num_drafts
    return rows


def plan_of(rows: list[RowPlan]) -> StepPlan:
    """Return a plan in which every decode row but the last is steady."""
    steady = rows[: max(sum(1 for row in rows if not row.token_ids) - 1, 0)]
    columns = [array("i", column).tobytes() for column in ([r.req_index for r in steady], [r.start for r in steady])]
    new_blocks = [(row.req_index, *entry) for row in steady for entry in row.new_blocks]
    plan = StepPlan(0, rows[len(steady) :], steady=SteadyRowsPlan(*columns, new_blocks))
    assert plan.rows == rows
    assert plan.num_rows == len(rows)
    assert plan.num_samples == sum(row.num_samples for row in rows)
    assert plan.num_tokens == sum(row.num_tokens for row in rows)
    return plan


def make_batch(
    rows: list[RowPlan], shape: MixedShape, pages: PagePlan = ONE_KIND
) -> tuple[InputBatch, PackedStep, DeviceState]:
    builder, state = make_builder(pages)
    plan = plan_of(rows)
    packed = builder.pack(plan, RowColumns.of(plan), shape)
    return builder.mixed_batch(packed, max_query_len=shape.num_tokens, max_seq_len=64), packed, state


def exact_shape(rows: list[RowPlan]) -> MixedShape:
    return RowColumns.of(plan_of(rows)).shape


def tokens_of(row: RowPlan) -> list[int]:
    """What should arrive of a row."""
    return [1000 + row.req_index if token_id == NEWEST else token_id for token_id in row.token_ids or [NEWEST]]


@settings(deadline=None)
@given(rows=plans(), extra_tokens=st.integers(0, 9), extra_rows=st.integers(0, 3))
def test_every_row_arrives_whatever_the_padding(rows: list[RowPlan], extra_tokens: int, extra_rows: int) -> None:
    exact = exact_shape(rows)
    padded = MixedShape(exact.num_tokens + extra_tokens, exact.num_rows + 1 + extra_rows, exact.num_prefills + 1)
    for shape in (exact, padded):
        batch, _, state = make_batch(rows, shape)
        (metadata,) = batch.attention
        starts, seq_lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        assert starts == sorted(starts)
        assert (starts[0], starts[-1]) == (0, shape.num_tokens)
        assert len(seq_lens) == len(starts) - 1 == shape.num_rows
        arrived = {}
        for row, seq_len in enumerate(seq_lens):
            tokens = slice(starts[row], starts[row + 1])
            count = tokens.stop - tokens.start
            assert count <= 1 or row < shape.num_prefills
            if seq_len == 0:
                assert not batch.positions[tokens].any()
                assert not metadata.slot_mapping[tokens].any()
                continue
            positions = batch.positions[tokens].tolist()
            assert positions == list(range(seq_len - count, seq_len))
            blocks = metadata.block_table[row]
            slots = [int(blocks[p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for p in positions]
            assert metadata.slot_mapping[tokens].tolist() == slots
            request = (int(blocks[0]) - 1) // MAX_BLOCKS
            arrived[request] = (positions[0], batch.input_ids[tokens].tolist())
        expected = {row.req_index: (row.start, tokens_of(row)) for row in rows}
        assert arrived == expected
        for row in rows:
            assert int(state.num_computed[row.req_index]) == row.start + row.num_tokens
        assert int(state.num_computed[state.padding_row]) == 0


def test_a_shape_for_which_nothing_was_sent_writes_to_the_padding_block_alone() -> None:
    """What a graph is captured with: more tokens than a request may have."""
    builder, _ = make_builder()
    batch = builder.mixed_batch(builder.blank_step(MixedShape(128, 7, 3)), max_query_len=128, max_seq_len=64)
    assert not batch.positions.any()
    assert int(batch.attention[0].slot_mapping.max()) < BLOCK_SIZE * 2  # of the first block of request 0, or of padding


def test_rows_that_could_not_be_sent_are_sent_when_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    builder, _ = make_builder()
    assert builder.pack_decodes(StepPlan(0, [RowPlan(0, 5, 1), RowPlan(1, 5, 1)])).tolist() == [0, 1]
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "send", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
        with pytest.raises(torch.OutOfMemoryError):
            builder.pack_decodes(StepPlan(1, [RowPlan(2, 5, 1)]))
    assert builder.pack_decodes(StepPlan(1, [RowPlan(2, 5, 1)])).tolist() == [2]


@settings(deadline=None)
@given(rows=plans(), extra_rows=st.integers(0, 3))
def test_sampled_positions_come_first_in_plan_order(rows: list[RowPlan], extra_rows: int) -> None:
    exact = exact_shape(rows)
    for shape in (exact, MixedShape(exact.num_tokens + 5, exact.num_rows + 1 + extra_rows, exact.num_prefills + 1)):
        batch, packed, _ = make_batch(rows, shape)
        sampling = packed.sampling
        places = [(row, place) for row in rows if row.samples for place in range(-1 - row.num_drafts, 0)]
        assert sampling.host_req_index.tolist() == [row.req_index for row, _ in places]
        assert sampling.host_ends.tolist() == [row.start + row.num_tokens for row, _ in places]
        assert sampling.req_index.tolist() == sampling.host_req_index.tolist()
        assert sampling.positions.tolist() == [row.start + row.num_tokens + 1 + place for row, place in places]
        assert batch.last_tokens is not None
        before = batch.input_ids[batch.last_tokens[: len(places)]].tolist()
        assert before == [tokens_of(row)[place] for row, place in places]


@settings(deadline=None)
@given(rows=plans(), extra_tokens=st.integers(0, 9))
def test_tables_differ_in_blocks_and_slots_alone(rows: list[RowPlan], extra_tokens: int) -> None:
    exact = exact_shape(rows)
    shape = MixedShape(exact.num_tokens + extra_tokens, exact.num_rows + 1, exact.num_prefills + 1)
    (alone,) = make_batch(rows, shape)[0].attention
    batch, _, _ = make_batch(rows, shape, TWO_KINDS)
    for table, metadata in enumerate(batch.attention):
        is_real = metadata.slot_mapping >= BLOCK_SIZE  # others are of padding
        assert metadata.slot_mapping[is_real].equal(alone.slot_mapping[is_real] + 1000 * table * BLOCK_SIZE)
        assert metadata.seq_lens.equal(alone.seq_lens)
        for row, seq_len in enumerate(metadata.seq_lens.tolist()):
            blocks = slice(-(-seq_len // BLOCK_SIZE))
            assert metadata.block_table[row, blocks].equal(alone.block_table[row, blocks] + 1000 * table)


def test_new_pages_reach_each_table_as_units() -> None:
    """The only full layer takes two units of a page, 50 apart, for each of a window layer."""
    builder, state = make_builder(TWO_KINDS)
    decodes = [RowPlan(2, 13, 1, new_blocks=[(0, 1, [7]), (1, 3, [8])]), RowPlan(4, 5, 1)]
    req_index = builder.pack_decodes(plan_of(decodes))
    assert state.block_tables[0, 2, 2:4].tolist() == [7, 57]
    assert state.block_tables[1, 2, 3].item() == 8
    state.num_computed[[2, 4]] = torch.tensor([13, 5])
    batch = builder.decode_batch(req_index, max_seq_len=16)
    full, window = batch.attention
    assert full.slot_mapping.tolist()[0] == 57 * BLOCK_SIZE + 1
    assert window.slot_mapping.tolist()[0] == 8 * BLOCK_SIZE + 1
    builder.pack_decodes(StepPlan(1, [RowPlan(2, 14, 1, new_blocks=[(0, 0, [3, 1, 9])])]))
    assert state.block_tables[0, 2, :6].tolist() == [3, 53, 1, 51, 9, 59]


def test_columns_of_steady_rows_are_those_of_the_same_rows_one_by_one() -> None:
    rows = [RowPlan(4, 17, 1), RowPlan(0, 3, 1), RowPlan(2, 40, 1)]
    columns = [array("i", column).tobytes() for column in ([r.req_index for r in rows], [r.start for r in rows])]
    steady, single = RowColumns.of(StepPlan(0, [], steady=SteadyRowsPlan(*columns))), RowColumns.of(StepPlan(0, rows))
    for name in ("req_index", "start", "num_tokens", "num_samples", "num_drafts", "token_ids", "ends"):
        found, wanted = getattr(steady, name), getattr(single, name)
        assert found.dtype == wanted.dtype
        assert found.tolist() == wanted.tolist()
    assert (steady.num_decodes, steady.shape) == (single.num_decodes, single.shape) == (3, MixedShape(3, 3, 0))
    assert (steady.has_drafts, steady.samples_once) == (single.has_drafts, single.samples_once) == (False, True)
