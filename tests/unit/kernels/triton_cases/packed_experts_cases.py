"""Packed experts, in 4 and 8 bits, against their specification, through Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton
import triton.language as tl

from kernels.moe import reference as moe
from kernels.moe import triton as moe_triton
from kernels.moe import triton_storage
from kernels.moe.configs import GroupedConfig, PairsConfig, PairTile, Tile
from kernels.moe.planes import to_planes
from kernels.moe.storage import Fp8Matrix, Mxfp4Matrix, dense_matrix
from kernels.moe.storage_lut4 import TABLES
from kernels.moe.triton_grouped import grouped_gemm
from kernels.moe.triton_route import lay_out, route
from kernels.moe.triton_storage import StoredTensors, load_tile
from tests.unit.kernels.triton_cases.moe_problem import make_problem, pack_experts

CONFIGS = {
    "chosen": None,
    "tiles": GroupedConfig(16, Tile(16, 32, 4, 2, group_m=3), Tile(16, 64, 4, 2, group_m=2)),
    "swapped": GroupedConfig(16, Tile(16, 64, 4, 2), Tile(16, 32, 4, 2), swaps=True),
    "pairs": PairsConfig(PairTile(8, 32, 4, 2), PairTile(16, 128, 4, 2)),
}
GATES = {"silu": moe.SILU, "clamped": moe.Gate("clamped", alpha=1.702, limit=0.7), "relu2": moe.Gate("relu2")}


def _problem(
    storage, *, num_tokens, gate="silu", hidden_size=96, intermediate_size=64, skew=1.0, dtype=torch.float32, block=32
):
    problem = make_problem(
        num_tokens=num_tokens, num_experts=5, top_k=3, hidden_size=hidden_size, intermediate_size=intermediate_size,
        dtype=dtype, gate=GATES[gate], has_biases=gate == "clamped", skew=skew,
    )  # fmt: skip
    return pack_experts(problem, storage, block=block)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("storage", ["mxfp4", "fp8"])
@pytest.mark.table(most=3)
def test_packed_mixtures_equal_their_specification(storage, gate, config):
    # the hidden size is no multiple of the larger tiles, and of fp8 no multiple of a block
    sizes = {"hidden_size": 72, "intermediate_size": 40} if storage == "fp8" else {}
    problem = _problem(storage, num_tokens=2 if config == "pairs" else 11, gate=gate, **sizes)
    out, expected = problem.call(moe_triton.fused_moe, config=CONFIGS[config]), problem.call(moe.fused_moe)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("num_tokens", "skew"), [(1, 1.0), (2, 0.0), (4, 30.0), (17, 30.0), (64, 0.0), (64, 30.0)])
@pytest.mark.parametrize("storage", ["mxfp4", "fp8"])
@pytest.mark.table(most=3)
def test_steps_of_any_size_equal_their_specification(storage, num_tokens, skew):
    problem = _problem(storage, num_tokens=num_tokens, gate="clamped", hidden_size=64, intermediate_size=32, skew=skew)
    out, expected = problem.call(moe_triton.fused_moe), problem.call(moe.fused_moe)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("config", ["tiles", "swapped", "pairs"])
@pytest.mark.parametrize("storage", ["mxfp4", "fp8"])
def test_half_precision_rounds_as_the_specification_does(storage, config):
    problem = _problem(storage, num_tokens=2 if config == "pairs" else 7, dtype=torch.float16)
    out, expected = problem.call(moe_triton.fused_moe, config=CONFIGS[config]), problem.call(moe.fused_moe)
    torch.testing.assert_close(out, expected, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("num_tokens", [1, 3, 17, 130])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("storage", ["mxfp4", "fp8", "fp8_rows", "nvfp4", "nf4", "fp4"])
@pytest.mark.table
def test_planes_equal_the_specification(storage, gate, num_tokens):
    # of fp8 a block for each of several groups, and one for all; neither size is a multiple of a group
    sizes = {"hidden_size": 288, "intermediate_size": 96}
    if storage in TABLES:  # blocks of 64
        sizes = {"hidden_size": 320, "intermediate_size": 64}
    problem = _problem(storage, num_tokens=num_tokens, gate=gate, block=128, **sizes)
    arranged = dataclasses.replace(problem, gate_up=to_planes(problem.gate_up), down=to_planes(problem.down))
    assert arranged.gate_up is not problem.gate_up
    torch.testing.assert_close(arranged.call(moe_triton.fused_moe), problem.call(moe.fused_moe), rtol=1e-5, atol=1e-4)


def test_every_code_and_scale_has_its_value():
    """A hidden state of one 1 gives each weight by itself, in every code and under every scale without overflow."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(253, 1).view(1, 253 * 16, 16)
    scales = torch.arange(253, dtype=torch.uint8).repeat_interleave(16).view(1, -1, 1)
    up = Mxfp4Matrix(codes, scales)
    x = torch.eye(32)
    routing = route(
        torch.zeros(32, 1), num_experts=1, top_k=1, renormalize=False, weights_dtype=torch.float32, chunk_tokens=16
    )
    tiles = lay_out(routing, num_experts=1, block_m=32)
    out = grouped_gemm(x, up, tiles, Tile(128, 32, 4, 2), num_pairs=32, gate=None, swaps=True)
    expected = dense_matrix(up, 0, torch.float32).T
    assert torch.equal(out, expected)
    assert expected.abs().max() == 6 * 2.0**125


def test_fp8_values_are_the_same_without_the_type_e4m3(monkeypatch):
    byte_codes = torch.arange(256, dtype=torch.uint8).repeat(2).view(1, 16, 32).view(torch.float8_e4m3fn)
    matrix = Fp8Matrix(byte_codes.contiguous(), torch.full((1, 1, 1, 1), 0.5), 32, 32)
    expected = dense_matrix(matrix, 0, torch.float32)
    monkeypatch.setattr(triton_storage, "has_fp8_loads", lambda _: False)
    assert StoredTensors.of(matrix).storage == "fp8_bytes"
    out = torch.empty(16, 32)
    _store_tile[(1,)](StoredTensors.of(matrix).values, matrix.scales, out)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    problem = _problem("fp8", num_tokens=5)
    torch.testing.assert_close(problem.call(moe_triton.fused_moe), problem.call(moe.fused_moe), rtol=1e-5, atol=1e-4)


@triton.jit
def _store_tile(w_ptr, scales_ptr, out_ptr) -> None:
    """Write the whole tile of a matrix [16, 32] in "fp8_bytes"."""
    rows = tl.arange(0, 16)
    tile = load_tile(w_ptr, scales_ptr, None, 0, 16, 32, rows, 0, tl.float32, "fp8_bytes", 32, 32, 32, True, False)
    tl.store(out_ptr + rows[:, None] * 32 + tl.arange(0, 32)[None, :], tile)


def test_equal_fp8_blocks_of_one_expert_are_those_of_its_dense_matrix():
    problem = _problem("fp8", num_tokens=5)
    dense = dataclasses.replace(
        problem,
        gate_up=torch.stack([dense_matrix(problem.gate_up, e, torch.float32) for e in range(5)]),
        down=torch.stack([dense_matrix(problem.down, e, torch.float32) for e in range(5)]),
    )
    assert isinstance(problem.gate_up, Fp8Matrix)
    torch.testing.assert_close(problem.call(moe_triton.fused_moe), dense.call(moe_triton.fused_moe))
