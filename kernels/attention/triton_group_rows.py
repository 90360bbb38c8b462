# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""group_rows: sorts decode rows that begin with the same blocks into tiles of queries, once per step, on the device.

A tile has rows of one group, which attend together over the group's shared keys; these are cut into pieces, so that the
pieces of all tiles are about equal and fill the device. The host says which requests form a group (SharedRows); the
device finds their rows, so one CUDA graph serves all groups. The specification is the set of properties in
tests/unit/kernels/triton_cases/shared_cases.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention.base import GroupedRows, SharedRows

_UNIT = 64  # keys: a piece's length is a multiple of it
_MIN_UNITS = 4  # least length of a piece: its queries are loaded, and its output is stored and merged
_MIN_ROWS_PAD = 64


def group_rows(
    shared: SharedRows,
    seq_lens: torch.Tensor,
    *,
    tile_rows: int,
    num_pieces: int,
    query_start_loc: torch.Tensor | None = None,
) -> GroupedRows:
    """Group the rows of one token whose groups have at least two of them in this step. Never syncs.

    seq_lens: [R] int32; query_start_loc: [R + 1] int32, for ragged rows. num_pieces: that run at once.
    """
    num_rows, device = seq_lens.shape[0], seq_lens.device
    max_tiles = num_rows // tile_rows + min(shared.max_groups, num_rows // 2)
    room = num_pieces + max_tiles
    rows = torch.empty(num_rows, 4, dtype=torch.int32, device=device)
    members = torch.empty(max_tiles * tile_rows, dtype=torch.int32, device=device)
    pieces = torch.empty(room, 4, dtype=torch.int32, device=device)
    rows_pad = _MIN_ROWS_PAD if num_rows <= _MIN_ROWS_PAD else max(512, triton.next_power_of_2(num_rows))
    _group_rows_kernel[(1,)](
        shared.req_index, shared.shares, seq_lens, query_start_loc, rows, members, pieces,
        num_rows, num_pieces, room,
        TILE_ROWS=tile_rows, UNIT=_UNIT, MIN_UNITS=_MIN_UNITS, ROWS_PAD=rows_pad, num_warps=8,
    )  # fmt: skip
    return GroupedRows(rows, members, pieces, tile_rows)


@triton.jit(do_not_specialize=["num_rows", "num_pieces", "room"])
def _group_rows_kernel(
    req_index_ptr, shares_ptr, seq_lens_ptr, query_start_ptr, rows_ptr, members_ptr, pieces_ptr,
    num_rows, num_pieces, room,
    TILE_ROWS: tl.constexpr, UNIT: tl.constexpr, MIN_UNITS: tl.constexpr, ROWS_PAD: tl.constexpr,
):  # fmt: skip
    """All rows in one program, one group after the other.

    A piece has at most `most` units, all tiles' units / num_pieces: at most one more piece per tile than num_pieces.
    """
    rows = tl.arange(0, ROWS_PAD)
    is_row = rows < num_rows
    request = tl.load(req_index_ptr + rows, mask=is_row, other=0).to(tl.int64)
    group = tl.load(shares_ptr + request * 2, mask=is_row, other=0)
    tokens = tl.load(shares_ptr + request * 2 + 1, mask=is_row, other=0)
    is_member = is_row & (tokens > 0) & (tl.load(seq_lens_ptr + rows, mask=is_row, other=0) > tokens)
    if query_start_ptr is not None:
        starts = tl.load(query_start_ptr + rows, mask=is_row, other=0)
        is_member = is_member & (tl.load(query_start_ptr + rows + 1, mask=is_row, other=0) - starts == 1)
    group = tl.where(is_member, group, 0)
    last = tl.max(group, 0)
    num_units = 0
    for number in range(1, last + 1):
        count = tl.sum((group == number).to(tl.int32), 0)
        units = tl.cdiv(tl.max(tl.where(group == number, tokens, 0), 0), UNIT)
        num_units += tl.where(count > 1, tl.cdiv(count, TILE_ROWS) * units, 0)
    most = tl.maximum(tl.cdiv(num_units, num_pieces), MIN_UNITS)
    shared = tl.zeros([ROWS_PAD], tl.int32)
    splits_of = tl.zeros([ROWS_PAD], tl.int32)
    first_of = tl.zeros([ROWS_PAD], tl.int32)
    place_of = tl.zeros([ROWS_PAD], tl.int32)
    tile = 0
    piece = 0
    for number in range(1, last + 1):
        mine = group == number
        count = tl.sum(mine.to(tl.int32), 0)
        if count > 1:
            length = tl.max(tl.where(mine, tokens, 0), 0)
            units = tl.cdiv(length, UNIT)
            splits = tl.cdiv(units, most)
            share = tl.cdiv(units, splits) * UNIT
            tiles = tl.cdiv(count, TILE_ROWS)
            place = tl.cumsum(mine.to(tl.int32), 0) - 1
            shared = tl.where(mine, length, shared)
            splits_of = tl.where(mine, splits, splits_of)
            first_of = tl.where(mine, piece + place // TILE_ROWS * splits, first_of)
            place_of = tl.where(mine, place % TILE_ROWS, place_of)
            tl.store(members_ptr + tile * TILE_ROWS + place, rows, mask=mine)
            tl.store(members_ptr + tile * TILE_ROWS + count + rows, -1, mask=count + rows < tiles * TILE_ROWS)
            for start in range(0, tiles * splits, ROWS_PAD):
                index = start + rows
                exists = index < tiles * splits
                piece_ptrs = pieces_ptr + (piece + index) * 4
                tl.store(piece_ptrs, tile + index // splits, mask=exists)
                tl.store(piece_ptrs + 1, index % splits * share, mask=exists)
                tl.store(piece_ptrs + 2, tl.minimum((index % splits + 1) * share, length), mask=exists)
            tile += tiles
            piece += tiles * splits
    tl.store(rows_ptr + rows * 4, shared, mask=is_row)
    tl.store(rows_ptr + rows * 4 + 1, splits_of, mask=is_row)
    tl.store(rows_ptr + rows * 4 + 2, first_of, mask=is_row)
    tl.store(rows_ptr + rows * 4 + 3, place_of, mask=is_row)
    for start in range(piece, room, ROWS_PAD):
        tl.store(pieces_ptr + (start + rows) * 4 + 2, 0, mask=start + rows < room)
