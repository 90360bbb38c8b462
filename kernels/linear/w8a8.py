"""Products of 8-bit integers: the torch specification. Weights are scaled by output, activations by token or by tensor.

Sums of integers are exact; scales multiply them in fp32. Twin: kernels/linear/triton_scaled8.py.
"""

from __future__ import annotations

import torch

from kernels.linear.reference import MIN_SCALE

INT8_MAX = 127.0
# Inputs whose sum of products float32 has exactly: 1024 * 127 * 128 is below 2 ** 24
_EXACT_INPUTS = 1024
_CACHED_ROWS = 128


def quantize_rows_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row to integers. x: [M, K], any float; returns [M, K] int8 and scales [M] fp32.

    A row that is not finite has integers of no meaning, and a scale that is not finite: so is its product.
    """
    wide = x.float()
    scales = (wide.abs().amax(-1) / INT8_MAX).clamp(min=MIN_SCALE)
    return _round(wide / scales[:, None]), scales


def quantize_matrix_int8(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As quantize_rows_int8, of a weight matrix: on the CPU in pieces whose fp32 numbers stay in a core's cache."""
    if w.device.type != "cpu":
        return quantize_rows_int8(w)
    pieces = [quantize_rows_int8(piece) for piece in w.split(_CACHED_ROWS)]
    return torch.cat([values for values, _ in pieces]), torch.cat([scales for _, scales in pieces])


def quantize_by_int8(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round all values by a known scale ([] fp32), returned for each row; values beyond its range saturate."""
    return _round(x.float() / scale), scale.expand(x.shape[0])


def int8_linear(
    x: torch.Tensor, x_scales: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """x @ w.T + bias. x: [M, K] int8; x_scales: [M]; w: [N, K] int8; w_scales: [N]; bias: [N]; returns dtype [M, N].

    Not in float64, which Apple GPUs lack and CPUs multiply slowly.
    """
    sums = torch.zeros(x.shape[0], w.shape[0], dtype=torch.int32, device=x.device)
    for start in range(0, x.shape[1], _EXACT_INPUTS):
        columns = slice(start, start + _EXACT_INPUTS)
        sums += (x[:, columns].float() @ w[:, columns].float().T).int()
    out = sums.float() * x_scales[:, None] * w_scales
    return (out if bias is None else out + bias.float()).to(dtype)


def _round(x: torch.Tensor) -> torch.Tensor:
    return x.round().clamp(-INT8_MAX, INT8_MAX).nan_to_num(0.0).to(torch.int8)
