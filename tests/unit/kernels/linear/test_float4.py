"""Matrices of 4-bit floats: their layout, exactness in 16 bits, and their bytes."""

from __future__ import annotations

import pytest
import torch

from kernels.e2m1 import dequantize_mxfp4, dequantize_nvfp4
from kernels.linear.float4 import dequantize_float4, float4_weight_bytes, make_float4_weight
from kernels.linear.ops import Float4Linear
from kernels.linear.planes import can_arrange_float4, dequantize_planes, from_e5m3, make_float4_planes, to_e5m3
from tests.unit.kernels.triton_cases.float4_problem import KINDS, float4_problem, planes_problem

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [32, 128, 160, 640])
def test_a_matrix_stays_what_it_is(k, kind, dtype):
    weight, dense = float4_problem(5, k, kind, dtype=dtype)
    torch.testing.assert_close(dequantize_float4(weight, torch.float32), dense.float(), rtol=1e-6, atol=0)
    x, bias = torch.randn(3, k), torch.randn(5)
    expected = torch.nn.functional.linear(x.double(), dense, bias.double()).float()
    torch.testing.assert_close(Float4Linear()(x, weight, bias), expected, rtol=1e-4, atol=1e-4)
    assert sum(each.nbytes for each in (weight.packed, weight.scales, weight.factors)) == float4_weight_bytes(
        5, k, weight.block
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(5, 32), (5, 128), (5, 160), (4097, 64)])
def test_a_matrix_in_planes_stays_what_it_is(n, k, kind):
    weight, dense = planes_problem(n, k, kind)
    torch.testing.assert_close(dequantize_planes(weight, torch.float32), dense.float(), rtol=1e-6, atol=0)
    x, bias = torch.randn(3, k), torch.randn(n)
    expected = torch.nn.functional.linear(x.double(), dense, bias.double()).float()
    torch.testing.assert_close(Float4Linear()(x, weight, bias), expected, rtol=1e-4, atol=1e-4)
    assert sum(each.nbytes for each in (weight.words, weight.scales, weight.factors)) == float4_weight_bytes(
        n, k, weight.block
    )


def test_scales_of_planes_are_all_of_e4m3_and_make_a_bfloat16_each():
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    octets = to_e5m3(scales)
    assert torch.equal(from_e5m3(octets).view(torch.uint8), scales.view(torch.uint8))
    factors = ((octets.int() << 4) + 0x7580).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(factors[1:].float(), scales[1:].float() * 2.0**118)
    assert can_arrange_float4(scales)
    assert not can_arrange_float4(torch.tensor([1, 127], dtype=torch.uint8).view(torch.float8_e4m3fn))
    assert can_arrange_float4(torch.tensor([128], dtype=torch.uint8))
    assert not can_arrange_float4(torch.tensor([129], dtype=torch.uint8))


def test_codes_of_blocks_whose_scale_is_zero_are_zero():
    scales = torch.tensor([[0, 56]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = make_float4_planes(torch.full((1, 16), 0x22, dtype=torch.uint8), scales, torch.ones(1))
    assert dequantize_planes(weight, torch.float32).tolist() == [[0.0] * 16 + [1.0] * 16]
    assert int(weight.words[0, 0, :16].abs().sum()) == 0


def test_words_hold_bytes_and_scales_of_four_planes():
    packed = torch.arange(256).to(torch.uint8).view(2, 128)
    scales = torch.arange(16).to(torch.uint8).view(2, 8)
    weight = make_float4_weight(packed, scales, torch.ones(2), torch.bfloat16)
    # The second tile of the second row; word 3, plane 2: inputs 128 + 64 + 6 and 7
    assert int(weight.packed[1, 1, 4 * 3 + 2]) == int(packed[1, 198 // 2])
    assert weight.scales[1, 1:].view(torch.uint8).tolist() == [12, 13, 14, 15]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_times_every_scale_is_exact_in_16_bits(dtype):
    codes = torch.arange(16, dtype=torch.uint8)
    row = (codes[0::2] | codes[1::2] << 4).repeat(127)[None]
    scales = torch.arange(127, dtype=torch.uint8)[None].view(torch.float8_e4m3fn)
    weight = make_float4_weight(row, scales, torch.ones(1), dtype)
    assert torch.equal(dequantize_float4(weight, dtype).float(), dequantize_nvfp4(row, scales, 1.0))
    # 28 exponents below the largest in float16; from the normal numbers of bfloat16 on, all
    exponents = torch.arange(1, 253) if dtype == torch.bfloat16 else torch.arange(110, 138)
    row, scales = row.view(-1)[:8].repeat(2 * len(exponents))[None], exponents.to(torch.uint8)[None]
    weight = make_float4_weight(row, scales, torch.ones(1), dtype)
    assert torch.equal(dequantize_float4(weight, torch.float32), dequantize_mxfp4(row, scales))


def test_scales_that_float16_lacks_are_zero_beside_far_larger_ones():
    row = torch.full((1, 32), 0x22, dtype=torch.uint8)  # ones
    weight = make_float4_weight(row, torch.tensor([[120, 90]], dtype=torch.uint8), torch.ones(1), torch.float16)
    assert dequantize_float4(weight, torch.float32).unique().tolist() == [0.0, 2.0**-7]
