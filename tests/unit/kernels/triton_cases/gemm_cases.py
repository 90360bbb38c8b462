"""The GEMM for a few hundred rows, in plain Triton, against float64, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kernels.gemm_configs import GemmConfig, GemmScratch
from kernels.triton_gemm import gemm
from tests.unit.kernels.triton_cases.ragged import relative_error


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize(("num_rows", "n"), [(65, 128), (100, 72), (130, 200)])
def test_gemm_equals_the_product(num_rows, n, splits):
    k = 512
    config = GemmConfig(64, 64, 64, splits, num_warps=4, num_stages=2)
    x, w, bias = torch.randn(num_rows, k + 8).half()[:, :k], torch.randn(n, k).half(), torch.randn(n).half()
    scratch = GemmScratch.allocate(torch.device("cpu"), num_sms=132)
    scratch.partial.fill_(float("nan"))
    expected = x.double() @ w.double().T
    for _ in range(2):  # the second run finds what the first left in the scratch
        assert relative_error(gemm(x, w, None, scratch, config=config), expected) < 1e-3
        assert relative_error(gemm(x, w, bias, scratch, config=config), expected + bias.double()) < 1e-3
        assert not scratch.arrivals.any()


def test_the_same_inputs_give_the_same_bits():
    config = GemmConfig(64, 64, 64, 4, num_warps=4, num_stages=2)
    x, w = torch.randn(70, 512).half(), torch.randn(64, 512).half()
    scratch = GemmScratch.allocate(torch.device("cpu"), num_sms=132)
    assert torch.equal(gemm(x, w, None, scratch, config=config), gemm(x, w, None, scratch, config=config))
