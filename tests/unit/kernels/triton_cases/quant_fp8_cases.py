"""Triton kernels of 8-bit floats against their torch specification, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import reference as quant_fp8
from kernels.linear import triton_fp8 as triton_quant_fp8


def _equal(pair, expected):
    assert pair[0].dtype == torch.float8_e4m3fn
    assert torch.equal(pair[1], expected[1])
    assert torch.equal(pair[0].float(), expected[0].float())


def _x(*shape):
    """Values whose quotients need no rounding, which the interpreter does wrongly: the GPU's is tested on a GPU."""
    x = (torch.randn(*shape) * 12).round().mul(8).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    x[:, ::32] = 448
    x[-1] = 0
    return x * torch.tensor([2.0**-3, 1.0, 2.0**4])[torch.arange(shape[0]) % 3, None]


@pytest.mark.parametrize("k", [32, 100, 5000])
def test_rows_are_quantised_as_specified(k):
    x = _x(3, k)
    _equal(triton_quant_fp8.quantize_rows(x), quant_fp8.quantize_rows(x))
    _equal(triton_quant_fp8.quantize_by(x, torch.tensor(0.25)), quant_fp8.quantize_by(x, torch.tensor(0.25)))


def test_rows_of_a_wider_matrix_are_quantised():
    x = _x(3, 96)[:, 32:64]
    _equal(triton_quant_fp8.quantize_rows(x), quant_fp8.quantize_rows(x))
    _equal(triton_quant_fp8.quantize_groups(x, 32), quant_fp8.quantize_groups(x, 32))


@pytest.mark.parametrize("k", [128, 200])
def test_groups_are_quantised_as_specified(k):
    x = _x(4, k)
    _equal(triton_quant_fp8.quantize_groups(x, 128), quant_fp8.quantize_groups(x, 128))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_rows", "n", "k"), [(1, 40, 256), (5, 33, 300), (17, 64, 128)])
def test_products_scaled_by_row_are_as_specified(num_rows, n, k, has_bias):
    x, w = quant_fp8.quantize_rows(torch.randn(num_rows, k)), quant_fp8.quantize_rows(torch.randn(n, k))
    bias = torch.randn(n) if has_bias else None
    out = triton_quant_fp8.rows_linear(*x, *w, bias, torch.float32)
    torch.testing.assert_close(out, quant_fp8.rows_linear(*x, *w, bias, torch.float32), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_row_or_group_as_specified(bad):
    x = _x(3, 256)
    x[1, 130] = bad
    quantized = [
        (triton_quant_fp8.quantize_rows(x), quant_fp8.quantize_rows(x)),
        (triton_quant_fp8.quantize_by(x, torch.tensor(0.25)), quant_fp8.quantize_by(x, torch.tensor(0.25))),
        (triton_quant_fp8.quantize_groups(x, 128), quant_fp8.quantize_groups(x, 128)),
    ]
    for (values, scales), (expected_values, expected_scales) in quantized:
        torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(values.float(), expected_values.float(), rtol=0, atol=0, equal_nan=True)
        assert expected_values[[0, 2]].float().isfinite().all()
