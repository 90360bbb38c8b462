"""The ops of 8-bit floats that models call; each picks its GPU twin where there is one, else torch.

Specification: kernels/quant_fp8.py.
"""

from __future__ import annotations

import torch

from kernels import quant_fp8


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.quant_fp8.quantize_rows."""
    return quant_fp8.quantize_rows(x)


def quantize_whole(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.quant_fp8.quantize_whole."""
    return quant_fp8.quantize_whole(x)


def quantize_by(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.quant_fp8.quantize_by."""
    return quant_fp8.quantize_by(x, scale)


class Fp8Product:
    """See kernels.quant_fp8.rows_linear."""

    def __call__(
        self,
        x: torch.Tensor,
        x_scales: torch.Tensor,
        w: torch.Tensor,
        w_scales: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Returns [M, N] of dtype."""
        return quant_fp8.rows_linear(x, x_scales, w, w_scales, bias, dtype)
