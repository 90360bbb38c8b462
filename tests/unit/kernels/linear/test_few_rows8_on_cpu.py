"""The Hopper product of few rows of 8 bits on the CPU: its pipeline, shares of tiles, scales and masks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernels.linear import reference, w8a8
from kernels.linear.few_rows_configs import FewRowsConfig
from kernels.linear.splits import SplitKScratch

kernel = pytest.importorskip("kernels.linear.gluon_few_rows", reason="needs triton 3.6", exc_type=ImportError)

# N, K: whole tiles, and outputs, inputs and blocks of scales that end within one
SHAPES = [(256, 1024), (200, 1040), (72, 16)]


@pytest.fixture(autouse=True, params=["forwards", "backwards"])
def _on_cpu(monkeypatch, request):
    from tests.support.hopper_on_cpu import put_on_cpu

    put_on_cpu(monkeypatch, kernel, "_kernel", is_backwards=request.param == "backwards")


def _check(monkeypatch, kind, num_rows, n, k, config, *, rows=128, programs=5, has_bias=False):
    processors = SimpleNamespace(multi_processor_count=programs)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    dense, factors = torch.randn(n, k), torch.logspace(-1, 1, num_rows)[:, None]
    x, bias = torch.randn(num_rows, k) * factors, torch.randn(n) if has_bias else None
    scratch = SplitKScratch.allocate(torch.device("cpu"), capacity=programs * 2 * config.block_n * 64)
    scratch.partial.fill_(float("nan"))
    if kind == "integers":
        x, w = w8a8.quantize_rows_int8(x), w8a8.quantize_rows_int8(dense)
        expected = w8a8.int8_linear(*x, *w, bias, torch.float32)
    elif kind == "rows":
        x, w = reference.quantize_rows(x), reference.quantize_rows(dense)
        expected = reference.rows_linear(*x, *w, bias, torch.float32)
    else:
        x, w = reference.quantize_groups(x, 128), reference.quantize_blocks(dense, rows, 128)
        expected = reference.blocks_linear(*x, *w, bias, torch.float32, rows=rows, columns=128)
    out = kernel.few_rows_linear(
        *x, *w, bias, config,
        dtype=torch.float32, rows_per_scale=rows if kind == "blocks" else 0, scratch=scratch, pdl=True,
    )  # fmt: skip
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)
    assert not scratch.arrivals.any()


@pytest.mark.parametrize("kind", ["rows", "integers", "blocks"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("is_whole", [True, False])
def test_products_equal_their_specifications(kind, n, k, is_whole, monkeypatch):
    for num_rows, tile in ((2, (64, 2, 2, 4, 64)), (9, (64, 1, 3, 4, 64)), (64, (128, 4, 2, 8, 128))):
        config = FewRowsConfig(*tile, is_whole)
        _check(monkeypatch, kind, num_rows, n, k, config, has_bias=num_rows == 9)


@pytest.mark.parametrize("programs", [1, 2, 3, 7, 16, 40])
def test_any_number_of_programs_shares_the_tiles(programs, monkeypatch):
    for n, k in SHAPES[:2]:
        _check(monkeypatch, "blocks", 3, n, k, FewRowsConfig(64, 1, 2, 4, 64, False), programs=programs)
        _check(monkeypatch, "rows", 3, n, k, FewRowsConfig(64, 1, 2, 4, 64), programs=programs)


@pytest.mark.parametrize("rows", [1, 24, 64])
def test_scales_of_blocks_of_fewer_rows(rows, monkeypatch):
    _check(monkeypatch, "blocks", 5, 200, 1040, FewRowsConfig(128, 2, 2, 8, 64), rows=rows)
