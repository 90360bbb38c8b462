"""Random matrices of codes, shared by the specification's tests, the interpreter's cases and the GPU tests."""

from __future__ import annotations

import torch

from kernels.linear.reference import BLOCK, NF4_TABLE, Lut4Weight, dequantize_4bit, make_lut4_weight

_FP4_MAGNITUDES = (0.0, 0.0052083333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
TABLES = {
    "nf4": NF4_TABLE,
    "fp4": (*_FP4_MAGNITUDES, *(-value for value in _FP4_MAGNITUDES)),
}


def lut4_problem(
    n: int, k: int, *, dtype: torch.dtype, table: str = "nf4", device: str = "cpu"
) -> tuple[Lut4Weight, torch.Tensor]:
    """A weight, and the [N, K] float64 matrix that the table, rounded to dtype, makes of its codes."""
    generator = torch.Generator(device).manual_seed(n * k)
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device, generator=generator)
    scales = torch.rand(n, k // BLOCK, device=device, generator=generator).add(0.5).mul(0.01)
    values = torch.tensor(TABLES[table], device=device)
    dense = dequantize_4bit(packed, scales.double(), values.to(dtype).double(), torch.float64)
    return make_lut4_weight(packed, scales, values, dtype), dense
