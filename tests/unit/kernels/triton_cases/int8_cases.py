"""The Triton kernels over an int8 pool, and an fp8 pool with scales of each head, against their specifications."""

from __future__ import annotations

import pytest
import torch

from kernels.attention.triton_common import INT8_TO_FLOAT16
from kernels.attention.triton_decode import decode_attention
from kernels.attention.triton_prefill import PrefillConfig, prefill_attention
from kernels.attention.triton_splits import DecodeScratch
from kernels.elementwise import reference as elementwise
from kernels.elementwise.reference import FP8, KVScales, write_kv
from kernels.elementwise.triton_write_kv import norm_rope_write_kv
from tests.unit.kernels.triton_cases.ptx import run_ptx
from tests.unit.kernels.triton_cases.ragged import (
    as_fp8,
    as_int8,
    empty_int8,
    make_problem,
    reference,
    relative_error,
)

NAN = float("nan")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3}
HEADS = [(4, 2, 64), (4, 1, 64), (3, 1, 128), (2, 1, 80), (2, 1, 192)]
OPTIONS = [
    {"sliding_window": 40, "sinks": True}, {"softcap": 2.0}, {"sliding_window": 130, "softcap": 1.0}, {"chunk": 64},
]  # fmt: skip


def _problem(query_lens, context_lens, *, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16,
             dtype=torch.float32, value_dim=None, v_factor=1.0, options=None):  # fmt: skip
    """q, the caches, their scales, metadata, the caches that they stand for, and the options of attention."""
    options = dict(options or {})
    seen = {name: options[name] for name in ("sliding_window", "chunk") if name in options}
    q, k_cache, v_cache, metadata = make_problem(
        query_lens=query_lens, context_lens=context_lens, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, block_size=block_size, dtype=dtype, device="cpu", value_dim=value_dim, **seen,
    )  # fmt: skip
    k_cache[..., 0] += 200  # as biased keys have it: fp8's steps are 16 there
    keys, k_scales, k_values = as_int8(k_cache)
    values, v_scales, v_values = as_int8(v_cache * v_factor, widest=head_dim)
    if options.get("sinks"):
        options["sinks"] = torch.randn(num_heads)
    return q, (keys, values), KVScales(k=k_scales, v=v_scales), metadata, (k_values, v_values), options


def _decode(context_lens, *, splits=None, **shape):
    q, pool, scales, metadata, exact, options = _problem([1] * len(context_lens), context_lens, **shape)
    scratch = DecodeScratch.allocate(
        num_heads=q.shape[1], num_kv_heads=pool[0].shape[2], head_dim=pool[1].shape[3], device=torch.device("cpu")
    )
    out = torch.full((*q.shape[:2], pool[1].shape[3]), NAN, dtype=q.dtype)
    scale = 0.02 * q.shape[2] ** -0.5
    decode_attention(
        q, *pool, metadata.block_table, metadata.seq_lens, out, scratch, scale=scale, kv_scales=scales,
        num_splits=splits, **options,
    )  # fmt: skip
    return relative_error(out, reference(q, *exact, metadata, scale=scale, **options))


def _prefill(query_lens, context_lens, *, config=None, **shape):
    q, pool, scales, metadata, exact, options = _problem(query_lens, context_lens, **shape)
    scale = 0.02 * q.shape[2] ** -0.5
    out = torch.full((*q.shape[:2], pool[1].shape[3]), NAN, dtype=q.dtype)
    prefill_attention(
        q, *pool, metadata.block_table, metadata.query_start_loc, metadata.seq_lens, out, scale=scale,
        max_query_len=max(query_lens), kv_scales=scales, config=config, **options,
    )  # fmt: skip
    return relative_error(out, reference(q, *exact, metadata, scale=scale, **options))


@pytest.mark.parametrize("splits", [3, 1])
def test_decode_equals_the_reference_at_any_number_of_splits(splits):
    assert _decode([0, 15, 63, 300], splits=splits) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
