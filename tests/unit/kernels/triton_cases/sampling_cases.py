"""Sampling and the gathering of inputs against their torch specifications, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kernels.inputs import reference as inputs
from kernels.inputs import triton as inputs_triton
from kernels.sampling.triton_draw import SamplingConfig
from tests.unit.kernels.triton_cases.sampling_problem import (
    Parameters,
    assert_kept_equal,
    assert_tokens_equal,
    assert_what_is_not_finite_is_no_token,
    make_problem,
    make_scratch,
    run_triton,
)


@pytest.mark.parametrize("num_splits", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_greedy_and_drawn_rows_equal_the_specification_at_any_number_of_splits(num_splits, dtype):
    problem = make_problem([Parameters(0.0), Parameters(1.0), Parameters(0.3), Parameters(2.5)], 2500, dtype=dtype)
    assert_tokens_equal(problem, config=SamplingConfig(tile=1024, num_splits=num_splits, num_warps=4))


def test_the_lowest_of_equal_logits_wins():
    problem = make_problem([Parameters(0.0), Parameters(0.0)], 2500)
    problem.logits[:] = -1.0
    problem.logits[0, [700, 1500, 2400]] = 2.0
    assert run_triton(problem, config=SamplingConfig(1024, 3, 4)).tolist() == [700, 0]


MIXED = [
    Parameters(1.0, top_k=1), Parameters(0.7, top_k=5), Parameters(1.5, top_k=70), Parameters(1.0, top_k=6000),
    Parameters(1.0, top_p=0.9), Parameters(0.8, top_p=0.3), Parameters(1.0, top_p=0.0), Parameters(1.3, top_p=0.99),
    Parameters(1.0, min_p=0.1), Parameters(1.0, min_p=1.0), Parameters(1.0, top_k=50, top_p=0.8),
    Parameters(0.6, top_k=20, top_p=0.95, min_p=0.05), Parameters(0.0, top_k=3, top_p=0.5), Parameters(1.0),
]  # fmt: skip


@pytest.mark.parametrize("size", [100, 4200])
@pytest.mark.parametrize("spread", [0.5, 8.0])
def test_truncated_rows_equal_the_specification(size, spread):
    problem = make_problem(MIXED, size, spread=spread)
    scratch = make_scratch(problem)
    assert_tokens_equal(problem, scratch=scratch)
    assert_kept_equal(problem, scratch.truncation)


@pytest.mark.parametrize("step", [0.5, 0.1])
def test_ties_at_a_cut_are_kept_by_token_id(step):
    problem = make_problem(MIXED, 4200)
    problem.logits.copy_((problem.logits / step).round() * step)
    assert_kept_equal(problem)


def test_banned_tokens_are_never_drawn():
    problem = make_problem([Parameters(1.0), Parameters(1.0, top_k=10), Parameters(1.0, top_p=0.999)] * 4, 700)
    problem.logits[:, 3:] = float("-inf")
    assert run_triton(problem).max() < 3


@pytest.mark.parametrize(
    "rows", [MIXED, [Parameters(0.0)] * 5, [Parameters(0.0), Parameters(1.0), Parameters(0.4)] * 2]
)
@pytest.mark.parametrize("size", [4200, 100])
def test_a_row_that_is_not_finite_gives_no_token(size, rows):
    assert_what_is_not_finite_is_no_token(rows, size)


@pytest.mark.parametrize("size", [100, 4200])
def test_the_only_token_that_a_mask_leaves_is_drawn(size):
    problem = make_problem(MIXED, size)
    problem.logits[:, torch.arange(size) != size - 7] = float("-inf")
    assert run_triton(problem).tolist() == [size - 7] * len(MIXED)


@pytest.mark.parametrize("num_tables", [1, 3])
def test_gathered_inputs_equal_the_specification(num_tables):
    rows, max_blocks, block_size = 9, 1030, 16
    tables = torch.arange(num_tables * rows * max_blocks, dtype=torch.int32).view(num_tables, rows, max_blocks)
    lengths = torch.tensor([0, 5, 15, 16, 17, 600, 16000, max_blocks * block_size - 1, 0])
    state = {"last_token": torch.arange(100, 100 + rows), "block_tables": tables, "block_size": block_size}
    req_index = torch.tensor([7, 2, 6, 0, 8, 3, 8])
    results = []
    for gather in (inputs.gather_decode_inputs, inputs_triton.gather_decode_inputs):
        out = inputs.DecodeInputs.allocate(
            num_tables=num_tables, max_rows=9, max_blocks=max_blocks, device=torch.device("cpu"), has_states=True
        )
        advanced = lengths.clone()
        gather(req_index, num_computed=advanced, padding_row=8, out=out, **state)
        results.append((out, advanced))
    (expected, expected_lengths), (out, advanced) = results
    assert advanced.equal(expected_lengths)
    for name in ("input_ids", "positions", "seq_lens", "state_lens", "slot_mappings"):
        assert getattr(out, name).equal(getattr(expected, name)), name
    for row, length in enumerate(lengths[req_index].tolist()):
        num_blocks = length // block_size + 1
        assert out.block_tables[:, row, :num_blocks].equal(expected.block_tables[:, row, :num_blocks])
        assert not out.block_tables[:, row, num_blocks:].any()


def test_gathering_advances_like_the_decode_batch():
    lengths = torch.tensor([4, 31, 0])
    out = inputs.DecodeInputs.allocate(
        num_tables=2, max_rows=2, max_blocks=2, device=torch.device("cpu"), has_states=True
    )
    inputs.gather_decode_inputs(
        torch.tensor([1, 2]), last_token=torch.tensor([7, 8, 9]), num_computed=lengths,
        block_tables=torch.tensor([[[0, 0], [5, 6], [0, 0]], [[0, 0], [8, 9], [0, 0]]], dtype=torch.int32),
        block_size=16, padding_row=2, out=out,
    )  # fmt: skip
    assert lengths.tolist() == [4, 32, 0]
    assert out.input_ids.tolist() == [8, 9]
    assert out.seq_lens.tolist() == [32, 1]
    assert out.state_lens.tolist() == [32, 0]
    assert out.slot_mappings[:, :2].tolist() == [[6 * 16 + 15, 0], [9 * 16 + 15, 0]]


@pytest.mark.parametrize("num_tables", [1, 3])
def test_gathered_mixed_inputs_equal_the_specification(num_tables):
    """A row of padding, a chunk with context, a whole prompt, decode rows, and rows that are none."""
    lengths, seq_lens, requests = [6, 300, 40, 1, 1, 0, 0], [0, 520, 40, 77, 1, 0, 0], [4, 2, 0, 3, 1, 4, 4]
    num_tokens, num_rows, max_blocks = sum(lengths), len(lengths), 40
    packed = torch.zeros(inputs.PackedInputs.num_values(num_tokens, num_rows) + 3, dtype=torch.int32)
    plan = inputs.PackedInputs.view(packed, num_tokens, num_rows)
    plan.token_ids[:346] = torch.arange(346)
    plan.token_ids[346:] = -1
    plan.token_rows.copy_(torch.repeat_interleave(torch.arange(num_rows), torch.tensor(lengths)))
    plan.req_index.copy_(torch.tensor(requests))
    plan.seq_lens.copy_(torch.tensor(seq_lens))
    plan.query_start_loc[1:] = torch.tensor(lengths).cumsum(0)
    # two decode rows, and the last three tokens of a prompt: drafts
    plan.sample_rows[:5] = torch.tensor([3, 4, 2, 2, 2])
    plan.sample_tokens[:5] = torch.tensor([346, 347, 343, 344, 345])
    tables = torch.arange(num_tables * 5 * max_blocks, dtype=torch.int32).view(num_tables, 5, max_blocks)
    tables[:, 4] = 0
    results = []
    for gather in (inputs.gather_mixed_inputs, inputs_triton.gather_mixed_inputs):
        out = inputs.MixedInputs.allocate(
            num_tables=num_tables, max_tokens=400, max_rows=9, max_blocks=max_blocks, device=torch.device("cpu")
        )
        advanced = torch.tensor([0, 0, 220, 76, 0])
        gather(torch.arange(70, 75), plan, num_computed=advanced, block_tables=tables, block_size=16, out=out)
        results.append((out, advanced))
    (expected, expected_lengths), (out, advanced) = results
    assert advanced.tolist() == expected_lengths.tolist() == [40, 1, 520, 77, 0]
    assert out.sample_positions[:5].tolist() == [77, 1, 38, 39, 40]
    for name in ("input_ids", "positions", "slot_mappings", "sample_req_index", "sample_positions", "sample_tokens"):
        assert getattr(out, name).equal(getattr(expected, name)), name
    for row, seq_len in enumerate(seq_lens):
        num_blocks = -(-seq_len // 16)
        assert out.block_tables[:, row, :num_blocks].equal(expected.block_tables[:, row, :num_blocks])


def test_gathered_drafts_equal_the_specification():
    """A row of padding, a drafted one after another, one without drafts after one, a chunk, decode rows, no rows."""
    lengths, seq_lens, requests = [6, 4, 1, 40, 1, 1, 0, 0], [0, 520, 41, 40, 77, 9, 0, 0], [6, 2, 0, 3, 1, 4, 6, 6]
    sizes = (sum(lengths), len(lengths))
    packed = torch.zeros(inputs.PackedInputs.num_values(*sizes, has_drafts=True), dtype=torch.int32)
    plan = inputs.PackedInputs.view(packed, *sizes, has_drafts=True)
    plan.req_index.copy_(torch.tensor(requests))
    plan.seq_lens.copy_(torch.tensor(seq_lens))
    plan.query_start_loc[1:] = torch.tensor(lengths).cumsum(0)
    plan.num_drafts[1] = 3
    plan.sample_rows[:7] = torch.tensor([4, 5, 1, 1, 1, 1, 2])
    plan.sample_tokens[:7] = torch.tensor([51, 52, 6, 7, 8, 9, 10])
    results = []
    for gather in (inputs.gather_draft_inputs, inputs_triton.gather_draft_inputs):
        out = inputs.DraftInputs.allocate(max_rows=11, ring_size=4, device=torch.device("cpu"))
        kept = torch.tensor([36, -1, 514, -1, -1, 5, -1], dtype=torch.int32)
        gather(kept, plan, ring_size=4, padding_row=6, out=out)
        results.append((out, kept))
    (expected, expected_kept), (out, kept) = results
    assert kept.tolist() == expected_kept.tolist() == [-1, -1, 516, -1, -1, 5, -1]
    assert out.settle_start_loc[:9].tolist() == [0, 0, 2, 6, 6, 6, 6, 6, 6]
    assert out.source[:6].tolist() == expected.source[:6].tolist() == [8, 9, 0, 1, 2, 3]
    assert out.target[:8].tolist() == [24, 24, 8, 9, 10, 11, 24, 24]
    for name in ("writes", "settle_start_loc", "settle_lens", "target"):
        assert getattr(out, name).equal(getattr(expected, name)), name
