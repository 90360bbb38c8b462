"""Matrices of 4-bit codes that a table of 16 values explains, laid out to be looked up in registers.

Repacked once, at load. A byte holds two neighbours of a row, and four bytes, one of each of four planes of inputs, make
a word: so 16 bits of it select 4 values by byte permutations of the table, and two neighbours come out side by side as
tensor cores want them. Codes are renumbered, and the table with them, where that spares instructions (_pair_up).
This file is the specification; kernels/triton_codes_gemm.py and triton_codes_dequantize.py are the twins.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.quant_bnb import BLOCK

PLANES = 4
PLANE_SIZES = (32, 64)  # inputs of one
_CODES = 16
_SIGN = 0x80


@dataclass(frozen=True)
class CodeWeight:
    """An [N, K] matrix, K a multiple of 64, for products with x of one 16-bit dtype."""

    # [num_tiles, N, 2 * plane] uint8: byte 4c + p of tile t has inputs (t * 4 + p) * plane + 2c in its lower half and
    # + 2c + 1 in its upper one. The last tile is filled up with codes that inputs past K never meet
    packed: torch.Tensor
    # [K / 64, N] fp32
    scales: torch.Tensor
    # [16] fp32: what the codes of `packed` mean
    table: torch.Tensor
    # [16] of x's dtype: so too, rounded
    rounded: torch.Tensor
    # [8] int32: the bytes of `rounded` as registers: of codes 0 to 7 and 8 to 15 the lower ones, then the upper ones
    registers: torch.Tensor
    # [256] int32: what both halves of a byte mean, side by side
    pairs: torch.Tensor
    # Codes i and i + 8 agree in the top bit of each byte, and `registers` are made for that (see _toggled)
    is_paired: bool
    in_features: int  # K

    @property
    def plane(self) -> int:
        """Inputs of a plane."""
        return self.packed.shape[2] // 2

    @property
    def out_features(self) -> int:
        """N."""
        return self.packed.shape[1]


def make_code_weight(
    codes: torch.Tensor,
    scales: torch.Tensor,
    table: torch.Tensor,
    dtype: torch.dtype,
    *,
    plane: int = 32,
    is_paired: bool = True,
) -> CodeWeight:
    """Pack codes: [N, K] uint8; scales: [N, K / 64] fp32; table: [16] fp32; dtype: bf16 or fp16, of x.

    is_paired: if the table can be. Waits for the device: for loading only.
    """
    assert plane in PLANE_SIZES
    assert codes.shape[1] == BLOCK * scales.shape[1]
    words = _as_words(table.to(dtype))
    found = _pair_up(words) if is_paired else None
    if found is not None:
        order, words = found
        new_codes = torch.empty(_CODES, dtype=torch.uint8)
        new_codes[torch.tensor(order)] = torch.arange(_CODES, dtype=torch.uint8)
        codes = new_codes.to(codes.device)[codes.int()]
        table = table[torch.tensor(order, device=table.device)]
    values = torch.tensor(words, dtype=torch.int64)
    index = torch.arange(_CODES * _CODES)
    pairs = values[index % _CODES] | (values[index // _CODES] << 16)
    return CodeWeight(
        packed=_pack(codes, plane),
        scales=scales.T.contiguous(),
        table=table,
        rounded=table.to(dtype),
        registers=_registers(words, is_paired=found is not None).to(codes.device),
        pairs=pairs.to(torch.int32).to(codes.device),
        is_paired=found is not None,
        in_features=codes.shape[1],
    )


def unpack(weight: CodeWeight) -> torch.Tensor:
    """[N, K] uint8: the codes."""
    num_tiles, n, _ = weight.packed.shape
    planes = weight.packed.view(num_tiles, n, weight.plane // 2, PLANES).permute(1, 0, 3, 2)
    codes = torch.stack((planes & 15, planes >> 4), dim=-1)  # [N, tiles, planes, plane / 2, 2]
    return codes.flatten(1)[:, : weight.in_features]


def dequantize(weight: CodeWeight, dtype: torch.dtype) -> torch.Tensor:
    """[N, K]: table[code] * scale, rounded once to dtype."""
    values = weight.table[unpack(weight).int()].unflatten(1, (-1, BLOCK))
    return (values * weight.scales.T[..., None]).flatten(1).to(dtype)


def codes_linear(x: torch.Tensor, weight: CodeWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias. x: [M, K]; bias: [N] or None; returns [M, N], of x's dtype."""
    return functional.linear(x, dequantize(weight, x.dtype), bias)


def _pack(codes: torch.Tensor, plane: int) -> torch.Tensor:
    n, k = codes.shape
    padded = functional.pad(codes, (0, -k % (PLANES * plane)))
    halves = padded.view(n, -1, PLANES, plane // 2, 2)  # [N, tiles, planes, plane / 2, 2]
    halved = halves[..., 0] | (halves[..., 1] << 4)
    return halved.permute(1, 0, 3, 2).reshape(halved.shape[1], n, 2 * plane).contiguous()


def _as_words(values: torch.Tensor) -> list[int]:
    """The bits of 16-bit values."""
    return [word & 0xFFFF for word in values.contiguous().view(torch.int16).tolist()]


def _pair_up(words: list[int]) -> tuple[list[int], list[int]] | None:
    """An order of the codes in which those 8 apart agree in the top bits of both bytes, and their values so ordered.

    Each zero may take either sign. None if there is no such order.
    """
    zeros = [code for code, word in enumerate(words) if not word & 0x7FFF]
    for signs in itertools.product((0, 0x8000), repeat=len(zeros)):
        signed = words.copy()
        for code, sign in zip(zeros, signs, strict=True):
            signed[code] = sign
        classes: dict[int, list[int]] = {}
        for code, word in enumerate(signed):
            classes.setdefault(word & 0x8080, []).append(code)
        if all(len(codes) % 2 == 0 for codes in classes.values()):
            order = [code for first in (0, 1) for codes in classes.values() for code in codes[first::2]]
            return order, [signed[code] for code in order]
    return None


def _registers(words: list[int], *, is_paired: bool) -> torch.Tensor:
    found = []
    for shift in (0, 8):
        column = [(word >> shift) & 0xFF for word in words]
        if is_paired:
            column = _toggled(column)
        found += [int.from_bytes(bytes(column[i : i + 4]), "little", signed=True) for i in range(0, _CODES, 4)]
    return torch.tensor(found, dtype=torch.int32)


def _toggled(column: list[int]) -> list[int]:
    """The bytes for two lookups whose exclusive or is the byte of any code.

    A byte permutation gives, where the top bit of its selector is set, the sign of the byte eight times. So the lower
    table, asked for code i + 8, gives 0x00 or 0xFF: the upper one has its byte the other way round for the latter.
    The upper table, asked with that bit flipped, gives 0x00 for code i, since all its signs are cleared.
    """
    half = _CODES // 2
    lower, upper = column[:half], column[half:]
    assert all((a ^ b) & _SIGN == 0 for a, b in zip(lower, upper, strict=True))
    return lower + [byte ^ 0xFF if byte & _SIGN else byte for byte in upper]
