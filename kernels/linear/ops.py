"""The linear products that models call; each selects its Triton twin on CUDA, or torch.

kernels/linear/reference.py, float4.py, planes.py and w8a8.py are the specifications. Imports Triton if it can.

DenseLinear multiplies 16- and 32-bit matrices, on a CPU also those that onednn.py has packed. IntLinear multiplies
packed integer weights. rows_linear multiplies 8-bit floats: tensor cores support e4m3 since Ada, and torch's product
with a scale per row is used since Hopper; on older GPUs the values, which are exact in bf16, are multiplied as bf16.
Fp8BlockLinear and Int8Linear round activations, too, and multiply 8-bit floats with scales by block, and integers.
onednn.py does the latter on a CPU. Linear4Bit and linear_int8 multiply bitsandbytes weights, and Float4Linear 4-bit
floats: by a Triton twin for few rows; for many rows the matrix is dequantised first, since cuBLAS then takes longer.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from kernels.dispatch import HAS_TRITON, has_pdl, on_triton, op, when_used
from kernels.linear import dense, float4, late_norm, onednn, reference, rounding, w8a8
from kernels.linear.float4 import Float4Weight
from kernels.linear.int4_cpu import Int4Matrix, int4_linear
from kernels.linear.late_norm import GateKind, LateNorm
from kernels.linear.lut4_configs import float4_gemm_config, lut4_gemm_config
from kernels.linear.onednn import Bf16Matrix, Int8Matrix
from kernels.linear.planes import Float4Planes, planes_linear
from kernels.linear.reference import IntWeight, Lut4Weight
from kernels.linear.rounding import RoundedRows, Rounding
from kernels.linear.scaled8_configs import MAX_SMALL_TILES, scaled8_config
from kernels.linear.splits import GEMV_SUMS, LazyScratch

if HAS_TRITON:
    from kernels.linear.triton_gemv import can_gate, can_gemv, gated_gemv, gemv
    from kernels.linear.triton_row import can_multiply_row, normed_gemv, row_gemv
try:
    from kernels.linear import gluon_dense

    HAS_GLUON = True
except ImportError:
    HAS_GLUON = False

if HAS_TRITON:
    triton_bitsandbytes = when_used("kernels.linear.triton_bitsandbytes")
    triton_float4 = when_used("kernels.linear.triton_float4")
    triton_fp8 = when_used("kernels.linear.triton_fp8")
    triton_int = when_used("kernels.linear.triton_int")
    triton_lut4 = when_used("kernels.linear.triton_lut4")
    triton_planes = when_used("kernels.linear.triton_planes")
    triton_scaled8 = when_used("kernels.linear.triton_scaled8")
    gluon_blocks = when_used("kernels.linear.gluon_blocks")

_FEW_ROWS = 16  # rows of x up to which streaming the weights is faster than torch's product on an H100
# Rows of x up to which torch's product sums e4m3 products in fp32, as the streaming product of fewer rows does: a text
# must not depend on the number of rows that decode beside it. So few rows are bound by memory, not by the slower sums
_EXACT_ROWS = 256


def has_twin(x: torch.Tensor) -> bool:
    """Return True if Triton rounds x to e4m3."""
    return on_triton(x) and _capability(x.device) >= (8, 9)


def rounds_before(weight: torch.Tensor) -> bool:
    """Return True if the op before a product of this matrix of 8 bits is to round its input: where Triton does both."""
    return has_twin(weight)


quantize_rows = op(reference.quantize_rows, "kernels.linear.triton_fp8", can_run=has_twin)
quantize_by = op(reference.quantize_by, "kernels.linear.triton_fp8", can_run=has_twin)
quantize_groups = op(reference.quantize_groups, "kernels.linear.triton_fp8", can_run=has_twin)
add_rms_norm_rounded = op(rounding.add_rms_norm_rounded, "kernels.linear.triton_rounded", can_run=has_twin)
gate_and_mul_rounded = op(rounding.gate_and_mul_rounded, "kernels.linear.triton_rounded", can_run=has_twin)
quantize_rows_int8 = op(w8a8.quantize_rows_int8, "kernels.linear.triton_scaled8")
quantize_by_int8 = op(w8a8.quantize_by_int8, "kernels.linear.triton_scaled8")


class DenseLinear:
    """x @ w.T + bias by cuBLAS, or by the skinny GEMM where it measured faster. Owns scratch for one stream."""

    def __init__(self) -> None:
        self._scratch = LazyScratch(GEMV_SUMS)

    def __call__(self, x: torch.Tensor, w: torch.Tensor | Bf16Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        """x: [T, K]; w: [N, K], plain or from onednn.pack; bias: [N] or None; returns [T, N]."""
        if isinstance(w, Bf16Matrix):
            return onednn.packed_linear(x, w, bias)
        if not (on_triton(x) and can_gemv(x, w)):
            return functional.linear(x, w, bias)
        if can_multiply_row(x, w):
            return row_gemv(x, w, bias, pdl=has_pdl(x.device))
        return gemv(x, w, bias, self._scratch.on(x.device), pdl=has_pdl(x.device))

    def gates(self, x: torch.Tensor, w: torch.Tensor | Bf16Matrix) -> bool:
        """Return True if gated() is faster than the product and its activation; decided from host-side facts."""
        if isinstance(w, Bf16Matrix) or not on_triton(x):
            return False
        if x.shape[0] < dense.LEAST_ROWS:
            return can_gate(x, w)
        return HAS_GLUON and _capability(x.device)[0] == 9 and gluon_dense.is_faster(x, w)

    def gated(self, x: torch.Tensor, w: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
        """Equal kernels.linear.late_norm.gated_linear. Requires gates(x, w)."""
        if not on_triton(x):
            return late_norm.gated_linear(x, w, is_gelu=is_gelu)
        if x.shape[0] >= dense.LEAST_ROWS:
            return gluon_dense.gated_linear(x, w, is_gelu=is_gelu, pdl=True)
        return gated_gemv(x, w, self._scratch.on(x.device), is_gelu=is_gelu, pdl=has_pdl(x.device))

    def takes_norm(self, x: torch.Tensor, w: torch.Tensor | Bf16Matrix) -> bool:
        """Return True if normed() is faster than a norm of x and the product; decided from host-side facts."""
        return not isinstance(w, Bf16Matrix) and on_triton(x) and can_multiply_row(x, w)

    def normed(
        self,
        late: LateNorm,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        gate: GateKind = "",
        normed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Equal kernels.linear.late_norm.normed_linear. Requires takes_norm(late.x, w)."""
        if not on_triton(w):
            return late_norm.normed_linear(late, w, bias, gate=gate, normed=normed)
        return normed_gemv(late, w, bias, gate=gate, normed=normed, pdl=has_pdl(w.device))


