"""Matrices of 4- or 8-bit integers with a scale, and maybe a zero point, per output and group of inputs.

One layout for every checkpoint format that means weight = (code - zero) * scale, repacked once, at load: a 16-bit
word holds `16 / bits` codes of one output, whose inputs are PLANE apart. So a [N, PLANE] tile of words, shifted and
masked, is at once a [N, PLANE] tile of weights over neighbouring inputs, in place: nothing moves between threads.
This file is the specification; kernels/linear/triton_int.py and triton_int_dequantize.py are the twins.

Products of 8-bit floats (e4m3: 4 bits of exponent, 3 of mantissa; arXiv:2209.05433): the torch specification.

A value is its 8-bit float times a scale: of its row of the matrix (or of x, its token), or of its block.

The two ways in which bitsandbytes stores matrices, to the bit: the torch specification.

nf4: 4-bit codes of a table of 16 values, scaled by runs of 64 weights of a row (QLoRA, arXiv:2305.14314, §3).
int8: integers, scaled by rows (LLM.int8(), arXiv:2208.07339, §2). Activations stay as they are, so that none is an
outlier: where the paper multiplies all but the outlier columns in 8 bits, here no column is rounded.

Matrices of 4-bit codes that a table of 16 values explains, laid out for tensor cores. Repacked once, at load.

Bytes stay what bitsandbytes makes of two neighbours of a row; they only move. Four of them, one of each of four planes
of inputs, make a word: so a byte looks up two values at once, side by side as tensor cores want them, and a thread
needs all that it reads. This file is the specification; kernels/linear/triton_lut4.py and triton_codes_dequantize.py
are the twins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

PLANE = 32
BITS = (4, 8)


@dataclass(frozen=True)
class IntWeight:
    """An [N, K] matrix. Inputs of a group are neighbours; where a checkpoint's are not, `order` brings them there."""

    # [num_tiles, N, PLANE] int16: bits [i * bits, (i + 1) * bits) of word r of tile t are the code of input
    # (t * 16 / bits + i) * PLANE + r. The last tile is filled up with codes that inputs past K never meet
    packed: torch.Tensor
    # [num_groups, N] int32: the zero point << 16 | the bits of the scale, so that one load brings both in time
    groups: torch.Tensor
    # [K] int64: which input of the layer comes first, second, …; None: as they are
    order: torch.Tensor | None
    bits: int  # one of BITS
    in_features: int  # K
    scale_dtype: torch.dtype  # float16 or bfloat16

    @property
    def out_features(self) -> int:
        """N."""
        return self.packed.shape[1]

    @property
    def group_size(self) -> int:
        """Inputs of one group; K if there is one."""
        return self.in_features // self.groups.shape[0]

    @property
    def scales(self) -> torch.Tensor:
        """[num_groups, N], of scale_dtype."""
        return self.groups.to(torch.int16).view(self.scale_dtype)

    @property
    def zeros(self) -> torch.Tensor:
        """[num_groups, N] int32."""
        return self.groups >> 16


def make_int_weight(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    *,
    bits: int,
    order: torch.Tensor | None = None,
) -> IntWeight:
    """Pack codes: [N, K] uint8, inputs in the order of their groups; scales: [num_groups, N]; zeros: so, uint8.

    Without zeros they are 2^(bits - 1). fp32 scales become fp16, or bf16 if one is too large or too small for that.
    Waits for the device: for loading only.
    """
    assert bits in BITS
    assert codes.shape[1] % scales.shape[0] == 0
    if scales.dtype not in (torch.float16, torch.bfloat16):
        limits, sizes = torch.finfo(torch.float16), scales.abs()
        fits = bool(((sizes == 0) | ((sizes >= limits.tiny) & (sizes <= limits.max))).all())
        scales = scales.to(torch.float16 if fits else torch.bfloat16)
    high = torch.full_like(scales, 1 << (bits - 1), dtype=torch.int32) if zeros is None else zeros.to(torch.int32)
    low = scales.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    return IntWeight(
        packed=_pack(codes, bits),
        groups=((high << 16) | low).contiguous(),
        order=order,
        bits=bits,
        in_features=codes.shape[1],
        scale_dtype=scales.dtype,
    )


