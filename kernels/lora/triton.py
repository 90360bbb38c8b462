# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""Triton twins of kernels/lora/reference.py: tokens grouped by adapter once a step, then two launches per linear layer.

Tiles hold tokens of one adapter, as in S-LoRA and Punica (arXiv:2311.03285, §5.3; 2310.18547, §4), so each reads its
adapter once; tokens without one are in no tile. The number of tokens bounds the number of tiles: a graph has programs
for that many, and unneeded ones end at once. The inputs may be split over programs, whose sums the second launch adds
in order: no atomics, equal results in every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.lora.reference import MAX_PARTS, LoraWeights

_FEW_TOKENS, _FEW_TILE, _TILE = 256, 16, 64  # tokens of a tile: in steps of few tokens, and in others
_WANTED_PROGRAMS = 256  # per launch: fewer leave the device idle
_MAX_SPLITS = 16
_MIN_SPLIT_K = 256


@dataclass(frozen=True)
class LoraTiles:
    """One step's tokens, grouped by adapter; buffers at fixed addresses."""

    # [max_slots] int32: tokens, those of a tile side by side; entries past its rows are stale
    tokens: torch.Tensor
    # [max_tiles] int32: adapter of each tile, and its number of tokens (0: unused)
    loras: torch.Tensor
    rows: torch.Tensor
    num_adapters: int

    @classmethod
    def allocate(cls, *, num_adapters: int, max_tokens: int, device: torch.device) -> LoraTiles:
        """Allocate zeros: no tile is in use before the first grouping."""
        most = [min(max_tokens, _FEW_TOKENS), max_tokens]
        max_tiles = max(_num_tiles(count, num_adapters) for count in most)
        max_slots = max(_num_tiles(count, num_adapters) * _tile_size(count) for count in most)
        tiles = torch.zeros(2, max_tiles, dtype=torch.int32, device=device)
        return cls(torch.zeros(max_slots, dtype=torch.int32, device=device), tiles[0], tiles[1], num_adapters)


