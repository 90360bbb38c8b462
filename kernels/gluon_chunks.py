"""Chunks of rows in the Gluon kernels for Hopper of recurrent layers: what is known of each, its boxes, and its row.

Imports triton at once; only modules that already need its Gluon import this one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# ruff: noqa: ANN001, ANN201  (Triton reads annotations as types)

if not triton.__version__.startswith("3.6."):
    raise ImportError(f"the scan for Hopper needs Triton 3.6, whose Gluon it uses, not {triton.__version__}")

CHUNK = 64
# Of keys and queries that meet a chunk's first state, of keys that enter its last, and its decay: CHUNK numbers each.
# The first two of Mamba-2 are logarithms to base 2: of the decay from the chunk's start, and that less that of dt
FACTORS = 4
_BOX = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_CHUNK = gl.constexpr(CHUNK)
_ROWS_BEFORE = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))


class Systems(NamedTuple):
    """What the scan reads of each chunk and head."""

    transform: torch.Tensor | None  # [chunks, heads, CHUNK, CHUNK], as the inputs; None: values are no errors
    # As transform; Mamba-2: products of queries and keys with j <= i, [chunks, groups, CHUNK, CHUNK]
    reads: torch.Tensor
    factors: torch.Tensor  # [chunks, heads, FACTORS * CHUNK] fp32


def describe_rows(x: torch.Tensor) -> TensorDescriptor:
    """Describe x [rows, columns] for boxes of CHUNK rows and 64 columns, of 16 bits."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [CHUNK, 64], _BOX)


@jit
def clear_rows(parts, first_tile, left, TILES: gl.constexpr) -> None:
    """Set rows from `left` on to zero, in TILES tiles of 64 rows of 64 numbers. parts: all tiles by 8 rows each."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    for part in range(left // 8, 8):
        is_token = part * 8 + gl.arange(0, 8, gl.SliceLayout(1, LINES)) < left
        for tile in gl.static_range(TILES):
            rows = parts.index((first_tile + tile) * 8 + part)
            rows.store(gl.where(is_token[:, None], rows.load(LINES), gl.full([8, 64], 0.0, rows.dtype, LINES)))


@jit
def add(a, b):
    return a + b


@jit
def find_chunk(query_start_ptr, seq_lens_ptr, first_row, num_rows, index, SHORT: gl.constexpr):
    """Return the first token of chunk number `index` of the step, and its row's end; equal if there is none."""
    # The same in each warp, so that sums need no others
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lanes = gl.arange(0, 32, LANES)
    before = 0
    num_before = 0
    own_start = 0
    for start in range(0, num_rows, 32):
        rows = start + lanes
        mask = rows < num_rows
        starts = gl.load(query_start_ptr + first_row + rows, mask=mask, other=0)
        lens = gl.load(query_start_ptr + first_row + rows + 1, mask=mask, other=0) - starts
        is_long = (gl.load(seq_lens_ptr + first_row + rows, mask=mask, other=0) > 0) & (lens > SHORT)
        ends = before + gl.associative_scan(gl.where(is_long, (lens + _CHUNK - 1) // _CHUNK, 0), 0, add)
        is_before = mask & (ends <= index)
        num_before += gl.sum(is_before.to(gl.int32), 0)
        own_start = gl.maximum(own_start, gl.max(gl.where(is_before, ends, 0), 0))
        before = gl.max(ends, 0)
    exists = num_before < num_rows
    row = first_row + gl.where(exists, num_before, 0)
    end = gl.load(query_start_ptr + row + 1)
    first = gl.load(query_start_ptr + row) + _CHUNK * (index - own_start)
    return gl.where(exists, first, end), end


@jit
def chunks_before(query_start_ptr, seq_lens_ptr, first_row, row, SHORT: gl.constexpr):
    """Return the chunks of the long rows from first_row to first_row + row - 1.

    No sum over warps, which goes through shared memory: Triton 3.6 lays the arguments of partitions over a sum's place
    without a barrier between, so that a slow warp would read an argument for its sum.
    """
    lanes = gl.arange(0, 128, _ROWS_BEFORE)
    chunks = gl.full([128], 0, gl.int32, _ROWS_BEFORE)
    for start in range(0, row, 128):
        rows = first_row + start + lanes
        mask = start + lanes < row
        starts = gl.load(query_start_ptr + rows, mask=mask, other=0)
        lens = gl.load(query_start_ptr + rows + 1, mask=mask, other=0) - starts
        is_long = (gl.load(seq_lens_ptr + rows, mask=mask, other=0) > 0) & (lens > SHORT)
        chunks += gl.where(is_long, (lens + _CHUNK - 1) // _CHUNK, 0)
    return gl.sum(chunks, 0)