def int_weight_bytes(out_features: int, in_features: int, *, bits: int, num_groups: int) -> int:
    """Bytes that a matrix takes, without an order."""
    num_tiles = -(-in_features // (PLANE * 16 // bits))
    return out_features * (num_tiles * PLANE * 2 + num_groups * 4)


def unpack_int(weight: IntWeight) -> torch.Tensor:
    """[N, K] uint8: the codes, inputs in the order of their groups."""
    shifts = torch.arange(0, 16, weight.bits, device=weight.packed.device, dtype=torch.int16)
    planes = (weight.packed[:, :, None, :] >> shifts[:, None]) & ((1 << weight.bits) - 1)  # [tiles, N, planes, PLANE]
    return planes.permute(1, 0, 2, 3).flatten(1)[:, : weight.in_features].to(torch.uint8)


def dequantize_int(weight: IntWeight, dtype: torch.dtype) -> torch.Tensor:
    """[N, K]: (code - zero) * scale, inputs in the order of their groups, rounded once to dtype."""
    codes = unpack_int(weight).float().unflatten(1, (-1, weight.group_size))  # [N, groups, group_size]
    return ((codes - weight.zeros.T[:, :, None]) * weight.scales.T[:, :, None].float()).flatten(1).to(dtype)


def int_linear(x: torch.Tensor, weight: IntWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias. x: [T, K]; returns [T, N], of x's dtype."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    return functional.linear(x, dequantize_int(weight, x.dtype), bias)


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    num_planes = 16 // bits
    num_outputs, num_inputs = codes.shape
    padded = functional.pad(codes, (0, -num_inputs % (num_planes * PLANE)))
    planes = padded.reshape(num_outputs, -1, num_planes, PLANE).permute(2, 1, 0, 3)  # [planes, tiles, N, PLANE]
    packed = torch.zeros(planes.shape[1:], dtype=torch.int32, device=codes.device)
    for index in range(num_planes):
        packed |= planes[index].to(torch.int32) * (1 << (index * bits))
    return packed.to(torch.int16)  # keeps the low half


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


LUT_PLANE = 32  # inputs
LUT_PLANES = 4  # of a tile
LUT_TILE = LUT_PLANES * LUT_PLANE  # inputs
_BYTES = 256


@dataclass(frozen=True)
class Lut4Weight:
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


def make_lut4_weight(packed: torch.Tensor, scales: torch.Tensor, table: torch.Tensor, dtype: torch.dtype) -> Lut4Weight:
    """Repack what kernels.linear.reference.quantize_nf4 returns, or a checkpoint holds. dtype: of x, for `pairs`."""
    n, half = packed.shape
    assert half * 2 == BLOCK * scales.shape[1]
    planes = functional.pad(packed, (0, -half % (LUT_TILE // 2))).view(n, -1, LUT_PLANES, LUT_PLANE // 2)
    index = torch.arange(_BYTES, device=table.device)
    return Lut4Weight(
        packed=planes.permute(1, 0, 3, 2).reshape(-1, n, LUT_TILE // 2).contiguous(),
        scales=scales.T.contiguous(),
        table=table,
        pairs=table[torch.stack((index >> 4, index & 15), dim=1)].to(dtype),
        in_features=2 * half,
    )


def lut4_weight_bytes(n: int, k: int) -> int:
    """Bytes of a matrix, without its table."""
    return -(-k // LUT_TILE) * n * (LUT_TILE // 2) + 4 * n * k // BLOCK


def unpack_lut4(weight: Lut4Weight) -> torch.Tensor:
    """[N, K / 2] uint8, as make_lut4_weight took it."""
    planes = weight.packed.view(-1, weight.out_features, LUT_PLANE // 2, LUT_PLANES).permute(1, 0, 3, 2)
    return planes.flatten(1)[:, : weight.in_features // 2]


def dequantize_lut4(weight: Lut4Weight, dtype: torch.dtype) -> torch.Tensor:
    """[N, K]: table[code] * scale, rounded once to dtype."""
    return dequantize_4bit(unpack_lut4(weight), weight.scales.T.contiguous(), weight.table, dtype)


def lut4_linear(x: torch.Tensor, weight: Lut4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias. x: [M, K]; bias: [N] or None; returns [M, N], of x's dtype."""
    return functional.linear(x, dequantize_lut4(weight, x.dtype), bias)
