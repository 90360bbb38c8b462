"""Norms and gated activations that write 8 bits on the device: what two kernels write, activations bit for bit."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import eight_bits
from kernels.linear.eight_bits import add_rms_norm_rounded, gate_and_mul_rounded
from kernels.linear.rounding import Rounding
from kernels.ops import add_rms_norm, gelu_tanh_and_mul, silu_and_mul

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16]
ROUNDINGS = {
    "rows": None, "runs of 128": 128, "runs of 32": 32, "known": 0.01, "integers": None, "integers, known": 0.02,
}  # fmt: skip


def rounding_of(kind: str) -> Rounding:
    value = ROUNDINGS[kind]
    dtype = torch.int8 if kind.startswith("integers") else torch.float8_e4m3fn
    if isinstance(value, float):
        return Rounding(scale=torch.tensor(value, device="cuda"), dtype=dtype)
    return Rounding(value, dtype=dtype)


def assert_same(found, expected):
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.scales, expected.scales, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))


def assert_almost_same(found, expected):
    """But for a few values that the order of a row's sum of squares rounds the other way: by layout, it may differ."""
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.scales, expected.scales, rtol=2**-7, atol=0, equal_nan=True)
    is_int8 = found.values.dtype == torch.int8
    codes = [(rows.values if is_int8 else rows.values.view(torch.uint8)).int() for rows in (found, expected)]
    steps = (codes[0] - codes[1]).abs()
    assert int(steps.max()) <= 1
    assert float(steps.float().mean()) < 1e-3


@pytest.mark.parametrize("kind", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 4096), (7, 5120), (300, 2048), (64, 1000), (2, 16384), (33, 96)])
def test_a_norm_that_rounds_is_a_norm_and_a_rounding(kind, dtype, num_rows, size):
    x, residual = torch.randn(2, num_rows, size, device="cuda").to(dtype).unbind()
    weights = [torch.randn(size, device="cuda").to(dtype), torch.randn(size, device="cuda")]
    for weight in weights:
        found, total = add_rms_norm_rounded(x, residual, weight, 1e-5, rounding_of(kind))
        normed, expected_total = add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(total, expected_total)
        assert_almost_same(found, eight_bits.round_rows(normed, rounding_of(kind)))


@pytest.mark.parametrize("kind", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gelu", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "size"),
    [
        (1, 14336), (8, 14336), (300, 3072), (5, 1000), (3, 28672), (33, 96), (9, 11008), (6, 4100), (7, 15000),
        (4096, 14336), (5000, 96), (4100, 3072),
    ],
)  # fmt: skip
def test_an_activation_that_rounds_is_an_activation_and_a_rounding(kind, dtype, is_gelu, num_rows, size):
    x = (torch.randn(num_rows, 2 * size, device="cuda") * 3).to(dtype)
    found = gate_and_mul_rounded(x, rounding_of(kind), is_gelu=is_gelu)
    gated = gelu_tanh_and_mul(x) if is_gelu else silu_and_mul(x)
    assert_same(found, eight_bits.round_rows(gated, rounding_of(kind)))


@pytest.mark.parametrize("largest_code", [448, 127])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize("size", [64, 1000, 4096, 14336])
def test_values_are_divided_by_their_rows_scale_exactly(largest_code, dtype, size):
    x = torch.randn(500, size, device="cuda") * torch.exp(torch.randn(500, 1, device="cuda") * 3)
    x[0], x[1], x[2, 3], x[3, 4] = 0.0, 21.0, float("inf"), float("nan")
    x = x.to(dtype)
    rounding = Rounding(dtype=torch.int8 if largest_code == 127 else torch.float8_e4m3fn)
    found = eight_bits.round_rows(x, rounding)
    wide = x.double()
    scales = (wide.abs().amax(-1) / largest_code).float().clamp(min=1e-12)
    torch.testing.assert_close(found.scales, scales, rtol=0, atol=0, equal_nan=True)
    quotients = (wide / scales[:, None].double()).float()  # a quotient of two fp32 is rounded once, also by way of fp64
    values, expected = found.values.float(), quotients.to(torch.float8_e4m3fn).float()
    if largest_code == 127:  # integers of a row that is not finite have no meaning
        finite = scales.isfinite()
        values, expected = values[finite], quotients[finite].round()
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


def test_they_are_captured_in_a_graph():
    x, residual = torch.randn(2, 4, 4096, device="cuda", dtype=torch.bfloat16).unbind()
    weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    expected, _ = add_rms_norm_rounded(x, residual, weight, 1e-5, Rounding())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, _ = add_rms_norm_rounded(x, residual, weight, 1e-5, Rounding())
    found.values.view(torch.uint8).zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert_same(found, expected)
