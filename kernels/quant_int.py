"""Matrices of 4- or 8-bit integers with a scale, and maybe a zero point, per output and group of inputs.

One layout for every checkpoint format that means weight = (code - zero) * scale, repacked once, at load: a 16-bit
word holds `16 / bits` codes of one output, whose inputs are PLANE apart. So a [N, PLANE] tile of words, shifted and
masked, is at once a [N, PLANE] tile of weights over neighbouring inputs, in place: nothing moves between threads.
This file is the specification; kernels/triton_int_gemm.py and triton_int_dequantize.py are the twins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

PLANE = 32
BITS = (4, 8)


@dataclass(frozen=True)
class IntWeight:
    """An [N, K] matrix. Inputs of one group are neighbours; where the checkpoint's are not, `order` brings them there."""

    # [num_tiles, N, PLANE] int16: bits [i * bits, (i + 1) * bits) of word r of tile t are the code of input
    # (t * 16 / bits + i) * PLANE + r. The last tile is filled up with codes that inputs past K never meet
    packed: torch.Tensor
    # [num_groups, N], as wide as the checkpoint's
    scales: torch.Tensor
    # [num_groups, N] uint8; None: all are 2^(bits - 1)
    zeros: torch.Tensor | None
    # [K] int64: which input of the layer comes first, second, …; None: as they are
    order: torch.Tensor | None
    bits: int  # one of BITS
    in_features: int  # K

    @property
    def out_features(self) -> int:
        """N."""
        return self.packed.shape[1]

    @property
    def group_size(self) -> int:
        """Inputs of one group; K if there is one."""
        return self.in_features // self.scales.shape[0]


def make_int_weight(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    *,
    bits: int,
    order: torch.Tensor | None = None,
) -> IntWeight:
    """Pack codes: [N, K] uint8, inputs in the order of their groups; scales: [num_groups, N]; zeros: so, uint8.

    Zero points that are all 2^(bits - 1) are dropped. Waits for the device: for loading only.
    """
    assert bits in BITS and codes.shape[1] % scales.shape[0] == 0
    if zeros is not None and bool((zeros == 1 << (bits - 1)).all()):
        zeros = None
    return IntWeight(
        packed=_pack(codes, bits),
        scales=scales.contiguous(),
        zeros=None if zeros is None else zeros.contiguous(),
        order=order,
        bits=bits,
        in_features=codes.shape[1],
    )


def packed_bytes(out_features: int, in_features: int, bits: int) -> int:
    """Bytes that the codes of a matrix take."""
    return -(-in_features // (PLANE * 16 // bits)) * out_features * PLANE * 2


def unpack(weight: IntWeight) -> torch.Tensor:
    """[N, K] uint8: the codes, inputs in the order of their groups."""
    shifts = torch.arange(0, 16, weight.bits, device=weight.packed.device, dtype=torch.int16)
    planes = (weight.packed[:, :, None, :] >> shifts[:, None]) & ((1 << weight.bits) - 1)  # [tiles, N, planes, PLANE]
    return planes.permute(1, 0, 2, 3).flatten(1)[:, : weight.in_features].to(torch.uint8)


def dequantize(weight: IntWeight, dtype: torch.dtype) -> torch.Tensor:
    """[N, K]: (code - zero) * scale, inputs in the order of their groups, rounded once to dtype."""
    codes = unpack(weight).float().unflatten(1, (-1, weight.group_size))  # [N, groups, group_size]
    zeros = 1 << (weight.bits - 1) if weight.zeros is None else weight.zeros.T[:, :, None].float()
    return ((codes - zeros) * weight.scales.T[:, :, None].float()).flatten(1).to(dtype)


def int_linear(x: torch.Tensor, weight: IntWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias. x: [T, K]; returns [T, N], of x's dtype."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    return functional.linear(x, dequantize(weight, x.dtype), bias)


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    num_planes = 16 // bits
    num_outputs, num_inputs = codes.shape
    padded = functional.pad(codes, (0, -num_inputs % (num_planes * PLANE)))
    planes = padded.view(num_outputs, -1, num_planes, PLANE).permute(2, 1, 0, 3)  # [planes, tiles, N, PLANE]
    packed = torch.zeros(planes.shape[1:], dtype=torch.int32, device=codes.device)
    for index in range(num_planes):
        packed |= planes[index].to(torch.int32) << (index * bits)
    return packed.to(torch.int16)  # keeps the low half
