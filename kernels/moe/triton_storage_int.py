"""load_int_tile: a tile of an IntMatrix as values. Triton twin of kernels/moe/storage_int.py.

Integers are not converted to floats, which few units of a GPU do. With its lowest bit at bit p of a float's mantissa,
an integer is added to 2^(23 - p); a multiply-add with the scale, of 11 bits at most, then gives (value - zero) * scale.
That is exact if 2^(23 - p) plus the integer has 13 bits at most, so p is 11 at least: three shifts of a word bring its
eight 4-bit integers between bits 11 and 22, four shifts its four 8-bit ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.moe.storage_int import IntMatrix

# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types: kernel arguments carry none)


def name_of(matrix: IntMatrix) -> str:
    """Return the STORAGE of a matrix: "int4_bf16", "int8_fp16_zeros" and so on."""
    scales = "bf16" if matrix.scale_dtype == torch.bfloat16 else "fp16"
    return f"int{matrix.bits}_{scales}" + ("_zeros" if matrix.has_zeros else "")


@triton.constexpr_function
def is_integers(storage):
    """Return True for the names that name_of returns."""
    return storage.startswith("int")


@triton.constexpr_function
def _bits_of(storage):
    return int(storage[3])


@triton.constexpr_function
def _has(storage, word):
    return word in storage.split("_")


@triton.jit
def load_int_tile(
    words_ptr, groups_ptr, rows, k, start,
    STORAGE: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Return [BLOCK_N, BLOCK_K] fp32: inputs start … of `rows`, any finite number past the end.

    rows: [BLOCK_N] int64, of all experts' outputs. GROUP: inputs of a group, a multiple of those of a word; 0: all.
    """
    BITS: tl.constexpr = _bits_of(STORAGE)
    PER_WORD: tl.constexpr = 32 // BITS
    num_words = tl.cdiv(k, 4 * PER_WORD) * 4
    places = start // PER_WORD + tl.arange(0, BLOCK_K // PER_WORD)
    words = _load(words_ptr + rows[:, None] * num_words + places[None, :], places, num_words, EVEN_K, POLICY)
    scales, zeros = _load_groups(groups_ptr, rows, k, start, STORAGE, GROUP, BLOCK_K, EVEN_K, POLICY)
    if BITS == 8:
        offsets = _spread(-scales * (zeros + 256.0), words)
        scales = _spread(scales, words)
        first = _value(k, words << 15, 15, 8, scales, offsets)
        second = _value(k, words << 7, 15, 8, scales, offsets)
        third = _value(k, words >> 1, 15, 8, scales, offsets)
        fourth = _value(k, words >> 9, 15, 8, scales, offsets)
        values = tl.join(tl.join(first, third), tl.join(second, fourth))
    else:
        low = _spread(-scales * (zeros + 4096.0), words)
        middle = _spread(-scales * (zeros + 256.0), words)
        high = _spread(-scales * (zeros + 16.0), words)
        scales = _spread(scales, words)
        low_words, middle_words, high_words = words << 11, words >> 1, words >> 13
        evens = tl.join(
            tl.join(_value(k, low_words, 11, 4, scales, low), _value(k, middle_words, 15, 4, scales, middle)),
            tl.join(_value(k, low_words, 19, 4, scales, high), _value(k, high_words, 11, 4, scales, low)),
        )
        odds = tl.join(
            tl.join(_value(k, low_words, 15, 4, scales, middle), _value(k, middle_words, 19, 4, scales, high)),
            tl.join(_value(k, middle_words, 11, 4, scales, low), _value(k, high_words, 15, 4, scales, middle)),
        )
        values = tl.join(evens, odds)
    return tl.reshape(values, [words.shape[0], BLOCK_K])


@triton.jit
def _value(k, words, P: tl.constexpr, BITS: tl.constexpr, scales, offsets):
    """Return scale * (2^(23 - P) + the integer at bit P) + offset, in fp32. k is less than 2^30."""
    MASK: tl.constexpr = ((1 << BITS) - 1) << P
    # An exponent that the compiler takes for a variable: (a & b) | c with two constants is two instructions, not one
    exponent = tl.where(k < 0x40000000, (127 + 23 - P) << 23, 0)
    return ((words & MASK) | exponent).to(tl.float32, bitcast=True) * scales + offsets


@triton.jit
def _spread(values, words) -> tl.tensor:
    """Repeat each column, of a group or of a part of it, for its words."""
    COUNT: tl.constexpr = values.shape[1]
    wide = tl.broadcast_to(values[:, :, None], [words.shape[0], COUNT, words.shape[1] // COUNT])
    return tl.reshape(wide, words.shape)


@triton.constexpr_function
def _run_of(group, block_k):
    """Return the inputs, a power of two, that share a scale wherever a tile begins. group: 0 is all."""
    return block_k if group == 0 else min(block_k, group & -group)


@triton.jit
def _load_groups(
    groups_ptr, rows, k, start,
    STORAGE: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Return the scales and zero points in fp32 of each run of inputs, [BLOCK_N, runs of a tile]."""
    RUN: tl.constexpr = _run_of(GROUP, BLOCK_K)
    inputs = start + tl.arange(0, BLOCK_K // RUN) * RUN
    number = inputs * 0 if GROUP == 0 else inputs // GROUP
    num_groups = 1 if GROUP == 0 else k // GROUP
    if _has(STORAGE, "zeros"):
        ptrs = groups_ptr + rows[:, None] * num_groups + number[None, :]
    else:
        ptrs = groups_ptr + rows[:, None] * tl.cdiv(num_groups, 2) + (number // 2)[None, :]
    groups = _load(ptrs, inputs, k, EVEN_K, POLICY)
    if _has(STORAGE, "zeros"):
        zeros = (groups >> 16).to(tl.float32)
    else:
        groups = groups >> (number % 2 * 16)[None, :]
        zeros = 0.5 * (1 << _bits_of(STORAGE))
    if _has(STORAGE, "bf16"):
        scales = (groups << 16).to(tl.float32, bitcast=True)
    else:
        scales = groups.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scales, zeros


@triton.jit
def _load(ptrs, places, end, EVEN: tl.constexpr, POLICY: tl.constexpr):
    """Load the columns `places` of each row, 0 from `end` on."""
    if EVEN:
        return tl.load(ptrs, eviction_policy=POLICY)
    else:
        return tl.load(ptrs, mask=(places < end)[None, :], other=0, eviction_policy=POLICY)
