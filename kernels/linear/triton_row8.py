# ruff: noqa: ANN001  (Triton reads annotations as types: kernel arguments carry none)
"""Products of one row of 8 bits with a matrix of 8 bits: x @ w.T, limited only by reading w once.

Twins, for one row of x, of rows_linear and blocks_linear (kernels/linear/reference.py) and of int8_linear (w8a8.py).
Weights go from memory to registers, and are multiplied there: e4m3 in fp32, integers four at a time (dp4a). Programs
are small and many, so that their loads are in flight beside each other. Under programmatic dependent launch a program
prefetches weights into L2 before it waits for x. Needs e4m3 for fp8 (Ada, Hopper or later).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention.triton_common import prefetch_l2
from kernels.linear.few_rows_configs import Row8Config

_LINE = 128  # bytes of a line of L2


def row8_linear(
    x: torch.Tensor, x_scales: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, bias: torch.Tensor | None,
    *, dtype: torch.dtype, config: Row8Config, rows_per_scale: int = 0, pdl: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return x @ w.T + bias, [1, N]. x: [1, K]; w: [N, K], both e4m3 or int8; K: a multiple of 16. bias: [N].

    x_scales, w_scales: [1] and [N]; or with rows_per_scale, a multiple of block_n, [1, ceil(K / 128)] and one for each
    block of rows_per_scale x 128 of w.
    """
    n, k = w.shape
    assert rows_per_scale % config.block_n == 0
    assert w.is_contiguous()
    assert x.stride(1) == 1
    out = torch.empty(1, n, dtype=dtype, device=x.device)
    lines = min(config.prefetch, k) // _LINE
    sources = (x.view(torch.int32), w.view(torch.int32)) if x.dtype == torch.int8 else (x, w)
    _row8_kernel[(triton.cdiv(n, config.block_n),)](
        *sources, x_scales, w_scales, bias, out, n, rows_per_scale,
        K=k, BLOCK_N=config.block_n, BLOCK_K=config.block_k, BY_BLOCK=rows_per_scale > 0, HAS_BIAS=bias is not None,
        LINES=1 << lines.bit_length() >> 1, PDL=pdl, num_warps=config.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit
def _row8_kernel(
    x_ptr, w_ptr, x_scales_ptr, w_scales_ptr, bias_ptr, out_ptr, n, rows_per_scale,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BY_BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
    LINES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_N outputs. Of integers, an element of x and w is a word of four."""
    IS_INT: tl.constexpr = x_ptr.dtype.element_ty == tl.int32
    PACK: tl.constexpr = 4 if IS_INT else 1
    SIZE: tl.constexpr = K // PACK
    WIDTH: tl.constexpr = BLOCK_K // PACK
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sources = tl.minimum(outputs, n - 1)
    w_ptrs = w_ptr + sources.to(tl.int64)[:, None] * SIZE
    if PDL:
        if LINES > 0:
            prefetch_l2(w_ptrs + (tl.arange(0, LINES) * (128 // PACK))[None, :])
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([BLOCK_N, WIDTH], tl.int32 if IS_INT else tl.float32)
    for start in range(0, SIZE, WIDTH):
        columns = start + tl.arange(0, WIDTH)
        if SIZE % WIDTH == 0:
            w = tl.load(w_ptrs + columns[None, :], eviction_policy="evict_first")
            x = tl.load(x_ptr + columns)
        else:
            w = tl.load(w_ptrs + columns[None, :], mask=(columns < SIZE)[None, :], other=0.0)
            x = tl.load(x_ptr + columns, mask=columns < SIZE, other=0.0)
        if IS_INT:
            acc = tl.inline_asm_elementwise(
                "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [w, tl.broadcast_to(x[None, :], [BLOCK_N, WIDTH]), acc],
                dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            x = x.to(tl.float32)
            if BY_BLOCK:
                NUM_BLOCKS: tl.constexpr = (K + 127) // 128
                blocks = tl.minimum(columns // 128, NUM_BLOCKS - 1)
                row = tl.program_id(0) * BLOCK_N // rows_per_scale * NUM_BLOCKS
                x = x * (tl.load(x_scales_ptr + blocks) * tl.load(w_scales_ptr + row + blocks))
            acc += w.to(tl.float32) * x[None, :]
    sums = tl.sum(acc, 1).to(tl.float32)
    if not BY_BLOCK:
        sums = sums * tl.load(w_scales_ptr + sources) * tl.load(x_scales_ptr)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + sources).to(tl.float32)
    tl.store(out_ptr + outputs, sums.to(out_ptr.dtype.element_ty), mask=outputs < n)
