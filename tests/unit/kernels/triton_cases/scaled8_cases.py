"""Products of 8-bit values with scales against their torch specifications, through Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.linear import reference, triton_scaled8, w8a8
from kernels.linear.scaled8_configs import Scaled8Config, scaled8_config
from kernels.linear.splits import SplitKScratch

FEW = Scaled8Config(8, 32, 128, 4, 2)
TILED = Scaled8Config(32, 64, 128, 4, 2, is_few=False, group=2)


def _scratch():
    scratch = SplitKScratch.allocate(torch.device("cpu"))
    scratch.partial.fill_(float("nan"))
    return scratch


def _check_blocks(num_rows, n, k, rows, config, *, has_bias=False, columns=128):
    x = reference.quantize_groups(torch.randn(num_rows, k), columns)
    w = reference.quantize_blocks(torch.randn(n, k) * torch.rand(n, 1), rows, columns)
    bias = torch.randn(n) if has_bias else None
    scratch, sizes = _scratch(), {"rows": rows, "columns": columns}
    out = triton_scaled8.blocks_linear(*x, *w, bias, scratch, **sizes, dtype=torch.float32, config=config)
    assert int(scratch.arrivals.abs().sum()) == 0
    expected = reference.blocks_linear(*x, *w, bias, torch.float32, **sizes)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)


def _check_int8(num_rows, n, k, config, *, has_bias=False, is_static=False):
    x = torch.randn(num_rows, k)
    x = w8a8.quantize_by_int8(x, torch.tensor(0.02)) if is_static else w8a8.quantize_rows_int8(x)
    w = w8a8.quantize_rows_int8(torch.randn(n, k))
    bias, scratch = torch.randn(n) if has_bias else None, _scratch()
    out = triton_scaled8.int8_linear(*x, *w, bias, scratch, dtype=torch.float32, config=config)
    expected = w8a8.int8_linear(*x, *w, bias, torch.float32)
    # to the bit but for the order of factors: the sums are of integers
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_rows", [1, 8, 64, 300])
def test_rows_scaled_by_block(num_rows):
    config = scaled8_config(num_rows=num_rows, n=130, k=256, block_k=128)
    _check_blocks(num_rows, 130, 256, 128, config, has_bias=True)


@pytest.mark.parametrize("num_rows", [1, 8, 64, 300])
def test_rows_of_integers(num_rows):
    config = scaled8_config(num_rows=num_rows, n=130, k=256, block_k=128)
    _check_int8(num_rows, 130, 256, config, has_bias=True)


@pytest.mark.parametrize("config", [FEW, replace(FEW, splits=3), TILED])
@pytest.mark.parametrize(("num_rows", "n", "k", "rows"), [(5, 40, 300, 64), (70, 130, 200, 32), (3, 200, 1000, 128)])
def test_blocks_that_fill_no_tile(num_rows, n, k, rows, config):
    _check_blocks(num_rows, n, k, rows, config)


@pytest.mark.parametrize("config", [FEW, TILED])
def test_blocks_of_fewer_columns(config):
    _check_blocks(9, 33, 96, 32, replace(config, block_k=32), columns=32, has_bias=True)


@pytest.mark.parametrize("config", [FEW, replace(FEW, splits=3), TILED])
@pytest.mark.parametrize(("num_rows", "n", "k", "is_static"), [(5, 33, 300, False), (70, 130, 100, True)])
def test_integers_that_fill_no_tile(num_rows, n, k, is_static, config):
    _check_int8(num_rows, n, k, config, is_static=is_static)


@pytest.mark.parametrize(("num_rows", "n", "k"), [(70, 130, 256), (33, 64, 208)])
def test_tiles_loaded_by_the_copy_engine(num_rows, n, k):
    config = replace(TILED, has_tma=True)
    _check_blocks(num_rows, n, k, 128, config, has_bias=True)
    _check_int8(num_rows, n, k, config, has_bias=True)


@pytest.mark.parametrize("rows", [32, 64, 128])
def test_one_scale_of_a_tile_and_several(rows):
    _check_blocks(70, 130, 256, rows, TILED)


@pytest.mark.parametrize("k", [32, 100, 5000])
def test_activations_become_integers_as_specified(k):
    x = torch.randn(3, 2 * k)[:, :k]
    x[1, 7:] = 0
    x[2] = torch.arange(k) % 255 - 127  # also halves, which go to the even side
    x[2, 3:] /= 2
    for found, expected in (
        (triton_scaled8.quantize_rows_int8(x), w8a8.quantize_rows_int8(x)),
        (triton_scaled8.quantize_by_int8(x, torch.tensor(0.01)), w8a8.quantize_by_int8(x, torch.tensor(0.01))),
    ):
        assert found[0].dtype == torch.int8
        torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=0)
        # the interpreter's quotients are off by a bit at times
        assert (found[0].int() - expected[0].int()).abs().max() <= 1
        assert (found[0] == expected[0]).float().mean() > 0.99


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_row(bad):
    x = torch.randn(3, 128)
    x[1, 30] = bad
    w = w8a8.quantize_rows_int8(torch.randn(40, 128))
    for quantize in (w8a8.quantize_rows_int8, triton_scaled8.quantize_rows_int8):
        rounded = quantize(x)
        assert not rounded[1][1].isfinite()
        out = triton_scaled8.int8_linear(*rounded, *w, None, _scratch(), dtype=torch.float32, config=FEW)
        assert out[[0, 2]].isfinite().all()
        assert not out[1].isfinite().any()
