"""Codes of a PlanesMatrix become values in the registers of wgmma's first operand, times their scales. Gluon.

As kernels/linear/triton_e2m1.py and kernels/moe/triton_planes_decode.py do, two neighbours at once by PTX on 32 bits.
A scale of integers or tables becomes two bfloat16 whose sum it is. fp16's 11 bits are 8 and 3: an integer less its zero
point times the lower one is exact, and the multiply-add with the higher one rounds once. Values in float16 are integers
times such a scale as it is.
"""

from __future__ import annotations

import triton
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from kernels.linear.triton_e2m1 import e2m1_asm
from kernels.moe.planes import GROUP
from kernels.moe.triton_planes_decode import bits_of_zero, has_zeros, is_bf16, lut4_asm

# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types: kernel arguments carry none)


def _int4_asm(plane: int, *, has_rest: bool, is_half: bool = False) -> str:
    """PTX for two neighbours of a plane. $1: words; $2: -(128 + zero), twice; $4, $6: the scale's parts, twice.

    is_half: in float16, with 1024 instead of 128.
    """
    one, first, kind = ("3C00", "6400", "f16") if is_half else ("3F80", "4300", "bf16")
    product = f"fma.rn.{kind}x2 rest, size, $6, nothing;" if has_rest else "mov.b32 rest, nothing;"
    return (
        f"{{ .reg .b32 size, one, nothing, rest; mov.b32 one, 0x{one}{one}; mov.b32 nothing, 0x80008000;"
        f" shr.u32 size, $1, {4 * plane}; lop3.b32 size, size, 0x000F000F, 0x{first}{first}, 0xEA;"
        f" fma.rn.{kind}x2 size, size, one, $2; {product} fma.rn.{kind}x2 $0, size, $4, rest; }}"
    )


_GROUP = gl.constexpr(GROUP)
_LUT4 = gl.constexpr(tuple(lut4_asm(run) for run in range(2)))
# Two values, $1, times $2 + $4, of which each is twice there
_SCALED = gl.constexpr(
    "{ .reg .b32 rest; mov.b32 rest, 0x80008000; fma.rn.bf16x2 rest, $1, $4, rest; fma.rn.bf16x2 $0, $1, $2, rest; }"
)
_E2M1 = gl.constexpr(tuple(e2m1_asm(plane) for plane in range(4)))
_INT4 = gl.constexpr(tuple(_int4_asm(plane, has_rest=False) for plane in range(4)))
_INT4_HALF = gl.constexpr(tuple(_int4_asm(plane, has_rest=False, is_half=True) for plane in range(4)))
_INT4_REST = gl.constexpr(tuple(_int4_asm(plane, has_rest=True) for plane in range(4)))


@triton.constexpr_function
def _parts(columns):
    """Return the scales of integers in a group, of which each has `columns` inputs."""
    return {32: 4, 64: 2}.get(columns, 1)


