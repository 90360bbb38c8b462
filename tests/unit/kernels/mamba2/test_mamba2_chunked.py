"""The chunked form of Mamba-2 against the specification, and its states however a prompt is cut."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch

from kernels.mamba2 import chunked
from tests.unit.kernels.triton_cases.mamba2_problem import PADDING, error_of, make_problem, states_of


def draw_rows(generator: random.Random) -> list[tuple[int, int]]:
    """Up to nine rows of any kind, prompt chunks first."""
    lengths = [generator.choice([2, 5, 16, 63, 64, 65, 128, 150]) for _ in range(generator.randrange(4))]
    rows = [(generator.choice([0, 0, 64, 7]), length) for length in lengths]
    rows += [(generator.choice([0, 1, 300]), 1) for _ in range(generator.randrange(5))]
    rows += [(PADDING, generator.randrange(3)) for _ in range(generator.randrange(3))]
    return rows or [(5, 1)]


@pytest.mark.parametrize("seed", range(12))
def test_ragged_batches_equal_the_specification(seed):
    generator = random.Random(seed)
    num_groups = generator.choice([1, 2, 4])
    problem = make_problem(
        draw_rows(generator), seed=seed, num_groups=num_groups, num_heads=num_groups * generator.choice([1, 2, 3]),
        head_dim=generator.choice([4, 12]), state_size=generator.choice([16, 24]),
        decay=generator.choice([0.01, 1, 20]), first_piece=generator.randrange(5),
        num_lanes=generator.choice([1, 2, 5]), rest=generator.choice([0, 5]),
    )  # fmt: skip
    assert error_of(problem, chunked.mamba2) < 1e-5


@pytest.mark.parametrize("rows", [[(9, 1), (0, 1), (PADDING, 1), (4, 1)], [(0, 1)], [(PADDING, 1)]])
@pytest.mark.parametrize("sizes", [{}, {"num_heads": 3, "num_groups": 1, "rest": 0}])
def test_decode_rows_equal_the_specification(rows, sizes):
    problem = make_problem(rows, **sizes).with_bounds(num_decodes=len(rows), max_prefills=None)
    assert error_of(problem, chunked.mamba2) < 1e-5


def test_strong_decay_costs_no_digits_of_what_follows():
    problem = make_problem([(5, 128)])
    dt = problem.dt * 0.01
    dt[10::30], dt[45] = 3e4, 1e30
    problem.x[10::30] *= 1e-4
    problem.x[45] = 0
    problem = dataclasses.replace(problem, dt=dt)
    assert error_of(problem, chunked.mamba2) < 1e-5


def test_half_precision_is_rounded_once():
    problem = make_problem([(3, 70), (8, 1)], dtype=torch.bfloat16)
    assert error_of(problem, chunked.mamba2) < 3e-3


@pytest.mark.parametrize("length", [65, 129, 200])
def test_a_prompt_cut_at_multiples_of_64_has_the_same_states_bit_by_bit(length):
    whole = make_problem([(0, length), (3, 7)], num_heads=3, num_groups=1, head_dim=5, state_size=24)
    expected_y, expected = whole.run(chunked.mamba2)
    for cuts in ([64], [128], [64, 128], [64, 128, 192]):
        edges = [0, *(cut for cut in cuts if cut < length), length]
        pool, outs = whole.view.pool.clone(), []
        for first, end in itertools.pairwise(edges):
            row = slice(first, end)
            metadata = dataclasses.replace(
                whole.metadata,
                query_start_loc=torch.tensor([0, end - first], dtype=torch.int32),
                seq_lens=torch.tensor([end], dtype=torch.int32),
                req_index=whole.metadata.req_index[:1],
                num_decodes=1 if end - first == 1 else None,
            )
            view = dataclasses.replace(whole.view, pool=pool)
            tokens = (whole.x[row], whole.b[row], whole.c[row], whole.dt[row])
            outs.append(chunked.mamba2(*tokens, whole.a, whole.d, view, metadata))
        cut_states = states_of(dataclasses.replace(whole.view, pool=pool), whole.metadata)[0]
        assert torch.equal(cut_states, states_of(expected, whole.metadata)[0])
        torch.testing.assert_close(torch.cat(outs), expected_y[:length])
