"""Triton row ops against their torch specifications, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kernels.elementwise import reference as elementwise
from kernels.elementwise import triton as elementwise_triton
from kernels.elementwise import triton_write_kv
from kernels.elementwise.reference import write_kv

# The interpreter truncates to bf16 instead of rounding: half precision stands for it here, bf16 is tested on the GPU
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
DTYPES = [torch.float32, torch.float16]


def _close(out, expected):
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[out.dtype], atol=TOLERANCE[out.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 48), (2, 2, 100)])
def test_rms_norm_equals_its_specification(shape, dtype):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    _close(elementwise_triton.rms_norm(x, weight, 1e-6), elementwise.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_equals_its_specification_and_keeps_its_inputs(dtype):
    x, residual, weight = torch.randn(3, 100).to(dtype), torch.randn(3, 100).to(dtype), torch.randn(100).to(dtype)
    kept = x.clone(), residual.clone()
    for out, expected in zip(
        elementwise_triton.add_rms_norm(x, residual, weight, 1e-6),
        elementwise.add_rms_norm(x, residual, weight, 1e-6),
        strict=True,
    ):
        _close(out, expected)
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


def test_norms_with_an_fp32_weight_equal_their_specifications():
    x, residual, weight = torch.randn(3, 100).half(), torch.randn(3, 100).half(), torch.randn(100)
    _close(elementwise_triton.rms_norm(x, weight, 1e-6), elementwise.rms_norm(x, weight, 1e-6))
    pairs = zip(
        elementwise_triton.add_rms_norm(x, residual, weight, 1e-6),
        elementwise.add_rms_norm(x, residual, weight, 1e-6),
        strict=True,
    )
    for out, expected in pairs:
        _close(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [40, 1100])
def test_gelu_tanh_and_mul_equals_its_specification(size, dtype):
    x = (torch.randn(3, 2 * size) * 4).to(dtype)
    x[0, :4] = torch.tensor([-60000.0, -40.0, 0.0, 300.0]).to(dtype)
    _close(elementwise_triton.gelu_tanh_and_mul(x), elementwise.gelu_tanh_and_mul(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [40, 1100])
def test_silu_and_mul_equals_its_specification(size, dtype):
    x = (torch.randn(3, 2 * size) * 4).to(dtype)
    _close(elementwise_triton.silu_and_mul(x), elementwise.silu_and_mul(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norms_equal_their_specifications(has_bias, dtype):
    x, residual = (torch.randn(3, 100) + 2).to(dtype), torch.randn(3, 100).to(dtype)
    weight, bias = torch.randn(100), torch.randn(100) if has_bias else None
    _close(elementwise_triton.layer_norm(x, weight, bias, 1e-5), elementwise.layer_norm(x, weight, bias, 1e-5))
    pairs = zip(
        elementwise_triton.add_layer_norm(x, residual, weight, bias, 1e-5),
        elementwise.add_layer_norm(x, residual, weight, bias, 1e-5),
        strict=True,
    )
    for out, expected in pairs:
        _close(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [40, 1100])
def test_activations_without_a_gate_equal_their_specifications(size, dtype):
    x = (torch.randn(3, size) * 4).to(dtype)
    x[0, :6] = torch.tensor([-60.0, -1e-7, 0.0, -0.03, 1e-3, 100.0]).to(dtype)
    constants = torch.tensor([0.8, 1.1, 0.5, -1e-6]).to(dtype)
    _close(elementwise_triton.relu_squared(x), elementwise.relu_squared(x))
    _close(elementwise_triton.xielu(x, constants), elementwise.xielu(x, constants))


def _fused_by_specification(qkv, weights, positions, cos_sin_cache, k_cache, v_cache, slots, num_heads, options):
    num_kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    norms_rotated = options.get("norms_rotated", False)
    if weights[0] is not None and not norms_rotated:
        q, k = elementwise.rms_norm(q, weights[0], 1e-6), elementwise.rms_norm(k, weights[1], 1e-6)
    is_interleaved = options.get("is_interleaved", False)
    q, k = elementwise.apply_rope(q, k, positions, cos_sin_cache, is_interleaved=is_interleaved)
    if weights[0] is not None and norms_rotated:
        q, k = elementwise.rms_norm(q, weights[0], 1e-6), elementwise.rms_norm(k, weights[1], 1e-6)
    write_kv(k, v, k_cache, v_cache, slots)
    return q


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim", "rotary_dim", "norm"),
    [
        (3, 4, 2, 16, 16, "same"),
        (2, 3, 1, 20, 20, None),
        (2, 6, 6, 32, 16, "same"),
        (3, 4, 2, 16, 12, "fp32"),
    ],
)
@pytest.mark.parametrize("has_positions", [True, False])
def test_norm_rope_write_kv_equals_the_three_specifications(
    num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, norm, has_positions, dtype
):
    _assert_fused_equals(num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, norm, has_positions, dtype)


def test_norm_rope_write_kv_of_so_many_tokens_that_a_program_has_16_heads():
    _assert_fused_equals(65, 2, 1, 16, 16, "same", True, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{"is_interleaved": True}, {"norms_rotated": True}])
@pytest.mark.parametrize(("rotary_dim", "norm"), [(20, None), (20, "same"), (12, "same"), (12, "fp32")])
def test_other_pairs_and_a_norm_after_the_rotation_equal_their_specifications(rotary_dim, norm, options, dtype):
    _assert_fused_equals(3, 4, 2, 20, rotary_dim, norm, True, dtype, **options)


def _assert_fused_equals(
    num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, norm, has_positions, dtype, **options
):
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    norm_dtype = torch.float32 if norm == "fp32" else dtype
    weights = [torch.randn(head_dim).to(norm_dtype) if norm else None for _ in range(2)]
    positions = torch.randint(0, 50, (num_tokens,))
    cos_sin_cache = torch.randn(50, rotary_dim).to(norm_dtype)
    if not has_positions:  # one row for all, which turns by no angle
        cos_sin_cache = torch.cat((torch.ones(1, head_dim // 2), torch.zeros(1, head_dim // 2)), -1).expand(50, -1)
    slots = torch.randperm(8 * 16)[:num_tokens]
    mine = [torch.full((8, 16, num_kv_heads, head_dim), 7.0, dtype=dtype) for _ in range(2)]
    theirs = [cache.clone() for cache in mine]
    q = triton_write_kv.norm_rope_write_kv(
        qkv, *weights, 1e-6, positions, cos_sin_cache, *mine, slots, num_heads=num_heads, **options
    )
    _close(q, _fused_by_specification(qkv, weights, positions, cos_sin_cache, *theirs, slots, num_heads, options))
    for cache, expected in zip(mine, theirs, strict=True):
        _close(cache, expected)
