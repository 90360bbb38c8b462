"""Products of 4-bit experts unpacked to shared memory against their specification, through Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.moe import reference as moe
from kernels.moe import triton as moe_triton
from kernels.moe.configs import WideConfig, WideTile
from kernels.moe.planes import PlanesMatrix, to_planes
from kernels.moe.triton_planes_decode import _SCALE
from kernels.moe.triton_planes_wide import arrange_rows
from tests.unit.kernels.triton_cases.int_experts_problem import STORAGES, pack_integers
from tests.unit.kernels.triton_cases.moe_problem import make_problem, pack_experts
from tests.unit.kernels.triton_cases.ptx import run_ptx

CONFIG = WideConfig(16, WideTile(128, 4, 2, group_m=3), WideTile(64, 4, 2, depth=64), chunk_tokens=4)
GATES = {"silu": moe.SILU, "clamped": moe.Gate("clamped", alpha=1.702, limit=0.7), "relu2": moe.Gate("relu2")}


def _problem(storage, *, gate="silu", **options):
    sizes = {"num_tokens": 5, "num_experts": 3, "top_k": 2, "hidden_size": 160, "intermediate_size": 160}
    problem = make_problem(
        dtype=torch.float32, gate=GATES[gate], has_biases=gate == "clamped", **(sizes | options)
    )  # fmt: skip
    problem = pack_integers(problem, STORAGES[storage]) if storage in STORAGES else pack_experts(problem, storage)
    arranged = dataclasses.replace(problem, gate_up=to_planes(problem.gate_up), down=to_planes(problem.down))
    assert isinstance(arranged.gate_up, PlanesMatrix)
    assert isinstance(arranged.down, PlanesMatrix)
    return arranged


def _check(problem, config=CONFIG):
    out, expected = problem.call(moe_triton.fused_moe, config=config), problem.call(moe.fused_moe)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)


def test_rows_are_arranged_in_pairs_of_each_plane_in_turn():
    x = torch.randn(3, 200)
    found = arrange_rows(x)
    natural = found.view(3, 2, 16, 4, 2).permute(0, 1, 3, 2, 4).reshape(3, 256)
    assert torch.equal(natural[:, :200], x)
    assert not natural[:, 200:].any()


@pytest.mark.parametrize("gate", GATES)
def test_mxfp4_equals_its_specification(gate):
    _check(_problem("mxfp4", gate=gate))


@pytest.mark.parametrize("storage", ["awq", "gptq", "packed", "packed_asymmetric", "packed_channel"])
def test_integers_equal_their_specification(storage):
    sizes = {"hidden_size": 256, "intermediate_size": 128} if storage in ("awq", "gptq") else {}
    sizes = sizes or {"hidden_size": 192, "intermediate_size": 64}
    _check(_problem(storage, **sizes))


@pytest.mark.parametrize("top_k", [1, 10])
def test_ragged_groups_and_experts_without_tokens_equal_their_specification(top_k):
    sizes = {"num_tokens": 7, "num_experts": 12, "hidden_size": 64, "intermediate_size": 32}
    config = dataclasses.replace(CONFIG, block_m=32, up=WideTile(256, 4, 2, depth=64), down=WideTile(128, 4, 2))
    _check(_problem("mxfp4", top_k=top_k, skew=10.0, has_shared=True, **sizes), config)


def test_a_factor_of_a_halfs_bits_counts_whole_in_ptx():
    """The products with both parts of a factor are exact in float32, so two of bfloat16 round at most twice."""
    for factor in torch.linspace(0.01, 0.02, 50).half().float():
        high = factor.bfloat16()
        low = (factor - high.float()).bfloat16()
        operands = {f"${i + 2}": _bits(part) for i, part in enumerate((high, low))}
        for value in range(-15, 16):
            code = run_ptx(_SCALE.value, {"$1": _bits(torch.tensor(value).bfloat16()), **operands}, {})
            pair = torch.tensor([code], dtype=torch.uint32).view(torch.bfloat16).float()
            assert torch.allclose(pair, value * factor, rtol=2**-8 * 1.01, atol=0)


def _bits(value):
    """A bfloat16, twice, as 32 bits."""
    half = int(value.view(torch.int16)) & 0xFFFF
    return half | half << 16


@pytest.mark.parametrize("here", [range(1), range(1, 3)])
def test_the_share_of_a_rank_with_whole_experts_equals_its_specification(here):
    _check(_problem("mxfp4", gate="clamped").of_experts(here))
