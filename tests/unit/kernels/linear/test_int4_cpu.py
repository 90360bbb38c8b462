"""torch's 4-bit product on the CPU, against the product of the dequantised matrix."""

import pytest
import torch

from kernels.linear.int4_cpu import Int4Matrix, can_pack_int4, pack_int4
from kernels.linear.ops import IntLinear
from kernels.linear.reference import IntWeight, dequantize_int, make_int_weight


def weight(
    n: int, k: int, group_size: int, *, has_zeros: bool, bits: int = 4, order: torch.Tensor | None = None
) -> IntWeight:
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 1 << bits, (n, k), generator=generator).to(torch.uint8)
    scales = (torch.rand(k // group_size, n, generator=generator) + 0.5).half() / 64
    zeros = torch.randint(0, 1 << bits, scales.shape, generator=generator).to(torch.uint8) if has_zeros else None
    return make_int_weight(codes, scales, zeros, bits=bits, order=order)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(("n", "k", "group_size"), [(16, 64, 32), (48, 256, 64), (80, 256, 128), (32, 256, 256)])
def test_the_product_is_that_of_the_dequantised_matrix(
    n: int, k: int, group_size: int, has_zeros: bool, dtype: torch.dtype
) -> None:
    stored = weight(n, k, group_size, has_zeros=has_zeros)
    assert can_pack_int4(stored)
    packed, linear = pack_int4(stored, dtype), IntLinear()
    assert (packed.out_features, packed.in_features) == (n, k)
    matrix, bias = dequantize_int(stored, torch.float32), torch.linspace(-1, 1, n)
    for num_rows in (0, 1, 5, 40):
        x = torch.randn(num_rows, k, generator=torch.Generator().manual_seed(num_rows)).to(dtype)
        found = linear(x, packed, bias.to(dtype))
        assert found.dtype == dtype
        step = 1e-5 if dtype == torch.float32 else 2**-7
        expected = torch.nn.functional.linear(x.float(), matrix, bias.to(dtype).float())
        torch.testing.assert_close(found.float(), expected, rtol=step, atol=step * k**0.5 / 8)


def test_inputs_in_an_order_of_their_own_are_gathered() -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    stored = weight(16, 64, 32, has_zeros=True, order=order)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    expected = IntLinear()(x, stored, None)
    torch.testing.assert_close(IntLinear()(x, pack_int4(stored, x.dtype), None), expected, rtol=1e-5, atol=1e-5)


def test_other_matrices_keep_the_general_product() -> None:
    assert not can_pack_int4(weight(24, 64, 32, has_zeros=False))
    assert not can_pack_int4(weight(16, 64, 16, has_zeros=False))
    assert not can_pack_int4(weight(16, 64, 32, has_zeros=False, bits=8))
    assert isinstance(pack_int4(weight(16, 64, 32, has_zeros=False), torch.float32), Int4Matrix)
