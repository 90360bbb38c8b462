# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""x @ weight.T for matrices of 4-bit codes (kernels/quant_codes.py), for few rows of x.

As kernels/triton_int_gemm.py: weight @ x.T, weights unpacked where tensor cores take them, K split until the device is
full, the parts summed in order by the last program of a tile. A plane of codes becomes values by byte permutations of
the table, which stays in registers, or by lookups in shared memory, where each lane of a warp has a table of its own,
of two values per byte, in a bank of its own; or half of the planes become so by the one and half by the other, since
each keeps another unit of the multiprocessor busy. A block's sum is scaled in fp32. Capturable in a CUDA graph.

In PTX both take two neighbours of a row at once, so they rely on Triton handing over neighbours: it does in the layouts
in which tensor cores take 16-bit operands. tests/gpu/test_quant_codes_cuda.py would show if it did not any more.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels.attention.triton_common import prefetch_l2
from kernels.codes_configs import LOOKUPS, SCRATCH_SUMS, CodesGemmConfig
from kernels.quant_bnb import BLOCK
from kernels.quant_codes import CodeWeight
from kernels.triton_gemv import GemvScratch

MAX_ROWS = 128
_BLOCK = tl.constexpr(BLOCK)


def can_codes_gemm(x: torch.Tensor, weight: CodeWeight) -> bool:
    """Whether codes_gemm takes this product. Host-side facts only."""
    return (
        x.dtype == weight.rounded.dtype
        and 0 < x.shape[0] <= MAX_ROWS
        and x.stride(-1) == 1
        and weight.packed.numel() < 2**31
    )


def allocate_scratch(device: torch.device) -> GemvScratch:
    """Allocate where splits meet (16 MB): enough for every cut that CodesCut makes. One per stream."""
    return GemvScratch.allocate(device, capacity=SCRATCH_SUMS)


def codes_gemm(
    x: torch.Tensor,
    weight: CodeWeight,
    bias: torch.Tensor | None,
    scratch: GemvScratch,
    *,
    config: CodesGemmConfig,
    pdl: bool = False,
) -> torch.Tensor:
    """Return x @ weight.T + bias. x: [M, K], of the weight's dtype; bias: [N]; returns [M, N]."""
    num_rows, k = x.shape
    num_tiles, n, _ = weight.packed.shape
    assert k == weight.in_features
    assert x.stride(1) == 1
    assert x.dtype == weight.rounded.dtype
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(num_rows, config.block_m), triton.cdiv(n, config.block_n), config.splits)
    if config.splits > 1:
        assert grid[0] * grid[1] <= scratch.arrivals.shape[0]
        assert math.prod(grid) * config.block_m * config.block_n <= scratch.partial.shape[0]
    packed, table = weight.packed.view(torch.int16), weight.registers
    if config.lookup == "load":
        packed, table = weight.packed, weight.rounded
    # row tiles first: those that read the same weights run at the same time, and L2 holds them
    _codes_gemm_kernel[grid](
        x, packed, weight.scales, table, weight.pairs, bias, out, scratch.partial, scratch.arrivals,
        num_rows, n, k, num_tiles, triton.cdiv(num_tiles, config.splits), x.stride(0),
        M_PAD=config.block_m, BLOCK_N=config.block_n, PLANE=weight.plane, SPLITS=config.splits,
        PERMUTED=LOOKUPS[config.lookup], IS_PAIRED=weight.is_paired, EVEN_N=n % config.block_n == 0,
        EVEN_K=k % (4 * weight.plane) == 0, HAS_BIAS=bias is not None, STAGES=config.num_stages,
        PREFETCH=config.prefetch, PDL=pdl, num_warps=config.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "tiles_per_split"])
