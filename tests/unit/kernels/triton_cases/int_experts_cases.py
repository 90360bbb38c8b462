"""Experts in 4- and 8-bit integers against their specification, through Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton
import triton.language as tl

from kernels.moe import reference as moe
from kernels.moe import triton as moe_triton
from kernels.moe.configs import GroupedConfig, PairsConfig, PairTile, PlanesTile, Tile
from kernels.moe.planes import PlanesMatrix, to_planes
from kernels.moe.storage_int import IntMatrix, pack_codes, pack_groups
from kernels.moe.triton_planes import planes_gemm
from kernels.moe.triton_planes_decode import bits_of_zero, int4_asm
from kernels.moe.triton_route import lay_out, route
from kernels.moe.triton_storage import StoredTensors, load_tile
from tests.unit.kernels.triton_cases.int_experts_problem import STORAGES, Integers, pack_integers, random_integers
from tests.unit.kernels.triton_cases.moe_problem import make_problem
from tests.unit.kernels.triton_cases.ptx import run_ptx

CONFIGS = {
    "chosen": None,
    "tiles": GroupedConfig(16, Tile(64, 32, 4, 2, group_m=3), Tile(128, 64, 4, 2, group_m=2)),
    "swapped": GroupedConfig(16, Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), swaps=True),
    "pairs": PairsConfig(PairTile(32, 64, 4, 2), PairTile(64, 128, 4, 2)),
}
# hidden and intermediate sizes: ragged where groups allow it, and no multiple of a tile's depth
SIZES = {128: (128, 128), 64: (128, 64), 32: (64, 96), 24: (72, 48), 12: (60, 36), -1: (74, 45)}


def _problem(kind: Integers, *, num_tokens, gate=moe.SILU, has_biases=False, skew=1.0, dtype=torch.float32):
    hidden_size, intermediate_size = SIZES[kind.group_size]
    problem = make_problem(
        num_tokens=num_tokens, num_experts=4, top_k=2, hidden_size=hidden_size, intermediate_size=intermediate_size,
        dtype=dtype, gate=gate, has_biases=has_biases, skew=skew,
    )  # fmt: skip
    return pack_integers(problem, kind)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.table(most=4)  # each storage has its tile below
def test_mixtures_of_integers_equal_their_specification(storage, config):
    problem = _problem(STORAGES[storage], num_tokens=2 if config == "pairs" else 8)
    out, expected = problem.call(moe_triton.fused_moe, config=CONFIGS[config]), problem.call(moe.fused_moe)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("num_tokens", "skew"), [(1, 1.0), (8, 30.0), (64, 0.0), (64, 30.0)])
@pytest.mark.parametrize("storage", ["packed", "packed_channel", "odd_groups"])
@pytest.mark.table(most=2)
def test_steps_of_any_size_equal_their_specification(storage, num_tokens, skew):
    problem = _problem(STORAGES[storage], num_tokens=num_tokens, skew=skew)
    out, expected = problem.call(moe_triton.fused_moe), problem.call(moe.fused_moe)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("gate", [moe.Gate("clamped", alpha=1.702, limit=0.7), moe.Gate("relu2")])
def test_other_activations_and_biases_are_those_of_the_specification(gate):
    problem = _problem(STORAGES["packed"], num_tokens=3, gate=gate, has_biases=True)
    for config in ("tiles", "pairs"):
        out = problem.call(moe_triton.fused_moe, config=CONFIGS[config])
        torch.testing.assert_close(out, problem.call(moe.fused_moe), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("config", ["tiles", "swapped", "pairs"])
@pytest.mark.parametrize("storage", ["awq", "packed", "packed_8bit"])
def test_half_precision_rounds_as_the_specification_does(storage, config):
    problem = _problem(STORAGES[storage], num_tokens=2 if config == "pairs" else 7, dtype=torch.float16)
    out, expected = problem.call(moe_triton.fused_moe, config=CONFIGS[config]), problem.call(moe.fused_moe)
    torch.testing.assert_close(out, expected, rtol=5e-3, atol=5e-3)


# Of 4 bits; hidden and intermediate sizes, neither a multiple of 128 where groups allow it
PLANES = {
    "awq": ("awq", 384, 256),
    "gptq": ("gptq", 384, 256),
    "wide_groups": (Integers(group_size=256, has_zeros=False), 512, 256),
    "by_64": (Integers(group_size=64, has_zeros=False), 192, 320),
    "by_64_zeros": ("packed_asymmetric", 320, 192),
    "by_32": ("packed", 288, 160),
    "by_32_zeros": (Integers(), 160, 288),
    "channel": ("packed_channel", 202, 77),
    "channel_zeros": ("channel_zeros", 150, 266),
}
GATES = {"silu": moe.SILU, "clamped": moe.Gate("clamped", alpha=1.702, limit=0.7), "relu2": moe.Gate("relu2")}


# each pair of values of two columns is in a row
PLANES_TABLE = [
    (storage, list(GATES)[(i + 2 * j) % 3], num_tokens)
    for i, storage in enumerate(PLANES)
    for j, num_tokens in enumerate((1, 3, 17, 65))
]


@pytest.mark.parametrize(("storage", "gate", "num_tokens"), PLANES_TABLE)
@pytest.mark.table(most=3)
def test_integers_in_planes_equal_the_specification(storage, gate, num_tokens):
    kind, hidden_size, intermediate_size = PLANES[storage]
    problem = make_problem(
        num_tokens=num_tokens, num_experts=3, top_k=2, hidden_size=hidden_size, intermediate_size=intermediate_size,
        dtype=torch.float32, gate=GATES[gate], has_biases=gate == "clamped",
    )  # fmt: skip
    problem = pack_integers(problem, STORAGES[kind] if isinstance(kind, str) else kind)
    arranged = dataclasses.replace(problem, gate_up=to_planes(problem.gate_up), down=to_planes(problem.down))
    assert isinstance(arranged.gate_up, PlanesMatrix)
    assert isinstance(arranged.down, PlanesMatrix)
    torch.testing.assert_close(arranged.call(moe_triton.fused_moe), problem.call(moe.fused_moe), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("plane", range(4))
def test_the_ptx_of_a_plane_gives_each_code_less_each_zero_point(plane, has_zeros, dtype):
    is_half = dtype == torch.float16
    code = int4_asm(plane, has_zero_points=has_zeros, is_half=is_half)
    for first in range(16):
        for zero in range(16) if has_zeros else (8,):
            second = (5 * first + zero) % 16
            others = 0xA53C96F0 & ~(0x000F000F << (4 * plane))
            inputs = {
                "$1": others | (first | second << 16) << (4 * plane),
                "$2": bits_of_zero(is_half) & 0xFFFFFFFF | zero | zero << 16,
            }
            pair = torch.tensor([run_ptx(code, inputs, {})], dtype=torch.uint32).view(dtype)
            assert pair.tolist() == [first - zero, second - zero]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_every_value_under_every_zero_point_is_exact_in_planes(group_size, has_zeros, dtype):
    """A hidden state of one 1 gives each weight by itself, from each place of a word."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(32, 16).view(1, 32, 256)
    num_groups = 256 // group_size
    count = 32 * num_groups
    scales = torch.linspace(1.0, 2.0, count).view(1, 32, -1) * torch.logspace(-12, 12, 32, base=2.0).view(1, 32, 1)
    zeros = torch.arange(count, dtype=torch.uint8).view(1, 32, -1) % 16 if has_zeros else None
    groups = pack_groups(scales.to(dtype), zeros)
    matrix = IntMatrix(pack_codes(codes, 4), groups, 256, num_groups, 4, dtype, has_zeros=has_zeros)
    arranged = to_planes(matrix)
    assert isinstance(arranged, PlanesMatrix)
    routing = route(
        torch.zeros(256, 1), num_experts=1, top_k=1, renormalize=False, weights_dtype=torch.float32, chunk_tokens=16
    )  # fmt: skip
    tiles = lay_out(routing, num_experts=1, block_m=64)
    out = planes_gemm(torch.eye(256), arranged, tiles, PlanesTile(32, 4, 2), block_m=64, num_pairs=256, gate=None)
    assert torch.equal(out, matrix.dense(0, torch.float32).T)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_value_under_every_zero_point_is_exact(bits, has_zeros, dtype):
    """All integers in each place of a word; scales use every bit of their mantissas, over their whole range."""
    count = 1 << bits
    codes = torch.arange(count, dtype=torch.uint8).repeat(16, 2).view(1, 16, -1)
    scales = torch.linspace(1.0, 2.0, 32).view(1, 16, 2) * torch.logspace(-12, 12, 16, base=2.0).view(1, 16, 1)
    zeros = torch.linspace(0, count - 1, 32).round().to(torch.uint8).view(1, 16, 2) if has_zeros else None
    k = codes.shape[2]
    matrix = IntMatrix(
        pack_codes(codes, bits), pack_groups(scales.to(dtype), zeros), k, 2, bits, dtype, has_zeros=has_zeros
    )
    exact = codes.double() - (zeros.double().repeat_interleave(count, 2) if has_zeros else count / 2)
    exact *= scales.to(dtype).double().repeat_interleave(count, 2)
    assert torch.equal(matrix.dense(0, torch.float32).double(), exact[0])
    assert torch.equal(_tile(matrix, block_k=k).double(), exact[0])


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.table
def test_a_tile_past_the_end_of_its_inputs_is_finite_there(storage):
    kind = STORAGES[storage]
    k = SIZES[kind.group_size][1]
    matrix = random_integers(1, 16, k, kind, torch.Generator().manual_seed(0))
    tile = _tile(matrix, block_k=256)
    assert torch.equal(tile[:, :k], matrix.dense(0, torch.float32))
    assert tile.isfinite().all()


def _tile(matrix: IntMatrix, *, block_k: int) -> torch.Tensor:
    """The first block_k inputs of a matrix of 16 outputs, as the twin loads them: [16, block_k] fp32."""
    stored, k = StoredTensors.of(matrix), matrix.in_features
    out = torch.empty(16, block_k)
    _store_tile[(1,)](
        stored.values, stored.scales, out, k, STORAGE=stored.storage, COLUMNS=stored.columns, BLOCK_K=block_k,
        EVEN_K=k % block_k == 0,
    )  # fmt: skip
    return out


@triton.jit
def _store_tile(
    w_ptr, groups_ptr, out_ptr, k,
    STORAGE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.arange(0, 16)
    tile = load_tile(
        w_ptr, groups_ptr, None, 0, 16, k, rows, 0, tl.float32, STORAGE, 1, COLUMNS, BLOCK_K, EVEN_K, False
    )
    tl.store(out_ptr + rows[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :], tile)
