"""Integer weights: what is packed is what was meant, and the product is that of the dense matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.linear.ops import IntLinear
from kernels.linear.reference import dequantize_int, int_weight_bytes, make_int_weight, unpack_int
from tests.unit.kernels.triton_cases.int_problem import int_problem


@settings(max_examples=settings.default.max_examples * 2 // 5, deadline=None)
@given(st.integers(1, 70), st.integers(1, 300), st.sampled_from([4, 8]), st.integers(0, 99))
def test_packed_codes_come_back(n, k, bits, seed):
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    weight = make_int_weight(codes, torch.ones(1, n).half(), None, bits=bits)
    assert torch.equal(unpack_int(weight), codes)
    stored = weight.packed.numel() * 2 + weight.groups.numel() * 4
    assert stored == int_weight_bytes(n, k, bits=bits, num_groups=1)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [16, 32, 128, -1])
@pytest.mark.parametrize("has_zeros", [True, False])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16])
def test_dequantized_weights_are_exact(bits, group_size, has_zeros, scale_dtype):
    weight, dense = int_problem(40, 384, bits=bits, group_size=group_size, has_zeros=has_zeros, scale_dtype=scale_dtype)
    assert torch.equal(dequantize_int(weight, torch.float32).double(), dense)


@pytest.mark.parametrize("has_order", [False, True])
def test_the_product_is_that_of_the_dense_matrix(has_order):
    weight, dense = int_problem(24, 256, has_order=has_order)
    x, bias = torch.randn(5, 256), torch.randn(24)
    expected = x.double() @ dense.T + bias.double()
    torch.testing.assert_close(IntLinear()(x, weight, bias).double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("scale", "dtype"), [(0.5, torch.float16), (0.0, torch.float16), (7e4, torch.bfloat16), (1e-6, torch.bfloat16)]
)
def test_wide_scales_are_kept_in_the_16_bits_that_hold_them(scale, dtype):
    weight = make_int_weight(torch.zeros(2, 32, dtype=torch.uint8), torch.full((1, 2), scale), None, bits=4)
    assert weight.scale_dtype == dtype
    torch.testing.assert_close(weight.scales.float(), torch.full((1, 2), scale), rtol=4e-3, atol=0)
