"""Triton's twins of Mamba-2's ops against their specifications, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from triton.runtime.interpreter import interpreter_builder

from benchmarks.mamba2_kernels import SMOKE, TILES, measure
from kernels.mamba2 import reference, triton_elementwise
from kernels.mamba2 import triton as triton_mamba2
from kernels.mamba2.triton_scan import ScanConfig, choose_segment
from tests.unit.kernels.triton_cases.mamba2_problem import PADDING, error_of, make_problem

# The interpreter truncates to bf16 instead of rounding: half precision stands for it here, bf16 is tested on the GPU
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


def _close(out, expected):
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[out.dtype], atol=TOLERANCE[out.dtype])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.1, 3.0)])
def test_time_steps_equal_their_specification(limits, dtype):
    dt, bias = (torch.randn(7, 90) * 8).to(dtype)[:, 3:83], torch.randn(80).to(dtype)
    dt[0, :5] = torch.tensor([-90.0, 90.0, -10.0, 19.9, 20.1]).to(dtype)
    out, expected = (op(dt, bias, limits) for op in (triton_elementwise.mamba2_dt, reference.mamba2_dt))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("has_norm_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("width", "group_size"), [(120, 40), (48, 48), (64, 16)])
def test_gated_norms_equal_their_specification(width, group_size, dtype, has_norm_first):
    y, z = torch.randn(5, width).to(dtype), torch.randn(5, 2 * width).to(dtype)[:, 3 : 3 + width]
    weights = [torch.randn(width), None]
    if not has_norm_first:
        weights.append(torch.randn(width).to(dtype))
    for weight in weights:
        out, expected = (
            op(y, z, weight, 1e-5, group_size=group_size, has_norm_first=has_norm_first)
            for op in (triton_elementwise.grouped_gated_norm, reference.grouped_gated_norm)
        )
        _close(out, expected)


def _one_of_two_groups(sums):
    """What a rank gets that holds a part of the second of two groups: a column of both groups' sums."""
    return torch.cat([torch.rand_like(sums), sums * 3], dim=1)[:, 1:]


@pytest.mark.parametrize("has_norm_first", [False, True])
@pytest.mark.parametrize("all_reduce", [lambda sums: sums.mul_(3) + 1, _one_of_two_groups])
def test_ranks_that_share_a_group_equal_the_specification(all_reduce, has_norm_first):
    y, z, weight = torch.randn(3, 40), torch.randn(3, 40), torch.randn(40)
    out, expected = (
        op(y, z, weight, 1e-5, group_size=160, has_norm_first=has_norm_first, all_reduce=all_reduce)
        for op in (triton_elementwise.grouped_gated_norm, reference.grouped_gated_norm)
    )
    _close(out, expected)


RAGGED = [(0, 1), (7, 1), (0, 200), (PADDING, 1), (64, 5), (3, 130), (PADDING, 0), (PADDING, 20), (9, 17), (0, 64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("segment", [None, 64, 128])
@pytest.mark.parametrize("sizes", [(4, 2, 8, 16), (2, 1, 24, 24), (3, 3, 16, 40)])
def test_ragged_rows_equal_the_specification(sizes, segment, dtype):
    num_heads, num_groups, head_dim, state_size = sizes
    problem = make_problem(
        RAGGED, num_heads=num_heads, num_groups=num_groups, head_dim=head_dim, state_size=state_size,
        writes=[1, 1, 1, 1, 0, 1, 1, 1, 1, 0], dtype=dtype,
    )  # fmt: skip
    assert error_of(problem, triton_mamba2.mamba2, segment=segment) < TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [[(9, 1), (0, 1), (PADDING, 1), (4, 1)], [(0, 1)], [(3, 5), (0, 16), (8, 1)]])
def test_short_rows_equal_the_specification(rows):
    problem = make_problem(rows, head_dim=20)
    if problem.metadata.max_query_len == 1:
        problem = problem.with_bounds(num_decodes=len(rows), max_prefills=None)
    assert error_of(problem, triton_mamba2.mamba2) < 1e-5


@pytest.mark.parametrize("bounds", [{"num_decodes": 2, "max_prefills": None}, {"num_decodes": None, "max_prefills": 3}])
def test_rows_behind_decodes_and_before_them_equal_the_specification(bounds):
    decodes, prompts = [(5, 1), (0, 1)], [(0, 70), (64, 66), (3, 9)]
    rows = decodes + prompts if bounds["num_decodes"] else [*prompts, *decodes, (PADDING, 18)]
    problem = make_problem(rows, head_dim=20).with_bounds(**bounds)
    assert error_of(problem, triton_mamba2.mamba2, segment=64) < 1e-5


def test_strong_decay_and_half_precision_stay_near_the_specification():
    problem = make_problem([(5, 300), (9, 1)], decay=60.0, dtype=torch.float16)
    assert error_of(problem, triton_mamba2.mamba2, segment=128) < 2e-3


@pytest.mark.parametrize("config", [ScanConfig(128, 16, 8, 2), ScanConfig(32, 32, 4, 1)])
@pytest.mark.full
def test_other_tiles_equal_the_specification(config):
    problem = make_problem([(7, 300), (0, 129), (2, 1)], head_dim=20, dtype=torch.float16)
    for segment in (None, 64, 256):
        assert error_of(problem, triton_mamba2.mamba2, segment=segment, config=config) < TOLERANCE[torch.float16]


def test_one_long_prompt_has_many_segments_and_many_short_prompts_have_one_each():
    for num_programs in (24, 64, 128):
        assert 8192 / choose_segment(8192, longest=8192, num_programs=num_programs) >= 4
        assert choose_segment(8192, longest=250, num_programs=num_programs) == 256
        assert choose_segment(64, longest=8192, num_programs=num_programs) == 64  # a bound may exceed the tokens


@pytest.mark.parametrize("segment", [64, 256])
def test_the_order_of_programs_changes_nothing(segment, monkeypatch):
    problem = make_problem([(7, 300), (0, 1), (64, 66)])
    expected_y, expected = problem.run(triton_mamba2.mamba2, segment=segment)
    set_index = interpreter_builder.set_grid_idx

    def set_from_the_end(*index):
        set_index(*(size - 1 - place for size, place in zip(interpreter_builder.grid_dim, index, strict=True)))

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", set_from_the_end)
    y, view = problem.run(triton_mamba2.mamba2, segment=segment)
    assert torch.equal(y, expected_y)
    torch.testing.assert_close(view.pool, expected.pool, rtol=0, atol=0, equal_nan=True)


def test_the_benchmark_runs_candidate_tiles():
    cell = measure("sweep", SMOKE[0], 1, 130, (TILES[0], 64), torch.device("cpu"))
    assert cell.error < 1e-5
