"""Norms and gated activations that write 8 bits, through Triton's interpreter: their two twins in one kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from kernels.elementwise import triton as elementwise
from kernels.linear import triton_fp8, triton_rounded, triton_scaled8
from kernels.linear.rounding import RoundedRows, Rounding

ROUNDINGS = {
    "rows": Rounding(),
    "runs": Rounding(64),
    "known": Rounding(scale=torch.tensor(0.25)),
    "integers": Rounding(dtype=torch.int8),
    "integers of a known scale": Rounding(scale=torch.tensor(0.02), dtype=torch.int8),
}


def rounded_after(x: torch.Tensor, rounding: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    if rounding.dtype == torch.int8:
        by_row, known = triton_scaled8.quantize_rows_int8, triton_scaled8.quantize_by_int8
        return by_row(x) if rounding.scale is None else known(x, rounding.scale)
    if rounding.columns is not None:
        return triton_fp8.quantize_groups(x, rounding.columns)
    return triton_fp8.quantize_rows(x) if rounding.scale is None else triton_fp8.quantize_by(x, rounding.scale)


def assert_same(rounded: RoundedRows, expected: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> None:
    assert rounded.dtype == dtype
    assert rounded.values.dtype == expected[0].dtype
    torch.testing.assert_close(rounded.scales, expected[1], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(rounded.values.float(), expected[0].float(), rtol=0, atol=0, equal_nan=True)


@triton.jit
def _quotient_kernel(values_ptr, divisors_ptr, quotients_ptr, SIZE: tl.constexpr):
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    divisor = tl.load(divisors_ptr + tl.program_id(0))
    tl.store(quotients_ptr + places, triton_fp8.quotient(tl.load(values_ptr + places), divisor))


def _fused(builder: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    """x * y + z with a product that is not rounded, as on a GPU; the interpreter rounds it to fp32.

    The sum is rounded to fp64 before fp32, so that one of many millions may differ from a GPU's.
    """
    wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
    return TensorHandle(wide.astype(np.float32), z.dtype.scalar)


def test_a_quotient_is_that_of_a_division(monkeypatch):
    monkeypatch.setattr(InterpreterBuilder, "create_fma", _fused)
    divisors = torch.rand(64) * torch.exp(torch.randn(64) * 8)
    divisors[:6] = torch.tensor([3.0, 1.0, 0.1, 1e-12, 2**-1 - 2**-25, 7.5e35])
    largest = divisors[:, None] * 448
    values = (torch.rand(64, 1024) * 2 - 1) * largest
    values[:32] = values[:32].bfloat16().float().clamp(-largest[:32], largest[:32])
    values[32:40] = divisors[32:40, None] * (torch.arange(1024) / 2)  # products: halves, and what rounds to them
    values[:, 0], values[:, 1] = largest[:, 0], 0.0
    quotients = torch.empty_like(values)
    _quotient_kernel[(64,)](values, divisors, quotients, SIZE=1024)
    assert torch.equal(quotients, values / divisors[:, None])


def test_an_infinite_divisor_gives_zeros_and_nan_for_infinity():
    values = torch.tensor([[1.0, float("inf"), -3e38, float("nan")]])
    quotients = torch.empty_like(values)
    _quotient_kernel[(1,)](values, torch.tensor([float("inf")]), quotients, SIZE=4)
    torch.testing.assert_close(quotients, torch.tensor([[0.0, float("nan"), 0.0, float("nan")]]), equal_nan=True)


@pytest.mark.parametrize("kind", ROUNDINGS)
@pytest.mark.parametrize("size", [32, 96, 300])
@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.float32])
def test_a_norm_that_rounds_is_a_norm_and_a_rounding(kind, size, weight_dtype):
    x, residual = torch.randn(2, 5, size, dtype=torch.float16).unbind()
    wide = torch.randn(5, 2 * size, dtype=torch.float16)
    weight = torch.randn(size, dtype=weight_dtype)
    for left in (x, wide[:, size:]):
        rounded, total = triton_rounded.add_rms_norm_rounded(left, residual, weight, 1e-5, ROUNDINGS[kind])
        normed, expected_total = elementwise.add_rms_norm(left, residual, weight, 1e-5)
        assert torch.equal(total, expected_total)
        assert_same(rounded, rounded_after(normed, ROUNDINGS[kind]), torch.float16)


@pytest.mark.parametrize("kind", ROUNDINGS)
@pytest.mark.parametrize("is_gelu", [False, True])
@pytest.mark.parametrize("size", [32, 200, 2100, 3600])
def test_an_activation_that_rounds_is_an_activation_and_a_rounding(kind, is_gelu, size):
    x = torch.randn(3, 2 * size, dtype=torch.float16)
    rounded = triton_rounded.gate_and_mul_rounded(x, ROUNDINGS[kind], is_gelu=is_gelu)
    expected = elementwise.gate_and_mul(x, is_gelu=is_gelu, pdl=False)
    assert_same(rounded, rounded_after(expected, ROUNDINGS[kind]), torch.float16)


def test_a_row_too_wide_for_one_program_is_rounded_by_two_kernels():
    x = torch.randn(1, 2 * 16_400, dtype=torch.float16)
    for kind in ("rows", "integers"):
        rounded = triton_rounded.gate_and_mul_rounded(x, ROUNDINGS[kind], is_gelu=False)
        assert_same(rounded, rounded_after(elementwise.silu_and_mul(x), ROUNDINGS[kind]), torch.float16)


@pytest.mark.parametrize("kind", ROUNDINGS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_spoils_what_it_would_spoil_in_two_kernels(kind, bad):
    x, residual = torch.randn(2, 3, 256, dtype=torch.float16).unbind()
    x[1, 130] = bad
    weight = torch.ones(256, dtype=torch.float16)
    rounded, _ = triton_rounded.add_rms_norm_rounded(x, residual, weight, 1e-5, ROUNDINGS[kind])
    normed, _ = elementwise.add_rms_norm(x, residual, weight, 1e-5)
    assert_same(rounded, rounded_after(normed, ROUNDINGS[kind]), torch.float16)
    assert rounded.values[[0, 2]].float().isfinite().all()
    gated = triton_rounded.gate_and_mul_rounded(x, ROUNDINGS[kind], is_gelu=False)
    assert_same(gated, rounded_after(elementwise.silu_and_mul(x), ROUNDINGS[kind]), torch.float16)
