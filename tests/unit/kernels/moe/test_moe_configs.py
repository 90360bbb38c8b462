"""Every cut of the mixture of experts compiles for a GPU and fits it. Needs Triton's compiler, but no GPU."""

import dataclasses
from pathlib import Path

import pytest

from kernels.moe.configs import (
    Fp8Config,
    PlanesConfig,
    PlanesPairsConfig,
    fitting,
    for_packed,
    grouped_config,
    grouped_configs,
    hopper_planes_config,
    planes_config,
    uses_pairs,
)
from tests.support.compiled_kernels import HOPPER_SHARED_BYTES, compile_kernels, needs_triton

SCRIPT = """
import sys

capability, shared_bytes = map(int, sys.argv[1:])

from kernels.moe import triton as moe_triton
from kernels.moe.configs import fitting, grouped_configs, pairs_config

HIDDEN, INTER, EXPERTS = 512, 256, 8
grouped = [fitting(config, shared_bytes=shared_bytes) for config in grouped_configs()]
configs = [*grouped, pairs_config(intermediate_size=256), pairs_config(intermediate_size=4096)]


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


with collect_kernels() as kernels:
    for config in configs:
        moe_triton.fused_moe(
            zeros(20, HIDDEN), zeros(20, EXPERTS + 1), zeros(EXPERTS, 2 * INTER, HIDDEN), zeros(EXPERTS, HIDDEN, INTER),
            top_k=2, renormalize=True, round_weights=True, shared=zeros(20, HIDDEN), config=config,
            pdl=capability >= 90,
        )
"""
SHARED_BYTES = {89: 99 * 1024, 90: HOPPER_SHARED_BYTES}  # by compute capability: the least and the most


@needs_triton
@pytest.mark.parametrize("capability", list(SHARED_BYTES))
@pytest.mark.full
def test_every_cut_compiles_for_a_gpu_and_fits_its_shared_memory(capability: int, tmp_path: Path) -> None:
    shared_bytes = SHARED_BYTES[capability]
    arguments = str(capability), str(shared_bytes)
    kernels = compile_kernels(SCRIPT, *arguments, cache=tmp_path, capability=capability)
    assert all(kernel.shared_bytes <= shared_bytes for kernel in kernels), kernels
    grouped = [kernel.has_wgmma for kernel in kernels if kernel.name == "_grouped_kernel"]
    assert grouped == [capability == 90] * 2 * len(grouped_configs()), kernels
    assert sum(kernel.name == "_pairs_down_kernel" for kernel in kernels) == 2


def test_an_h100_has_the_cuts_that_were_measured_there_and_others_have_fewer_stages() -> None:
    for config in grouped_configs():
        assert fitting(config, shared_bytes=SHARED_BYTES[90]) == config
        small = fitting(config, shared_bytes=SHARED_BYTES[89])
        assert 2 <= small.up.num_stages < config.up.num_stages
        assert 2 <= small.down.num_stages < config.down.num_stages


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (60, 4), (128, 8)])
def test_cuts_have_more_rows_the_more_tokens_there_are(num_experts: int, top_k: int) -> None:
    blocks = [
        grouped_config(num_pairs=num_tokens * top_k, num_experts=num_experts, itemsize=2).block_m
        for num_tokens in range(1, 8193)
    ]
    assert blocks == sorted(blocks)
    assert set(blocks) == {config.block_m for config in grouped_configs()}


def test_few_tokens_are_pairs_where_experts_are_many() -> None:
    def longest(num_experts: int, top_k: int) -> int:
        return sum(uses_pairs(num_tokens=n, top_k=top_k, num_experts=num_experts) for n in range(1, 100))

    assert longest(128, 8) == 4
    assert longest(60, 4) == 3
    assert longest(8, 2) == 1
    assert longest(4, 4) == 1


def test_packed_experts_have_tiles_whose_values_fit_a_threads_registers():
    for config in grouped_configs():
        reduced = for_packed(config)
        assert dataclasses.replace(reduced, up=config.up, down=config.down) == config
        for tile in (reduced.up, reduced.down):
            assert tile.block_n * tile.block_k <= 64 * 32 * tile.num_warps
            assert tile.block_n >= 16


@pytest.mark.parametrize(
    ("kind", "many"),
    [("fp8", Fp8Config), *((kind, PlanesConfig) for kind in ("int4", "mxfp4", "nvfp4"))],
)
def test_planes_are_multiplied_by_ever_larger_tiles_the_more_tokens_there_are(kind: str, many: type) -> None:
    found = [
        planes_config(kind, num_tokens=num_tokens, top_k=8, num_experts=128, can_round=True)
        for num_tokens in (3, 4, 5, 64, 512, 1024, 2048, 8192, 32768)
    ]
    assert [type(config) for config in found] == [PlanesConfig] * 5 + [many] * 4
    rows = [config.block_m for config in found if not isinstance(config, PlanesPairsConfig)]
    assert rows == sorted(rows)
    # no two pairs share a tile
    assert [isinstance(config, PlanesConfig) and config.chunk_tokens is None for config in found[:3]] == [
        True, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4", "int4", "nf4", "fp8"])
def test_one_token_has_matrix_vector_products_and_two_where_experts_are_many(kind: str) -> None:
    for top_k, num_experts in ((4, 32), (8, 32), (8, 128)):
        sizes = {"top_k": top_k, "num_experts": num_experts}
        found = [planes_config(kind, num_tokens=num_tokens, can_round=True, **sizes) for num_tokens in (1, 2, 3)]
        is_two = kind != "mxfp4" and (top_k, num_experts) != (8, 32)
        assert [isinstance(config, PlanesPairsConfig) for config in found] == [True, is_two, False]


def test_4_bits_are_multiplied_by_the_kernels_for_hopper_from_some_pairs_an_expert_on() -> None:
    def rows(num_tokens: int, kind: str = "int4") -> int | None:
        config = hopper_planes_config(kind, num_pairs=8 * num_tokens, num_experts=128)
        return config and config.block_m

    assert [rows(num_tokens) for num_tokens in (767, 768, 1024, 1025, 8192)] == [None, 64, 64, 128, 128]
    assert [rows(num_tokens, "mxfp4") for num_tokens in (511, 512)] == [None, 64]
    assert rows(8192, "fp8") is None


def test_few_tokens_are_routed_by_more_programs_unless_experts_are_many() -> None:
    def chunk(num_tokens: int, num_experts: int) -> int | None:
        config = planes_config("int4", num_tokens=num_tokens, top_k=8, num_experts=num_experts, can_round=True)
        assert isinstance(config, PlanesConfig)
        return config.chunk_tokens

    assert [chunk(8, num_experts) for num_experts in (64, 128, 256)] == [4, 4, 16]
    assert chunk(512, 128) == 16


def test_rounded_activations_have_the_tiles_that_were_the_fastest_for_their_number() -> None:
    def width(num_tokens: int) -> int:
        config = planes_config("fp8", num_tokens=num_tokens, top_k=8, num_experts=128, can_round=True)
        assert isinstance(config, Fp8Config)
        return config.up.width

    assert [width(num_tokens) for num_tokens in (1024, 2048, 2049, 8192)] == [256, 256, 128, 128]


def test_experts_whose_activations_may_not_be_rounded_are_unpacked_to_registers() -> None:
    config = planes_config("fp8", num_tokens=8192, top_k=8, num_experts=128, can_round=False)
    assert isinstance(config, PlanesConfig)
