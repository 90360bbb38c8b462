"""Mamba-2's specification against transformers' torch code, over ragged rows with states scattered in a pool of NaN."""

from __future__ import annotations

import pytest
import torch

from kernels.mamba2.reference import grouped_gated_norm, mamba2, mamba2_dt
from tests.unit.kernels.triton_cases.mamba2_problem import PADDING, Problem, make_problem, states_of

ROWS = [(0, 1), (7, 1), (0, 70), (PADDING, 1), (64, 5), (3, 130), (PADDING, 0), (PADDING, 4), (9, 2), (0, 64)]


def transformers_states(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y and the state of each row, computed row by row in transformers' chunks of 16; padding: zeros and NaN."""
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan, mamba2_selective_state_update

    metadata, (num_heads, head_dim) = problem.metadata, problem.x.shape[1:]
    after = states_of(problem.view, metadata).view(-1, num_heads, head_dim, problem.b.shape[2]).clone()
    y = torch.zeros(problem.x.shape)
    for row, seq_len in enumerate(metadata.seq_lens.tolist()):
        first, end = metadata.query_start_loc[row : row + 2].tolist()
        if seq_len == 0:
            continue
        tokens = slice(first, end)
        x, b, c, dt = (tensor[tokens] for tensor in (problem.x, problem.b, problem.c, problem.dt))
        state = after[row : row + 1].clone()
        if seq_len == end - first:
            state.zero_()
        if end - first == 1:
            a, shape = problem.a[:, None, None].expand(-1, head_dim, b.shape[2]), (num_heads, head_dim)
            y[first] = mamba2_selective_state_update(
                state, x, dt[..., None].expand(-1, *shape), a, b, c, problem.d[:, None].expand(shape)
            )[0]
        else:
            y[tokens], state = mamba2_chunk_scan(
                *(tensor[None] for tensor in (x, dt)), problem.a, b[None], c[None], 16, D=problem.d,
                initial_states=state, return_final_states=True,
            )  # fmt: skip
        after[row] = state
    return y, after.flatten(1, 2)


@pytest.mark.parametrize(("num_heads", "num_groups"), [(4, 1), (4, 2), (3, 3)])
def test_rows_of_any_length_and_start_equal_transformers(num_heads, num_groups):
    problem = make_problem(ROWS, num_heads=num_heads, num_groups=num_groups)
    expected_y, expected_states = transformers_states(problem)
    y, view = problem.run(mamba2)
    torch.testing.assert_close(y, expected_y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states_of(view, problem.metadata), expected_states, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_only_the_rows_own_states_change():
    problem = make_problem(ROWS)
    _, view = problem.run(mamba2)
    size = view.rows_per_piece * view.row_size
    assert view.pool[:, :, size:].isnan().all()
    written = (~view.pool[:, :, :size].isnan()).any(-1)
    pages = problem.metadata.pages[problem.metadata.req_index[problem.metadata.seq_lens > 0]].long()
    pieces = torch.arange(view.first_piece, view.first_piece + view.num_pieces)
    expected = torch.zeros_like(written)
    expected[pieces % len(view.pool), pages[:, pieces // len(view.pool)]] = True
    assert torch.equal(written, expected)


def test_rows_that_may_not_write_read_their_states_and_leave_them():
    writes = [1, 0, 0, 1, 0, 1, 0, 1, 1, 0]
    problem, drafted = make_problem(ROWS), make_problem(ROWS, writes=writes)
    (y, view), (drafted_y, drafted_view) = problem.run(mamba2), drafted.run(mamba2)
    assert torch.equal(drafted_y, y)
    before = states_of(problem.view, problem.metadata)
    after, drafted_after = states_of(view, problem.metadata), states_of(drafted_view, problem.metadata)
    for row, is_written in enumerate(writes):
        torch.testing.assert_close(
            drafted_after[row], (after if is_written else before)[row], rtol=0, atol=0, equal_nan=True
        )


def test_the_time_step_is_clamped_after_the_softplus():
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    problem = make_problem([(0, 20)])
    raw, bias, limits = torch.randn(20, 6)[:, 1:5] * 3, torch.randn(4), (0.2, 1.5)
    dt = mamba2_dt(raw, bias, limits)
    assert dt.dtype == torch.float32
    assert dt.min() == pytest.approx(0.2)
    assert dt.max() == pytest.approx(1.5)
    expected = mamba2_chunk_scan(
        problem.x[None], raw[None], problem.a, problem.b[None], problem.c[None], 16,
        D=problem.d, dt_bias=bias, dt_softplus=True, dt_limit=limits,
    )[0]  # fmt: skip
    y = mamba2(problem.x, problem.b, problem.c, dt, problem.a, problem.d, problem.view, problem.metadata)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    assert mamba2_dt(raw.bfloat16(), bias.bfloat16(), limits).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gated_norm_equals_that_of_nemotron(dtype):
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNormGated

    y, z = torch.randn(5, 48).to(dtype), torch.randn(5, 96).to(dtype)[:, 10:58]
    norm = NemotronHRMSNormGated(48, group_size=16, eps=1e-5)
    norm.weight.data = torch.randn(48).to(dtype)
    torch.testing.assert_close(grouped_gated_norm(y, z, norm.weight.data, 1e-5, group_size=16), norm(y, z).data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_norm_first", [False, True])
def test_the_gated_norm_equals_that_of_falcon(has_norm_first, dtype):
    from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated

    y, z = torch.randn(5, 48).to(dtype), torch.randn(5, 48).to(dtype)
    norm = FalconH1RMSNormGated(48, n_groups=3, eps=1e-5, norm_before_gate=has_norm_first)
    norm.weight.data = torch.randn(48).to(dtype)
    out = grouped_gated_norm(y, z, norm.weight.data.float(), 1e-5, group_size=16, has_norm_first=has_norm_first)
    torch.testing.assert_close(out, norm(y[None], z[None])[0].data)


def test_without_a_weight_there_is_only_the_gate():
    y, z = torch.randn(5, 48), torch.randn(5, 48)
    torch.testing.assert_close(grouped_gated_norm(y, z, None, 1e-5, group_size=48), y * torch.nn.functional.silu(z))


@pytest.mark.parametrize("has_norm_first", [False, True])
def test_ranks_that_share_a_group_sum_its_squares(has_norm_first):
    y, z, weight = torch.randn(3, 48), torch.randn(3, 48), torch.randn(48)
    whole = grouped_gated_norm(y, z, weight, 1e-5, group_size=48, has_norm_first=has_norm_first)
    values = y if has_norm_first else y * torch.nn.functional.silu(z)
    sums = [values[:, part].square().sum(-1, keepdim=True) for part in (slice(0, 24), slice(24, 48))]
    for rank, part in enumerate((slice(0, 24), slice(24, 48))):

        def all_reduce(own: torch.Tensor, rank: int = rank) -> torch.Tensor:
            torch.testing.assert_close(own, sums[rank])
            return own + sums[1 - rank]

        out = grouped_gated_norm(
            y[:, part], z[:, part], weight[part], 1e-5,
            group_size=48, has_norm_first=has_norm_first, all_reduce=all_reduce,
        )  # fmt: skip
        torch.testing.assert_close(out, whole[:, part])
