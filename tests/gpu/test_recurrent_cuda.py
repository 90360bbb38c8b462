"""Kernels of delta-rule layers and the causal convolution on the device, against their specifications in float32."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.causal_conv import reference as conv_reference
from kernels.delta_rule import chunks, gates
from tests.unit.kernels.triton_cases.ragged import relative_error
from tests.unit.kernels.triton_cases.recurrent_problem import (
    ONE_TOKEN,
    PADDING,
    RAGGED,
    SHORT,
    Row,
    assert_only_states_changed,
    clone,
    make_conv,
    make_delta,
    make_metadata,
    make_view,
    states_after,
)  # fmt: skip

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
SHAPES = {
    "Qwen3.5-35B": {"key_heads": 16, "value_heads": 32, "d_k": 128, "d_v": 128},
    "Qwen3.5-27B": {"key_heads": 16, "value_heads": 48, "d_k": 128, "d_v": 128},
    "OLMo-Hybrid": {"key_heads": 30, "value_heads": 30, "d_k": 96, "d_v": 192},
    "Kimi-Linear": {"key_heads": 32, "value_heads": 32, "d_k": 128, "d_v": 128, "by_dimension": True},
    "wide": {"key_heads": 2, "value_heads": 2, "d_k": 256, "d_v": 256},
    "narrow": {"key_heads": 2, "value_heads": 4, "d_k": 16, "d_v": 16},
}
LONG = [Row(1000, 0), Row(300, 128), Row(1, 7), Row(17, 5), Row(64, 64), Row(70, PADDING), Row(4, 9, writes=False)]
# Inputs are equal to the bit. Short rows are computed in float32, so only outputs are rounded; in chunks the states and
# updates enter products in bf16 or fp16, and float32 stands for three products of tf32
SHORT_TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 5e-4, torch.float32: 1e-5}
LONG_TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 5e-5}
DTYPES = list(SHORT_TOLERANCE)


def make_problem(rows, shape, dtype, *, strongest=2.0, seed=0):
    """Metadata, inputs and the view of a step at a family's shape; pieces as large as the engine's."""
    metadata = make_metadata(rows, device=DEVICE, num_pages=90, seed=seed)
    inputs = make_delta(metadata, **SHAPES[shape], strongest=strongest, dtype=dtype, seed=seed)
    d_k, num_rows = SHAPES[shape]["d_k"], SHAPES[shape]["value_heads"] * SHAPES[shape]["d_v"]
    view = make_view(metadata, num_rows, d_k, rows_per_piece=4096 // d_k, rest=4096 % d_k, seed=seed)
    return metadata, inputs, view


def expect(inputs, view, metadata):
    """The specification's outputs in float64, and its states."""
    other = clone(view)
    q, k, v, g, beta = inputs
    out = chunks.gated_delta_rule(q.float(), k.float(), v.float(), g, beta, other, metadata, scale=0.1)
    return out.double(), states_after(other, metadata).double()


def assert_twins_agree(rows, shape, dtype, tolerance, *, strongest=2.0):
    from kernels.delta_rule.triton import gated_delta_rule

    metadata, inputs, view = make_problem(rows, shape, dtype, strongest=strongest)
    before = clone(view)
    out, states = expect(inputs, view, metadata)
    for pdl in (False, True):
        mine = clone(view)
        read = gated_delta_rule(*inputs, mine, metadata, scale=0.1, pdl=pdl)
        assert relative_error(read, out) < tolerance
        assert relative_error(states_after(mine, metadata), states) < tolerance
        assert_only_states_changed(mine, before, metadata)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [ONE_TOKEN, ONE_TOKEN * 12, SHORT])
def test_rows_of_few_tokens_equal_the_specification(rows, shape, dtype):
    assert_twins_agree(rows, shape, dtype, SHORT_TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [ONE_TOKEN, ONE_TOKEN * 12])
