"""Tile sizes of products of few rows of 8 bits on Hopper: of one row (triton_row8.py), and of more (gluon_few_rows.py).

Chosen by the sums over the products of a layer of Llama 3.1 8B, and products of other sizes, on an H200
(benchmarks/notes.md). To retune: python -m benchmarks.quantized_linear_sweep.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Rows of x up to which gluon_few_rows.py takes less time than torch's product and Triton's: by row, and by block
MAX_ROWS = 64
MAX_ROWS_BY_BLOCK = 32
_SHARED_BYTES = 200 * 1024  # of the tiles of a program
_LINE = 128  # inputs of a box


@dataclass(frozen=True)
class Row8Config:
    """Rows of w of one program of triton_row8.py, and what it reads of each at a time."""

    block_n: int
    block_k: int
    num_warps: int
    prefetch: int = 0  # columns of each row of w that a program prefetches into L2 before it waits


@dataclass(frozen=True)
class FewRowsConfig:
    """Tile sizes and pipeline depth of one program of gluon_few_rows.py."""

    block_n: int  # outputs of a tile: a multiple of 16 * num_warps
    boxes: int  # of 128 inputs, in a step
    num_stages: int  # steps in shared memory
    num_warps: int  # that multiply: 4 or 8
    max_registers: int  # of a thread, on average
    is_whole: bool = True  # each program has whole tiles; False: an equal share of all steps


def begins_early(num_rows: int, k: int, *, columns: int | None) -> bool:
    """Return True if a product of these rows, on Hopper, is to begin while the kernel before its rounding still runs.

    columns: that share a scale; None: a whole row. gluon_few_rows.py then requests its weights beside that kernel: 1 to
    2 us less for each product on an H200. Other products that begin so early take longer.
    """
    return k % 16 == 0 and columns in (None, _LINE) and num_rows <= (MAX_ROWS if columns is None else MAX_ROWS_BY_BLOCK)


def row8_config(*, n: int, k: int, dtype: torch.dtype, by_block: bool) -> Row8Config:
    """Return the config of a matrix that one row is multiplied with. dtype: e4m3 or int8."""
    is_wide = k % 4096 == 0
    if dtype == torch.int8:
        if k <= 2048:
            return Row8Config(4, 1024, 2, 1024)
        return Row8Config(2, 4096, 4) if is_wide else Row8Config(2, 2048, 4, 1024)
    has_many_outputs = n >= 16384 and k <= 4096
    if by_block:
        return Row8Config(2, 512, 1, 1024) if has_many_outputs else Row8Config(4, 1024, 2, 1024)
    return Row8Config(2, 4096, 4) if has_many_outputs and is_wide else Row8Config(2, 1024, 2, 1024)


def few_rows_config(*, num_rows: int, n: int, k: int, by_block: bool, num_sms: int) -> FewRowsConfig:
    """Return the config of a shape, the same for all rows up to a power of two, so that few kernels are compiled."""
    rows = max(8, 1 << (num_rows - 1).bit_length())
    is_wide = n > 64 * num_sms  # more tiles of 64 than run at once
    block_n, boxes, num_warps = (128, 2, 8) if is_wide else (64, 4, 4)
    num_stages = _SHARED_BYTES // (boxes * _LINE * (block_n + rows))
    # Scales by block bind a program that has few rows of a long tile
    is_cut = by_block and -(-n // block_n) <= num_sms // 2 and k >= 16 * boxes * _LINE
    max_registers = 64 if rows <= 16 else 96 if rows <= 32 else 136  # with 128 some spill
    return FewRowsConfig(block_n, boxes, min(num_stages, 5), num_warps, max_registers, not is_cut)
