"""4-bit floats (e2m1: 2 bits of exponent, 1 of mantissa) with scales by block: MXFP4 and NVFP4, in torch.

Two neighbours of a row share a byte, the first in the lower half. MXFP4 (OCP Microscaling Formats 1.0, §5) scales each
32 of a row by a power of two, stored as its exponent plus 127 (e8m0). NVFP4 scales each 16 by an 8-bit float (e4m3),
and the whole matrix by one fp32 factor. The functions decode what checkpoints store, and round to nearest for tests and
random weights. Specification of every kernel that reads such weights; imports torch alone.
"""

from __future__ import annotations

import torch

MXFP4_BLOCK = 32  # values that share a scale
NVFP4_BLOCK = 16
# By code; the fourth bit is the sign
E2M1_TABLE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E2M1_MAX = 6.0
E8M0_BIAS = 127
E8M0_NAN = 255
_E4M3_MAX = 448.0
_E4M3_MIN = 2.0**-9  # the smallest positive one
_LEAST = 1e-30  # amax of a matrix of zeros


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Return [..., K] fp32 from [..., K / 2] uint8."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).int()
    return torch.tensor(E2M1_TABLE, device=packed.device)[codes]


def decode_e8m0(scales: torch.Tensor) -> torch.Tensor:
    """Return 2 ** (scale - 127) in fp32; 255, NaN in the format, gives inf. scales: uint8."""
    return torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - E8M0_BIAS)


def dequantize_mxfp4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return [..., K] fp32. packed: [..., K / 2] uint8; scales: [..., K / 32] uint8."""
    return _scaled(packed, decode_e8m0(scales))


def dequantize_nvfp4(packed: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor | float) -> torch.Tensor:
    """Return [..., K] fp32. packed: [..., K / 2] uint8; scales: [..., K / 16] e4m3; factor: multiplies all."""
    return _scaled(packed, scales.float()) * factor


def quantize_mxfp4(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to nearest. w: [..., K], K a multiple of 32; returns [..., K / 2] uint8 and [..., K / 32] uint8.

    The scale of a block is the least power of two at which its largest magnitude does not exceed 6.
    """
    blocks = w.float().unflatten(-1, (-1, MXFP4_BLOCK))
    largest = blocks.abs().amax(-1).clamp(min=_LEAST)
    exponents = (largest / E2M1_MAX).log2().ceil().int() + E8M0_BIAS
    scales = exponents.clamp(0, E8M0_NAN - 1).to(torch.uint8)
    return _pack(blocks / decode_e8m0(scales)[..., None]), scales


def quantize_nvfp4(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round to nearest. w: [..., K], K a multiple of 16.

    Returns [..., K / 2] uint8, scales [..., K / 16] e4m3 and the factor [] fp32, which gives the largest block of all
    the largest scale.
    """
    blocks = w.float().unflatten(-1, (-1, NVFP4_BLOCK))
    largest = blocks.abs().amax(-1)
    factor = largest.amax().clamp(min=_LEAST) / (E2M1_MAX * _E4M3_MAX)
    scales = (largest / (E2M1_MAX * factor)).clamp(_E4M3_MIN, _E4M3_MAX).to(torch.float8_e4m3fn)
    return _pack(blocks / (scales.float() * factor)[..., None]), scales, factor


def _scaled(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    values = unpack_e2m1(packed)
    return (values.unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)


def _pack(values: torch.Tensor) -> torch.Tensor:
    """Round [..., blocks, size] to codes: [..., K / 2] uint8."""
    table = torch.tensor(E2M1_TABLE[:8], device=values.device)
    codes = torch.bucketize(values.abs(), (table[:-1] + table[1:]) / 2) | ((values < 0).int() << 3)
    codes = codes.to(torch.uint8).flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)
