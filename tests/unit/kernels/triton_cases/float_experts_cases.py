"""Experts in FP8 by output, NVFP4, NF4 and FP4 against their specification, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kernels.e2m1 import E2M1_TABLE
from kernels.moe import reference as moe
from kernels.moe import triton as moe_triton
from kernels.moe.configs import GroupedConfig, PairsConfig, PairTile, Tile
from kernels.moe.storage import dense_matrix
from kernels.moe.storage_lut4 import TABLES, Lut4Matrix
from kernels.moe.storage_nvfp4 import Nvfp4Matrix
from kernels.moe.triton_grouped import grouped_gemm
from kernels.moe.triton_route import lay_out, route
from tests.unit.kernels.triton_cases.moe_problem import make_problem, pack_experts

CONFIGS = {
    "tiles": GroupedConfig(16, Tile(16, 32, 4, 2, group_m=3), Tile(16, 64, 4, 2, group_m=2)),
    "swapped": GroupedConfig(16, Tile(16, 128, 4, 2), Tile(16, 32, 4, 2), swaps=True),
    "pairs": PairsConfig(PairTile(8, 32, 4, 2), PairTile(16, 512, 4, 2)),
}
# (hidden size, intermediate size): blocks are whole, tiles are not
WIDTHS = {"fp8_rows": (72, 40), "nvfp4": (80, 48), "nf4": (192, 64), "fp4": (64, 192)}


def _problem(storage, *, num_tokens, skew=1.0, gate=moe.SILU, dtype=torch.float32):
    hidden_size, intermediate_size = WIDTHS[storage]
    problem = make_problem(
        num_tokens=num_tokens, num_experts=5, top_k=3, hidden_size=hidden_size, intermediate_size=intermediate_size,
        dtype=dtype, gate=gate, has_biases=gate.kind == "clamped", skew=skew,
    )  # fmt: skip
    return pack_experts(problem, storage)


@pytest.mark.parametrize("num_tokens", [1, 8, 64])
@pytest.mark.parametrize("storage", WIDTHS)
def test_steps_of_1_8_and_64_rows_equal_their_specification(storage, num_tokens):
    problem = _problem(storage, num_tokens=num_tokens)
    out, expected = problem.call(moe_triton.fused_moe), problem.call(moe.fused_moe)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("gate", [moe.SILU, moe.Gate("clamped", alpha=1.702, limit=0.7), moe.Gate("relu2")])
@pytest.mark.parametrize("storage", WIDTHS)
@pytest.mark.table
def test_every_cut_and_gate_equals_its_specification(storage, gate, config):
    problem = _problem(storage, num_tokens=2 if config == "pairs" else 11, gate=gate, skew=3.0)
    out, expected = problem.call(moe_triton.fused_moe, config=CONFIGS[config]), problem.call(moe.fused_moe)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("storage", WIDTHS)
def test_half_precision_rounds_as_the_specification_does(storage):
    problem = _problem(storage, num_tokens=7, dtype=torch.float16)
    out, expected = problem.call(moe_triton.fused_moe, config=CONFIGS["tiles"]), problem.call(moe.fused_moe)
    torch.testing.assert_close(out, expected, rtol=5e-3, atol=5e-3)


def _weights_by_kernel(matrix):
    """The transpose of the only expert's matrix, [K, N] fp32: each hidden state of one 1 gives its weights."""
    k = matrix.shape[2]
    routing = route(
        torch.zeros(k, 1), num_experts=1, top_k=1, renormalize=False, weights_dtype=torch.float32, chunk_tokens=16
    )
    tiles = lay_out(routing, num_experts=1, block_m=32)
    return grouped_gemm(torch.eye(k), matrix, tiles, Tile(128, 32, 4, 2), num_pairs=k, gate=None, swaps=True)


def test_every_nvfp4_code_and_scale_has_its_value():
    codes = torch.arange(256, dtype=torch.uint8).repeat(127).view(1, 127 * 32, 8)
    scales = torch.arange(127, dtype=torch.uint8).repeat_interleave(32).view(1, -1, 1).view(torch.float8_e4m3fn)
    matrix = Nvfp4Matrix(codes, scales.contiguous(), torch.full((1, 1), 0.75))
    expected = dense_matrix(matrix, 0, torch.float32)
    # the kernel rounds scale times factor before it multiplies the codes
    torch.testing.assert_close(_weights_by_kernel(matrix), expected.T, rtol=1e-6, atol=0)
    assert expected.max() == max(E2M1_TABLE) * 448 * 0.75


@pytest.mark.parametrize("kind", TABLES)
def test_every_code_of_a_table_has_its_value(kind):
    codes = torch.arange(256, dtype=torch.uint8).view(1, 8, 32)
    matrix = Lut4Matrix(codes, torch.arange(1.0, 9.0).view(1, 8, 1), kind)
    expected = dense_matrix(matrix, 0, torch.float32)
    assert torch.equal(_weights_by_kernel(matrix), expected.T)
    assert expected[0].unique().numel() > 2
