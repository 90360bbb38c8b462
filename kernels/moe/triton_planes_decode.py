"""Codes of PlanesMatrix become values: e2m1, e4m3 and int4 take a plane out of a tile of words.

In bfloat16 on CUDA a pair of codes becomes a pair of values by PTX on 32 bits. Of floats, sign, exponent and mantissa
move to their places in two bfloat16, which are then the values times a power of two below 1, and one multiplication
restores it. An integer becomes the lowest bits of a bfloat16 mantissa, which is then 128 more, and one addition takes
away that and the zero point.
The PTX takes two neighbours of a row at once, so it relies on Triton passing neighbours: it does in the layouts in
which tensor cores take 16-bit operands. tests/gpu/test_packed_experts_cuda.py fails if that changes.
Otherwise, and in Triton's interpreter, the same is done by arithmetic in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types: kernel arguments carry none)


@triton.constexpr_function
def has_zeros(kind):
    """Return True if words of scales have zero points: of "int4_fp16_zeros", not of "int4_fp16"."""
    return kind.endswith("_zeros")


@triton.constexpr_function
def _is_bf16(kind):
    return "bf16" in kind


@triton.jit
def e2m1(words, scales, x, PLANE_INDEX: tl.constexpr, HAS_PTX: tl.constexpr):
    """Plane PLANE_INDEX of words [N, 32], times its scales, in x's dtype. scales: [N] int32, a byte for each plane.

    The bits of a code are its value times 2^-126, and a scale of 2^(s - 127) makes the factor 2^(s - 1).
    """
    factors = (((scales >> (8 * PLANE_INDEX)) & 255) + 126) << 7  # the bits of a bfloat16
    if HAS_PTX:
        ASM: tl.constexpr = _E2M1[PLANE_INDEX]
        return tl.inline_asm_elementwise(
            ASM, "=r,r,r,r", [words, tl.broadcast_to((factors | (factors << 16))[:, None], words.shape)],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        words = words.to(tl.int32)
        if PLANE_INDEX < 3:
            bits = (words << (3 * PLANE_INDEX)) & 0x81C0
        else:
            bits = ((words << 1) & 0x8000) | ((words >> 5) & 0x0100) | ((words >> 4) & 0x00C0)
        bits = bits << 16
        values = bits.to(tl.float32, bitcast=True) * (factors << 16).to(tl.float32, bitcast=True)[:, None]
        return values.to(x.dtype)


@triton.jit
def e4m3(words, scales, x, PLANE_INDEX: tl.constexpr, HAS_PTX: tl.constexpr):
    """Plane PLANE_INDEX of words [N, 32], without scales, in x's dtype. The bits of a code are its value times 2^-120.

    The PTX does not use scales: they are an operand because Triton loads ahead only what a product depends on.
    """
    if HAS_PTX:
        ASM: tl.constexpr = _E4M3[PLANE_INDEX]
        return tl.inline_asm_elementwise(
            ASM, "=r,r,r,r", [words, tl.broadcast_to(scales.to(tl.int32, bitcast=True)[:, None], words.shape)],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        codes = words.to(tl.int32) >> (8 * PLANE_INDEX)
        bits = ((codes & 127) << 20) | ((codes & 128) << 24)
        return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(x.dtype)


@triton.jit
def int4(words, scales, x, PLANE_INDEX: tl.constexpr, KIND: tl.constexpr, HAS_PTX: tl.constexpr):
    """Plane PLANE_INDEX of words [N, 32] less its zero points, without scales, in x's dtype: -15 to 15.

    scales: [N] int32, with the zero points in their upper halves; else those are 8, and scales an operand as in e4m3.
    """
    if HAS_PTX:
        ASM: tl.constexpr = _INT4_ZEROS[PLANE_INDEX] if has_zeros(KIND) else _INT4[PLANE_INDEX]
        operand = scales
        if has_zeros(KIND):
            zeros = scales >> 16
            operand = (zeros | (zeros << 16)) | -0x3CFF3D00  # 0xC300C300: a bfloat16 of -(128 + zero), twice
        return tl.inline_asm_elementwise(
            ASM, "=r,r,r,r", [words, tl.broadcast_to(operand[:, None], words.shape)],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        codes = (words.to(tl.int32) >> (4 * PLANE_INDEX)) & 15
        zeros = (scales >> 16)[:, None] if has_zeros(KIND) else 8
        return (codes - zeros).to(tl.float32).to(x.dtype)


@triton.jit
def int4_scale(words, half, KIND: tl.constexpr):
    """The scales in the lower halves of words, or with a half of 1 in the upper ones, in fp32."""
    bits = words >> (16 * half)
    if _is_bf16(KIND):
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


def e2m1_asm(plane: int) -> str:
    """PTX for two neighbours of a plane; see kernels/moe/planes.py. $1: their words; $2: the factor, twice."""
    if plane < 3:
        bits = f"shl.b32 size, $1, {3 * plane}; and.b32 size, size, 0x81C081C0;"
    else:
        bits = (
            "shl.b32 size, $1, 1; and.b32 size, size, 0x80008000;"
            " shr.u32 sign, $1, 5; and.b32 sign, sign, 0x01000100; or.b32 size, size, sign;"
            " shr.u32 sign, $1, 4; and.b32 sign, sign, 0x00C000C0; or.b32 size, size, sign;"
        )
    return _DECLARED + bits + " fma.rn.bf16x2 $0, size, $2, zero; }"


def e4m3_asm(plane: int) -> str:
    """PTX for two neighbours of a plane. $1: their words. 0x7B80 is 2^120."""
    size = "shl.b32 size, $1, 4;" if plane == 0 else "shr.u32 size, $1, 4;"
    return (
        _DECLARED + f"shl.b32 sign, $1, {8 - 8 * plane}; and.b32 sign, sign, 0x80008000;"
        f" {size} and.b32 size, size, 0x07F007F0; or.b32 size, size, sign;"
        " mov.b32 sign, 0x7B807B80; fma.rn.bf16x2 $0, size, sign, zero; }"
    )


def int4_asm(plane: int, *, has_zero_points: bool) -> str:
    """PTX for two neighbours of a plane. $1: their words; $2: -(128 + zero), twice. 0xC308: -136; 0x3F80: 1."""
    operand = "$2" if has_zero_points else "zero"
    return (
        "{ .reg .b32 size, one, zero; mov.b32 one, 0x3F803F80; mov.b32 zero, 0xC308C308;"
        f" shr.u32 size, $1, {4 * plane}; lop3.b32 size, size, 0x000F000F, 0x43004300, 0xEA;"
        f" fma.rn.bf16x2 $0, size, one, {operand}; }}"
    )


_DECLARED = "{ .reg .b32 sign, size, zero; mov.b32 zero, 0x80008000; "
_E2M1 = tl.constexpr(tuple(e2m1_asm(plane) for plane in range(4)))
_E4M3 = tl.constexpr(tuple(e4m3_asm(plane) for plane in range(2)))
_INT4 = tl.constexpr(tuple(int4_asm(plane, has_zero_points=False) for plane in range(4)))
_INT4_ZEROS = tl.constexpr(tuple(int4_asm(plane, has_zero_points=True) for plane in range(4)))
