"""An int8 pool: what is written to it, what attention makes of it, and who takes it."""

from __future__ import annotations

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
from kernels.elementwise.reference import FP8, INT8, KVScales, from_int8, to_fp8, to_int8, write_kv
from kernels.ops import norm_rope_write_kv
from tests.unit.kernels.attention.test_torch_attention import RAGGED, make_case, naive_attention
from tests.unit.kernels.triton_cases.ragged import as_fp8, as_int8, empty_int8

NAN, INF = float("nan"), float("inf")
SPEC = AttentionSpec(16, 8, 128, torch.bfloat16, torch.device("cuda"), block_size=16, kv_dtype=INT8)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=6))
def test_a_number_is_off_by_half_a_step_of_its_head_at_most(numbers):
    x = torch.tensor([numbers])
    rounded, scales = to_int8(x)
    assert int(rounded.int().abs().max()) <= 127
    error = (rounded.double() * scales.double()[:, None] - x.double()).abs().max()
    assert float(error) <= max(0.5001 * float(x.double().abs().max()) / 127, 2.0**-100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ties_go_to_even_zeros_stay_and_the_largest_is_127(dtype):
    x = torch.tensor([[127, 0.5, -1.5, 2.5], [0, 0, 0, 0], [-254, 1, 3, -5]], dtype=dtype)
    rounded, scales = to_int8(x)
    assert rounded.tolist() == [[127, 0, -2, 2], [0, 0, 0, 0], [-127, 0, 2, -2]]
    assert scales.tolist() == [1.0, 0.0, 2.0]
    assert scales.dtype == torch.float32


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_head_that_is_not_finite_is_read_as_nan_and_the_others_are_not(bad):
    x = torch.randn(3, 2, 8)
    x[1, 0, 3] = bad
    rounded, scales = to_int8(x)
    values = from_int8(rounded, scales, torch.float32)
    assert values[1, 0].isnan().all()
    values[1, 0] = 0.0
    assert values.isfinite().all()


def test_a_token_is_written_alike_whatever_is_written_with_it():
    k, v, slots = torch.randn(9, 2, 8), torch.randn(9, 2, 8), torch.randperm(32)[:9]
    pools = [[empty_int8(4, 8, 2, 8) for _ in range(2)] for _ in range(2)]
    for pool, parts in zip(pools, ([9], [1, 5, 3]), strict=True):
        (keys, k_scales), (values, v_scales) = pool
        for part in torch.arange(9).split(parts):
            write_kv(k[part], v[part], keys, values, slots[part], KVScales(k=k_scales, v=v_scales))
    for (numbers, scales), (others, other_scales) in zip(*pools, strict=True):
        assert torch.equal(numbers, others)
        assert torch.equal(scales, other_scales)
        is_written = torch.zeros(32, dtype=torch.bool).index_fill_(0, slots, True).view(4, 8)
        assert bool((scales[is_written] > 0).all())
        assert not numbers[~is_written].any()
        assert not scales[~is_written].any()


def test_the_fused_op_writes_what_its_parts_do():
    qkv, angles, slots = torch.randn(5, 8 * 16), torch.randn(20, 16), torch.tensor([3, 9, 1, 30, 8])
    (keys, k_scales), (values, v_scales) = (empty_int8(4, 8, 2, 16) for _ in range(2))
    whole = [torch.zeros(4, 8, 2, 16) for _ in range(2)]
    arguments = (qkv, None, None, 1e-6, torch.arange(5), angles)
    scales = KVScales(k=k_scales, v=v_scales)
    q = norm_rope_write_kv(*arguments, keys, values, slots, num_heads=4, kv_scales=scales)
    assert torch.equal(q, norm_rope_write_kv(*arguments, *whole, slots, num_heads=4))
    for mine, its_scales, cache in ((keys, k_scales, whole[0]), (values, v_scales, whole[1])):
        expected, expected_scales = to_int8(cache)
        assert torch.equal(mine, expected)
        assert torch.equal(its_scales, expected_scales)


def _case(**options):
    """q, the int8 pool, its scales and the metadata; and the pool that was rounded; and the one that it stands for."""
    q, k_cache, v_cache, metadata = make_case(**RAGGED, **options)
    k_cache[..., 0] += 200.0  # fp8's steps are 16 there
    (keys, k_scales, k_values), (values, v_scales, v_values) = (as_int8(cache) for cache in (k_cache, v_cache))
    return q, (keys, values), KVScales(k=k_scales, v=v_scales), metadata, (k_cache, v_cache), (k_values, v_values)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}, {"softcap": 2.0}, {"sliding_window": 9, "softcap": 1}])
