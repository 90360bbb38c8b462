"""A group of inputs of kernels/moe/gluon_few.py: codes and scales from memory to registers, then values and products.

Rows of a tile of weights are m16 tiles of mma.sync, one after the other: sixteen outputs each, of one part of the
inputs, or of one expert. A thread loads eight neighbouring words of a row, 16 bytes, where the instruction has inputs
4 * i to 4 * i + 3 and sixteen more; the columns' inputs are loaded in the same order, so that no value moves.
Scales of 4-bit floats are part of the values, which is exact; those of integers and FP8 multiply sums in fp32.
"""

from __future__ import annotations

import triton
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.linear.triton_e2m1 import e2m1_asm
from kernels.moe.planes import GROUP, PLANE
from kernels.moe.triton_planes_decode import bits_of_zero, e4m3_asm, has_zeros, int4_asms, is_bf16

# ruff: noqa: ANN001, ANN201, ANN202, RUF005  (Triton reads annotations as types, and knows no * in tuples)

_GROUP = gl.constexpr(GROUP)
_PLANE = gl.constexpr(PLANE)
_E2M1 = gl.constexpr(tuple(e2m1_asm(plane) for plane in range(4)))
_E4M3 = gl.constexpr(tuple(e4m3_asm(plane) for plane in range(2)))
_INT4 = gl.constexpr(int4_asms(has_zero_points=False))
_INT4_ZEROS = gl.constexpr(int4_asms(has_zero_points=True))


@triton.constexpr_function
def _bits(limit):
    """Return the powers of two below a power of two."""
    return [1 << i for i in range(limit.bit_length() - 1)]


@triton.constexpr_function
def mma_layout(num_warps):
    """Return the layout of sums: [16 * tiles, 8 or 16]."""
    return gl.NVMMADistributedLayout([2, 0], [num_warps, 1], [16, 8])


