"""x @ weight.T for 4-bit floats (kernels/linear/float4.py), for few rows of x: only weights are 4 bits wide.

As in kernels/linear/triton_lut4.py: weight @ x.T, codes looked up two at a time in shared memory, K split until the
device is full. Each value is multiplied by its block's scale in 16 bits, which is exact, so that all of K is one sum;
the output's factor multiplies it in fp32. Capturable in a CUDA graph. `dequantize` returns the dense matrix, for
products of so many rows that cuBLAS is faster.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention.triton_common import prefetch_l2
from kernels.linear.float4 import PLANES, STEP, Float4Weight
from kernels.linear.lut4_configs import Lut4GemmConfig
from kernels.linear.splits import SplitKScratch
from kernels.linear.triton_lut4 import fill_tables, look_up_asm
from kernels.linear.triton_split_k import store_split

# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)

_PLANES = tl.constexpr(PLANES)


def float4_gemm(
    x: torch.Tensor,
    weight: Float4Weight,
    bias: torch.Tensor | None,
    scratch: SplitKScratch,
    *,
    config: Lut4GemmConfig,
    pdl: bool = False,
) -> torch.Tensor:
    """Return x @ weight.T + bias. x: [M, K], of the weight's dtype; bias: [N]; returns [M, N]."""
    (num_rows, k), n, block = x.shape, weight.out_features, weight.block
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
    _float4_gemm_kernel[grid](
        x, packed, weight.scales, weight.factors, pairs, bias, out, scratch.partial, scratch.arrivals,
        num_rows, n, k, weight.num_steps, triton.cdiv(weight.num_steps, config.splits), x.stride(0),
        M_PAD=config.block_m, BLOCK_N=config.block_n, BLOCK=block, TILES=STEP // (PLANES * block), SHIFT=weight.shift,
        SPLITS=config.splits, IS_SHARED=config.is_shared, EVEN_N=n % config.block_n == 0, EVEN_K=k % STEP == 0,
        HAS_BIAS=bias is not None, STAGES=config.num_stages, PREFETCH=config.prefetch, PDL=pdl,
        num_warps=config.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows", "num_steps", "steps_per_split"])
def _float4_gemm_kernel(
    x_ptr, packed_ptr, scales_ptr, factors_ptr, pairs_ptr, bias_ptr, out_ptr, partial_ptr, arrivals_ptr,
    num_rows, n, k, num_steps, steps_per_split, stride_x,
    M_PAD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, SHIFT: tl.constexpr,
    SPLITS: tl.constexpr, IS_SHARED: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One (tile of rows, tile of outputs, split of K)."""
    row_tile, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # An output past the end reads the last one: cheaper in the loop than a mask
    sources = outputs if EVEN_N else tl.minimum(outputs, n - 1)
    first = split * steps_per_split
    last = tl.minimum(first + steps_per_split, num_steps)
    # Programs after the first wave start when the wait is long over
    if PDL and PREFETCH > 0 and row_tile == 0 and tile * SPLITS + split < 528:
        ahead = tl.arange(0, BLOCK_N // 2) * 2  # codes of two outputs share a line of 128 bytes, or of four
        for index in tl.static_range(PREFETCH * TILES):
            lines = tl.minimum(first * TILES + index, num_steps * TILES - 1) * n
            lines += tl.minimum(tile * BLOCK_N + ahead, n - 1)
            prefetch_l2(packed_ptr + lines * (BLOCK if IS_SHARED else 2 * BLOCK))
    if IS_SHARED:
        fill_tables(pairs_ptr)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = row_tile * M_PAD + tl.arange(0, M_PAD)
    acc = _sum_slab(
        x_ptr + rows.to(tl.int64) * stride_x, packed_ptr, scales_ptr, pairs_ptr, rows < num_rows, sources,
        first, last, n, k, M_PAD, BLOCK_N, BLOCK, TILES, SHIFT, IS_SHARED, EVEN_K, STAGES,
    )  # fmt: skip
    acc *= tl.load(factors_ptr + sources)[:, None]
    results = out_ptr + rows.to(tl.int64)[None, :] * n + outputs[:, None]
    mask = (rows < num_rows)[None, :] & (outputs < n)[:, None]
    store_split(
        acc, results, mask, partial_ptr, arrivals_ptr, bias_ptr, outputs, n, M_PAD, BLOCK_N, SPLITS, HAS_BIAS
    )  # fmt: skip


@triton.jit
def _sum_slab(
    x_ptrs, packed_ptr, scales_ptr, pairs_ptr, in_rows, sources, first, last, n, k,
    M_PAD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, SHIFT: tl.constexpr,
    IS_SHARED: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, M_PAD] fp32: weight @ x.T over the steps [first, last)."""
    dtype: tl.constexpr = x_ptrs.dtype.element_ty
    offsets = tl.arange(0, BLOCK)
    # IS_SHARED reads words, else bytes; the compiler drops the others' addresses
    word_ptrs = packed_ptr + sources[:, None] * BLOCK + offsets[None, :]
    byte_ptrs = packed_ptr + sources[:, None] * (2 * BLOCK) + (offsets // 2 * 4)[None, :]
    halves = (offsets % 2)[None, :]
    acc = tl.zeros([BLOCK_N, M_PAD], tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        for index in tl.static_range(TILES):
            t = step * TILES + index
            words = tl.load(word_ptrs + t * n * BLOCK, eviction_policy="evict_first") if IS_SHARED else None
            octets = tl.load(scales_ptr + t * n + sources)
            for plane in tl.static_range(_PLANES):
                inputs = (t * _PLANES + plane) * BLOCK + offsets
                mask = in_rows[:, None] if EVEN_K else in_rows[:, None] & (inputs < k)[None, :]
                x = tl.load(x_ptrs[:, None] + inputs[None, :], mask=mask, other=0.0)
                bits = ((octets >> (8 * plane)) & 255) << SHIFT
                scales = tl.broadcast_to(bits.to(tl.int16).to(dtype, bitcast=True)[:, None], [BLOCK_N, BLOCK])
                if IS_SHARED:
                    weights = _look_up(words, scales, plane, dtype)
                else:
                    codes = tl.load(byte_ptrs + t * n * (2 * BLOCK) + plane).to(tl.int32)
                    weights = tl.load(pairs_ptr + codes * 2 + halves) * scales
                acc = tl.dot(weights, tl.trans(x), acc)
    return acc


@triton.jit
def _look_up(words, scales, PLANE_INDEX: tl.constexpr, dtype: tl.constexpr):
    """Plane PLANE_INDEX of a [N, BLOCK] tile of int16 words, as values of the dtype times scales [N, BLOCK]."""
    ASM: tl.constexpr = _SCALED_BF16[PLANE_INDEX] if dtype == tl.bfloat16 else _SCALED_FP16[PLANE_INDEX]
    return tl.inline_asm_elementwise(ASM, "=r,r,r", [words, scales], dtype=scales.dtype, is_pure=True, pack=2)


def scaled_asm(plane_index: int, kind: str) -> str:
    """PTX for two neighbours of a plane. $1: their words; $2: their scale, twice; kind: bf16x2 or f16x2."""
    return f"{look_up_asm(plane_index).removesuffix(' }')} mul.rn.{kind} $0, $0, $2; }}"


_SCALED_BF16 = tl.constexpr(tuple(scaled_asm(index, "bf16x2") for index in range(PLANES)))
_SCALED_FP16 = tl.constexpr(tuple(scaled_asm(index, "f16x2") for index in range(PLANES)))


_BLOCK_N = 32


def dequantize(weight: Float4Weight, dtype: torch.dtype) -> torch.Tensor:
    """See kernels.linear.float4.dequantize_float4."""
    n, k = weight.out_features, weight.in_features
    out = torch.empty(n, k, dtype=dtype, device=weight.packed.device)
    _dequantize_kernel[(weight.packed.shape[0], triton.cdiv(n, _BLOCK_N))](
        weight.packed.view(torch.int32), weight.scales, weight.factors, weight.pairs, out, n, k,
        BLOCK_N=_BLOCK_N, BLOCK=weight.block, SHIFT=weight.shift, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _dequantize_kernel(
    words_ptr, scales_ptr, factors_ptr, pairs_ptr, out_ptr, n, k,
    BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr,
) -> None:  # fmt: skip
    """One (tile of the packed codes, tile of outputs)."""
    HALF: tl.constexpr = BLOCK // 2
    dtype: tl.constexpr = pairs_ptr.dtype.element_ty
    t = tl.program_id(0)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = outputs < n
    halves = tl.arange(0, HALF)
    tile = (t * n + outputs).to(tl.int64)
    words = tl.load(words_ptr + tile[:, None] * HALF + halves[None, :], mask=in_n[:, None], other=0)
    octets = tl.load(scales_ptr + tile, mask=in_n, other=0)
    factors = tl.load(factors_ptr + outputs, mask=in_n, other=0.0)
    for plane in tl.static_range(_PLANES):
        start = (t * _PLANES + plane) * BLOCK
        inputs = start + tl.arange(0, BLOCK)
        bits = ((octets >> (8 * plane)) & 255) << SHIFT
        if dtype != tl.float32:
            bits = bits.to(tl.int16)
        scales = bits.to(dtype, bitcast=True).to(tl.float32)
        codes = ((words >> (8 * plane)) & 255) * 2
        pairs = tl.interleave(tl.load(pairs_ptr + codes), tl.load(pairs_ptr + codes + 1)).to(tl.float32)
        weights = pairs * scales[:, None] * factors[:, None]
        results = out_ptr + outputs.to(tl.int64)[:, None] * k + inputs[None, :]
        # K is a whole number of blocks
        tl.store(results, weights.to(out_ptr.dtype.element_ty), mask=in_n[:, None] & (start < k))
