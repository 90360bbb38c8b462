"""Float4Planes: a matrix of 4-bit floats arranged for the registers of tensor cores, and the torch specification.

A group is 128 inputs of one output. Its codes are cut into four planes of 32 inputs, and word j of 16 bits holds code j
of each plane, its bits where a bfloat16 has them or a few places lower: a mask and a shift make two codes, which lie
side by side in 32 bits, two bfloat16 that lack a power of two only, and one multiplication by their scales restores it.
No table is read. Experts are arranged alike: kernels/moe/planes.py.

For products in bfloat16, to which every value times its scale is exact. MXFP4's scales are as stored. NVFP4's become 5
bits of exponent and 3 of mantissa, without numbers below the normal ones, so that they need no conversion either: a
scale moved by 4 bits, plus a constant, is a bfloat16. Twin: kernels/linear/triton_planes.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.e2m1 import MXFP4_BLOCK, NVFP4_BLOCK, dequantize_mxfp4, dequantize_nvfp4
from kernels.linear.reference import FP8

GROUP, PLANE = 128, 32
PLANES = GROUP // PLANE
# Bits of a word that hold the bits of each plane's code, the sign first. Those of the first three planes lie as in a
# bfloat16, whose sign, lowest bits of the exponent and highest bit of the mantissa they become, and 3 bits apart
E2M1_BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))
MOST_E8M0 = 128  # a scale of 2: times the 2^126 that a code's bits lack, a larger one is no bfloat16
# NVFP4's scales are multiplied by 2^118, as 2^126 would exceed a bfloat16: factors have the rest
NVFP4_REST = 2.0**8
_NAN_E4M3 = 127
_ROWS = 4096
_E5M3_BIAS = 10  # 2^-9 is the smallest scale, and 0 has a byte of its own


@dataclass(frozen=True)
class Float4Planes:
    """An [N, K] matrix, K a multiple of its block; inputs past K have the code 0."""

    # [G, N, 32] int16, G of K / 128 rounded up
    words: torch.Tensor
    # [G, N, 1] int32 of MXFP4: byte p is the scale of plane p. [G, N, 2] of NVFP4: byte p is that of the first, and of
    # the second, 16 inputs of plane p
    scales: torch.Tensor
    # [N] fp32: factor of each output, of NVFP4 times NVFP4_REST
    factors: torch.Tensor
    in_features: int  # K

    @property
    def block(self) -> int:
        """Inputs that share a scale: 32 (MXFP4) or 16 (NVFP4)."""
        return PLANE // self.scales.shape[2]

    @property
    def out_features(self) -> int:
        """Number of outputs, N."""
        return self.words.shape[1]

    @property
    def num_groups(self) -> int:
        """Number of groups of inputs."""
        return self.words.shape[0]


def can_arrange_float4(scales: torch.Tensor) -> bool:
    """Return True if planes hold these scales, uint8 (MXFP4) or e4m3 (NVFP4). Waits for the device."""
    if scales.dtype == torch.uint8:
        return int(scales.max()) <= MOST_E8M0
    return int(scales.view(torch.uint8).max()) < _NAN_E4M3


def make_float4_planes(packed: torch.Tensor, scales: torch.Tensor, factors: torch.Tensor) -> Float4Planes:
    """Arrange. packed: [N, K / 2] uint8; scales: [N, K / 32] uint8 (MXFP4), or [N, K / 16] e4m3 (NVFP4).

    factors: [N] fp32. can_arrange_float4(scales) must be true.
    """
    n, k, is_nv = packed.shape[0], 2 * packed.shape[1], scales.dtype == FP8
    words = packed.new_empty(-(-k // GROUP), n, PLANE, dtype=torch.int16)
    for start in range(0, n, _ROWS):  # in parts, as bits are moved in 32 bits
        rows = slice(start, start + _ROWS)
        codes = halves(packed[rows])
        arrange(without_zero_blocks(codes, scales[rows]) if is_nv else codes, words[:, None, rows], E2M1_BITS)
    octets = to_e5m3(scales) if is_nv else scales
    factors = factors * NVFP4_REST if is_nv else factors.contiguous()
    return Float4Planes(words, arrange_scales(octets, k), factors, k)


def dequantize_planes(weight: Float4Planes, dtype: torch.dtype) -> torch.Tensor:
    """Return [N, K]: value * scale * factor, rounded once to dtype."""
    codes = collect(weight.words[:, None], E2M1_BITS)[:, : weight.in_features]
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    octets = collect_scales(weight.scales, weight.in_features)
    if weight.block == MXFP4_BLOCK:
        wide = dequantize_mxfp4(packed, octets) * weight.factors[:, None]
    else:
        wide = dequantize_nvfp4(packed, from_e5m3(octets), 1.0) * (weight.factors / NVFP4_REST)[:, None]
    return wide.to(dtype)


def planes_linear(x: torch.Tensor, weight: Float4Planes, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias. x: [M, K]; bias: [N] or None; returns [M, N], of x's dtype."""
    return functional.linear(x, dequantize_planes(weight, x.dtype), bias)


