"""Prefill attention for Hopper in Gluon: computes what triton_prefill.py does, with wgmma, TMA and specialised warps.

FlashAttention-3 (arXiv:2407.08608) over a paged cache. One or two warpgroups attend (gluon_attend.py), and one warp
loads, one TMA box per page. Programs are persistent: each draws tiles from a counter until none is left, and its loads
run ahead into the next tile. The query heads that share a tile are the largest power of two that divides the group.

A TMA box reads whole pages, and slots past a row's end may hold anything, including NaN. So the box of a row's last
page starts that many slots early (before a block there are zeros, or keys of this row): its tokens are rotated in
shared memory, the masks account for it, and attention does not depend on the order of keys. For the same reason the
box of the first page that a window reaches starts at the window's first key.

Over an e4m3 pool a warpgroup loads, and writes the same tiles in float16 (gluon_load.py).

hopper_prefill_attention launches the kernel; takes() says for which tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention.gluon_attend import attend, oldest_seen
from kernels.attention.gluon_load import load_row, load_row_of_bytes
from kernels.attention.triton_common import LOWER, WHOLE, is_wide, reach_of, scale_arguments
from kernels.elementwise.reference import FP8, UNSCALED, KVScales
from kernels.gluon_common import allocate_barriers, grid_dependency

# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types)

if not triton.__version__.startswith("3.6."):
    raise ImportError(f"the Hopper prefill kernel needs Triton 3.6, whose Gluon it uses, not {triton.__version__}")

_COLUMNS = 64  # columns of a TMA box: 128 bytes, the widest swizzle
_PAGE = 64  # most tokens of a TMA box
_BOX_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


@dataclass(frozen=True)
class HopperConfig:
    """Tile sizes and pipeline depth of one program."""

    consumers: int  # warpgroups of 64 query rows
    block_n: int  # keys per tile
    num_stages: int  # tiles of keys, and of values, in shared memory
    programs_per_sm: int


def hopper_config(
    *, head_dim: int, total_rows: int, max_seq_len: int, num_sms: int, is_fp8: bool = False
) -> HopperConfig:
    """Choose tiles (benchmarks/notes.md). total_rows: query tokens x heads of all rows; max_seq_len: or the reach.

    is_fp8: the loading warpgroup's registers leave those for tiles of 64 keys.
    """
    if head_dim > 256:
        return HopperConfig(consumers=1, block_n=64, num_stages=1, programs_per_sm=1)
    if head_dim > 128:
        consumers = 1 if total_rows <= num_sms * 90 else 2
        return HopperConfig(consumers=consumers, block_n=64, num_stages=2, programs_per_sm=1)
    # Tiles of 128 rows that fill 0.7 of the SMs are faster at long contexts, and little slower at short ones
    if total_rows <= num_sms * (128 if max_seq_len <= 1024 else 90):
        return HopperConfig(consumers=1, block_n=64, num_stages=2, programs_per_sm=2)
    if max_seq_len <= 1024 or is_fp8:
        return HopperConfig(consumers=2, block_n=64, num_stages=4, programs_per_sm=1)
    return HopperConfig(consumers=2, block_n=128, num_stages=2, programs_per_sm=1)


_SERVED_HEADS = (64, 128, 256, 512)


def takes(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    sliding_window: int | None = None,
    chunk: int | None = None,
    softcap: float = 0.0,
) -> bool:
    """Return True if this kernel supports these tensors and options, given a device of compute capability 9."""
    head_dim = q.shape[2]
    # wgmma reads keys from shared memory in the dtype that was loaded; e4m3 leaves registers for heads of 128 at most
    is_fp8 = k_cache.dtype == v_cache.dtype == FP8 and head_dim <= 128 and k_cache.stride() == v_cache.stride()
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and (k_cache.dtype == q.dtype or is_fp8)
        and head_dim in _SERVED_HEADS
        and all(_fits_tma(cache, head_dim) for cache in (k_cache, v_cache))
        # The box of the row's last page must not reach slots before the window or chunk
        and (sliding_window is None or sliding_window >= _PAGE)
        and (chunk is None or chunk % max(_PAGE, k_cache.shape[1]) == 0)
        and (softcap == 0.0 or q.dtype == torch.bfloat16)  # the tanh of the hardware has about 11 bits
    )


def _fits_tma(cache: torch.Tensor, head_dim: int) -> bool:
    """Return True if the heads of a token lie side by side and everything is aligned to 16 bytes."""
    is_aligned = all(stride * cache.dtype.itemsize % 16 == 0 for stride in (cache.data_ptr(), *cache.stride()[:2]))
    return cache.shape[3] == head_dim and cache.stride()[2:] == (head_dim, 1) and is_aligned


def new_tickets(device: torch.device) -> torch.Tensor:
    """Return the counters that calls on one stream share; a kernel resets them to zero. Not inside a graph capture."""
    return torch.zeros(2, dtype=torch.int32, device=device)


def hopper_prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    tickets: torch.Tensor,
    *,
    scale: float,
    max_seq_len: int,
    first_row: int = 0,
    skips_decodes: bool = False,
    sliding_window: int | None = None,
    chunk: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    kv_scales: KVScales = UNSCALED,
    config: HopperConfig | None = None,
    pdl: bool = False,
) -> None:
    """Equal prefill_attention for tensors that `takes` allows. tickets: of new_tickets. max_seq_len bounds seq_lens."""
    if knobs.runtime.debug:  # TRITON_DEBUG=1. Not in the kernel: a program may begin when others have drawn
        torch._assert_async((tickets == 0).all(), "tickets were not zero before the launch")
    num_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    pack = group & -group
    reach, reach_kind = reach_of(sliding_window, chunk)
    num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    is_fp8 = k_cache.dtype == FP8
    if config is None:
        config = hopper_config(
            head_dim=head_dim, total_rows=num_tokens * num_heads, max_seq_len=min(max_seq_len, reach or max_seq_len),
            num_sms=num_sms, is_fp8=is_fp8,
        )  # fmt: skip
    num_rows = seq_lens.shape[0] - first_row
    tokens_per_tile = config.consumers * 64 // pack
    num_tiles = (num_tokens - first_row) // tokens_per_tile + num_rows
    page = min(block_size, _PAGE)
    queries = TensorDescriptor(
        q, list(q.shape), [q.stride(0), q.stride(1), 1], [64 // pack, pack, _COLUMNS], _BOX_LAYOUT
    )
    keys, values = (
        cache.view(torch.int32)
        if is_fp8
        else TensorDescriptor(
            cache, [cache.shape[0], block_size, num_kv_heads * head_dim], [*cache.stride()[:2], 1], [1, page, _COLUMNS],
            _BOX_LAYOUT,
        )
        for cache in (k_cache, v_cache)
    )  # fmt: skip
    k_scale, v_scale, (k_scales, v_scales, _, _, stride_scale_head) = scale_arguments(kv_scales, torch.float32)
    scale *= k_scale / (LOWER.value if is_fp8 else 1.0)
    registers = [192, 112] if is_fp8 else [232, 40]  # of the second attending warpgroup, and of what loads
    if config.consumers == 1:
        registers = [80 if is_fp8 else 72 if head_dim == 256 else 40]
    _prefill_kernel[(min(num_tiles * (num_heads // pack), num_sms * config.programs_per_sm),)](
        queries, keys, values, out, block_table, query_start_loc, seq_lens, sinks, tickets, first_row, num_rows,
        num_heads // pack, (softcap or scale) * math.log2(math.e), scale / softcap if softcap else 0.0, v_scale, reach,
        out.stride(0), block_table.stride(0), *(keys.stride()[:2] if is_fp8 else (0, 0)),
        k_scales, v_scales, stride_scale_head,
        IS_FP8=is_fp8, IS_WIDE=is_wide(k_cache, v_cache), PAGE=page, REGISTERS=tuple(registers),
        GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, BLOCK_N=config.block_n, STAGES=config.num_stages,
        CONSUMERS=config.consumers, REACH=reach_kind, HAS_SOFTCAP=softcap > 0.0, SKIPS_DECODES=skips_decodes, PDL=pdl,
        num_warps=8 if head_dim > 256 else 4, launch_pdl=pdl,
        maxnreg=168 if config.consumers == 2 or head_dim > 256 else 128 if head_dim <= 128 else 160,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["first_row", "num_rows"])
def _prefill_kernel(
    q_desc, k_desc, v_desc, out_ptr, table_ptr, query_start_ptr, seq_lens_ptr, sinks_ptr, ticket_ptr,
    first_row, num_rows, num_units,  # unit: the query heads that share a tile
    scale, cap_scale, v_scale, reach, stride_out, stride_table,  # scale: of logits, capped ones of tanh, to base 2
    stride_block, stride_slot, k_scales_ptr, v_scales_ptr, stride_scale_head,  # of an e4m3 pool, strides in words
    IS_FP8: gl.constexpr, IS_WIDE: gl.constexpr, PAGE: gl.constexpr, REGISTERS: gl.constexpr,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, REACH: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    SKIPS_DECODES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Set up shared memory, then specialise: one warpgroup per 64 query rows, and one loading warp or warpgroup."""
    PACK: gl.constexpr = q_desc.block_shape[1]
    TILE_DTYPE: gl.constexpr = gl.float16 if IS_FP8 else q_desc.dtype
    PANELS: gl.constexpr = HEAD_DIM // 64
    BOXES: gl.constexpr = STAGES * PANELS * (BLOCK_N // PAGE)
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_boxes = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS * PANELS, 64 // PACK, PACK, 64], q_desc.layout)
    k_boxes = gl.allocate_shared_memory(TILE_DTYPE, [BOXES, 1, PAGE, 64], q_desc.layout)
    v_boxes = gl.allocate_shared_memory(TILE_DTYPE, [BOXES, 1, PAGE, 64], q_desc.layout)
    q_tiles = q_boxes._reinterpret(q_desc.dtype, [CONSUMERS, 64, HEAD_DIM], TILE)
    k_tiles = k_boxes._reinterpret(TILE_DTYPE, [STAGES, BLOCK_N, HEAD_DIM], TILE)
    v_tiles = v_boxes._reinterpret(TILE_DTYPE, [STAGES, BLOCK_N, HEAD_DIM], TILE)
    work = gl.allocate_shared_memory(gl.int32, [6, 1], mbarrier.MBarrierLayout())
    queries = (q_tiles, allocate_barriers(1, 1), allocate_barriers(1, CONSUMERS))  # tiles, loaded, free
    keys = (k_tiles, allocate_barriers(STAGES, 1), allocate_barriers(STAGES, CONSUMERS))
    values = (v_tiles, allocate_barriers(STAGES, 1), allocate_barriers(STAGES, CONSUMERS))
    turns = work  # of one warpgroup: unused
    # Barriers without a later use would share their memory with the output's tiles. The hardware may write a barrier
    # again, when another process has had the device: seen as NaN in the first 16 bytes of a tile
    if CONSUMERS == 2:
        turns = allocate_barriers(2, 1)
        mbarrier.arrive(turns.index(0))
    if PDL:
        grid_dependency("griddepcontrol.wait;")
        grid_dependency("griddepcontrol.launch_dependents;")
    rings = (queries, keys, values)
    problem = (
        query_start_ptr,
        seq_lens_ptr,
        table_ptr,
        stride_table,
        first_row,
        num_rows,
        num_units,
        ticket_ptr,
        reach,
    )
    loading = ((q_desc, k_desc, v_desc, stride_block, stride_slot), (q_boxes, k_boxes, v_boxes), rings, work, problem)
    shared_weights = work  # unused
    if HEAD_DIM > 256:
        shared_weights = gl.allocate_shared_memory(TILE_DTYPE, [64, BLOCK_N], TILE)
    scales = (scale, cap_scale, v_scale, k_scales_ptr, v_scales_ptr, stride_scale_head)
    attending = (out_ptr, stride_out, sinks_ptr, rings, turns, work, shared_weights, scales, reach)
    gl.warp_specialize(
        [
            (attend, (attending, GROUP, PACK, PAGE, REACH, HAS_SOFTCAP, IS_FP8, 0)),
            (attend, (attending, GROUP, PACK, PAGE, REACH, HAS_SOFTCAP, IS_FP8, 1)),
            (_load, (loading, GROUP, PAGE, BLOCK_SIZE, REACH, SKIPS_DECODES, IS_FP8, IS_WIDE)),
        ]
        if CONSUMERS == 2
        else [
            (attend, (attending, GROUP, PACK, PAGE, REACH, HAS_SOFTCAP, IS_FP8, 0)),
            (_load, (loading, GROUP, PAGE, BLOCK_SIZE, REACH, SKIPS_DECODES, IS_FP8, IS_WIDE)),
        ],
        ([4, 4] if IS_FP8 else [4, 1]) if CONSUMERS == 2 else [4] if IS_FP8 else [1],
        list(REGISTERS),  # attending warps get the rest
    )


@gluon.jit
def _load(
    loading, GROUP: gl.constexpr, PAGE: gl.constexpr, BLOCK_SIZE: gl.constexpr, REACH: gl.constexpr,
    SKIPS_DECODES: gl.constexpr, IS_FP8: gl.constexpr, IS_WIDE: gl.constexpr,
):  # fmt: skip
    """Draw tiles until none is left: tell the other warps each tile's place, load its queries, then keys and values."""
    descs, boxes, rings, work, problem = loading
    query_start_ptr, seq_lens_ptr, table_ptr, stride_table, first_row, num_rows, num_units, ticket_ptr, reach = problem
    q_tiles, q_loaded, q_free = rings[0]
    CONSUMERS: gl.constexpr = q_tiles.shape[0]
    PANELS: gl.constexpr = q_tiles.shape[2] // 64
    PACK: gl.constexpr = boxes[0].shape[2]
    TOKENS: gl.constexpr = CONSUMERS * 64 // PACK
    LONG: gl.constexpr = max(4096, 16384 // PACK)
    num_programs = gl.num_programs(0)
    base = gl.load(query_start_ptr + first_row)
    num_tiles = (gl.load(query_start_ptr + first_row + num_rows) - base) // TOKENS + num_rows
    # For long rows, a head's tiles come one after another, so that its keys stay in L2; for short rows, a tile's heads,
    # so that the longest tiles of all come first. Decided by the first two rows, of which one may be padding. Tiles of
    # windows are about equally long
    longest = gl.load(seq_lens_ptr + first_row)
    longest = gl.maximum(longest, gl.load(seq_lens_ptr + first_row + gl.minimum(num_rows - 1, 1)))
    is_long = (longest >= LONG) | (REACH != WHOLE)
    divisor = gl.where(is_long, num_tiles, num_units)
    drawn = gl.program_id(0)
    loaded = 0  # tiles of keys
    tiles = 0
    while drawn < num_tiles * num_units:
        slow = drawn // divisor
        fast = drawn - slow * divisor
        unit = gl.where(is_long, slow, fast)
        flat = gl.where(is_long, fast, slow)
        row, token, left, position, seq_len, end = _find_tile(problem, flat, TOKENS, SKIPS_DECODES)
        if end > 0:
            mbarrier.wait(q_free.index(0), (tiles & 1) ^ 1)
            _tell(work, (unit, token, left, position, seq_len, end))
            mbarrier.expect(q_loaded.index(0), CONSUMERS * 64 * PANELS * 128)
            for i in gl.static_range(CONSUMERS):
                for panel in gl.static_range(PANELS):
                    tma.async_copy_global_to_shared(
                        descs[0], [token + i * (64 // PACK), unit * PACK, panel * 64], q_loaded.index(0),
                        boxes[0].index(i * PANELS + panel),
                    )  # fmt: skip
            tiles += 1
            table = table_ptr + row.to(gl.int64) * stride_table
            column = unit * PACK // GROUP * PANELS * 64
            oldest = 0
            if REACH != WHOLE:
                oldest = oldest_seen(position, reach, REACH)
            if IS_FP8:
                loaded = load_row_of_bytes(
                    descs[1:], rings, loaded, table, column // 4, oldest, seq_len, end, PAGE, BLOCK_SIZE, IS_WIDE
                )  # fmt: skip
            else:
                loaded = load_row(descs, boxes, rings, loaded, table, column, oldest, seq_len, end, BLOCK_SIZE)
        drawn = num_programs + gl.atomic_add(ticket_ptr, 1, sem="relaxed")
    mbarrier.wait(q_free.index(0), (tiles & 1) ^ 1)
    _tell(work, (0, 0, 0, 0, 0, 0))
    mbarrier.arrive(q_loaded.index(0))
    if gl.atomic_add(ticket_ptr + 1, 1) == num_programs - 1:  # every program has drawn its last
        gl.store(ticket_ptr, 0)
        gl.store(ticket_ptr + 1, 0)


@gluon.jit
def _find_tile(problem, flat, TOKENS: gl.constexpr, SKIPS_DECODES: gl.constexpr):
    """Locate tile `flat` of all rows: row, first query token, query tokens from there on, its position, seq_len, end.

    Row i's tiles begin at (its first token // TOKENS) + i; its last tiles, which see the most keys, come first. end:
    the number of keys its queries see; 0 if there is nothing to do, 1 in a padding row, whose one page reads as zeros.
    """
    query_start_ptr, seq_lens_ptr, _table_ptr, _stride_table, first_row, num_rows = problem[:6]
    lanes = gl.arange(0, 128, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    base = gl.load(query_start_ptr + first_row)
    begun = 0
    for start in range(0, num_rows, 128):
        rows = start + lanes
        starts = gl.load(query_start_ptr + first_row + rows, mask=rows < num_rows, other=0)
        begun += gl.sum(((rows < num_rows) & ((starts - base) // TOKENS + rows <= flat)).to(gl.int32), 0)
    row = first_row + begun - 1
    query_start = gl.load(query_start_ptr + row)
    query_len = gl.load(query_start_ptr + row + 1) - query_start
    seq_len = gl.load(seq_lens_ptr + row)
    num_tiles = gl.cdiv(query_len, TOKENS)
    tile = flat - ((query_start - base) // TOKENS + begun - 1)
    is_live = tile < num_tiles
    if SKIPS_DECODES:
        is_live = is_live & (query_len > 1)
    first = (num_tiles - 1 - tile) * TOKENS
    position = seq_len - query_len + first
    end = gl.where(is_live, gl.maximum(gl.minimum(position + TOKENS, seq_len), 1), 0)
    return row, query_start + first, query_len - first, position, seq_len, end


@gluon.jit
def _tell(work, values):
    """Write a tile's place for the other warps, in the order of gluon_attend's fields."""
    for i in gl.static_range(6):
        work.index(i).store(gl.full([1], values[i], gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))
    gl.thread_barrier()
