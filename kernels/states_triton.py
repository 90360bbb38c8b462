# ruff: noqa: ANN001, ANN201  (Triton reads annotations as types: kernel arguments carry none)
"""Shared parts of the Triton kernels of recurrent layers: the place of a row's state in the pool, and a step's rows.

The torch versions are in kernels.states. A launch passes the pool, `pages`, and `*place(view)`; the kernel receives

    pool_ptr, pages_ptr, stride_pages, first_piece, num_pages,
    NUM_LANES: tl.constexpr, PIECE: tl.constexpr, ROW_SIZE: tl.constexpr

with `first_piece` in @triton.jit(do_not_specialize=...): it differs between layers, and one kernel serves them all.

Recurrences over few tokens read states before gdc_wait(). A kernel may begin once every program of the one in front,
N - 1, has signalled or ended. Those that signal have waited, but for kernels that round the input of a product
(tests/unit/kernels/test_early_launch.py), which no recurrence follows. So N - 2 has ended and
all that it wrote is seen; if N - 1 was not launched early, N - 2 had ended before it. It is enough, then,
that N - 1 writes no state that N reads. A recurrent state is written by the same layer's recurrence, a step ago or for
drafts that this step settles, and by copies of checkpoints and from the host, which are in front of the step. Before
the next recurrence the layer's convolution and at least its projection, or the copies of the drafts' inputs, follow.
Rows of prompts advance other requests' states. Layers launch on one stream, in graphs and eagerly alike.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from kernels.states import StateView


class Place(NamedTuple):
    """The view's numbers in the order in which a kernel takes them, behind the pool, `pages` and its stride."""

    first_piece: int
    num_pages: int
    num_lanes: int
    piece: int
    row_size: int


def place(view: StateView) -> Place:
    """Return the numbers that state_offsets takes."""
    num_lanes, num_pages, piece = view.pool.shape
    return Place(view.first_piece, num_pages, num_lanes, piece, view.row_size)


@triton.jit
def state_offsets(
    pages_ptr, rows, mask, first_piece, num_pages,
    NUM_LANES: tl.constexpr, PIECE: tl.constexpr, ROW_SIZE: tl.constexpr,
):  # fmt: skip
    """Return the int64 offset in the pool of each row of a state; `rows` of any shape, int32.

    pages_ptr: the request's row of `pages`, a pointer or one for each of `rows`. Where `mask` is false no page number
    is read, and the offset must not be used.
    """
    piece = first_piece + rows // (PIECE // ROW_SIZE)
    page = tl.load(pages_ptr + piece // NUM_LANES, mask=mask, other=0).to(tl.int64)
    return ((piece % NUM_LANES) * num_pages + page) * PIECE + rows % (PIECE // ROW_SIZE) * ROW_SIZE


@triton.jit
def step_row(query_start_ptr, seq_lens_ptr, row):
    """Return a row's first token, its number of tokens, whether a state precedes it, and whether it is padding.

    `row`: a number or a tensor of them, each below the number of rows.
    """
    first = tl.load(query_start_ptr + row)
    num_tokens = tl.load(query_start_ptr + row + 1) - first
    seq_len = tl.load(seq_lens_ptr + row)
    return first, num_tokens, seq_len > num_tokens, seq_len <= 0


@triton.jit
def row_writes(writes_ptr, row):
    """Return whether a row may write its state; writes_ptr may be None."""
    may_write = True
    if writes_ptr is not None:
        may_write = tl.load(writes_ptr + row) != 0
    return may_write
