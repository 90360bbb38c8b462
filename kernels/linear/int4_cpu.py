"""4-bit weights on the CPU by torch's own product, which dequantises in registers. Any x of 16 or 32 bits.

Specification: kernels.linear.reference.int_linear. torch's kernel computes (value - 8) * scale + zero with scale and
zero in x's dtype, so in bf16 both are rounded once more: by 0.4 % at most, and by 3 % of a step for a zero point far
from the middle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.linear.reference import IntWeight, unpack_int
from kernels.native import ops as native
from kernels.native.library import products_level

_GROUP_SIZES = (32, 64, 128, 256)
_OUTPUTS = 16
_MIDDLE = 8
_BLOCK_OUTPUTS = 64  # of torch's order on a CPU with AVX-512
# Rows of x from which unpacking the matrix for a product in bf16 is faster than torch's product, which unpacks it again
# for every four rows
_UNPACKED_ROWS = 32
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
    # packed is [N / 64, K, 32], each byte of one input of outputs i and i + 32 of the 64
    is_in_blocks: bool = False

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
    codes = unpack_int(weight)
    packed = torch._convert_weight_to_int4pack_for_cpu(codes.int(), _INNER_TILES)
    return Int4Matrix(
        packed=packed,
        scales_zeros=torch.stack((scales, zeros), dim=-1).to(dtype).contiguous(),
        group_size=weight.group_size,
        order=weight.order,
        is_in_blocks=_is_in_blocks(packed, codes),
    )


def int4_linear(x: torch.Tensor, weight: Int4Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias. x: [T, K]; bias: [N] or None; returns [T, N], of x's dtype."""
    if x.shape[0] == 0:
        return x.new_empty(0, weight.out_features)
    x = x.contiguous() if weight.order is None else x.index_select(1, weight.order)
    is_native = weight.is_in_blocks and native.takes_rows(x, weight.scales_zeros)
    few_rows = _UNPACKED_ROWS - 1 if products_level() == native.BY_AMX else native.ANY_ROWS
    if is_native and native.takes_products(x, bias, few_rows=few_rows, word_inputs=2):
        return native.int4_linear(x, weight.packed, weight.scales_zeros, bias, weight.group_size)
    if is_native and x.shape[0] >= _UNPACKED_ROWS:
        out = x @ native.unpack_int4(weight.packed, weight.scales_zeros, weight.group_size)
    else:
        out = torch._weight_int4pack_mm_for_cpu(x, weight.packed, weight.group_size, weight.scales_zeros)
    return out if bias is None else out.add_(bias)


def _is_in_blocks(packed: torch.Tensor, codes: torch.Tensor) -> bool:
    """Return True if packed has the order in which it can be unpacked, which depends on the CPU and on torch.

    packed: of codes, [N, K] uint8. The first and the last block are compared; codes that are all equal fit any order.
    """
    num_outputs, num_inputs = codes.shape
    if num_outputs % _BLOCK_OUTPUTS:
        return False
    is_told = False
    for block in (0, num_outputs // _BLOCK_OUTPUTS - 1):
        rows = codes[block * _BLOCK_OUTPUTS : (block + 1) * _BLOCK_OUTPUTS].T
        low, high = rows.chunk(2, dim=1)
        start = block * _BLOCK_OUTPUTS
        found = packed[start : start + _BLOCK_OUTPUTS].reshape(num_inputs, _BLOCK_OUTPUTS // 2)
        if not torch.equal(found, high << 4 | low):
            return False
        is_told = is_told or bool((rows != rows[0, 0]).any())
    return is_told
