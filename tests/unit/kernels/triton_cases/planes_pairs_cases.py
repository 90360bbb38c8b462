"""Matrix-vector products of experts in planes against their specification, through Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.moe import reference as moe
from kernels.moe import triton as moe_triton
from kernels.moe.configs import PlanesPairsConfig, PlanesPairTile
from kernels.moe.planes import PlanesMatrix, to_planes
from tests.unit.kernels.triton_cases.int_experts_problem import STORAGES, pack_integers
from tests.unit.kernels.triton_cases.moe_problem import make_problem, pack_experts

CONFIGS = (
    PlanesPairsConfig(PlanesPairTile(16, 2, 2), PlanesPairTile(32, 4, 1)),
    PlanesPairsConfig(PlanesPairTile(16, 4, 1, splits=2), PlanesPairTile(8, 8, 2, splits=4)),
)
GATES = {"silu": moe.SILU, "clamped": moe.Gate("clamped", alpha=1.702, limit=0.7), "relu2": moe.Gate("relu2")}


def _problem(storage, *, gate="silu", **options):
    sizes = {"num_tokens": 2, "num_experts": 4, "top_k": 2, "hidden_size": 288, "intermediate_size": 96}
    problem = make_problem(
        dtype=torch.float32, gate=GATES[gate], has_biases=gate == "clamped", **(sizes | options)
    )  # fmt: skip
    if storage in STORAGES:
        problem = pack_integers(problem, STORAGES[storage])
    else:
        problem = pack_experts(problem, storage, block=128)
    arranged = dataclasses.replace(problem, gate_up=to_planes(problem.gate_up), down=to_planes(problem.down))
    assert isinstance(arranged.gate_up, PlanesMatrix)
    assert isinstance(arranged.down, PlanesMatrix)
    return arranged


def _check(problem):
    expected = problem.call(moe.fused_moe)
    for config in CONFIGS:
        out = problem.call(moe_triton.fused_moe, config=config)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("storage", ["mxfp4", "fp8", "fp8_rows", "nvfp4"])
def test_floats_equal_their_specification(storage, gate):
    _check(_problem(storage, gate=gate))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("storage", ["nf4", "fp4"])
@pytest.mark.table(most=2)  # a row for each table: gates are applied behind the decoding, which floats test
def test_codes_of_tables_equal_their_specification(storage, gate):
    _check(_problem(storage, gate=gate, hidden_size=320, intermediate_size=64))


@pytest.mark.parametrize("storage", ["awq", "gptq", "packed", "packed_asymmetric", "packed_channel"])
def test_integers_equal_their_specification(storage):
    _check(_problem(storage, hidden_size=256, intermediate_size=128))


@pytest.mark.parametrize("top_k", [1, 4, 10])
def test_any_number_of_experts_of_a_token_equals_the_specification(top_k):
    sizes = {"num_experts": 12, "hidden_size": 40, "intermediate_size": 24}
    _check(_problem("fp8", top_k=top_k, has_shared=True, num_tokens=3, skew=3.0, **sizes))


@pytest.mark.parametrize("here", [range(2), range(2, 5)])
def test_the_share_of_a_rank_with_whole_experts_equals_its_specification(here):
    _check(_problem("mxfp4", gate="clamped", num_tokens=4, num_experts=5).of_experts(here))
