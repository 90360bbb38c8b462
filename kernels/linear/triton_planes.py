"""x @ weight.T for 4-bit floats in planes (kernels/linear/planes.py): only weights are 4 bits wide.

As in kernels/linear/triton_int.py: weight @ x.T, codes become values in the registers that tensor cores read, K is
split until the device is full, and the last program of a tile sums the parts in order. Value times scale is exact in
bfloat16, so that all of K is one sum; the output's factor multiplies it in fp32. Capturable in a CUDA graph.
`dequantize` returns the dense matrix, for products of so many rows that cuBLAS is faster.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from kernels.attention.triton_common import prefetch_l2
from kernels.linear.planes import GROUP, PLANE, Float4Planes
from kernels.linear.planes_configs import PlanesConfig, planes_config
from kernels.linear.splits import SplitKScratch
from kernels.linear.triton_e2m1 import e2m1, scales_by_16, scales_by_32
from kernels.linear.triton_split_k import store_split

# ruff: noqa: ANN001  (Triton reads annotations as types: kernel arguments carry none)

_GROUP = tl.constexpr(GROUP)
_PLANE = tl.constexpr(PLANE)
_ALIGNMENT = 16  # of rows of x: otherwise Triton does not load them ahead


def can_planes_gemm(x: torch.Tensor, weight: Float4Planes) -> bool:
    """Return True if planes_gemm supports this product. Host-side facts only."""
    return (
        x.dtype == torch.bfloat16
        and x.shape[0] > 0
        and x.stride(1) == 1
        and x.stride(0) % _ALIGNMENT == 0
        and x.data_ptr() % _ALIGNMENT == 0
        and weight.words.numel() < 2**31
    )


def has_ptx(x: torch.Tensor) -> bool:
    """Return True if codes become values by PTX, which knows bfloat16 only."""
    return x.is_cuda and x.dtype == torch.bfloat16


def planes_linear(
    x: torch.Tensor, weight: Float4Planes, bias: torch.Tensor | None, scratch: SplitKScratch, *, pdl: bool = False
) -> torch.Tensor:
    """See kernels.linear.planes.planes_linear. Makes values in registers, or for cuBLAS."""
    config = None
    if can_planes_gemm(x, weight):
        config = planes_config(num_rows=x.shape[0], n=weight.out_features, k=weight.in_features)
    if config is None:
        return functional.linear(x, dequantize(weight, x.dtype), bias)
    return planes_gemm(x, weight, bias, scratch, config=config, pdl=pdl)


def planes_gemm(
    x: torch.Tensor,
    weight: Float4Planes,
    bias: torch.Tensor | None,
    scratch: SplitKScratch,
    *,
    config: PlanesConfig,
    pdl: bool = False,
) -> torch.Tensor:
    """Return x @ weight.T + bias. x: [M, K]; bias: [N]; returns [M, N]."""
    (num_rows, k), n, num_groups = x.shape, weight.out_features, weight.num_groups
    assert k == weight.in_features
    assert x.stride(1) == 1
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(num_rows, config.block_m), triton.cdiv(n, config.block_n), config.splits)
    scratch.check(num_tiles=grid[0] * grid[1], splits=config.splits, tile_sums=config.block_m * config.block_n)
    # row tiles first: tiles that read the same weights run at the same time and share them in L2
    _planes_gemm_kernel[grid](
        x, weight.words, weight.scales, weight.factors, bias, out, scratch.partial, scratch.arrivals,
        num_rows, n, k, num_groups, triton.cdiv(num_groups, config.splits), x.stride(0),
        M_PAD=config.block_m, BLOCK_N=config.block_n, RUNS=weight.scales.shape[2], SPLITS=config.splits,
        HAS_PTX=has_ptx(x), EVEN_N=n % config.block_n == 0, EVEN_K=k % GROUP == 0, HAS_BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", STAGES=config.num_stages, PREFETCH=config.prefetch,
        PDL=pdl, num_warps=config.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows", "num_groups", "groups_per_split"])
def _planes_gemm_kernel(
    x_ptr, words_ptr, scales_ptr, factors_ptr, bias_ptr, out_ptr, partial_ptr, arrivals_ptr,
    num_rows, n, k, num_groups, groups_per_split, stride_x,
    M_PAD: tl.constexpr, BLOCK_N: tl.constexpr, RUNS: tl.constexpr, SPLITS: tl.constexpr, HAS_PTX: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One (tile of rows, tile of outputs, split of K)."""
    row_tile, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # An output past the end reads the last one: cheaper in the loop than a mask
    sources = outputs if EVEN_N else tl.minimum(outputs, n - 1)
    first = split * groups_per_split
    last = tl.minimum(first + groups_per_split, num_groups)
    if PDL:
        # Programs after the first wave start when the wait is long over
        if PREFETCH > 0 and row_tile == 0 and tile * SPLITS + split < 528:
            pairs = tile * BLOCK_N + tl.arange(0, BLOCK_N // 2) * 2  # of outputs, whose words share a line
            for ahead in tl.static_range(PREFETCH):
                lines = tl.minimum(first + ahead, num_groups - 1) * n + tl.minimum(pairs, n - 1)
                prefetch_l2(words_ptr + lines * _PLANE)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = row_tile * M_PAD + tl.arange(0, M_PAD)
    in_rows = rows < num_rows
    offsets = tl.arange(0, _PLANE)
    x_ptrs = x_ptr + (rows.to(tl.int64) * stride_x)[:, None] + offsets[None, :]
    word_ptrs = words_ptr + sources[:, None] * _PLANE + offsets[None, :]
    acc = tl.zeros([BLOCK_N, M_PAD], tl.float32)
    for group in tl.range(first, last, num_stages=STAGES):
        words = tl.load(word_ptrs + group * n * _PLANE, eviction_policy="evict_first")
        if RUNS == 2:
            octets = tl.load(scales_ptr + group * 2 * n + (sources * 2)[:, None] + tl.arange(0, 2)[None, :])
        else:
            octets = tl.load(scales_ptr + group * n + sources)
        for plane in tl.static_range(4):
            inputs = group * _GROUP + plane * _PLANE
            mask = in_rows[:, None] if EVEN_K else in_rows[:, None] & (inputs + offsets < k)[None, :]
            x = tl.load(x_ptrs + inputs, mask=mask, other=0.0)
            scales = scales_by_16(octets, plane) if RUNS == 2 else scales_by_32(octets, plane)
            values = e2m1(words, scales, x_ptr.dtype.element_ty, plane, HAS_PTX)
            acc = tl.dot(values, tl.trans(x), acc, input_precision=PRECISION)
    acc *= tl.load(factors_ptr + sources)[:, None]
    results = out_ptr + rows.to(tl.int64)[None, :] * n + outputs[:, None]
    mask = in_rows[None, :] & (outputs < n)[:, None]
    store_split(
        acc, results, mask, partial_ptr, arrivals_ptr, bias_ptr, outputs, n, M_PAD, BLOCK_N, SPLITS, HAS_BIAS
    )  # fmt: skip


_BLOCK_N = 32


def dequantize(weight: Float4Planes, dtype: torch.dtype) -> torch.Tensor:
    """See kernels.linear.planes.dequantize_planes."""
    n, k = weight.out_features, weight.in_features
    out = torch.empty(n, k, dtype=dtype, device=weight.words.device)
    _dequantize_kernel[(weight.num_groups, triton.cdiv(n, _BLOCK_N))](
        weight.words, weight.scales, weight.factors, out, n, k,
        BLOCK_N=_BLOCK_N, RUNS=weight.scales.shape[2], num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _dequantize_kernel(
    words_ptr, scales_ptr, factors_ptr, out_ptr, n, k, BLOCK_N: tl.constexpr, RUNS: tl.constexpr
) -> None:  # fmt: skip
    """One (group of inputs, tile of outputs)."""
    group = tl.program_id(0)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n, offsets = outputs < n, tl.arange(0, _PLANE)
    places = (group * n + outputs).to(tl.int64)
    words = tl.load(words_ptr + places[:, None] * _PLANE + offsets[None, :], mask=in_n[:, None], other=0)
    if RUNS == 2:
        octets = tl.load(scales_ptr + (places * 2)[:, None] + tl.arange(0, 2)[None, :], mask=in_n[:, None], other=0)
    else:
        octets = tl.load(scales_ptr + places, mask=in_n, other=0)
    factors = tl.load(factors_ptr + outputs, mask=in_n, other=0.0)
    for plane in tl.static_range(4):
        inputs = group * _GROUP + plane * _PLANE + offsets
        scales = scales_by_16(octets, plane) if RUNS == 2 else scales_by_32(octets, plane)
        values = e2m1(words, scales, tl.float32, plane, False) * factors[:, None]
        results = out_ptr + outputs.to(tl.int64)[:, None] * k + inputs[None, :]
        tl.store(results, values.to(out_ptr.dtype.element_ty), mask=in_n[:, None] & (inputs < k)[None, :])
