"""Products with 4-bit floats against float64, through Triton's interpreter, and the PTX of their lookups, executed."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.float4 import dequantize_float4
from kernels.linear.lut4_configs import Lut4GemmConfig, float4_gemm_config
from kernels.linear.splits import SplitKScratch
from kernels.linear.triton_float4 import dequantize as triton_dequantize
from kernels.linear.triton_float4 import float4_gemm, scaled_asm
from kernels.linear.triton_lut4 import can_lut4_gemm
from tests.unit.kernels.triton_cases.float4_problem import KINDS, float4_problem
from tests.unit.kernels.triton_cases.ptx import run_ptx
from tests.unit.kernels.triton_cases.ragged import relative_error

F16 = torch.float16  # the interpreter has no bf16


def _error(x, n, kind, *, has_bias=False, config=None, **cut):
    weight, dense = float4_problem(n, x.shape[1], kind, dtype=F16)
    bias = torch.randn(n).half() if has_bias else None
    assert can_lut4_gemm(x, weight)
    scratch = SplitKScratch.allocate(torch.device("cpu"))
    scratch.partial.fill_(float("nan"))
    options = {"block_m": 8, "block_n": 32, "splits": 1, "num_warps": 4, "num_stages": 2, "is_shared": False}
    out = float4_gemm(x, weight, bias, scratch, config=config or Lut4GemmConfig(**options | cut))
    assert int(scratch.arrivals.abs().sum()) == 0
    expected = x.double() @ dense.T
    return relative_error(out, expected if bias is None else expected + bias.double())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_rows", "block_m"), [(1, 8), (8, 8), (64, 64), (300, 64)])
def test_rows(num_rows, block_m, kind):
    assert _error(torch.randn(num_rows, 256).half(), 70, kind, block_m=block_m, splits=2, has_bias=True) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [32, 160, 448])
@pytest.mark.parametrize("splits", [1, 3, 16])
def test_inputs_that_fill_no_step_and_splits_without_any(k, splits, kind):
    assert _error(torch.randn(5, k).half(), 33, kind, splits=splits, has_bias=True) < 1e-3


def test_inputs_of_one_block_of_16():
    assert _error(torch.randn(2, 16).half(), 33, "nvfp4") < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_the_cut_of_devices_without_the_lookups_in_ptx(kind):
    block = {"mxfp4": 32, "nvfp4": 16}[kind]
    config = float4_gemm_config(num_rows=8, n=70, k=320, block=block, is_shared=False)
    assert _error(torch.randn(8, 320).half(), 70, kind, config=config) < 1e-3


def test_rows_of_a_wider_x():
    assert _error(torch.randn(3, 192).half()[:, 64:128], 16, "mxfp4") < 1e-3


def test_what_is_not_taken():
    weight, _ = float4_problem(8, 128, "nvfp4", dtype=F16)
    assert not can_lut4_gemm(torch.randn(2, 128), weight)
    assert not can_lut4_gemm(torch.randn(2, 128).bfloat16(), weight)
    assert not can_lut4_gemm(torch.randn(2, 132).half()[:, :128], weight)  # rows that are not aligned
    assert not can_lut4_gemm(torch.randn(2, 160).half()[:, 1:129], weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [32, 320, 512])
@pytest.mark.parametrize("stored", [F16, torch.float32])
def test_dequantized_weights_equal_the_specification(k, stored, kind):
    weight, _ = float4_problem(70, k, kind, dtype=stored)
    for dtype in (F16, torch.float32):
        assert torch.equal(triton_dequantize(weight, dtype), dequantize_float4(weight, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, F16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_lookup_in_ptx_gives_both_values_of_every_byte_scaled(kind, dtype):
    weight, _ = float4_problem(3, 128, kind, dtype=dtype)
    ones = weight.factors.clone().fill_(1.0)
    expected = dequantize_float4(type(weight)(**vars(weight) | {"factors": ones}), dtype)
    pairs = [pair & 0xFFFFFFFF for pair in weight.pairs.view(torch.int32).flatten().tolist()]
    memory = {1000 + 128 * byte + 4 * 7: pair for byte, pair in enumerate(pairs)}
    name = "bf16x2" if dtype == torch.bfloat16 else "f16x2"
    for t, row in ((t, row) for t in range(len(weight.packed)) for row in range(3)):
        words = [word & 0xFFFFFFFF for word in weight.packed[t, row].view(torch.int32).tolist()]
        for plane in range(4):
            bits = (int(weight.scales[t, row]) >> (8 * plane) & 255) << weight.shift
            symbols = {"%laneid": 7, "code_tables": 1000, "$2": bits << 16 | bits}
            found = [run_ptx(scaled_asm(plane, name), symbols | {"$1": word}, memory) for word in words]
            start = (t * 4 + plane) * weight.block
            wanted = expected[row, start : start + weight.block].contiguous().view(torch.int32)
            assert found == [value & 0xFFFFFFFF for value in wanted.tolist()]