def _codes_gemm_kernel(
    x_ptr, packed_ptr, scales_ptr, table_ptr, pairs_ptr, bias_ptr, out_ptr, partial_ptr, arrivals_ptr,
    num_rows, n, k, num_tiles, tiles_per_split, stride_x,
    M_PAD: tl.constexpr, BLOCK_N: tl.constexpr, PLANE: tl.constexpr, SPLITS: tl.constexpr, PERMUTED: tl.constexpr,
    IS_PAIRED: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One (tile of rows, tile of outputs, split of K)."""
    row_tile, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # An output past the end reads the last one: cheaper in the loop than a mask
    sources = outputs if EVEN_N else tl.minimum(outputs, n - 1)
    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, num_tiles)
    # Programs past the first wave start when the wait is long over
    if PDL and PREFETCH > 0 and row_tile == 0 and tile * SPLITS + split < 528:
        SHARE: tl.constexpr = 64 // PLANE  # outputs whose codes share a line of 128 bytes
        firsts = tile * BLOCK_N + tl.arange(0, BLOCK_N // SHARE) * SHARE
        for ahead in tl.static_range(PREFETCH):
            lines = tl.minimum(first + ahead, num_tiles - 1) * n + tl.minimum(firsts, n - 1)
            prefetch_l2(packed_ptr + lines * (PLANE if PERMUTED >= 0 else 2 * PLANE))
    if PERMUTED >= 0 and PERMUTED < 4:
        _fill_tables(pairs_ptr)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = row_tile * M_PAD + tl.arange(0, M_PAD)
    acc = _sum_slab(
        x_ptr + rows.to(tl.int64) * stride_x, packed_ptr, scales_ptr, table_ptr, rows < num_rows, sources,
        first, last, n, k, M_PAD, BLOCK_N, PLANE, PERMUTED, IS_PAIRED, EVEN_K, STAGES,
    )  # fmt: skip
    results = out_ptr + rows.to(tl.int64)[None, :] * n + outputs[:, None]
    mask = (rows < num_rows)[None, :] & (outputs < n)[:, None]
    if SPLITS > 1:
        entries = tl.arange(0, BLOCK_N)[:, None] * M_PAD + tl.arange(0, M_PAD)[None, :]
        meeting = row_tile * tl.num_programs(1) + tile
        parts = partial_ptr + meeting * (SPLITS * BLOCK_N * M_PAD) + entries
        tl.store(parts + split * (BLOCK_N * M_PAD), acc)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + meeting, 1, sem="acq_rel")
        if arrived == SPLITS - 1:
            tl.store(arrivals_ptr + meeting, 0)
            total = tl.zeros([BLOCK_N, M_PAD], tl.float32)
            for index in tl.static_range(SPLITS):
                total += tl.load(parts + index * (BLOCK_N * M_PAD), cache_modifier=".cg")
            _store(results, total, bias_ptr, outputs, n, mask, HAS_BIAS)
    else:
        _store(results, acc, bias_ptr, outputs, n, mask, HAS_BIAS)


@triton.jit
def _sum_slab(
    x_ptrs, packed_ptr, scales_ptr, table_ptr, in_rows, sources, first, last, n, k,
    M_PAD: tl.constexpr, BLOCK_N: tl.constexpr, PLANE: tl.constexpr, PERMUTED: tl.constexpr, IS_PAIRED: tl.constexpr,
    EVEN_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, M_PAD] fp32: weight @ x.T over the tiles [first, last)."""
    RUN: tl.constexpr = _BLOCK // PLANE  # planes of a block
    offsets = tl.arange(0, PLANE)
    if PERMUTED < 0:
        code_ptrs = packed_ptr + sources[:, None] * (2 * PLANE) + (offsets // 2 * 4)[None, :]
        halves = (4 * (offsets % 2))[None, :]
    else:
        word_ptrs = packed_ptr + sources[:, None] * PLANE + offsets[None, :]
    if PERMUTED > 0:
        # Tensors of one entry, since Triton unpacks in the layout of tensor cores only what comes from such loads
        one = table_ptr + tl.arange(0, 1)[:, None]
        registers = (
            tl.load(one), tl.load(one + 1), tl.load(one + 2), tl.load(one + 3),
            tl.load(one + 4), tl.load(one + 5), tl.load(one + 6), tl.load(one + 7),
        )  # fmt: skip
    acc = tl.zeros([BLOCK_N, M_PAD], tl.float32)
    for t in tl.range(first, last, num_stages=STAGES):
        if PERMUTED >= 0:
            words = tl.load(word_ptrs + t * n * PLANE, eviction_policy="evict_first")
        for run in tl.static_range(4 // RUN):
            start = (t * 4 + run * RUN) * PLANE
            # The last tile may reach past K, where x is zero: any block will do
            block = start // _BLOCK if EVEN_K else tl.minimum(start, k - 1) // _BLOCK
            scales = tl.load(scales_ptr + block * n + sources)
            part = tl.zeros([BLOCK_N, M_PAD], tl.float32)
            for index in tl.static_range(RUN):
                inputs = start + index * PLANE + offsets
                mask = in_rows[:, None] if EVEN_K else in_rows[:, None] & (inputs < k)[None, :]
                x = tl.load(x_ptrs[:, None] + inputs[None, :], mask=mask, other=0.0)
                if PERMUTED < 0:
                    codes = tl.load(code_ptrs + t * n * (2 * PLANE) + run * RUN + index)
                    weights = tl.load(table_ptr + ((codes >> halves) & 15).to(tl.int32))
                elif run * RUN + index < PERMUTED:
                    weights = _permute(words, registers, scales, x, run * RUN + index, IS_PAIRED)
                else:
                    weights = _look_up(words, scales, x, run * RUN + index)
                part = tl.dot(weights, tl.trans(x), part)
            acc += part * scales[:, None]
    return acc


@triton.jit
def _permute(words, registers, scales, x, PLANE_INDEX: tl.constexpr, IS_PAIRED: tl.constexpr):
    """Plane PLANE_INDEX of a [N, PLANE] tile of int16 words, as values of x's dtype.

    The PTX leaves scales alone: they are there for Triton, which loads ahead only what a product depends on.
    """
    ASM: tl.constexpr = _PERMUTE_PAIRED[PLANE_INDEX] if IS_PAIRED else _PERMUTE_ANY[PLANE_INDEX]
    r0, r1, r2, r3, r4, r5, r6, r7 = registers
    shape: tl.constexpr = words.shape
    return tl.inline_asm_elementwise(
        ASM, "=r" + ",r" * 19,
        [
            words, tl.broadcast_to(r0, shape), tl.broadcast_to(r1, shape), tl.broadcast_to(r2, shape),
            tl.broadcast_to(r3, shape), tl.broadcast_to(r4, shape), tl.broadcast_to(r5, shape),
            tl.broadcast_to(r6, shape), tl.broadcast_to(r7, shape),
            tl.broadcast_to(scales.to(tl.int32, bitcast=True)[:, None], shape),
        ],
        dtype=x.dtype, is_pure=True, pack=2,
    )  # fmt: skip


def permute_asm(plane_index: int, *, is_paired: bool) -> str:
    """PTX for two neighbours of a plane. $1: their words; $2, $4, …, $16: the table (32-bit operands come twice)."""
    shift, selector = 16 * (plane_index // 2), ("0x5140", "0x7362")[plane_index % 2]
    if is_paired:
        lookups = (
            f"xor.b32 u, $1, 0x88888888; shr.u32 v, $1, {shift}; shr.u32 u, u, {shift};"
            " prmt.b32 a, $2, $4, v; prmt.b32 b, $6, $8, u; xor.b32 l, a, b;"
            " prmt.b32 a, $10, $12, v; prmt.b32 b, $14, $16, u; xor.b32 h, a, b;"
        )
    else:
        # u: which of 8, v: from the lower or the upper half of the table
        lookups = (
            "and.b32 u, $1, 0x77777777; shr.u32 v, $1, 1; lop3.b32 v, v, 0x44444444, 0x32103210, 0xea;"
            f" shr.u32 u, u, {shift}; shr.u32 v, v, {shift};"
            " prmt.b32 a, $2, $4, u; prmt.b32 b, $6, $8, u; prmt.b32 l, a, b, v;"
            " prmt.b32 a, $10, $12, u; prmt.b32 b, $14, $16, u; prmt.b32 h, a, b, v;"
        )
    return f"{{ .reg .b32 u, v, a, b, l, h; {lookups} prmt.b32 $0, l, h, {selector}; }}"


_PERMUTE_PAIRED = tl.constexpr(tuple(permute_asm(index, is_paired=True) for index in range(4)))
_PERMUTE_ANY = tl.constexpr(tuple(permute_asm(index, is_paired=False) for index in range(4)))


@triton.jit
def _fill_tables(pairs_ptr) -> None:
    """Write the 256 pairs once for each lane of a warp. Before the first _look_up, once in a program."""
    index = tl.arange(0, 2048)  # 16 bytes, four lanes' copies, each
    pairs = tl.load(pairs_ptr + index // 8)
    # Without braces, so that _look_up knows the name
    tables = tl.inline_asm_elementwise(
        ".shared .align 128 .b8 code_tables[32768]; mov.u32 $0, code_tables;", "=r,r", [tl.program_id(0)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.inline_asm_elementwise(
        "st.shared.v4.b32 [$1], {$2, $2, $2, $2}; mov.u32 $0, 0;", "=r,r,r", [tables + index * 16, pairs],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.debug_barrier()


@triton.jit
def _look_up(words, scales, x, PLANE_INDEX: tl.constexpr):
    """As _permute does, out of this lane's table of pairs."""
    ASM: tl.constexpr = _LOOK_UP[PLANE_INDEX]
    return tl.inline_asm_elementwise(
        ASM, "=r,r,r,r", [words, tl.broadcast_to(scales.to(tl.int32, bitcast=True)[:, None], words.shape)],
        dtype=x.dtype, is_pure=True, pack=2,
    )  # fmt: skip


def look_up_asm(plane_index: int) -> str:
    """PTX for two neighbours of a plane. $1: their words."""
    return (
        "{ .reg .b32 lane, byte; mov.u32 lane, %laneid; shl.b32 lane, lane, 2; mov.u32 byte, code_tables;"
        f" add.u32 lane, lane, byte; prmt.b32 byte, $1, 0, 0x444{plane_index}; mad.lo.u32 byte, byte, 128, lane;"
        " ld.shared.b32 $0, [byte]; }"
    )


_LOOK_UP = tl.constexpr(tuple(look_up_asm(index) for index in range(4)))


@triton.jit
def _store(results, values, bias_ptr, outputs, n, mask, HAS_BIAS: tl.constexpr) -> None:
    """Add the bias and store, rounded to the output's dtype."""
    if HAS_BIAS:
        values += tl.load(bias_ptr + outputs, mask=outputs < n, other=0.0).to(tl.float32)[:, None]
    tl.store(results, values.to(results.dtype.element_ty), mask=mask)
