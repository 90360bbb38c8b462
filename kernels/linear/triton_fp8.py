# ruff: noqa: ANN001, ANN201  (Triton reads annotations as types: kernel arguments carry none)
"""Triton twins of the fp8 functions of kernels/linear/reference.py, for products that torch._scaled_mm does slowly.

Activations are quantised to e4m3. Few rows: each program streams some rows of the matrix once, as in
kernels/linear/triton_gemv.py; e4m3 values are multiplied in fp16, which is exact, and summed in fp32. Under
programmatic dependent launch (pdl) it prefetches the first weights into L2 before it waits for x. The product with
scales by block is in kernels/linear/triton_scaled8.py. Needs a GPU with e4m3 support: Ada, Hopper or later.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention.triton_common import prefetch_l2
from kernels.dispatch import is_hopper
from kernels.linear.few_rows_configs import begins_early
from kernels.linear.reference import FP8, FP8_MAX, MIN_SCALE

MAX_ROWS = 64  # of x, for the streaming product
_E4M3_MAX = tl.constexpr(FP8_MAX)
_MIN_SCALE = tl.constexpr(MIN_SCALE)


def quantize_rows(x: torch.Tensor, *, pdl: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.linear.reference.quantize_rows."""
    num_rows, k = x.shape
    values, scales = torch.empty(num_rows, k, dtype=FP8, device=x.device), _row_scales(x)
    block = triton.next_power_of_2(k) if k <= 4096 else 2048
    _quantize_rows_kernel[(num_rows,)](
        x, values, scales, k, x.stride(0), BLOCK=block, EVEN=k % block == 0, IS_WHOLE=k <= block, PDL=pdl,
        EARLY=signals_first(x, k), num_warps=16 if block > 1024 else 4, launch_pdl=pdl,
    )  # fmt: skip
    return values, scales


