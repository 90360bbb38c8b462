"""Matrices of 4- or 8-bit integers with a scale, and maybe a zero point, per output and group of inputs.

One layout for every checkpoint format that means weight = (code - zero) * scale, repacked once, at load: a 16-bit
word holds `16 / bits` codes of one output, whose inputs are PLANE apart. So a [N, PLANE] tile of words, shifted and
masked, is at once a [N, PLANE] tile of weights over neighbouring inputs, in place: nothing moves between threads.
This file is the specification; kernels/linear/triton_int.py and triton_int_dequantize.py are the twins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

PLANE = 32
BITS = (4, 8)


@dataclass(frozen=True)
class IntWeight:
    """An [N, K] matrix. Inputs of a group are neighbours; where a checkpoint's are not, `order` brings them there."""

    # [num_tiles, N, PLANE] int16: bits [i * bits, (i + 1) * bits) of word r of tile t are the code of input
    # (t * 16 / bits + i) * PLANE + r. The last tile is filled up with codes that inputs past K never meet
    packed: torch.Tensor
    # [num_groups, N] int32: the zero point << 16 | the bits of the scale, so that one load brings both in time
    groups: torch.Tensor
    # [K] int64: which input of the layer comes first, second, …; None: as they are
    order: torch.Tensor | None
    bits: int  # one of BITS
    in_features: int  # K
    scale_dtype: torch.dtype  # float16 or bfloat16

    @property
    def out_features(self) -> int:
        """N."""
        return self.packed.shape[1]

    @property
    def group_size(self) -> int:
        """Inputs of one group; K if there is one."""
        return self.in_features // self.groups.shape[0]

    @property
    def scales(self) -> torch.Tensor:
        """[num_groups, N], of scale_dtype."""
        return self.groups.to(torch.int16).view(self.scale_dtype)

    @property
    def zeros(self) -> torch.Tensor:
        """[num_groups, N] int32."""
        return self.groups >> 16


def make_int_weight(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    *,
    bits: int,
    order: torch.Tensor | None = None,
) -> IntWeight:
    """Pack codes: [N, K] uint8, inputs in the order of their groups; scales: [num_groups, N]; zeros: so, uint8.

    Without zeros they are 2^(bits - 1). fp32 scales become fp16, or bf16 if one is too large or too small for that.
    Waits for the device: for loading only.
    """
    assert bits in BITS
    assert codes.shape[1] % scales.shape[0] == 0
    if scales.dtype not in (torch.float16, torch.bfloat16):
        limits, sizes = torch.finfo(torch.float16), scales.abs()
        fits = bool(((sizes == 0) | ((sizes >= limits.tiny) & (sizes <= limits.max))).all())
        scales = scales.to(torch.float16 if fits else torch.bfloat16)
    high = torch.full_like(scales, 1 << (bits - 1), dtype=torch.int32) if zeros is None else zeros.to(torch.int32)
    low = scales.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    return IntWeight(
        packed=_pack(codes, bits),
        groups=((high << 16) | low).contiguous(),
        order=order,
        bits=bits,
        in_features=codes.shape[1],
        scale_dtype=scales.dtype,
    )


def int_weight_bytes(out_features: int, in_features: int, *, bits: int, num_groups: int) -> int:
    """Bytes that a matrix takes, without an order."""
    num_tiles = -(-in_features // (PLANE * 16 // bits))
    return out_features * (num_tiles * PLANE * 2 + num_groups * 4)


def unpack_int(weight: IntWeight) -> torch.Tensor:
    """[N, K] uint8: the codes, inputs in the order of their groups."""
    shifts = torch.arange(0, 16, weight.bits, device=weight.packed.device, dtype=torch.int16)
    planes = (weight.packed[:, :, None, :] >> shifts[:, None]) & ((1 << weight.bits) - 1)  # [tiles, N, planes, PLANE]
    return planes.permute(1, 0, 2, 3).flatten(1)[:, : weight.in_features].to(torch.uint8)


def dequantize_int(weight: IntWeight, dtype: torch.dtype) -> torch.Tensor:
    """[N, K]: (code - zero) * scale, inputs in the order of their groups, rounded once to dtype."""
    codes = unpack_int(weight).float().unflatten(1, (-1, weight.group_size))  # [N, groups, group_size]
    return ((codes - weight.zeros.T[:, :, None]) * weight.scales.T[:, :, None].float()).flatten(1).to(dtype)


def int_linear(x: torch.Tensor, weight: IntWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias. x: [T, K]; returns [T, N], of x's dtype."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    return functional.linear(x, dequantize_int(weight, x.dtype), bias)


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    num_planes = 16 // bits
    num_outputs, num_inputs = codes.shape
    padded = functional.pad(codes, (0, -num_inputs % (num_planes * PLANE)))
    planes = padded.reshape(num_outputs, -1, num_planes, PLANE).permute(2, 1, 0, 3)  # [planes, tiles, N, PLANE]
    packed = torch.zeros(planes.shape[1:], dtype=torch.int32, device=codes.device)
    for index in range(num_planes):
        packed |= planes[index].to(torch.int32) * (1 << (index * bits))
    return packed.to(torch.int16)  # keeps the low half
