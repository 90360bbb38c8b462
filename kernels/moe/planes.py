"""PlanesMatrix: packed experts arranged for the registers of tensor cores. Read by kernels/moe/triton_planes.py.

A group is 128 inputs of one output. Its codes are cut into planes of 32 inputs, and word j of 16 bits holds code j of
several planes: four planes of 4 bits, or two of 8 bits, so that a group is one or two runs of 32 words. Two words side
by side hold two inputs side by side of every plane, which is how a thread holds the operand of a 16-bit product: with a
few operations on 32 bits two codes become two values, and none has to move to another thread.

For products in bfloat16, to which every value of a code times its scale, and every 4-bit integer less its zero point,
is exact. The 16 values of NF4 and FP4 are rounded to it. Integers are as exact in float16, whose models they have too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from kernels.e2m1 import NVFP4_BLOCK
from kernels.linear.planes import (
    E2M1_BITS,
    GROUP,
    NVFP4_REST,
    PLANE,
    arrange,
    arrange_scales,
    can_arrange_float4,
    collect,
    collect_scales,
    from_e5m3,
    halves,
    to_e5m3,
    without_zero_blocks,
)
from kernels.linear.reference import BLOCK as LUT4_BLOCK
from kernels.moe.storage import ExpertMatrix, Fp8Matrix, Mxfp4Matrix
from kernels.moe.storage_int import IntMatrix, pack_codes
from kernels.moe.storage_lut4 import TABLES, Lut4Matrix
from kernels.moe.storage_nvfp4 import Nvfp4Matrix

_INT4_BITS = ((3, 2, 1, 0), (7, 6, 5, 4), (11, 10, 9, 8), (15, 14, 13, 12))
_E4M3_BITS = ((7, 6, 5, 4, 3, 2, 1, 0), (15, 14, 13, 12, 11, 10, 9, 8))
_NAN_E4M3 = 127
_PARTS = {32: 4, 64: 2}  # of a group of integers, by the inputs that share a scale if those are fewer


@dataclass(frozen=True)
class PlanesMatrix:
    """One matrix of every expert, [E, N, K]; inputs past K have the code 0."""

    kind: Literal["mxfp4", "fp8", "int4", "nvfp4", "nf4", "fp4"]
    # [E, K / 128 rounded up, words / 32, N, 32] int16; words of a group: 32 of 4 bits, 64 of 8 bits
    words: torch.Tensor
    # mxfp4: [E, K / 128 rounded up, N] int32, the four planes' bytes. fp8: those of Fp8Matrix, fp32. int4: IntMatrix's
    # groups, [E, its words of an output, N] int32, and as many more of 0 as the last 128 inputs lack. nvfp4: [E,
    # groups, N, 2] int32, as of Float4Planes. nf4, fp4: [E, 2 * groups, N] fp32
    scales: torch.Tensor
    in_features: int
    # Outputs and inputs that share a scale of fp8 or int4
    rows: int = 1
    columns: int = PLANE
    # As of IntMatrix
    scale_dtype: torch.dtype = torch.float32
    has_zeros: bool = False
    # Of nvfp4: [E, N] fp32, of each output, times NVFP4_REST
    factors: torch.Tensor | None = None
    # Of nf4, fp4: [8] int32, the values' low bytes as bfloat16, by code, then their high bytes
    table: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (E, N, K)."""
        return self.words.shape[0], self.words.shape[3], self.in_features

    @property
    def expert_bytes(self) -> int:
        """The bytes of words and scales that an expert has."""
        return (self.words.nbytes + self.scales.nbytes) // self.words.shape[0]

    @property
    def constants(self) -> torch.Tensor | None:
        """What kernels read beside words and scales: factors, or the table; None: nothing."""
        return self.factors if self.table is None else self.table

    def dense(self, expert: int | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return one expert's matrix, [N, K]; see the matrix that it was made of."""
        return self.unpack(expert).dense(0, dtype)

    def unpack(self, expert: int | torch.Tensor) -> Mxfp4Matrix | Nvfp4Matrix | Lut4Matrix | Fp8Matrix | IntMatrix:
        """Return one expert as the matrix that it was made of, with E of 1; of NVFP4 each output has a factor."""
        codes = collect(self.words[expert], _bits(self.kind))[:, : self.in_features]
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
        if self.kind in ("nf4", "fp4"):
            scales = self.scales[expert].T[:, : self.in_features // LUT4_BLOCK].contiguous()
            return Lut4Matrix((codes[:, 0::2] << 4 | codes[:, 1::2])[None], scales[None], self.kind)
        packed = (codes[:, 0::2] | codes[:, 1::2] << 4)[None].contiguous()
        scales = self.scales[expert]
        octets = collect_scales(scales if self.kind == "nvfp4" else scales[..., None], self.in_features)
        if self.kind == "mxfp4":
            return Mxfp4Matrix(packed, octets[None].contiguous())
        assert self.factors is not None
        return Nvfp4Matrix(packed, from_e5m3(octets)[None], (self.factors[expert] / NVFP4_REST)[None])


def takes_planes(dtype: torch.dtype, device: torch.device, *, is_integer: bool) -> bool:
    """Return True for products in bfloat16 on the GPUs whose shared memory the tiles are made for: Hopper.

    is_integer: of integers, also in float16. The CUDA device of a plan counts as one where this process has none:
    planes take no fewer bytes.
    """
    if device.type != "cuda" or not (dtype == torch.bfloat16 or (is_integer and dtype == torch.float16)):
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] == 9


def to_planes(matrix: ExpertMatrix) -> ExpertMatrix:
    """Return the matrix as PlanesMatrix, expert by expert; as it is if its numbers or scales do not allow it."""
    if isinstance(matrix, Mxfp4Matrix | Nvfp4Matrix):
        return _float4_planes(matrix)
    if isinstance(matrix, Lut4Matrix):
        return _lut4_planes(matrix)
    if isinstance(matrix, Fp8Matrix):
        return _fp8_planes(matrix)
    return _int4_planes(matrix) if isinstance(matrix, IntMatrix) else matrix


def mxfp4_planes_bytes(n: int, k: int) -> int:
    """Return the bytes of one expert's Mxfp4Matrix, [n, k], in planes."""
    return n * -(-k // GROUP) * (GROUP // 2 + GROUP // PLANE)


def nvfp4_planes_bytes(n: int, k: int) -> int:
    """Return the bytes of one expert's Nvfp4Matrix, [n, k], in planes."""
    return n * (-(-k // GROUP) * (GROUP // 2 + GROUP // NVFP4_BLOCK) + 4)


def lut4_planes_bytes(n: int, k: int) -> int:
    """Return the bytes of one expert's Lut4Matrix, [n, k], in planes."""
    return n * -(-k // GROUP) * (GROUP // 2 + 4 * GROUP // LUT4_BLOCK)


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


def _float4_planes(matrix: Mxfp4Matrix | Nvfp4Matrix) -> Mxfp4Matrix | Nvfp4Matrix | PlanesMatrix:
    if not can_arrange_float4(matrix.scales):
        return matrix
    count, n, k = matrix.shape
    num_groups, is_nv = -(-k // GROUP), isinstance(matrix, Nvfp4Matrix)
    words = matrix.blocks.new_empty(count, num_groups, 1, n, PLANE, dtype=torch.int16)
    scales = matrix.blocks.new_empty(count, num_groups, n, 2 if is_nv else 1, dtype=torch.int32)
    for expert in range(count):
        codes, octets = halves(matrix.blocks[expert]), matrix.scales[expert]
        if is_nv:
            codes, octets = without_zero_blocks(codes, octets), to_e5m3(octets)
        arrange(codes, words[expert], E2M1_BITS)
        scales[expert] = arrange_scales(octets, k)
    if not isinstance(matrix, Nvfp4Matrix):
        return PlanesMatrix("mxfp4", words, scales.squeeze(3), k)
    factors = matrix.factors.repeat_interleave(n // matrix.factors.shape[1], 1) * NVFP4_REST
    return PlanesMatrix("nvfp4", words, scales, k, factors=factors)


def _lut4_planes(matrix: Lut4Matrix) -> PlanesMatrix:
    count, n, k = matrix.shape
    num_groups = -(-k // GROUP)
    words = matrix.packed.new_empty(count, num_groups, 1, n, PLANE, dtype=torch.int16)
    for expert in range(count):
        packed = matrix.packed[expert]
        arrange(halves(packed << 4 | packed >> 4), words[expert], _INT4_BITS)
    padded = functional.pad(matrix.scales, (0, num_groups * GROUP // LUT4_BLOCK - matrix.scales.shape[2]))
    table = torch.tensor(TABLES[matrix.kind], device=words.device).bfloat16().view(torch.uint8)
    octets = table.view(-1, 2).T.contiguous().view(torch.int32).flatten()
    return PlanesMatrix(matrix.kind, words, padded.transpose(1, 2).contiguous(), k, table=octets)


def _fp8_planes(matrix: Fp8Matrix) -> Fp8Matrix | PlanesMatrix:
    count, n, k = matrix.shape
    if not _can_arrange_fp8(k, matrix.columns):
        return matrix
    words = matrix.scales.new_empty(count, -(-k // GROUP), 2, n, PLANE, dtype=torch.int16)
    for expert in range(count):
        codes = matrix.values[expert].view(torch.uint8)
        if bool(((codes & 127) == _NAN_E4M3).any()):
            return matrix
        arrange(codes, words[expert], _E4M3_BITS)
    return PlanesMatrix("fp8", words, matrix.scales, k, matrix.rows, matrix.columns)


def _int4_planes(matrix: IntMatrix) -> IntMatrix | PlanesMatrix:
    count, n, k = matrix.shape
    size, runs = matrix.group_size, -(-k // GROUP)
    if not _can_arrange_integers(matrix.bits, size, matrix.num_groups):
        return matrix
    words = matrix.words.new_empty(count, runs, 1, n, PLANE, dtype=torch.int16)
    for expert in range(count):
        codes = halves(matrix.words[expert].view(torch.uint8))[:, :k]
        arrange(codes, words[expert], _INT4_BITS)
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


def _bits(kind: str) -> tuple[tuple[int, ...], ...]:
    if kind in ("mxfp4", "nvfp4"):
        return E2M1_BITS
    return _E4M3_BITS if kind == "fp8" else _INT4_BITS