def group_tokens(
    lora_indices: torch.Tensor, req_index: torch.Tensor, token_rows: torch.Tensor | None, out: LoraTiles
) -> None:
    """Group a step's tokens by adapter, for the next add_lora. Arguments as for reference.gather_loras."""
    num_tokens = (req_index if token_rows is None else token_rows).shape[0]
    num_loras = triton.next_power_of_2(out.num_adapters + 1)
    tile = _tile_size(num_tokens)
    block = max(16, min(64 if tile == _FEW_TILE else 1024, 8192 // num_loras))
    _group_kernel[(1,)](
        lora_indices, req_index, token_rows, out.tokens, out.loras, out.rows,
        num_tokens, _num_tiles(num_tokens, out.num_adapters),
        LORAS=num_loras, TILE=tile, BLOCK=block, HAS_ROWS=token_rows is not None, num_warps=4,
    )  # fmt: skip


def add_lora(out: torch.Tensor, x: torch.Tensor, weights: LoraWeights, tiles: LoraTiles, *, pdl: bool = False) -> None:
    """Equal reference.add_lora for the tokens grouped last, but keep the values between a and b in float32.

    x: [T, in], last dimension dense; out: [T, out], contiguous.
    """
    num_tokens, k = x.shape
    num_parts, rank = weights.a.shape[1:3]
    tile, num_tiles = _tile_size(num_tokens), _num_tiles(num_tokens, tiles.num_adapters)
    ranks, block_r, block_k = num_parts * rank, min(rank, 64), 64 if x.dtype == torch.float32 else 128
    splits = _num_splits(num_tiles * ranks // block_r, k)
    split_k = triton.cdiv(triton.cdiv(k, splits), block_k) * block_k
    shrunk = torch.empty(splits, num_tiles * tile, ranks, dtype=torch.float32, device=x.device)
    _shrink_kernel[(num_tiles, ranks // block_r, splits)](
        x, weights.a, shrunk, tiles.tokens, tiles.loras, tiles.rows, k, split_k, x.stride(0), num_tiles * tile,
        RANKS=ranks, TILE=tile, BLOCK_R=block_r, BLOCK_K=block_k, EVEN_K=k % block_k == 0,
        PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    assert num_parts <= MAX_PARTS
    sizes = (*weights.part_sizes, 0, 0)[:MAX_PARTS]
    block_n = 64 if tile == _FEW_TILE else 128
    num_blocks = sum(triton.cdiv(size, block_n) for size in sizes)
    _expand_kernel[(num_tiles, num_blocks)](
        shrunk, weights.b, out, tiles.tokens, tiles.loras, tiles.rows, *sizes, out.shape[1], num_tiles * tile,
        splits, PARTS=num_parts, RANK=rank, TILE=tile, BLOCK_R=block_r, BLOCK_N=block_n,
        PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def _tile_size(num_tokens: int) -> int:
    return _FEW_TILE if num_tokens <= _FEW_TOKENS else _TILE


def _num_tiles(num_tokens: int, num_adapters: int) -> int:
    """Return the largest possible number of tiles: each adapter has at most one partly filled tile."""
    return num_tokens // _tile_size(num_tokens) + min(num_tokens, num_adapters)


def _num_splits(num_programs: int, k: int) -> int:
    """Return the number of parts to split the inputs into: a power of two."""
    most = max(1, min(_MAX_SPLITS, _WANTED_PROGRAMS // num_programs, k // _MIN_SPLIT_K))
    return 1 << (most.bit_length() - 1)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _group_kernel(
    lora_indices_ptr, req_index_ptr, token_rows_ptr, tokens_ptr, tile_loras_ptr, tile_rows_ptr, num_tokens, num_tiles,
    LORAS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, HAS_ROWS: tl.constexpr,
):  # fmt: skip
    """One program: counts the tokens of each adapter, assigns tiles, then gives each token its place in order."""
    loras = tl.arange(0, LORAS)
    counts = tl.zeros([LORAS], tl.int32)
    for start in range(0, num_tokens, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        mine = _loras_of(tokens, num_tokens, lora_indices_ptr, req_index_ptr, token_rows_ptr, HAS_ROWS)
        counts += tl.sum((mine[:, None] == loras[None, :]).to(tl.int32), 0)
    counts = tl.where(loras > 0, counts, 0)
    ends = tl.cumsum((counts + TILE - 1) // TILE, 0)
    firsts = ends - (counts + TILE - 1) // TILE
    for start in range(0, num_tiles, BLOCK):
        tiles = start + tl.arange(0, BLOCK)
        owners = tl.sum((ends[None, :] <= tiles[:, None]).to(tl.int32), 1)
        is_owner = owners[:, None] == loras[None, :]
        # rows of its adapter from this tile on; none past the last tile, which belongs to no adapter
        rest = tl.sum(tl.where(is_owner, counts[None, :] - (tiles[:, None] - firsts[None, :]) * TILE, 0), 1)
        tl.store(tile_loras_ptr + tiles, owners, mask=tiles < num_tiles)
        tl.store(tile_rows_ptr + tiles, tl.minimum(rest, TILE), mask=tiles < num_tiles)
    places = firsts * TILE
    for start in range(0, num_tokens, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        mine = _loras_of(tokens, num_tokens, lora_indices_ptr, req_index_ptr, token_rows_ptr, HAS_ROWS)
        is_of = (mine[:, None] == loras[None, :]).to(tl.int32)
        before = tl.cumsum(is_of, 0) - is_of
        place = tl.sum(is_of * (places[None, :] + before), 1)
        tl.store(tokens_ptr + place, tokens, mask=mine > 0)
        places += tl.sum(is_of, 0)


@triton.jit
def _loras_of(tokens, num_tokens, lora_indices_ptr, req_index_ptr, token_rows_ptr, HAS_ROWS: tl.constexpr):
    """Adapter of each token; 0 past the last one."""
    rows = tokens
    if HAS_ROWS:
        rows = tl.load(token_rows_ptr + tokens, mask=tokens < num_tokens, other=0)
    requests = tl.load(req_index_ptr + rows, mask=tokens < num_tokens, other=0)
    return tl.load(lora_indices_ptr + requests, mask=tokens < num_tokens, other=0)


@triton.jit(do_not_specialize=["num_slots"])
def _shrink_kernel(
    x_ptr, a_ptr, shrunk_ptr, tokens_ptr, tile_loras_ptr, tile_rows_ptr, k, split_k, stride_x, num_slots,
    RANKS: tl.constexpr, TILE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """a @ x of one tile, for BLOCK_R of the ranks, over one split of the inputs."""
    tile, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_rows = tl.load(tile_rows_ptr + tile)
    if num_rows > 0:
        lora = tl.load(tile_loras_ptr + tile).to(tl.int64) - 1
        slots = tile * TILE + tl.arange(0, TILE)
        # rows past the tile's compute unused values
        tokens = tl.load(tokens_ptr + slots, mask=tl.arange(0, TILE) < num_rows, other=0).to(tl.int64)
        ranks = block * BLOCK_R + tl.arange(0, BLOCK_R)
        columns = split * split_k + tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + tokens[:, None] * stride_x + columns[None, :]
        a_ptrs = a_ptr + (lora * RANKS + ranks)[:, None] * k + columns[None, :]
        acc = tl.zeros([TILE, BLOCK_R], tl.float32)
        for start in range(0, tl.minimum(split_k, k - split * split_k), BLOCK_K):
            if EVEN_K:
                x, a = tl.load(x_ptrs + start), tl.load(a_ptrs + start)
            else:
                is_in = (columns + start < k)[None, :]
                x = tl.load(x_ptrs + start, mask=is_in, other=0.0)
                a = tl.load(a_ptrs + start, mask=is_in, other=0.0)
            acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
        tl.store(shrunk_ptr + (split * num_slots + slots)[:, None] * RANKS + ranks[None, :], acc)


@triton.jit(do_not_specialize=["num_slots", "splits"])
def _expand_kernel(
    shrunk_ptr, b_ptr, out_ptr, tokens_ptr, tile_loras_ptr, tile_rows_ptr, size_0, size_1, size_2, num_outputs,
    num_slots, splits, PARTS: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add b @ shrunk of one tile to BLOCK_N outputs of one part. A token is in one tile, so writes do not collide."""
    tile, block = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_rows = tl.load(tile_rows_ptr + tile)
    if num_rows > 0:
        part, first, size = 0, 0, size_0
        if PARTS > 1:
            is_past = block >= tl.cdiv(size_0, BLOCK_N)
            block = tl.where(is_past, block - tl.cdiv(size_0, BLOCK_N), block)
            part, first = tl.where(is_past, 1, 0), tl.where(is_past, size_0, 0)
            size = tl.where(is_past, size_1, size_0)
        if PARTS > 2:
            is_past = (part == 1) & (block >= tl.cdiv(size_1, BLOCK_N))
            block = tl.where(is_past, block - tl.cdiv(size_1, BLOCK_N), block)
            part, first = tl.where(is_past, 2, part), tl.where(is_past, size_0 + size_1, first)
            size = tl.where(is_past, size_2, size)
        lora = tl.load(tile_loras_ptr + tile).to(tl.int64) - 1
        slots = tile * TILE + tl.arange(0, TILE)
        in_tile = tl.arange(0, TILE) < num_rows
        tokens = tl.load(tokens_ptr + slots, mask=in_tile, other=0).to(tl.int64)
        columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
        in_part = columns < size
        ranks = tl.arange(0, BLOCK_R)
        b_ptrs = b_ptr + (lora * num_outputs + first + columns)[:, None] * RANK + ranks[None, :]
        shrunk_ptrs = shrunk_ptr + slots[:, None] * (PARTS * RANK) + part * RANK + ranks[None, :]
        acc = tl.zeros([TILE, BLOCK_N], tl.float32)
        for start in range(0, RANK, BLOCK_R):
            shrunk = tl.load(shrunk_ptrs + start)
            for split in range(1, splits):
                shrunk += tl.load(shrunk_ptrs + split * num_slots * (PARTS * RANK) + start)
            b = tl.load(b_ptrs + start, mask=in_part[:, None], other=0.0)
            acc = tl.dot(shrunk.to(b.dtype), tl.trans(b), acc, input_precision="ieee")
        out_ptrs = out_ptr + tokens[:, None] * num_outputs + (first + columns)[None, :]
        mask = in_tile[:, None] & in_part[None, :]
        total = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32) + acc
        tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)
