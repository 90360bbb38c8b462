"""Row-wise ops against their formulas in double precision, and against transformers bit for bit in bf16."""

import pytest
import torch
from transformers.activations import ReLUSquaredActivation, XIELUActivation
from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm
from transformers.models.ernie4_5.modeling_ernie4_5 import apply_rotary_pos_emb as ernie_rotary_pos_emb
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as glm_rotary_pos_emb
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from kernels.elementwise.reference import (
    add_layer_norm,
    add_rms_norm,
    apply_rope,
    gelu_tanh_and_mul,
    layer_norm,
    relu_squared,
    rms_norm,
    silu_and_mul,
    write_kv,
    xielu,
)

EPS = 1e-5


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_rms_norm_is_x_over_its_root_mean_square():
    x, weight = randn(7, 3, 24), randn(24, seed=1)
    exact = x.double() / (x.double() ** 2).mean(-1, keepdim=True).add(EPS).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, EPS).double(), exact, atol=1e-5, rtol=1e-5)


def test_rms_norm_rounds_bf16_as_transformers_does():
    x, weight = randn(50, 64, dtype=torch.bfloat16), randn(64, dtype=torch.bfloat16, seed=1)
    theirs = LlamaRMSNorm(64, EPS)
    theirs.weight = torch.nn.Parameter(weight, requires_grad=False)
    assert torch.equal(rms_norm(x, weight, EPS), theirs(x))


@pytest.mark.parametrize(("theirs", "offset"), [(GemmaRMSNorm(64, EPS), 1.0), (Olmo2RMSNorm(64, EPS), 0.0)])
def test_rms_norm_with_an_fp32_weight_rounds_once_as_gemma_and_olmo_do(theirs, offset):
    x, weight = randn(50, 64, dtype=torch.bfloat16), randn(64, dtype=torch.bfloat16, seed=1)
    theirs.weight = torch.nn.Parameter(weight, requires_grad=False)
    normed = rms_norm(x, weight.float() + offset, EPS)
    assert torch.equal(normed, theirs(x))
    assert not torch.equal(normed, rms_norm(x, (weight.float() + offset).bfloat16(), EPS))
    assert torch.equal(add_rms_norm(x, x, weight.float() + offset, EPS)[0], theirs(x + x))


