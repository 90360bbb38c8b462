"""x @ weight.T for 4-bit lookup-table weights (kernels/linear/reference.py), for few rows of x.

As in kernels/linear/triton_int.py: weight @ x.T, weights converted in registers, K split until the device is full, the
parts summed in order by the last program of a tile. Table indices become values by lookups in shared memory, where
each lane of a warp has its own table, of two values per byte, in its own bank; on devices for which that PTX was not
tested, by loads from L1. A block's sum is scaled in fp32. Capturable in a CUDA graph.

The PTX takes two neighbours of a row at once, so it relies on Triton passing neighbours: it does in the layouts in
which tensor cores take 16-bit operands. tests/gpu/test_lut4_cuda.py fails if that changes.

`dequantize` returns the dense matrix, for products of so many rows that cuBLAS is faster.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention.triton_common import prefetch_l2
from kernels.linear.float4 import Float4Weight
from kernels.linear.lut4_configs import Lut4GemmConfig
from kernels.linear.reference import BLOCK, LUT_PLANE, LUT_TILE, Lut4Weight
from kernels.linear.splits import SplitKScratch
from kernels.linear.triton_split_k import store_split

# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)


_BLOCK = tl.constexpr(BLOCK)
_PLANE = tl.constexpr(LUT_PLANE)
_ALIGNMENT = 16  # of rows of x: otherwise Triton does not load them ahead


def can_lut4_gemm(x: torch.Tensor, weight: Lut4Weight | Float4Weight) -> bool:
    """Return True if lut4_gemm, or float4_gemm (triton_float4.py), supports this product. Host-side facts only."""
    return (
        x.dtype == weight.pairs.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[0] > 0
        and x.stride(1) == 1
        and x.stride(0) % _ALIGNMENT == 0
        and x.data_ptr() % _ALIGNMENT == 0
        and weight.packed.numel() < 2**31
    )


def lut4_gemm(
    x: torch.Tensor,
    weight: Lut4Weight,
    bias: torch.Tensor | None,
    scratch: SplitKScratch,
    *,
    config: Lut4GemmConfig,
    pdl: bool = False,
) -> torch.Tensor:
    """Return x @ weight.T + bias. x: [M, K], of the weight's dtype; bias: [N]; returns [M, N]."""
    (num_rows, k), (num_tiles, n, _) = x.shape, weight.packed.shape
    assert k == weight.in_features
    assert x.stride(1) == 1
    assert x.dtype == weight.pairs.dtype
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(num_rows, config.block_m), triton.cdiv(n, config.block_n), config.splits)
    scratch.check(num_tiles=grid[0] * grid[1], splits=config.splits, tile_sums=config.block_m * config.block_n)
    packed, pairs = weight.packed, weight.pairs
    if config.is_shared:
        packed, pairs = packed.view(torch.int16), pairs.view(torch.int32)
    # row tiles first: tiles that read the same weights run at the same time and share them in L2
    _lut4_gemm_kernel[grid](
        x, packed, weight.scales, pairs, bias, out, scratch.partial, scratch.arrivals,
        num_rows, n, k, num_tiles, triton.cdiv(num_tiles, config.splits), x.stride(0),
        M_PAD=config.block_m, BLOCK_N=config.block_n, SPLITS=config.splits, IS_SHARED=config.is_shared,
        EVEN_N=n % config.block_n == 0, EVEN_K=k % LUT_TILE == 0, HAS_BIAS=bias is not None, STAGES=config.num_stages,
        PREFETCH=config.prefetch, PDL=pdl, num_warps=config.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "tiles_per_split"])
