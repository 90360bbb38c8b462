"""Triton row ops and the skinny GEMM on the device, against the torch specifications and float64."""

from __future__ import annotations

import pytest
import torch

from kernels.elementwise import reference as elementwise
from kernels.elementwise.reference import write_kv
from tests.unit.kernels.triton_cases.ragged import relative_error

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOLERANCE = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 1e-5}


def _randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 1024), (3, 4096), (300, 2560), (17, 8192)])
def test_norms_equal_their_specifications(tokens, size, dtype):
    from kernels.elementwise import triton as elementwise_triton

    x, residual, weight = (
        _randn(tokens, size, dtype=dtype),
        _randn(tokens, size, dtype=dtype),
        _randn(size, dtype=dtype),
    )
    for pdl, norm_dtype in ((False, dtype), (True, dtype), (True, torch.float32)):
        weight = weight.to(norm_dtype)
        normed = elementwise_triton.rms_norm(x, weight, 1e-6, pdl=pdl)
        assert relative_error(normed, elementwise.rms_norm(x, weight, 1e-6).double()) < TOLERANCE[dtype]
        pairs = zip(
            elementwise_triton.add_rms_norm(x, residual, weight, 1e-6, pdl=pdl),
            elementwise.add_rms_norm(x, residual, weight, 1e-6),
            strict=True,
        )
        assert all(relative_error(out, expected.double()) < TOLERANCE[dtype] for out, expected in pairs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 3072), (300, 14336), (5, 1000)])
def test_silu_and_mul_equals_its_specification(tokens, size, dtype):
    from kernels.elementwise.triton import silu_and_mul

    x = _randn(tokens, 2 * size, dtype=dtype) * 4
    assert relative_error(silu_and_mul(x, pdl=True), elementwise.silu_and_mul(x).double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 3072), (300, 14336), (5, 1000)])
def test_gelu_tanh_and_mul_equals_its_specification(tokens, size, dtype):
    from kernels.elementwise.triton import gelu_tanh_and_mul

    x = _randn(tokens, 2 * size, dtype=dtype) * 4
    assert relative_error(gelu_tanh_and_mul(x, pdl=True), elementwise.gelu_tanh_and_mul(x).double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "head_dim", "rotary_dim", "has_norm"), [
    (1, 16, 8, 128, 128, True), (300, 16, 8, 128, 128, True), (33, 32, 8, 128, 128, False),
    (300, 7, 1, 80, 80, False), (5, 12, 4, 256, 64, True), (129, 12, 4, 96, 96, True), (7, 5, 5, 64, 64, False),
])  # fmt: skip
def test_norm_rope_write_kv_equals_the_three_specifications(
    tokens, heads, kv_heads, head_dim, rotary_dim, has_norm, dtype
):
    from kernels.elementwise.triton_write_kv import norm_rope_write_kv

    qkv = _randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    weights = [_randn(head_dim, dtype=dtype) if has_norm else None for _ in range(2)]
    positions = torch.randint(0, 5000, (tokens,), device="cuda")
    angles = _randn(5000, rotary_dim)
    slots = torch.randperm(32 * 16, device="cuda")[:tokens]
    mine = [_randn(32, 16, kv_heads, head_dim, dtype=dtype) for _ in range(2)]
    theirs = [cache.clone() for cache in mine]
    q = norm_rope_write_kv(qkv, *weights, 1e-6, positions, angles, *mine, slots, num_heads=heads, pdl=True)
    parts = qkv.view(tokens, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    expected = list(parts[:2])
    if has_norm:
        expected = [elementwise.rms_norm(x, w, 1e-6) for x, w in zip(expected, weights, strict=True)]
    expected_q, expected_k = elementwise.apply_rope(*expected, positions, angles)
    write_kv(expected_k, parts[2], *theirs, slots)
    for out, wanted in ((q, expected_q), (mine[0], theirs[0])):
        assert relative_error(out, wanted.double()) < TOLERANCE[dtype]
    assert torch.equal(mine[1], theirs[1])


def test_keys_are_written_to_pools_of_more_than_2_to_the_31_elements():
    from kernels.elementwise.triton_write_kv import norm_rope_write_kv

    shape = (2**31 // (64 * 2 * 128) + 100, 64, 2, 128)
    pools = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    qkv = _randn(9, (4 + 2 * 2) * 128, dtype=torch.bfloat16)
    positions, angles = torch.zeros(9, dtype=torch.int64, device="cuda"), _randn(10, 128)
    slots = shape[0] * 64 - 1 - 700 * torch.arange(9, device="cuda")
    norm_rope_write_kv(qkv, None, None, 1e-6, positions, angles, *pools, slots, num_heads=4)
    values = pools[1].view(-1, 2, 128)
    assert torch.equal(values[slots], qkv.view(9, 8, 128)[:, 6:])
    values[slots] = 0
    assert not values.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 13, 32, 33, 64])
@pytest.mark.parametrize(("n", "k"), [(4096, 1024), (1024, 3072), (1000, 2048), (4096, 14336), (30001, 1024)])
def test_gemv_equals_the_product(n, k, rows, dtype):
    from kernels.linear.triton_gemv import allocate_scratch, can_gemv, gemv

    x, w, bias = _randn(rows, k, dtype=dtype), _randn(n, k, dtype=dtype), _randn(n, dtype=dtype)
    assert can_gemv(x, w)
    scratch = allocate_scratch(x.device)
    for pdl in (False, True):
        out = gemv(x, w, bias, scratch, pdl=pdl)
        assert relative_error(out, x.double() @ w.double().T + bias.double()) < 2 * TOLERANCE[dtype]
