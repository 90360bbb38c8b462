"""Experts in FP8 with rounded activations against their specification, through Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from kernels.linear.reference import quantize_groups
from kernels.moe import reference as moe
from kernels.moe import triton as moe_triton
from kernels.moe.configs import FP8_LEAST_PAIRS, Fp8Config, Fp8Tile, fp8_config
from kernels.moe.planes import PlanesMatrix, to_planes
from kernels.moe.triton_fp8 import quantize_planes
from kernels.moe.triton_route import RowTiles
from tests.unit.kernels.triton_cases.moe_problem import make_problem, pack_experts

CONFIGS = {
    "two pieces": Fp8Config(16, Fp8Tile(128, 4, 2, group_m=3), Fp8Tile(128, 4, 2, group_m=2), chunk_tokens=4),
    "one piece": Fp8Config(32, Fp8Tile(256, 4, 2), Fp8Tile(256, 4, 2)),
}
GATES = {"silu": moe.SILU, "clamped": moe.Gate("clamped", alpha=1.702, limit=0.7), "relu2": moe.Gate("relu2")}


@pytest.fixture(autouse=True)
def rounded_as_gpus_round(monkeypatch):
    """Triton 3.6's interpreter rounds to e4m3 wrongly where the mantissa overflows; a GPU rounds as torch does."""
    convert = interpreter._convert_float

    def round_as_torch(values, source, target, mode):
        if (source, target) != (tl.float32, tl.float8e4nv):
            return convert(values, source, target, mode)
        return torch.from_numpy(values.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", round_as_torch)


def _problem(storage="fp8", *, block=128, **options):
    sizes = {"num_tokens": 5, "num_experts": 3, "top_k": 2, "hidden_size": 160, "intermediate_size": 136}
    problem = make_problem(dtype=torch.float32, **(sizes | options))
    problem = pack_experts(problem, storage, block=block)
    arranged = dataclasses.replace(problem, gate_up=to_planes(problem.gate_up), down=to_planes(problem.down))
    assert isinstance(arranged.gate_up, PlanesMatrix)
    assert isinstance(arranged.down, PlanesMatrix)
    return arranged


def _check(problem, config):
    out = problem.call(moe_triton.fused_moe, config=config)
    expected = problem.call(moe.fused_moe, rounding=moe.round_to_fp8)
    # a sum's last bit may decide how a value between the products is rounded to e4m3
    assert (out - expected).norm() < 2e-3 * expected.norm()
    assert (out - problem.call(moe.fused_moe)).norm() < 0.06 * expected.norm()


@pytest.mark.parametrize("num_columns", [128, 512, 200, 2100])
def test_rows_are_rounded_as_groups_in_the_order_of_the_planes(num_columns):
    x = torch.randn(3, num_columns + 8)[:, :num_columns] * torch.logspace(-2, 2, 3)[:, None]
    x[1, 5] = float("nan")
    found = quantize_planes(x)
    values, scales = quantize_groups(x, 128)
    torch.testing.assert_close(found.scales, scales, rtol=0, atol=0, equal_nan=True)
    # two planes of 32 take turns in each run of 64
    natural = found.values.float().view(3, -1, 32, 2).transpose(2, 3).reshape(3, -1)
    torch.testing.assert_close(natural[:, :num_columns], values.float(), rtol=0, atol=0, equal_nan=True)
    assert not natural[:, num_columns:].any()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("storage", "block"), [("fp8", 128), ("fp8", 256), ("fp8_rows", 0)])
@pytest.mark.table
def test_mixtures_equal_their_specification(storage, block, gate, config):
    hidden_size = 288 if block == 256 else 160  # more than a block, and no multiple of a group
    problem = _problem(storage, block=block, gate=GATES[gate], has_biases=gate == "clamped", hidden_size=hidden_size)
    _check(problem, CONFIGS[config])


