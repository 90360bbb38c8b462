"""Latent attention's kernels against float64: short rows in pieces, drafts, long rows, padding, fp8, odd sizes."""

from __future__ import annotations

import pytest
import torch

from kernels.attention.latent import _SCRATCH_ENTRIES
from kernels.attention.triton_cut_rows import cut_rows
from kernels.attention.triton_latent import latent_attention
from kernels.attention.triton_latent_splits import (
    LatentConfig,
    LatentScratch,
    pieces_at_once,
    short_config,
    short_tokens,
)
from kernels.elementwise.reference import KVScales
from tests.unit.kernels.triton_cases.ragged import as_fp8, make_problem, reference, relative_error

NAN = float("nan")
SMALL = LatentConfig(block_m=16, block_n=32, num_warps=4, num_stages=1)


def _problem(query_lens, context_lens, *, num_heads=16, rank=32, rope_dim=16, **options):
    q, cache, _, metadata = make_problem(
        query_lens=query_lens, context_lens=context_lens, num_heads=num_heads, num_kv_heads=1,
        head_dim=rank + rope_dim, dtype=torch.float32, device="cpu", **{"block_size": 16} | options,
    )  # fmt: skip
    return q, cache, cache[..., :rank], metadata


def _scratch(num_heads, rank, *, num_pieces=None):
    """Buffers of NaN, so that what is read was written."""
    scratch = LatentScratch.allocate(num_heads=num_heads, rank=rank, dtype=torch.float32, device=torch.device("cpu"))
    num_pieces = num_pieces or scratch.num_pieces
    size = 2 * num_pieces * scratch.members
    return LatentScratch(torch.full((size, rank), NAN), torch.full((size,), NAN), num_heads, num_pieces)


def _run(q, cache, rank, metadata, *, num_pieces=None, config=SMALL, **options):
    scratch = _scratch(q.shape[1], rank, num_pieces=num_pieces)
    out = torch.full((*q.shape[:2], rank), NAN)
    pieces = scratch.cut(metadata)
    latent_attention(q, cache, metadata, out, scratch, pieces, scale=0.25, short=config, long=config, **options)
    return out


def _error(query_lens, context_lens, *, num_pieces=None, config=SMALL, is_mixed=False, **shape):
    q, cache, values, metadata = _problem(query_lens, context_lens, **shape)
    if is_mixed:
        metadata.num_decodes = None
    out = _run(q, cache, values.shape[3], metadata, num_pieces=num_pieces, config=config)
    return relative_error(out, reference(q, cache, values, metadata, scale=0.25))


@pytest.mark.parametrize("num_pieces", [1, 3, 8])
@pytest.mark.parametrize(
    ("num_heads", "rank", "rope_dim"), [(16, 32, 16), (20, 24, 8), (3, 64, 6), (128, 16, 16), (40, 48, 24)]
)
def test_rows_of_one_token_in_pieces(num_heads, rank, rope_dim, num_pieces):
    shape = {"num_heads": num_heads, "rank": rank, "rope_dim": rope_dim}
    assert _error([1] * 4, [700, 3, 200, 0], num_pieces=num_pieces, **shape) < 1e-5


@pytest.mark.parametrize("block_m", [16, 32, 64])
@pytest.mark.parametrize("num_heads", [5, 16, 32, 48])
def test_heads_are_cut_in_tiles(num_heads, block_m):
    config = LatentConfig(block_m=block_m, block_n=16, num_warps=4, num_stages=1)
    shape = {"num_heads": num_heads, "config": config}
    assert _error([1, 1], [300, 40], num_pieces=4, **shape) < 1e-5
    assert _error([4, 30, 9], [300, 0, 17], num_pieces=4, is_mixed=True, **shape) < 1e-5


@pytest.mark.parametrize(("num_heads", "num_pieces"), [(16, 6), (16, 1), (20, 6), (64, 4), (128, 6)])
def test_drafts_and_prompts_beside_rows_of_one_token(num_heads, num_pieces):
    query_lens, context_lens = [1, 2, 1, 8, 3, 9, 20], [400, 300, 5, 129, 0, 60, 0]
    shape = {"num_heads": num_heads, "is_mixed": True}
    assert _error(query_lens, context_lens, num_pieces=num_pieces, **shape) < 1e-5


