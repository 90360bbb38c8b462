"""Products on the CPU by oneDNN, which torch includes: packed bf16 matrices, and 8-bit integers.

pack() stores a bf16 matrix in the order in which a product reads it, so one row of x streams it at about the rate of
the memory. A product of the plain matrix reads it in pieces of whole rows, which took 1.3 times as long.
Int8Matrix holds integers for VNNI, whose instructions multiply unsigned by signed bytes: activations are stored as
value + 128, and oneDNN subtracts 128 times the sum of each output's weights. Specifications: torch's linear, and
kernels/linear/w8a8.py, whose sums are these exactly.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.dispatch import has_bf16_products, has_int8_products
from kernels.linear.reference import MIN_SCALE
from kernels.linear.w8a8 import INT8_MAX
from kernels.native.ops import quantize_rows, takes_rows

_PACKED_FOR_ROWS = 32  # rows of x for which oneDNN chooses the order; others read the same order as fast
# Rows of x from which a product in fp32, of a matrix that is unpacked for it, is faster on an Intel core without AMX:
# it adds as many fp32 products per cycle as bf16 ones, at 1.6 times the rate
_WIDE_ROWS = 192
_WIDE_ELEMENTS = 1 << 26  # of a matrix that is unpacked at once, 256 MiB in fp32
_MAX_INPUTS = 65_536  # sums of (255 * 127) fit in 32 bits
_SHIFT = 128


def can_pack(w: torch.Tensor) -> bool:
    """Return True if products of matrix w are faster if it is packed."""
    return w.device.type == "cpu" and w.dtype == torch.bfloat16 and w.numel() > 0 and has_bf16_products()


def pack(w: torch.Tensor) -> torch.Tensor:
    """Return w, [N, K] bf16, as an opaque copy of the same shape and size (Tensor.is_mkldnn)."""
    return torch.ops.mkldnn._reorder_linear_weight(w, _PACKED_FOR_ROWS)


def packed_linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ w.T + bias. x: [T, K] bf16; w: [N, K] from pack(); bias: [N] or None; returns [T, N] bf16."""
    if x.shape[0] >= _WIDE_ROWS and w.numel() <= _WIDE_ELEMENTS and _is_wide_faster():
        wide_bias = None if bias is None else bias.float()
        return functional.linear(x.float(), w.to_dense(torch.float32), wide_bias).to(x.dtype)
    return torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")


@dataclass(frozen=True)
class Int8Matrix:
    """An [N, K] matrix of integers in the order of oneDNN's products, with a scale per output."""

    # opaque
    packed: torch.Tensor
    # [N] fp32
    scales: torch.Tensor
    # [N] int32 zeros: weights are symmetric
    zeros: torch.Tensor
    in_features: int  # K

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        return torch.Size((self.scales.shape[0], self.in_features))

    @property
    def nbytes(self) -> int:
        """Bytes of the integers."""
        return self.shape.numel()


def can_pack_int8(w: torch.Tensor) -> bool:
    """Return True if this CPU's integer products take w, [N, K] int8."""
    return w.device.type == "cpu" and w.numel() > 0 and w.shape[1] <= _MAX_INPUTS and has_int8_products()


def pack_int8(w: torch.Tensor, scales: torch.Tensor) -> Int8Matrix:
    """Return w, [N, K] int8, packed. scales: [N] fp32."""
    packed = torch.ops.onednn.qlinear_prepack(w.contiguous(), [_PACKED_FOR_ROWS, w.shape[1]])
    return Int8Matrix(packed, scales.float().contiguous(), torch.zeros(w.shape[0], dtype=torch.int32), w.shape[1])


def int8_linear(
    x: torch.Tensor, w: Int8Matrix, bias: torch.Tensor | None, *, input_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ w.T + bias, x rounded to integers by row, or by input_scale ([] fp32). x: [T, K]; returns x's dtype [T, N].

    Equals w8a8.int8_linear of quantize_rows_int8 or quantize_by_int8.
    """
    if x.shape[0] == 0:
        return x.new_empty(0, w.scales.shape[0])
    if input_scale is None and takes_rows(x):
        values, scales = quantize_rows(x, least=MIN_SCALE)
    elif input_scale is None:
        scales = torch.linalg.vector_norm(x, float("inf"), -1, True, dtype=torch.float32)
        scales.mul_(1.0 / INT8_MAX).clamp_(min=MIN_SCALE)
        values = (x / scales).round_().add_(_SHIFT).to(torch.uint8)
    else:
        scales = input_scale.view(1, 1)  # a scalar would leave the quotient in x's dtype
        values = (x / scales).round_().clamp_(-INT8_MAX, INT8_MAX).add_(_SHIFT).to(torch.uint8)
    sums = torch.ops.onednn.qlinear_pointwise(
        values, 1.0, _SHIFT, w.packed, w.scales, w.zeros, None,
        1.0, 0, torch.float32, "none", [], "",
    )  # fmt: skip
    if bias is not None:
        return sums.mul_(scales).add_(bias).to(x.dtype)
    return torch.mul(sums, scales, out=torch.empty(sums.shape, dtype=x.dtype))


@functools.cache
def _is_wide_faster() -> bool:
    facts = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return str(facts.get("cpu_name", "")).startswith("Intel") and not torch.cpu._is_amx_tile_supported()
