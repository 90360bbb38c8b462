"""oneDNN's products of packed matrices on the CPU, against torch's own product and the specification of W8A8."""

import pytest
import torch

from kernels.dispatch import has_bf16_products, has_int8_products
from kernels.linear import onednn, w8a8
from kernels.linear.eight_bits import Int8Linear
from kernels.linear.ops import DenseLinear

ROWS = (0, 1, 3, 17, 200)  # 200: the product that unpacks its matrix where that is faster
NEEDS_BF16 = pytest.mark.skipif(not has_bf16_products(), reason="this CPU multiplies no bf16")
NEEDS_VNNI = pytest.mark.skipif(not has_int8_products(), reason="this CPU sums no products of bytes in 32 bits")


def matrix(n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)) * k**-0.5).to(dtype)


@NEEDS_BF16
@pytest.mark.parametrize("is_wide_faster", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("n", "k"), [(96, 64), (33, 47), (1, 8)])
def test_a_packed_matrix_gives_the_product_in_fp32_rounded_once(
    n: int, k: int, has_bias: bool, is_wide_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "_is_wide_faster", lambda: is_wide_faster)
    w, bias = matrix(n, k), matrix(1, n)[0] if has_bias else None
    assert onednn.can_pack(w)
    packed, linear = onednn.pack(w), DenseLinear()
    for num_rows in ROWS:
        x = matrix(num_rows, k) * k**0.5
        expected = torch.nn.functional.linear(x.float(), w.float(), None if bias is None else bias.float())
        found = linear(x, packed, bias)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=2**-7)


def test_only_bf16_matrices_are_packed() -> None:
    assert not onednn.can_pack(matrix(8, 8, torch.float32))
    assert not onednn.can_pack(matrix(8, 8, torch.float16))
    assert not onednn.can_pack(torch.empty(0, 8, dtype=torch.bfloat16))


@NEEDS_VNNI
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("input_scale", [None, 0.02])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_integer_matrix_gives_the_specified_product(
    dtype: torch.dtype, input_scale: float | None, has_bias: bool
) -> None:
    values, scales = w8a8.quantize_matrix_int8(matrix(300, 96))
    scale = None if input_scale is None else torch.tensor(input_scale)
    bias = matrix(1, 300, dtype)[0] if has_bias else None
    linear, packed = Int8Linear(), onednn.pack_int8(values, scales)
    for num_rows in ROWS:
        x = matrix(num_rows, 96, dtype) * 10
        x[:1] = 0  # a row without a largest value
        expected = linear(x, values, scales, bias, input_scale=scale)
        found = linear(x, packed, scales, bias, input_scale=scale)
        assert found.dtype == dtype
        # a value halfway between two integers may round the other way
        largest = float(x.float().abs().max()) if num_rows else 0.0
        step = largest / 127 if input_scale is None else input_scale
        torch.testing.assert_close(
            found.float(), expected.float(), rtol=2**-7, atol=127 * step * float(scales.max()) + 1e-6
        )


@NEEDS_VNNI
def test_the_largest_sums_are_exact() -> None:
    k = 65_536
    values = torch.full((16, k), 127, dtype=torch.int8)
    packed = onednn.pack_int8(values, torch.ones(16))
    found = onednn.int8_linear(torch.full((2, k), 1.0), packed, None)
    torch.testing.assert_close(found, torch.full((2, 16), 127.0 * k), rtol=1e-6, atol=0.0)
    assert not onednn.can_pack_int8(torch.empty(1, k + 1, dtype=torch.int8))


@NEEDS_VNNI
def test_values_that_are_not_finite_stay_in_their_row() -> None:
    values, scales = w8a8.quantize_matrix_int8(matrix(32, 64))
    x = matrix(3, 64).float()
    x[0, 5], x[1, 7] = float("nan"), float("inf")
    found = onednn.int8_linear(x, onednn.pack_int8(values, scales), None)
    assert not found[:2].isfinite().any()
    expected = Int8Linear()(x[2:], values, scales, None, input_scale=None)
    torch.testing.assert_close(found[2:], expected)


def test_pieces_of_a_matrix_round_as_the_whole() -> None:
    w = matrix(300, 64)
    for piece, whole in zip(w8a8.quantize_matrix_int8(w), w8a8.quantize_rows_int8(w), strict=True):
        torch.testing.assert_close(piece, whole, rtol=0, atol=0)
