"""Products of few rows in C against those of oneDNN and torch: all numbers of rows, ragged sizes, unknown orders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.dispatch import has_bf16_products, has_int8_products
from kernels.linear import onednn
from kernels.linear.int4_cpu import int4_linear, pack_int4
from kernels.linear.onednn import pack, pack_int8, packed_linear
from kernels.linear.reference import make_int_weight
from kernels.native import library, ops
from kernels.native.library import loaded, products_level, unload
from tests.support.native_library import compiled_library

BF16 = torch.bfloat16
ROWS = (1, 2, 3, 4, 5, 7, 8)
MANY_ROWS = (9, 13, 16, 17, 31, 32, 33, 47, 64, 100)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> Iterator[None]:
    if not has_bf16_products() or not has_int8_products():
        pytest.skip("this CPU has no products of bf16, or of bytes")
    with compiled_library(with_products=True):
        yield


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(BF16)


@pytest.fixture(params=[1, 2], ids=["AVX-512", "AMX"])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, ...]]:
    """Numbers of rows that are computed by these instructions, on other cores than Intel's without AMX."""
    monkeypatch.setattr(onednn, "_is_wide_faster", lambda: False)
    native = loaded()
    assert native is not None
    best = native.products_level
    native.products_level = native.use_products(request.param)
    if native.products_level != request.param:
        pytest.skip("this CPU has no AMX")
    yield ROWS + MANY_ROWS
    native.products_level = native.use_products(best)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions of products.c that were called."""
    names: list[str] = []
    for name in ("bf16_linear", "int8_linear", "rounded_int8_linear", "int4_linear"):
        function = getattr(ops, name)

        def call(*args: object, name: str = name, function: object = function, **named: object) -> torch.Tensor:
            names.append(name)
            return function(*args, **named)  # type: ignore[operator, no-any-return]

        monkeypatch.setattr(ops, name, call)
    return names


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("n", "k"), [(64, 32), (96, 64), (192, 160), (48, 32), (1024, 3072), (4096, 1024)])
def test_bf16_products(n: int, k: int, has_bias: bool, rows: tuple[int, ...], calls: list[str]) -> None:
    w, bias = draw(n, k), draw(n) if has_bias else None
    matrix = pack(w)
    for num_rows in rows:
        x = draw(num_rows, k)
        found = packed_linear(x, matrix, bias)
        exact = x.double() @ w.double().T + (0.0 if bias is None else bias.double())
        # one rounding of a sum in fp32
        bound = exact.abs() * 2.0**-8 + 2.0**-20 * (x.double().abs() @ w.double().abs().T)
        assert ((found.double() - exact).abs() <= bound).all()
    assert matrix.width is None or calls == ["bf16_linear"] * len(rows)


def test_a_row_has_the_same_product_beside_others(rows: tuple[int, ...]) -> None:
    matrix, x = pack(draw(256, 512)), draw(max(rows), 512)
    together = packed_linear(x, matrix, None)
    for i in range(max(rows)):
        assert torch.equal(packed_linear(x[i : i + 1], matrix, None)[0], together[i])


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (192, 192), (128, 64), (4096, 1024), (1024, 3072)])
def test_products_of_bytes_equal_those_of_onednn(
    n: int, k: int, has_bias: bool, rows: tuple[int, ...], calls: list[str]
) -> None:
    values, bias = torch.randint(-128, 128, (n, k), dtype=torch.int8), draw(n) if has_bias else None
    matrix, native = pack_int8(values, torch.rand(n)), loaded()
    assert native is not None
    for num_rows in rows:
        x = draw(num_rows, k)
        found = onednn.int8_linear(x, matrix, bias)
        unload()
        expected = onednn.int8_linear(x, matrix, bias)
        library._loaded[:] = [native]
        if bias is None:
            assert torch.equal(found, expected)
        else:
            torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=0.0)
    assert matrix.width is None or calls == ["rounded_int8_linear"] * len(rows)


def test_a_known_scale_rounds_all_rows(calls: list[str]) -> None:
    values, x, scale = torch.randint(-127, 128, (128, 64), dtype=torch.int8), draw(3, 64), torch.tensor(0.02)
    matrix = pack_int8(values, torch.rand(128))
    found = onednn.int8_linear(x, matrix, None, input_scale=scale)
    native, _ = loaded(), unload()
    assert native is not None
    assert torch.equal(found, onednn.int8_linear(x, matrix, None, input_scale=scale))
    library._loaded[:] = [native]
    assert matrix.width is None or calls == ["int8_linear"]


@pytest.mark.parametrize("has_zeros", [True, False])
@pytest.mark.parametrize(("n", "k", "group_size"), [(64, 32, 32), (192, 256, 64), (128, 512, 256), (1024, 3072, 128)])
def test_4_bit_products(
    n: int, k: int, group_size: int, has_zeros: bool, rows: tuple[int, ...], calls: list[str]
) -> None:
    codes = torch.randint(0, 16, (n, k)).to(torch.uint8)
    zeros = torch.randint(0, 16, (k // group_size, n)).to(torch.uint8) if has_zeros else None
    scales = (torch.rand(k // group_size, n) + 0.5) / 64
    matrix, bias = pack_int4(make_int_weight(codes, scales, zeros, bits=4, order=None), BF16), draw(n)
    if not matrix.is_in_blocks:
        pytest.skip("torch packs 4-bit weights in another order on this CPU")
    pairs = matrix.scales_zeros.double().repeat_interleave(group_size, dim=0)
    w = (codes.double().T - 8) * pairs[..., 0] + pairs[..., 1]
    all_rows = (*rows, 31, 32, 70)
    for num_rows in all_rows:
        x = draw(num_rows, k)
        found, exact = int4_linear(x, matrix, bias), x.double() @ w + bias.double()
        # more rows multiply weights that are rounded to bf16
        weights = 2.0**-18 if num_rows <= (4 if products_level() == ops.BY_AMX else 31) else 2.0**-8
        bound = exact.abs() * 2.0**-8 + weights * (x.double().abs() @ w.abs())
        assert ((found.double() - exact).abs() <= bound).all()
    assert calls == ["int4_linear"] * len(all_rows)


def test_numbers_that_are_not_finite_stay_so(rows: tuple[int, ...]) -> None:
    matrix, x = pack(draw(64, 64)), draw(3, 64)
    x[0, 3], x[1, 5] = float("nan"), float("inf")
    found = packed_linear(x, matrix, None)
    assert not found[:2].isfinite().any()
    assert found[2].isfinite().all()


@pytest.mark.parametrize(("n", "k"), [(33, 64), (64, 47), (1, 8), (300, 96)])
def test_ragged_matrices_are_left_to_onednn(n: int, k: int, calls: list[str]) -> None:
    w, x = draw(n, k), draw(2, k)
    torch.testing.assert_close(packed_linear(x, pack(w), None).float(), x.float() @ w.float().T, rtol=2**-7, atol=2**-5)
    assert not calls


def test_numbers_that_do_not_tell_the_order_are_left_to_onednn(calls: list[str]) -> None:
    matrix = pack(torch.zeros(192, 64, dtype=BF16))
    assert matrix.width is None
    assert not packed_linear(draw(1, 64), matrix, None).any()
    assert not calls


@pytest.mark.parametrize("n", [80, 144, 176])
def test_equal_numbers_at_both_ends_do_not_tell_the_order(n: int) -> None:
    w, values = draw(n, 64), torch.randint(-127, 128, (n, 64), dtype=torch.int8)
    for matrix in (w, values):
        matrix[:] = 0
        matrix[n - 32 : n - 16, 32:] = 1  # in no number that is compared
    x, packed = draw(2, 64), pack(w)
    torch.testing.assert_close(packed_linear(x, packed, None).float(), x.float() @ w.float().T, rtol=2**-7, atol=2**-5)
    assert packed.width is None
    assert pack_int8(values, torch.ones(n)).width is None


def test_equal_codes_at_both_ends_do_not_tell_the_order() -> None:
    codes = torch.randint(0, 16, (192, 64)).to(torch.uint8)
    codes[:64] = codes[-64:] = 5  # torch's order on a CPU without AVX-512 has the same bytes here
    matrix = pack_int4(make_int_weight(codes, torch.rand(2, 192), None, bits=4, order=None), BF16)
    assert not matrix.is_in_blocks


def test_a_transposed_matrix_is_packed() -> None:
    w, x = draw(64, 96).T, draw(2, 64)
    torch.testing.assert_close(packed_linear(x, pack(w), None).float(), x.float() @ w.float().T, rtol=2**-7, atol=2**-5)


def test_rows_that_amx_does_not_take_are_left_to_onednn(rows: tuple[int, ...], calls: list[str]) -> None:
    packed_linear(draw(9, 80), pack(draw(64, 80)), None)  # 80 inputs are no whole tiles
    packed_linear(draw(1 << 15, 64), pack(draw(64, 64)), None)
    assert calls == ([] if products_level() == ops.BY_AMX else ["bf16_linear"] * 2)


def test_an_intel_core_without_amx_leaves_many_rows_to_onednn(
    rows: tuple[int, ...], calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "_is_wide_faster", lambda: True)
    matrix, values = pack(draw(64, 80)), pack_int8(torch.randint(-127, 128, (64, 96), dtype=torch.int8), torch.rand(64))
    for num_rows in (8, 9):
        packed_linear(draw(num_rows, 80), matrix, None)
    for num_rows in (32, 33):
        onednn.int8_linear(draw(num_rows, 96), values, None)
    assert calls == ["bf16_linear", "rounded_int8_linear"]


def test_other_dtypes_are_left_to_onednn(calls: list[str]) -> None:
    values = torch.randint(-127, 128, (64, 64), dtype=torch.int8)
    onednn.int8_linear(torch.randn(2, 64), pack_int8(values, torch.rand(64)), None)
    assert not calls
