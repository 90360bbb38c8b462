"""Fused kernels of decode steps of few rows against the kernels that they stand for, launched early and not."""

from __future__ import annotations

import pytest
import torch

from kernels.elementwise import triton as elementwise
from kernels.linear import late_norm
from kernels.linear.late_norm import LateNorm
from kernels.linear.ops import DenseLinear
from kernels.linear.rounding import RoundedRows, Rounding
from kernels.linear.triton_gemv import allocate_scratch, gated_gemv, gemv
from kernels.linear.triton_rounded import add_rms_norm_rounded
from kernels.linear.triton_row import RowConfig, normed_gemv, row_gemv
from kernels.moe.reference import ExpertSum
from kernels.moe.triton_sums import sum_experts, sum_experts_add_rms_norm
from tests.unit.kernels.triton_cases.ragged import relative_error

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}


def _randn(*shape, dtype):
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", ["", "silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("n", "k"), [(4096, 1024), (6144, 1024), (12288, 2048), (128, 2048), (32, 2880), (5120, 2880), (1154, 320)]
)
def test_a_product_with_the_norm_before_it_equals_its_specification(n, k, gate, dtype):
    x, residual, w = _randn(1, k, dtype=dtype), _randn(1, k, dtype=dtype), _randn(n, k, dtype=dtype) * k**-0.5
    bias = None if gate else _randn(n, dtype=dtype)
    for weight in (_randn(k, dtype=dtype), torch.randn(k, device="cuda")):
        late = [LateNorm(x, residual, weight, 1e-6, torch.full_like(x, float("nan"))) for _ in range(2)]
        normed = [torch.full_like(x, float("nan")) for _ in range(2)]
        expected = late_norm.normed_linear(late[0], w, bias, gate=gate, normed=normed[0])
        for pdl in (False, True):
            out = normed_gemv(late[1], w, bias, gate=gate, normed=normed[1], pdl=pdl)
            assert torch.equal(late[1].new_residual, late[0].new_residual)
            assert relative_error(normed[1], normed[0]) < TOLERANCE[dtype]
            assert relative_error(out, expected) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", [None, RowConfig(16, 8)])
@pytest.mark.parametrize(("n", "k"), [(1024, 3072), (37, 2880)])
def test_a_product_of_one_row(n, k, config, dtype):
    x, w, bias = _randn(1, k, dtype=dtype), _randn(n, k, dtype=dtype), _randn(n, dtype=dtype)
    out = row_gemv(x, w, bias, config=config, pdl=True)
    assert relative_error(out, x.double() @ w.double().T + bias.double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 33, 64])
@pytest.mark.parametrize(("n", "k"), [(5120, 2880), (32, 2880), (1536, 8960), (1000, 576)])
def test_products_of_any_number_of_lines(n, k, rows, dtype):
    x, w, bias = _randn(rows, k, dtype=dtype), _randn(n, k, dtype=dtype), _randn(n, dtype=dtype)
    scratch = allocate_scratch(x.device)
    for pdl in (False, True):
        out = gemv(x, w, bias, scratch, pdl=pdl)
        assert relative_error(out, x.double() @ w.double().T + bias.double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("is_gelu", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 33])
@pytest.mark.parametrize(("n", "k"), [(6144, 1024), (28672, 4096), (9728, 896), (2058, 512)])
def test_a_gated_product_is_a_product_and_its_activation(n, k, rows, is_gelu):
    x, w = _randn(rows, k, dtype=torch.bfloat16), _randn(n, k, dtype=torch.bfloat16) * k**-0.5
    scratch = allocate_scratch(x.device)
    expected = elementwise.gate_and_mul(gemv(x, w, None, scratch), is_gelu=is_gelu, pdl=False)
    for pdl in (False, True):
        out = gated_gemv(x, w, scratch, is_gelu=is_gelu, pdl=pdl)
        assert relative_error(out, expected) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("rounding", [None, Rounding(), Rounding(128)], ids=["none", "rows", "runs"])
@pytest.mark.parametrize(("rows", "top_k", "size"), [(1, 8, 2048), (16, 8, 2048), (300, 4, 2880), (3, 2, 96)])
def test_a_sum_of_experts_with_a_norm_is_a_sum_and_a_norm(rows, top_k, size, rounding):
    outputs, residual = (_randn(count, size, dtype=torch.bfloat16) for count in (rows * top_k, rows))
    weight = _randn(size, dtype=torch.bfloat16)
    none = torch.zeros(rows, top_k, dtype=torch.int32, device="cuda")
    late = ExpertSum(outputs, torch.rand(rows, top_k, device="cuda").bfloat16(), none, has_absent=False)
    mixed = sum_experts(late)
    for pdl in (False, True):
        normed, total = sum_experts_add_rms_norm(late, residual, weight, 1e-6, rounding, pdl=pdl)
        if isinstance(normed, RoundedRows):
            expected, expected_total = add_rms_norm_rounded(mixed, residual, weight, 1e-6, rounding)
            assert torch.equal(normed.values.view(torch.uint8), expected.values.view(torch.uint8))
            assert torch.equal(normed.scales, expected.scales)
        else:
            expected, expected_total = elementwise.add_rms_norm(mixed, residual, weight, 1e-6)
            assert torch.equal(normed, expected)
        assert torch.equal(total, expected_total)


def test_a_chain_of_them_in_a_graph_gives_what_separate_launches_give():
    linear, hidden = DenseLinear(), 1024
    layers = [
        (_randn(2 * 3072, hidden, dtype=torch.bfloat16) * hidden**-0.5, _randn(hidden, 3072, dtype=torch.bfloat16) / 55)
        for _ in range(6)
    ]
    weight, x = torch.ones(hidden, device="cuda", dtype=torch.bfloat16), _randn(1, hidden, dtype=torch.bfloat16)

    def run():
        out, residual = x, x
        for up, down in layers:
            late = LateNorm(out, residual, weight, 1e-6, torch.empty_like(residual))
            assert linear.takes_norm(out, up)
            out = linear(linear.normed(late, up, None, gate="silu"), down, None)
            residual = late.new_residual
        return out, residual

    expected = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