def test_decode_takes_any_group_and_head_dim(num_heads, num_kv_heads, head_dim):
    assert _decode([70, 9], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, splits=2) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_decode_takes_any_block_size(block_size):
    assert _decode([70, 200], block_size=block_size) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("options", OPTIONS)
def test_decode_honours_windows_chunks_sinks_and_softcap(options):
    assert _decode([3, 200], splits=2, options=options) < 1e-5


@pytest.mark.parametrize("v_factor", [1e-3, 1.0, 6e3])
def test_values_of_any_size_keep_half_precision(v_factor):
    """Weights hold the scales of values: the small ones of these are among the subnormal numbers of float16."""
    assert _decode([200], dtype=torch.float16, v_factor=v_factor) < TOLERANCE[torch.float16]


def test_prefill_of_ragged_rows_with_and_without_context():
    assert _prefill([5, 1, 40, 17], [0, 33, 10, 100]) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("value_dim", [None, 32])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
def test_prefill_takes_any_group_and_head_dim(num_heads, num_kv_heads, head_dim, value_dim):
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "value_dim": value_dim}
    assert _prefill([21], [6], **shape) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_prefill_takes_any_block_size(block_size):
    config = PrefillConfig(block_m=16, block_n=64, num_warps=4, num_stages=1)
    assert _prefill([40, 9], [150, 0], block_size=block_size, config=config) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("options", OPTIONS)
def test_prefill_honours_windows_chunks_sinks_and_softcap(options):
    assert _prefill([50, 3], [60, 90], options=options) < 1e-5


@pytest.mark.full
def test_prefill_in_half_precision():
    assert _prefill([50, 3], [60, 90], dtype=torch.float16, v_factor=1e-3) < TOLERANCE[torch.float16]


