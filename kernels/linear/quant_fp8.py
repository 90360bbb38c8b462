"""Products of 8-bit floats (e4m3: 4 bits of exponent, 3 of mantissa; arXiv:2209.05433): the torch specification.

A value is its 8-bit float times a scale: of its row of the matrix (or of x, its token), or of its block.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
MIN_SCALE = 1e-12  # of rows of zeros, or nearly so


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale each row to the range of e4m3. x: [M, K], any float; returns [M, K] e4m3 and scales [M] fp32."""
    wide = x.float()
    scales = (wide.abs().amax(-1) / FP8_MAX).clamp(min=MIN_SCALE)
    return _to_fp8(wide / scales[:, None]), scales


def quantize_by(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale all by what is known ([] fp32), which is returned for each row; what it does not reach saturates."""
    return _to_fp8(x.float() / scale), scale.expand(x.shape[0])


def quantize_groups(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale each run of `size` columns of each row. Returns [M, K] e4m3 and scales [M, ceil(K / size)] fp32."""
    num_rows, k = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -k % size)).view(num_rows, -1, size)
    scales = (padded.abs().amax(-1) / FP8_MAX).clamp(min=MIN_SCALE)
    return _to_fp8(padded / scales[..., None]).flatten(1)[:, :k].contiguous(), scales


def quantize_blocks(w: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale each block of a matrix. Returns [N, K] e4m3 and scales [ceil(N / rows), ceil(K / columns)] fp32."""
    n, k = w.shape
    padded = torch.nn.functional.pad(w.float(), (0, -k % columns, 0, -n % rows))
    blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    scales = (blocks.abs().amax((1, 3)) / FP8_MAX).clamp(min=MIN_SCALE)
    values = _to_fp8(blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)
    return values[:n, :k].contiguous(), scales


def dequantize_blocks(w: torch.Tensor, scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[N, K] fp32 of quantize_blocks's two tensors."""
    n, k = w.shape
    wide = scales.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    return w.float() * wide


def rows_linear(
    x: torch.Tensor, x_scales: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """x @ w.T + bias, scaled by row. x: [M, K] e4m3; x_scales: [M]; w: [N, K] e4m3; w_scales: [N]; returns dtype."""
    out = (x.float() @ w.float().T) * x_scales[:, None] * w_scales
    return (out if bias is None else out + bias.float()).to(dtype)


def blocks_linear(
    x: torch.Tensor, x_scales: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, bias: torch.Tensor | None,
    dtype: torch.dtype, *, rows: int, columns: int,
) -> torch.Tensor:  # fmt: skip
    """x @ w.T + bias. x, x_scales: as quantize_groups(x, columns) returns; w, w_scales: as quantize_blocks."""
    wide = x.float() * x_scales.repeat_interleave(columns, 1)[:, : x.shape[1]]
    out = wide @ dequantize_blocks(w, w_scales, rows, columns).T
    return (out if bias is None else out + bias.float()).to(dtype)


def _to_fp8(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)