@triton.constexpr_function
def code_layout(num_rows, num_warps):
    """Return the layout in which words are loaded, [num_rows, 32]: eight neighbours a thread."""
    tiles = [[16 * num_warps * bit, 0] for bit in _bits(num_rows // (16 * num_warps))]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *tiles],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16 * bit, 0] for bit in _bits(num_warps)],
        block_bases=[],
        shape=[num_rows, 32],
    )


@triton.constexpr_function
def half_layout(num_rows, num_warps):
    """Return code_layout's words as [num_rows, 2, 16]."""
    tiles = [[16 * num_warps * bit, 0, 0] for bit in _bits(num_rows // (16 * num_warps))]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [8, 0, 0], *tiles],
        lane_bases=[[0, 0, 8], [0, 1, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16 * bit, 0, 0] for bit in _bits(num_warps)],
        block_bases=[],
        shape=[num_rows, 2, 16],
    )


@triton.constexpr_function
def row_layout(num_columns, num_warps):
    """Return the layout in which a plane of the rows of x is loaded, [32, num_columns]: eight neighbours a thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], [4, 0], *([0, 8 * bit] for bit in _bits(num_columns // 8))],
        lane_bases=[[8, 0], [16, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[0, 0] for _ in _bits(num_warps)],
        block_bases=[],
        shape=[32, num_columns],
    )


@triton.constexpr_function
def _parts(kind, columns):
    """Return the scales of a group of integers, of which each has `columns` inputs."""
    return {32: 4, 64: 2}.get(columns, 1) if kind.startswith("int4") else 1


@jit
def load_group(word_ptrs, scale_ptrs, group, num_groups, outputs, KIND: gl.constexpr, COLUMNS: gl.constexpr):
    """Return the words and scales of a group of each row, 0 past the last group. group: [M], of the words' layout.

    word_ptrs: [M, 32], of the first group; scale_ptrs: of the expert's first scale of each row.
    """
    is_group = group < num_groups
    RUNS: gl.constexpr = 2 if KIND == "fp8" else 1
    ptrs = word_ptrs + gl.expand_dims(group * (RUNS * outputs * _PLANE), 1)
    is_here = gl.expand_dims(is_group, 1)
    words = gl.load(ptrs, mask=is_here, other=0, eviction_policy="evict_first")
    if KIND == "fp8":
        more = gl.load(ptrs + outputs * _PLANE, mask=is_here, other=0, eviction_policy="evict_first")
        return (words, more), (gl.load(scale_ptrs + group * _GROUP // COLUMNS, mask=is_group, other=0.0),)
    elif KIND == "mxfp4":
        return (words,), (gl.load(scale_ptrs + group * outputs, mask=is_group, other=0),)
    elif KIND == "nvfp4":
        LAYOUT: gl.constexpr = gl.SliceLayout(1, scale_ptrs.type.layout)
        group = gl.convert_layout(group, LAYOUT)
        ptrs = scale_ptrs + gl.expand_dims(group * (outputs * 2), 1)
        return (words,), (gl.load(ptrs, mask=gl.expand_dims(group < num_groups, 1), other=0),)
    else:
        PARTS: gl.constexpr = _parts(KIND, COLUMNS)
        PER_WORD: gl.constexpr = 1 if has_zeros(KIND) else 2
        if PARTS == 1:
            place = group * _GROUP // COLUMNS
            word = gl.load(scale_ptrs + place // PER_WORD * outputs, mask=is_group, other=0)
            if PER_WORD == 2:  # the scale comes to the lower half
                word = word >> (place % 2 * 16)
            return (words,), (word,)
        else:
            WORDS: gl.constexpr = PARTS // PER_WORD
            scales = ()
            for word in gl.static_range(WORDS):
                ptrs = scale_ptrs + (group * WORDS + word) * outputs
                scales = scales + (gl.load(ptrs, mask=is_group, other=0),)  # type: ignore[assignment]
            return (words,), scales


@jit
def load_rows(x_ptrs, start, is_row, K: gl.constexpr):
    """Return four planes of x from `start` on, [32, N] as the second operand, 0 where none is. start, is_row: [N]."""
    planes = ()
    for plane in gl.static_range(4):
        place = start + plane * _PLANE
        is_here = gl.expand_dims(is_row & (place < K), 0)
        plane_of = gl.load(x_ptrs + gl.expand_dims(place, 0), mask=is_here, other=0.0)
        planes = planes + (plane_of,)  # type: ignore[assignment]
    return planes


@jit
def add_group(sums, words, scales, planes, KIND: gl.constexpr, COLUMNS: gl.constexpr):
    """Return sums plus the products of a group: [M, N] fp32."""
    if KIND == "mxfp4":
        for plane in gl.static_range(4):
            factors = gl.expand_dims(((scales[0] >> (8 * plane)) & 255) * 0x00800080 + 0x3F003F00, 1)
            sums = _multiply(_decode(words[0], factors, _E2M1, plane, planes[plane]), planes[plane], sums)
        return sums
    elif KIND == "nvfp4":
        ROWS: gl.constexpr = scales[0].shape[0]
        for plane in gl.static_range(4):
            factors = ((scales[0] >> (8 * plane)) & 255) * 0x00100010 + 0x75807580
            factors = gl.expand_dims(factors, 2).broadcast_to([ROWS, 2, 16]).reshape([ROWS, 32])
            factors = gl.convert_layout(factors, words[0].type.layout, assert_trivial=True)
            sums = _multiply(_decode(words[0], factors, _E2M1, plane, planes[plane]), planes[plane], sums)
        return sums
    elif KIND == "fp8":
        part = gl.zeros_like(sums)
        unread = gl.expand_dims(scales[0].to(gl.int32, bitcast=True), 1)
        for plane in gl.static_range(4):
            part = _multiply(_decode(words[plane // 2], unread, _E4M3, plane % 2, planes[plane]), planes[plane], part)
        return sums + part * _of_rows(scales[0], sums)
    else:
        PARTS: gl.constexpr = _parts(KIND, COLUMNS)
        PER_WORD: gl.constexpr = 1 if has_zeros(KIND) else 2
        for of in gl.static_range(PARTS):
            word = scales[of // PER_WORD]
            part = gl.zeros_like(sums)
            for plane in gl.static_range(of * 4 // PARTS, (of + 1) * 4 // PARTS):
                part = _multiply(_integers(words[0], word, plane, planes[plane], KIND), planes[plane], part)
            sums += part * _of_rows(_scale(word, of % PER_WORD, KIND), sums)
        return sums


@jit
def _integers(words, word, PLANE_INDEX: gl.constexpr, like, KIND: gl.constexpr):
    """Return a plane of integers less their zero points, which words of scales have in their upper halves."""
    IS_HALF: gl.constexpr = like.dtype == gl.float16
    if has_zeros(KIND):
        zeros = word >> 16
        zeros = (zeros | (zeros << 16)) | bits_of_zero(IS_HALF)
        return _decode(words, gl.expand_dims(zeros, 1), _INT4_ZEROS, 4 * IS_HALF + PLANE_INDEX, like)
    else:
        return _decode(words, gl.expand_dims(word, 1), _INT4, 4 * IS_HALF + PLANE_INDEX, like)


@jit
def _scale(word, HALF: gl.constexpr, KIND: gl.constexpr):
    bits = word >> (16 * HALF)
    if is_bf16(KIND):
        return (bits << 16).to(gl.float32, bitcast=True)
    else:
        return bits.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@jit
def _of_rows(scales, sums):
    """Return scales [M] in the layout of sums, [M, 1]."""
    return gl.expand_dims(gl.convert_layout(scales, gl.SliceLayout(1, sums.type.layout)), 1)


@jit
def _decode(words, operand, CODE: gl.constexpr, PLANE_INDEX: gl.constexpr, like):
    """Return a plane of words in like's dtype, by PTX for two neighbours. operand: of the PTX, [M, 1 or 32]."""
    ASM: gl.constexpr = CODE[PLANE_INDEX]
    return gl.inline_asm_elementwise(
        ASM, "=r,r,r,r", [words, operand.broadcast_to(words.shape)], dtype=like.dtype, is_pure=True, pack=2
    )  # fmt: skip


@jit
def _multiply(values, plane, sums):
    """sums + values @ plane: [M, 32] and [32, N], whose inputs are in the order in which threads load them."""
    M: gl.constexpr = values.shape[0]
    N: gl.constexpr = plane.shape[1]
    FIRST: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums.type.layout, k_width=4)
    SECOND: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=sums.type.layout, k_width=4)
    values = values.reshape([M, 4, 2, 4]).permute([0, 2, 1, 3]).reshape([M, 32])
    plane = plane.reshape([4, 2, 4, N]).permute([1, 0, 2, 3]).reshape([32, N])
    values = gl.convert_layout(values, FIRST, assert_trivial=True)
    plane = gl.convert_layout(plane, SECOND, assert_trivial=True)
    return mma_v2(values, plane, sums)
