"""An fp8 pool: what is written to it, what attention makes of it, and who takes it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention import flash, triton_backend
from kernels.attention.base import AttentionSpec, select_backend
from kernels.attention.flash import FlashAttention
from kernels.attention.torch_ref import TorchAttention
from kernels.attention.triton_backend import TritonAttention
from kernels.elementwise.reference import FP8, KVScales, from_fp8, to_fp8, write_kv
from kernels.ops import norm_rope_write_kv
from tests.unit.kernels.attention.test_torch_attention import RAGGED, make_case, naive_attention

ALL = torch.arange(256, dtype=torch.uint8).view(FP8).float()
FINITE = ALL[ALL.isfinite()]
SPEC = AttentionSpec(16, 8, 128, torch.bfloat16, torch.device("cuda"), block_size=16, kv_dtype=FP8)


@given(st.floats(width=32, allow_nan=False), st.sampled_from([1.0, 0.25, 2.0, 0.013, 7.7]))
def test_a_number_becomes_the_nearest_that_fp8_has_and_never_nan(number, scale):
    scaled = float(torch.tensor(number) * torch.tensor(1.0 / scale))
    wanted = max(-448.0, min(448.0, scaled))
    stored = float(to_fp8(torch.tensor([number]), scale).float())
    assert math.isfinite(stored)
    assert abs(stored - wanted) == float((FINITE.double() - wanted).abs().min())


def test_what_fp8_has_is_kept_and_what_is_above_it_is_its_largest():
    assert torch.equal(to_fp8(FINITE, 1.0).float(), FINITE)
    assert torch.equal(to_fp8(FINITE * 4, 4.0).float(), FINITE)
    large = torch.tensor([449.0, 465.0, 1e30, float("inf")])
    assert torch.equal(to_fp8(torch.cat((large, -large)), 1.0).float(), torch.tensor([448.0] * 4 + [-448.0] * 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_has_all_numbers_of_fp8(dtype):
    every = torch.arange(256, dtype=torch.uint8).view(FP8).view(4, 8, 8)
    torch.testing.assert_close(from_fp8(every, dtype).float(), ALL.view(4, 8, 8), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_write_kv_fills_its_slots_in_fp8_and_no_others(dtype):
    k, v = torch.randn(3, 2, 8).to(dtype), torch.randn(3, 2, 8).to(dtype)
    pool = [torch.full((4, 4, 2, 8), 7.0).to(FP8) for _ in range(2)]
    slots = [13, 0, 6]
    write_kv(k, v, *pool, torch.tensor(slots), KVScales(k=0.5, v=2.0))
    for x, scale, cache in ((k, 0.5, pool[0]), (v, 2.0, pool[1])):
        stored = cache.float().view(16, 2, 8)
        assert torch.equal(stored[slots], (x.float() / scale).to(FP8).float())
        assert bool((stored[[slot for slot in range(16) if slot not in slots]] == 7.0).all())


def test_the_fused_op_writes_what_its_parts_do():
    qkv, angles = torch.randn(5, 8 * 16), torch.randn(20, 16)
    scales, slots = KVScales(k=0.5, v=0.1), torch.tensor([3, 9, 1, 30, 8])
    fused, apart = ([torch.zeros(4, 8, 2, 16).to(FP8) for _ in range(2)] for _ in range(2))
    whole = [torch.zeros(4, 8, 2, 16) for _ in range(2)]
    arguments = (qkv, None, None, 1e-6, torch.arange(5), angles)
    q = norm_rope_write_kv(*arguments, *fused, slots, num_heads=4, kv_scales=scales)
    assert torch.equal(q, norm_rope_write_kv(*arguments, *whole, slots, num_heads=4))
    write_kv(*(cache.view(32, 2, 16)[slots] for cache in whole), *apart, slots, scales)
    for mine, theirs in zip(fused, apart, strict=True):
        assert torch.equal(mine.float(), theirs.float())


def _case(**options):
    """q, the fp8 pool and the metadata; and the pool that was rounded; and the one that it stands for."""
    q, k_cache, v_cache, metadata = make_case(**RAGGED, **options)
    scales = KVScales(k=0.5, v=3.0)
    pool = [to_fp8(cache, scale) for cache, scale in ((k_cache, scales.k), (v_cache, scales.v))]
    exact = [cache.float() * scale for cache, scale in zip(pool, (scales.k, scales.v), strict=True)]
    return q, pool, metadata, scales, (k_cache, v_cache), exact


@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}, {"softcap": 2.0}, {"sliding_window": 9, "softcap": 1}])
@pytest.mark.parametrize("heads", [{"group": 1}, {"group": 4, "num_kv_heads": 1}, {"head_dim": 64}, {"block_size": 16}])
def test_attention_over_an_fp8_pool_is_that_over_what_its_numbers_stand_for(options, heads):
    q, pool, metadata, scales, _, exact = _case(**heads)
    out = TorchAttention().forward(q, *pool, metadata, scale=0.4, kv_scales=scales, **options)
    expected = naive_attention(q, *exact, metadata, scale=0.4, **options)
    torch.testing.assert_close(out.double(), expected, atol=5e-6, rtol=0)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_fp8_changes_attention_by_a_few_percent(head_dim):
    q, pool, metadata, scales, (k_cache, v_cache), _ = _case(head_dim=head_dim)
    scale = head_dim**-0.5
    whole = TorchAttention().forward(q, k_cache, v_cache, metadata, scale=scale)
    out = TorchAttention().forward(q, *pool, metadata, scale=scale, kv_scales=scales)
    error = float((out - whole).norm() / whole.norm())
    assert 0.01 < error < 0.06  # a number is off by up to 1/16, by 2.6 % in the mean square


def test_one_backend_serves_both_kinds_of_pool_in_turn():
    q, pool, metadata, scales, (k_cache, v_cache), _ = _case()
    backend = TorchAttention()
    alone = TorchAttention().forward(q, *pool, metadata, scale=0.25, kv_scales=scales)
    for _ in range(2):
        backend.forward(q, k_cache, v_cache, metadata, scale=0.25)
        assert torch.equal(backend.forward(q, *pool, metadata, scale=0.25, kv_scales=scales), alone)


def test_flash_attn_refuses_the_pool_and_triton_takes_it(monkeypatch, caplog):
    monkeypatch.setattr(triton_backend, "HAS_TRITON", True)
    monkeypatch.setattr(flash, "_find_library", lambda capability: pytest.fail("it was asked for the library"))
    with caplog.at_level("INFO"):
        backend = select_backend(SPEC, [FlashAttention, TritonAttention])
    assert backend.name == "triton"
    assert "flash-attn refused reason='its pool must hold torch.bfloat16, not torch.float8_e4m3fn'" in caplog.text
    assert TorchAttention.refuse(replace(SPEC, device=torch.device("cpu"))) is None


def test_a_pool_of_the_models_own_dtype_is_no_other_pool():
    assert SPEC.has_other_pool
    assert not replace(SPEC, kv_dtype=torch.bfloat16).has_other_pool
    assert not replace(SPEC, kv_dtype=None).has_other_pool
