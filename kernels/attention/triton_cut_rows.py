# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""cut_rows: cuts the keys of decode rows into pieces of about equal length, once per step, on the device.

Without it, a long row among short ones has programs that run alone at the end of every layer's decode attention.
The specification is the set of properties in tests/unit/kernels/triton_cases/attention_cases.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_SPLITS = 128
_UNIT = 64  # keys: a piece's length is a multiple of it
_MIN_UNITS = 2  # least length of a piece; below 128 keys, merging costs more than a split saves
_NUM_REFINEMENTS = 2
_MIN_ROWS_PAD = 64


def cut_rows(
    seq_lens: torch.Tensor,
    *,
    num_pieces: int,
    query_start_loc: torch.Tensor | None = None,
    max_query_len: int = 1,
    shared_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cut the keys of rows of at most max_query_len tokens into pieces of about equal length. Never syncs.

    seq_lens: [R] int32; query_start_loc: [R + 1] int32, for ragged rows: rows without tokens, and longer ones, get no
    piece; without it every row has one token.
    shared_rows: [R, 4] int32, GroupedRows.rows: only the keys behind a row's shared ones are cut.
    num_pieces: pieces that run at once; a few rows get no more, so that none runs alone at the end.
    Returns [N, 4] int32: row, first key, end, (split << 16) + splits of the row; 0 splits: no piece. N is num_pieces
    for few rows, else R + num_pieces, but at most 2 R, as programs without a piece cost time too. Rows of several
    pieces come first, since theirs are the longest; a row of seq_len 0 has one, empty.
    """
    num_rows = seq_lens.shape[0]
    room = max(num_pieces, num_rows + min(num_rows, num_pieces))
    pieces = torch.empty(room, 4, dtype=torch.int32, device=seq_lens.device)
    _cut_rows_kernel[(1,)](
        seq_lens, query_start_loc, shared_rows, pieces, num_rows, num_pieces, room,
        UNIT=_UNIT, MIN_UNITS=_MIN_UNITS, MAX_SPLITS=MAX_SPLITS, ROWS_PAD=_rows_pad(num_rows),
        MAX_QUERY_LEN=max_query_len, REFINEMENTS=_NUM_REFINEMENTS, num_warps=8,
    )  # fmt: skip
    return pieces


def _rows_pad(num_rows: int) -> int:
    """Round up to a few distinct sizes: each one compiles a kernel."""
    return _MIN_ROWS_PAD if num_rows <= _MIN_ROWS_PAD else max(512, triton.next_power_of_2(num_rows))


@triton.jit(do_not_specialize=["num_rows", "num_pieces", "room"])
def _cut_rows_kernel(
    seq_lens_ptr, query_start_ptr, shared_rows_ptr, pieces_ptr, num_rows, num_pieces, room,
    UNIT: tl.constexpr, MIN_UNITS: tl.constexpr, MAX_SPLITS: tl.constexpr, ROWS_PAD: tl.constexpr,
    MAX_QUERY_LEN: tl.constexpr, REFINEMENTS: tl.constexpr,
):  # fmt: skip
    """All rows in one program. A piece has at most `most` units, initially all rows' units / num_pieces.

    That gives up to one more piece per row. If these are too many, more than num_pieces for few rows, else more than
    there is room for, `most` grows: first by the surplus, finally to the length at which one more per row still fits.
    """
    rows = tl.arange(0, ROWS_PAD)
    seq_lens = tl.load(seq_lens_ptr + rows, mask=rows < num_rows, other=0)
    is_cut = rows < num_rows
    firsts = tl.zeros([ROWS_PAD], tl.int32)
    if shared_rows_ptr is not None:
        firsts = tl.load(shared_rows_ptr + rows * 4, mask=is_cut, other=0)
        seq_lens -= firsts
    if query_start_ptr is not None:
        starts = tl.load(query_start_ptr + rows, mask=is_cut, other=0)
        query_lens = tl.load(query_start_ptr + rows + 1, mask=is_cut, other=0) - starts
        is_cut = is_cut & (query_lens >= 1) & (query_lens <= MAX_QUERY_LEN)
    units = tl.where(is_cut, tl.cdiv(seq_lens, UNIT), 0)
    least = tl.maximum(tl.cdiv(tl.max(units, 0), MAX_SPLITS), MIN_UNITS)
    num_cut = tl.sum(is_cut.to(tl.int32), 0)
    limit = tl.where(num_cut * 2 <= num_pieces, num_pieces, room)
    num_units = tl.sum(units, 0)
    most = tl.maximum(tl.cdiv(num_units, num_pieces), least)
    splits = tl.where(is_cut, tl.maximum(tl.cdiv(units, most), 1), 0)
    for _ in tl.static_range(REFINEMENTS):
        count = tl.sum(splits, 0)
        grown = tl.maximum(tl.cdiv(most * count, limit), most + 1)
        most = tl.where(count > limit, grown, most)
        splits = tl.where(is_cut, tl.maximum(tl.cdiv(units, most), 1), 0)
    enough = tl.maximum(tl.cdiv(num_units, tl.maximum(limit - num_cut, 1)), least)
    most = tl.where(tl.sum(splits, 0) > limit, enough, most)
    splits = tl.where(is_cut, tl.maximum(tl.cdiv(units, most), 1), 0)
    several = tl.where(splits > 1, splits, 0)
    single = splits - several
    num_several = tl.sum(several, 0)
    places = tl.where(splits > 1, tl.cumsum(several, 0) - several, num_several + tl.cumsum(single, 0) - single)
    share = tl.cdiv(units, tl.maximum(splits, 1)) * UNIT  # of the row's keys, equal for its pieces
    for split in range(0, tl.max(splits, 0)):
        exists = split < splits
        piece_ptrs = pieces_ptr + (places + split) * 4
        tl.store(piece_ptrs, rows, mask=exists)
        tl.store(piece_ptrs + 1, firsts + split * share, mask=exists)
        tl.store(piece_ptrs + 2, firsts + tl.minimum((split + 1) * share, seq_lens), mask=exists)
        tl.store(piece_ptrs + 3, (split << 16) + splits, mask=exists)
    for start in range(num_several + tl.sum(single, 0), room, ROWS_PAD):
        tl.store(pieces_ptr + (start + rows) * 4, 0, mask=start + rows < room)  # a row that exists
        tl.store(pieces_ptr + (start + rows) * 4 + 3, 0, mask=start + rows < room)
