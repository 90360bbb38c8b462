"""The Triton kernels over an fp8 pool against their specifications, through Triton's interpreter.

It reads fp8 exactly, and writes exactly the numbers that fp8 has; others to either neighbour, and, for want of a carry,
at times to half of one that is a power of two; and the smallest less well. tests/gpu has the rounding.
"""

from __future__ import annotations

import pytest
import torch

from kernels.attention.triton_decode import decode_attention
from kernels.attention.triton_prefill import PrefillConfig, prefill_attention
from kernels.attention.triton_splits import DecodeScratch
from kernels.elementwise import reference as elementwise
from kernels.elementwise.reference import FP8, KVScales, write_kv
from kernels.elementwise.triton_write_kv import norm_rope_write_kv
from tests.unit.kernels.triton_cases.ragged import as_fp8, make_problem, reference, relative_error

SCALES = KVScales(k=0.5, v=0.03)
HEADS = [(2, 2, 64), (4, 1, 64), (3, 1, 128), (8, 2, 128), (2, 1, 80)]
OPTIONS = [{"sliding_window": 40}, {"softcap": 2.0}, {"sliding_window": 130, "softcap": 1.0}]


def _problem(query_lens, context_lens, *, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16,
             dtype=torch.float32, size=1.0):  # fmt: skip
    """q, of that size, pool and metadata, and the caches that the pool stands for."""
    q, k_cache, v_cache, metadata = make_problem(
        query_lens=query_lens, context_lens=context_lens, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, block_size=block_size, dtype=dtype, device="cpu",
    )  # fmt: skip
    (keys, k_values), (values, v_values) = as_fp8(k_cache, SCALES.k), as_fp8(v_cache, SCALES.v)
    return q * size, (keys, values), metadata, (k_values, v_values)


def _decode(context_lens, *, splits=None, scales=SCALES, options=None, size=1.0, **shape):
    options = options or {}
    q, pool, metadata, exact = _problem([1] * len(context_lens), context_lens, size=size, **shape)
    scale = q.shape[2] ** -0.5 / size
    num_kv_heads, head_dim = pool[0].shape[2:]
    scratch = DecodeScratch.allocate(
        num_heads=q.shape[1], num_kv_heads=num_kv_heads, head_dim=head_dim, device=torch.device("cpu")
    )
    out = torch.full_like(q, float("nan"))
    decode_attention(
        q, *pool, metadata.block_table, metadata.seq_lens, out, scratch, scale=scale, kv_scales=scales,
        num_splits=splits, **options,
    )  # fmt: skip
    return relative_error(out, reference(q, *exact, metadata, scale=scale, **options))


def _prefill(query_lens, context_lens, *, config=None, options=None, size=1.0, **shape):
    options = options or {}
    q, pool, metadata, exact = _problem(query_lens, context_lens, size=size, **shape)
    scale = q.shape[2] ** -0.5 / size
    out = torch.full_like(q, float("nan"))
    prefill_attention(
        q, *pool, metadata.block_table, metadata.query_start_loc, metadata.seq_lens, out, scale=scale,
        max_query_len=max(query_lens), kv_scales=SCALES, config=config, **options,
    )  # fmt: skip
    return relative_error(out, reference(q, *exact, metadata, scale=scale, **options))


@pytest.mark.parametrize("splits", [1, 3])
def test_decode_equals_the_reference_at_any_number_of_splits(splits):
    assert _decode([0, 15, 63, 300], splits=splits) < 1e-5


def test_both_scales_matter():
    assert _decode([70], scales=KVScales(k=1.0, v=SCALES.v)) > 0.1
    assert _decode([70], scales=KVScales(k=SCALES.k, v=1.0)) > 0.1


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
def test_decode_takes_any_group_and_head_dim(num_heads, num_kv_heads, head_dim):
    assert _decode([70, 9], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, splits=2) < 1e-5


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_decode_takes_any_block_size(block_size):
    assert _decode([70, 200], block_size=block_size) < 1e-5


@pytest.mark.parametrize("options", OPTIONS)
def test_decode_honours_window_and_softcap(options):
    assert _decode([3, 200], splits=2, options=options) < 1e-5


def test_decode_in_half_precision():
    assert _decode([200], dtype=torch.float16) < 1e-3


