"""Experts in FP8 by block, by the kernels for Hopper, against their specification on the device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.moe import reference as moe
from kernels.moe.configs import HopperFp8Config
from kernels.moe.planes import to_planes
from tests.unit.kernels.triton_cases.moe_problem import Problem, make_problem, pack_experts
from tests.unit.kernels.triton_cases.ragged import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]

TOLERANCE = 2e-2
TOKENS = [1, 64, 513, 4096]
# (experts, top_k, hidden, intermediate): Qwen3-30B-A3B, one of its two ranks, odd edges
SHAPES = {"qwen3-30b": (128, 8, 2048, 768), "rank": (128, 8, 2048, 384), "narrow": (6, 2, 320, 256)}
CONFIGS = [HopperFp8Config(), HopperFp8Config(num_stages=3, group_m=2)]


def _problem(shape: str, num_tokens: int, **options: object) -> tuple[Problem, Problem]:
    """The problem, and the same with experts as the kernels take them."""
    num_experts, top_k, hidden_size, intermediate_size = SHAPES[shape]
    problem = make_problem(
        num_tokens=num_tokens, num_experts=num_experts, top_k=top_k, hidden_size=hidden_size,
        intermediate_size=intermediate_size, dtype=torch.bfloat16, device="cuda", **({"skew": 3.0} | options),
    )  # fmt: skip
    problem = pack_experts(problem, "fp8", block=128)
    arranged = dataclasses.replace(problem, gate_up=to_planes(problem.gate_up), down=to_planes(problem.down))
    return problem, arranged


def _check(problem: Problem, arranged: Problem, tolerance: float = TOLERANCE) -> None:
    from kernels.moe.triton import fused_moe

    expected = problem.call(moe.fused_moe, rounding=moe.round_to_fp8)
    for config, pdl in ((CONFIGS[0], False), *((each, True) for each in CONFIGS)):
        out = arranged.call(fused_moe, config=config, pdl=pdl)
        assert relative_error(out, expected) < tolerance, config
        assert torch.equal(out, arranged.call(fused_moe, config=config, pdl=pdl)), config


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("shape", SHAPES)
def test_mixtures_equal_their_specification(shape, num_tokens):
    # one token has few values between the products; see test_packed_experts_cuda.py
    _check(*_problem(shape, num_tokens), tolerance=2 * TOLERANCE if num_tokens == 1 else TOLERANCE)


@pytest.mark.parametrize("here", [range(2), range(2, 6)])
def test_the_share_of_a_rank_with_biases_equals_its_specification(here):
    problems = _problem("narrow", 300, has_biases=True, has_shared=True, skew=1.0)
    _check(*(each.of_experts(here) for each in problems))


def test_a_token_of_nan_leaves_the_others_alone():
    from kernels.moe.triton import fused_moe

    _, arranged = _problem("narrow", 300)
    expected = arranged.call(fused_moe, config=CONFIGS[0])
    arranged.x[7, 5] = float("nan")
    out = arranged.call(fused_moe, config=CONFIGS[0])
    assert out[7].isnan().all()
    others = torch.arange(300, device="cuda") != 7
    assert torch.equal(out[others], expected[others])


def test_a_graph_of_it_follows_its_inputs():
    from kernels.moe.triton import fused_moe

    problems = [_problem("qwen3-30b", 1024, skew=skew)[1] for skew in (0.0, 3.0)]
    problem = dataclasses.replace(problems[0], x=problems[0].x.clone(), logits=problems[0].logits.clone())
    problem.call(fused_moe, config=CONFIGS[0], pdl=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = problem.call(fused_moe, config=CONFIGS[0], pdl=True)
    for inputs in (*problems, problems[0]):
        problem.x.copy_(inputs.x)
        problem.logits.copy_(inputs.logits)
        graph.replay()
        assert torch.equal(out, problem.call(fused_moe, config=CONFIGS[0], pdl=True))
