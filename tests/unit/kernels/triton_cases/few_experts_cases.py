"""Products of few tokens with experts in planes on Hopper, whose Gluon runs on the CPU, against their specification."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.moe import gluon_few, gluon_few_codes, gluon_few_route, gluon_few_sums, gluon_planes
from kernels.moe import reference as moe
from kernels.moe import triton as moe_triton
from kernels.moe.few_configs import FewConfig, FewTile
from kernels.moe.planes import to_planes
from kernels.moe.triton_route import lay_out, route
from kernels.moe.triton_route_few import route_few
from tests.support.gluon_on_cpu import KernelOnCpu
from tests.unit.kernels.triton_cases.int_experts_problem import STORAGES, Integers, pack_integers
from tests.unit.kernels.triton_cases.moe_problem import make_problem, pack_experts
from tests.unit.kernels.triton_cases.ragged import relative_error

TOLERANCE = 1.5e-2  # values are rounded to bfloat16 between the ops, 0.4 % each
INTEGERS = {**STORAGES, "32_fp16_zeros": Integers(), "64_fp16": Integers(group_size=64, has_zeros=False)}
# tokens → configs
ONE = (
    FewConfig(1, FewTile(16, 8, 8, 2), FewTile(16, 8, 2, 6)),
    FewConfig(1, FewTile(32, 4, 8, 1), FewTile(16, 8, 4, 1), chooses=True),
)
SOME = (
    FewConfig(2, FewTile(16, 4, 4, 4), FewTile(32, 8, 4, 1)),
    FewConfig(4, FewTile(32, 4, 4, 2), FewTile(16, 2, 2, 1)),
    FewConfig(8, FewTile(32, 2, 1, 2), FewTile(32, 2, 1, 2)),
)


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    modules = (gluon_few, gluon_few_codes, gluon_few_route, gluon_few_sums, gluon_planes)
    for name in ("_product_kernel", "_sum_kernel"):
        monkeypatch.setattr(gluon_few, name, KernelOnCpu(getattr(gluon_few, name), modules))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tiles are small
    yield
    torch.set_num_threads(threads)


def _problem(storage, num_tokens, dtype=torch.bfloat16, **options):
    is_clamped = storage == "mxfp4"
    sizes = {"num_experts": 6, "top_k": 3, "hidden_size": 320, "intermediate_size": 96} | options
    problem = make_problem(
        num_tokens=num_tokens, dtype=dtype, has_biases=is_clamped,
        gate=moe.Gate("clamped", alpha=1.702, limit=7.0) if is_clamped else moe.SILU, **sizes,
    )  # fmt: skip
    problem = (
        pack_integers(problem, INTEGERS[storage]) if storage in INTEGERS else pack_experts(problem, storage, block=128)
    )
    return dataclasses.replace(problem, gate_up=to_planes(problem.gate_up), down=to_planes(problem.down))


def _check(problem, configs, tolerance=TOLERANCE):
    biases = problem.biases and moe.ExpertBiases(problem.biases.gate_up.float(), problem.biases.down.float())
    expected = dataclasses.replace(problem, x=problem.x.float(), biases=biases).call(moe.fused_moe)
    for config in configs:
        out = problem.call(moe_triton.fused_moe, config=config)
        assert relative_error(out, expected) < tolerance, config


STORAGE_SIZES = {
    "mxfp4": {}, "nvfp4": {}, "fp8": {}, "fp8_rows": {}, "packed": {}, "packed_asymmetric": {"intermediate_size": 64},
    "64_fp16": {"intermediate_size": 64},
    "32_fp16_zeros": {}, "packed_channel": {}, "channel_zeros": {},
    "awq": {"hidden_size": 384, "intermediate_size": 128}, "gptq": {"hidden_size": 384, "intermediate_size": 128},
}  # fmt: skip


@pytest.mark.parametrize("storage", STORAGE_SIZES)
@pytest.mark.table(most=2)
def test_one_token_equals_its_specification(storage):
    _check(_problem(storage, 1, **STORAGE_SIZES[storage]), ONE)


@pytest.mark.parametrize("num_tokens", [2, 5])
@pytest.mark.parametrize("storage", STORAGE_SIZES)
@pytest.mark.table(most=2)
def test_some_tokens_equal_their_specification(storage, num_tokens):
    _check(_problem(storage, num_tokens, skew=2.0, **STORAGE_SIZES[storage]), SOME)


@pytest.mark.parametrize(("num_tokens", "configs"), [(1, ONE), (5, SOME)])
@pytest.mark.parametrize("storage", ["awq", "gptq", "packed", "packed_asymmetric", "64_fp16", "32_fp16_zeros"])
@pytest.mark.table(most=2)
def test_integers_equal_their_specification_in_float16(storage, num_tokens, configs):
    sizes = STORAGE_SIZES[storage]
    problem = _problem(storage, num_tokens, torch.float16, has_shared=num_tokens == 1, **sizes)
    _check(problem, configs, tolerance=2e-3)


@pytest.mark.parametrize("here", [range(20), range(3, 11)])
@pytest.mark.parametrize(("num_tokens", "block_m"), [(2, 2), (5, 2), (8, 8), (11, 4)])
def test_one_launch_chooses_and_lays_out_as_two_do(num_tokens, block_m, here):
    logits = torch.randn(num_tokens, 20) + 2 * torch.randn(20)
    options = {"num_experts": 20, "top_k": 3, "renormalize": True, "weights_dtype": torch.float32, "here": here}
    choice = moe.Choice("sigmoid", torch.randn(20), 4, 2) if num_tokens == 5 else None
    routing = route(logits, chunk_tokens=4, choice=choice, **options)
    tiles = lay_out(routing, num_experts=len(here), block_m=block_m)
    found, found_tiles = route_few(logits, block_m=block_m, choice=choice, **options)
    assert torch.equal(found.experts, routing.experts)
    assert torch.equal(found.weights, routing.weights)
    assert found.has_absent == routing.has_absent
    assert torch.equal(found_tiles.rows, tiles.rows)
    is_tile = tiles.rows > 0
    assert torch.equal(found_tiles.experts[is_tile], tiles.experts[is_tile])
    is_row = torch.arange(block_m) < tiles.rows[:, None]
    assert torch.equal(found_tiles.pairs.view(-1, block_m)[is_row], tiles.pairs.view(-1, block_m)[is_row])


@pytest.mark.parametrize("has_choice", [False, True])
def test_the_largest_by_integers_are_the_largest(has_choice):
    logits = torch.randint(-3, 4, (9, 20)) / 4  # many are equal, and scores below 0 by the bias
    logits[0], logits[1, 3:], logits[2, 7] = 0.0, -float("inf"), float("nan")
    logits[3] = torch.tensor([0.0, -0.0]).repeat(10)
    choice = moe.Choice("sigmoid", torch.tensor([0.25, -1.0, 0.0, -0.5]).repeat(5), 4, 2) if has_choice else None
    options = {"num_experts": 20, "top_k": 5, "renormalize": True, "weights_dtype": torch.float32, "choice": choice}
    expected, found = (route(logits, chunk_tokens=chunk_tokens, **options) for chunk_tokens in (4, None))
    assert torch.equal(found.experts, expected.experts)
    torch.testing.assert_close(found.weights, expected.weights, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_the_sum_over_any_number_of_experts_adds_the_shared_one(top_k):
    config = FewConfig(1, FewTile(16, 8, 8, 1), FewTile(16, 4, 8 // top_k, 2))
    late = dataclasses.replace(config, chooses=True)
    _check(_problem("nvfp4", 2, top_k=top_k, has_shared=True), [config, late])


@pytest.mark.parametrize("here", [range(2), range(2, 6)])
def test_the_share_of_a_rank_with_whole_experts_equals_its_specification(here):
    _check(_problem("mxfp4", 3).of_experts(here), [*ONE, SOME[0]])
