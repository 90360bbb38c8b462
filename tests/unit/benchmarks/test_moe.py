"""What the mixture's benchmark compares with is right, and what it would sweep can run."""

import dataclasses

import pytest
import torch

from benchmarks.moe import check, describe_cut, make_table
from benchmarks.moe_problem import (
    SHAPES,
    MoeShape,
    count_hit,
    exact,
    floor_us,
    make_inputs,
    make_weights,
    specification,
    torch_grouped,
)
from kernels.moe.storage import dense_matrix

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


@pytest.mark.parametrize("storage", ["mxfp4", "fp8"])
def test_packed_weights_are_as_wide_as_dense_ones_and_their_floor_is_lower(storage: str) -> None:
    shape = dataclasses.replace(SMALL, storage=storage)
    weights, step = make_weights(shape, **CPU_BF16), make_inputs(shape, 9, **CPU_BF16)
    expected = exact(shape, weights, step)
    assert (specification(shape, weights, step).float() - expected).norm() < 0.02 * expected.norm()
    assert 0.05 < dense_matrix(weights.gate_up, 0, torch.float32).std() < 0.25
    floors = [floor_us(each, 1, 3, tb_s=3.35, tflop_s=989)[0] for each in (shape, SMALL)]
    assert floors[0] < 0.6 * floors[1]


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
    few, bound = floor_us(shape, 1, 8, tb_s=3.35, tflop_s=989)
    assert bound == "memory"
    assert few == pytest.approx(8 * 3 * 2048 * 768 * 2 / 3.35e6, rel=0.001)
    many, bound = floor_us(shape, 8192, 128, tb_s=3.35, tflop_s=989)
    assert bound == "compute"
    assert many == pytest.approx(8192 * 8 * 6 * 2048 * 768 / 989e6, rel=0.001)


def test_every_chosen_expert_is_counted_once() -> None:
    step = make_inputs(SMALL, 1, **CPU_BF16)
    assert count_hit(SMALL, step) == 3
    assert count_hit(SMALL, make_inputs(SMALL, 500, **CPU_BF16)) == 8


def test_the_table_names_the_cut_that_serving_takes() -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    assert [describe_cut(shape, tokens) for tokens in (1, 4, 64, 8192)] == ["pairs", "pairs", "16 rows", "128 rows"]
    numbers = {"experts_hit": 8.0, "us": 30.0, "floor_us": 22.5, "of_floor": 0.75, "torch_us": 900.0}
    result = {"shape": "qwen3-30b-a3b", "tokens": 1, "config": "pairs", "bound": "memory", "torch_grouped_us": 50.0}
    assert "75%" in make_table([result | numbers])


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
