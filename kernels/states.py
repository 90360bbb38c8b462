"""States of recurrent layers in the pool: StateView says where, StateMetadata which rows; load and save, in torch.

A layer keeps one or two tensors for each request, whatever its length: the last inputs of a causal convolution, and a
recurrent state. Each is [num_rows, row_size] float32. It is cut into pieces of one lane's row
(engine/device/page_plan.py): a piece has as many whole rows of the tensor as fit, and what is left of it is unused.
Piece i of a request's state lies in lane i % num_lanes of its page i // num_lanes, so the pages of a state need not be
neighbours.

A row of a step advances its request's state by its tokens. A row that starts at token 0 starts from zeros, whatever
the pool holds. Rows of seq_len 0 are padding: they read and write no state, and their outputs are zeros. A row whose
last tokens are drafts does not write: no state may contain a token that may be rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StateView:
    """The place of one tensor of one layer's state in the pool."""

    # [num_lanes, num_pages, piece] float32, contiguous: all of the pool
    pool: torch.Tensor
    first_piece: int
    num_rows: int
    row_size: int

    @property
    def rows_per_piece(self) -> int:
        """The rows of the tensor in one piece."""
        return self.pool.shape[2] // self.row_size

    @property
    def num_pieces(self) -> int:
        """The pieces that the tensor takes."""
        return -(-self.num_rows // self.rows_per_piece)


@dataclass(frozen=True)
class StateMetadata:
    """The rows of one step for layers with states. R rows, T tokens. Tensors on the device; nothing syncs."""

    # [R + 1] int32: first token of each row
    query_start_loc: torch.Tensor
    # [R] int32: tokens of each request including this step's; 0: padding
    seq_lens: torch.Tensor
    # [R] int32 or int64: row of `pages`
    req_index: torch.Tensor
    # [requests, pages of a state] int32: the live state of each request
    pages: torch.Tensor
    # [R] int32: 0 for rows that do not write states; None: all rows write
    writes: torch.Tensor | None
    # Host-side upper bounds, as in AttentionMetadata
    max_query_len: int
    # The first num_decodes rows have exactly one token; None: rows of one token may be anywhere
    num_decodes: int | None
    # Rows past the first max_prefills have at most one token; None: no such bound
    max_prefills: int | None = None


def load_states(view: StateView, metadata: StateMetadata) -> torch.Tensor:
    """Return each row's state before the step, [R, num_rows, row_size] float32: zeros for rows that start at 0."""
    places = _places(view, metadata.pages[metadata.req_index.long()])
    pieces = view.pool.flatten(0, 1).index_select(0, places.flatten()).view(*places.shape, -1)
    pieces = pieces[:, :, : view.rows_per_piece * view.row_size]
    states = pieces.reshape(len(places), -1, view.row_size)[:, : view.num_rows]
    return states.index_fill_(0, (row_starts(metadata) <= 0).nonzero()[:, 0], 0.0)


def save_states(view: StateView, metadata: StateMetadata, states: torch.Tensor) -> None:
    """Write each row's state after the step, [R, num_rows, row_size], unless it is padding or may not write."""
    is_written = metadata.seq_lens > 0
    if metadata.writes is not None:
        is_written &= metadata.writes != 0
    rows = is_written.nonzero()[:, 0]
    if len(rows) < len(states):
        states = states[rows]
    places = _places(view, metadata.pages[metadata.req_index.long()[rows]])
    size = view.rows_per_piece * view.row_size
    if view.num_pieces * size == view.num_rows * view.row_size and size == view.pool.shape[2]:
        view.pool.flatten(0, 1).index_copy_(0, places.flatten(), states.reshape(-1, size))
        return
    pieces = states.new_zeros(len(places), view.num_pieces * view.rows_per_piece, view.row_size)
    pieces[:, : view.num_rows] = states
    view.pool.flatten(0, 1)[places, :size] = pieces.view(*places.shape, size)


def row_starts(metadata: StateMetadata) -> torch.Tensor:
    """Return [R]: the tokens of each row's request before its first token; negative for padding rows."""
    return metadata.seq_lens - metadata.query_start_loc.diff()


def _places(view: StateView, pages: torch.Tensor) -> torch.Tensor:
    """Return the rows of all lanes, one after another, that are the pieces of states: pages [R, any] → [R, pieces]."""
    pieces = torch.arange(view.first_piece, view.first_piece + view.num_pieces, device=view.pool.device)
    num_lanes, num_pages = view.pool.shape[:2]
    return pieces % num_lanes * num_pages + pages[:, pieces // num_lanes].long()


def place_states(shapes: Sequence[Sequence[tuple[int, int]]], *, piece: int) -> tuple[list[list[int]], int]:
    """Return the first piece of each layer's tensors, one after the other, and the pieces of a whole state.

    shapes: by layer, (num_rows, row_size) of its tensors. piece: float32 numbers of a piece; a row fits in it.
    """
    places: list[list[int]] = []
    num_pieces = 0
    for tensors in shapes:
        places.append([])
        for num_rows, row_size in tensors:
            places[-1].append(num_pieces)
            num_pieces += -(-num_rows // (piece // row_size))
    return places, num_pieces


def view_states(pool: torch.Tensor, shapes: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[StateView, ...]]:
    """Return the views of each layer's tensors in a pool [num_lanes, num_pages, piece] float32; shapes: see above."""
    places, _ = place_states(shapes, piece=pool.shape[2])
    return [
        tuple(StateView(pool, first, *shape) for first, shape in zip(firsts, tensors, strict=True))
        for firsts, tensors in zip(places, shapes, strict=True)
    ]
