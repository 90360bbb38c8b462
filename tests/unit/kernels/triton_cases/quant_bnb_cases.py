"""Triton products with bitsandbytes's matrices against their torch specification, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import reference, triton_bitsandbytes


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_rows", "n", "k"), [(1, 40, 256), (5, 33, 300), (17, 64, 128), (100, 40, 64)])
def test_int8_product_is_as_specified(num_rows, n, k, has_bias):
    x, integers = torch.randn(num_rows, k).half(), reference.quantize_int8(torch.randn(n, k))
    bias = torch.randn(n).half() if has_bias else None
    out = triton_bitsandbytes.linear_int8(x, *integers, bias)
    torch.testing.assert_close(out, reference.linear_int8(x, *integers, bias), rtol=2e-3, atol=1e-2)


def test_products_read_rows_of_a_wider_x():
    x, integers = torch.randn(3, 192).half()[:, 64:128], reference.quantize_int8(torch.randn(16, 64))
    out = triton_bitsandbytes.linear_int8(x, *integers, None)
    torch.testing.assert_close(out, reference.linear_int8(x, *integers, None), rtol=2e-3, atol=1e-2)


@pytest.mark.parametrize(("n", "k"), [(3, 64), (2, 192), (2, 2368)])
def test_matrices_unpack_as_specified(n, k):
    integers = reference.quantize_int8(torch.randn(n, k))
    out = triton_bitsandbytes.dequantize_int8(*integers, torch.float32)
    torch.testing.assert_close(out, reference.dequantize_int8(*integers, torch.float32), rtol=1e-6, atol=0)
