"""Products of one row, with the norm before them and the activation behind, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kernels.elementwise import reference as elementwise
from kernels.linear.late_norm import LateNorm, normed_linear
from kernels.linear.triton_row import RowConfig, normed_gemv, row_gemv
from tests.unit.kernels.triton_cases.ragged import relative_error


@pytest.mark.parametrize("config", [None, RowConfig(2, 4), RowConfig(8, 4)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("n", "k"), [(40, 512), (37, 320)])
def test_a_product_of_one_row(n, k, has_bias, config):
    x, w, bias = torch.randn(1, k).half(), torch.randn(n, k).half(), torch.randn(n).half()
    out = row_gemv(x, w, bias if has_bias else None, config=config)
    expected = x.double() @ w.double().T
    assert relative_error(out, expected + bias.double() if has_bias else expected) < 1e-3


@pytest.mark.parametrize("config", [None, RowConfig(2, 4), RowConfig(8, 4)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("keeps_normed", [False, True])
@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("gate", ["", "silu", "gelu_tanh"])
@pytest.mark.parametrize(("n", "k"), [(40, 512), (36, 320)])
def test_a_norm_a_product_and_a_gate_in_one(n, k, gate, weight_dtype, keeps_normed, has_bias, config):
    x, residual, w = torch.randn(1, k).half(), torch.randn(1, k).half(), (torch.randn(n, k) * k**-0.5).half()
    weight, bias = torch.randn(k).to(weight_dtype), torch.randn(n).half() if has_bias else None
    total, normed = torch.full((2, 1, k), float("nan")).half().unbind()
    out = normed_gemv(
        LateNorm(x, residual, weight, 1e-6, total), w, bias,
        gate=gate, normed=normed if keeps_normed else None, config=config,
    )  # fmt: skip
    expected_normed, expected_total = elementwise.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, expected_total)
    if keeps_normed:
        torch.testing.assert_close(normed, expected_normed, rtol=2e-3, atol=1e-4)
    expected = expected_normed.double() @ w.double().T
    if has_bias:
        expected += bias.double()
    if gate:
        expected = (elementwise.silu_and_mul if gate == "silu" else elementwise.gelu_tanh_and_mul)(expected)
    assert relative_error(out, expected) < 3e-3
    late = LateNorm(x.float(), residual.float(), weight.float(), 1e-6, torch.empty(1, k))
    specified = normed_linear(late, w.float(), None if bias is None else bias.float(), gate=gate)
    assert relative_error(specified, expected) < 3e-3