def test_steps_that_compute_their_gates_equal_the_specification(rows, shape, dtype):
    from kernels.delta_rule.triton import gated_delta_step

    metadata, (q, k, v, g, beta), view = make_problem(rows, shape, dtype)
    a, b = g.to(dtype), beta.to(dtype)
    gate_inputs = a, b, torch.randn(b.shape[1], device=DEVICE), torch.randn(a[0].numel(), device=DEVICE)
    before = clone(view)
    out, states = expect((q, k, v, *gates.delta_gates(*gate_inputs, max_beta=2.0)), view, metadata)
    for pdl in (False, True):
        mine = clone(view)
        read = gated_delta_step(q, k, v, *gate_inputs, mine, metadata, scale=0.1, max_beta=2.0, pdl=pdl)
        assert relative_error(read, out) < SHORT_TOLERANCE[dtype]
        assert relative_error(states_after(mine, metadata), states) < SHORT_TOLERANCE[dtype]
        assert_only_states_changed(mine, before, metadata)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [LONG, RAGGED])
def test_rows_of_any_length_equal_the_specification(rows, shape, dtype):
    assert_twins_agree(rows, shape, dtype, LONG_TOLERANCE[dtype])


@pytest.mark.parametrize("strongest", [0.0, 30.0, 300.0])
@pytest.mark.parametrize("shape", ["Qwen3.5-35B", "Kimi-Linear"])
def test_gates_of_any_strength_equal_the_specification(shape, strongest):
    assert_twins_agree(LONG, shape, torch.bfloat16, LONG_TOLERANCE[torch.bfloat16], strongest=strongest)


@pytest.mark.parametrize("shape", ["Qwen3.5-35B", "Kimi-Linear"])
def test_equal_tokens_stay_finite(shape):
    """Each update takes back the one before, so errors of updates in bf16 add up over a chunk: 64 of 2^-9."""
    from kernels.delta_rule.triton import gated_delta_rule

    metadata, (q, k, v, g, beta), view = make_problem([Row(2000, 0)], shape, torch.bfloat16)
    inputs = q[:1].expand_as(q), k[:1].expand_as(k), v, g * 1e-3, torch.ones_like(beta)
    out, states = expect(inputs, view, metadata)
    read = gated_delta_rule(*inputs, view, metadata, scale=0.1)
    assert relative_error(read, out) < 6e-2
    assert relative_error(states_after(view, metadata), states) < 6e-2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["Qwen3.5-35B", "Kimi-Linear", "narrow"])
def test_a_prompt_cut_at_multiples_of_a_chunk_gives_the_same_bits(shape, dtype):
    """Alone and beside so many other rows that the kernels' tiles are others."""
    from kernels.delta_rule.triton import gated_delta_rule

    metadata, inputs, view = make_problem([Row(1000, 0), *[Row(100, 0)] * 11], shape, dtype)
    other = clone(view)
    expected = gated_delta_rule(*inputs, view, metadata, scale=0.1)[:1000]
    out = []
    for start, end in ((0, 576), (576, 640), (640, 1000)):
        part = dataclasses.replace(
            make_metadata([Row(end - start, start)], device=DEVICE),
            pages=metadata.pages,
            req_index=metadata.req_index[:1],
        )
        out.append(gated_delta_rule(*(x[start:end] for x in inputs), other, part, scale=0.1))
    assert torch.equal(torch.cat(out), expected)
    assert torch.equal(states_after(other, metadata)[0], states_after(view, metadata)[0])


