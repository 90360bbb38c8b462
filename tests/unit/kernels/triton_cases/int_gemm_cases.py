"""Products with integer weights against float64, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.reference import dequantize_int
from kernels.linear.splits import SCRATCH_SUMS, SCRATCH_TILES, SplitKScratch
from kernels.linear.triton_int import (
    IntGemmConfig,
    can_int_gemm,
    int_gemm,
    int_gemm_config,
)
from kernels.linear.triton_int import dequantize as triton_dequantize
from tests.unit.kernels.triton_cases.int_problem import int_problem
from tests.unit.kernels.triton_cases.ragged import relative_error


def _error(num_rows, n, k, *, has_bias=False, config=None, **options):
    weight, dense = int_problem(n, k, **options)
    x = torch.randn(num_rows, k).half()
    bias = torch.randn(n).half() if has_bias else None
    assert can_int_gemm(x, weight)
    scratch = SplitKScratch.allocate(torch.device("cpu"))
    scratch.partial.fill_(float("nan"))
    out = int_gemm(x, weight, bias, scratch, config=config)
    assert int(scratch.arrivals.abs().sum()) == 0
    expected = x.double() @ dense.T
    return relative_error(out, expected if bias is None else expected + bias.double())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 96, 128, -1])
@pytest.mark.parametrize("has_zeros", [True, False])
def test_every_kind_of_group(bits, group_size, has_zeros):
    config = IntGemmConfig(8, 32, 2, num_warps=4, num_stages=2)
    assert _error(3, 40, 384, bits=bits, group_size=group_size, has_zeros=has_zeros, config=config) < 1e-3


@pytest.mark.parametrize("num_rows", [1, 2, 17, 50])
def test_the_chosen_cut(num_rows):
    assert _error(num_rows, 70, 1024, has_bias=num_rows > 1) < 1e-3


@pytest.mark.parametrize(("k", "group_size"), [(96, 32), (160, 32), (416, -1), (1000, -1)])
@pytest.mark.parametrize("splits", [1, 3])
def test_inputs_that_fill_no_tile(k, group_size, splits):
    config = IntGemmConfig(16, 32, splits, num_warps=4, num_stages=2)
    assert _error(5, 33, k, group_size=group_size, config=config) < 1e-3


@pytest.mark.parametrize("splits", [1, 2, 5, 16])
def test_any_number_of_splits_also_more_than_there_are_tiles(splits):
    assert _error(2, 64, 512, config=IntGemmConfig(8, 64, splits, num_warps=4, num_stages=2), has_bias=True) < 1e-3


@pytest.mark.parametrize(("num_rows", "splits"), [(40, 2), (37, 1)])
def test_tiles_of_rows(num_rows, splits):
    config = IntGemmConfig(16, 32, splits, num_warps=4, num_stages=2)
    assert _error(num_rows, 70, 256, has_bias=True, config=config) < 1e-3


def test_bf16_scales():
    assert _error(2, 40, 256, scale_dtype=torch.bfloat16) < 1e-3


def test_a_row_is_the_same_in_any_tile_of_rows():
    weight, _ = int_problem(40, 256)
    x = torch.randn(20, 256).half()
    scratch = SplitKScratch.allocate(torch.device("cpu"))
    config = IntGemmConfig(8, 32, 2, num_warps=4, num_stages=2)
    whole = int_gemm(x, weight, None, scratch, config=config)
    assert torch.equal(whole[13:14], int_gemm(x[13:14], weight, None, scratch, config=config))


def test_what_is_not_taken():
    weight, _ = int_problem(8, 128)
    assert not can_int_gemm(torch.randn(2, 128), weight)
    assert not can_int_gemm(torch.randn(2000, 128).half(), weight)
    assert not can_int_gemm(torch.randn(2, 128).half(), int_problem(8, 128, group_size=16)[0])
    assert can_int_gemm(torch.randn(2, 40).half(), int_problem(8, 40, group_size=-1)[0])


def test_the_scratch_holds_every_chosen_split():
    for num_rows in (1, 5, 8, 16, 33, 64, 65, 128, 256, 257, 512):
        for n in range(16, 30000, 496):
            for num_tiles in (1, 4, 8, 32, 112, 400):
                config = int_gemm_config(num_rows=num_rows, n=n, num_tiles=num_tiles)
                tiles = -(-num_rows // config.block_m) * -(-n // config.block_n)
                sums = tiles * config.splits * config.block_m * config.block_n
                assert config.splits == 1 or (sums <= SCRATCH_SUMS and tiles <= SCRATCH_TILES)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("k", "group_size"), [(96, 16), (256, 128), (100, -1), (384, 64)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dequantized_weights_equal_the_specification(bits, k, group_size, dtype):
    weight, _ = int_problem(70, k, bits=bits, group_size=group_size)
    assert torch.equal(triton_dequantize(weight, dtype), dequantize_int(weight, dtype))
