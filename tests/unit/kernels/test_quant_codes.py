"""Matrices of 4-bit codes: the layout, and the tables that the lookups in registers and in shared memory read."""

from __future__ import annotations

import pytest
import torch

from kernels import quant_bnb
from kernels.quant_codes import codes_linear, dequantize, make_code_weight, unpack
from tests.unit.kernels.triton_cases.codes_problem import TABLES, codes_problem

DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plane", [32, 64])
@pytest.mark.parametrize("k", [64, 256, 320, 640])
def test_a_matrix_of_bitsandbytes_stays_what_it_is(k, plane, dtype):
    table = torch.tensor(quant_bnb.NF4_TABLE)
    packed, scales = quant_bnb.quantize_nf4(torch.randn(5, k))
    codes = torch.stack((packed >> 4, packed & 15), dim=-1).flatten(1)
    weight = make_code_weight(codes, scales, table, dtype, plane=plane)
    expected = quant_bnb.dequantize_4bit(packed, scales, table, torch.float32)
    assert torch.equal(dequantize(weight, torch.float32), expected)
    x = torch.randn(3, k)
    assert torch.equal(codes_linear(x, weight, None), x @ expected.T)


def test_bytes_hold_neighbours_and_words_four_planes():
    codes = (torch.arange(512) % 16).to(torch.uint8).view(2, 256)
    weight = make_code_weight(codes, torch.ones(2, 4), torch.arange(16.0), torch.bfloat16, is_paired=False)
    assert torch.equal(unpack(weight), codes)
    # The second tile of the second row; word 3, plane 2: inputs 128 + 64 + 6 and 7
    assert int(weight.packed[1, 1, 4 * 3 + 2]) == int(codes[1, 198] | codes[1, 199] << 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TABLES)
def test_pairs_are_the_values_of_both_halves_of_a_byte(name, dtype):
    weight, _ = codes_problem(2, 64, dtype=dtype, table=name)
    low, high = weight.pairs.view(dtype).view(256, 2).T
    assert torch.equal(low, weight.rounded.repeat(16))
    assert torch.equal(high, weight.rounded.repeat_interleave(16))


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_the_tables_of_bitsandbytes_can_be_paired_in_bf16(name):
    assert codes_problem(2, 64, dtype=torch.bfloat16, table=name)[0].is_paired
    assert not codes_problem(2, 64, dtype=torch.bfloat16, table=name, is_paired=False)[0].is_paired


def test_a_table_that_cannot_be_paired_keeps_its_order():
    table = torch.tensor([1.0] + [-1.0] * 15)
    weight = make_code_weight(torch.zeros(1, 64, dtype=torch.uint8), torch.ones(1, 1), table, torch.bfloat16)
    assert not weight.is_paired
    assert torch.equal(weight.table, table)
