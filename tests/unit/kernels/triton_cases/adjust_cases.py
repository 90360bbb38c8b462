"""Penalties and bitmasks against their torch specifications, through Triton's interpreter."""

from __future__ import annotations

import pytest

from kernels.sampling import reference as sampling
from kernels.sampling import triton_draw as triton_logits
from tests.unit.kernels.triton_cases.adjust_problem import bitmask_problem, penalty_problem


@pytest.mark.parametrize("vocab_size", [70, 4096, 5000])
def test_penalties_equal_the_specification_bit_for_bit(vocab_size):
    logits, rows, req_index, state = penalty_problem(vocab_size, device="cpu")
    expected, result = logits.clone(), logits.clone()
    sampling.penalize(expected, rows, req_index, **state)
    triton_logits.penalize(result, rows, req_index, **state)
    assert result.equal(expected)
    assert not result.equal(logits)


@pytest.mark.parametrize("vocab_size", [31, 32, 4100])
def test_bitmasks_equal_the_specification(vocab_size):
    logits, rows, bitmask = bitmask_problem(vocab_size, device="cpu")
    expected, result = logits.clone(), logits.clone()
    sampling.allow_only(expected, rows, bitmask)
    triton_logits.allow_only(result, rows, bitmask)
    assert result.equal(expected)
    assert bool(result.isinf().any())
