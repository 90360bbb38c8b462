"""Products with codes against float64, through Triton's interpreter, and the PTX of their lookups, executed here."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.lut4_configs import Lut4GemmConfig, lut4_gemm_config
from kernels.linear.reference import dequantize_lut4
from kernels.linear.splits import SplitKScratch
from kernels.linear.triton_lut4 import can_lut4_gemm, look_up_asm, lut4_gemm
from kernels.linear.triton_lut4 import dequantize as triton_dequantize
from tests.unit.kernels.triton_cases.lut4_problem import TABLES, lut4_problem
from tests.unit.kernels.triton_cases.ptx import run_ptx
from tests.unit.kernels.triton_cases.ragged import relative_error

F16 = torch.float16  # the interpreter has no bf16


def _error(x, n, *, table="nf4", has_bias=False, config=None, **cut):
    weight, dense = lut4_problem(n, x.shape[1], dtype=F16, table=table)
    bias = torch.randn(n).half() if has_bias else None
    assert can_lut4_gemm(x, weight)
    scratch = SplitKScratch.allocate(torch.device("cpu"))
    scratch.partial.fill_(float("nan"))
    options = {"block_m": 8, "block_n": 32, "splits": 1, "num_warps": 4, "num_stages": 2, "is_shared": False}
    out = lut4_gemm(x, weight, bias, scratch, config=config or Lut4GemmConfig(**options | cut))
    assert int(scratch.arrivals.abs().sum()) == 0
    expected = x.double() @ dense.T
    return relative_error(out, expected if bias is None else expected + bias.double())


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("splits", [1, 2])
def test_every_table(splits, table):
    assert _error(torch.randn(3, 512).half(), 40, table=table, splits=splits) < 1e-3


@pytest.mark.parametrize("k", [64, 320, 448])
@pytest.mark.parametrize("splits", [1, 3, 16])
def test_inputs_that_fill_no_tile_and_splits_without_any(k, splits):
    assert _error(torch.randn(5, k).half(), 33, splits=splits, has_bias=True) < 1e-3


@pytest.mark.parametrize("num_rows", [1, 17, 32])
def test_tiles_of_rows(num_rows):
    assert _error(torch.randn(num_rows, 256).half(), 70, block_m=16, splits=2, has_bias=True) < 1e-3


def test_the_cut_of_devices_without_the_lookups_in_ptx():
    config = lut4_gemm_config(num_rows=8, n=70, k=320, is_shared=False)
    assert _error(torch.randn(8, 320).half(), 70, config=config) < 1e-3


def test_rows_of_a_wider_x():
    assert _error(torch.randn(3, 192).half()[:, 64:128], 16) < 1e-3


def test_what_is_not_taken():
    weight, _ = lut4_problem(8, 128, dtype=F16)
    assert not can_lut4_gemm(torch.randn(2, 128), weight)
    assert not can_lut4_gemm(torch.randn(2, 128).bfloat16(), weight)
    assert not can_lut4_gemm(torch.randn(2, 132).half()[:, :128], weight)  # rows that are not aligned
    assert not can_lut4_gemm(torch.randn(2, 160).half()[:, 1:129], weight)


@pytest.mark.parametrize("k", [64, 320, 512])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dequantized_weights_equal_the_specification(k, dtype):
    weight, _ = lut4_problem(70, k, dtype=F16)
    assert torch.equal(triton_dequantize(weight, dtype), dequantize_lut4(weight, dtype))


def test_the_lookup_in_ptx_gives_both_values_of_every_byte():
    weight, _ = lut4_problem(8, 256, dtype=torch.bfloat16)
    pairs = [pair & 0xFFFFFFFF for pair in weight.pairs.view(torch.int32).flatten().tolist()]
    memory = {1000 + 128 * byte + 4 * 7: pair for byte, pair in enumerate(pairs)}
    symbols = {"%laneid": 7, "code_tables": 1000}
    for word in weight.packed.flatten().view(torch.int32).tolist():
        for plane in range(4):
            found = run_ptx(look_up_asm(plane), symbols | {"$1": word & 0xFFFFFFFF}, memory)
            assert found == pairs[(word >> (8 * plane)) & 0xFF]
