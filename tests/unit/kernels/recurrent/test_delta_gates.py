"""Gates and gated norm of delta-rule layers against transformers' modules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from kernels.delta_rule.gates import delta_gates, gated_rms_norm


def test_gates_of_a_head_are_those_of_qwen():
    a, b, a_log, dt_bias = torch.randn(5, 8) * 4, torch.randn(5, 8), torch.randn(8), torch.randn(8)
    a[0, 0] = 90.0
    g, beta = delta_gates(torch.cat((b, a), 1)[:, 8:], b, a_log, dt_bias)
    # The lines of Qwen3NextGatedDeltaNet.forward
    torch.testing.assert_close(g, -a_log.float().exp() * functional.softplus(a.float() + dt_bias))
    torch.testing.assert_close(beta, b.sigmoid())
    assert g.is_contiguous()


def test_gates_of_each_key_dimension_are_those_of_kimi():
    gate = kimi.KimiLinearForgetGate(SimpleNamespace(linear_head_dim=8, linear_num_heads=4, hidden_size=12))
    torch.nn.init.normal_(gate.dt_bias)
    torch.nn.init.normal_(gate.A_log)
    hidden = torch.randn(1, 5, 12) * 9
    a = gate.f_b_proj(gate.f_a_proj(hidden))[0].unflatten(1, (4, 8))
    g, beta = delta_gates(a, torch.randn(5, 4), gate.A_log.flatten(), gate.dt_bias)
    torch.testing.assert_close(g, gate(hidden)[0])
    assert beta.shape == (5, 4)


def test_betas_reach_2_where_negative_eigenvalues_are_allowed():
    b = torch.randn(5, 8, dtype=torch.bfloat16)
    g, beta = delta_gates(b, b, torch.zeros(8), torch.zeros(8), max_beta=2.0)
    torch.testing.assert_close(beta, 2 * b.float().sigmoid())
    assert (g.dtype, beta.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("module", "activation"), [(qwen.Qwen3NextRMSNormGated, "silu"), (kimi.KimiLinearRMSNormGated, "sigmoid")]
)
def test_the_gated_norm_is_that_of_transformers(module, activation):
    norm = module(16, eps=1e-3)
    torch.nn.init.normal_(norm.weight)
    x, gate = torch.randn(5, 4 * 16 + 8)[:, 8:].unflatten(1, (4, 16)), torch.randn(5, 4, 16) * 3
    out = gated_rms_norm(x, gate, norm.weight, 1e-3, activation=activation)
    torch.testing.assert_close(out, norm(x, gate))
    assert out.is_contiguous()


def test_the_gated_norm_is_rounded_once():
    x, gate, weight = (torch.randn(*shape).bfloat16() for shape in ((5, 4, 16), (5, 4, 16), (16,)))
    expected = gated_rms_norm(x.float(), gate.float(), weight.float(), 1e-6)
    assert torch.equal(gated_rms_norm(x, gate, weight, 1e-6), expected.bfloat16())
