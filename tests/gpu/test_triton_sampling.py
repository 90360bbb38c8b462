"""The Triton sampler on the device: tokens and kept sets equal the specification's, draws follow the softmax."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels.inputs import reference as inputs
from tests.unit.kernels.triton_cases.adjust_problem import bitmask_problem, penalty_problem
from tests.unit.kernels.triton_cases.sampling_problem import (
    Parameters,
    assert_kept_equal,
    assert_tokens_equal,
    assert_what_is_not_finite_is_no_token,
    make_problem,
    run_triton,
)

pytestmark = pytest.mark.gpu
MIXED = [
    Parameters(0.0), Parameters(1.0), Parameters(0.6), Parameters(1.0, top_k=1), Parameters(0.7, top_k=50),
    Parameters(1.5, top_k=2000), Parameters(1.0, top_k=200_000), Parameters(1.0, top_p=0.9), Parameters(0.8, top_p=0.3),
    Parameters(1.0, top_p=0.0), Parameters(1.3, top_p=0.999), Parameters(1.0, min_p=0.1), Parameters(0.9, min_p=0.001),
    Parameters(1.0, top_k=50, top_p=0.8), Parameters(0.6, top_k=20, top_p=0.95, min_p=0.05),
    Parameters(0.0, top_k=3, top_p=0.5),
]  # fmt: skip
SIZES = [300, 32000, 128256, 151936]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_rows", [1, 3, 64, 256])
def test_greedy_and_drawn_tokens_equal_the_specification(num_rows, size):
    rows = list(itertools.islice(itertools.cycle([Parameters(1.0), Parameters(0.0), Parameters(0.6)]), num_rows))
    for seed, spread in enumerate((0.6, 5.0)):
        problem = make_problem(rows, size, dtype=torch.bfloat16, device="cuda", seed=seed, spread=spread)
        assert_tokens_equal(problem, pdl=seed == 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spread", [0.6, 2.0, 6.0])
def test_truncated_tokens_equal_the_specification(size, spread):
    """On float32 values, which are mostly distinct: torch.topk leaves the order of equal ones open."""
    for seed, num_rows in enumerate((1, 16, 256)):
        rows = list(itertools.islice(itertools.cycle(MIXED[5:] + MIXED[:5]), num_rows))
        assert_tokens_equal(make_problem(rows, size, device="cuda", seed=seed, spread=spread), pdl=seed == 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", SIZES)
def test_truncated_rows_keep_what_the_specification_keeps(size, dtype):
    for spread in (0.6, 2.0, 6.0):
        assert_kept_equal(make_problem(MIXED * 4, size, dtype=dtype, device="cuda", spread=spread))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", SIZES)
def test_a_row_that_is_not_finite_gives_no_token(size, dtype):
    for rows in (MIXED, [Parameters(0.0)] * 5, [Parameters(0.0), Parameters(1.0)] * 40):
        assert_what_is_not_finite_is_no_token(rows, size, dtype=dtype, device="cuda")


@pytest.mark.parametrize("row", [Parameters(1.0), Parameters(0.7, top_k=20), Parameters(1.0, top_p=0.8)])
def test_draws_follow_the_softmax(row):
    size, num_rows, num_draws = 300, 256, 400
    problem = make_problem([row] * num_rows, size, device="cuda")
    logits = problem.logits[:1].clone()
    problem.logits = logits.expand(num_rows, size)
    counts = torch.zeros(size, device="cuda")
    for draw in range(num_draws):
        problem.positions.fill_(draw)
        counts += torch.bincount(run_triton(problem), minlength=size)
    scaled = logits[0].double() / row.temperature
    ordered, order = scaled.sort(descending=True)
    probs = ordered.softmax(0)
    kept = torch.arange(size, device="cuda") < (row.top_k or size)
    kept &= probs.cumsum(0) - probs < row.top_p
    expected = torch.zeros_like(scaled).scatter_(0, order, probs * kept) / probs[kept].sum()
    assert not counts[expected == 0].any()
    drawn = counts.double() / counts.sum()
    assert float((drawn - expected).abs().sum()) < 2.5 * float((expected / counts.sum()).sqrt().sum())


def test_a_graph_follows_what_changes_in_its_buffers():
    problem = make_problem(MIXED, 32000, dtype=torch.bfloat16, device="cuda", spread=5.0)
    from kernels.sampling.triton_draw import SamplingScratch, sample

    scratch = SamplingScratch.allocate(max_rows=16, vocab_size=32000, device=torch.device("cuda"))
    out = torch.empty(16, dtype=torch.int64, device="cuda")
    arguments = {"positions": problem.positions, "state": problem.state, "scratch": scratch, "out": out}

    def run() -> None:
        sample(problem.logits, req_index=problem.req_index, has_truncation=True, pdl=True, **arguments)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in range(3):
        other = make_problem(MIXED, 32000, dtype=torch.bfloat16, device="cuda", spread=5.0, seed=seed)
        problem.logits.copy_(other.logits)
        problem.positions.copy_(other.positions)
        graph.replay()
        drawn = out.clone()
        assert drawn.equal(run_triton(problem))


def test_gathered_inputs_equal_the_specification():
    from kernels.inputs.triton import gather_decode_inputs

    rows, max_blocks, block_size = 257, 2560, 16
    tables = torch.randint(0, 2**31 - 1, (2, rows, max_blocks), device="cuda", dtype=torch.int32)
    lengths = torch.randint(0, max_blocks * block_size, (rows,), device="cuda")
    lengths[-1] = 0
    state = {"last_token": torch.randint(0, 150_000, (rows,), device="cuda"), "block_tables": tables}
    req_index = torch.cat((torch.randperm(256, device="cuda")[:200], torch.full((56,), 256, device="cuda")))
    results = []
    for gather in (inputs.gather_decode_inputs, gather_decode_inputs):
        out = inputs.DecodeInputs.allocate(
            num_tables=2, max_rows=256, max_blocks=max_blocks, device=torch.device("cuda"), has_states=True
        )
        advanced = lengths.clone()
        gather(req_index, num_computed=advanced, block_size=block_size, padding_row=256, out=out, **state)
        results.append((out, advanced))
    (expected, expected_lengths), (out, advanced) = results
    assert advanced.equal(expected_lengths)
    for name in ("input_ids", "positions", "seq_lens", "state_lens", "slot_mappings"):
        assert getattr(out, name).equal(getattr(expected, name)), name
    is_needed = torch.arange(max_blocks, device="cuda")[None] <= out.positions[:, None] // block_size
    assert out.block_tables.equal(expected.block_tables.masked_fill(~is_needed, 0))


@pytest.mark.parametrize("vocab_size", [1000, 151_936])
def test_penalties_and_bitmasks_equal_the_specification(vocab_size):
    from kernels.sampling import reference as sampling
    from kernels.sampling import triton_draw as triton_logits

    logits, rows, req_index, state = penalty_problem(vocab_size, device="cuda")
    expected, result = logits.clone(), logits.clone()
    sampling.penalize(expected, rows, req_index, **state)
    triton_logits.penalize(result, rows, req_index, **state)
    assert result.equal(expected)
    logits, rows, bitmask = bitmask_problem(vocab_size, device="cuda")
    expected, result = logits.clone(), logits.clone()
    sampling.allow_only(expected, rows, bitmask)
    triton_logits.allow_only(result, rows, bitmask)
    assert result.equal(expected)
