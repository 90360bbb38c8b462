"""The two ways in which bitsandbytes stores matrices, to the bit: the torch specification.

nf4: 4-bit codes of a table of 16 values, scaled by runs of 64 weights of a row (QLoRA, arXiv:2305.14314, §3).
int8: integers, scaled by rows (LLM.int8(), arXiv:2208.07339, §2). Activations stay as they are, so that none is an
outlier: where the paper multiplies all but the outlier columns in 8 bits, here no column is rounded.
"""

from __future__ import annotations

import torch

# Quantiles of the normal distribution, 0 among them (QLoRA, appendix E)
NF4_TABLE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
BLOCK = 64  # weights of one scale
_INT8_MAX = 127.0
_LEAST = 1e-38  # what a block of zeros is divided by


def quantize_nf4(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest codes. w: [N, K], K a multiple of 64; returns [N, K / 2] uint8 and the scales [N, K / 64] fp32.

    A byte has two neighbours of a row, the first in its upper half.
    """
    table = torch.tensor(NF4_TABLE, device=w.device)
    blocks = w.float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(-1)
    shares = blocks * (1.0 / scales.clamp(min=_LEAST))[..., None]
    codes = torch.bucketize(shares, (table[:-1] + table[1:]) / 2).to(torch.uint8).flatten(1)
    return (codes[:, 0::2] << 4) | codes[:, 1::2], scales


def dequantize_4bit(
    packed: torch.Tensor, scales: torch.Tensor, table: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """[N, K] of dtype. packed: [N, K / 2] uint8; scales: [N, K / block] fp32, of one block size; table: [16] fp32."""
    n, half = packed.shape
    codes = torch.stack((packed >> 4, packed & 15), dim=-1)
    values = table[codes.flatten().int()].view(n, scales.shape[1], 2 * half // scales.shape[1])
    return (values * scales[..., None]).flatten(1).to(dtype)


def quantize_int8(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest integers of each row. w: [N, K]; returns [N, K] int8 and the rows' largest magnitudes [N] fp32."""
    wide = w.float()
    largest = wide.abs().amax(1)
    values = torch.round(wide * (_INT8_MAX / largest.clamp(min=_LEAST))[:, None])
    return values.to(torch.int8), largest


def dequantize_int8(values: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[N, K] of dtype. values, largest: as quantize_int8 returns."""
    return (values.float() * (largest / _INT8_MAX)[:, None]).to(dtype)


def linear_int8(
    x: torch.Tensor, values: torch.Tensor, largest: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x @ w.T + bias, scaled in fp32 behind the product. x: [M, K]; returns [M, N] of its dtype."""
    out = (x.float() @ values.float().T) * (largest / _INT8_MAX)
    return (out if bias is None else out + bias.float()).to(x.dtype)
