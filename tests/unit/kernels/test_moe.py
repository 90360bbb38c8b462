"""The specification of the mixture of experts: which experts a token has, by what weights, and what they make of it."""

import pytest
import torch

from kernels import ops
from kernels.moe import reference as moe
from tests.unit.kernels.triton_cases.moe_problem import make_problem


@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 8, 2), (30, 5, 5), (17, 60, 4)])
def test_a_mixture_is_the_weighted_sum_of_its_experts(num_tokens, num_experts, top_k, renormalize, has_shared):
    problem = make_problem(
        num_tokens=num_tokens,
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=24,
        intermediate_size=20,
        dtype=torch.float32,
        has_shared=has_shared,
        renormalize=renormalize,
    )
    out = problem.call(ops.fused_moe)
    torch.testing.assert_close(out.double(), problem.exact(), rtol=0, atol=1e-5)


def test_weights_are_probabilities_over_all_experts_unless_they_are_renormalized():
    logits = torch.tensor([[2.0, 0.0, 1.0, -1.0]])
    weights, experts = moe.route(logits, top_k=2, renormalize=False)
    assert experts.tolist() == [[0, 2]]
    torch.testing.assert_close(weights, logits.softmax(-1)[:, [0, 2]])
    weights, _ = moe.route(logits, top_k=2, renormalize=True)
    torch.testing.assert_close(weights, torch.tensor([[2.0, 1.0]]).softmax(-1))


def test_half_precision_logits_are_routed_in_fp32():
    logits = torch.tensor([[20.0, 10.0, 9.0]]).half()
    weights, _ = moe.route(logits, top_k=3, renormalize=False)
    assert weights.dtype == torch.float32
    assert 0 < weights[0, 2] < 1e-4


def test_the_lower_of_equal_experts_comes_first():
    assert moe.route(torch.zeros(2, 7), top_k=3, renormalize=True)[1].tolist() == [[0, 1, 2]] * 2


def test_weights_are_rounded_only_if_that_is_asked_for():
    kinds = []
    for round_weights in (False, True):
        problem = make_problem(
            num_tokens=40, num_experts=6, top_k=3, hidden_size=64, intermediate_size=32, dtype=torch.bfloat16,
            round_weights=round_weights,
        )  # fmt: skip
        kinds.append(problem.call(ops.fused_moe))
        assert kinds[-1].dtype == torch.bfloat16
    assert not torch.equal(*kinds)
    torch.testing.assert_close(*kinds, rtol=0.05, atol=0.05)


def test_an_expert_that_no_token_has_is_not_touched():
    problem = make_problem(
        num_tokens=3, num_experts=16, top_k=2, hidden_size=8, intermediate_size=4, dtype=torch.float32
    )
    chosen = moe.route(problem.logits, top_k=2, renormalize=True)[1].unique()
    idle = torch.tensor([expert for expert in range(16) if expert not in chosen])
    expected = problem.call(ops.fused_moe)
    problem.gate_up[idle], problem.down[idle] = float("nan"), float("nan")
    assert torch.equal(problem.call(ops.fused_moe), expected)
