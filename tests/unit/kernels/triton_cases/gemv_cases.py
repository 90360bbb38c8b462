"""The skinny GEMM against float64, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kernels.elementwise.triton import gelu_tanh_and_mul, silu_and_mul
from kernels.linear.triton_gemv import GemvConfig, allocate_scratch, fitting, gated_gemv, gemv, gemv_config
from tests.unit.kernels.triton_cases.ragged import relative_error


def _error(num_rows, n, k, *, has_bias=False, config=None):
    x, w = torch.randn(num_rows, k).half(), torch.randn(n, k).half()
    bias = torch.randn(n).half() if has_bias else None
    scratch = allocate_scratch(torch.device("cpu"))
    scratch.partial.fill_(float("nan"))
    out = gemv(x, w, bias, scratch, config=config)
    assert int(scratch.arrivals.abs().sum()) == 0
    expected = x.double() @ w.double().T
    return relative_error(out, expected + bias.double() if bias is not None else expected)


@pytest.mark.parametrize("num_rows", [1, 2, 5, 32, 50])
def test_gemv_with_the_chosen_config(num_rows):
    assert _error(num_rows, 70, 1024, has_bias=num_rows > 1) < 1e-3


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_gemv_at_any_number_of_splits(num_rows, splits):
    config = GemvConfig(block_n=16, block_k=64, splits=splits, num_warps=4, num_stages=2, uses_dot=num_rows > 1)
    assert _error(num_rows, 40, 512, has_bias=True, config=config) < 1e-3


@pytest.mark.parametrize("num_rows", [1, 2, 8, 32, 64])
@pytest.mark.parametrize(
    ("n", "k"), [(4096, 1024), (1024, 2048), (1024, 3072), (151936, 1024), (4096, 14336), (512, 512)]
)
def test_chosen_configs_divide_k(num_rows, n, k):
    config = gemv_config(num_rows=num_rows, n=n, k=k)
    assert k % (config.splits * config.block_k) == 0


def test_the_scratch_holds_every_chosen_split():
    scratch = allocate_scratch(torch.device("cpu"))
    for num_rows in range(1, 65):
        for n in range(16, 8192, 48):
            for k in (512, 1024, 2048, 3072, 4096, 14336):
                config = gemv_config(num_rows=num_rows, n=n, k=k)
                tiles, padded = -(-n // config.block_n), max(8, 1 << (num_rows - 1).bit_length())
                fits = tiles * config.splits * config.block_n * padded <= scratch.partial.numel()
                assert config.splits == 1 or (fits and tiles <= scratch.arrivals.numel())


def test_configs_fit_smaller_gpus_and_stay_as_they_are_on_an_h100():
    for num_rows in (1, 8, 16, 32, 64):
        for n, k in ((4096, 4096), (2048, 4096), (28672, 4096), (5120, 17408), (2048, 2048), (12352, 2560)):
            config = gemv_config(num_rows=num_rows, n=n, k=k)
            assert fitting(config, num_rows=num_rows, shared_bytes=232_448) == config
            small = fitting(config, num_rows=num_rows, shared_bytes=101_376)
            tile = 2 * small.block_k * (small.block_n + max(8, num_rows))
            assert not config.uses_dot or tile * (small.num_stages - 1) <= 101_376


def test_a_grid_has_as_many_tiles_as_a_device_takes():
    for n in (50_280, 131_071, 131_072, 151_936, 201_088, 262_144, 262_400, 500_000):
        for k in (512, 640, 1024, 1536, 2048, 2560, 2880, 3072, 4096, 5120, 5376):
            for num_rows in (1, 2, 8, 16, 32, 64):
                assert -(-n // gemv_config(num_rows=num_rows, n=n, k=k).block_n) <= 65_535


@pytest.mark.parametrize(("num_rows", "block_m", "splits"), [(100, 64, 2), (37, 16, 1), (130, 128, 4)])
def test_gemv_in_tiles_of_rows(num_rows, block_m, splits):
    config = GemvConfig(64, 128, splits, num_warps=4, num_stages=2, prefetch=0, block_m=block_m)
    assert _error(num_rows, 200, 1024, has_bias=True, config=config) < 1e-3


@pytest.mark.parametrize("num_rows", [1, 3, 16, 40])
@pytest.mark.parametrize(("n", "k"), [(40, 576), (32, 2880)])
def test_gemv_where_k_is_no_multiple_of_a_block(num_rows, n, k):
    assert _error(num_rows, n, k, has_bias=True) < 1e-3


def test_gemv_where_the_last_split_lacks_columns():
    config = GemvConfig(block_n=16, block_k=128, splits=4, num_warps=4, num_stages=2)
    assert _error(3, 40, 1344, has_bias=True, config=config) < 1e-3


@pytest.mark.parametrize("is_gelu", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, 32])
@pytest.mark.parametrize(("n", "k"), [(72, 512), (60, 576)])
def test_a_gated_product_is_a_product_and_its_activation(n, k, num_rows, is_gelu):
    x, w = torch.randn(num_rows, k).half(), (torch.randn(2 * n, k) * k**-0.5).half()
    uses_dot = num_rows > 1
    config = GemvConfig(16, 64, 1, num_warps=4, num_stages=2, uses_dot=uses_dot)
    scratch = allocate_scratch(torch.device("cpu"))
    out = gated_gemv(x, w, scratch, is_gelu=is_gelu, config=config)
    activate = gelu_tanh_and_mul if is_gelu else silu_and_mul
    expected = activate(gemv(x, w, None, scratch, config=config))
    if num_rows == 32:  # numpy's sums of so many rows depend on the matrix' width on some processors (AMD's Zen 5)
        torch.testing.assert_close(out, expected, rtol=2**-8, atol=1e-3)
    else:
        assert torch.equal(out, expected)
