"""Packed experts on the device, at the sizes that are served: against their specification in float32, and in graphs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels import ops
from kernels.moe import reference as moe
from kernels.moe.configs import for_packed, grouped_configs, pairs_config
from kernels.moe.storage import Mxfp4Matrix, dense_matrix
from tests.unit.kernels.triton_cases.moe_problem import Problem, make_problem, pack_experts
from tests.unit.kernels.triton_cases.ragged import relative_error

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-2
# (storage, experts, top_k, hidden, intermediate, block): gpt-oss-20b, one of its two ranks, Qwen3-30B-A3B, odd edges
SHAPES = {
    "gpt-oss-20b": ("mxfp4", 32, 4, 2880, 2880, 32),
    "gpt-oss-20b-rank": ("mxfp4", 32, 4, 2880, 1440, 32),
    "qwen3-30b": ("fp8", 128, 8, 2048, 768, 128),
    "uneven": ("fp8", 5, 3, 200, 72, 128),
}
TOKENS = (1, 2, 4, 8, 9, 17, 64, 129, 1024, 4096)


def _problem(shape: str, num_tokens: int, *, skew: float = 1.0) -> Problem:
    storage, num_experts, top_k, hidden_size, intermediate_size, block = SHAPES[shape]
    gate = moe.Gate("clamped", alpha=1.702, limit=7.0) if storage == "mxfp4" else moe.SILU
    problem = make_problem(
        num_tokens=num_tokens, num_experts=num_experts, top_k=top_k, hidden_size=hidden_size,
        intermediate_size=intermediate_size, dtype=torch.bfloat16, device="cuda", gate=gate,
        has_biases=storage == "mxfp4", skew=skew,
    )  # fmt: skip
    return pack_experts(problem, storage, block=block)


def _expected(problem: Problem) -> torch.Tensor:
    """The specification with float32 activations and the same routing."""
    biases = problem.biases
    if biases is not None:
        biases = moe.ExpertBiases(biases.gate_up.float(), biases.down.float())
    return dataclasses.replace(problem, x=problem.x.float(), biases=biases).call(moe.fused_moe)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_mixtures_are_exact_to_the_rounding_of_bf16(shape, num_tokens):
    for skew in (0.0, 3.0):
        problem = _problem(shape, num_tokens, skew=skew)
        assert relative_error(problem.call(ops.fused_moe), _expected(problem)) < TOLERANCE


@pytest.mark.parametrize("shape", SHAPES)
def test_every_cut_gives_the_specification(shape):
    from kernels.moe.triton import fused_moe

    many, few = _problem(shape, 300), _problem(shape, 6)
    for pdl in (False, True):
        for config in map(for_packed, grouped_configs()):
            assert relative_error(many.call(fused_moe, config=config, pdl=pdl), _expected(many)) < TOLERANCE, config
        for intermediate_size in (128, 4096):
            out = few.call(fused_moe, config=pairs_config(intermediate_size=intermediate_size), pdl=pdl)
            assert relative_error(out, _expected(few)) < TOLERANCE, intermediate_size


def test_every_code_and_scale_has_its_value():
    from kernels.moe.triton_grouped import grouped_gemm
    from kernels.moe.triton_route import lay_out, route

    codes = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(252, 1).view(1, 252 * 16, 16)
    scales = torch.arange(1, 253, dtype=torch.uint8, device="cuda").repeat_interleave(16).view(1, -1, 1)
    matrix = Mxfp4Matrix(codes, scales)
    x = torch.eye(32, dtype=torch.bfloat16, device="cuda")
    logits = torch.zeros(32, 1, dtype=torch.bfloat16, device="cuda")
    routing = route(
        logits, num_experts=1, top_k=1, renormalize=False, weights_dtype=torch.float32, chunk_tokens=16
    )  # fmt: skip
    config = for_packed(grouped_configs()[1])
    tiles = lay_out(routing, num_experts=1, block_m=config.block_m)
    out = grouped_gemm(x, matrix, tiles, config.up, num_pairs=32, gate=None, swaps=config.swaps)
    # smaller scales give bf16 values below the normal ones, which tensor cores may round to 0
    assert torch.equal(out[:, 32:], dense_matrix(matrix, 0, torch.bfloat16).T[:, 32:])


@pytest.mark.parametrize("num_tokens", [1, 8, 64, 1024])
@pytest.mark.parametrize("shape", ["gpt-oss-20b", "qwen3-30b"])
def test_a_graph_of_it_follows_its_inputs_and_repeats_itself(shape, num_tokens):
    first, second = (_problem(shape, num_tokens, skew=skew) for skew in (0.0, 3.0))
    problem = dataclasses.replace(first, x=first.x.clone(), logits=first.logits.clone())
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
    assert relative_error(out, _expected(problem)) < TOLERANCE