@pytest.mark.parametrize("shape", ["Qwen3.5-35B", "Kimi-Linear"])
def test_a_captured_step_serves_other_rows(shape):
    from kernels.delta_rule.triton import gated_delta_rule

    first = [Row(100, 0), Row(40, 64), *[Row(1, 3)] * 4]
    second = [Row(129, 64), Row(11, 0), Row(1, 9), Row(1, PADDING), Row(1, 0), Row(1, 70)]
    assert sum(row.num_tokens for row in first) == sum(row.num_tokens for row in second)
    bounds = {"num_decodes": None, "max_prefills": 2, "max_query_len": 144}
    metadata, inputs, view = make_problem(first, shape, torch.bfloat16)
    metadata = dataclasses.replace(metadata, **bounds)
    gated_delta_rule(*inputs, view, metadata, scale=0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read = gated_delta_rule(*inputs, view, metadata, scale=0.1)
    for seed, rows in enumerate((second, first), 5):
        other, numbers, states = make_problem(rows, shape, torch.bfloat16, seed=seed)
        for name in ("query_start_loc", "seq_lens", "req_index", "pages"):
            getattr(metadata, name).copy_(getattr(other, name))
        for target, source in zip(inputs, numbers, strict=True):
            target.copy_(source)
        view.pool.copy_(states.pool)
        out, expected = expect(inputs, view, metadata)
        graph.replay()
        assert relative_error(read, out) < 1e-2
        assert relative_error(states_after(view, metadata), expected) < 1e-2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [ONE_TOKEN, ONE_TOKEN * 12, SHORT, LONG, RAGGED])
@pytest.mark.parametrize(
    ("channels", "width", "has_bias", "has_silu"),
    [(8192, 4, False, True), (2048, 3, True, False), (100, 4, True, True)],
)
def test_the_convolution_equals_its_specification(channels, width, has_bias, has_silu, rows, dtype):
    from kernels.causal_conv.triton import causal_conv

    metadata = make_metadata(rows, device=DEVICE)
    x, weight, bias = make_conv(metadata, channels, width, dtype=dtype)
    bias = bias if has_bias else None
    view = make_view(metadata, channels, width - 1, rows_per_piece=4096 // (width - 1), rest=4096 % (width - 1))
    before = clone(view)
    for pdl in (False, True):
        mine, other = clone(view), clone(view)
        out = causal_conv(x, weight, bias, mine, metadata, has_silu=has_silu, pdl=pdl)
        expected = conv_reference.causal_conv(x, weight, bias, other, metadata, has_silu=has_silu)
        assert relative_error(out, expected.double()) < SHORT_TOLERANCE[dtype]
        assert torch.equal(states_after(mine, metadata), states_after(other, metadata))
        assert_only_states_changed(mine, before, metadata)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 37, 3000])
@pytest.mark.parametrize("shape", ["Qwen3.5-35B", "Kimi-Linear", "OLMo-Hybrid"])
def test_gates_and_the_gated_norm_equal_their_specifications(shape, num_tokens, dtype):
    from kernels.delta_rule import triton_gates

    num_heads, d_v, d_k = (SHAPES[shape][name] for name in ("value_heads", "d_v", "d_k"))
    like = {"device": DEVICE, "dtype": dtype}
    a = torch.randn(num_tokens, num_heads, *[d_k] * SHAPES[shape].get("by_dimension", False), **like) * 9
    b, a_log = torch.randn(num_tokens, num_heads, **like), torch.randn(num_heads, device=DEVICE)
    dt_bias = torch.randn(a[0].numel(), device=DEVICE)
    expected = gates.delta_gates(a, b, a_log, dt_bias, max_beta=2.0)
    for out, wanted in zip(triton_gates.delta_gates(a, b, a_log, dt_bias, max_beta=2.0), expected, strict=True):
        assert relative_error(out, wanted.double()) < 1e-5
    x, z = torch.randn(num_tokens, num_heads, d_v, **like), torch.randn(num_tokens, num_heads * d_v + 64, **like)
    gate, weight = z[:, 64:].unflatten(1, (num_heads, d_v)), torch.randn(d_v, **like)
    for activation in ("silu", "sigmoid"):
        out = triton_gates.gated_rms_norm(x, gate, weight, 1e-6, activation=activation, pdl=True)
        wanted = gates.gated_rms_norm(x, gate, weight, 1e-6, activation=activation)
        assert relative_error(out, wanted.double()) < SHORT_TOLERANCE[dtype]
