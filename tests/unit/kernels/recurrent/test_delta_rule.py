"""The gated delta rule, token by token and by chunks: against transformers' functions, each other, and cuts of rows."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as olmo
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from kernels.delta_rule.chunks import gated_delta_rule
from kernels.delta_rule.reference import recurrent_gated_delta_rule
from kernels.states import load_states
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

VERSIONS = [recurrent_gated_delta_rule, gated_delta_rule]
SIZES = {"key_heads": 2, "value_heads": 6, "d_k": 16, "d_v": 12}
ORACLES = [
    (qwen.torch_chunk_gated_delta_rule, False),
    (qwen.torch_recurrent_gated_delta_rule, False),
    (olmo.torch_chunk_gated_delta_rule, False),
    (kimi.chunk_kimi_delta_attention, True),
    (kimi.recurrent_kimi_delta_attention, True),
]


def by_transformers(oracle, q, k, v, g, beta, states, metadata):
    """Outputs and states of each row from one of transformers' functions."""
    repeat = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(repeat, dim=1), k.repeat_interleave(repeat, dim=1)
    out, after = torch.zeros(v.shape), states.clone()
    starts = metadata.query_start_loc.tolist()
    for row, seq_len in enumerate(metadata.seq_lens.tolist()):
        tokens = slice(starts[row], starts[row + 1])
        if seq_len == 0 or starts[row] == starts[row + 1]:
            continue
        state = states[row].unflatten(0, v.shape[1:]).mT[None]
        read, state = oracle(
            *(x[None, tokens] for x in (q, k, v)), g=g[None, tokens], beta=beta[None, tokens], initial_state=state,
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        out[tokens], after[row] = read[0], state[0].mT.flatten(0, 1)
    return out, after


def assert_near(out, expected, tolerance=1e-5):
    assert bool((out - expected).norm() <= tolerance * expected.norm()), (out - expected).abs().max()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("oracle", "by_dimension"), ORACLES)
@pytest.mark.parametrize("rows", [RAGGED, ONE_TOKEN, SHORT, MIXED])
def test_each_row_is_advanced_as_transformers_does(version, oracle, by_dimension, rows):
    metadata = make_metadata(rows)
    inputs = make_delta(metadata, **SIZES, by_dimension=by_dimension)
    view = make_view(metadata, 6 * 12, 16)
    before, states = clone(view), load_states(view, metadata)
    out = version(*inputs, view, metadata, scale=16**-0.5)
    expected, after = by_transformers(oracle, *inputs, states, metadata)
    assert_near(out, expected)
    may_write = metadata.seq_lens > 0 if metadata.writes is None else (metadata.seq_lens > 0) & (metadata.writes > 0)
    is_kept = (metadata.seq_lens > metadata.query_start_loc.diff()) & ~may_write
    kept = states_after(view, metadata)
    assert_near(kept[may_write], after[may_write])
    assert torch.equal(kept[is_kept], states[is_kept])
    assert_only_states_changed(view, before, metadata)


@pytest.mark.parametrize("by_dimension", [False, True])
@pytest.mark.parametrize("strongest", [0.0, 0.1, 30.0])
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_chunks_equal_the_specification_for_gates_of_any_strength(by_dimension, strongest, beta):
    metadata = make_metadata(RAGGED, seed=3)
    q, k, v, g, betas = make_delta(metadata, **SIZES, by_dimension=by_dimension, strongest=strongest, seed=3)
    view = make_view(metadata, 6 * 12, 16)
    other = clone(view)
    out = gated_delta_rule(q, k, v, g, betas * beta, view, metadata, scale=0.5)
    expected = recurrent_gated_delta_rule(q, k, v, g, betas * beta, other, metadata, scale=0.5)
    assert_near(out, expected)
    assert_near(states_after(view, metadata), states_after(other, metadata))