@pytest.mark.parametrize("top_k", [1, 2, 10])
@pytest.mark.parametrize("skew", [0.0, 30.0])
@pytest.mark.table(most=4)
def test_ragged_groups_and_experts_without_tokens_equal_their_specification(top_k, skew):
    sizes = {"num_tokens": 7, "num_experts": 12, "hidden_size": 40, "intermediate_size": 24}
    _check(_problem(**sizes, top_k=top_k, skew=skew, has_shared=True), CONFIGS["two pieces"])


def test_scales_of_fewer_outputs_than_a_tile_equal_their_specification():
    problem = _problem()
    narrow = {}
    for name in ("gate_up", "down"):
        matrix = getattr(problem, name)
        scales = matrix.scales.repeat_interleave(2, 2) * (1 + torch.rand(matrix.scales.shape[2] * 2, 1))
        rows = -(-(matrix.shape[1] // matrix.scales.shape[1]) // 64)
        narrow[name] = dataclasses.replace(matrix, scales=scales[:, :, :rows].contiguous(), rows=64)
    _check(dataclasses.replace(problem, **narrow), CONFIGS["two pieces"])


def test_values_between_the_products_are_rounded_to_16_bits_and_then_to_8():
    """As in the specification of 16 bits: with float32 between the products, other codes are chosen in places."""
    problem = _problem()
    half = dataclasses.replace(problem, x=problem.x.half())
    out = half.call(moe_triton.fused_moe, config=CONFIGS["two pieces"]).float()
    same, other = (
        each.call(moe.fused_moe, rounding=moe.round_to_fp8).float()
        for each in (half, dataclasses.replace(problem, x=half.x.float()))
    )
    assert (out - same).norm() < 2e-3 * same.norm()
    assert (out - other).norm() > 2 * (out - same).norm()


@pytest.mark.parametrize("here", [range(1), range(1, 3)])
def test_the_share_of_a_rank_with_whole_experts_equals_its_specification(here):
    _check(_problem(has_biases=True).of_experts(here), CONFIGS["two pieces"])


def test_many_tokens_in_bfloat16_are_rounded_and_others_are_not():
    config = fp8_config(num_pairs=FP8_LEAST_PAIRS * 4, num_experts=4)
    assert config is not None
    assert fp8_config(num_pairs=FP8_LEAST_PAIRS * 4 - 1, num_experts=4) is None
    problem = _problem(num_tokens=FP8_LEAST_PAIRS, num_experts=2, hidden_size=128, intermediate_size=128)
    for dtype, num_tokens, is_rounded in (
        (torch.bfloat16, FP8_LEAST_PAIRS, True),
        (torch.bfloat16, FP8_LEAST_PAIRS - 1, False),
        (torch.float32, FP8_LEAST_PAIRS, False),
    ):
        x = problem.x[:num_tokens].to(dtype)
        chosen = moe_triton.choose(x, problem.gate_up, problem.down, top_k=2, num_experts=2)
        assert isinstance(chosen, Fp8Config) == is_rounded


@pytest.mark.parametrize("num_columns", [512, 200, 2100])
def test_each_row_is_rounded_once_for_all_its_pairs_in_the_order_of_the_tiles(num_columns):
    x = torch.randn(5, num_columns)
    pairs = torch.tensor([3, 9, 0, 77, 8, 1, 99, 99], dtype=torch.int32)
    positions = torch.tensor([2, 5, -1, 0, -1, -1, -1, -1, 4, 1], dtype=torch.int32)  # of two pairs a row
    tiles = RowTiles(pairs, torch.tensor([1, 0], dtype=torch.int32), torch.tensor([3, 2], dtype=torch.int32), positions)
    by_row, found = quantize_planes(x), quantize_planes(x, tiles=tiles)
    rows, sources = [0, 1, 2, 4, 5], [1, 4, 0, 4, 0]
    assert found.values.shape[0] == 8
    assert torch.equal(found.values[rows].view(torch.uint8), by_row.values[sources].view(torch.uint8))
    assert torch.equal(found.scales[rows], by_row.scales[sources])
