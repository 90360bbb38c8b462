# ruff: noqa: ANN001  (Triton reads annotations as types: kernel arguments carry none)
"""Products of one row of x with a 16-bit matrix, with the norm before it and the gated activation behind it.

A decode step of one row is bound by kernels that wait for one another, not by bytes. Here a program holds all K of its
rows of w in registers: under programmatic dependent launch it loads them before it waits, so that behind the wait only
x is missing. Each program computes the norm itself, from 2 * K values that L2 has; the first one stores it and the sum.

Equal to kernels/elementwise/triton.py: add_rms_norm, a product, gate_and_mul, rounded where those round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.elementwise.triton import gated, rms_normed
from kernels.linear.late_norm import GateKind, LateNorm

_MAX_K, _MAX_WEIGHTS = 3072, 12288 * 2048
_MAX_K_OF_FEW, _FEW_OUTPUTS = 4096, 512  # as routers have


@dataclass(frozen=True)
class RowConfig:
    """Rows of w of one program, and its warps."""

    block_n: int
    num_warps: int


def row_config(*, n: int, k: int, is_gated: bool) -> RowConfig:
    """Return the config of a shape class, tuned on an H100 (benchmarks/notes.md)."""
    if k <= 1024 and n >= 2048:
        return RowConfig(8, 4)
    return RowConfig(4 if is_gated else 2, 4)


def can_multiply_row(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Return True if these kernels support x @ w.T, also with a norm of x, and are fast. Host-side facts only.

    Larger matrices than all registers hold are not there when the wait ends, and each program norms the row anew.
    """
    n, k = w.shape
    return (
        x.is_cuda
        and x.dtype == w.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[0] == 1
        and k % 64 == 0
        and k >= 512
        and k <= (_MAX_K if n > _FEW_OUTPUTS else _MAX_K_OF_FEW)
        and n * k <= _MAX_WEIGHTS
        and w.is_contiguous()
        and x.stride(-1) == 1
    )


def row_gemv(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    config: RowConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Return x @ w.T + bias. x: [1, K]; w: [N, K]; bias: [N]; one 16-bit dtype, fp32 accumulation; [1, N]."""
    out = torch.empty(1, w.shape[0], dtype=x.dtype, device=x.device)
    _launch(x, None, w, bias, out, config, pdl=pdl)
    return out


def normed_gemv(
    late: LateNorm,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    gate: GateKind = "",
    normed: torch.Tensor | None = None,
    config: RowConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Equal kernels.linear.late_norm.normed_linear. normed: contiguous."""
    out = torch.empty(1, w.shape[0] if gate == "" else w.shape[0] // 2, dtype=w.dtype, device=w.device)
    _launch(late.x, late, w, bias, out, config, gate=gate, normed=normed, pdl=pdl)
    return out


def _launch(
    x: torch.Tensor, late: LateNorm | None, w: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor,
    config: RowConfig | None, *, gate: GateKind = "", normed: torch.Tensor | None = None, pdl: bool,
) -> None:  # fmt: skip
    n, k = out.shape[1], w.shape[1]
    config = config or row_config(n=w.shape[0], k=k, is_gated=gate != "")
    outputs = config.block_n if gate == "" else config.block_n // 2
    norm = (None, None) if late is None else (late.residual, late.weight)
    new_residual, eps = (None, 0.0) if late is None else (late.new_residual, late.eps)
    _row_kernel[(triton.cdiv(n, outputs),)](
        x, *norm, w, bias, out, normed, new_residual, n, eps,
        K=k, K_PAD=triton.next_power_of_2(k), BLOCK_N=config.block_n, EVEN_N=n % outputs == 0,
        HAS_NORM=late is not None, KEEPS_NORMED=normed is not None, HAS_BIAS=bias is not None, GATE=gate, PDL=pdl,
        num_warps=config.num_warps, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _row_kernel(
    x_ptr, residual_ptr, weight_ptr, w_ptr, bias_ptr, out_ptr, normed_ptr, sum_ptr, n, eps,
    K: tl.constexpr, K_PAD: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr,
    HAS_NORM: tl.constexpr, KEEPS_NORMED: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_N rows of w. With GATE the first half are of gates, the second of the ups beside them."""
    tile = tl.program_id(0)
    OUTPUTS: tl.constexpr = BLOCK_N if GATE == "" else BLOCK_N // 2
    places = tl.arange(0, BLOCK_N)
    features = tile * OUTPUTS + (places if GATE == "" else places % OUTPUTS)
    sources = features if EVEN_N else tl.minimum(features, n - 1)
    if GATE != "":
        sources += places // OUTPUTS * n
    columns = tl.arange(0, K_PAD)
    in_k = columns < K
    w_ptrs = w_ptr + sources.to(tl.int64)[:, None] * K + columns[None, :]
    if K == K_PAD:
        w = tl.load(w_ptrs, eviction_policy="evict_first")
    else:
        w = tl.load(w_ptrs, mask=in_k[None, :], other=0.0, eviction_policy="evict_first")
    weight = tl.load(weight_ptr + columns, mask=in_k, other=0.0) if HAS_NORM else 0.0
    bias = tl.load(bias_ptr + sources).to(tl.float32) if HAS_BIAS else 0.0
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + columns, mask=in_k, other=0.0)
    if HAS_NORM:
        residual = tl.load(residual_ptr + columns, mask=in_k, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        if tile == 0:
            tl.store(sum_ptr + columns, x, mask=in_k)
        x = rms_normed(x, weight, eps, K).to(x.dtype)
        if KEEPS_NORMED and tile == 0:
            tl.store(normed_ptr + columns, x, mask=in_k)
    sums = tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], 1) + bias
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if GATE == "":
        tl.store(out_ptr + features, sums.to(dtype), mask=features < n)
    else:
        gate, up = tl.split(tl.trans(tl.reshape(sums.to(dtype), [2, OUTPUTS])))
        outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        tl.store(out_ptr + outputs, gated(gate, up, GATE == "gelu_tanh").to(dtype), mask=outputs < n)