def _write(qkv, scales_of, caches, *, num_heads, head_dim, norm=None, **options):
    """Write by the fused kernel and by its specification into caches of each, and return both q."""
    num_tokens, num_kv_heads = qkv.shape[0], caches[0][0].shape[2]
    positions, slots = torch.arange(num_tokens), torch.randperm(8 * 16)[:num_tokens]
    angles = torch.randn(num_tokens, head_dim)
    q = norm_rope_write_kv(
        qkv, norm, norm, 1e-6, positions, angles, *caches[0], slots, num_heads=num_heads, kv_scales=scales_of[0],
        **options,
    )  # fmt: skip
    parts = qkv.view(num_tokens, -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    expected_q, k = parts[:2] if norm is None else (elementwise.rms_norm(x, norm, 1e-6) for x in parts[:2])
    expected_q, k = elementwise.apply_rope(expected_q, k, positions, angles, **options)
    write_kv(k, parts[2], *caches[1], slots, scales_of[1])
    return q, expected_q


def _write_int8(qkv, *, num_heads, num_kv_heads, head_dim, **options):
    """The (numbers, scales) of keys and values by the kernel, and by its specification; and both q."""
    made = [[empty_int8(8, 16, num_kv_heads, head_dim) for _ in range(2)] for _ in range(2)]
    caches = [[numbers for numbers, _ in pair] for pair in made]
    scales = [KVScales(k=pair[0][1], v=pair[1][1]) for pair in made]
    q = _write(qkv, scales, caches, num_heads=num_heads, head_dim=head_dim, **options)
    return *made, q


@pytest.mark.parametrize(("has_norm", "is_interleaved"), [(True, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 80), (3, 1, 128), (2, 1, 192)])
def test_the_fused_kernel_writes_what_its_specification_does(
    num_heads, num_kv_heads, head_dim, dtype, has_norm, is_interleaved
):
    qkv = torch.randn(5, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    norm = torch.randn(head_dim).to(dtype) if has_norm else None
    mine, theirs, (q, expected_q) = _write_int8(
        qkv, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, norm=norm, is_interleaved=is_interleaved
    )
    torch.testing.assert_close(q, expected_q, rtol=2e-3, atol=2e-3)
    (keys, k_scales), (values, v_scales) = mine
    (expected_keys, expected_k_scales), (expected_values, expected_v_scales) = theirs
    assert torch.equal(values, expected_values)
    assert torch.equal(v_scales, expected_v_scales)
    torch.testing.assert_close(k_scales, expected_k_scales, rtol=2e-3, atol=0)  # a sum in another order, rounded
    assert int((keys.int() - expected_keys.int()).abs().max()) <= 1
    assert bool(expected_keys.any())


def test_heads_of_zeros_tiny_and_huge_numbers_and_halves_are_rounded_as_specified_and_nan_is_kept():
    rows = torch.zeros(8, 64)
    rows[1] = 1e-35
    rows[2, :3] = torch.tensor([127.0, 0.5, -1.5])  # ties go to even
    rows[3] = torch.linspace(-1, 1, 64) * 3e38
    rows[4, 5], rows[5, 6], rows[6, 7] = NAN, float("inf"), -float("inf")
    rows[4:7, 20] = 1.0
    rows[7] = torch.randn(64)
    qkv = torch.cat((torch.zeros(8, 128), rows), dim=1)
    mine, theirs, _ = _write_int8(qkv, num_heads=1, num_kv_heads=1, head_dim=64)
    for (numbers, scales), (expected, expected_scales) in zip(mine, theirs, strict=True):
        assert torch.equal(numbers, expected)
        torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)
    assert (int(mine[1][1].isnan().sum()), int(mine[1][1].isinf().sum())) == (1, 2)


def test_scales_of_each_head_of_an_fp8_pool_are_those_of_the_specification():
    q, k_cache, v_cache, metadata = make_problem(
        query_lens=[1, 20], context_lens=[30, 9], num_heads=4, num_kv_heads=2, head_dim=64, block_size=16,
        dtype=torch.float32, device="cpu",
    )  # fmt: skip
    scales = KVScales(k=torch.tensor([0.5, 2.0]), v=torch.tensor([4.0, 0.25]))
    (keys, k_values), (values, v_values) = as_fp8(k_cache, scales.k), as_fp8(v_cache, scales.v)
    out, scratch = torch.full_like(q, NAN), DecodeScratch.allocate(
        num_heads=4, num_kv_heads=2, head_dim=64, device=torch.device("cpu")
    )  # fmt: skip
    table, options = metadata.block_table, {"scale": 0.125, "kv_scales": scales}
    decode_attention(q[:1], keys, values, table, metadata.seq_lens, out[:1], scratch, **options)
    prefill_attention(
        q, keys, values, table, metadata.query_start_loc, metadata.seq_lens, out, max_query_len=20, first_row=1,
        **options,
    )  # fmt: skip
    assert relative_error(out, reference(q, k_values, v_values, metadata, scale=0.125)) < 1e-5
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float().nan_to_num(0.0).view(2, 2, 64)
    qkv = torch.cat((torch.zeros(2, 4, 64), numbers * scales.v[:, None]), dim=1).flatten(1)
    caches = [[torch.zeros(8, 16, 2, 64).to(FP8) for _ in range(2)] for _ in range(2)]
    _write(qkv, [scales] * 2, caches, num_heads=2, head_dim=64)
    assert torch.equal(caches[0][1].float(), caches[1][1].float())


def test_ptx_makes_float16_of_every_number():
    every = torch.arange(-128, 128, dtype=torch.int8).view(-1, 4)
    for four, word in zip(every, every.view(torch.uint32).flatten().tolist(), strict=True):
        pairs = [run_ptx(INT8_TO_FLOAT16.value, {"$2": word}, {}, output=name) for name in ("$0", "$1")]
        found = torch.tensor(pairs, dtype=torch.uint32).view(torch.float16)
        assert found.tolist() == four.tolist()
