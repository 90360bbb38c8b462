"""Experts in integers of models in float16, in planes on Hopper, against their specification in float32."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from kernels.moe import reference as moe
from kernels.moe.planes import PlanesMatrix, to_planes
from tests.unit.kernels.triton_cases.int_experts_problem import STORAGES, pack_integers
from tests.unit.kernels.triton_cases.moe_problem import Problem, make_problem
from tests.unit.kernels.triton_cases.ragged import relative_error

pytestmark = pytest.mark.gpu

TOLERANCE = 2e-3  # values are rounded to float16 between the ops, 0.05 % each
# (experts, top_k, hidden, intermediate): whole groups of inputs, and part of one
SIZES = {"whole": (16, 8, 512, 256), "odd": (7, 3, 320, 192)}
CASES = [
    *itertools.product(("awq", "gptq", "packed", "packed_asymmetric"), ("whole",)),
    *itertools.product(("packed", "packed_asymmetric"), ("odd",)),
]
# Served by products that choose, of few tokens or pairs, in registers, and by wgmma
NUM_TOKENS = (1, 2, 5, 13, 64, 300)


def _problem(storage: str, sizes: str, num_tokens: int) -> Problem:
    num_experts, top_k, hidden_size, intermediate_size = SIZES[sizes]
    problem = make_problem(
        num_tokens=num_tokens, num_experts=num_experts, top_k=top_k, hidden_size=hidden_size,
        intermediate_size=intermediate_size, dtype=torch.float16, device="cuda", has_shared=sizes == "odd", skew=1.0,
    )  # fmt: skip
    return pack_integers(problem, STORAGES[storage])


def _serve(problem: Problem) -> torch.Tensor:
    from kernels.moe.triton import fused_moe

    arranged = dataclasses.replace(problem, gate_up=to_planes(problem.gate_up), down=to_planes(problem.down))
    assert isinstance(arranged.gate_up, PlanesMatrix)
    return arranged.call(fused_moe, pdl=True)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compile all schemes in parallel: one takes seconds."""
    from kernels.precompile import Compilation, collect_kernels

    with collect_kernels() as kernels:
        for (storage, sizes), num_tokens in itertools.product(CASES, NUM_TOKENS):
            _serve(_problem(storage, sizes, num_tokens))
    Compilation(list(kernels)).wait(lambda done, total: None)


@pytest.mark.parametrize(("storage", "sizes"), CASES)
def test_integers_equal_their_specification_for_any_number_of_tokens(storage, sizes):
    for num_tokens in NUM_TOKENS:
        problem = _problem(storage, sizes, num_tokens)
        shared = None if problem.shared is None else problem.shared.float()
        floats = dataclasses.replace(problem, x=problem.x.float(), shared=shared)
        out = _serve(problem)
        assert out.dtype == torch.float16
        assert relative_error(out, floats.call(moe.fused_moe)) < TOLERANCE, num_tokens
        assert torch.equal(out, _serve(problem)), num_tokens
