"""Nvfp4Matrix: one matrix of every expert of a layer in 4-bit floats with 8-bit scales, weight-only.

Hopper has no units for 4-bit floats, so activations keep their dtype even where a checkpoint has scales for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.e2m1 import dequantize_nvfp4


@dataclass(frozen=True)
class Nvfp4Matrix:
    """4.5 bits a weight."""

    # [E, N, K / 2] uint8: input 2i of an output in the low half of byte i, input 2i + 1 in the high half
    blocks: torch.Tensor
    # [E, N, K / 16] e4m3
    scales: torch.Tensor
    # [E, halves] fp32: on all scales of the gates, of the ups
    factors: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (E, N, K)."""
        num_experts, n, half = self.blocks.shape
        return num_experts, n, 2 * half

    def dense(self, expert: int | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return one expert's matrix, [N, K]: value times scale and factor in float32, rounded once."""
        factors = self.factors[expert].repeat_interleave(self.blocks.shape[1] // self.factors.shape[1])
        return dequantize_nvfp4(self.blocks[expert], self.scales[expert], factors[:, None]).to(dtype)
