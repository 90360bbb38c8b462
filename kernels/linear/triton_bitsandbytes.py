# ruff: noqa: ANN001  (Triton reads annotations as types: kernel arguments carry none)
"""Triton twins of the int8 functions of kernels/linear/reference.py: a product for few rows, and dequantisation.

The product converts integers while it streams: as in kernels/linear/triton_gemv.py, each program streams some rows of
the matrix once. Under programmatic dependent launch (pdl) it prefetches its first weights into L2 before it waits for
x.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention.triton_common import prefetch_l2

MAX_ROWS = 128  # rows of x for the product: for more, dequantising once costs less than once per tile
_TILE_ROWS = 64
_INT8_MAX = tl.constexpr(127.0)


def linear_int8(
    x: torch.Tensor, values: torch.Tensor, largest: torch.Tensor, bias: torch.Tensor | None, *, pdl: bool = False
) -> torch.Tensor:
    """See kernels.linear.reference.linear_int8; 16-bit x of at most MAX_ROWS rows."""
    (num_rows, k), n = x.shape, values.shape[0]
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    m_pad = min(max(8, triton.next_power_of_2(num_rows)), _TILE_ROWS)
    block_n, block_k = (32 if n < 8192 else 64), (256 if m_pad <= 16 else 128)
    # row tiles first: tiles that read the same weights run at the same time and share them in L2
    _stream_int8_kernel[(triton.cdiv(num_rows, m_pad), triton.cdiv(n, block_n))](
        x, values, largest, bias, out, num_rows, n, k, x.stride(0),
        M_PAD=m_pad, BLOCK_N=block_n, BLOCK_K=block_k, EVEN_K=k % block_k == 0, HAS_BIAS=bias is not None, STAGES=4,
        PREFETCH=k % 512 == 0, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def dequantize_int8(values: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See kernels.linear.reference.dequantize_int8."""
    n, k = values.shape
    out = torch.empty(n, k, dtype=dtype, device=values.device)
    block = min(triton.next_power_of_2(k), 2048)
    _dequantize_int8_kernel[(n, triton.cdiv(k, block))](values, largest, out, k, BLOCK_K=block, num_warps=4)
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _stream_int8_kernel(
    x_ptr, values_ptr, largest_ptr, bias_ptr, out_ptr, num_rows, n, k, stride_x,
    M_PAD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_N outputs of M_PAD rows: w @ x.T, so that w fills the wide side. Integers to 127 are exact in bf16."""
    features = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    sources = tl.minimum(features, n - 1)  # past the end the last one again: cheaper in the loop than a mask
    rows = tl.program_id(0) * M_PAD + tl.arange(0, M_PAD)
    in_rows = rows < num_rows
    w_ptrs = values_ptr + sources.to(tl.int64)[:, None] * k
    if PDL:
        _prefetch_and_wait(w_ptrs, PREFETCH)
    acc = tl.zeros([BLOCK_N, M_PAD], tl.float32)
    for start in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK_K)
        if EVEN_K:
            w = tl.load(w_ptrs + columns[None, :], eviction_policy="evict_first")
            x = tl.load(x_ptr + rows[:, None] * stride_x + columns[None, :], mask=in_rows[:, None], other=0.0)
        else:
            in_k = (columns < k)[None, :]
            w = tl.load(w_ptrs + columns[None, :], mask=in_k, other=0, eviction_policy="evict_first")
            x = tl.load(x_ptr + rows[:, None] * stride_x + columns[None, :], mask=in_rows[:, None] & in_k, other=0.0)
        acc = tl.dot(w.to(x.dtype), tl.trans(x), acc)
    acc = acc * (tl.load(largest_ptr + sources) / _INT8_MAX)[:, None]
    _store(acc, bias_ptr, out_ptr, rows, features, sources, num_rows, n, HAS_BIAS)


@triton.jit
def _prefetch_and_wait(row_ptrs, PREFETCH: tl.constexpr) -> None:
    """Prefetch 512 bytes of each row, wait for the previous kernel, then let the next one begin its prefetch."""
    if (
        PREFETCH and tl.program_id(0) == 0 and tl.program_id(1) < 528
    ):  # programs after the first wave start when the wait is long over
        prefetch_l2(row_ptrs + (tl.arange(0, 4) * 128)[None, :])
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _store(acc, bias_ptr, out_ptr, rows, features, sources, num_rows, n, HAS_BIAS: tl.constexpr) -> None:
    """Add the bias and store, rounded to the output's dtype. acc: [features, rows]."""
    if HAS_BIAS:
        acc += tl.load(bias_ptr + sources).to(tl.float32)[:, None]
    outputs = out_ptr + rows[None, :] * n + features[:, None]
    tl.store(outputs, acc.to(out_ptr.dtype.element_ty), mask=(rows < num_rows)[None, :] & (features < n)[:, None])


@triton.jit
def _dequantize_int8_kernel(values_ptr, largest_ptr, out_ptr, k, BLOCK_K: tl.constexpr) -> None:
    """One part of a row."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    scale = tl.load(largest_ptr + row) / _INT8_MAX
    values = tl.load(values_ptr + row * k + columns, mask=columns < k, other=0).to(tl.float32)
    tl.store(out_ptr + row * k + columns, (values * scale).to(out_ptr.dtype.element_ty), mask=columns < k)
