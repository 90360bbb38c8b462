"""The mixture of experts on the device, at the sizes that are served: against float64, in graphs, and twice alike."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from kernels import ops
from kernels.moe import reference as moe
from kernels.moe.configs import grouped_configs, pairs_config
from tests.unit.kernels.triton_cases.moe_problem import Problem, make_problem
from tests.unit.kernels.triton_cases.ragged import relative_error

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
# (experts, top_k, hidden, intermediate, shared): Qwen3-30B-A3B, one of its four ranks, Qwen1.5-MoE, a slim Mixtral
SHAPES = {
    "qwen3-30b": (128, 8, 2048, 768, False),
    "qwen3-30b-rank": (128, 8, 2048, 192, False),
    "qwen1.5-moe": (60, 4, 2048, 1408, True),
    "mixtral-rank": (8, 2, 4096, 1792, False),
    "uneven": (5, 3, 200, 72, True),
}
TOKENS = (1, 2, 3, 8, 9, 16, 17, 64, 129, 256, 600, 1024, 4096)


def _problem(shape: str, num_tokens: int, dtype: torch.dtype, *, skew: float = 1.0) -> Problem:
    num_experts, top_k, hidden_size, intermediate_size, has_shared = SHAPES[shape]
    return make_problem(
        num_tokens=num_tokens,
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        dtype=dtype,
        device="cuda",
        has_shared=has_shared,
        renormalize=not has_shared,
        round_weights=shape != "mixtral-rank",
        skew=skew,
    )


def _exact(problem: Problem) -> torch.Tensor:
    """[T, H] float64, expert by expert: Problem.exact would multiply every token by all of them."""
    num_experts = problem.gate_up.shape[0]
    weights, experts = moe.route(
        problem.logits[:, :num_experts], top_k=problem.top_k, renormalize=problem.renormalize
    )  # fmt: skip
    out = torch.zeros(problem.x.shape, dtype=torch.float64, device="cuda")
    for expert in range(num_experts):
        tokens, places = torch.where(experts == expert)
        gate, up = (problem.x[tokens].double() @ problem.gate_up[expert].double().T).chunk(2, dim=-1)
        values = (torch.nn.functional.silu(gate) * up) @ problem.down[expert].double().T
        out.index_add_(0, tokens, values * weights[tokens, places, None])
    if problem.shared is None:
        return out
    return out + problem.logits[:, num_experts:].double().sigmoid() * problem.shared.double()


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("shape", SHAPES)
def test_mixtures_in_bf16_are_exact_to_its_rounding(shape, num_tokens):
    for skew in (0.0, 3.0):
        problem = _problem(shape, num_tokens, torch.bfloat16, skew=skew)
        out = problem.call(ops.fused_moe)
        assert relative_error(out, _exact(problem)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 5, 64, 700])
@pytest.mark.parametrize("shape", ["qwen1.5-moe", "uneven"])
def test_mixtures_in_other_dtypes(shape, num_tokens, dtype):
    problem = _problem(shape, num_tokens, dtype)
    assert relative_error(problem.call(ops.fused_moe), _exact(problem)) < TOLERANCE[dtype]


@pytest.mark.parametrize("shape", ["qwen1.5-moe", "mixtral-rank", "uneven"])
def test_every_cut_gives_the_specification(shape):
    from kernels.moe.triton import fused_moe

    problem = _problem(shape, 300, torch.bfloat16)
    few = _problem(shape, 6, torch.bfloat16)
    for pdl in (False, True):
        for config in grouped_configs():
            out = problem.call(fused_moe, config=config, pdl=pdl)
            assert relative_error(out, _exact(problem)) < TOLERANCE[torch.bfloat16], config
        for intermediate_size in (128, 4096):
            out = few.call(fused_moe, config=pairs_config(intermediate_size=intermediate_size), pdl=pdl)
            assert relative_error(out, _exact(few)) < TOLERANCE[torch.bfloat16], intermediate_size


@pytest.mark.parametrize("chunk_tokens", [None, 16, 64])
@pytest.mark.parametrize("num_tokens", [1, 7, 512, 513, 8192])
@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (60, 4), (8, 2)])
def test_routes_are_those_of_the_specification(num_experts, top_k, num_tokens, chunk_tokens):
    from kernels.moe.triton_route import route

    logits = torch.randn(num_tokens, num_experts, device="cuda").bfloat16()  # with many that are equal
    for renormalize in (False, True):
        routing = route(
            logits, num_experts=num_experts, top_k=top_k, renormalize=renormalize, weights_dtype=torch.float32,
            chunk_tokens=chunk_tokens, pdl=True,
        )  # fmt: skip
        weights, experts = moe.route(logits, top_k=top_k, renormalize=renormalize)
        torch.testing.assert_close(routing.weights, weights, rtol=1e-5, atol=1e-7)
        # Where two probabilities differ by less than a rounding of exp, either may come first
        is_other = routing.experts.long() != experts
        found = logits.float().softmax(-1).gather(1, routing.experts.long())
        wanted = logits.float().softmax(-1).gather(1, experts)
        assert bool(((found - wanted).abs() <= 1e-6 * wanted)[is_other].all())


@pytest.mark.parametrize("block_m", [16, 128])
@pytest.mark.parametrize(("num_tokens", "skew"), [(9, 0.0), (513, 0.0), (8192, 0.0), (8192, 20.0)])
@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (8, 2)])
def test_pairs_are_laid_out_by_expert_each_once(num_experts, top_k, num_tokens, skew, block_m):
    from kernels.moe.triton_route import lay_out, route

    logits = torch.randn(num_tokens, num_experts, device="cuda") + skew * torch.randn(num_experts, device="cuda")
    routing = route(
        logits, num_experts=num_experts, top_k=top_k, renormalize=True, weights_dtype=torch.float32, chunk_tokens=16
    )
    tiles = lay_out(routing, num_experts=num_experts, block_m=block_m)
    is_row = torch.arange(block_m, device="cuda") < tiles.rows[:, None]
    pairs = tiles.pairs.view(-1, block_m)[is_row]
    experts = tiles.experts[:, None].expand(-1, block_m)[is_row]
    by_expert = routing.experts.flatten().sort(stable=True)
    assert torch.equal(pairs.long(), by_expert.indices)
    assert torch.equal(experts, by_expert.values)


@pytest.mark.parametrize("num_tokens", [1, 8, 64, 1024])
@pytest.mark.parametrize("shape", ["qwen3-30b", "mixtral-rank"])
def test_a_graph_of_it_follows_its_inputs(shape, num_tokens):
    first, second = (_problem(shape, num_tokens, torch.bfloat16, skew=skew) for skew in (0.0, 3.0))
    problem = Problem(
        first.x.clone(), first.logits.clone(), first.gate_up, first.down, None,
        first.top_k, first.renormalize, first.round_weights,
    )  # fmt: skip
    problem.call(ops.fused_moe)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = problem.call(ops.fused_moe)
    for inputs in (first, second, first):
        problem.x.copy_(inputs.x)
        problem.logits.copy_(inputs.logits)
        graph.replay()
        assert torch.equal(out, problem.call(ops.fused_moe))
    assert relative_error(out, _exact(problem)) < TOLERANCE[torch.bfloat16]


def _shares(problem: Problem, size: int) -> list[Problem]:
    """The problem's shares on ranks with whole experts, of which the last ones have most."""
    num_experts = problem.gate_up.shape[0]
    edges = [rank * num_experts // size for rank in range(size + 1)]
    return [problem.of_experts(range(*edge)) for edge in itertools.pairwise(edges)]


@pytest.mark.parametrize("num_tokens", [1, 3, 9, 64, 600, 4096])
@pytest.mark.parametrize("shape", ["qwen3-30b", "mixtral-rank"])
def test_shares_of_whole_experts_add_up_to_all(shape, num_tokens):
    for skew in (0.0, 3.0):
        problem = _problem(shape, num_tokens, torch.bfloat16, skew=skew)
        torch.use_deterministic_algorithms(True)  # a value that no kernel wrote is NaN
        try:
            outs = [share.call(ops.fused_moe) for share in _shares(problem, 3)]
        finally:
            torch.use_deterministic_algorithms(False)
        assert relative_error(sum(out.double() for out in outs), _exact(problem)) < TOLERANCE[torch.bfloat16]
        for share, out in zip(_shares(problem, 3), outs, strict=True):
            expected = share.call(moe.fused_moe)
            if expected.any():
                assert relative_error(out, expected) < TOLERANCE[torch.bfloat16]
            else:
                assert not out.any()


@pytest.mark.parametrize("num_tokens", [1, 8, 64])
def test_a_graph_of_a_share_follows_its_inputs(num_tokens):
    first, second = (_problem("qwen3-30b", num_tokens, torch.bfloat16, skew=skew) for skew in (0.0, 3.0))
    share = _shares(dataclasses.replace(first, x=first.x.clone(), logits=first.logits.clone()), 3)[1]
    share.call(ops.fused_moe)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = share.call(ops.fused_moe)
    for inputs in (first, second, first):
        share.x.copy_(inputs.x)
        share.logits.copy_(inputs.logits)
        graph.replay()
        assert torch.equal(out, share.call(ops.fused_moe))


@pytest.mark.parametrize("num_tokens", [4, 100, 3000])
def test_results_are_equal_from_run_to_run_and_in_any_order(num_tokens):
    problem = _problem("qwen3-30b", num_tokens, torch.bfloat16, skew=2.0)
    out = problem.call(ops.fused_moe)
    assert all(torch.equal(problem.call(ops.fused_moe), out) for _ in range(20))
    order = torch.randperm(num_tokens, device="cuda")
    moved = Problem(
        problem.x[order], problem.logits[order], problem.gate_up, problem.down, None,
        problem.top_k, problem.renormalize, problem.round_weights,
    )  # fmt: skip
    assert torch.equal(moved.call(ops.fused_moe), out[order])


def test_tokens_that_are_no_numbers_harm_no_others():
    for num_tokens in (5, 400):
        problem = _problem("qwen3-30b", num_tokens, torch.bfloat16)
        expected = problem.call(ops.fused_moe)
        problem.x[3], problem.logits[3] = float("nan"), float("nan")
        out = problem.call(ops.fused_moe)
        assert bool(out[3].isnan().all())
        others = [token for token in range(num_tokens) if token != 3]
        assert torch.equal(out[others], expected[others])


def test_it_never_waits_for_the_device():
    problems = [_problem("qwen3-30b", num_tokens, torch.bfloat16) for num_tokens in (1, 8, 64, 700)]
    problems += [share for problem in problems for share in _shares(problem, 2)]
    for problem in problems:
        problem.call(ops.fused_moe)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for problem, _ in itertools.product(problems, range(2)):
            problem.call(ops.fused_moe)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# (experts, top-k, groups, open groups, best of a group): DeepSeek-V2, GLM-4.5-Air, DeepSeek-V3, MiniMax-M2, Qwen3-Next
CHOICES = {
    "160-groups": (160, 6, 8, 3, 1),
    "128": (128, 8, 1, 1, 2),
    "256-groups": (256, 8, 8, 4, 2),
    "256": (256, 8, 1, 1, 2),
    "512": (512, 10, 1, 1, 2),
    "512-groups": (512, 10, 16, 2, 2),
}


def _choice_problem(size: str, kind: str, num_tokens: int, *, has_bias: bool) -> Problem:
    """Logits are multiples of 1/8: scores are equal or far apart, whatever a device's exponential rounds."""
    num_experts, top_k, num_groups, num_open, num_best = CHOICES[size]
    problem = make_problem(
        num_tokens=num_tokens,
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=256,
        intermediate_size=64,
        dtype=torch.bfloat16,
        device="cuda",
        renormalize=True,
        round_weights=False,
    )
    bias = torch.randint(-8, 8, (num_experts,), device="cuda") / 4 if has_bias else None
    choice = moe.Choice(kind, bias, num_groups, num_open, num_best)
    logits = torch.randint(-24, 24, (num_tokens, num_experts), device="cuda") / 8
    return dataclasses.replace(problem, logits=logits, choice=choice, floor=1e-20, factor=2.5)


@pytest.mark.parametrize("num_tokens", [1, 3, 64, 513, 4096])
@pytest.mark.parametrize(("kind", "has_bias"), [("sigmoid", True), ("sigmoid", False), ("softmax", True)])
@pytest.mark.parametrize("size", CHOICES)
def test_choices_of_many_experts_are_those_of_the_specification(size, kind, has_bias, num_tokens):
    from kernels.moe.triton_route import route

    problem = _choice_problem(size, kind, num_tokens, has_bias=has_bias)
    options = {"top_k": problem.top_k, "renormalize": True, "floor": 1e-20, "factor": 2.5, "choice": problem.choice}
    weights, experts = moe.route(problem.logits, **options)
    for chunk_tokens, pdl in itertools.product((None, 16, 64), (False, True)):
        found = route(
            problem.logits, num_experts=problem.logits.shape[1], weights_dtype=torch.float32,
            chunk_tokens=chunk_tokens, pdl=pdl, **options,
        )  # fmt: skip
        assert torch.equal(found.experts.long(), experts)
        torch.testing.assert_close(found.weights, weights)


@pytest.mark.parametrize("size", CHOICES)
def test_a_mixture_with_a_choice_needs_no_wait_and_equals_its_specification(size):
    for num_tokens in (1, 64, 300):
        problem = _choice_problem(size, "sigmoid", num_tokens, has_bias=True)
        expected = problem.call(moe.fused_moe)
        problem.call(ops.fused_moe)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = problem.call(ops.fused_moe)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert relative_error(out, expected.double()) < TOLERANCE[torch.bfloat16]