class IntLinear:
    """Equals kernels.linear.reference.int_linear, by registers or once for cuBLAS. Owns scratch for one stream."""

    def __init__(self) -> None:
        self._scratch = LazyScratch()

    def __call__(self, x: torch.Tensor, weight: IntWeight | Int4Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        """x: [T, K]; bias: [N] or None; returns [T, N]."""
        if isinstance(weight, Int4Matrix):
            return int4_linear(x, weight, bias)
        if not on_triton(x):
            return reference.int_linear(x, weight, bias)
        if weight.order is not None:
            x = x.index_select(1, weight.order)
        if not triton_int.can_int_gemm(x, weight):
            return functional.linear(x, triton_int.dequantize(weight, x.dtype), bias)
        return triton_int.int_gemm(x, weight, bias, self._scratch.on(x.device), pdl=has_pdl(x.device))


class Linear4Bit:
    """Equals kernels.linear.reference.lut4_linear. Looks values up in registers, or once for cuBLAS.

    Owns scratch for one stream.
    """

    def __init__(self) -> None:
        self._scratch = LazyScratch()

    def __call__(self, x: torch.Tensor, weight: Lut4Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """x: [T, K]; bias: [N] or None; returns [T, N]."""
        if not on_triton(x):
            return reference.lut4_linear(x, weight, bias)
        config = None
        if triton_lut4.can_lut4_gemm(x, weight):
            config = lut4_gemm_config(
                num_rows=x.shape[0],
                n=weight.out_features,
                k=weight.in_features,
                is_shared=_has_lookups(x.device),
            )
        if config is None:
            return functional.linear(x, triton_lut4.dequantize(weight, x.dtype), bias)
        return triton_lut4.lut4_gemm(x, weight, bias, self._scratch.on(x.device), config=config, pdl=has_pdl(x.device))


class Float4Linear:
    """Equals kernels.linear.float4.float4_linear, and planes.planes_linear. Makes values in registers, or for cuBLAS.

    Owns scratch for one stream.
    """

    def __init__(self) -> None:
        self._scratch = LazyScratch()

    def __call__(self, x: torch.Tensor, weight: Float4Weight | Float4Planes, bias: torch.Tensor | None) -> torch.Tensor:
        """x: [T, K]; bias: [N] or None; returns [T, N]."""
        if isinstance(weight, Float4Planes):
            return self._multiply_planes(x, weight, bias)
        if not on_triton(x):
            return float4.float4_linear(x, weight, bias)
        config = None
        if triton_lut4.can_lut4_gemm(x, weight):
            config = float4_gemm_config(
                num_rows=x.shape[0],
                n=weight.out_features,
                k=weight.in_features,
                block=weight.block,
                is_shared=_has_lookups(x.device),
            )
        if config is None:
            return functional.linear(x, triton_float4.dequantize(weight, x.dtype), bias)
        return triton_float4.float4_gemm(
            x, weight, bias, self._scratch.on(x.device), config=config, pdl=has_pdl(x.device)
        )

    def _multiply_planes(self, x: torch.Tensor, weight: Float4Planes, bias: torch.Tensor | None) -> torch.Tensor:
        if not on_triton(x):
            return planes_linear(x, weight, bias)
        return triton_planes.planes_linear(x, weight, bias, self._scratch.on(x.device), pdl=has_pdl(x.device))


class Fp8BlockLinear:
    """Rounds x by token and group of columns, and multiplies e4m3 with scales by block. Owns scratch for one stream.

    Equals kernels.linear.reference: blocks_linear of quantize_groups.
    """

    def __init__(self) -> None:
        self._scratch = LazyScratch()

    def __call__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        rows: int,
        columns: int,
    ) -> torch.Tensor:
        """x: [T, K]; w, scales: as quantize_blocks(…, rows, columns) returns; returns [T, N], of x's dtype."""
        return self.multiply(round_rows(x, Rounding(columns)), w, scales, bias, rows=rows, columns=columns)

    def multiply(
        self,
        x: RoundedRows,
        w: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        rows: int,
        columns: int,
    ) -> torch.Tensor:
        """Multiply rows that are rounded in runs of `columns`; see __call__."""
        if not has_twin(x.values):
            return reference.blocks_linear(x.values, x.scales, w, scales, bias, x.dtype, rows=rows, columns=columns)
        num_rows = x.values.shape[0]
        if num_rows > MAX_SMALL_TILES and _takes_blocks(x.values, w, rows=rows, columns=columns):
            return gluon_blocks.blocks_linear(x.values, x.scales, w, scales, bias, dtype=x.dtype, pdl=True)
        config = scaled8_config(
            num_rows=num_rows, n=w.shape[0], k=w.shape[1], block_k=columns, by_block=True,
            has_tma=_capability(w.device) >= (9, 0) and columns == 128 and triton_scaled8.can_load_by_tma(x.values),
        )  # fmt: skip
        return triton_scaled8.blocks_linear(
            x.values, x.scales, w, scales, bias, self._scratch.on(w.device),
            rows=rows, columns=columns, dtype=x.dtype, config=config, pdl=has_pdl(w.device),
        )  # fmt: skip


class Int8Linear:
    """Rounds x to integers, by token or by a known scale, and multiplies integers. Owns scratch for one stream.

    Equals kernels.linear.w8a8: int8_linear of quantize_rows_int8 or quantize_by_int8.
    """

    _BLOCK_K = 128

    def __init__(self) -> None:
        self._scratch = LazyScratch()

    def __call__(
        self,
        x: torch.Tensor,
        w: torch.Tensor | Int8Matrix,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        input_scale: torch.Tensor | None,
    ) -> torch.Tensor:
        """x: [T, K]; w: [N, K] int8; scales: [N]; input_scale: [] fp32, or None; returns [T, N], of x's dtype.

        An Int8Matrix has its own scales.
        """
        if isinstance(w, Int8Matrix):
            return onednn.int8_linear(x, w, bias, input_scale=input_scale)
        return self.multiply(round_rows(x, Rounding(scale=input_scale, dtype=torch.int8)), w, scales, bias)

    def multiply(
        self, x: RoundedRows, w: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Multiply rows that are rounded to integers; see __call__."""
        if not on_triton(x.values):
            return w8a8.int8_linear(x.values, x.scales, w, scales, bias, x.dtype)
        config = scaled8_config(
            num_rows=x.values.shape[0], n=w.shape[0], k=w.shape[1], block_k=self._BLOCK_K,
            has_tma=_capability(w.device) >= (9, 0) and triton_scaled8.can_load_by_tma(x.values),
        )  # fmt: skip
        return triton_scaled8.int8_linear(
            x.values, x.scales, w, scales, bias, self._scratch.on(w.device),
            dtype=x.dtype, config=config, pdl=has_pdl(w.device),
        )  # fmt: skip


def round_rows(x: torch.Tensor, how: Rounding) -> RoundedRows:
    """See kernels.linear.rounding.round_rows."""
    if how.dtype == torch.int8:
        values, scales = quantize_rows_int8(x) if how.scale is None else quantize_by_int8(x, how.scale)
    elif how.columns is not None:
        values, scales = quantize_groups(x, how.columns)
    elif how.scale is not None:
        values, scales = quantize_by(x, how.scale)
    else:
        values, scales = quantize_rows(x)
    return RoundedRows(values, scales, x.dtype)


def rows_linear(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """See kernels.linear.reference.rows_linear."""
    if has_twin(x) and x.shape[0] <= (_FEW_ROWS if _has_rowwise_product(w) else triton_fp8.MAX_ROWS):
        return triton_fp8.rows_linear(x, x_scales, w, w_scales, bias, dtype, pdl=has_pdl(x.device))
    if _has_rowwise_product(w):
        return _scaled_mm(x, x_scales, w, w_scales, bias, dtype)
    if x.is_cuda:
        out = (x.bfloat16() @ w.bfloat16().T).float() * x_scales[:, None] * w_scales
        return (out if bias is None else out + bias.float()).to(dtype)
    return reference.rows_linear(x, x_scales, w, w_scales, bias, dtype)


def linear_int8(
    x: torch.Tensor, values: torch.Tensor, largest: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """See kernels.linear.reference.linear_int8."""
    if not on_triton(x):
        return reference.linear_int8(x, values, largest, bias)
    if x.dtype in (torch.bfloat16, torch.float16) and x.shape[0] <= triton_bitsandbytes.MAX_ROWS:
        return triton_bitsandbytes.linear_int8(x, values, largest, bias, pdl=has_pdl(x.device))
    return functional.linear(x, triton_bitsandbytes.dequantize_int8(values, largest, x.dtype), bias)


def _scaled_mm(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute torch's product with scales per row, which returns bf16 only and adds only a bf16 bias.

    For many rows Hopper's tensor cores add with about 14 bits (DeepSeek-V3, arXiv:2412.19437, §3.3.2).
    """
    out = torch._scaled_mm(
        x,
        w.t(),
        scale_a=x_scales[:, None].contiguous(),
        scale_b=w_scales[None, :],
        bias=bias if bias is not None and bias.dtype == torch.bfloat16 else None,
        out_dtype=torch.bfloat16,
        use_fast_accum=x.shape[0] > _EXACT_ROWS,
    )
    if bias is not None and bias.dtype != torch.bfloat16:
        return out.to(dtype) + bias
    return out.to(dtype)


def _has_rowwise_product(w: torch.Tensor) -> bool:
    return w.is_cuda and _capability(w.device) >= (9, 0) and w.shape[0] % 16 == 0 and w.shape[1] % 16 == 0


def _takes_blocks(x: torch.Tensor, w: torch.Tensor, *, rows: int, columns: int) -> bool:
    """Return True if the kernel for Hopper multiplies these values of 8 bits, whose scales have such blocks.

    Outputs that are no multiple of 16 it stores two bytes at a time: 44 us where Triton takes 26 (1,000 x 2,176).
    """
    if not (HAS_GLUON and _capability(w.device)[0] == 9) or w.shape[0] % 16:
        return False
    return gluon_blocks.takes(x, w, rows=rows, columns=columns)


def _has_lookups(device: torch.device) -> bool:
    """Return True on the only architecture on which the lookups in shared memory, by PTX, were tested."""
    return _capability(device)[0] == 9


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
