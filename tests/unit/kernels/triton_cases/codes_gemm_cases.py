"""Products with codes against float64, through Triton's interpreter, and the PTX of their lookups, executed here."""

from __future__ import annotations

import pytest
import torch

from kernels.codes_configs import SCRATCH_SUMS, SCRATCH_TILES, CodesCut, CodesGemmConfig
from kernels.quant_codes import dequantize
from kernels.triton_codes_dequantize import dequantize as triton_dequantize
from kernels.triton_codes_gemm import (
    allocate_scratch,
    can_codes_gemm,
    codes_gemm,
    look_up_asm,
    permute_asm,
)
from tests.unit.kernels.triton_cases.codes_problem import TABLES, codes_problem
from tests.unit.kernels.triton_cases.ptx import run_ptx
from tests.unit.kernels.triton_cases.ragged import relative_error

F16 = torch.float16  # the interpreter has no bf16


def _error(num_rows, n, k, *, has_bias=False, block_m=8, block_n=32, splits=1, **options):
    weight, dense = codes_problem(n, k, dtype=F16, **options)
    x = torch.randn(num_rows, k).half()
    bias = torch.randn(n).half() if has_bias else None
    assert can_codes_gemm(x, weight)
    scratch = allocate_scratch(torch.device("cpu"))
    scratch.partial.fill_(float("nan"))
    config = CodesGemmConfig(block_m, block_n, splits, num_warps=4, num_stages=2, lookup="load")
    out = codes_gemm(x, weight, bias, scratch, config=config)
    assert int(scratch.arrivals.abs().sum()) == 0
    expected = x.double() @ dense.T
    return relative_error(out, expected if bias is None else expected + bias.double())


@pytest.mark.parametrize("plane", [32, 64])
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("splits", [1, 2])
def test_every_table_and_plane(splits, table, plane):
    assert _error(3, 40, 512, table=table, plane=plane, splits=splits) < 1e-3


@pytest.mark.parametrize("plane", [32, 64])
@pytest.mark.parametrize("k", [64, 320, 448])
@pytest.mark.parametrize("splits", [1, 3, 16])
def test_inputs_that_fill_no_tile_and_splits_without_any(k, plane, splits):
    assert _error(5, 33, k, plane=plane, splits=splits, has_bias=True) < 1e-3


@pytest.mark.parametrize("num_rows", [1, 17, 64, 100])
def test_tiles_of_rows(num_rows):
    assert _error(num_rows, 70, 256, block_m=16, splits=2, has_bias=True) < 1e-3


def test_what_is_not_taken():
    weight, _ = codes_problem(8, 128, dtype=F16)
    assert not can_codes_gemm(torch.randn(2, 128), weight)
    assert not can_codes_gemm(torch.randn(2, 128).bfloat16(), weight)
    assert not can_codes_gemm(torch.randn(200, 128).half(), weight)


@pytest.mark.parametrize("plane", [32, 64])
@pytest.mark.parametrize("k", [64, 320, 512])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dequantized_weights_equal_the_specification(k, plane, dtype):
    weight, _ = codes_problem(70, k, dtype=F16, plane=plane)
    assert torch.equal(triton_dequantize(weight, dtype), dequantize(weight, dtype))


@pytest.mark.parametrize("is_paired", [True, False])
@pytest.mark.parametrize("table", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_lookups_in_ptx_give_the_value_of_every_code(dtype, table, is_paired):
    weight, _ = codes_problem(8, 256, dtype=dtype, table=table, is_paired=is_paired)
    bits = [word & 0xFFFF for word in weight.rounded.view(torch.int16).tolist()]
    registers = {f"${2 * index + 2}": word & 0xFFFFFFFF for index, word in enumerate(weight.registers.tolist())}
    memory = {1000 + 128 * byte + 4 * 7: pair & 0xFFFFFFFF for byte, pair in enumerate(weight.pairs.tolist())}
    symbols = {"%laneid": 7, "code_tables": 1000}
    for word in weight.packed.flatten().view(torch.int32).tolist():
        for plane in range(4):
            byte = (word >> (8 * plane)) & 0xFF
            pairs = [bits[byte & 15] | bits[byte >> 4] << 16]
            pairs += [_nonnegative_zeros(pairs[0])]
            found = run_ptx(permute_asm(plane, is_paired=weight.is_paired), registers | {"$1": word & 0xFFFFFFFF}, {})
            assert _nonnegative_zeros(found) == pairs[1]
            found = run_ptx(look_up_asm(plane), symbols | {"$1": word & 0xFFFFFFFF}, memory)
            assert _nonnegative_zeros(found) == pairs[1]


def _nonnegative_zeros(pair):
    return sum(half << shift for shift in (0, 16) if (half := pair >> shift & 0xFFFF) & 0x7FFF)


def test_the_scratch_holds_every_split():
    for programs in (1, 264, 1056):
        cut = CodesCut("load", 128, 4, 4, 0, programs)
        for num_rows in (1, 8, 9, 64, 65, 128):
            for n in range(16, 30000, 496):
                for num_tiles in (1, 4, 8, 32, 112, 400):
                    config = cut.config(num_rows=num_rows, n=n, num_tiles=num_tiles)
                    tiles = -(-num_rows // config.block_m) * -(-n // config.block_n)
                    sums = tiles * config.splits * config.block_m * config.block_n
                    assert config.splits == 1 or (sums <= SCRATCH_SUMS and tiles <= SCRATCH_TILES)
                    assert config.splits <= max(1, num_tiles // 2)