@jit
def load_scales(ptr, outputs, num_outputs, group, KIND: gl.constexpr, COLUMNS: gl.constexpr):
    """Return the words with a group's scales of some outputs, a tuple of [N]. ptr: of the expert's first."""
    if KIND == "mxfp4":
        return (gl.load(ptr + (group * num_outputs + outputs)),)
    elif KIND == "nvfp4":
        ptrs = ptr + 2 * (group * num_outputs + outputs)
        return gl.load(ptrs), gl.load(ptrs + 1)
    elif KIND == "nf4" or KIND == "fp4":
        ptrs = ptr + (2 * group * num_outputs + outputs)
        return gl.load(ptrs), gl.load(ptrs + num_outputs)
    else:
        ptrs = ptr + outputs
        PER_WORD: gl.constexpr = 1 if has_zeros(KIND) else 2
        PARTS: gl.constexpr = _parts(COLUMNS)
        if PARTS == 1:
            return (gl.load(ptrs + group * _GROUP // COLUMNS // PER_WORD * num_outputs),)
        else:
            WORDS: gl.constexpr = PARTS // PER_WORD
            first = ptrs + group * WORDS * num_outputs
            if WORDS == 1:
                return (gl.load(first),)
            elif WORDS == 2:
                return gl.load(first), gl.load(first + num_outputs)
            else:
                second = first + 2 * num_outputs
                return gl.load(first), gl.load(first + num_outputs), gl.load(second), gl.load(second + num_outputs)


@jit
def load_table(ptr, KIND: gl.constexpr):
    """Return the table's 8 words, if KIND has one."""
    if KIND == "nf4" or KIND == "fp4":
        return (
            gl.load(ptr), gl.load(ptr + 1), gl.load(ptr + 2), gl.load(ptr + 3),
            gl.load(ptr + 4), gl.load(ptr + 5), gl.load(ptr + 6), gl.load(ptr + 7),
        )  # fmt: skip
    else:
        return ()


@jit
def values_of(
    codes, scales, table, group, like,
    PLANE: gl.constexpr, KIND: gl.constexpr, COLUMNS: gl.constexpr, CODES: gl.constexpr,
):  # fmt: skip
    """Return a plane of codes [64, 32] times its scales, in the layout CODES.

    scales, table: from load_scales and load_table. like: of the dtype; bf16, and of integers with scales in fp16 that.
    """
    if KIND == "mxfp4":
        factors = ((scales[0] >> (8 * PLANE)) & 255) * 0x00800080 + 0x3F003F00
        return _e2m1(codes, factors, PLANE)
    elif KIND == "nvfp4":
        first, second = codes.reshape([64, 2, 16]).permute([0, 2, 1]).split()
        first = gl.convert_layout(first, CODES, assert_trivial=True)
        second = gl.convert_layout(second, CODES, assert_trivial=True)
        first = _e2m1(first, ((scales[0] >> (8 * PLANE)) & 255) * 0x00100010 + 0x75807580, PLANE)
        second = _e2m1(second, ((scales[1] >> (8 * PLANE)) & 255) * 0x00100010 + 0x75807580, PLANE)
        both = gl.join(first, second).permute([0, 2, 1]).reshape([64, 32])
        return gl.convert_layout(both, CODES, assert_trivial=True)
    elif KIND == "nf4" or KIND == "fp4":
        return _lut4(codes, scales[PLANE // 2], table, PLANE)
    else:
        return _int4(codes, scales, group, like, PLANE, KIND, COLUMNS)


@jit
def _e2m1(codes, factors, PLANE: gl.constexpr):
    """Return a plane of 4-bit floats times factors, of which each is a bfloat16 twice, [64]."""
    ASM: gl.constexpr = _E2M1[PLANE]
    return gl.inline_asm_elementwise(
        ASM, "=r,r,r,r", [codes, gl.expand_dims(factors, 1).broadcast_to(codes.shape)],
        dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@jit
def _int4(codes, scales, group, like, PLANE: gl.constexpr, KIND: gl.constexpr, COLUMNS: gl.constexpr):
    """Return a plane of integers, less their zero points, times their scales."""
    PARTS: gl.constexpr = _parts(COLUMNS)
    PART: gl.constexpr = PLANE * PARTS // 4
    IS_HALF: gl.constexpr = like.dtype == gl.float16
    if has_zeros(KIND):
        word = scales[PART]
        zeros = word >> 16
        zeros = (zeros | (zeros << 16)) | bits_of_zero(IS_HALF)
        bits = word & 0xFFFF
    else:
        word = scales[PART // 2]
        zeros = gl.zeros_like(word) + (bits_of_zero(IS_HALF) + 0x00080008)
        if PARTS == 1:  # noqa: SIM108 - Gluon decides it while it compiles
            bits = (word >> (group * _GROUP // COLUMNS % 2 * 16)) & 0xFFFF
        else:
            bits = (word >> (PART % 2 * 16)) & 0xFFFF
    HAS_REST: gl.constexpr = not (IS_HALF or is_bf16(KIND))
    ASM: gl.constexpr = (_INT4_HALF if IS_HALF else (_INT4_REST if HAS_REST else _INT4))[PLANE]
    if not HAS_REST:
        high = bits * 0x00010001
        rest = high
    else:
        high, rest = _parts_of(bits.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32))
    return gl.inline_asm_elementwise(
        ASM, "=r,r,r,r,r,r,r,r", [codes, _across(zeros, codes), _across(high, codes), _across(rest, codes)],
        dtype=like.dtype, is_pure=True, pack=2,
    )  # fmt: skip


@jit
def _lut4(codes, scales, table, PLANE: gl.constexpr):
    """Return a plane of values of the table times their scales, [64] fp32."""
    high, rest = _parts_of(scales)
    t0, t1, t2, t3, t4, t5, t6, t7 = table
    ASM: gl.constexpr = _LUT4[PLANE // 2]
    first, second = gl.inline_asm_elementwise(
        ASM, "=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [codes, _across(high, codes), t0, t1, t2, t3, t4, t5, t6, t7],
        dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip
    values = first if PLANE % 2 == 0 else second
    return gl.inline_asm_elementwise(
        _SCALED, "=r,r,r,r,r,r", [values, _across(high, codes), _across(rest, codes)],
        dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@jit
def _parts_of(scales):
    """Return two bfloat16 whose sum scales [64] fp32 are, to 16 bits, each twice in an int32."""
    high = scales.to(gl.bfloat16)
    return _twice(high), _twice((scales - high.to(gl.float32)).to(gl.bfloat16))


@jit
def _across(values, codes):
    return gl.expand_dims(values, 1).broadcast_to(codes.shape)


@jit
def _twice(values):
    """Return the bits of bfloat16 values twice, as int32."""
    bits = values.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return bits * 0x00010001
