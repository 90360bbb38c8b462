"""Float4Weight: a matrix of 4-bit floats as kernels read it, and the torch specification of its product.

MXFP4 and NVFP4 (kernels/e2m1.py) are repacked once, on load, to one layout. Only bytes move: a 32-bit word has four
bytes, one from each of four planes, of which each has the inputs of one block of scales; beside them a word has the
four blocks' scales. One byte looks up two values at once, and value times scale is exact in 16 bits. Weights are not
multiplied as 4-bit floats: Hopper has no units for them. Twin: kernels/linear/triton_float4.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.e2m1 import E2M1_TABLE, E8M0_BIAS, MXFP4_BLOCK, NVFP4_BLOCK

PLANES = 4  # of a tile
STEP = 128  # inputs: one tile of MXFP4, two of NVFP4
_BYTES = 256
_FP16_TOP = 28  # exponent of the largest scale of a row in float16, whose bias is 15
# Bits that a scale moves up by to become a float, and the number that the table is multiplied with, as the float's
# exponent has a bias of its own
_E8M0 = {torch.float16: (10, 1.0), torch.bfloat16: (7, 1.0), torch.float32: (23, 1.0)}
_E4M3 = {torch.float16: (7, 2.0**8), torch.bfloat16: (4, 2.0**120), torch.float32: (20, 2.0**120)}


@dataclass(frozen=True)
class Float4Weight:
    """An [N, K] matrix, K a multiple of its block. T tiles of four blocks of inputs."""

    # [T, N, 2 * block] uint8: byte 4c + p of tile t has inputs (t * 4 + p) * block + 2c, in its lower half, and
    # + 2c + 1, in its upper one
    packed: torch.Tensor
    # [T, N] int32: byte p is the scale of block t * 4 + p; `shift` bits higher it is a float of the dtype
    scales: torch.Tensor
    # [N] fp32: factor of each output
    factors: torch.Tensor
    # [256, 2] of x's dtype: the values of both halves of a byte, times a power of two that scales lack
    pairs: torch.Tensor
    shift: int
    in_features: int  # K

    @property
    def block(self) -> int:
        """Inputs that share a scale: 32 (MXFP4) or 16 (NVFP4)."""
        return self.packed.shape[2] // 2

    @property
    def out_features(self) -> int:
        """Number of outputs, N."""
        return self.packed.shape[1]

    @property
    def num_steps(self) -> int:
        """Number of runs of STEP inputs; the last is padded with zeros."""
        return self.packed.shape[0] * PLANES * self.block // STEP


def make_float4_weight(
    packed: torch.Tensor, scales: torch.Tensor, factors: torch.Tensor, dtype: torch.dtype
) -> Float4Weight:
    """Repack. packed: [N, K / 2] uint8; scales: [N, K / 32] uint8 (MXFP4), or [N, K / 16] e4m3, none negative (NVFP4).

    factors: [N] fp32, of each output; dtype: of x. float16 has too few exponents for those of MXFP4: scales of a row
    become relative to its largest, and those below 2 ** -27 of it zero.
    """
    is_mx = scales.dtype == torch.uint8
    (n, half), block = packed.shape, MXFP4_BLOCK if is_mx else NVFP4_BLOCK
    assert half * 2 == block * scales.shape[1]
    octets = scales.view(torch.uint8)
    shift, multiplier = (_E8M0 if is_mx else _E4M3)[dtype]
    if is_mx and dtype == torch.float16:
        top = octets.int().amax(1, keepdim=True)
        octets = (octets.int() - top + _FP16_TOP).clamp(min=0).to(torch.uint8)
        factors = torch.ldexp(factors, top[:, 0] - E8M0_BIAS - (_FP16_TOP - 15))
    octets = functional.pad(octets, (0, -octets.shape[1] % (STEP // block))).view(n, -1, PLANES)
    bytes_ = functional.pad(packed, (0, -half % (STEP // 2))).view(n, -1, PLANES, block // 2)
    index = torch.arange(_BYTES, device=packed.device)
    table = torch.tensor(E2M1_TABLE, device=packed.device) * multiplier
    return Float4Weight(
        packed=bytes_.permute(1, 0, 3, 2).reshape(-1, n, 2 * block).contiguous(),
        scales=octets.transpose(0, 1).contiguous().view(torch.int32)[..., 0],
        factors=factors.contiguous(),
        pairs=table[torch.stack((index & 15, index >> 4), dim=1)].to(dtype),
        shift=shift,
        in_features=2 * half,
    )


def float4_weight_bytes(n: int, k: int, block: int) -> int:
    """Return the bytes of a matrix without its table."""
    num_steps = -(-k // STEP)
    return n * (num_steps * (STEP // 2 + STEP // block) + 4)


def dequantize_float4(weight: Float4Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return [N, K]: value * scale * factor, rounded once to dtype."""
    n, k, of_pairs = weight.out_features, weight.in_features, weight.pairs.dtype
    planes = weight.packed.view(-1, n, weight.block // 2, PLANES).permute(1, 0, 3, 2)
    values = weight.pairs[planes.reshape(n, -1).int()].float().view(n, -1, weight.block)
    octets = weight.scales[..., None].view(torch.uint8).transpose(0, 1).reshape(n, -1).int() << weight.shift
    bits = octets if of_pairs == torch.float32 else octets.to(torch.int16)
    wide = values * bits.view(of_pairs).float()[..., None] * weight.factors[:, None, None]
    return wide.flatten(1)[:, :k].to(dtype)


def float4_linear(x: torch.Tensor, weight: Float4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias. x: [M, K]; bias: [N] or None; returns [M, N], of x's dtype."""
    return functional.linear(x, dequantize_float4(weight, x.dtype), bias)
