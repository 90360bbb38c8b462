"""ExpertMatrix: one matrix of every expert of a layer, dense or packed. The products dequantise what they read.

MXFP4 stores 4-bit floats (e2m1: 2 bits of exponent, 1 of mantissa) in blocks of 32 inputs with a power of two as scale
(OCP Microscaling Formats 1.0, §5). Fp8 stores 8-bit floats (e4m3) with a scale for each block of outputs × inputs
(DeepSeek-V3, arXiv:2412.19437, §3.3), or for each output. Integers are in storage_int.py, NVFP4 in storage_nvfp4.py,
NF4 and FP4 in storage_lut4.py. All are weight-only here: activations keep their dtype. The functions are the torch
specification; the Triton twin is load_tile in kernels/moe/triton_storage.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.e2m1 import dequantize_mxfp4


@dataclass(frozen=True)
class Mxfp4Matrix:
    """4.25 bits a weight."""

    # [E, N, K / 2] uint8: input 2i of an output in the low half of byte i, input 2i + 1 in the high half
    blocks: torch.Tensor
    # [E, N, K / 32] uint8: the exponent of two, plus 127
    scales: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (E, N, K)."""
        num_experts, n, half = self.blocks.shape
        return num_experts, n, 2 * half

    def dense(self, expert: int | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return one expert's matrix, [N, K]. Exact in bfloat16 and float32; float16 has not all exponents."""
        return dequantize_mxfp4(self.blocks[expert], self.scales[expert]).to(dtype)


@dataclass(frozen=True)
class Fp8Matrix:
    """8 bits a weight and a float32 for each block; blocks do not cross from the gates to the ups."""

    # [E, N, K] e4m3
    values: torch.Tensor
    # [E, halves, ceil(N / halves / rows), ceil(K / columns)] fp32
    scales: torch.Tensor
    rows: int  # of a block; the last block of a half may have fewer, and so may the last of the columns
    columns: int  # K, with rows of 1: a scale for each output

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (E, N, K)."""
        num_experts, n, k = self.values.shape
        return num_experts, n, k

    def dense(self, expert: int | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return one expert's matrix, [N, K]: value times scale in float32, rounded once."""
        num_halves = self.scales.shape[1]
        values = self.values[expert].float().unflatten(0, (num_halves, -1))
        scales = self.scales[expert].repeat_interleave(self.rows, 1)[:, : values.shape[1]]
        scales = scales.repeat_interleave(self.columns, 2)[..., : values.shape[2]]
        return (values * scales).flatten(0, 1).to(dtype)


class PackedMatrix(Protocol):
    """One matrix of every expert, packed."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (E, N, K)."""
        ...

    def dense(self, expert: int | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return one expert's matrix, [N, K]."""
        ...


# A tensor is [E, N, K] of the activations' dtype
ExpertMatrix = torch.Tensor | PackedMatrix


def dense_matrix(matrix: ExpertMatrix, expert: int | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return one expert's matrix, [N, K]."""
    return matrix[expert].to(dtype) if isinstance(matrix, torch.Tensor) else matrix.dense(expert, dtype)
