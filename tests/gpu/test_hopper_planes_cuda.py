"""Experts of 4 bits by the kernels for Hopper, against their specification in float32: every scheme and odd edge."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch

from kernels.moe import reference as moe
from kernels.moe.configs import HopperPlanesConfig, hopper_planes_configs
from kernels.moe.planes import to_planes
from tests.unit.kernels.triton_cases.int_experts_problem import STORAGES, Integers, pack_integers
from tests.unit.kernels.triton_cases.moe_problem import Problem, make_problem, pack_experts
from tests.unit.kernels.triton_cases.ragged import relative_error

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-2
# Storages beside those of pack_experts and of STORAGES, by the inputs of a scale
INTEGERS = {**STORAGES, "32_fp16_zeros": Integers(), "64_fp16": Integers(group_size=64, has_zeros=False)}
STORAGE_NAMES = (
    "mxfp4", "nvfp4", "nf4", "fp4", "awq", "gptq", "packed", "packed_asymmetric", "packed_channel", "channel_zeros",
    "32_fp16_zeros", "64_fp16",
)  # fmt: skip
# (experts, top_k, hidden, intermediate): whole tiles, and none: half groups of inputs, and outputs past the last tile
SIZES = {"whole": (8, 2, 512, 256), "odd": (7, 3, 320, 192), "narrow": (5, 2, 288, 96)}
CONFIGS = hopper_planes_configs()


def _problem(storage: str, sizes: str, num_tokens: int, **options) -> Problem:
    num_experts, top_k, hidden_size, intermediate_size = SIZES[sizes]
    is_clamped = storage == "mxfp4"
    problem = make_problem(
        num_tokens=num_tokens, num_experts=num_experts, top_k=top_k, hidden_size=hidden_size,
        intermediate_size=intermediate_size, dtype=torch.bfloat16, device="cuda", has_biases=is_clamped,
        gate=moe.Gate("clamped", alpha=1.702, limit=7.0) if is_clamped else moe.SILU, **options,
    )  # fmt: skip
    return pack_integers(problem, INTEGERS[storage]) if storage in INTEGERS else pack_experts(problem, storage)


def _takes(storage: str, sizes: str) -> bool:
    _, _, hidden_size, intermediate_size = SIZES[sizes]
    size = INTEGERS[storage].group_size if storage in INTEGERS else {"nf4": 64, "fp4": 64}.get(storage, 32)
    return size == -1 or hidden_size % size == intermediate_size % size == 0


def _outputs(problem: Problem) -> Iterator[tuple[HopperPlanesConfig, torch.Tensor]]:
    from kernels.moe.triton import fused_moe

    arranged = dataclasses.replace(problem, gate_up=to_planes(problem.gate_up), down=to_planes(problem.down))
    for config in CONFIGS:
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
        for storage, sizes in itertools.product(STORAGE_NAMES, SIZES):
            if _takes(storage, sizes):
                list(_outputs(_problem(storage, sizes, 37)))
    Compilation(list(kernels)).wait(lambda done, total: None)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("storage", STORAGE_NAMES)
def test_every_scheme_equals_its_specification_with_ragged_experts(storage, sizes):
    if not _takes(storage, sizes):
        pytest.skip("the sizes are no whole groups")
    for num_tokens, skew in ((1, 0.0), (37, 3.0), (1000, 1.0)):
        _check(_problem(storage, sizes, num_tokens, skew=skew))


@pytest.mark.parametrize("storage", ["mxfp4", "nvfp4", "packed"])
def test_one_expert_may_have_all_tokens_and_the_others_none(storage):
    problem = _problem(storage, "odd", 700)
    problem.logits[:] = torch.arange(7, device="cuda").roll(3) * 10.0
    _check(dataclasses.replace(problem, top_k=1))


def test_a_rank_with_some_experts_has_its_share():
    _check(_problem("mxfp4", "odd", 300).of_experts(range(2, 5)))