def _lut4_gemm_kernel(
    x_ptr, packed_ptr, scales_ptr, pairs_ptr, bias_ptr, out_ptr, partial_ptr, arrivals_ptr,
    num_rows, n, k, num_tiles, tiles_per_split, stride_x,
    M_PAD: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, IS_SHARED: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, STAGES: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One (tile of rows, tile of outputs, split of K)."""
    row_tile, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # An output past the end reads the last one: cheaper in the loop than a mask
    sources = outputs if EVEN_N else tl.minimum(outputs, n - 1)
    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, num_tiles)
    # Programs after the first wave start when the wait is long over
    if PDL and PREFETCH > 0 and row_tile == 0 and tile * SPLITS + split < 528:
        firsts = tile * BLOCK_N + tl.arange(0, BLOCK_N // 2) * 2  # indices of two outputs share a line of 128 bytes
        for ahead in tl.static_range(PREFETCH):
            lines = tl.minimum(first + ahead, num_tiles - 1) * n + tl.minimum(firsts, n - 1)
            prefetch_l2(packed_ptr + lines * (_PLANE if IS_SHARED else 2 * _PLANE))
    if IS_SHARED:
        fill_tables(pairs_ptr)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = row_tile * M_PAD + tl.arange(0, M_PAD)
    acc = _sum_slab(
        x_ptr + rows.to(tl.int64) * stride_x, packed_ptr, scales_ptr, pairs_ptr, rows < num_rows, sources,
        first, last, n, k, M_PAD, BLOCK_N, IS_SHARED, EVEN_K, STAGES,
    )  # fmt: skip
    results = out_ptr + rows.to(tl.int64)[None, :] * n + outputs[:, None]
    mask = (rows < num_rows)[None, :] & (outputs < n)[:, None]
    store_split(
        acc, results, mask, partial_ptr, arrivals_ptr, bias_ptr, outputs, n, M_PAD, BLOCK_N, SPLITS, HAS_BIAS
    )  # fmt: skip


@triton.jit
def _sum_slab(
    x_ptrs, packed_ptr, scales_ptr, pairs_ptr, in_rows, sources, first, last, n, k,
    M_PAD: tl.constexpr, BLOCK_N: tl.constexpr, IS_SHARED: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, M_PAD] fp32: weight @ x.T over the tiles [first, last)."""
    offsets = tl.arange(0, _PLANE)
    # IS_SHARED reads words, else bytes; the compiler drops the others' addresses
    word_ptrs = packed_ptr + sources[:, None] * _PLANE + offsets[None, :]
    byte_ptrs = packed_ptr + sources[:, None] * (2 * _PLANE) + (offsets // 2 * 4)[None, :]
    halves = (offsets % 2)[None, :]
    acc = tl.zeros([BLOCK_N, M_PAD], tl.float32)
    for t in tl.range(first, last, num_stages=STAGES):
        words = tl.load(word_ptrs + t * n * _PLANE, eviction_policy="evict_first") if IS_SHARED else None
        for half in tl.static_range(2):  # a block of scales each: two planes
            start = (t * 4 + half * 2) * _PLANE
            # The last tile may reach past K, where x is zero: any block is valid
            block = start // _BLOCK if EVEN_K else tl.minimum(start, k - 1) // _BLOCK
            scales = tl.load(scales_ptr + block * n + sources)
            part = tl.zeros([BLOCK_N, M_PAD], tl.float32)
            for index in tl.static_range(2):
                inputs = start + index * _PLANE + offsets
                mask = in_rows[:, None] if EVEN_K else in_rows[:, None] & (inputs < k)[None, :]
                x = tl.load(x_ptrs[:, None] + inputs[None, :], mask=mask, other=0.0)
                if IS_SHARED:
                    weights = _look_up(words, scales, x, half * 2 + index)
                else:
                    codes = tl.load(byte_ptrs + t * n * (2 * _PLANE) + half * 2 + index).to(tl.int32)
                    weights = tl.load(pairs_ptr + codes * 2 + halves)
                part = tl.dot(weights, tl.trans(x), part)
            acc += part * scales[:, None]
    return acc


@triton.jit
def fill_tables(pairs_ptr) -> None:
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
    """Plane PLANE_INDEX of a [N, LUT_PLANE] tile of int16 words, as values of x's dtype.

    The PTX does not use scales: they are an operand because Triton loads ahead only what a product depends on.
    """
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


_BLOCK_N = 32


def dequantize(weight: Lut4Weight, dtype: torch.dtype) -> torch.Tensor:
    """See kernels.linear.reference.dequantize_lut4."""
    n, k = weight.out_features, weight.in_features
    out = torch.empty(n, k, dtype=dtype, device=weight.packed.device)
    _dequantize_kernel[(weight.num_tiles, triton.cdiv(n, _BLOCK_N))](
        weight.packed.view(torch.int32), weight.scales, weight.table, out, n, k, BLOCK_N=_BLOCK_N, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _dequantize_kernel(words_ptr, scales_ptr, table_ptr, out_ptr, n, k, BLOCK_N: tl.constexpr) -> None:
    """One (tile of the packed indices, tile of outputs)."""
    HALF: tl.constexpr = _PLANE // 2
    t = tl.program_id(0)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = (outputs < n)[:, None]
    halves = tl.arange(0, HALF)
    words = tl.load(words_ptr + (t * n + outputs).to(tl.int64)[:, None] * HALF + halves[None, :], mask=in_n, other=0)
    for index in tl.static_range(4):
        start = (t * 4 + index) * _PLANE
        in_k = start < k  # k is a multiple of planes
        inputs = start + tl.arange(0, _PLANE)
        scales = tl.load(scales_ptr + (start // _BLOCK) * n + outputs, mask=(outputs < n) & in_k, other=0.0)
        codes = (words >> (8 * index)) & 255
        pairs = tl.interleave(tl.load(table_ptr + (codes >> 4)), tl.load(table_ptr + (codes & 15)))
        weights = pairs * scales[:, None]
        results = out_ptr + outputs.to(tl.int64)[:, None] * k + inputs[None, :]
        tl.store(results, weights.to(out_ptr.dtype.element_ty), mask=in_n & in_k)