# bfloat16 queries are computed in float16, whose largest number is 65504
@pytest.mark.parametrize("size", [1e5, 1.0, 2.0**-10])
@pytest.mark.parametrize("head_dim", [64, 192])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}])
def test_bfloat16_queries_of_any_size(size, head_dim, options):
    shape = {"dtype": torch.bfloat16, "head_dim": head_dim, "size": size, "options": options}
    assert _decode([70, 9], **shape) < 5e-3
    assert _prefill([21, 3], [6, 40], **shape) < 5e-3


def test_prefill_of_ragged_rows_with_and_without_context():
    assert _prefill([5, 1, 40, 17], [0, 33, 10, 100]) < 1e-5


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
def test_prefill_takes_any_group_and_head_dim(num_heads, num_kv_heads, head_dim):
    assert _prefill([21], [6], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim) < 1e-5


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_prefill_takes_any_block_size(block_size):
    config = PrefillConfig(block_m=16, block_n=64, num_warps=4, num_stages=1)
    assert _prefill([40, 9], [150, 0], block_size=block_size, config=config) < 1e-5


@pytest.mark.parametrize("options", OPTIONS)
def test_prefill_honours_window_and_softcap(options):
    assert _prefill([50, 3], [60, 90], options=options) < 1e-5


def _written(qkv, k_cache, scales, *, num_heads, head_dim, norm=None):
    """Both pools after the fused kernel and after its specification, from the same start; and both q."""
    num_tokens = qkv.shape[0]
    positions, slots = torch.arange(num_tokens), torch.randperm(8 * 16)[:num_tokens]
    angles = torch.randn(num_tokens, head_dim)
    mine, theirs = ([k_cache.clone(), k_cache.clone()] for _ in range(2))
    q = norm_rope_write_kv(
        qkv, norm, norm, 1e-6, positions, angles, *mine, slots, num_heads=num_heads, kv_scales=scales
    )
    num_kv_heads = k_cache.shape[2]
    parts = qkv.view(num_tokens, -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    expected_q, k = parts[:2] if norm is None else (elementwise.rms_norm(x, norm, 1e-6) for x in parts[:2])
    expected_q, k = elementwise.apply_rope(expected_q, k, positions, angles)
    write_kv(k, parts[2], *theirs, slots, scales)
    return mine, theirs, q, expected_q


def _codes(pool):
    """fp8 numbers as integers in their order."""
    codes = pool.view(torch.uint8).int()
    return torch.where(codes < 128, codes, 128 - codes)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_fused_kernel_writes_what_its_specification_does(num_heads, num_kv_heads, head_dim, has_norm, dtype):
    torch.manual_seed(0)
    qkv = torch.randn(5, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    pool = torch.full((8, 16, num_kv_heads, head_dim), 7.0).to(FP8)
    norm = torch.randn(head_dim).to(dtype) if has_norm else None
    mine, theirs, q, expected_q = _written(qkv, pool, SCALES, num_heads=num_heads, head_dim=head_dim, norm=norm)
    for written, expected in zip(mine, theirs, strict=True):
        distance = (_codes(written) - _codes(expected)).abs()
        is_carried, is_subnormal = _codes(expected) % 8 == 0, _codes(expected).abs() <= 8
        assert int(distance[~is_carried & ~is_subnormal].max()) <= 1
        assert int(distance.max()) <= 8
        assert float((distance == 0).float().mean()) > 0.8
        assert bool((expected.float() != 7.0).any())
    torch.testing.assert_close(q, expected_q, rtol=2e-3, atol=2e-3)


def test_numbers_that_fp8_has_and_nan_are_written_exactly_and_larger_ones_as_its_largest():
    every = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    v = torch.cat((every, torch.tensor([449.0, -500.0, 1e30, -1e30, float("inf"), -float("inf"), 464.1, -480.0])))
    pool = torch.zeros(8, 16, 1, 66).to(FP8)
    scales = KVScales(k=1.0, v=2.0)
    qkv = torch.cat((torch.zeros(4, 2 * 66), v.view(4, 66) * scales.v), dim=1)
    mine, theirs, _, _ = _written(qkv, pool, scales, num_heads=1, head_dim=66)
    torch.testing.assert_close(mine[1].float(), theirs[1].float(), rtol=0, atol=0, equal_nan=True)
    assert mine[1].float().nan_to_num().abs().max() == 448.0
    assert int(mine[1].float().isnan().sum()) == 2
