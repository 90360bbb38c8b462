# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""LatentScratch: how short rows over latents are cut along the keys, their buffers, and the kernel that merges them.

Unlike in triton_splits.py, the merge is a launch of its own, spread over the device: the outputs of many heads are more
than the program that ends last should sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.attention.base import AttentionMetadata
from kernels.attention.triton_common import MASKED
from kernels.attention.triton_cut_rows import MAX_SPLITS, cut_rows

_SHORT_MEMBERS = 256  # tokens x heads of a short row, unless one token alone has more
_MOST_SHORT_TOKENS = 8
_MERGED_COLUMNS = 128  # of one program that merges


@dataclass(frozen=True)
class LatentConfig:
    """Tile sizes and launch settings of one program."""

    block_m: int  # query tokens x heads
    block_n: int  # latents
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1  # that share an SM's memory: the pieces of short rows are made for as many


def short_config(num_heads: int, dtype: torch.dtype) -> LatentConfig:
    """Choose tiles of short rows: as many heads as there are, up to 64 rows of outputs, one wgmma of 8 warps."""
    if dtype == torch.float32:
        return LatentConfig(block_m=16, block_n=16, num_warps=4, num_stages=1)
    if num_heads <= 16:
        return LatentConfig(block_m=16, block_n=32, num_warps=4, num_stages=5, programs_per_sm=2)
    if num_heads <= 32:
        return LatentConfig(block_m=32, block_n=32, num_warps=4, num_stages=4, programs_per_sm=2)
    return LatentConfig(block_m=64, block_n=64, num_warps=8, num_stages=4)


@dataclass(frozen=True)
class LatentScratch:
    """Buffers in which the pieces of a row are merged, and how rows are cut. One per stream."""

    # [capacity * members, rank] fp32: normalised output of each piece
    partial: torch.Tensor
    # [capacity * members] fp32: log2 of each output's softmax denominator
    lse: torch.Tensor
    num_heads: int
    num_pieces: int  # that run at once

    @property
    def members(self) -> int:
        """The tokens x heads of the longest short row."""
        return short_tokens(self.num_heads) * self.num_heads

    @property
    def capacity(self) -> int:
        """The most pieces of rows that have several: each is longer than half of an equal share."""
        return 2 * self.num_pieces

    @classmethod
    def allocate(
        cls, *, num_heads: int, rank: int, dtype: torch.dtype, device: torch.device, config: LatentConfig | None = None
    ) -> LatentScratch:
        """Allocate for any number of rows. config: of short rows."""
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16
        num_pieces = pieces_at_once(num_heads, config or short_config(num_heads, dtype), num_sms=num_sms)
        num_entries = 2 * num_pieces * short_tokens(num_heads) * num_heads
        return cls(
            partial=torch.empty(num_entries, rank, dtype=torch.float32, device=device),
            lse=torch.empty(num_entries, dtype=torch.float32, device=device),
            num_heads=num_heads,
            num_pieces=num_pieces,
        )

    def cut(self, metadata: AttentionMetadata) -> torch.Tensor:
        """Cut the keys of a step's short rows into pieces, once for all layers; see cut_rows. Never syncs."""
        if is_decode_step(metadata):
            return cut_rows(metadata.seq_lens, num_pieces=self.num_pieces)
        return cut_rows(
            metadata.seq_lens,
            num_pieces=self.num_pieces,
            query_start_loc=metadata.query_start_loc,
            max_query_len=short_tokens(self.num_heads),
        )


def pieces_at_once(num_heads: int, config: LatentConfig, *, num_sms: int) -> int:
    """Return how many pieces run at once, each in as many programs as one token's heads have tiles."""
    return max(1, config.programs_per_sm * num_sms // triton.cdiv(num_heads, config.block_m))


def short_tokens(num_heads: int) -> int:
    """Return the most query tokens of a row whose keys are cut into pieces: those of drafts."""
    return max(1, min(_MOST_SHORT_TOKENS, _SHORT_MEMBERS // num_heads))


def is_decode_step(metadata: AttentionMetadata) -> bool:
    """Return True if every row has one token, so that a row's number is its token's."""
    return metadata.num_decodes == metadata.seq_lens.shape[0]


def merge_pieces(
    out: torch.Tensor, starts: torch.Tensor | None, pieces: torch.Tensor, scratch: LatentScratch, *, pdl: bool
) -> None:
    """Write the outputs of rows of several pieces. out: [T, num_heads, rank]; starts: of ragged rows. Never syncs."""
    num_heads, rank = out.shape[1:]
    columns = min(_MERGED_COLUMNS, max(16, triton.next_power_of_2(rank)))
    _merge_kernel[(triton.cdiv(rank, columns), min(pieces.shape[0], scratch.capacity))](
        out, starts, pieces, scratch.partial, scratch.lse,
        HEADS=num_heads, RANK=rank, COLUMNS=columns, MEMBERS=scratch.members, MAX_SPLITS=MAX_SPLITS, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _merge_kernel(
    out_ptr, query_start_ptr, pieces_ptr, partial_ptr, lse_ptr,
    HEADS: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr, MEMBERS: tl.constexpr, MAX_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Weigh the pieces of rows that have several by their denominators. One (range of columns, piece).

    The programs of a row's pieces share its members among them.
    """
    CHUNK: tl.constexpr = 16
    piece = tl.program_id(1)
    row, _start, _end, split, splits = read_piece(pieces_ptr + piece * 4)
    token = row
    query_len = 1
    if query_start_ptr is not None:
        token = tl.load(query_start_ptr + row)
        query_len = tl.load(query_start_ptr + row + 1) - token
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if splits < 2:
        return
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    pieces = (piece - split).to(tl.int64) + tl.arange(0, MAX_SPLITS)
    is_used = tl.arange(0, MAX_SPLITS) < splits
    for member in range(split, query_len * HEADS, splits):
        lse = tl.load(lse_ptr + pieces * MEMBERS + member, mask=is_used, other=MASKED)
        maximum = tl.max(lse, 0)
        total = tl.sum(tl.exp2(lse - maximum), 0)
        acc = tl.zeros([COLUMNS], tl.float32)
        for start in range(0, splits, CHUNK):
            chunk = start + tl.arange(0, CHUNK)
            entries = ((piece - split).to(tl.int64) + chunk) * MEMBERS + member
            weights = tl.exp2(tl.load(lse_ptr + entries, mask=chunk < splits, other=MASKED) - maximum)
            in_tile = (chunk < splits)[:, None] & (columns < RANK)[None, :]
            parts = tl.load(partial_ptr + entries[:, None] * RANK + columns[None, :], mask=in_tile, other=0.0)
            acc += tl.sum(parts * weights[:, None], 0)
        out_row_ptr = out_ptr + (token.to(tl.int64) * HEADS + member) * RANK
        tl.store(out_row_ptr + columns, (acc / total).to(out_ptr.dtype.element_ty), mask=columns < RANK)


@triton.jit
def read_piece(piece_ptr):
    """Read a piece of cut_rows: row, first key, end, split, splits of the row."""
    splits = tl.load(piece_ptr + 3)
    return tl.load(piece_ptr), tl.load(piece_ptr + 1), tl.load(piece_ptr + 2), splits >> 16, splits & 0xFFFF
