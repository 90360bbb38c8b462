# ruff: noqa: ANN001  (Triton reads annotations as types: kernel arguments carry none)
"""x @ w.T for 65 to 512 rows on Hopper, where cuBLAS fills the device badly: which kernel, and the one in plain Triton.

That one is tiles of rows x features loaded by TMA, K split where tiles are few; the last program of a tile to arrive
sums the parts in order. kernels/gluon_gemm.py has the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.attention.triton_common import prefetch_l2
from kernels.gemm_configs import MAX_ROWS, MAX_SUMS, MIN_ROWS, GemmConfig, GemmScratch, HopperGemmConfig, num_programs

try:
    from kernels.gluon_gemm import hopper_gemm

    HAS_GLUON = True
except ImportError:  # another version of Triton
    HAS_GLUON = False


def can_gemm(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether gemm takes this product, given a device of compute capability 9. Host-side facts only."""
    return (
        x.is_cuda
        and x.dtype == w.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and MIN_ROWS <= x.shape[0] <= MAX_ROWS
        and w.is_contiguous()
        and x.stride(-1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and w.data_ptr() % 16 == 0
        and HAS_GLUON
    )


def gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    scratch: GemmScratch,
    *,
    config: HopperGemmConfig | GemmConfig,
    pdl: bool = False,
) -> torch.Tensor:
    """Return x @ w.T + bias. x: [M, K]; w: [N, K]; bias: [N]; one 16-bit dtype, fp32 accumulation; [M, N]."""
    if isinstance(config, HopperGemmConfig):
        return hopper_gemm(x, w, bias, scratch, config=config, pdl=pdl)
    num_rows, k = x.shape
    n = w.shape[0]
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    assert num_programs(config, num_rows=num_rows, n=n, k=k, num_sms=scratch.num_sms) > 0
    assert config.block_m * config.block_n <= MAX_SUMS
    rows = TensorDescriptor(x, [num_rows, k], [x.stride(0), 1], [config.block_m, config.block_k])
    weights = TensorDescriptor(w, [n, k], [k, 1], [config.block_n, config.block_k])
    # row tiles first: those that read the same weights run at the same time, and L2 holds them
    grid = (triton.cdiv(num_rows, config.block_m), triton.cdiv(n, config.block_n), config.splits)
    _gemm_kernel[grid](
        rows, weights, w, bias, out, scratch.partial, scratch.arrivals, num_rows, n, k, k // config.splits,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLITS=config.splits,
        HAS_BIAS=bias is not None, STAGES=config.num_stages, PREFETCH=config.prefetch, PDL=pdl,
        num_warps=config.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _gemm_kernel(
    x_desc, w_desc, w_ptr, bias_ptr, out_ptr, partial_ptr, arrivals_ptr, num_rows, n, k, split_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr,
    STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One (tile of rows, tile of output features, split of K)."""
    row_tile, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        # Programs past the first wave start when the wait is long over
        if PREFETCH > 0 and row_tile == 0 and tile * SPLITS + split < 264:
            features = tl.minimum(tile * BLOCK_N + tl.arange(0, BLOCK_N), n - 1)
            lines = tl.minimum(tl.arange(0, PREFETCH // 64) * 64, split_k - 64)
            prefetch_l2(w_ptr + (features.to(tl.int64) * k + split * split_k)[:, None] + lines[None, :])
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(split * split_k, (split + 1) * split_k, BLOCK_K, num_stages=STAGES):
        x = x_desc.load([row_tile * BLOCK_M, start])
        w = w_desc.load([tile * BLOCK_N, start])
        acc = tl.dot(x, w.T, acc)

    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    features = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    outputs = out_ptr + rows[:, None] * n + features[None, :]
    mask = (rows < num_rows)[:, None] & (features < n)[None, :]
    if SPLITS > 1:
        meeting = row_tile * tl.num_programs(1) + tile
        sums = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        parts = partial_ptr + meeting * (SPLITS * BLOCK_M * BLOCK_N) + sums
        tl.store(parts + split * (BLOCK_M * BLOCK_N), acc)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + meeting, 1, sem="acq_rel")
        if arrived == SPLITS - 1:
            tl.store(arrivals_ptr + meeting, 0)
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for index in tl.static_range(SPLITS):
                total += tl.load(parts + index * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
            _store(outputs, total, bias_ptr, features, n, mask, HAS_BIAS)
    else:
        _store(outputs, acc, bias_ptr, features, n, mask, HAS_BIAS)


@triton.jit
def _store(outputs, values, bias_ptr, features, n, mask, HAS_BIAS: tl.constexpr) -> None:
    """Add the bias and store, rounded to the output's dtype."""
    if HAS_BIAS:
        values += tl.load(bias_ptr + features, mask=features < n, other=0.0).to(tl.float32)[None, :]
    tl.store(outputs, values.to(outputs.dtype.element_ty), mask=mask)
