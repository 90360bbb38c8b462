"""Products with quantised weights: the torch specification of the integer, fp8, bitsandbytes and lut4 kernels.

IntWeight: 4- or 8-bit integers with a scale, and optionally a zero point, per output and group of inputs. Every
checkpoint format with weight = (value - zero) * scale is repacked once, on load, to one layout: a 16-bit word holds
`16 / bits` integers of one output, whose inputs are PLANE apart. A [N, PLANE] tile of words, shifted and masked, is
then a [N, PLANE] tile of weights over neighbouring inputs, without moving data between threads. Twin:
kernels/linear/triton_int.py.

fp8: 8-bit floats (e4m3: 4 bits of exponent, 3 of mantissa; arXiv:2209.05433) times a scale: of the row of the matrix,
of the token of x, or of the block. Twin: kernels/linear/triton_fp8.py.

bitsandbytes, bit-exact: nf4 stores 4-bit indices of a table of 16 values, scaled by runs of 64 weights of a row (QLoRA,
arXiv:2305.14314, §3); int8 stores integers scaled by row (LLM.int8(), arXiv:2208.07339, §2). Activations are not
quantised, so there are no outliers: the paper multiplies all but the outlier columns in 8 bits, here no column is
rounded. Twin: kernels/linear/triton_bitsandbytes.py.

Lut4Weight: 4-bit lookup-table weights, repacked once, on load, for tensor cores. Each byte keeps bitsandbytes's pair of
neighbours of a row; only the bytes move. A word has four bytes, one from each of four planes of inputs. So one byte
looks up two values at once, side by side as tensor cores need them, and a thread uses everything it reads. Twin:
kernels/linear/triton_lut4.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

PLANE = 32
BITS = (4, 8)
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
MIN_SCALE = 1e-12  # least scale, for rows of (nearly) zeros
# Quantiles of the normal distribution, 0 among them (QLoRA, appendix E)
NF4_TABLE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
BLOCK = 64  # weights per scale
_INT8_MAX = 127.0
_LEAST = 1e-38  # divisor of a block of zeros
LUT_PLANE = 32  # inputs
LUT_PLANES = 4  # of a tile
LUT_TILE = LUT_PLANES * LUT_PLANE  # inputs
_BYTES = 256


@dataclass(frozen=True)
class IntWeight:
    """An [N, K] matrix with groups of neighbouring inputs; `order` permutes inputs where the checkpoint's are not."""

    # [num_tiles, N, PLANE] int16: bits [i * bits, (i + 1) * bits) of word r of tile t are the integer of input
    # (t * 16 / bits + i) * PLANE + r. The last tile is padded with values that no input meets
    packed: torch.Tensor
    # [num_groups, N] int32: the zero point << 16 | the bits of the scale, so that one load brings both in time
    groups: torch.Tensor
    # [K] int64: the layer's input at each position; None: unchanged order
    order: torch.Tensor | None
    bits: int  # one of BITS
    in_features: int  # K
    scale_dtype: torch.dtype  # float16 or bfloat16

    @property
    def out_features(self) -> int:
        """Number of outputs, N."""
        return self.packed.shape[1]

    @property
    def group_size(self) -> int:
        """Inputs per group; K for a single group."""
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
    """Pack values (codes): [N, K] uint8, inputs in group order; scales: [num_groups, N]; zeros: the same shape, uint8.

    Without zeros, the zero points are 2^(bits - 1). Scales: see to_half. For loading only.
    """
    assert bits in BITS
    assert codes.shape[1] % scales.shape[0] == 0
    scales = to_half(scales)
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


def to_half(scales: torch.Tensor) -> torch.Tensor:
    """Return fp32 scales as fp16, or as bf16 if one is too large or too small for fp16; 16-bit ones unchanged.

    Waits for the device if they are fp32.
    """
    if scales.dtype in (torch.float16, torch.bfloat16):
        return scales
    limits, sizes = torch.finfo(torch.float16), scales.abs()
    fits = bool(((sizes == 0) | ((sizes >= limits.tiny) & (sizes <= limits.max))).all())
    return scales.to(torch.float16 if fits else torch.bfloat16)


