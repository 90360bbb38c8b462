"""Experts by the kernels for Hopper against their specification on the device: FP8 by block, and 16-bit values."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.moe import reference as moe
from kernels.moe.configs import HopperFp8Config, HopperGroupedConfig
from kernels.moe.planes import to_planes
from tests.unit.kernels.triton_cases.moe_problem import Problem, make_problem, pack_experts
from tests.unit.kernels.triton_cases.ragged import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]

TOLERANCE = 1e-2
TOKENS = [1, 64, 513, 4096]
# (experts, top_k, hidden, intermediate): Qwen3-30B-A3B, one of its two ranks, odd edges
FP8 = {"qwen3-30b": (128, 8, 2048, 768), "rank": (128, 8, 2048, 384), "narrow": (6, 2, 320, 256)}
DENSE = FP8 | {"uneven": (5, 3, 200, 72)}
FP8_CONFIGS = [
    HopperFp8Config(),
    HopperFp8Config(num_stages=3, group_m=2),
]
DENSE_CONFIGS = [
    HopperGroupedConfig(),
    HopperGroupedConfig(num_stages=3, group_m=3),
    HopperGroupedConfig(lag=2),
    HopperGroupedConfig(gathers=True),
]


def _problem(sizes: tuple[int, ...], num_tokens: int, *, is_fp8: bool, **options: object) -> tuple[Problem, Problem]:
    """The problem, and the same with experts as the kernels take them."""
    num_experts, top_k, hidden_size, intermediate_size = sizes
    problem = make_problem(
        num_tokens=num_tokens, num_experts=num_experts, top_k=top_k, hidden_size=hidden_size,
        intermediate_size=intermediate_size, dtype=torch.bfloat16, device="cuda", **({"skew": 3.0} | options),
    )  # fmt: skip
    if not is_fp8:
        return problem, problem
    problem = pack_experts(problem, "fp8", block=128)
    arranged = dataclasses.replace(problem, gate_up=to_planes(problem.gate_up), down=to_planes(problem.down))
    return problem, arranged


def _check(problem: Problem, arranged: Problem, configs: list, rounding=None, factor: float = 1.0) -> None:
    from kernels.moe.triton import fused_moe

    expected = problem.call(moe.fused_moe, rounding=rounding)
    for config, pdl in ((configs[0], False), *((each, True) for each in configs)):
        out = arranged.call(fused_moe, config=config, pdl=pdl)
        assert relative_error(out, expected) < factor * TOLERANCE, config
        assert torch.equal(out, arranged.call(fused_moe, config=config, pdl=pdl)), config


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("shape", FP8)
def test_fp8_equals_its_specification(shape, num_tokens):
    problem, arranged = _problem(FP8[shape], num_tokens, is_fp8=True)
    # one token has few values between the products; see test_packed_experts_cuda.py
    _check(problem, arranged, FP8_CONFIGS, moe.round_to_fp8, factor=4 if num_tokens == 1 else 2)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("shape", DENSE)
def test_16_bits_equal_their_specification(shape, num_tokens):
    _check(*_problem(DENSE[shape], num_tokens, is_fp8=False), DENSE_CONFIGS)


@pytest.mark.parametrize("here", [range(2), range(2, 6)])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_the_share_of_a_rank_with_biases_equals_its_specification(is_fp8, here):
    problems = _problem(FP8["narrow"], 300, is_fp8=is_fp8, has_biases=True, has_shared=True, skew=1.0)
    problem, arranged = (each.of_experts(here) for each in problems)
    rounding = moe.round_to_fp8 if is_fp8 else None
    _check(problem, arranged, FP8_CONFIGS if is_fp8 else DENSE_CONFIGS, rounding, factor=2 if is_fp8 else 1)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_a_token_of_nan_leaves_the_others_alone(is_fp8):
    from kernels.moe.triton import fused_moe

    _, arranged = _problem(FP8["narrow"], 300, is_fp8=is_fp8)
    config = FP8_CONFIGS[0] if is_fp8 else DENSE_CONFIGS[0]
    expected = arranged.call(fused_moe, config=config)
    arranged.x[7, 5] = float("nan")
    out = arranged.call(fused_moe, config=config)
    assert out[7].isnan().all()
    others = torch.arange(300, device="cuda") != 7
    assert torch.equal(out[others], expected[others])


@pytest.mark.parametrize("is_fp8", [False, True])
def test_a_graph_of_it_follows_its_inputs(is_fp8):
    from kernels.moe.triton import fused_moe

    config = HopperFp8Config() if is_fp8 else HopperGroupedConfig()
    problems = [_problem(FP8["qwen3-30b"], 1024, is_fp8=is_fp8, skew=skew)[1] for skew in (0.0, 3.0)]
    problem = dataclasses.replace(problems[0], x=problems[0].x.clone(), logits=problems[0].logits.clone())
    problem.call(fused_moe, config=config, pdl=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = problem.call(fused_moe, config=config, pdl=True)
    for inputs in (*problems, problems[0]):
        problem.x.copy_(inputs.x)
        problem.logits.copy_(inputs.logits)
        graph.replay()
        assert torch.equal(out, problem.call(fused_moe, config=config, pdl=True))