@pytest.mark.parametrize("by_dimension", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_random_batches_equal_the_specification(seed, by_dimension):
    draw = random.Random(seed)
    lengths = [draw.choice([0, 1, 1, 2, 16, 63, 64, 65, draw.randint(2, 200)]) for _ in range(draw.randint(1, 9))]
    starts = [draw.choice([PADDING, 0, 1, 64, draw.randint(0, 1000)]) for _ in lengths]
    rows = [Row(*row, writes=draw.random() < 0.8) for row in zip(lengths, starts, strict=True)]
    metadata = make_metadata([*rows, Row(1, 3)], seed=seed)
    sizes = {"key_heads": draw.randint(1, 3), "d_k": draw.choice([8, 20, 32]), "d_v": draw.choice([8, 12, 48])}
    sizes["value_heads"] = sizes["key_heads"] * draw.randint(1, 3)
    inputs = make_delta(metadata, **sizes, by_dimension=by_dimension, strongest=draw.choice([0.05, 2, 40]), seed=seed)
    num_rows = sizes["value_heads"] * sizes["d_v"]
    rows_per_piece = draw.randint(-(-num_rows // 90), num_rows)
    view = make_view(metadata, num_rows, sizes["d_k"], rows_per_piece=rows_per_piece, rest=draw.randint(0, 7))
    before, other = clone(view), clone(view)
    out = gated_delta_rule(*inputs, view, metadata, scale=0.5)
    assert_near(out, recurrent_gated_delta_rule(*inputs, other, metadata, scale=0.5))
    assert_near(states_after(view, metadata), states_after(other, metadata))
    assert_only_states_changed(view, before, metadata)


@pytest.mark.parametrize("by_dimension", [False, True])
@pytest.mark.parametrize("gate", [0.0, -1e-3, -30.0, -1000.0])
def test_equal_tokens_and_equal_gates_stay_finite_and_exact(by_dimension, gate):
    metadata = make_metadata([Row(200, 0), Row(200, 7)])
    q, k, v, g, beta = make_delta(metadata, **SIZES, by_dimension=by_dimension)
    q, k, g, beta = q[:1].expand_as(q), k[:1].expand_as(k), torch.full_like(g, gate), torch.ones_like(beta)
    view = make_view(metadata, 6 * 12, 16)
    other = clone(view)
    out = gated_delta_rule(q, k, v, g, beta, view, metadata, scale=0.5)
    assert_near(out, recurrent_gated_delta_rule(q, k, v, g, beta, other, metadata, scale=0.5))
    assert_near(states_after(view, metadata), states_after(other, metadata))


@pytest.mark.parametrize("by_dimension", [False, True])
@pytest.mark.parametrize("cuts", [[128, 72], [64, 64, 64, 8], [192, 8], [64, 136]])
@pytest.mark.parametrize("length", [200, 193])
def test_a_prompt_cut_at_multiples_of_a_chunk_gives_the_same_bits(by_dimension, cuts, length):
    whole = make_metadata([Row(length, 0)])
    inputs = make_delta(whole, **SIZES, by_dimension=by_dimension)
    view = make_view(whole, 6 * 12, 16)
    expected = gated_delta_rule(*inputs, view, whole, scale=0.5)
    other, out, start = make_view(whole, 6 * 12, 16), [], 0
    for size in [*cuts[:-1], length - sum(cuts[:-1])]:
        # Beside rows of other requests, which must change nothing
        part = make_metadata([Row(1, 5), Row(70, 0), Row(size, start)])
        noise = make_delta(make_metadata([Row(1, 5), Row(70, 0)]), **SIZES, by_dimension=by_dimension, seed=start)
        tokens = [torch.cat((n, x[start : start + size])) for n, x in zip(noise, inputs, strict=True)]
        pages = torch.cat((whole.pages[whole.req_index[0]][None], part.pages))
        part = dataclasses.replace(part, pages=pages, req_index=torch.tensor([1, 2, 0]))
        crowded = make_view(part, 6 * 12, 16)
        crowded.pool[:, pages[0]] = other.pool[:, pages[0]]
        out.append(gated_delta_rule(*tokens, crowded, part, scale=0.5)[71:])
        other.pool[:, pages[0]] = crowded.pool[:, pages[0]]
        start += size
    assert torch.equal(torch.cat(out), expected)
    assert torch.equal(states_after(other, whole), states_after(view, whole))


@pytest.mark.parametrize("version", VERSIONS)
def test_outputs_have_the_dtype_of_the_values(version):
    metadata = make_metadata(RAGGED)
    q, k, v, g, beta = make_delta(metadata, **SIZES, dtype=torch.bfloat16)
    view = make_view(metadata, 6 * 12, 16)
    expected = version(q.float(), k.float(), v.float(), g, beta, clone(view), metadata, scale=0.5)
    out = version(q, k, v, g, beta, view, metadata, scale=0.5)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected.bfloat16(), rtol=1e-2, atol=1e-2)
