"""Decode rows that share keys: grouped in tiles, attended together, merged; against float64, in the interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.attention.base import SharedRows
from kernels.attention.triton_backend import TritonAttention
from kernels.attention.triton_cut_rows import cut_rows
from kernels.attention.triton_decode import decode_attention
from kernels.attention.triton_group_rows import group_rows
from kernels.attention.triton_shared import SharedConfig, shared_attention
from kernels.attention.triton_splits import DecodeScratch
from kernels.elementwise.reference import KVScales
from tests.unit.kernels.triton_cases.ragged import as_fp8, as_int8, make_problem, reference, relative_error
from tests.unit.kernels.triton_cases.shared_problem import share_blocks

CONFIG = SharedConfig(block_m=16, block_n=32, num_warps=4, num_stages=1, per_sm=1)


def _grouped(
    context_lens, groups, *, query_lens=None, num_heads=4, num_kv_heads=2, head_dim=16, value_dim=None, num_pieces=3,
    own_pieces=6, dtype=torch.float32, pool=None, **options,
):  # fmt: skip
    """Relative error of grouped decode attention of the rows of one token."""
    query_lens = query_lens or [1] * len(context_lens)
    q, k_cache, v_cache, metadata = make_problem(
        query_lens=query_lens, context_lens=context_lens, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, value_dim=value_dim, block_size=16, dtype=dtype, device="cpu",
    )  # fmt: skip
    metadata = share_blocks(k_cache, v_cache, metadata, groups)
    kv_scales, k_true, v_true = KVScales(1.0, 1.0), k_cache, v_cache
    if pool == "fp8":
        (k_cache, k_true), (v_cache, v_true) = as_fp8(k_cache, 0.5), as_fp8(v_cache, 2.0)
        kv_scales = KVScales(k=0.5, v=2.0)
    elif pool == "int8":
        (k_cache, k_scales, k_true), (v_cache, v_scales, v_true) = as_int8(k_cache), as_int8(v_cache)
        kv_scales = KVScales(k=k_scales, v=v_scales)
    is_ragged = any(count != 1 for count in query_lens)
    starts = metadata.query_start_loc if is_ragged else None
    grouped = group_rows(
        metadata.shared, metadata.seq_lens, tile_rows=CONFIG.block_m // (num_heads // num_kv_heads),
        num_pieces=num_pieces, query_start_loc=starts,
    )  # fmt: skip
    own = cut_rows(metadata.seq_lens, num_pieces=own_pieces, query_start_loc=starts, shared_rows=grouped.rows)
    scratch = DecodeScratch.allocate(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=v_cache.shape[3], device=torch.device("cpu")
    )
    out = torch.full((*q.shape[:2], v_cache.shape[3]), float("nan"), dtype=q.dtype)
    common = {
        "scale": head_dim**-0.5, "softcap": options.get("softcap", 0.0), "kv_scales": kv_scales,
        "query_start_loc": starts,
    }  # fmt: skip
    parts = shared_attention(q, k_cache, v_cache, metadata.block_table, grouped, CONFIG, **common)
    decode_attention(
        q, k_cache, v_cache, metadata.block_table, metadata.seq_lens, out, scratch,
        pieces=own, shared=parts, sinks=options.get("sinks"), **common,
    )  # fmt: skip
    assert int(scratch.arrivals.abs().sum()) == 0
    expected = reference(q, k_true, v_true, metadata, scale=head_dim**-0.5, **options)
    starts = metadata.query_start_loc.tolist()
    tokens = [start for start, count in zip(starts, query_lens, strict=False) if count == 1]
    return relative_error(out[tokens], expected[tokens])


@pytest.mark.parametrize("num_pieces", [1, 3, 40])
@pytest.mark.parametrize("own_pieces", [1, 20])
def test_grouped_rows_equal_the_reference(num_pieces, own_pieces):
    lengths = [300, 90, 64, 80, 700, 301, 320, 64]
    groups = [([0, 5, 6], 288), ([1, 3, 4], 64)]
    assert _grouped(lengths, groups, num_pieces=num_pieces, own_pieces=own_pieces) < 1e-5


def test_a_group_larger_than_a_tile():
    assert _grouped([200 + row for row in range(12)], [(list(range(12)), 192)], num_pieces=4) < 1e-5


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "value_dim"), [(3, 1, 20, None), (2, 2, 32, None), (16, 1, 80, 48)]
)
def test_any_number_of_heads_and_any_size(num_heads, num_kv_heads, head_dim, value_dim):
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "value_dim": value_dim}
    assert _grouped([70, 130, 75], [([0, 1, 2], 64)], **sizes) < 1e-5


@pytest.mark.parametrize("own_pieces", [2, 20])
def test_sinks_count_once_and_logits_are_capped(own_pieces):
    sinks = torch.randn(4)
    case = [300, 700, 310, 5], [([0, 1, 2], 256)]
    assert _grouped(*case, own_pieces=own_pieces, sinks=sinks) < 1e-5
    assert _grouped(*case, own_pieces=own_pieces, softcap=2.0) < 1e-5


@pytest.mark.parametrize("pool", ["fp8", "int8"])
def test_pools_of_one_byte_are_grouped_too(pool):
    assert _grouped([150, 170, 9], [([0, 1], 144)], pool=pool, own_pieces=9) < 1e-5


def test_bfloat16_queries_meet_fp8_keys_in_float16():
    assert _grouped([150, 170, 9], [([0, 1], 144)], pool="fp8", own_pieces=9, dtype=torch.bfloat16) < 5e-3


def test_int8_values_keep_their_scales_in_float16():
    assert _grouped([150, 170, 9], [([0, 1], 144)], pool="int8", dtype=torch.float16) < 2e-3


def test_ragged_rows_are_grouped_if_they_have_one_token():
    lengths, counts = [130, 200, 129, 0, 140], [1, 1, 1, 5, 2]
    assert _grouped(lengths, [([0, 1, 2], 128)], query_lens=counts) < 1e-5


def test_float16_rounds_no_worse_than_the_output():
    assert _grouped([200, 210], [([0, 1], 192)], dtype=torch.float16) < 1e-3


def _group(groups, seq_lens, *, tile_rows=4, num_pieces=4, query_lens=None):
    """Rows by tile, shared keys by row, and the pieces of each tile."""
    shares = torch.tensor([*groups, (0, 0)], dtype=torch.int32)
    starts = None if query_lens is None else torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    shared = SharedRows(torch.arange(len(seq_lens)), shares, max_groups=8)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    grouped = group_rows(shared, lengths, tile_rows=tile_rows, num_pieces=num_pieces, query_start_loc=starts)
    pieces = [piece for piece in grouped.pieces.tolist() if piece[2]]
    tiles = {}
    for number in {piece[0] for piece in pieces}:
        members = grouped.members[number * tile_rows : (number + 1) * tile_rows].tolist()
        tiles[number] = [row for row in members if row >= 0]
        assert members == tiles[number] + [-1] * (tile_rows - len(tiles[number]))
    return grouped.rows.tolist(), tiles, pieces


@pytest.mark.parametrize("num_pieces", [1, 4, 60])
@pytest.mark.parametrize("num_rows", [5, 70])
def test_each_row_of_a_group_is_once_in_a_tile_whose_pieces_cover_the_shared_keys(num_rows, num_pieces):
    groups = [((row * row) % 4, [0, 640, 4096, 100][(row * row) % 4]) for row in range(num_rows)]
    rows, tiles, pieces = _group(groups, [5000] * num_rows, num_pieces=num_pieces)
    members = sorted(row for tile in tiles.values() for row in tile)
    assert members == [row for row in range(num_rows) if rows[row][0]]
    for row, (shared, splits, first, place) in enumerate(rows):
        number, length = groups[row]
        count = sum(other[0] == number for other in groups)
        assert shared == (length if number and count > 1 else 0)
        if shared:
            own = pieces[first : first + splits]
            assert len({piece[0] for piece in own}) == 1
            assert tiles[own[0][0]][place] == row
            assert own[0][1] == 0
            assert own[-1][2] == shared
            assert [piece[2] for piece in own[:-1]] == [piece[1] for piece in own[1:]]


def test_rows_alone_short_of_the_shared_keys_or_of_several_tokens_are_in_no_group():
    rows, _, _ = _group([(1, 64)] * 4 + [(2, 64)], [65, 64, 80, 90, 99], query_lens=[1, 1, 2, 1, 1])
    assert [row[0] for row in rows] == [64, 0, 0, 64, 0]


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("is_prepared", [False, True])
def test_the_backend_groups_layers_that_see_whole_rows(is_mixed, is_prepared):
    q, k_cache, v_cache, metadata = make_problem(
        query_lens=[1, 1, 1, 3], context_lens=[70, 80, 200, 20], num_heads=4, num_kv_heads=2, head_dim=16,
        block_size=16, dtype=torch.float32, device="cpu",
    )  # fmt: skip
    metadata = share_blocks(k_cache, v_cache, metadata, [([0, 1, 2], 64)])
    if is_mixed:
        metadata = dataclasses.replace(metadata, num_decodes=None)
    backend = TritonAttention()
    for options in ({}, {"sliding_window": 40}, {"softcap": 3.0}):
        if is_prepared:
            backend.prepare(metadata)
        out = backend.forward(q, k_cache, v_cache, metadata, scale=0.25, **options)
        assert relative_error(out, reference(q, k_cache, v_cache, metadata, scale=0.25, **options)) < 1e-5
    backend.prepare(plain := dataclasses.replace(metadata, shared=None, grouped_rows=None, decode_pieces=None))
    out = backend.forward(q, k_cache, v_cache, plain, scale=0.25)
    assert relative_error(out, reference(q, k_cache, v_cache, plain, scale=0.25)) < 1e-5
