"""Lut4Matrix: one matrix of every expert of a layer in bitsandbytes' 4 bits (NF4, FP4), weight-only.

Values are indices of a table of 16, scaled by runs of 64 inputs (QLoRA, arXiv:2305.14314, §3). The table is one of
those below, so that kernels have it as constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kernels.linear.reference import NF4_TABLE, dequantize_4bit

# bitsandbytes' FP4 by code, each rounded to float32; the fourth bit is the sign
_FP4_SIZES = (0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25)
FP4_TABLE = (*_FP4_SIZES, *(-size for size in _FP4_SIZES))
TABLES = {"nf4": NF4_TABLE, "fp4": FP4_TABLE}


@dataclass(frozen=True)
class Lut4Matrix:
    """4.5 bits a weight."""

    # [E, N, K / 2] uint8: input 2i of an output in the high half of byte i, input 2i + 1 in the low half
    packed: torch.Tensor
    # [E, N, K / 64] fp32
    scales: torch.Tensor
    kind: Literal["nf4", "fp4"]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (E, N, K)."""
        num_experts, n, half = self.packed.shape
        return num_experts, n, 2 * half

    def dense(self, expert: int | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return one expert's matrix, [N, K]: value times scale in float32, rounded once."""
        table = torch.tensor(TABLES[self.kind], device=self.packed.device)
        return dequantize_4bit(self.packed[expert], self.scales[expert], table, dtype)
