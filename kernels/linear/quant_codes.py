"""Matrices of 4-bit codes that a table of 16 values explains, laid out for tensor cores. Repacked once, at load.

Bytes stay what bitsandbytes makes of two neighbours of a row; they only move. Four of them, one of each of four planes
of inputs, make a word: so a byte looks up two values at once, side by side as tensor cores want them, and a thread
needs all that it reads. This file is the specification; kernels/linear/triton_lut4.py and triton_codes_dequantize.py
are the twins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.linear.quant_bnb import BLOCK, dequantize_4bit

LUT_PLANE = 32  # inputs
LUT_PLANES = 4  # of a tile
LUT_TILE = LUT_PLANES * LUT_PLANE  # inputs
_BYTES = 256


@dataclass(frozen=True)
class CodeWeight:
    """An [N, K] matrix, K a multiple of 64."""

    # [num_tiles, N, 64] uint8: byte 4c + p of tile t has inputs (t * 4 + p) * 32 + 2c, in its upper half, and
    # + 2c + 1, in its lower one. The last tile is filled up with codes that inputs past K never meet
    packed: torch.Tensor
    # [K / 64, N] fp32
    scales: torch.Tensor
    # [16] fp32: what the codes mean
    table: torch.Tensor
    # [256, 2] of x's dtype: what both halves of a byte mean, rounded
    pairs: torch.Tensor
    in_features: int  # K

    @property
    def num_tiles(self) -> int:
        """Tiles along K."""
        return self.packed.shape[0]

    @property
    def out_features(self) -> int:
        """N."""
        return self.packed.shape[1]


def make_code_weight(packed: torch.Tensor, scales: torch.Tensor, table: torch.Tensor, dtype: torch.dtype) -> CodeWeight:
    """Repack what kernels.linear.quant_bnb.quantize_nf4 returns, or a checkpoint holds. dtype: of x, for `pairs`."""
    n, half = packed.shape
    assert half * 2 == BLOCK * scales.shape[1]
    planes = functional.pad(packed, (0, -half % (LUT_TILE // 2))).view(n, -1, LUT_PLANES, LUT_PLANE // 2)
    index = torch.arange(_BYTES, device=table.device)
    return CodeWeight(
        packed=planes.permute(1, 0, 3, 2).reshape(-1, n, LUT_TILE // 2).contiguous(),
        scales=scales.T.contiguous(),
        table=table,
        pairs=table[torch.stack((index >> 4, index & 15), dim=1)].to(dtype),
        in_features=2 * half,
    )


def code_weight_bytes(n: int, k: int) -> int:
    """Bytes of a matrix, without its table."""
    return -(-k // LUT_TILE) * n * (LUT_TILE // 2) + 4 * n * k // BLOCK


def unpack_lut4(weight: CodeWeight) -> torch.Tensor:
    """[N, K / 2] uint8, as make_code_weight took it."""
    planes = weight.packed.view(-1, weight.out_features, LUT_PLANE // 2, LUT_PLANES).permute(1, 0, 3, 2)
    return planes.flatten(1)[:, : weight.in_features // 2]


def dequantize_lut4(weight: CodeWeight, dtype: torch.dtype) -> torch.Tensor:
    """[N, K]: table[code] * scale, rounded once to dtype."""
    return dequantize_4bit(unpack_lut4(weight), weight.scales.T.contiguous(), weight.table, dtype)


def codes_linear(x: torch.Tensor, weight: CodeWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias. x: [M, K]; bias: [N] or None; returns [M, N], of x's dtype."""
    return functional.linear(x, dequantize_lut4(weight, x.dtype), bias)