@pytest.mark.parametrize("heads", [{"group": 1}, {"group": 4, "num_kv_heads": 1}, {"head_dim": 64}, {"block_size": 16}])
def test_attention_over_an_int8_pool_is_that_over_what_its_numbers_stand_for(options, heads):
    q, pool, scales, metadata, _, exact = _case(**heads)
    out = TorchAttention().forward(q, *pool, metadata, scale=0.01, kv_scales=scales, **options)
    expected = naive_attention(q, *exact, metadata, scale=0.01, **options)
    torch.testing.assert_close(out.double(), expected, atol=5e-6, rtol=0)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_int8_changes_attention_by_less_than_a_percent_and_fp8_by_more(head_dim):
    q, k_cache, v_cache, metadata = make_case(**RAGGED, head_dim=head_dim)
    scale, caches = head_dim**-0.5, (k_cache, v_cache)
    whole = TorchAttention().forward(q, *caches, metadata, scale=scale)
    (keys, k_scales, _), (values, v_scales, _) = map(as_int8, caches)
    scales = KVScales(k=k_scales, v=v_scales)
    int8 = TorchAttention().forward(q, keys, values, metadata, scale=scale, kv_scales=scales)
    fp8 = TorchAttention().forward(q, *(to_fp8(cache, 1.0) for cache in caches), metadata, scale=scale)
    errors = [float((out - whole).norm() / whole.norm()) for out in (int8, fp8)]
    assert 0.002 < errors[0] < 0.01
    assert errors[1] > 2.5 * errors[0]


@pytest.mark.parametrize(("num_large", "least", "most"), [(128, 3, 20), (16, 2, 20), (1, 0.5, 2)])
def test_what_int8_gains_over_fp8_depends_on_how_many_numbers_of_a_head_are_large(num_large, least, most):
    """All have the step of the largest: beside one large number the others lose as much as fp8 loses of that one."""
    k, q = torch.randn(2048, 1, 128), torch.randn(64, 1, 128).double()
    k[..., torch.randperm(128)[:num_large]] *= 150.0
    rounded, scales = to_int8(k)
    errors = [float((q[:, 0] @ (values - k.double())[:, 0].T).std())
              for values in (from_int8(rounded, scales, torch.float64), to_fp8(k, 1.0).double())]  # fmt: skip
    assert least < errors[1] / errors[0] < most


@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}])
def test_scales_of_fp8_heads_are_applied_to_their_heads(options):
    q, k_cache, v_cache, metadata = make_case(**RAGGED, group=2, num_kv_heads=2)
    scales = KVScales(k=torch.tensor([0.5, 2.0]), v=torch.tensor([4.0, 0.3]))
    (keys, k_values), (values, v_values) = as_fp8(k_cache, scales.k), as_fp8(v_cache, scales.v)
    out = TorchAttention().forward(q, keys, values, metadata, scale=0.25, kv_scales=scales, **options)
    expected = naive_attention(q, k_values, v_values, metadata, scale=0.25, **options)
    torch.testing.assert_close(out.double(), expected, atol=5e-6, rtol=0)
    written = [torch.zeros(4, 4, 2, 8).to(FP8) for _ in range(2)]
    k, v, slots = torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.tensor([13, 0, 6])
    write_kv(k, v, *written, slots, scales)
    for x, scale, cache in ((k, scales.k, written[0]), (v, scales.v, written[1])):
        for head in range(2):
            alone = to_fp8(x[:, head], float(scale[head])).float()
            assert torch.equal(cache.float().view(16, 2, 8)[slots, head], alone)


def test_flash_attn_refuses_the_pool_and_triton_takes_it(monkeypatch, caplog):
    monkeypatch.setattr(triton_backend, "HAS_TRITON", True)
    monkeypatch.setattr(flash, "_find_library", lambda capability: pytest.fail("it was asked for the library"))
    with caplog.at_level("INFO"):
        backend = select_backend(SPEC, [FlashAttention, TritonAttention])
    assert backend.name == "triton"
    assert "flash-attn refused reason='its pool must hold torch.bfloat16, not torch.int8'" in caplog.text
    assert TorchAttention.refuse(replace(SPEC, device=torch.device("cpu"))) is None
