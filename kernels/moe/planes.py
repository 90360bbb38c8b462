"""PlanesMatrix: packed experts arranged for the registers of tensor cores. Read by kernels/moe/triton_planes.py.

A group is 128 inputs of one output. Its codes are cut into planes of 32 inputs, and word j of 16 bits holds code j of
several planes: four planes of 4 bits, or two of 8 bits, so that a group is one or two runs of 32 words. Two words side
by side hold two inputs side by side of every plane, which is how a thread holds the operand of a 16-bit product: with a
few operations on 32 bits two codes become two values, and none has to move to another thread.

For products in bfloat16, to which every value of a code times its power of two, and every 4-bit integer less its zero
point, is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from kernels.moe.storage import ExpertMatrix, Fp8Matrix, Mxfp4Matrix
from kernels.moe.storage_int import IntMatrix, pack_codes

GROUP, PLANE = 128, 32
# Bits of a word that hold the bits of each plane's code, the sign first. Those of the first three planes lie as in a
# bfloat16, whose sign, lowest bits of the exponent and highest bit of the mantissa they become, and 3 bits apart
_E2M1_BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))
_INT4_BITS = ((3, 2, 1, 0), (7, 6, 5, 4), (11, 10, 9, 8), (15, 14, 13, 12))
_E4M3_BITS = ((7, 6, 5, 4, 3, 2, 1, 0), (15, 14, 13, 12, 11, 10, 9, 8))
_MAX_E8M0 = 128  # a scale of 2: times the 2^126 that a code's bits lack, a larger one is no bfloat16
_NAN_E4M3 = 127
_PARTS = {32: 4, 64: 2}  # of a group of integers, by the inputs that share a scale if those are fewer


@dataclass(frozen=True)
class PlanesMatrix:
    """One matrix of every expert, [E, N, K]; inputs past K have the code 0."""

    kind: Literal["mxfp4", "fp8", "int4"]
    # [E, K / 128 rounded up, words / 32, N, 32] int16; words of a group: 32 of 4 bits, 64 of 8 bits
    words: torch.Tensor
    # mxfp4: [E, K / 128 rounded up, N] int32, the four planes' bytes. fp8: those of Fp8Matrix, fp32. int4: IntMatrix's
    # groups, [E, its words of an output, N] int32, and as many more of 0 as the last 128 inputs lack
    scales: torch.Tensor
    in_features: int
    # Outputs and inputs that share a scale of fp8 or int4
    rows: int = 1
    columns: int = PLANE
    # As of IntMatrix
    scale_dtype: torch.dtype = torch.float32
    has_zeros: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (E, N, K)."""
        return self.words.shape[0], self.words.shape[3], self.in_features

    def dense(self, expert: int | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return one expert's matrix, [N, K]; see the matrix that it was made of."""
        return self.unpack(expert).dense(0, dtype)

    def unpack(self, expert: int | torch.Tensor) -> Mxfp4Matrix | Fp8Matrix | IntMatrix:
        """Return one expert as the matrix that it was made of, with E of 1."""
        words = self.words[expert].int() & 0xFFFF  # [groups, runs, N, 32]
        planes = torch.stack([_gather(words, bits) for bits in _bits(self.kind)], dim=2)
        # [groups, runs, planes, N, 32] → [N, K]
        codes = planes.permute(3, 0, 1, 2, 4).flatten(1)[:, : self.in_features].to(torch.uint8)
        if self.kind == "fp8":
            values = codes.view(torch.float8_e4m3fn)
            return Fp8Matrix(values[None], self.scales[expert][None], self.rows, self.columns)
        if self.kind == "int4":
            num_groups = self.in_features // self.columns
            num_words = num_groups if self.has_zeros else -(-num_groups // 2)
            groups = self.scales[expert][:num_words].T.clone(memory_format=torch.contiguous_format)
            return IntMatrix(
                pack_codes(codes, 4)[None], groups[None], self.in_features, num_groups, 4, self.scale_dtype,
                has_zeros=self.has_zeros,
            )  # fmt: skip
        scales = self.scales[expert].view(torch.uint8).unflatten(1, (-1, GROUP // PLANE))  # [groups, N, 4]
        scales = scales.permute(1, 0, 2).flatten(1)[:, : self.in_features // PLANE]
        return Mxfp4Matrix((codes[:, 0::2] | codes[:, 1::2] << 4)[None].contiguous(), scales[None].contiguous())


def takes_planes(dtype: torch.dtype, device: torch.device) -> bool:
    """Return True for products in bfloat16 on the GPUs whose shared memory the tiles are made for: Hopper.

    The CUDA device of a plan counts as one where this process has none: planes take no fewer bytes.
    """
    if dtype != torch.bfloat16 or device.type != "cuda":
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] == 9


def to_planes(matrix: ExpertMatrix) -> ExpertMatrix:
    """Return the matrix as PlanesMatrix, expert by expert; as it is if its numbers or scales do not allow it."""
    if isinstance(matrix, Mxfp4Matrix):
        return _mxfp4_planes(matrix)
    if isinstance(matrix, Fp8Matrix):
        return _fp8_planes(matrix)
    return _int4_planes(matrix) if isinstance(matrix, IntMatrix) else matrix


def mxfp4_planes_bytes(n: int, k: int) -> int:
    """Return the bytes of one expert's Mxfp4Matrix, [n, k], in planes."""
    return n * -(-k // GROUP) * (GROUP // 2 + GROUP // PLANE)


def fp8_planes_bytes(n: int, k: int, *, rows: int, columns: int) -> int | None:
    """Return the bytes of one expert's Fp8Matrix, [n, k], in planes; None: it stays as it is."""
    if not _can_arrange_fp8(k, columns):
        return None
    return n * -(-k // GROUP) * GROUP + 4 * -(-n // rows) * -(-k // columns)


def int_planes_bytes(n: int, k: int, *, bits: int, num_groups: int, has_zeros: bool) -> int | None:
    """Return the bytes of one expert's IntMatrix, [n, k], in planes; None: it stays as it is."""
    size = k // num_groups
    if not _can_arrange_integers(bits, size, num_groups):
        return None
    num_words = num_groups if has_zeros else -(-num_groups // 2)
    return n * (-(-k // GROUP) * GROUP // 2 + 4 * max(num_words, _least_words(k, size, has_zeros=has_zeros)))


def _mxfp4_planes(matrix: Mxfp4Matrix) -> Mxfp4Matrix | PlanesMatrix:
    if int(matrix.scales.max()) > _MAX_E8M0:
        return matrix
    count, n, k = matrix.shape
    groups = -(-k // GROUP)
    words = matrix.blocks.new_empty(count, groups, 1, n, PLANE, dtype=torch.int16)
    scales = matrix.scales.new_zeros(count, n, groups * GROUP // PLANE)
    scales[..., : k // PLANE] = matrix.scales
    scales = scales.unflatten(2, (groups, -1)).transpose(1, 2).contiguous().view(torch.int32).squeeze(3)
    for expert in range(count):
        _arrange(_halves(matrix.blocks[expert]), words[expert], "mxfp4")
    return PlanesMatrix("mxfp4", words, scales, k)


def _fp8_planes(matrix: Fp8Matrix) -> Fp8Matrix | PlanesMatrix:
    count, n, k = matrix.shape
    if not _can_arrange_fp8(k, matrix.columns):
        return matrix
    words = matrix.scales.new_empty(count, -(-k // GROUP), 2, n, PLANE, dtype=torch.int16)
    for expert in range(count):
        codes = matrix.values[expert].view(torch.uint8)
        if bool(((codes & 127) == _NAN_E4M3).any()):
            return matrix
        _arrange(codes, words[expert], "fp8")
    return PlanesMatrix("fp8", words, matrix.scales, k, matrix.rows, matrix.columns)


def _int4_planes(matrix: IntMatrix) -> IntMatrix | PlanesMatrix:
    count, n, k = matrix.shape
    size, runs = matrix.group_size, -(-k // GROUP)
    if not _can_arrange_integers(matrix.bits, size, matrix.num_groups):
        return matrix
    words = matrix.words.new_empty(count, runs, 1, n, PLANE, dtype=torch.int16)
    for expert in range(count):
        codes = _halves(matrix.words[expert].view(torch.uint8))[:, :k]
        _arrange(codes, words[expert], "int4")
    missing = max(0, _least_words(k, size, has_zeros=matrix.has_zeros) - matrix.groups.shape[2])
    scales = functional.pad(matrix.groups, (0, missing)).transpose(1, 2).contiguous()
    return PlanesMatrix("int4", words, scales, k, 1, size, matrix.scale_dtype, matrix.has_zeros)


def _can_arrange_fp8(k: int, columns: int) -> bool:
    """Return True if the inputs that share a scale are whole groups, or all."""
    return columns % GROUP == 0 or columns >= k


def _can_arrange_integers(bits: int, group_size: int, num_groups: int) -> bool:
    return bits == 4 and (group_size % GROUP == 0 or group_size in _PARTS or num_groups == 1)


def _least_words(k: int, group_size: int, *, has_zeros: bool) -> int:
    """Return the words of scales of one output that the planes' last group needs to be whole."""
    return -(-k // GROUP) * _PARTS.get(group_size, 0) // (1 if has_zeros else 2)


def _halves(octets: torch.Tensor) -> torch.Tensor:
    """Return the 4-bit codes of bytes [N, B] uint8, those of the low halves first: [N, 2 * B]."""
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


def _bits(kind: str) -> tuple[tuple[int, ...], ...]:
    return {"mxfp4": _E2M1_BITS, "fp8": _E4M3_BITS, "int4": _INT4_BITS}[kind]


def _arrange(codes: torch.Tensor, words: torch.Tensor, kind: str) -> None:
    """Write one expert's codes, [N, K] uint8, into its words, [groups, runs, N, 32]."""
    groups, runs, n, _ = words.shape
    padded = codes.new_zeros(n, groups * GROUP)
    padded[:, : codes.shape[1]] = codes
    planes = padded.view(n, groups, runs, -1, PLANE).int()
    word = torch.zeros(n, groups, runs, PLANE, dtype=torch.int32, device=codes.device)
    for plane, places in enumerate(_bits(kind)):
        codes_of = planes[:, :, :, plane]
        if places[0] - places[-1] == len(places) - 1:  # side by side
            word |= codes_of << places[-1]
            continue
        for source, target in enumerate(reversed(places)):
            word |= ((codes_of >> source) & 1) << target
    words.copy_(torch.where(word >= 1 << 15, word - (1 << 16), word).permute(1, 2, 0, 3))


def _gather(words: torch.Tensor, places: tuple[int, ...]) -> torch.Tensor:
    """Return the codes whose bits lie at `places` of the words, the highest first."""
    code = torch.zeros_like(words)
    for target, source in enumerate(reversed(places)):
        code |= ((words >> source) & 1) << target
    return code
