"""The ops of 8-bit floats that models call; each picks its GPU twin where there is one, else torch.

Specification: kernels/linear/quant_fp8.py. Tensor cores know e4m3 since Ada, torch's product with a scale per row is
used since Hopper. On older GPUs the values, which are exact in bf16, are multiplied as such.
"""

from __future__ import annotations

import functools

import torch

from kernels.dispatch import HAS_TRITON, has_pdl, on_triton, op
from kernels.linear import quant_fp8

if HAS_TRITON:
    from kernels.linear import triton_fp8 as triton_quant_fp8

_FEW_ROWS = 16  # of x, up to which streaming the weights beats torch's product on an H100


def _has_twin(x: torch.Tensor) -> bool:
    return on_triton(x) and _capability(x.device) >= (8, 9)


quantize_rows = op(quant_fp8.quantize_rows, lambda: triton_quant_fp8.quantize_rows, can_run=_has_twin)
quantize_by = op(quant_fp8.quantize_by, lambda: triton_quant_fp8.quantize_by, can_run=_has_twin)
quantize_groups = op(quant_fp8.quantize_groups, lambda: triton_quant_fp8.quantize_groups, can_run=_has_twin)
blocks_linear = op(quant_fp8.blocks_linear, lambda: triton_quant_fp8.blocks_linear, can_run=_has_twin)


def rows_linear(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """See kernels.linear.quant_fp8.rows_linear."""
    if _has_twin(x) and x.shape[0] <= (_FEW_ROWS if _has_rowwise_product(w) else triton_quant_fp8.MAX_ROWS):
        return triton_quant_fp8.rows_linear(x, x_scales, w, w_scales, bias, dtype, pdl=has_pdl(x.device))
    if _has_rowwise_product(w):
        return _scaled_mm(x, x_scales, w, w_scales, bias, dtype)
    if x.is_cuda:
        out = (x.bfloat16() @ w.bfloat16().T).float() * x_scales[:, None] * w_scales
        return (out if bias is None else out + bias.float()).to(dtype)
    return quant_fp8.rows_linear(x, x_scales, w, w_scales, bias, dtype)


def _scaled_mm(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """torch's product with scales per row, which gives bf16 only, and adds only a bf16 bias."""
    out = torch._scaled_mm(
        x,
        w.t(),
        scale_a=x_scales[:, None].contiguous(),
        scale_b=w_scales[None, :],
        bias=bias if bias is not None and bias.dtype == torch.bfloat16 else None,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    if bias is not None and bias.dtype != torch.bfloat16:
        return out.to(dtype) + bias
    return out.to(dtype)


def _has_rowwise_product(w: torch.Tensor) -> bool:
    return w.is_cuda and _capability(w.device) >= (9, 0) and w.shape[0] % 16 == 0 and w.shape[1] % 16 == 0


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
