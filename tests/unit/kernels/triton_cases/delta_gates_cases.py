"""Twins of the gates and of the gated norm against their specifications, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kernels.delta_rule import gates as reference
from kernels.delta_rule import triton_gates as twin

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("per_head", [None, 24, 700])
@pytest.mark.parametrize("num_tokens", [1, 70])
def test_gates_equal_their_specification(num_tokens, per_head, dtype):
    shape = (num_tokens, 3) if per_head is None else (num_tokens, 3, per_head)
    a, b = (torch.randn(shape) * 20).to(dtype), torch.randn(num_tokens, 8).to(dtype)[:, 2:5]
    a_log, dt_bias = torch.randn(3), torch.randn(shape[1:]).flatten()
    expected = reference.delta_gates(a, b, a_log, dt_bias, max_beta=2.0)
    for out, wanted in zip(twin.delta_gates(a, b, a_log, dt_bias, max_beta=2.0), expected, strict=True):
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize(("num_heads", "size"), [(3, 24), (33, 128)])
def test_the_gated_norm_equals_its_specification(num_heads, size, activation, dtype):
    x = torch.randn(2, num_heads, size).to(dtype)
    gate = (torch.randn(2, num_heads, 2 * size) * 4).to(dtype)[..., size:]
    weight = torch.randn(size).to(dtype)
    out = twin.gated_rms_norm(x, gate, weight, 1e-6, activation=activation)
    expected = reference.gated_rms_norm(x, gate, weight, 1e-6, activation=activation)
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