def test_a_draft_that_sees_no_key_of_a_piece_takes_nothing_from_it():
    """Pieces of 64 keys at least: the last ones begin behind the first token's last key."""
    assert _error([8], [128], num_pieces=8, is_mixed=True) < 1e-5


def test_the_longest_short_row_depends_on_its_heads():
    assert [short_tokens(num_heads) for num_heads in (1, 16, 20, 32, 64, 128, 300)] == [8, 8, 8, 8, 4, 2, 1]


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [3, 1, 30]])
def test_padding_rows_yield_zeros(query_lens):
    q, cache, values, metadata = _problem(query_lens, [0, 200, 0])
    metadata.seq_lens[0] = metadata.seq_lens[2] = 0
    metadata.num_decodes = None
    out = _run(q, cache, values.shape[3], metadata, num_pieces=4)
    start, end = query_lens[0], query_lens[0] + query_lens[1]
    assert not out[:start].any()
    assert not out[end:].any()
    expected = reference(q, cache, values, metadata, scale=0.25)
    assert relative_error(out, expected) < 1e-5


def test_rows_without_tokens_are_passed_over():
    """As behind the real rows of a captured step."""
    q, cache, values, metadata = _problem([1, 20, 1], [80, 10, 3])
    metadata.query_start_loc = torch.cat((metadata.query_start_loc, metadata.query_start_loc[-1:].expand(5)))
    metadata.seq_lens = torch.cat((metadata.seq_lens, torch.zeros(5, dtype=torch.int32)))
    metadata.block_table = torch.cat((metadata.block_table, metadata.block_table[:1].expand(5, -1)))
    metadata.num_decodes = None
    out = _run(q, cache, values.shape[3], metadata)
    assert relative_error(out, reference(q, cache, values, metadata, scale=0.25)) < 1e-5


def test_rows_past_the_prompts_have_one_token():
    q, cache, values, metadata = _problem([12, 20, 1, 1], [80, 10, 3, 100])
    metadata.num_decodes, metadata.max_prefills = None, 2
    out = _run(q, cache, values.shape[3], metadata)
    assert relative_error(out, reference(q, cache, values, metadata, scale=0.25)) < 1e-5


@pytest.mark.parametrize("padding", [0, 32])
def test_blocks_may_lie_apart_and_their_unused_slots_never_count(padding):
    for masked in (NAN, float("inf")):
        assert _error([1, 1, 25], [70, 3, 33], masked=masked, padding=padding, is_mixed=True) < 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 5e-3), (torch.float16, 1e-3), (torch.float32, 1e-5)])
def test_an_fp8_cache_is_scaled(dtype, tolerance):
    q, cache, _, metadata = _problem([1, 1, 20], [70, 3, 40])
    q = q.to(dtype)
    metadata.num_decodes = None
    pool, stands_for = as_fp8(cache, 0.5)
    out = _run(q, pool, 32, metadata, kv_scales=KVScales(k=0.5, v=0.5))
    assert relative_error(out, reference(q, stands_for, stands_for[..., :32], metadata, scale=0.25)) < tolerance


def test_short_rows_are_cut_and_others_are_not():
    seq_lens = torch.tensor([1000, 300, 64, 70], dtype=torch.int32)
    starts = torch.tensor([0, 8, 17, 17, 20], dtype=torch.int32)
    pieces = cut_rows(seq_lens, num_pieces=8, query_start_loc=starts, max_query_len=8)
    live = [piece for piece in pieces.tolist() if piece[3] & 0xFFFF]
    assert {piece[0] for piece in live} == {0, 3}
    assert sum(piece[2] - piece[1] for piece in live if piece[0] == 0) == 1000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_start_counts_buffers_of_this_size(dtype):
    for num_heads in (1, 16, 20, 32, 33, 64, 100, 128, 256):
        num_pieces = pieces_at_once(num_heads, short_config(num_heads, dtype), num_sms=160)
        assert 2 * num_pieces * short_tokens(num_heads) * num_heads <= _SCRATCH_ENTRIES
