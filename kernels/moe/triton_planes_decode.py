"""Codes of PlanesMatrix become values: e4m3, int4 and lut4 take planes out of a tile of words.

In bfloat16 on CUDA, and of integers in float16, a pair of codes becomes a pair of values by PTX on 32 bits. Of floats,
sign, exponent and mantissa move to their places in two bfloat16, which are then the values times a power of two below
1, and one multiplication restores it (4-bit floats: kernels/linear/triton_e2m1.py). An integer becomes the lowest bits
of a mantissa, which is then 128 more, in float16 1,024, and one addition takes away that and the zero point. Codes of a
table look up four bytes at once by permutations of eight, which are in registers.
The PTX takes two neighbours of a row at once, so it relies on Triton passing neighbours: it does in the layouts in
which tensor cores take 16-bit operands. tests/gpu/test_packed_experts_cuda.py fails if that changes.
Otherwise, and in Triton's interpreter, the same is done by arithmetic in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.moe.triton_storage import look_up

# ruff: noqa: ANN001, ANN201  (Triton reads annotations as types: kernel arguments carry none)


@triton.constexpr_function
def has_zeros(kind):
    """Return True if words of scales have zero points: of "int4_fp16_zeros", not of "int4_fp16"."""
    return kind.endswith("_zeros")


@triton.constexpr_function
def bits_of_zero(is_half):
    """Return the bits of -1024 as float16, or of -128 as bfloat16, twice, to which a zero point of 4 bits is added."""
    return -0x1BFF1C00 if is_half else -0x3CFF3D00


@triton.constexpr_function
def is_bf16(kind):
    """Return True if scales of integers are bfloat16, False if they are float16."""
    return "bf16" in kind


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
        IS_HALF: tl.constexpr = x.dtype == tl.float16
        ASM: tl.constexpr = (_INT4_ZEROS if has_zeros(KIND) else _INT4)[4 * IS_HALF + PLANE_INDEX]
        operand = scales
        if has_zeros(KIND):
            zeros = scales >> 16
            operand = (zeros | (zeros << 16)) | bits_of_zero(IS_HALF)
        return tl.inline_asm_elementwise(
            ASM, "=r,r,r,r", [words, tl.broadcast_to(operand[:, None], words.shape)],
            dtype=x.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        codes = (words.to(tl.int32) >> (4 * PLANE_INDEX)) & 15
        zeros = (scales >> 16)[:, None] if has_zeros(KIND) else 8
        return (codes - zeros).to(tl.float32).to(x.dtype)


@triton.jit
def load_table(ptr):
    """Return the argument `table` of lut4: 8 words that stay in registers, where constants would be made anew.

    Tiles of one word, as a scalar would keep the compiler from moving loads to the layout of the product.
    """
    ptrs = ptr + tl.zeros([1, 1], tl.int32)
    return (
        tl.load(ptrs), tl.load(ptrs + 1), tl.load(ptrs + 2), tl.load(ptrs + 3),
        tl.load(ptrs + 4), tl.load(ptrs + 5), tl.load(ptrs + 6), tl.load(ptrs + 7),
    )  # fmt: skip


@triton.jit
def lut4(words, scales, table, x, RUN: tl.constexpr, KIND: tl.constexpr, HAS_PTX: tl.constexpr):
    """Planes 2 * RUN and 2 * RUN + 1 of words [N, 32], without scales, in x's dtype: values of the table KIND.

    table: from load_table, of the PlanesMatrix's; read by the PTX alone. scales: [N] fp32, an operand as in e4m3.
    """
    if HAS_PTX:
        ASM: tl.constexpr = _LUT4[RUN]
        operand = tl.broadcast_to(scales.to(tl.int32, bitcast=True)[:, None], words.shape)
        t0, t1, t2, t3, t4, t5, t6, t7 = table
        return tl.inline_asm_elementwise(
            ASM, "=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", [words, operand, t0, t1, t2, t3, t4, t5, t6, t7],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        codes = words.to(tl.int32) >> (8 * RUN)
        return look_up(codes & 15, KIND).to(x.dtype), look_up((codes >> 4) & 15, KIND).to(x.dtype)


@triton.jit
def int4_scale(words, half, KIND: tl.constexpr):
    """The scales in the lower halves of words, or with a half of 1 in the upper ones, in fp32."""
    bits = words >> (16 * half)
    if is_bf16(KIND):
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


def e4m3_asm(plane: int) -> str:
    """PTX for two neighbours of a plane. $1: their words. 0x7B80 is 2^120."""
    size = "shl.b32 size, $1, 4;" if plane == 0 else "shr.u32 size, $1, 4;"
    return (
        _DECLARED + f"shl.b32 sign, $1, {8 - 8 * plane}; and.b32 sign, sign, 0x80008000;"
        f" {size} and.b32 size, size, 0x07F007F0; or.b32 size, size, sign;"
        " mov.b32 sign, 0x7B807B80; fma.rn.bf16x2 $0, size, sign, zero; }"
    )


def int4_asm(plane: int, *, has_zero_points: bool, is_half: bool) -> str:
    """PTX for two neighbours of a plane. $1: their words; $2: -(128 + zero), twice. 0xC308: -136; 0x3F80: 1.

    is_half: in float16, with 1024 instead of 128: 0x6400.
    """
    operand = "$2" if has_zero_points else "zero"
    one, zero, first, kind = ("3C00", "E408", "6400", "f16") if is_half else ("3F80", "C308", "4300", "bf16")
    return (
        f"{{ .reg .b32 size, one, zero; mov.b32 one, 0x{one}{one}; mov.b32 zero, 0x{zero}{zero};"
        f" shr.u32 size, $1, {4 * plane}; lop3.b32 size, size, 0x000F000F, 0x{first}{first}, 0xEA;"
        f" fma.rn.{kind}x2 $0, size, one, {operand}; }}"
    )


def int4_asms(*, has_zero_points: bool) -> tuple[str, ...]:
    """Return the PTX of each plane in bfloat16, then in float16."""
    return tuple(
        int4_asm(plane, has_zero_points=has_zero_points, is_half=is_half)
        for is_half in (False, True)
        for plane in range(4)
    )


def lut4_asm(run: int) -> str:
    """PTX for two neighbours of two planes. $0, $1: the planes' values; $2: their words; $5, $7 … $19: the table.

    Four codes are a selector of four bytes among eight. So each half of the table gives low and high bytes, the codes'
    highest bits, as masks of a byte each, choose a half, and two permutations join the bytes of each plane's values.
    """
    bytes_of, masks = ("0x2020", "0xEAC8") if run == 0 else ("0x3131", "0xFBD9")
    return (
        "{ .reg .b32 codes, mask, few, many, low, high; and.b32 codes, $2, 0x77777777;"
        f" prmt.b32 codes, codes, 0, {bytes_of}; shl.b32 mask, $2, 4; prmt.b32 mask, mask, $2, {masks};"
        " prmt.b32 few, $5, $7, codes; prmt.b32 many, $9, $11, codes; lop3.b32 low, mask, many, few, 0xCA;"
        " prmt.b32 few, $13, $15, codes; prmt.b32 many, $17, $19, codes; lop3.b32 high, mask, many, few, 0xCA;"
        " prmt.b32 $0, low, high, 0x6240; prmt.b32 $1, low, high, 0x7351; }"
    )


_DECLARED = "{ .reg .b32 sign, size, zero; mov.b32 zero, 0x80008000; "
_E4M3 = tl.constexpr(tuple(e4m3_asm(plane) for plane in range(2)))
_INT4 = tl.constexpr(int4_asms(has_zero_points=False))
_INT4_ZEROS = tl.constexpr(int4_asms(has_zero_points=True))
_LUT4 = tl.constexpr(tuple(lut4_asm(run) for run in range(2)))
