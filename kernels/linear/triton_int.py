"""x @ weight.T for packed 4- or 8-bit integer weights (kernels/linear/reference.py), for up to some hundred rows.

The product is computed as weight @ x.T: the weights, dequantised in registers, are the operand that tensor cores read
from registers. Sums over a group of inputs are of whole numbers times x, and are scaled in fp32: exact but for the
summation. Few rows cost no more than reading the weights: K is split until the device is full, and the last program
of a tile to arrive sums the parts in order, which is deterministic. Capturable in a CUDA graph.

`dequantize` returns the dense matrix, for products of so many rows that cuBLAS is faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.attention.triton_common import prefetch_l2
from kernels.linear.reference import PLANE, IntWeight
from kernels.linear.splits import SplitKScratch, num_splits
from kernels.linear.triton_split_k import store_split

# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)


MAX_ROWS = 512  # above, dequantising once for cuBLAS costs less than dequantising in every tile of rows
_ENOUGH_PROGRAMS = 264  # two for each multiprocessor of an H100
_WIDE = 132 * 128  # outputs that fill an H100 with wide tiles
_DEEP = 32  # tiles along K from which wide tiles are faster


@dataclass(frozen=True)
class IntGemmConfig:
    """Tile sizes and number of splits for one shape."""

    block_m: int  # rows of x per program, padded
    block_n: int
    splits: int  # splits of K, in whole tiles of the packed weights; the last may be shorter
    num_warps: int
    num_stages: int
    prefetch: int = 4  # tiles of weights that a program prefetches into L2 before it waits for x; 0: none


def can_int_gemm(x: torch.Tensor, weight: IntWeight) -> bool:
    """Return True if int_gemm supports this product. Host-side facts only."""
    is_grouped = weight.groups.shape[0] > 1
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and 0 < x.shape[0] <= MAX_ROWS
        and x.stride(-1) == 1
        and not (is_grouped and weight.group_size % PLANE)
        and weight.packed.numel() < 2**31
    )


def int_gemm_config(*, num_rows: int, n: int, num_tiles: int) -> IntGemmConfig:
    """Return the config of a shape class: rows rounded up to a power of two, at least 8. num_tiles: packed, along K.

    On an H100 4 % slower than each shape's best cut, in the mean (benchmarks/notes.md); to retune:
    python -m benchmarks.kernels --only int4 --sweep.
    """
    most = max(8, triton.next_power_of_2(num_rows))
    block_m = min(64, most)
    if most <= 16:
        block_n, warps, stages, prefetch, least_steps = 128, 4, 4, 2, 2
    elif most <= 64:
        block_n, warps, stages, prefetch, least_steps = 128 if n >= _WIDE else 64, 4, 4, 0, 4
    elif most <= 256 and num_tiles < _DEEP:
        block_n, warps, stages, prefetch, least_steps = 64, 4, 4, 2, 4
    else:
        block_n, warps, stages, prefetch, least_steps = 128, 4, 3, 2, 4
    splits = num_splits(
        num_rows=most,
        n=n,
        num_steps=num_tiles,
        block_m=block_m,
        block_n=block_n,
        programs=_ENOUGH_PROGRAMS,
        least_steps=least_steps,
    )
    return IntGemmConfig(block_m, block_n, splits, warps, stages, prefetch)


def int_gemm(
    x: torch.Tensor,
    weight: IntWeight,
    bias: torch.Tensor | None,
    scratch: SplitKScratch,
    *,
    config: IntGemmConfig | None = None,
    pdl: bool = False,
    uses_asm: bool | None = None,
) -> torch.Tensor:
    """Return x @ weight.T + bias. x: [M, K], bf16 or fp16, in the weight's order; bias: [N]; returns [M, N].

    uses_asm: unpack two integers per instruction, in PTX; None: on CUDA.
    """
    num_rows, k = x.shape
    num_tiles, n, _ = weight.packed.shape
    assert k == weight.in_features
    assert x.stride(1) == 1
    config = config or int_gemm_config(num_rows=num_rows, n=n, num_tiles=num_tiles)
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    num_planes = 16 // weight.bits
    grid = (triton.cdiv(num_rows, config.block_m), triton.cdiv(n, config.block_n), config.splits)
    scratch.check(num_tiles=grid[0] * grid[1], splits=config.splits, tile_sums=config.block_m * config.block_n)
    is_grouped = weight.groups.shape[0] > 1
    # row tiles first: tiles that read the same weights run at the same time and share them in L2
    _int_gemm_kernel[grid](
        x, weight.packed, weight.groups, bias, out, scratch.partial, scratch.arrivals,
        num_rows, n, k, num_tiles, triton.cdiv(num_tiles, config.splits), weight.groups.shape[0], x.stride(0),
        M_PAD=config.block_m, BLOCK_N=config.block_n, PLANE=PLANE, BITS=weight.bits, SPLITS=config.splits,
        SCALES_BF16=weight.scale_dtype == torch.bfloat16,
        GROUP_SIZE=weight.group_size if is_grouped else 0,
        RUN=math.gcd(weight.group_size // PLANE, num_planes) if is_grouped else num_planes,
        EVEN_N=n % config.block_n == 0, EVEN_K=k % (num_planes * PLANE) == 0,
        USES_ASM=x.is_cuda if uses_asm is None else uses_asm, HAS_BIAS=bias is not None,
        STAGES=config.num_stages, PREFETCH=config.prefetch, PDL=pdl, num_warps=config.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "tiles_per_split", "num_groups"])
def _int_gemm_kernel(
    x_ptr, packed_ptr, groups_ptr, bias_ptr, out_ptr, partial_ptr, arrivals_ptr,
    num_rows, n, k, num_tiles, tiles_per_split, num_groups, stride_x,
    M_PAD: tl.constexpr, BLOCK_N: tl.constexpr, PLANE: tl.constexpr, BITS: tl.constexpr, SPLITS: tl.constexpr,
    SCALES_BF16: tl.constexpr, GROUP_SIZE: tl.constexpr, RUN: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    USES_ASM: tl.constexpr, HAS_BIAS: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One (tile of rows, tile of outputs, split of K)."""
    row_tile, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # An output past the end reads the last one: cheaper in the loop than a mask
    sources = outputs if EVEN_N else tl.minimum(outputs, n - 1)
    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, num_tiles)
    if PDL:
        # Programs after the first wave start when the wait is long over
        if PREFETCH > 0 and row_tile == 0 and tile * SPLITS + split < 528:
            pairs = tile * BLOCK_N + tl.arange(0, BLOCK_N // 2) * 2  # of outputs, whose words share a line
            for ahead in tl.static_range(PREFETCH):
                words = tl.minimum(first + ahead, num_tiles - 1) * n + tl.minimum(pairs, n - 1)
                prefetch_l2(packed_ptr + words * PLANE)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = row_tile * M_PAD + tl.arange(0, M_PAD)
    acc = _sum_slab(
        x_ptr + rows.to(tl.int64) * stride_x, packed_ptr, groups_ptr, rows < num_rows, sources,
        first, last, n, k, num_groups,
        M_PAD, BLOCK_N, PLANE, BITS, SCALES_BF16, GROUP_SIZE, RUN, EVEN_K, USES_ASM, STAGES,
    )  # fmt: skip
    results = out_ptr + rows.to(tl.int64)[None, :] * n + outputs[:, None]
    mask = (rows < num_rows)[None, :] & (outputs < n)[:, None]
    store_split(
        acc, results, mask, partial_ptr, arrivals_ptr, bias_ptr, outputs, n, M_PAD, BLOCK_N, SPLITS, HAS_BIAS
    )  # fmt: skip


@triton.jit
def _sum_slab(
    x_ptrs, packed_ptr, groups_ptr, in_rows, sources, first, last, n, k, num_groups,
    M_PAD: tl.constexpr, BLOCK_N: tl.constexpr, PLANE: tl.constexpr, BITS: tl.constexpr, SCALES_BF16: tl.constexpr,
    GROUP_SIZE: tl.constexpr, RUN: tl.constexpr, EVEN_K: tl.constexpr, USES_ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, M_PAD] fp32: weight @ x.T over the tiles [first, last). RUN: planes of a tile that share a group."""
    PLANES: tl.constexpr = 16 // BITS
    dtype: tl.constexpr = x_ptrs.dtype.element_ty
    offsets = tl.arange(0, PLANE)
    word_ptrs = packed_ptr + sources[:, None] * PLANE + offsets[None, :]
    acc = tl.zeros([BLOCK_N, M_PAD], tl.float32)
    # With more than one group nothing reads these, and the compiler drops the load
    whole_scales, whole_zeros = _split_groups(tl.load(groups_ptr + sources), BITS, SCALES_BF16, dtype)
    for t in tl.range(first, last, num_stages=STAGES):
        words = tl.load(word_ptrs + t * n * PLANE, eviction_policy="evict_first")
        for run in tl.static_range(PLANES // RUN):
            start = (t * PLANES + run * RUN) * PLANE
            if GROUP_SIZE > 0:
                # The last tile may reach past K, where x is zero: any group is valid
                group = tl.minimum(start // GROUP_SIZE, num_groups - 1) * n
                scales, zeros = _split_groups(tl.load(groups_ptr + group + sources), BITS, SCALES_BF16, dtype)
                part = tl.zeros([BLOCK_N, M_PAD], tl.float32)
            else:
                scales, zeros = whole_scales, whole_zeros
                part = acc
            for index in tl.static_range(RUN):
                inputs = start + index * PLANE + offsets
                mask = in_rows[:, None] if EVEN_K else in_rows[:, None] & (inputs < k)[None, :]
                x = tl.load(x_ptrs[:, None] + inputs[None, :], mask=mask, other=0.0)
                weights = _unpack_plane(words, zeros[:, None], run * RUN + index, BITS, dtype, USES_ASM)
                part = tl.dot(weights, tl.trans(x), part)
            if GROUP_SIZE > 0:
                acc += part * scales[:, None]
            else:
                acc = part
    return acc * whole_scales[:, None] if GROUP_SIZE == 0 else acc


@triton.jit
def _unpack_plane(
    words, zeros, PLANE_INDEX: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr, USES_ASM: tl.constexpr
):
    """value - zero, exactly, as dtype. words: [N, PLANE] int16; zeros: [N, 1], from _split_groups."""
    SHIFT: tl.constexpr = PLANE_INDEX * BITS
    # An integer in the lowest mantissa bits of 2^7 (bf16) or 2^10 (fp16) is that number plus the integer: no conversion
    if dtype == tl.bfloat16 and BITS == 8:
        # bf16 has too few bits for that; fp32 has them at 2^23
        codes = ((words >> SHIFT) & 0xFF).to(tl.int32) | 0x4B000000
        weights = (codes.to(tl.float32, bitcast=True) - zeros).to(tl.bfloat16)
    elif USES_ASM:
        # In fp16 every other integer is read four bits higher, as 16 times itself: one shift less, and 2^10 becomes 2^6
        negated = 960.0 - zeros if dtype == tl.float16 and BITS == 4 and PLANE_INDEX % 2 == 1 else -zeros
        weights = _subtract_pairs(words, tl.broadcast_to(negated, words.shape), PLANE_INDEX, BITS, dtype)
    else:
        codes = ((words >> SHIFT) & ((1 << BITS) - 1)) | (0x4300 if dtype == tl.bfloat16 else 0x6400)
        weights = codes.to(tl.int16).to(dtype, bitcast=True) - zeros
    return weights


@triton.jit
def _subtract_pairs(words, negated, PLANE_INDEX: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """_unpack_plane's method on two neighbouring words at once: shift, (a & b) | c, a * b + c."""
    ASM: tl.constexpr = (
        _PAIRS_BF16[PLANE_INDEX]
        if dtype == tl.bfloat16
        else (_PAIRS_FP16[PLANE_INDEX] if BITS == 4 else _PAIRS_FP16_8BIT[PLANE_INDEX])
    )
    return tl.inline_asm_elementwise(ASM, "=r,r,r", [words, negated], dtype=negated.dtype, is_pure=True, pack=2)


def _pairs_asm(kind: str, shift: int, mask: str, magic: str, factor: str) -> str:
    # 0xea: (a & b) | c
    return (
        f"{{ .reg .b32 t, f; shr.u32 t, $1, {shift}; lop3.b32 t, t, 0x{mask}{mask}, 0x{magic}{magic}, 0xea;"
        f" mov.b32 f, 0x{factor}{factor}; fma.rn.{kind} $0, t, f, $2; }}"
    )


_PAIRS_BF16 = tl.constexpr(tuple(_pairs_asm("bf16x2", shift, "000f", "4300", "3f80") for shift in (0, 4, 8, 12)))
_PAIRS_FP16 = tl.constexpr(
    tuple(
        _pairs_asm("f16x2", shift, mask, "6400", factor)
        for shift in (0, 8)
        for mask, factor in (("000f", "3c00"), ("00f0", "2c00"))  # times 1, times 1/16
    )
)
_PAIRS_FP16_8BIT = tl.constexpr(tuple(_pairs_asm("f16x2", shift, "00ff", "6400", "3c00") for shift in (0, 8)))


@triton.jit
def _split_groups(groups, BITS: tl.constexpr, SCALES_BF16: tl.constexpr, dtype: tl.constexpr):
    """Return the scales, fp32, and the zero points plus the number that _unpack_plane adds to the integers."""
    scales = groups.to(tl.int16).to(tl.bfloat16 if SCALES_BF16 else tl.float16, bitcast=True).to(tl.float32)
    if dtype == tl.bfloat16 and BITS == 8:
        zeros = ((groups >> 16) | 0x4B000000).to(tl.float32, bitcast=True)
    else:
        zeros = ((groups >> 16) | (0x4300 if dtype == tl.bfloat16 else 0x6400)).to(tl.int16).to(dtype, bitcast=True)
    return scales, zeros


_BLOCK_N = 64


def dequantize(weight: IntWeight, dtype: torch.dtype) -> torch.Tensor:
    """See kernels.linear.reference.dequantize_int."""
    num_tiles, n, _ = weight.packed.shape
    out = torch.empty(n, weight.in_features, dtype=dtype, device=weight.packed.device)
    _dequantize_kernel[(num_tiles, triton.cdiv(n, _BLOCK_N))](
        weight.packed, weight.groups, out, n, weight.in_features, weight.group_size,
        BLOCK_N=_BLOCK_N, PLANE=PLANE, BITS=weight.bits, SCALES_BF16=weight.scale_dtype == torch.bfloat16, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _dequantize_kernel(
    packed_ptr, groups_ptr, out_ptr, n, k, group_size,
    BLOCK_N: tl.constexpr, PLANE: tl.constexpr, BITS: tl.constexpr, SCALES_BF16: tl.constexpr,
) -> None:  # fmt: skip
    """One (tile of the packed weights, tile of outputs)."""
    PLANES: tl.constexpr = 16 // BITS
    t = tl.program_id(0)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = (outputs < n)[:, None]
    offsets = tl.arange(0, PLANE)
    word_ptrs = packed_ptr + (t * n + outputs).to(tl.int64)[:, None] * PLANE + offsets[None, :]
    words = tl.load(word_ptrs, mask=in_n, other=0)
    for index in tl.static_range(PLANES):
        inputs = (t * PLANES + index) * PLANE + offsets
        mask = in_n & (inputs < k)[None, :]
        # By input, not by plane: a group may be narrower
        groups = tl.load(groups_ptr + (inputs // group_size)[None, :] * n + outputs[:, None], mask=mask, other=0)
        scales = groups.to(tl.int16).to(tl.bfloat16 if SCALES_BF16 else tl.float16, bitcast=True).to(tl.float32)
        codes = (words.to(tl.int32) >> (index * BITS)) & ((1 << BITS) - 1)
        weights = (codes - (groups >> 16)).to(tl.float32) * scales
        results = out_ptr + outputs.to(tl.int64)[:, None] * k + inputs[None, :]
        tl.store(results, weights.to(out_ptr.dtype.element_ty), mask=mask)
