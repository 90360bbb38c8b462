"""The gated delta rule's Triton twin against its specification, through Triton's interpreter."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
import torch

from benchmarks import recurrent_kernels, recurrent_steps
from kernels.delta_rule import chunks
from kernels.delta_rule import triton as twin
from kernels.delta_rule.reference import recurrent_gated_delta_rule
from tests.unit.kernels.triton_cases.recurrent_problem import (
    MIXED,
    ONE_TOKEN,
    PADDING,
    RAGGED,
    SHORT,
    Row,
    assert_only_states_changed,
    clone,
    make_delta,
    make_metadata,
    make_view,
    states_after,
)  # fmt: skip

SIZES = {"key_heads": 2, "value_heads": 4, "d_k": 16, "d_v": 16}
LONG = [Row(130, 5), Row(17, 0, writes=False), Row(16, 3), Row(20, PADDING), Row(64, 64), Row(1, 2), Row(65, 0)]
# Sums in another order; half precision stands for bf16, which the interpreter truncates
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


def assert_near(out, expected, tolerance):
    assert bool((out.float() - expected.float()).norm() <= tolerance * expected.float().norm())


def assert_twins_agree(rows, *, dtype=torch.float32, strongest=2.0, by_dimension=False, bounds=None, sizes=SIZES):
    metadata = dataclasses.replace(make_metadata(rows), **bounds or {})
    inputs = make_delta(metadata, **sizes, by_dimension=by_dimension, strongest=strongest, dtype=dtype)
    num_rows = sizes["value_heads"] * sizes["d_v"]
    view = make_view(metadata, num_rows, sizes["d_k"], rows_per_piece=num_rows // 11)
    before, other = clone(view), clone(view)
    out = twin.gated_delta_rule(*inputs, view, metadata, scale=0.3)
    expected = recurrent_gated_delta_rule(*inputs, other, metadata, scale=0.3)
    assert out.dtype == dtype
    assert_near(out, expected, TOLERANCE[dtype])
    assert_near(states_after(view, metadata), states_after(other, metadata), TOLERANCE[dtype])
    assert_only_states_changed(view, before, metadata)


@pytest.mark.parametrize("by_dimension", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [SHORT, ONE_TOKEN])
def test_rows_of_few_tokens_equal_the_specification(rows, dtype, by_dimension):
    assert_twins_agree(rows, dtype=dtype, by_dimension=by_dimension)


@pytest.mark.parametrize("by_dimension", [False, True])
@pytest.mark.parametrize(("d_k", "d_v", "dtype"), [(16, 16, torch.float32), (24, 48, torch.float16)])
def test_steps_that_compute_their_gates_equal_the_specification(d_k, d_v, dtype, by_dimension):
    metadata = make_metadata(ONE_TOKEN)
    sizes = {"key_heads": 2, "value_heads": 4, "d_k": d_k, "d_v": d_v}
    q, k, v, g, beta = make_delta(metadata, **sizes, by_dimension=by_dimension, dtype=dtype)
    a = torch.cat((g + 1, g), 1).to(dtype)[:, :4]  # slices of wider rows, as the layer's projection has them
    b = torch.cat((beta, beta), 1).to(dtype)[:, 4:]
    gates = a, b, torch.randn(4), torch.randn(a[0].numel())
    view = make_view(metadata, 4 * d_v, d_k)
    before, other = clone(view), clone(view)
    out = twin.gated_delta_step(q, k, v, *gates, view, metadata, scale=0.3, max_beta=2.0)
    expected = chunks.gated_delta_step(q, k, v, *gates, other, metadata, scale=0.3, max_beta=2.0)
    assert_near(out, expected, TOLERANCE[dtype])
    assert_near(states_after(view, metadata), states_after(other, metadata), TOLERANCE[dtype])
    assert_only_states_changed(view, before, metadata)


@pytest.mark.parametrize("by_dimension", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("strongest", [2.0, 30.0])
@pytest.mark.parametrize("rows", [LONG, RAGGED])
def test_rows_of_any_length_equal_the_specification(rows, strongest, dtype, by_dimension):
    assert_twins_agree(rows, dtype=dtype, strongest=strongest, by_dimension=by_dimension)


def test_prompts_of_a_mixed_step_equal_the_specification():
    bounds = {"max_query_len": 100, "num_decodes": None, "max_prefills": 2}
    assert_twins_agree(MIXED, bounds=bounds)


def test_prompts_behind_rows_of_one_token_equal_the_specification():
    assert_twins_agree([*ONE_TOKEN, *LONG], bounds={"num_decodes": len(ONE_TOKEN)})


@pytest.mark.parametrize("by_dimension", [False, True])
@pytest.mark.parametrize(("d_k", "d_v"), [(24, 48), (8, 8)])
def test_heads_of_other_sizes_equal_the_specification(d_k, d_v, by_dimension):
    sizes = {"key_heads": 1, "value_heads": 2, "d_k": d_k, "d_v": d_v}
    assert_twins_agree(LONG, sizes=sizes, by_dimension=by_dimension)


# With beta 2 the state is reflected, and no rounding of it ever fades
@pytest.mark.parametrize(("max_beta", "tolerance"), [(1.0, 2e-5), (2.0, 1e-3)])
@pytest.mark.parametrize("gate", [0.0, -1e-3, -1000.0])
@pytest.mark.parametrize("by_dimension", [False, True])
def test_equal_keys_and_gates_of_any_strength_stay_finite(gate, by_dimension, max_beta, tolerance):
    metadata = make_metadata([Row(130, 5)])
    q, k, v, g, beta = make_delta(metadata, **SIZES, by_dimension=by_dimension)
    k, g, beta = k[:1].expand_as(k), torch.full_like(g, gate), torch.full_like(beta, max_beta)
    view = make_view(metadata, 64, 16)
    other = clone(view)
    out = twin.gated_delta_rule(q, k, v, g, beta, view, metadata, scale=0.3)
    assert_near(out, recurrent_gated_delta_rule(q, k, v, g, beta, other, metadata, scale=0.3), tolerance)
    assert_near(states_after(view, metadata), states_after(other, metadata), tolerance)


@pytest.mark.parametrize("by_dimension", [False, True])
def test_equal_keys_stay_near_the_specification_in_half_precision(by_dimension):
    """Inverses are merged in half precision where inputs have it: errors must not grow with the levels."""
    metadata = make_metadata([Row(130, 5)])
    q, k, v, g, beta = make_delta(metadata, **SIZES, by_dimension=by_dimension, dtype=torch.float16)
    k, g, beta = k[:1].expand_as(k), torch.full_like(g, -1e-3), torch.ones_like(beta)
    view = make_view(metadata, 64, 16)
    other = clone(view)
    out = twin.gated_delta_rule(q, k, v, g, beta, view, metadata, scale=0.3)
    assert_near(out, recurrent_gated_delta_rule(q, k, v, g, beta, other, metadata, scale=0.3), 1e-2)
    assert_near(states_after(view, metadata), states_after(other, metadata), 1e-2)


@pytest.mark.parametrize("by_dimension", [False, True])
def test_a_gate_that_is_no_number_leaves_its_mark(by_dimension):
    metadata = make_metadata([Row(70, 0)])
    inputs = make_delta(metadata, **SIZES, by_dimension=by_dimension)
    inputs[3][20] = torch.nan
    out = twin.gated_delta_rule(*inputs, make_view(metadata, 64, 16), metadata, scale=0.3)
    assert out[20:].isnan().any()


@pytest.mark.parametrize("by_dimension", [False, True])
@pytest.mark.parametrize("cuts", [[128, 72], [64, 136]])
def test_a_prompt_cut_at_multiples_of_a_chunk_gives_the_same_bits(cuts, by_dimension):
    whole = make_metadata([Row(200, 0)])
    inputs = make_delta(whole, **SIZES, by_dimension=by_dimension, dtype=torch.float16)
    view, other = (make_view(whole, 64, 16) for _ in range(2))
    expected = twin.gated_delta_rule(*inputs, view, whole, scale=0.3)
    out, start = [], 0
    for size in cuts:
        part = dataclasses.replace(make_metadata([Row(size, start)]), pages=whole.pages, req_index=whole.req_index)
        tokens = [x[start : start + size] for x in inputs]
        out.append(twin.gated_delta_rule(*tokens, other, part, scale=0.3))
        start += size
    assert torch.equal(torch.cat(out), expected)
    assert torch.equal(states_after(other, whole), states_after(view, whole))


@pytest.mark.full
def test_the_benchmark_of_recurrent_kernels_runs_and_writes_its_figures(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["recurrent_kernels", "--smoke", "--sweep", "--json", str(tmp_path / "out.json")])
    monkeypatch.setattr(recurrent_kernels, "_STEPS", recurrent_kernels._STEPS[:1])
    monkeypatch.setattr(recurrent_kernels, "_CHUNKS", recurrent_kernels._CHUNKS[:1])
    recurrent_kernels.main()
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert {cell["kernel"] for cell in results} == {"conv", "gates", "delta rule", "gated norm"}
    assert {(cell["rows"], cell["tokens"]) for cell in results} == {(3, 1), (2, 3), (2, 70)}
    assert max(cell["error"] for cell in results) < 4e-3
    assert not any(cell["trouble"] for cell in results)
    assert capsys.readouterr().out.count("% of floor") == len(results)


@pytest.mark.full
def test_the_benchmark_of_steps_runs_and_writes_its_figures(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["recurrent_steps", "--smoke", "--sweep", "--json", str(tmp_path / "out.json")])
    for name in ("_DELTA_STEPS", "_SCAN_STEPS"):
        monkeypatch.setattr(recurrent_steps, name, getattr(recurrent_steps, name)[:1])
    recurrent_steps.main()
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert {cell["kernel"] for cell in results} == {"conv", "delta rule", "chain", "behind product", "mamba2"}
    assert not any(cell["trouble"] for cell in results)
    assert max(cell["error"] for cell in results) < 6e-3
    assert "chain" in capsys.readouterr().out