def quantize_by(x: torch.Tensor, scale: torch.Tensor, *, pdl: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.linear.reference.quantize_by."""
    num_rows, k = x.shape
    values, scales = torch.empty(num_rows, k, dtype=FP8, device=x.device), _row_scales(x)
    block = min(triton.next_power_of_2(k), 1024)
    grid = (num_rows, triton.cdiv(k, block))
    _quantize_by_kernel[grid](
        x, scale, values, scales, k, x.stride(0), BLOCK=block, PDL=pdl, EARLY=signals_first(x, k),
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return values, scales


def quantize_groups(x: torch.Tensor, size: int, *, pdl: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.linear.reference.quantize_groups. size: a power of two."""
    num_rows, k = x.shape
    num_groups = triton.cdiv(k, size)
    values = torch.empty(num_rows, k, dtype=FP8, device=x.device)
    scales = torch.empty(num_rows, num_groups, dtype=torch.float32, device=x.device)
    _quantize_groups_kernel[(num_rows, triton.cdiv(num_groups, 8))](
        x, values, scales, k, num_groups, x.stride(0), SIZE=size, GROUPS=8, PDL=pdl,
        EARLY=signals_first(x, k, columns=size), num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return values, scales


def rows_linear(
    x: torch.Tensor, x_scales: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, bias: torch.Tensor | None,
    dtype: torch.dtype, *, pdl: bool = False,
) -> torch.Tensor:  # fmt: skip
    """See kernels.linear.reference.rows_linear; at most 64 rows of x."""
    (num_rows, k), n = x.shape, w.shape[0]
    assert num_rows <= MAX_ROWS
    x_scales = x_scales.contiguous()  # a single scale is expanded to all rows
    out = torch.empty(num_rows, n, dtype=dtype, device=x.device)
    m_pad = max(8, triton.next_power_of_2(num_rows))
    block_n, block_k = (32 if n < 8192 else 64), (256 if m_pad <= 16 else 128)
    _stream_kernel[(triton.cdiv(n, block_n),)](
        x, x_scales, w, w_scales, bias, out, num_rows, n, k,
        M_PAD=m_pad, BLOCK_N=block_n, BLOCK_K=block_k, EVEN_K=k % block_k == 0, HAS_BIAS=bias is not None,
        STAGES=4, PREFETCH=k % 512 == 0, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def signals_first(x: torch.Tensor, size: int, *, columns: int | None = None) -> bool:
    """Return True if the kernel that rounds x is to let the product begin before it waits itself.

    A product must be next. size: of its inputs; columns: of them that share a scale.
    """
    has_gluon = triton.__version__.startswith("3.6.")  # of kernels/linear/gluon_few_rows.py
    return has_gluon and is_hopper(x.device) and begins_early(x.shape[0], size, columns=columns)


def _row_scales(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape[0], dtype=torch.float32, device=x.device)


@triton.jit
def wait_for_rows(EARLY: tl.constexpr) -> None:
    """Wait for the kernel before, and let the next one begin: EARLY: at once.

    The next one is a product, which reads weights alone before its own wait. See kernels/dispatch.py: has_pdl.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    else:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def to_e4m3_by_largest(values, scale):
    """values / scale, rounded to e4m3. scale: scale_of() the largest of them, so that none is beyond its range."""
    return quotient(values, scale).to(tl.float8e4nv)


@triton.jit
def to_e4m3(values, scale):
    """values / scale, rounded to e4m3; what is beyond its range saturates, and NaN stays."""
    scaled = tl.div_rn(values, scale)
    return tl.clamp(scaled, -_E4M3_MAX, _E4M3_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def quotient(values, divisor):
    """values / divisor as tl.div_rn has it, but for -0.0, which becomes 0.0; one division for all of a divisor.

    values: fp32, of any shape, and none beyond 448 divisors; divisor: fp32, at least _MIN_SCALE, of a shape that
    broadcasts to theirs. An infinite divisor gives 0, or NaN for infinity; quotients below 2 ** -10 may be inexact.
    Two steps of q + (values - q * divisor) / divisor, whose difference is exact: P. Markstein, "Computation of
    elementary functions on the IBM RISC System/6000 processor", 1990.
    """
    inverse = tl.div_rn(1.0, divisor)
    divisor = tl.where(divisor == float("inf"), 0.0, divisor)
    result = values * inverse
    result = tl.fma(tl.fma(-result, divisor, values), inverse, result)
    return tl.fma(tl.fma(-result, divisor, values), inverse, result)


@triton.jit
def scale_of(largest):
    """Return the scale at which e4m3 reaches `largest`."""
    return larger(tl.div_rn(largest, _E4M3_MAX), _MIN_SCALE)


@triton.jit
def larger(a, b):
    """The larger one, or NaN as torch has it: tl.max and tl.maximum drop NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _quantize_rows_kernel(
    x_ptr, values_ptr, scales_ptr, k, stride_x, BLOCK: tl.constexpr, EVEN: tl.constexpr, IS_WHOLE: tl.constexpr,
    PDL: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One row: at once (IS_WHOLE), or read twice: from memory, then from cache."""
    if PDL:
        wait_for_rows(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    if IS_WHOLE:
        mask = columns < k if not EVEN else columns < BLOCK
        x = tl.load(x_ptr + row * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
        scale = scale_of(tl.reduce(tl.abs(x), 0, larger))
        tl.store(values_ptr + row * k + columns, to_e4m3_by_largest(x, scale), mask=mask)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(0, k, BLOCK):
            mask = start + columns < k if not EVEN else columns < BLOCK
            x = tl.load(x_ptr + row * stride_x + start + columns, mask=mask, other=0.0).to(tl.float32)
            largest = larger(largest, tl.abs(x))
        scale = scale_of(tl.reduce(largest, 0, larger))
        for start in range(0, k, BLOCK):
            mask = start + columns < k if not EVEN else columns < BLOCK
            x = tl.load(x_ptr + row * stride_x + start + columns, mask=mask, other=0.0).to(tl.float32)
            tl.store(values_ptr + row * k + start + columns, to_e4m3_by_largest(x, scale), mask=mask)
    tl.store(scales_ptr + row, scale)


@triton.jit
def _quantize_by_kernel(
    x_ptr, scale_ptr, values_ptr, scales_ptr, k, stride_x, BLOCK: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr
) -> None:
    """One part of a row, by a known scale."""
    if PDL:
        wait_for_rows(EARLY)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = piece * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(scale_ptr)
    x = tl.load(x_ptr + row * stride_x + columns, mask=columns < k, other=0.0).to(tl.float32)
    tl.store(values_ptr + row * k + columns, to_e4m3(x, scale), mask=columns < k)
    tl.store(scales_ptr + row, scale, mask=piece == 0)


@triton.jit
def _quantize_groups_kernel(
    x_ptr, values_ptr, scales_ptr, k, num_groups, stride_x, SIZE: tl.constexpr, GROUPS: tl.constexpr,
    PDL: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Several groups of one row."""
    if PDL:
        wait_for_rows(EARLY)
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(x_ptr + row * stride_x + columns, mask=columns < k, other=0.0).to(tl.float32)
    scales = scale_of(tl.reduce(tl.abs(x), 1, larger))
    tl.store(values_ptr + row * k + columns, to_e4m3_by_largest(x, scales[:, None]), mask=columns < k)
    tl.store(scales_ptr + row * num_groups + groups, scales, mask=groups < num_groups)


@triton.jit(do_not_specialize=["num_rows"])
def _stream_kernel(
    x_ptr, x_scales_ptr, w_ptr, w_scales_ptr, bias_ptr, out_ptr, num_rows, n, k,
    M_PAD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_N outputs of every row: w @ x.T, so that w is the wide side."""
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sources = tl.minimum(features, n - 1)  # past the end the last one again: cheaper in the loop than a mask
    rows = tl.arange(0, M_PAD)
    in_rows = rows < num_rows
    w_ptrs = w_ptr + sources.to(tl.int64)[:, None] * k
    if PDL:
        if PREFETCH and tl.program_id(0) < 528:  # programs after the first wave start when the wait is long over
            prefetch_l2(w_ptrs + (tl.arange(0, 4) * 128)[None, :])
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([BLOCK_N, M_PAD], tl.float32)
    for start in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK_K)
        if EVEN_K:
            w = tl.load(w_ptrs + columns[None, :], eviction_policy="evict_first")
            x = tl.load(x_ptr + rows[:, None] * k + columns[None, :], mask=in_rows[:, None], other=0.0)
        else:
            in_k = (columns < k)[None, :]
            w = tl.load(w_ptrs + columns[None, :], mask=in_k, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + rows[:, None] * k + columns[None, :], mask=in_rows[:, None] & in_k, other=0.0)
        acc = tl.dot(w.to(tl.float16), tl.trans(x.to(tl.float16)), acc)
    w_scale = tl.load(w_scales_ptr + sources)
    acc = acc * w_scale[:, None] * tl.load(x_scales_ptr + rows, mask=in_rows, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + sources).to(tl.float32)[:, None]
    outputs = out_ptr + rows[None, :] * n + features[:, None]
    tl.store(outputs, acc.to(out_ptr.dtype.element_ty), mask=in_rows[None, :] & (features < n)[:, None])