def test_rms_norm_of_large_bf16_values_does_not_overflow():
    x = torch.full((2, 64), 1e20, dtype=torch.bfloat16)
    x[1] = 0
    normed = rms_norm(x, torch.ones(64, dtype=torch.bfloat16), EPS)
    assert normed.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_rms_norm_is_the_sum_then_the_norm_and_writes_no_input(dtype):
    x, residual, weight = randn(9, 32, dtype=dtype), randn(9, 32, dtype=dtype, seed=1), randn(32, dtype=dtype, seed=2)
    before = x.clone(), residual.clone()
    normed, new_residual = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(new_residual, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, EPS))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm_rounds_bf16_once_as_transformers_does(has_bias):
    x, weight, bias = (randn(*shape, dtype=torch.bfloat16, seed=i) for i, shape in enumerate([(50, 64), (64,), (64,)]))
    theirs = torch.nn.LayerNorm(64, EPS, dtype=torch.bfloat16) if has_bias else Cohere2LayerNorm(64, EPS)
    theirs.weight = torch.nn.Parameter(weight, requires_grad=False)
    if has_bias:
        theirs.bias = torch.nn.Parameter(bias, requires_grad=False)
    normed, total = add_layer_norm(x, x, weight.float(), bias.float() if has_bias else None, EPS)
    torch.testing.assert_close(normed, theirs(x + x), atol=0, rtol=2**-8)
    assert (normed == theirs(x + x)).float().mean() > 0.99
    assert torch.equal(total, x + x)
    assert torch.equal(normed, layer_norm(total, weight.float(), bias.float() if has_bias else None, EPS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_without_a_gate_are_those_of_transformers(dtype):
    x = randn(6, 20, dtype=dtype) * 3
    assert torch.equal(relu_squared(x), ReLUSquaredActivation()(x))
    theirs = XIELUActivation(alpha_p_init=0.7, alpha_n_init=1.3, beta=0.4, eps=-0.01, dtype=dtype)
    softplus = torch.nn.functional.softplus
    constants = [softplus(theirs.alpha_p)[0], (theirs.beta + softplus(theirs.alpha_n))[0], theirs.beta, theirs.eps]
    assert torch.equal(xielu(x, torch.stack(constants)), theirs(x))


def make_cache(max_positions, rotary_dim, dtype=torch.float32):
    angles = torch.outer(torch.arange(max_positions).float(), 10.0 ** -torch.linspace(0, 3, rotary_dim // 2))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


def test_rope_turns_each_pair_by_its_angle():
    q, k = randn(5, 4, 8), randn(5, 2, 8, seed=1)
    positions, cache = torch.tensor([0, 3, 3, 19, 7]), make_cache(20, 8)
    for x, rotated in zip((q, k), apply_rope(q, k, positions, cache), strict=True):
        for token, position in enumerate(positions.tolist()):
            for pair in range(4):
                cos, sin = cache[position, pair], cache[position, 4 + pair]
                a, b = x[token, :, pair], x[token, :, 4 + pair]
                torch.testing.assert_close(rotated[token, :, pair], a * cos - b * sin)
                torch.testing.assert_close(rotated[token, :, 4 + pair], b * cos + a * sin)


def test_rope_leaves_dimensions_past_the_rotary_ones():
    q, k = randn(5, 4, 12), randn(5, 2, 12, seed=1)
    positions, cache = torch.tensor([0, 3, 3, 19, 7]), make_cache(20, 8)
    rotated_q, rotated_k = apply_rope(q, k, positions, cache)
    whole_q, whole_k = apply_rope(q[..., :8], k[..., :8], positions, cache)
    assert torch.equal(rotated_q, torch.cat((whole_q, q[..., 8:]), -1))
    assert torch.equal(rotated_k, torch.cat((whole_k, k[..., 8:]), -1))


def test_rope_rounds_bf16_as_transformers_does():
    q, k = randn(16, 4, 32, dtype=torch.bfloat16), randn(16, 2, 32, dtype=torch.bfloat16, seed=1)
    positions, cache = torch.arange(16), make_cache(16, 32, torch.bfloat16)
    cos, sin = (torch.cat((half, half), -1) for half in cache.chunk(2, -1))
    theirs = apply_rotary_pos_emb(q[None], k[None], cos[None], sin[None], unsqueeze_dim=2)
    ours = apply_rope(q, k, positions, cache)
    assert torch.equal(ours[0], theirs[0][0])
    assert torch.equal(ours[1], theirs[1][0])


@pytest.mark.parametrize(("is_fp32", "rotary_dim"), [(False, 32), (False, 16), (True, 32)])
def test_rope_of_neighbouring_pairs_rounds_bf16_as_transformers_does(is_fp32, rotary_dim):
    q, k = randn(16, 4, 32, dtype=torch.bfloat16), randn(16, 2, 32, dtype=torch.bfloat16, seed=1)
    positions, cache = torch.arange(16), make_cache(16, rotary_dim, torch.float32 if is_fp32 else torch.bfloat16)
    cos, sin = (torch.cat((half, half), -1) for half in cache.chunk(2, -1))
    theirs = (ernie_rotary_pos_emb if is_fp32 else glm_rotary_pos_emb)(q[None], k[None], cos[None], sin[None], 2)
    ours = apply_rope(q, k, positions, cache, is_interleaved=True)
    assert torch.equal(ours[0], theirs[0][0])
    assert torch.equal(ours[1], theirs[1][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_and_mul_gates_the_second_half_by_the_first(dtype):
    x = randn(6, 20, dtype=dtype)
    assert torch.equal(silu_and_mul(x), torch.nn.functional.silu(x[:, :10]) * x[:, 10:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_tanh_and_mul_gates_the_second_half_by_the_first(dtype):
    x = randn(6, 20, dtype=dtype)
    activated = torch.nn.functional.gelu(x[:, :10], approximate="tanh")
    assert torch.equal(gelu_tanh_and_mul(x), activated * x[:, 10:])


def test_write_kv_fills_its_slots_and_no_others():
    k, v = randn(5, 2, 3), randn(5, 2, 3, seed=1)
    k_cache, v_cache = torch.zeros(6, 4, 2, 3), torch.zeros(6, 4, 2, 3)
    slots = [23, 4, 0, 11, 5]
    write_kv(k, v, k_cache, v_cache, torch.tensor(slots))
    for token, slot in enumerate(slots):
        assert torch.equal(k_cache[slot // 4, slot % 4], k[token])
        assert torch.equal(v_cache[slot // 4, slot % 4], v[token])
    untouched = [slot for slot in range(24) if slot not in slots]
    assert k_cache.view(24, 2, 3)[untouched].abs().max() == 0
    assert v_cache.view(24, 2, 3)[untouched].abs().max() == 0


def test_write_kv_takes_views_of_merged_projections():
    qkv = randn(5, 8, 3)
    k_cache, v_cache = torch.zeros(6, 4, 2, 3), torch.zeros(6, 4, 2, 3)
    write_kv(qkv[:, 4:6], qkv[:, 6:8], k_cache, v_cache, torch.arange(5))
    assert torch.equal(k_cache.view(24, 2, 3)[:5], qkv[:, 4:6])
    assert torch.equal(v_cache.view(24, 2, 3)[:5], qkv[:, 6:8])


def test_write_kv_fills_views_of_a_pool_in_place():
    pool, k, v = torch.zeros(6, 2, 4, 2, 3), randn(2, 2, 3), randn(2, 2, 3)
    write_kv(k, v, pool[:, 0], pool[:, 1], torch.tensor([0, 9]))
    assert torch.equal(torch.stack((pool[0, 0, 0], pool[2, 0, 1])), k)
    assert torch.equal(torch.stack((pool[0, 1, 0], pool[2, 1, 1])), v)
    assert int(pool.count_nonzero()) == k.numel() + v.numel()
