"""Triton attention for layers of many kinds, against float64: sinks, windows, chunks, head sizes, views of a pool."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import triton_decode
from kernels.attention.triton_common import split_dims
from kernels.attention.triton_cut_rows import cut_rows
from kernels.attention.triton_decode import decode_attention
from kernels.attention.triton_prefill import PrefillConfig, prefill_attention
from kernels.attention.triton_splits import DecodeScratch
from kernels.elementwise import triton_write_kv
from kernels.ops import norm_rope_write_kv
from tests.unit.kernels.triton_cases.ragged import make_problem, reference, relative_error

SEEN = [{}, {"sliding_window": 1}, {"sliding_window": 40}, {"sliding_window": 130}, {"chunk": 32}, {"chunk": 100}]
NAN = float("nan")


def _scratch(v_cache, num_heads):
    scratch = DecodeScratch.allocate(
        num_heads=num_heads, num_kv_heads=v_cache.shape[2], head_dim=v_cache.shape[3], device=v_cache.device
    )
    scratch.partial.fill_(NAN)
    scratch.lse.fill_(NAN)
    return scratch


def _problem(query_lens, context_lens, *, num_heads=4, num_kv_heads=2, head_dim=16, **options):
    return make_problem(
        query_lens=query_lens, context_lens=context_lens, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, dtype=torch.float32, device="cpu", **{"block_size": 16} | options,
    )  # fmt: skip


def _decode(context_lens, *, splits=None, num_pieces=None, shape=None, sinks=None, **seen):
    q, k_cache, v_cache, metadata = _problem([1] * len(context_lens), context_lens, **(shape or {}), **seen)
    out = torch.full((*q.shape[:2], v_cache.shape[3]), NAN)
    scratch = _scratch(v_cache, q.shape[1])
    pieces = None if num_pieces is None else cut_rows(metadata.seq_lens, num_pieces=num_pieces)
    decode_attention(
        q, k_cache, v_cache, metadata.block_table, metadata.seq_lens, out, scratch, scale=0.25, sinks=sinks,
        num_splits=splits, pieces=pieces, **seen,
    )  # fmt: skip
    assert int(scratch.arrivals.abs().sum()) == 0
    return relative_error(out, reference(q, k_cache, v_cache, metadata, scale=0.25, sinks=sinks, **seen))


def _prefill(query_lens, context_lens, *, config=None, shape=None, sinks=None, **seen):
    q, k_cache, v_cache, metadata = _problem(query_lens, context_lens, **(shape or {}), **seen)
    out = torch.full((*q.shape[:2], v_cache.shape[3]), NAN)
    prefill_attention(
        q, k_cache, v_cache, metadata.block_table, metadata.query_start_loc, metadata.seq_lens, out, scale=0.25,
        max_query_len=max(query_lens), sinks=sinks, config=config, **seen,
    )  # fmt: skip
    return relative_error(out, reference(q, k_cache, v_cache, metadata, scale=0.25, sinks=sinks, **seen))


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("splits", [1, 3])
def test_decode_counts_a_sink_once_for_all_splits(splits, seen):
    sinks = torch.tensor([0.5, -3.0, 6.0, 0.0])
    assert _decode([0, 15, 63, 300, 450], splits=splits, sinks=sinks, **seen) < 1e-5


@pytest.mark.parametrize("num_pieces", [1, 8])
def test_pieces_count_a_sink_once_for_all_of_a_row(num_pieces):
    sinks = torch.tensor([0.5, -3.0, 6.0, 0.0])
    assert _decode([1000, 3, 0, 130, 129], num_pieces=num_pieces, sinks=sinks) < 1e-5


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("seen", SEEN)
def test_prefill_counts_sinks(seen, softcap):
    sinks = torch.tensor([0.5, -3.0, 6.0, 0.0])
    options = seen | ({"softcap": softcap} if softcap else {})
    shape = {key: seen[key] for key in seen}
    q, k_cache, v_cache, metadata = _problem([50, 3, 1], [60, 90, 200], **shape)
    out = torch.full_like(q, NAN)
    prefill_attention(
        q, k_cache, v_cache, metadata.block_table, metadata.query_start_loc, metadata.seq_lens, out, scale=0.25,
        max_query_len=50, sinks=sinks, **options,
    )  # fmt: skip
    expected = reference(q, k_cache, v_cache, metadata, scale=0.25, sinks=sinks, **options)
    assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize("sink", [-float("inf"), -1e4, 1e4])
def test_sinks_far_from_all_logits_take_nothing_or_all(sink):
    q, k_cache, v_cache, metadata = _problem([1, 300, 20], [400, 0, 7])
    sinks, starts = torch.full((4,), sink), metadata.query_start_loc
    out, shared = torch.full_like(q, NAN), (q, k_cache, v_cache, metadata.block_table)
    options = {"scale": 0.25, "sinks": sinks}
    scratch = _scratch(v_cache, 4)
    decode_attention(*shared, metadata.seq_lens, out, scratch, query_start_loc=starts, num_splits=3, **options)
    prefill_attention(
        *shared, starts, metadata.seq_lens, out, max_query_len=300, skips_decodes=True, **options
    )  # fmt: skip
    expected = reference(q, k_cache, v_cache, metadata, scale=0.25) if sink < 0 else torch.zeros_like(out)
    torch.testing.assert_close(out.double(), expected.double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("seen", SEEN)
def test_padding_rows_with_sinks_get_zeros(seen):
    q, k_cache, v_cache, metadata = _problem([1, 40, 17, 1], [0, 0, 9, 20], **seen)
    metadata.seq_lens[:2] = 0
    sinks, starts = torch.tensor([0.5, -3.0, 6.0, 0.0]), metadata.query_start_loc
    out, shared = torch.full_like(q, NAN), (q, k_cache, v_cache, metadata.block_table)
    decode_attention(
        *shared, metadata.seq_lens, out, _scratch(v_cache, 4), scale=0.25, query_start_loc=starts, sinks=sinks, **seen
    )
    prefill_attention(
        *shared, starts, metadata.seq_lens, out, scale=0.25, max_query_len=40, skips_decodes=True, sinks=sinks, **seen
    )
    assert not out[:41].any()
    assert out.isfinite().all()


@pytest.mark.parametrize("masked", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("seen", SEEN[1:])
def test_stale_columns_behind_a_window_never_count(seen, masked):
    shape = {"masked": masked}
    assert _decode([3, 200, 300, 0, 450], splits=2, shape=shape, **seen) < 1e-5
    assert _prefill([50, 3, 1], [60, 90, 200], shape=shape, **seen) < 1e-5
    config = PrefillConfig(block_m=16, block_n=64, num_warps=4, num_stages=1)
    assert _prefill([40, 9, 200], [150, 0, 30], config=config, shape=shape | {"block_size": 32}, **seen) < 1e-5


def test_a_window_is_split_by_its_own_length_and_from_its_first_key(monkeypatch):
    """Of 5,000 keys only the last 300 are read, by at most three programs a row."""
    grids = []
    kernel = triton_decode._decode_kernel

    class Spy:
        def __getitem__(self, grid):
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(triton_decode, "_decode_kernel", Spy())
    assert _decode([5000], sliding_window=300) < 1e-5
    assert grids == [(2, 3, 1)]


@pytest.mark.parametrize("head_dim", [256, 512])
def test_large_heads(head_dim):
    shape = {"head_dim": head_dim, "num_heads": 2, "num_kv_heads": 1}
    sinks = torch.tensor([0.5, -3.0])
    assert _decode([70, 3], splits=2, shape=shape, sinks=sinks) < 1e-5
    assert _prefill([21, 2], [6, 40], shape=shape, sinks=sinks, sliding_window=30) < 1e-5


def test_heads_are_held_in_one_or_two_tiles():
    sizes = (16, 80, 96, 128, 192, 256, 320, 512, 576)
    tiles = [(16, 0), (128, 0), (128, 0), (128, 0), (128, 64), (256, 0), (256, 64), (512, 0), (512, 64)]
    assert [split_dims(size) for size in sizes] == tiles


@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(192, 128), (576, 512), (320, 256), (16, 24), (144, 128), (24, 16), (200, 8)]
)
def test_values_of_another_size_than_keys(head_dim, value_dim):
    shape = {"head_dim": head_dim, "value_dim": value_dim, "num_heads": 3, "num_kv_heads": 1}
    assert _decode([70, 3, 200], splits=2, shape=shape) < 1e-5
    assert _prefill([21, 2], [6, 40], shape=shape) < 1e-5


@pytest.mark.parametrize("seen", [{}, {"sliding_window": 40}])
@pytest.mark.parametrize("shape", [{"padding": 48}, {"padding": 48, "value_dim": 24}])
def test_caches_may_be_views_with_gaps_between_blocks(shape, seen):
    assert _decode([70, 3, 200], splits=2, shape=shape, **seen) < 1e-5
    assert _prefill([21, 2], [6, 40], shape=shape, **seen) < 1e-5


def test_values_may_be_a_part_of_the_keys():
    """As in latent attention, where one cache serves as keys and, without the rotated dimensions, as values."""
    q, k_cache, _, metadata = _problem([1, 1, 20], [70, 3, 40], head_dim=48, num_kv_heads=1)
    v_cache, starts = k_cache[..., :32], metadata.query_start_loc
    out, shared = torch.full((*q.shape[:2], 32), NAN), (q, k_cache, v_cache, metadata.block_table)
    decode_attention(*shared, metadata.seq_lens, out[:2], _scratch(v_cache, 4), scale=0.25, query_start_loc=starts[:3])
    prefill_attention(*shared, starts, metadata.seq_lens, out, scale=0.25, max_query_len=20, first_row=2)
    assert relative_error(out, reference(q, k_cache, v_cache, metadata, scale=0.25)) < 1e-5


def test_norm_rope_write_kv_fills_blocks_that_have_gaps_between_them():
    qkv, angles, slots = torch.randn(5, 8 * 16), torch.randn(20, 16), torch.tensor([3, 9, 1, 30, 8])
    arguments = (qkv, None, None, 1e-6, torch.arange(5), angles)
    pools = [torch.zeros(4, 8 * 2 * 16 + 32) for _ in range(2)]
    views = [pool[:, :256].unflatten(1, (8, 2, 16)) for pool in pools]
    dense = [torch.zeros(4, 8, 2, 16) for _ in range(2)]
    triton_write_kv.norm_rope_write_kv(*arguments, *views, slots, num_heads=4)
    norm_rope_write_kv(*arguments, *dense, slots, num_heads=4)
    for pool, view, expected in zip(pools, views, dense, strict=True):
        torch.testing.assert_close(view, expected)
        assert not pool[:, 256:].any()
