"""Choices of experts by sigmoids, biases and groups, in the launch of top-k, against their specification.

Tokens of make_logits are multiples of 1/8 apart, so that scores are equal or far apart: the interpreter's exponential
is not that of torch to the last bit.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.moe import reference as moe
from kernels.moe import triton as moe_triton
from kernels.moe.configs import GroupedConfig, PairsConfig, PairTile, Tile
from kernels.moe.triton_route import lay_out, route
from tests.unit.kernels.triton_cases.moe_problem import make_problem

SMALL = GroupedConfig(16, Tile(16, 16, 4, 2, group_m=3), Tile(16, 32, 4, 2, group_m=2))
PAIRS = PairsConfig(PairTile(8, 16, 4, 2), PairTile(16, 16, 4, 2))
# experts, top-k, groups, open groups, best of a group: LFM2, ERNIE, DeepSeek-V2 and V3, GLM-4.5, Qwen3-Next's numbers
SIZES = {
    "8": (8, 2, 1, 1, 2),
    "20_in_4": (20, 3, 4, 2, 1),
    "64": (64, 6, 1, 1, 2),
    "128_in_8": (128, 8, 8, 4, 2),
    "160_in_8": (160, 6, 8, 3, 1),
    "160": (160, 8, 1, 1, 2),
    "256_in_8": (256, 8, 8, 4, 2),
    "512": (512, 10, 1, 1, 2),
    "512_in_16": (512, 10, 16, 2, 2),
}
KINDS = [("sigmoid", True), ("sigmoid", False), ("softmax", True), ("softmax", False)]


def make_logits(num_tokens: int, num_experts: int) -> torch.Tensor:
    """One column more than experts, which is none of the router's."""
    return torch.randint(-24, 24, (num_tokens, num_experts + 1)) / 8


def make_choice(kind: str, size: str, *, has_bias: bool) -> moe.Choice:
    num_experts, _, num_groups, num_open, num_best = SIZES[size]
    bias = torch.randint(-8, 8, (num_experts,)) / 4 if has_bias else None
    return moe.Choice(kind, bias, num_groups, num_open, num_best)


def run(logits: torch.Tensor, choice: moe.Choice, *, top_k: int, chunk_tokens: int | None = 16, **options):
    """Return what the twin and the specification choose."""
    num_experts = logits.shape[1] - 1
    options = {"renormalize": True, "floor": 1e-20, "factor": 2.5} | options
    found = route(
        logits, num_experts=num_experts, top_k=top_k, choice=choice, weights_dtype=torch.float32,
        chunk_tokens=chunk_tokens, **options,
    )  # fmt: skip
    return found, moe.route(logits[:, :num_experts], top_k=top_k, choice=choice, **options)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("kind", "has_bias"), KINDS)
@pytest.mark.parametrize("chunk_tokens", [None, 16])
def test_choices_equal_their_specification(size, kind, has_bias, chunk_tokens):
    num_experts, top_k, *_ = SIZES[size]
    choice = make_choice(kind, size, has_bias=has_bias)
    for renormalize in (True, False):
        found, (weights, experts) = run(
            make_logits(7, num_experts), choice, top_k=top_k, chunk_tokens=chunk_tokens, renormalize=renormalize
        )
        assert torch.equal(found.experts.long(), experts)
        torch.testing.assert_close(found.weights, weights)


@pytest.mark.parametrize("kind", ["sigmoid", "softmax"])
def test_of_equal_scores_the_lower_expert_and_the_lower_group_come_first(kind):
    logits = torch.zeros(3, 9)
    logits[1, 6], logits[2, 3] = 1.0, 1.0
    choice = moe.Choice(kind, torch.zeros(8), num_groups=4, num_groups_per_tok=2, num_best_of_group=2)
    found, (_, experts) = run(logits, choice, top_k=3)
    assert found.experts.tolist() == [[0, 1, 2], [6, 0, 1], [3, 0, 1]]
    assert experts.tolist() == found.experts.tolist()


def test_a_bias_decides_the_choice_and_has_no_part_in_the_weights():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.0]])
    found, (weights, _) = run(logits, moe.Choice("sigmoid", torch.tensor([0.0, 0.0, 0.0, 5.0])), top_k=2, factor=1.0)
    assert found.experts.tolist() == [[3, 0]]
    chosen = torch.tensor([[-1.0, 2.0]]).sigmoid()
    torch.testing.assert_close(found.weights, chosen / chosen.sum())
    torch.testing.assert_close(weights, chosen / chosen.sum())


def test_weights_have_the_rounding_of_the_logits_dtype():
    logits = (make_logits(9, 64)).half()
    choice = moe.Choice("sigmoid", torch.randint(-8, 8, (64,)) / 4)
    found, (weights, experts) = run(logits, choice, top_k=4, renormalize=False, factor=1.0)
    assert torch.equal(found.experts.long(), experts)
    assert torch.equal(found.weights, found.weights.half().float())
    torch.testing.assert_close(found.weights, weights.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("kind", "has_bias"), KINDS)
def test_a_token_with_a_nan_has_experts_and_weights_of_nan_and_disturbs_no_other(kind, has_bias):
    choice = make_choice(kind, "20_in_4", has_bias=has_bias)
    logits = make_logits(6, 20)
    clean, _ = run(logits, choice, top_k=3)
    logits[2, 11] = float("nan")
    found, (weights, _) = run(logits, choice, top_k=3)
    assert found.weights[2].isnan().all()
    assert weights[2].isnan().all()
    assert ((found.experts[2] >= 0) & (found.experts[2] < 20)).all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found.experts[others], clean.experts[others])
    torch.testing.assert_close(found.weights[others], clean.weights[others])


@pytest.mark.parametrize("config", [SMALL, PAIRS], ids=["tiles", "pairs"])
@pytest.mark.parametrize("size", ["20_in_4", "64"])
def test_a_mixture_with_a_choice_equals_its_specification(size, config):
    num_experts, top_k, *_ = SIZES[size]
    problem = make_problem(
        num_tokens=5, num_experts=num_experts, top_k=top_k, hidden_size=32, intermediate_size=24, dtype=torch.float32,
        renormalize=True, round_weights=False,
    )  # fmt: skip
    choice = make_choice("sigmoid", size, has_bias=True)
    problem = dataclasses.replace(problem, logits=make_logits(5, num_experts)[:, :-1], choice=choice, factor=2.5)
    found, expected = problem.call(moe_triton.fused_moe, config=config), problem.call(moe.fused_moe)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("here", [range(6), range(2, 5)])
def test_positions_are_the_places_of_pairs(here):
    num_tokens, top_k = 37, 2
    routing = route(
        torch.randn(num_tokens, 6), num_experts=6, top_k=top_k, renormalize=True, weights_dtype=torch.float32,
        chunk_tokens=16, here=here,
    )  # fmt: skip
    tiles = lay_out(routing, num_experts=len(here), block_m=16, has_positions=True)
    is_here = routing.experts.flatten() >= 0
    assert tiles.positions is not None
    assert torch.equal(tiles.positions >= 0, is_here)
    places = tiles.positions[is_here].long()
    assert torch.equal(tiles.pairs[places].long(), is_here.nonzero()[:, 0])
    assert torch.equal(tiles.experts[places // 16], routing.experts.flatten()[is_here])
    assert (places % 16 < tiles.rows[places // 16]).all()