def halves(octets: torch.Tensor) -> torch.Tensor:
    """Return the 4-bit codes of bytes [N, B] uint8, those of the low halves first: [N, 2 * B]."""
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


def without_zero_blocks(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the codes [N, K], 0 where the scale is 0, which e5m3 lacks. scales: [N, K / 16] e4m3."""
    is_zero = (scales.view(torch.uint8) == 0).repeat_interleave(NVFP4_BLOCK, 1)
    return codes.masked_fill(is_zero, 0)


def to_e5m3(scales: torch.Tensor) -> torch.Tensor:
    """Return e4m3 scales, of which none is negative or NaN, as bytes: 0, or (exponent + 10) * 8 + mantissa."""
    table = torch.arange(_NAN_E4M3, dtype=torch.uint8, device=scales.device).view(FP8).float()
    fractions, exponents = torch.frexp(table)  # fractions of 0.5 to 1
    octets = (exponents - 1 + _E5M3_BIAS) * 8 + (fractions * 16 - 8).int()
    octets[0] = 0
    return octets.to(torch.uint8)[scales.view(torch.uint8).int()]


def from_e5m3(octets: torch.Tensor) -> torch.Tensor:
    """Return the e4m3 scales of to_e5m3."""
    sizes = torch.ldexp(1 + (octets & 7).float() / 8, (octets >> 3).int() - _E5M3_BIAS)
    return sizes.masked_fill(octets == 0, 0.0).to(FP8)


def arrange_scales(octets: torch.Tensor, k: int) -> torch.Tensor:
    """Return bytes [N, K / block] as words [G, N, 32 / block] int32; those of inputs past K are 0."""
    num_groups, runs = -(-k // GROUP), PLANE * octets.shape[1] // k
    padded = functional.pad(octets, (0, num_groups * PLANES * runs - octets.shape[1]))
    planes = padded.view(-1, num_groups, PLANES, runs).permute(1, 0, 3, 2)
    # whose strides of dimensions of 1 are those of a new tensor, unlike of contiguous()
    return planes.clone(memory_format=torch.contiguous_format).view(torch.int32).squeeze(3)


def collect_scales(words: torch.Tensor, k: int) -> torch.Tensor:
    """Return the bytes [N, K / block] of arrange_scales."""
    planes = words.contiguous()[..., None].view(torch.uint8)  # [G, N, runs, 4]
    return planes.permute(1, 0, 3, 2).flatten(1)[:, : k * words.shape[2] // PLANE]


def arrange(codes: torch.Tensor, words: torch.Tensor, bits: Sequence[Sequence[int]]) -> None:
    """Write codes, [N, K] uint8, into words, [groups, runs, N, 32] int16. bits: of a word, by plane."""
    groups, runs, n, _ = words.shape
    padded = codes.new_zeros(n, groups * GROUP)
    padded[:, : codes.shape[1]] = codes
    planes = padded.view(n, groups, runs, -1, PLANE).int()
    word = torch.zeros(n, groups, runs, PLANE, dtype=torch.int32, device=codes.device)
    for plane, places in enumerate(bits):
        codes_of = planes[:, :, :, plane]
        if places[0] - places[-1] == len(places) - 1:  # side by side
            word |= codes_of << places[-1]
            continue
        for source, target in enumerate(reversed(places)):
            word |= ((codes_of >> source) & 1) << target
    words.copy_(torch.where(word >= 1 << 15, word - (1 << 16), word).permute(1, 2, 0, 3))


def collect(words: torch.Tensor, bits: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the codes of words [groups, runs, N, 32] int16: [N, groups * 128] uint8."""
    wide = words.int() & 0xFFFF
    planes = torch.stack([_gather(wide, places) for places in bits], dim=2)
    # [groups, runs, planes, N, 32] → [N, K]
    return planes.permute(3, 0, 1, 2, 4).flatten(1).to(torch.uint8)


def _gather(words: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """Return the codes whose bits lie at `places` of the words, the highest first."""
    code = torch.zeros_like(words)
    for target, source in enumerate(reversed(places)):
        code |= ((words >> source) & 1) << target
    return code
