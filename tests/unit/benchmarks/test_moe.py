"""What the mixture's benchmark compares with is right, and what it would sweep can run."""

import argparse
import dataclasses
import typing

import pytest
import torch

from benchmarks import moe_ranks
from benchmarks.moe import check, describe_cut, make_table
from benchmarks.moe_problem import (
    SHAPES,
    IntStorage,
    MoeShape,
    Storage,
    count_hit,
    exact,
    floor_us,
    make_inputs,
    make_weights,
    specification,
    torch_grouped,
)
from benchmarks.offline import engine_config
from kernels.moe.planes import PlanesMatrix
from kernels.moe.reference import fused_moe
from kernels.moe.storage import dense_matrix
from server.commands.bench.flags import add_offline_flags
from server.config.value_types import UsageError

SMALL = MoeShape(8, 3, 64, 32, round_weights=True)
CPU_BF16 = {"dtype": torch.bfloat16, "device": torch.device("cpu")}


@pytest.mark.parametrize("num_tokens", [1, 33])
def test_torchs_ways_give_the_same(num_tokens: int) -> None:
    weights, step = make_weights(SMALL, **CPU_BF16), make_inputs(SMALL, num_tokens, **CPU_BF16)
    expected = exact(SMALL, weights, step)
    for way in (specification, torch_grouped):
        out = way(SMALL, weights, step)
        assert out.dtype == torch.bfloat16
        assert (out.float() - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize(
    ("storage", "integers"),
    [
        *((storage, None) for storage in ("mxfp4", "fp8", "fp8-rows", "nvfp4", "nf4")),
        ("int", IntStorage(4, 32, has_zeros=True)),
        ("int", IntStorage(8, 16, False)),
    ],
)
def test_packed_weights_are_as_wide_as_dense_ones_and_their_floor_is_lower(
    storage: Storage, integers: IntStorage | None
) -> None:
    small = dataclasses.replace(SMALL, intermediate_size=64)
    shape = dataclasses.replace(small, storage=storage, integers=integers)
    weights, step = make_weights(shape, **CPU_BF16), make_inputs(shape, 9, **CPU_BF16)
    expected = exact(shape, weights, step)
    assert (specification(shape, weights, step).float() - expected).norm() < 0.02 * expected.norm()
    assert 0.05 < dense_matrix(weights.gate_up, 0, torch.float32).std() < 0.25
    floors = [floor_us(each, 1, 3, bytes_s=3.35e12, flops_s=989e12)[0] for each in (shape, small)]
    assert floors[0] < 0.6 * floors[1]


@pytest.mark.parametrize("storage", ["mxfp4", "fp8", "fp8-rows", "int"])
def test_the_sweep_of_row_kernels_has_weights_that_they_take(storage: Storage) -> None:
    integers = IntStorage(4, 32, has_zeros=True) if storage == "int" else None
    shape = dataclasses.replace(SMALL, intermediate_size=64, storage=storage, integers=integers)
    for is_arranged in (True, False):
        weights = make_weights(shape, is_arranged=is_arranged, **CPU_BF16)
        assert isinstance(weights.gate_up, PlanesMatrix) == isinstance(weights.down, PlanesMatrix) == is_arranged


@pytest.mark.parametrize("storage", ["dense", "fp8"])
def test_the_specification_in_float32_takes_16_bit_weights_too(storage: Storage) -> None:
    shape = dataclasses.replace(SMALL, storage=storage)
    weights, step = make_weights(shape, is_arranged=False, **CPU_BF16), make_inputs(shape, 9, **CPU_BF16)
    out = specification(shape, weights, dataclasses.replace(step, x=step.x.float()))
    assert out.dtype == torch.float32
    expected = exact(shape, weights, step)
    assert (out - expected).norm() < 0.02 * expected.norm()


def test_bytes_of_a_weight() -> None:
    found = {name: SHAPES[name].bytes_per_weight * 8 for name in SHAPES if SHAPES[name].integers is not None}
    awq = {f"{name}-awq": 4.25 for name in ("qwen3-30b-a3b", "glm-4.7-flash", "qwen3-next-80b-a3b")}
    others = {"qwen3-30b-a3b-gptq-8bit": 8.125, "glm-4.5-air-gptq": 4.125, "glm-4.5-air-int4": 4.5}
    assert found == awq | others


def test_a_wrong_result_is_not_timed() -> None:
    weights, step = make_weights(SMALL, **CPU_BF16), make_inputs(SMALL, 5, **CPU_BF16)
    right = specification(SMALL, weights, step)
    assert check(SMALL, weights, step, lambda _: right)["error"] < 0.02
    with pytest.raises(AssertionError):
        check(SMALL, weights, step, lambda _: right * 1.1)
    with pytest.raises(AssertionError, match="two runs differ"):
        check(SMALL, weights, step, lambda _: right + torch.rand(1))


def test_the_floor_is_memory_for_few_tokens_and_products_for_many() -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    few, bound = floor_us(shape, 1, 8, bytes_s=3.35e12, flops_s=989e12)
    assert bound == "memory"
    assert few == pytest.approx(8 * 3 * 2048 * 768 * 2 / 3.35e6, rel=0.001)
    many, bound = floor_us(shape, 8192, 128, bytes_s=3.35e12, flops_s=989e12)
    assert bound == "compute"
    assert many == pytest.approx(8192 * 8 * 6 * 2048 * 768 / 989e6, rel=0.001)


def test_every_chosen_expert_is_counted_once() -> None:
    step = make_inputs(SMALL, 1, **CPU_BF16)
    assert count_hit(SMALL, step) == 3
    assert count_hit(SMALL, make_inputs(SMALL, 500, **CPU_BF16)) == 8


def test_the_table_names_the_cut_that_serving_takes() -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    rows = [describe_cut(shape, tokens, planes=None) for tokens in (1, 4, 64, 8192)]
    assert rows == ["pairs", "pairs", "16 rows", "128 rows"]
    planes = [describe_cut(shape, tokens, planes="fp8") for tokens in (1, 4, 64, 256, 8192)]
    assert planes == ["planes, pairs", "planes, 16 rows", "planes, 16 rows", "planes, 32 rows", "planes, 64 rows"]
    assert describe_cut(SHAPES["gpt-oss-20b-mxfp4"], 1, planes="mxfp4") == "planes, pairs"
    numbers = {"experts_hit": 8.0, "us": 30.0, "floor_us": 22.5, "of_floor": 0.75, "torch_us": 900.0}
    result = {"shape": "qwen3-30b-a3b", "tokens": 1, "config": "pairs", "bound": "memory", "torch_grouped_us": 50.0}
    assert "75%" in make_table([result | numbers])


@pytest.mark.parametrize("storage", typing.get_args(Storage))
def test_ranks_with_whole_experts_add_up_to_one(storage: Storage) -> None:
    integers = IntStorage(4, 32, has_zeros=True) if storage == "int" else None
    shape = dataclasses.replace(SMALL, storage=storage, num_experts=7, intermediate_size=64, integers=integers)
    weights, step = make_weights(shape, **CPU_BF16), make_inputs(shape, 20, **CPU_BF16)
    assert moe_ranks.shares(shape, 2) == [range(3), range(3, 7)]
    counts = moe_ranks.pairs_of_ranks(shape, step, 2)
    assert sum(counts) == 20 * 3
    moe_ranks.check(shape, weights, step, 2, fused_moe)
    with pytest.raises(AssertionError):  # every rank has the first experts
        moe_ranks.check(shape, weights, step, 2, lambda *of, **how: fused_moe(*of, **how | {"first_expert": 0}))


def test_parts_of_experts_are_timed_where_blocks_are_not_cut() -> None:
    fits = {name: [size for size in (2, 4, 8) if moe_ranks.can_cut(SHAPES[name], size)] for name in SHAPES}
    assert fits["mixtral-8x7b"] == [2, 4, 8]
    assert fits["gpt-oss-20b-mxfp4"] == [2]
    assert fits["qwen3-30b-a3b-fp8"] == [2]
    assert fits["qwen3-30b-a3b-awq"] == [2]
    assert fits["glm-4.5-air-int4"] == [2, 4]
    assert fits["qwen3-30b-a3b-fp8-rows"] == fits["qwen3-30b-a3b-nvfp4"] == [2, 4, 8]
    assert fits["qwen3-30b-a3b-nf4"] == [2, 4]
    result = {"shape": "gpt-oss-20b-mxfp4", "ranks": 4, "tokens": 8, "busiest": 0.4, "whole_us": 9.0, "parts_us": None}
    assert "cut blocks" in moe_ranks.make_table([result])


def test_a_benchmark_of_the_engine_takes_whole_experts() -> None:
    parser = argparse.ArgumentParser()
    add_offline_flags(parser)
    arguments = ["single", "--shape", "qwen3-30b-a3b", "--expert-parallel"]
    config = engine_config(parser.parse_args([*arguments, "--tensor-parallel-size", "2"]))[1]
    assert (config.tensor_parallel_size, config.is_expert_parallel) == (2, True)
    with pytest.raises(UsageError, match="--expert-parallel needs --tensor-parallel-size 2 or more, and it is 1"):
        engine_config(parser.parse_args(arguments))


def test_candidates_fit_a_hopper_gpu() -> None:
    pytest.importorskip("triton")
    from benchmarks.moe_sweep import compile_jobs, pair_candidates, tile_candidates

    for block_m in (16, 32, 64, 128):
        for is_gated in (False, True):
            tiles = tile_candidates(block_m, is_gated=is_gated)
            assert len(tiles) == len(set(tiles)) > 5
            matrices = 2 if is_gated else 1
            for tile in tiles:
                assert (block_m + matrices * tile.block_n) * tile.block_k * 2 * tile.num_stages <= 227 * 1024
    assert len(set(pair_candidates())) == len(pair_candidates())
    assert len(compile_jobs(SHAPES)) == len(SHAPES) * len(compile_jobs(["mixtral-8x7b"]))
