"""Products of few tokens with experts in planes on Hopper, against their specification in float32."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch

from kernels.moe import reference as moe
from kernels.moe.few_configs import FewConfig, FewTile
from kernels.moe.planes import to_planes
from tests.unit.kernels.triton_cases.int_experts_problem import STORAGES, Integers, pack_integers
from tests.unit.kernels.triton_cases.moe_problem import Problem, make_problem, pack_experts
from tests.unit.kernels.triton_cases.ragged import relative_error

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-2
INTEGERS = {**STORAGES, "32_fp16_zeros": Integers(), "64_fp16": Integers(group_size=64, has_zeros=False)}
STORAGE_NAMES = (
    "mxfp4", "nvfp4", "fp8", "fp8_rows", "awq", "gptq", "packed", "packed_asymmetric", "packed_channel",
    "channel_zeros", "32_fp16_zeros", "64_fp16",
)  # fmt: skip
# (experts, top_k, hidden, intermediate): whole groups of inputs, and part of one
SIZES = {"whole": (16, 8, 512, 256), "odd": (7, 3, 320, 192)}
# Those that few_config returns
CONFIGS = (
    FewConfig(4, FewTile(32, 4, 2, 2), FewTile(32, 4, 2, 6)),
    FewConfig(8, FewTile(64, 4, 1, 2), FewTile(64, 4, 1, 3)),
)


def _configs(num_tokens: int, top_k: int) -> Iterator[FewConfig]:
    if num_tokens > 2:
        yield from CONFIGS
        return
    places = 1 << (top_k - 1).bit_length()
    yield FewConfig(1, FewTile(16, 8, 8, 2, 128), FewTile(16, 8, 8 // places, 6))
    yield FewConfig(1, FewTile(16, 8, 8, 3, 128), FewTile(16, 8 if top_k < 8 else 4, 8 // places, 3), chooses=True)


def _problem(storage: str, sizes: str, num_tokens: int, **options) -> Problem:
    num_experts, top_k, hidden_size, intermediate_size = SIZES[sizes]
    is_clamped = storage == "mxfp4"
    problem = make_problem(
        num_tokens=num_tokens, num_experts=num_experts, top_k=top_k, hidden_size=hidden_size,
        intermediate_size=intermediate_size, dtype=torch.bfloat16, device="cuda", has_biases=is_clamped,
        gate=moe.Gate("clamped", alpha=1.702, limit=7.0) if is_clamped else moe.SILU, **options,
    )  # fmt: skip
    if storage in INTEGERS:
        return pack_integers(problem, INTEGERS[storage])
    return pack_experts(problem, storage, block=128)


def _takes(storage: str, sizes: str) -> bool:
    size = INTEGERS[storage].group_size if storage in INTEGERS else 32
    return size == -1 or all(inputs % size == 0 for inputs in SIZES[sizes][2:])


def _outputs(problem: Problem) -> Iterator[tuple[FewConfig, torch.Tensor]]:
    from kernels.moe.triton import fused_moe

    arranged = dataclasses.replace(problem, gate_up=to_planes(problem.gate_up), down=to_planes(problem.down))
    for config in _configs(problem.x.shape[0], problem.top_k):
        yield config, arranged.call(fused_moe, config=config, pdl=True)


def _check(problem: Problem) -> None:
    biases = problem.biases and moe.ExpertBiases(problem.biases.gate_up.float(), problem.biases.down.float())
    expected = dataclasses.replace(problem, x=problem.x.float(), biases=biases).call(moe.fused_moe)
    for (config, out), (_, again) in zip(_outputs(problem), _outputs(problem), strict=True):
        assert relative_error(out, expected) < TOLERANCE, config
        assert torch.equal(out, again), config


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compile all schemes in parallel: one takes seconds."""
    from kernels.precompile import Compilation, collect_kernels

    with collect_kernels() as kernels:
        for storage, sizes, num_tokens in itertools.product(STORAGE_NAMES, SIZES, (1, 2, 5, 13)):
            if _takes(storage, sizes):
                list(_outputs(_problem(storage, sizes, num_tokens)))
    Compilation(list(kernels)).wait(lambda done, total: None)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("storage", STORAGE_NAMES)
def test_every_scheme_equals_its_specification_with_ragged_experts(storage, sizes):
    if not _takes(storage, sizes):
        pytest.skip("the sizes are no whole groups")
    for num_tokens, skew in ((1, 0.0), (2, 1.0), (5, 3.0), (13, 1.0)):
        _check(_problem(storage, sizes, num_tokens, skew=skew))


def test_one_expert_may_have_all_tokens_and_the_others_none():
    problem = _problem("nvfp4", "odd", 13)
    problem.logits[:] = torch.arange(7, device="cuda").roll(3) * 10.0
    _check(dataclasses.replace(problem, top_k=1))


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_a_rank_with_some_experts_has_its_share(num_tokens):
    _check(_problem("mxfp4", "odd", num_tokens).of_experts(range(2, 5)))


@pytest.mark.parametrize("num_experts", [20, 128, 512])
def test_products_that_choose_take_the_experts_of_the_routing(num_experts):
    problem = make_problem(
        num_tokens=1, num_experts=num_experts, top_k=8, hidden_size=128, intermediate_size=64, dtype=torch.bfloat16,
        device="cuda", has_shared=True,
    )  # fmt: skip
    problem = pack_experts(problem, "mxfp4")
    for scale in (1.0, 30.0, 0.0):  # shares of all sizes, some that are 0, equal ones
        _check(dataclasses.replace(problem, logits=problem.logits * scale))


def test_a_shared_expert_is_added():
    _check(_problem("awq", "whole", 1, has_shared=True))
    _check(_problem("awq", "whole", 6, has_shared=True))
