"""The sum over experts with the residual addition and the norm behind it, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kernels.elementwise import triton as elementwise
from kernels.linear import triton_rounded
from kernels.linear.rounding import RoundedRows, Rounding
from kernels.moe.reference import ExpertSum
from kernels.moe.triton_sums import sum_experts, sum_experts_add_rms_norm

ROUNDINGS = {
    "none": None,
    "rows": Rounding(),
    "runs": Rounding(64),
    "known": Rounding(scale=torch.tensor(0.25)),
    "integers": Rounding(dtype=torch.int8),
}


@pytest.mark.parametrize("kind", ROUNDINGS)
@pytest.mark.parametrize("has_absent", [False, True])
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize(("num_tokens", "top_k", "size"), [(3, 4, 96), (1, 8, 300)])
def test_a_sum_of_experts_and_a_norm_are_those_of_two_launches(num_tokens, top_k, size, has_shared, has_absent, kind):
    outputs = torch.randn(num_tokens * top_k, size).half()
    experts = torch.randint(0, 8, (num_tokens, top_k), dtype=torch.int32)
    if has_absent:
        experts[:, 0] = -1
        outputs[::top_k] = float("nan")
    more = {}
    if has_shared:
        more = {"shared": torch.randn(num_tokens, size).half(), "shared_gate": torch.randn(num_tokens, 5).half()[:, -1]}
    late = ExpertSum(outputs, torch.rand(num_tokens, top_k).half(), experts, has_absent, **more)
    residual, weight = torch.randn(num_tokens, 2 * size).half()[:, size:], torch.randn(size)
    rounding = ROUNDINGS[kind]
    normed, total = sum_experts_add_rms_norm(late, residual, weight, 1e-5, rounding)
    mixed = sum_experts(late)
    if rounding is None:
        expected, expected_total = elementwise.add_rms_norm(mixed, residual, weight, 1e-5)
        assert torch.equal(normed, expected)
    else:
        expected, expected_total = triton_rounded.add_rms_norm_rounded(mixed, residual, weight, 1e-5, rounding)
        assert isinstance(normed, RoundedRows)
        assert torch.equal(normed.values.view(torch.uint8), expected.values.view(torch.uint8))
        assert torch.equal(normed.scales, expected.scales)
    assert torch.equal(total, expected_total)
