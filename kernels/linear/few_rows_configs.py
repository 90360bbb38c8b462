"""FewRowsConfig: tile sizes of products of few rows on Hopper (kernels/linear/gluon_few_rows.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FewRowsConfig:
    """Tile sizes and pipeline depth of one program."""

    block_n: int  # outputs of a tile: a multiple of 16 * num_warps
    boxes: int  # of 128 bytes of each row, in a step
    num_stages: int  # steps in shared memory
    num_warps: int = 4  # 4 or 8
    programs_per_sm: int = 1
    max_registers: int = 128  # of a thread, on average
    whole: bool = False  # each program has whole tiles