def int_weight_bytes(out_features: int, in_features: int, *, bits: int, num_groups: int) -> int:
    """Return the bytes of a matrix without an order."""
    num_tiles = -(-in_features // (PLANE * 16 // bits))
    return out_features * (num_tiles * PLANE * 2 + num_groups * 4)


def unpack_int(weight: IntWeight) -> torch.Tensor:
    """Unpack to [N, K] uint8, inputs in group order."""
    shifts = torch.arange(0, 16, weight.bits, device=weight.packed.device, dtype=torch.int16)
    planes = (weight.packed[:, :, None, :] >> shifts[:, None]) & ((1 << weight.bits) - 1)  # [tiles, N, planes, PLANE]
    return planes.permute(1, 0, 2, 3).flatten(1)[:, : weight.in_features].to(torch.uint8)


def dequantize_int(weight: IntWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return [N, K]: (value - zero) * scale, inputs in group order, rounded once to dtype."""
    codes = unpack_int(weight).float().unflatten(1, (-1, weight.group_size))  # [N, groups, group_size]
    return ((codes - weight.zeros.T[:, :, None]) * weight.scales.T[:, :, None].float()).flatten(1).to(dtype)


def int_linear(x: torch.Tensor, weight: IntWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias. x: [T, K]; returns [T, N], of x's dtype."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    return functional.linear(x, dequantize_int(weight, x.dtype), bias)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale each row to the range of e4m3. x: [M, K], any float; returns [M, K] e4m3 and scales [M] fp32."""
    wide = x.float()
    scales = (wide.abs().amax(-1) / FP8_MAX).clamp(min=MIN_SCALE)
    return _to_fp8(wide / scales[:, None]), scales


def quantize_by(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale all values by a known scale ([] fp32), returned for each row; values beyond its range saturate."""
    return _to_fp8(x.float() / scale), scale.expand(x.shape[0])


def quantize_groups(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale each run of `size` columns of each row. Returns [M, K] e4m3 and scales [M, ceil(K / size)] fp32."""
    num_rows, k = x.shape
    padded = functional.pad(x.float(), (0, -k % size)).view(num_rows, -1, size)
    scales = (padded.abs().amax(-1) / FP8_MAX).clamp(min=MIN_SCALE)
    return _to_fp8(padded / scales[..., None]).flatten(1)[:, :k].contiguous(), scales


def quantize_blocks(w: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale each block of a matrix. Returns [N, K] e4m3 and scales [ceil(N / rows), ceil(K / columns)] fp32."""
    n, k = w.shape
    padded = functional.pad(w.float(), (0, -k % columns, 0, -n % rows))
    blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    scales = (blocks.abs().amax((1, 3)) / FP8_MAX).clamp(min=MIN_SCALE)
    values = _to_fp8(blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)
    return values[:n, :k].contiguous(), scales


def dequantize_blocks(w: torch.Tensor, scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return [N, K] fp32 from the two tensors of quantize_blocks."""
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


def quantize_nf4(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to the nearest nf4 values. w: [N, K], K a multiple of 64.

    Returns table indices [N, K / 2] uint8 and the scales [N, K / 64] fp32. A byte holds two neighbours of a row, the
    first in its upper half.
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
    """Return [N, K] in dtype. packed: [N, K / 2] uint8; scales: [N, K / block] fp32; table: [16] fp32."""
    n, half = packed.shape
    codes = torch.stack((packed >> 4, packed & 15), dim=-1)
    values = table[codes.flatten().int()].view(n, scales.shape[1], 2 * half // scales.shape[1])
    return (values * scales[..., None]).flatten(1).to(dtype)


def quantize_int8(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row to integers. w: [N, K]; returns [N, K] int8 and the rows' largest magnitudes [N] fp32."""
    wide = w.float()
    largest = wide.abs().amax(1)
    values = torch.round(wide * (_INT8_MAX / largest.clamp(min=_LEAST))[:, None])
    return values.to(torch.int8), largest


def dequantize_int8(values: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [N, K] in dtype. values, largest: as quantize_int8 returns."""
    return (values.float() * (largest / _INT8_MAX)[:, None]).to(dtype)


def linear_int8(
    x: torch.Tensor, values: torch.Tensor, largest: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x @ w.T + bias, scaled in fp32 after the product. x: [M, K]; returns [M, N] of its dtype."""
    out = (x.float() @ values.float().T) * (largest / _INT8_MAX)
    return (out if bias is None else out + bias.float()).to(x.dtype)


@dataclass(frozen=True)
class Lut4Weight:
    """An [N, K] matrix of 4-bit lookup-table indices, K a multiple of 64."""

    # [num_tiles, N, 64] uint8: byte 4c + p of tile t has inputs (t * 4 + p) * 32 + 2c, in its upper half, and
    # + 2c + 1, in its lower one. The last tile is padded with indices that no input meets
    packed: torch.Tensor
    # [K / 64, N] fp32
    scales: torch.Tensor
    # [16] fp32: the lookup table
    table: torch.Tensor
    # [256, 2] of x's dtype: the values of both halves of a byte, rounded
    pairs: torch.Tensor
    in_features: int  # K

    @property
    def num_tiles(self) -> int:
        """Number of tiles along K."""
        return self.packed.shape[0]

    @property
    def out_features(self) -> int:
        """Number of outputs, N."""
        return self.packed.shape[1]


def make_lut4_weight(packed: torch.Tensor, scales: torch.Tensor, table: torch.Tensor, dtype: torch.dtype) -> Lut4Weight:
    """Repack the tensors of quantize_nf4 or of a checkpoint. dtype: of x, for `pairs`."""
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
    """Return the bytes of a matrix without its table."""
    return -(-k // LUT_TILE) * n * (LUT_TILE // 2) + 4 * n * k // BLOCK


def unpack_lut4(weight: Lut4Weight) -> torch.Tensor:
    """Return [N, K / 2] uint8, the argument of make_lut4_weight."""
    planes = weight.packed.view(-1, weight.out_features, LUT_PLANE // 2, LUT_PLANES).permute(1, 0, 3, 2)
    return planes.flatten(1)[:, : weight.in_features // 2]


def dequantize_lut4(weight: Lut4Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return [N, K]: table[index] * scale, rounded once to dtype."""
    return dequantize_4bit(unpack_lut4(weight), weight.scales.T.contiguous(), weight.table, dtype)


def lut4_linear(x: torch.Tensor, weight: Lut4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias. x: [M, K]; bias: [N] or None; returns [M, N], of x's dtype."""
    return functional.linear(x, dequantize_lut4(weight, x.dtype), bias)


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    num_planes = 16 // bits
    num_outputs, num_inputs = codes.shape
    padded = functional.pad(codes, (0, -num_inputs % (num_planes * PLANE)))
    planes = padded.reshape(num_outputs, -1, num_planes, PLANE).permute(2, 1, 0, 3)  # [planes, tiles, N, PLANE]
    packed = torch.zeros(planes.shape[1:], dtype=torch.int32, device=codes.device)
    for index in range(num_planes):
        packed |= planes[index].to(torch.int32) * (1 << (index * bits))
    return packed.to(torch.int16)  # keeps the low half


def _to_fp8(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)
