"""4-bit floats: what each code means, and that rounding finds the nearest."""

from __future__ import annotations

import pytest
import torch

from kernels.e2m1 import (
    E2M1_TABLE,
    decode_e8m0,
    dequantize_mxfp4,
    dequantize_nvfp4,
    quantize_mxfp4,
    quantize_nvfp4,
    unpack_e2m1,
)


def test_every_byte_is_two_values_the_lower_half_first():
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    values = unpack_e2m1(packed)
    for byte in range(256):
        row, column = divmod(byte, 16)
        assert values[row, 2 * column] == E2M1_TABLE[byte & 15]
        assert values[row, 2 * column + 1] == E2M1_TABLE[byte >> 4]


def test_codes_are_floats_of_two_bits_of_exponent_and_one_of_mantissa():
    for code, value in enumerate(E2M1_TABLE):
        exponent, mantissa = code >> 1 & 3, code & 1
        size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        assert abs(value) == size
        assert torch.tensor(value).signbit() == bool(code & 8)


def test_scales_of_mxfp4_are_powers_of_two():
    scales = decode_e8m0(torch.tensor([0, 1, 126, 127, 128, 254, 255], dtype=torch.uint8))
    assert scales.tolist() == [2.0**-127, 2.0**-126, 0.5, 1.0, 2.0, 2.0**127, float("inf")]


@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 96)])
def test_what_the_formats_have_is_kept_by_rounding(shape):
    values = torch.tensor(E2M1_TABLE)[torch.randint(0, 16, shape)]
    values[..., ::16] = 6.0
    exponents = torch.randint(-3, 4, (*shape[:-1], shape[-1] // 32)).float().exp2()
    wide = values * exponents.repeat_interleave(32, -1)
    assert torch.equal(dequantize_mxfp4(*quantize_mxfp4(wide)), wide)
    scales = torch.randint(8, 16, (*shape[:-1], shape[-1] // 16)).float()
    scales.flatten()[0] = 448.0
    wide = values * scales.repeat_interleave(16, -1) * 0.25
    assert torch.equal(dequantize_nvfp4(*quantize_nvfp4(wide)), wide)


@pytest.mark.parametrize(
    ("quantize", "dequantize"), [(quantize_mxfp4, dequantize_mxfp4), (quantize_nvfp4, dequantize_nvfp4)]
)
def test_rounding_errs_as_four_bits_let_expect(quantize, dequantize):
    w = torch.randn(64, 256)
    error = (dequantize(*quantize(w)) - w).norm() / w.norm()
    assert 0.05 < error < 0.15


def test_zeros_stay_zeros():
    for quantize, dequantize in ((quantize_mxfp4, dequantize_mxfp4), (quantize_nvfp4, dequantize_nvfp4)):
        assert not dequantize(*quantize(torch.zeros(2, 64))).any()
