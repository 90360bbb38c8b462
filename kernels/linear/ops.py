"""The linear products that models call; each selects its Triton twin on CUDA, or torch.

kernels/linear/reference.py, float4.py and planes.py are the specifications. Imports Triton if it can. Products whose
activations are rounded to 8 bits are in eight_bits.py.

DenseLinear multiplies 16- and 32-bit matrices, on a CPU also those that onednn.py has packed. IntLinear multiplies
packed integer weights. Linear4Bit and linear_int8 multiply bitsandbytes weights, and Float4Linear 4-bit floats: by a
Triton twin for few rows; for many rows the matrix is dequantised first, since cuBLAS then takes longer.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.dispatch import HAS_TRITON, has_pdl, is_hopper, on_triton, when_used
from kernels.linear import dense, float4, late_norm, onednn, reference
from kernels.linear.float4 import Float4Weight
from kernels.linear.int4_cpu import Int4Matrix, int4_linear
from kernels.linear.late_norm import GateKind, LateNorm
from kernels.linear.lut4_configs import float4_gemm_config, lut4_gemm_config
from kernels.linear.onednn import Bf16Matrix
from kernels.linear.planes import Float4Planes, planes_linear
from kernels.linear.reference import IntWeight, Lut4Weight
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
    triton_int = when_used("kernels.linear.triton_int")
    triton_lut4 = when_used("kernels.linear.triton_lut4")
    triton_planes = when_used("kernels.linear.triton_planes")


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
        return HAS_GLUON and is_hopper(x.device) and gluon_dense.is_faster(x, w)

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


def linear_int8(
    x: torch.Tensor, values: torch.Tensor, largest: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """See kernels.linear.reference.linear_int8."""
    if not on_triton(x):
        return reference.linear_int8(x, values, largest, bias)
    if x.dtype in (torch.bfloat16, torch.float16) and x.shape[0] <= triton_bitsandbytes.MAX_ROWS:
        return triton_bitsandbytes.linear_int8(x, values, largest, bias, pdl=has_pdl(x.device))
    return functional.linear(x, triton_bitsandbytes.dequantize_int8(values, largest, x.dtype), bias)


def _has_lookups(device: torch.device) -> bool:
    """Return True on the only architecture on which the lookups in shared memory, by PTX, were tested."""
    return is_hopper(device)
