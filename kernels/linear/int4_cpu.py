"""4-bit weights on the CPU by torch's own product, which dequantises in registers. Any x of 16 or 32 bits.

Specification: kernels.linear.reference.int_linear. torch's kernel computes (value - 8) * scale + zero with scale and
zero in x's dtype, so in bf16 both are rounded once more: by 0.4 % at most, and by 3 % of a step for a zero point far
from the middle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.linear.reference import IntWeight, unpack_int

_GROUP_SIZES = (32, 64, 128, 256)
_OUTPUTS = 16
_MIDDLE = 8
_INNER_TILES = 2  # an argument of torch's packing that the CPU ignores


@dataclass(frozen=True)
class Int4Matrix:
    """An [N, K] matrix of 4-bit integers in torch's order for the CPU."""

    # [N, K / 2] uint8
    packed: torch.Tensor
    # [K / group_size, N, 2], of x's dtype: scale and zero
    scales_zeros: torch.Tensor
    group_size: int
    # [K] int64: the layer's input at each position; None: unchanged order
    order: torch.Tensor | None

    @property
    def out_features(self) -> int:
        """Number of outputs, N."""
        return self.packed.shape[0]

    @property
    def in_features(self) -> int:
        """Number of inputs, K."""
        return 2 * self.packed.shape[1]


def can_pack_int4(weight: IntWeight) -> bool:
    """Return True if torch's product on the CPU takes this matrix."""
    is_taken = weight.bits == 4 and weight.group_size in _GROUP_SIZES and weight.out_features % _OUTPUTS == 0
    return is_taken and weight.packed.device.type == "cpu"


def pack_int4(weight: IntWeight, dtype: torch.dtype) -> Int4Matrix:
    """Repack a matrix. dtype: of x."""
    scales = weight.scales.float()
    zeros = (_MIDDLE - weight.zeros) * scales
    return Int4Matrix(
        packed=torch._convert_weight_to_int4pack_for_cpu(unpack_int(weight).int(), _INNER_TILES),
        scales_zeros=torch.stack((scales, zeros), dim=-1).to(dtype).contiguous(),
        group_size=weight.group_size,
        order=weight.order,
    )


def int4_linear(x: torch.Tensor, weight: Int4Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias. x: [T, K]; bias: [N] or None; returns [T, N], of x's dtype."""
    if x.shape[0] == 0:
        return x.new_empty(0, weight.out_features)
    x = x.contiguous() if weight.order is None else x.index_select(1, weight.order)
    out = torch._weight_int4pack_mm_for_cpu(x, weight.packed, weight.group_size, weight.scales_zeros)
    return out if bias is None else out.add_(bias)
