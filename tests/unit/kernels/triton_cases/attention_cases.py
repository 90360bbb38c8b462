"""Triton attention against float64 on tiny ragged problems, through Triton's interpreter."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from kernels.attention import triton_decode, triton_prefill
from kernels.attention.triton_cut_rows import cut_rows
from kernels.attention.triton_decode import decode_attention
from kernels.attention.triton_prefill import PrefillConfig, prefill_attention
from kernels.attention.triton_splits import DecodeScratch
from tests.unit.kernels.triton_cases.ragged import make_problem, reference, relative_error


def _decode(
    context_lens,
    *,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    block_size=16,
    dtype=torch.float32,
    splits=None,
    num_pieces=None,
    masked=float("nan"),
    **options,
):
    q, k_cache, v_cache, metadata = make_problem(
        query_lens=[1] * len(context_lens), context_lens=context_lens, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, block_size=block_size, dtype=dtype, device="cpu", masked=masked,
        sliding_window=options.get("sliding_window"),
    )  # fmt: skip
    scratch = DecodeScratch.allocate(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, device=torch.device("cpu")
    )
    scratch.partial.fill_(float("nan"))
    scratch.lse.fill_(float("nan"))
    out = torch.full_like(q, float("nan"))
    scale = head_dim**-0.5
    pieces = None if num_pieces is None else cut_rows(metadata.seq_lens, num_pieces=num_pieces)
    decode_attention(
        q, k_cache, v_cache, metadata.block_table, metadata.seq_lens, out, scratch,
        scale=scale, num_splits=splits, pieces=pieces, **options,
    )  # fmt: skip
    assert int(scratch.arrivals.abs().sum()) == 0
    return relative_error(out, reference(q, k_cache, v_cache, metadata, scale=scale, **options))


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_decode_equals_the_reference_at_any_number_of_splits(splits):
    assert _decode([0, 15, 63, 300], splits=splits) < 1e-5


def test_decode_chooses_its_splits():
    assert _decode([500]) < 1e-5


@pytest.mark.parametrize("num_pieces", [1, 3, 8])
@pytest.mark.parametrize("context_lens", [[0, 15, 63, 300], [1000, 3, 0, 130, 129, 128], [5, 6], [700]])
def test_decode_of_pieces_equals_the_reference(context_lens, num_pieces):
    assert _decode(context_lens, num_pieces=num_pieces) < 1e-5


def test_decode_of_pieces_honours_softcap_and_any_group():
    assert _decode([3, 500], num_pieces=6, num_heads=3, num_kv_heads=1, head_dim=20, softcap=2.0) < 1e-5


def _cut(seq_lens, *, num_pieces, query_lens=None):
    starts = None if query_lens is None else torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    return cut_rows(lengths, num_pieces=num_pieces, query_start_loc=starts).tolist()


@pytest.mark.parametrize("num_pieces", [1, 4, 50, 400])
@pytest.mark.parametrize("seq_lens", [[0], [9000, 1, 64, 700], [1024] * 70, [100_000, *range(99)]])
def test_pieces_cover_each_row_once_and_are_about_equal(seq_lens, num_pieces):
    pieces = [piece for piece in _cut(seq_lens, num_pieces=num_pieces) if piece[3]]
    for row, seq_len in enumerate(seq_lens):
        ends = [(start, end) for at, start, end, _ in pieces if at == row]
        assert ends[0][0] == 0
        assert ends[-1][1] == seq_len
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(ends))
        assert [split for at, _, _, split in pieces if at == row] == [(i << 16) + len(ends) for i in range(len(ends))]
        assert len(ends) <= 128
    share = sum(-(-seq_len // 64) for seq_len in seq_lens) / num_pieces
    is_few = 2 * len(seq_lens) <= num_pieces
    has_limit = len(seq_lens) < num_pieces  # of few rows num_pieces, of more twice their number
    bound = 64 * max(2, (2 if has_limit else 1) * (share + 1), max(seq_lens) / 64 / 128 + 1)
    assert max(end - start for _, start, end, _ in pieces) <= bound
    split_rows = [piece[3] & 0xFFFF > 1 for piece in pieces]
    assert split_rows == sorted(split_rows, reverse=True)
    assert sum(split_rows) < 2 * num_pieces or not any(split_rows)
    assert len(pieces) <= num_pieces or not is_few


@pytest.mark.parametrize("share_of_rows", [0.5, 0.75, 1.0])
def test_few_rows_never_get_more_pieces_than_room(share_of_rows):
    draw = random.Random(0)
    for _ in range(40):
        num_pieces = draw.randint(2, 60)
        num_rows = max(1, int(num_pieces * share_of_rows))
        lengths = [draw.choice([0, 1, 64, 65, 129, draw.randint(0, 40_000)]) for _ in range(num_rows)]
        pieces = _cut(lengths, num_pieces=num_pieces)
        # of which those that no row needs are none
        assert len(pieces) == max(num_pieces, 2 * num_rows)
        keys = [end - start for _, start, end, splits in pieces if splits]
        assert sum(keys) == sum(lengths)
        assert {row for row, _, _, splits in pieces if splits} == set(range(len(lengths)))


@pytest.mark.parametrize("warps_per_sm", [0, 8])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 8), (16, 8), (32, 8), (12, 3), (16, 1), (40, 40)])
def test_the_scratch_holds_the_pieces_of_all_rows(num_heads, num_kv_heads, warps_per_sm):
    draw, group = random.Random(0), num_heads // num_kv_heads
    scratch = DecodeScratch.allocate(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=16, device=torch.device("cpu"),
        warps_per_sm=warps_per_sm,
    )  # fmt: skip
    most_entries = most_counters = 0
    for num_rows in [*range(2, 20), *(draw.randint(2, 300) for _ in range(40))]:
        longest = draw.choice([100, 1000, 10_000, 100_000])
        lengths = [draw.choice([0, 1, 129, longest, draw.randint(0, longest)]) for _ in range(num_rows)]
        lengths = [longest] * num_rows if num_rows % 3 == 0 else lengths
        pieces = _cut(lengths, num_pieces=scratch.num_pieces(num_rows=num_rows, num_kv_heads=num_kv_heads))
        for place, (_, _, _, splits) in enumerate(pieces):
            split, used_splits = splits >> 16, splits & 0xFFFF
            if used_splits > 1:  # of the last KV head
                first = (place - split) * num_kv_heads
                entry = first + (num_kv_heads - 1) * used_splits + split
                most_entries = max(most_entries, (entry + 1) * group)
                most_counters = max(most_counters, first + num_kv_heads)
    assert most_entries > 0 or num_kv_heads > scratch.num_sms
    assert most_entries <= scratch.lse.shape[0] == scratch.partial.shape[0]
    assert most_counters <= scratch.arrivals.shape[0]


def test_only_rows_of_one_token_are_cut():
    pieces = _cut([300, 40, 0, 500, 7], num_pieces=4, query_lens=[1, 30, 1, 0, 1])
    assert [row for row, _, _, splits in pieces if splits] == [0, 0, 0, 2, 4]


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(3, 1, 20), (2, 2, 32), (8, 1, 80)])
def test_decode_takes_any_group_and_head_dim(num_heads, num_kv_heads, head_dim):
    assert _decode([70], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, splits=2) < 1e-5


@pytest.mark.parametrize("options", [{"sliding_window": 40}, {"softcap": 2.0}, {"sliding_window": 130, "softcap": 1.0}])
def test_decode_honours_window_and_softcap(options):
    assert _decode([3, 200, 300], splits=2, **options) < 1e-5


def test_decode_rounds_no_worse_than_the_output_dtype():
    assert _decode([200], splits=2, dtype=torch.float16) < 1e-3


def test_a_padding_row_gets_zeros():
    q = torch.randn(2, 4, 16)
    cache = torch.randn(4, 16, 2, 16)
    out = torch.full_like(q, float("nan"))
    scratch = DecodeScratch.allocate(num_heads=4, num_kv_heads=2, head_dim=16, device=torch.device("cpu"))
    table, seq_lens = torch.zeros(2, 4, dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)
    decode_attention(q, cache, cache, table, seq_lens, out, scratch, scale=0.25)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert bool(out[1].isfinite().all())


def _prefill(
    query_lens, context_lens, *, first_row=0, num_heads=4, num_kv_heads=2, head_dim=16, block_size=16,
    dtype=torch.float32, config=None, masked=float("nan"), **options,
):  # fmt: skip
    q, k_cache, v_cache, metadata = make_problem(
        query_lens=query_lens, context_lens=context_lens, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, block_size=block_size, dtype=dtype, device="cpu", masked=masked,
        sliding_window=options.get("sliding_window"),
    )  # fmt: skip
    out = torch.full_like(q, float("nan"))
    scale = head_dim**-0.5
    prefill_attention(
        q, k_cache, v_cache, metadata.block_table, metadata.query_start_loc, metadata.seq_lens, out,
        scale=scale, max_query_len=max(query_lens), first_row=first_row, config=config, **options,
    )  # fmt: skip
    start = int(metadata.query_start_loc[first_row])
    assert bool(out[:start].isnan().all())
    expected = reference(q, k_cache, v_cache, metadata, scale=scale, **options)
    return relative_error(out[start:], expected[start:])


def test_prefill_of_ragged_rows_with_and_without_context():
    assert _prefill([5, 1, 40, 17], [0, 33, 10, 100]) < 1e-5


def test_prefill_leaves_the_decode_rows_alone():
    assert _prefill([1, 1, 20, 3], [4, 50, 0, 30], first_row=2) < 1e-5


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(3, 1, 20), (2, 2, 32), (7, 1, 80)])
def test_prefill_takes_any_group_and_head_dim(num_heads, num_kv_heads, head_dim):
    assert _prefill([21], [6], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim) < 1e-5


@pytest.mark.parametrize("options", [{"sliding_window": 7}, {"sliding_window": 70}, {"softcap": 2.0}])
def test_prefill_honours_window_and_softcap(options):
    assert _prefill([50, 3], [60, 90], **options) < 1e-5


def test_prefill_with_tiles_wider_than_blocks_and_full_tiles_before_the_border():
    config = PrefillConfig(block_m=16, block_n=64, num_warps=4, num_stages=1)
    assert _prefill([40, 9], [150, 0], config=config, block_size=32) < 1e-5
    assert _prefill([40, 9], [150, 0], config=config, block_size=32, sliding_window=150) < 1e-5


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("query_lens", [[1, 5, 1, 17, 0, 1], [3, 1], [1, 1]])
def test_decode_and_prefill_share_ragged_rows_between_them(query_lens, is_cut):
    q, k_cache, v_cache, metadata = make_problem(
        query_lens=query_lens, context_lens=[90 * i for i in range(len(query_lens))], num_heads=4, num_kv_heads=2,
        head_dim=16, block_size=16, dtype=torch.float32, device="cpu",
    )  # fmt: skip
    scratch = DecodeScratch.allocate(num_heads=4, num_kv_heads=2, head_dim=16, device=torch.device("cpu"))
    out = torch.full_like(q, float("nan"))
    shared = (q, k_cache, v_cache, metadata.block_table)
    starts = metadata.query_start_loc
    pieces = cut_rows(metadata.seq_lens, num_pieces=5, query_start_loc=starts) if is_cut else None
    decode_attention(
        *shared, metadata.seq_lens, out, scratch, scale=0.25, query_start_loc=starts, num_splits=2, pieces=pieces
    )
    is_decode = metadata.query_start_loc.diff() == 1
    assert out[metadata.query_start_loc[:-1][is_decode].long()].isfinite().all()
    assert int(out.isfinite().all(-1).all(-1).sum()) == int(is_decode.sum())
    prefill_attention(
        *shared, metadata.query_start_loc, metadata.seq_lens, out, scale=0.25,
        max_query_len=max(query_lens), skips_decodes=True,
    )  # fmt: skip
    assert relative_error(out, reference(q, k_cache, v_cache, metadata, scale=0.25)) < 1e-5


@pytest.mark.parametrize("num_padding", [1, 5, 40])
def test_the_tokens_of_a_padding_row_get_zeros(num_padding):
    q, k_cache, v_cache, metadata = make_problem(
        query_lens=[num_padding, 17, 1], context_lens=[0, 9, 20], num_heads=4, num_kv_heads=2,
        head_dim=16, block_size=16, dtype=torch.float32, device="cpu",
    )  # fmt: skip
    metadata.seq_lens[0] = 0
    scratch = DecodeScratch.allocate(num_heads=4, num_kv_heads=2, head_dim=16, device=torch.device("cpu"))
    out = torch.full_like(q, float("nan"))
    decode_attention(
        q, k_cache, v_cache, metadata.block_table, metadata.seq_lens, out, scratch, scale=0.25,
        query_start_loc=metadata.query_start_loc,
    )  # fmt: skip
    prefill_attention(
        q, k_cache, v_cache, metadata.block_table, metadata.query_start_loc[:3], metadata.seq_lens[:2], out,
        scale=0.25, max_query_len=60, skips_decodes=True,
    )  # fmt: skip
    assert not out[:num_padding].any()
    assert out.isfinite().all()


@pytest.mark.parametrize("masked", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("options", [{"sliding_window": 40}, {}, {"softcap": 2.0}])
def test_what_no_query_sees_never_counts(options, masked):
    """Tokens past the row's end, stale slots of reused blocks, other tables' blocks, and what a window has left."""
    assert _decode([3, 200, 300, 0], splits=2, masked=masked, **options) < 1e-5
    assert _prefill([50, 3, 1], [60, 90, 200], masked=masked, **options) < 1e-5


@pytest.mark.parametrize("spoiled", [0, 1, 2])
def test_a_row_that_is_no_number_spoils_no_other_row(spoiled):
    q, k_cache, v_cache, metadata = make_problem(
        query_lens=[1, 20, 3], context_lens=[40, 9, 200], num_heads=4, num_kv_heads=2, head_dim=16, block_size=16,
        dtype=torch.float32, device="cpu",
    )  # fmt: skip
    starts = metadata.query_start_loc
    expected = reference(q, k_cache, v_cache, metadata, scale=0.25)
    blocks = metadata.block_table[spoiled, : -(-int(metadata.seq_lens[spoiled]) // 16)].long()
    k_cache[blocks], v_cache[blocks] = float("nan"), float("nan")
    mine = slice(int(starts[spoiled]), int(starts[spoiled + 1]))
    q[mine] = float("nan")
    scratch = DecodeScratch.allocate(num_heads=4, num_kv_heads=2, head_dim=16, device=torch.device("cpu"))
    out = torch.zeros_like(q)
    shared = (q, k_cache, v_cache, metadata.block_table)
    decode_attention(*shared, metadata.seq_lens, out, scratch, scale=0.25, query_start_loc=starts, num_splits=2)
    prefill_attention(
        *shared, starts, metadata.seq_lens, out, scale=0.25, max_query_len=20, skips_decodes=True,
    )  # fmt: skip
    assert out[mine].isnan().all()
    out[mine], expected[mine] = 0, 0
    assert relative_error(out, expected) < 1e-5


@pytest.fixture
def _wide_pools(monkeypatch):
    """Offsets into the pool are computed as for one of 2^31 elements and more."""
    for module in (triton_decode, triton_prefill):
        monkeypatch.setattr(module, "is_wide", lambda *caches: True)


@pytest.mark.usefixtures("_wide_pools")
@pytest.mark.parametrize("options", [{}, {"sliding_window": 40}, {"softcap": 2.0}])
def test_wide_pools_give_the_same(options):
    assert _decode([0, 15, 63, 300], splits=2, **options) < 1e-5
    assert _prefill([5, 1, 40, 17], [0, 33, 10, 100], **options) < 1e-5
    if "sliding_window" not in options:
        assert _decode([1000, 3, 0, 130], num_pieces=3, **options) < 1e-5
