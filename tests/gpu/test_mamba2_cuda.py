"""Mamba-2's ops on the device, against their specifications: ragged rows, published shapes, graphs, large pools."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from kernels.mamba2 import chunked, reference
from kernels.ops import grouped_gated_norm, mamba2, mamba2_dt
from kernels.states import StateMetadata, StateView
from tests.unit.kernels.triton_cases.mamba2_problem import PADDING, Problem, error_of, make_problem, states_of
from tests.unit.kernels.triton_cases.ragged import relative_error

pytestmark = pytest.mark.gpu
# Operands of products are rounded to the dtype; float32 uses no tensor cores
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 2e-5}
SHAPES = [
    {"num_heads": 64, "head_dim": 64, "state_size": 128, "num_groups": 8},  # Nemotron 3 Nano
    {"num_heads": 128, "head_dim": 64, "state_size": 128, "num_groups": 1},  # Granite 4 H Small
    {"num_heads": 8, "head_dim": 128, "state_size": 256, "num_groups": 2},  # Falcon-H1
    {"num_heads": 3, "head_dim": 24, "state_size": 16, "num_groups": 3},
]


def _draw_rows(seed: int) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    prompts = [(draw.choice([0, 64, 7]), draw.randint(2, 400)) for _ in range(draw.randint(1, 4))]
    decodes = [(draw.choice([0, 1, 900]), 1) for _ in range(draw.randint(1, 20))]
    return prompts + decodes + [(PADDING, draw.randint(0, 40))]


def _triton(problem: Problem, **options: object) -> float:
    from kernels.mamba2 import triton as triton_mamba2

    return error_of(problem, triton_mamba2.mamba2, **options)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("segment", [None, 64, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_ragged_rows_equal_the_specification(shape, segment, dtype):
    for seed in range(2):
        problem = make_problem(_draw_rows(seed), dtype=dtype, device="cuda", seed=seed, **shape)
        for pdl in (False, True):
            assert _triton(problem, segment=segment, pdl=pdl) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_rows_and_drafts_equal_the_specification(shape, dtype):
    rows = [(draw % 3 * 50, 1) for draw in range(37)] + [(PADDING, 1)] * 3
    decodes = make_problem(rows, dtype=dtype, device="cuda", **shape).with_bounds(num_decodes=40, max_prefills=None)
    assert _triton(decodes, pdl=True) < TOLERANCE[dtype]
    drafts = make_problem([(90, 4), (0, 16), (7, 1)], dtype=dtype, device="cuda", writes=[0, 1, 1], **shape)
    assert _triton(drafts, pdl=True) < TOLERANCE[dtype]


@pytest.mark.parametrize("decay", [0.01, 1.0, 50.0])
def test_a_long_prompt_equals_the_chunked_form_and_itself(decay):
    """The chunked form equals the specification, and is faster; a race would change one of several runs."""
    from kernels.mamba2 import triton as triton_mamba2

    problem = make_problem([(3, 5000), (0, 3000)], dtype=torch.bfloat16, device="cuda", decay=decay, **SHAPES[0])
    expected_y, expected = problem.run(chunked.mamba2)
    y, view = problem.run(triton_mamba2.mamba2)
    assert relative_error(y, expected_y.double()) < TOLERANCE[torch.bfloat16]
    states, expected_states = (states_of(each, problem.metadata) for each in (view, expected))
    assert relative_error(states, expected_states.double()) < TOLERANCE[torch.bfloat16]
    for _ in range(3):
        again, view_again = problem.run(triton_mamba2.mamba2)
        assert torch.equal(again, y)
        assert torch.equal(states_of(view_again, problem.metadata), states)


def test_a_graph_serves_other_rows_than_it_was_captured_with():
    problems = [
        make_problem(rows, dtype=torch.bfloat16, device="cuda", seed=seed, **SHAPES[0]).with_bounds(
            num_decodes=None, max_prefills=2
        )
        for seed, rows in enumerate(
            [[(0, 100), (5, 90), (9, 1), (PADDING, 9)], [(64, 197), (PADDING, 0), (0, 1), (PADDING, 2)]]
        )
    ]
    first, second = (
        dataclasses.replace(each, metadata=dataclasses.replace(each.metadata, max_query_len=200)) for each in problems
    )
    weights = {"bias": torch.randn(64, device="cuda"), "norm": torch.ones(4096, device="cuda")}

    def run(problem: Problem) -> torch.Tensor:
        dt = mamba2_dt(problem.dt, weights["bias"], (0.0, 4.0))
        y = mamba2(problem.x, problem.b, problem.c, dt, problem.a, problem.d, problem.view, problem.metadata).flatten(1)
        return grouped_gated_norm(y, problem.x.flatten(1), weights["norm"], 1e-5, group_size=512)

    def copied(problem: Problem) -> Problem:
        return dataclasses.replace(problem, view=dataclasses.replace(problem.view, pool=problem.view.pool.clone()))

    own = copied(second)
    expected = run(own)
    live = copied(first)
    run(copied(first))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(live)
    for name in ("x", "b", "c", "dt", "a", "d"):
        getattr(live, name).copy_(getattr(second, name))
    live.view.pool.copy_(second.view.pool)
    for name in ("query_start_loc", "seq_lens", "req_index", "pages"):
        getattr(live.metadata, name).copy_(getattr(second.metadata, name))
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(live.view.pool, own.view.pool, rtol=0, atol=0, equal_nan=True)


def test_states_are_found_in_pools_of_more_than_2_to_the_31_numbers():
    num_rows, row_size, piece = 64 * 64, 128, 32 * 128
    num_pages = 2**31 // (2 * piece) + 200
    pool = torch.zeros(2, num_pages, piece, device="cuda")
    view = StateView(pool, first_piece=1, num_rows=num_rows, row_size=row_size)
    pages = torch.arange(num_pages - 66, num_pages - 1, dtype=torch.int32, device="cuda")[None]
    metadata = StateMetadata(
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
        seq_lens=torch.tensor([5], dtype=torch.int32, device="cuda"),
        req_index=torch.tensor([0], device="cuda"),
        pages=pages,
        writes=None,
        max_query_len=1,
        num_decodes=1,
    )
    problem = make_problem([(4, 1)], dtype=torch.bfloat16, device="cuda", **SHAPES[0])
    tokens = (problem.x, problem.b, problem.c, problem.dt, problem.a, problem.d)
    y = mamba2(*tokens, view, metadata)
    written = states_of(view, metadata).clone()
    pool[:, pages[0].long()] = 0
    assert not pool.any()
    expected = reference.mamba2(*tokens, view, metadata)
    assert relative_error(y, expected.double()) < 6e-3
    assert relative_error(written, states_of(view, metadata).double()) < 1e-5


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "width", "group_size"), [(1, 4096, 512), (300, 8192, 8192), (5, 96, 32)])
def test_time_steps_and_gated_norms_equal_their_specifications(tokens, width, group_size, dtype):
    y, z = (torch.randn(tokens, width, device="cuda").to(dtype) for _ in range(2))
    dt, bias = torch.randn(tokens, 70, device="cuda").to(dtype)[:, 3:67] * 9, torch.randn(64, device="cuda").to(dtype)
    torch.testing.assert_close(
        mamba2_dt(dt, bias, (0.001, 8.0)), reference.mamba2_dt(dt, bias, (0.001, 8.0)), rtol=2e-6, atol=0
    )
    weight = torch.randn(width, device="cuda")

    def slice_of_more(sums: torch.Tensor) -> torch.Tensor:
        return torch.cat([sums, sums * 2], 1)[:, sums.shape[1] :]

    for options in (
        {"weight": weight}, {"weight": weight.to(dtype)}, {"weight": None},
        {"weight": weight, "has_norm_first": True}, {"weight": weight, "all_reduce": slice_of_more},
    ):  # fmt: skip
        out, expected = (
            op(y, z, eps=1e-5, group_size=group_size, **options)
            for op in (grouped_gated_norm, reference.grouped_gated_norm)
        )
        assert relative_error(out, expected.double()) < TOLERANCE[dtype] / 2
