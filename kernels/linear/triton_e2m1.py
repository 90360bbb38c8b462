"""e2m1: a plane of codes out of a tile of words (kernels/linear/planes.py), times its scales, in registers.

In bfloat16 on CUDA a pair of codes becomes a pair of values by PTX on 32 bits: sign, exponent and mantissa move to
their places in two bfloat16, which are then the values times 2^-126, and one multiplication by the scales restores it.
The PTX takes two neighbours of a row at once, so it relies on Triton passing neighbours: it does in the layouts in
which tensor cores take 16-bit operands. tests/gpu/test_packed_experts_cuda.py fails if that changes.
Otherwise, and in Triton's interpreter, the same is done by arithmetic in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

# ruff: noqa: ANN001, ANN201  (Triton reads annotations as types: kernel arguments carry none)


@triton.jit
def scales_by_32(scales, PLANE_INDEX: tl.constexpr):
    """Bits of a plane's scales times 2^126 as bfloat16, twice in 32 bits: [N, 1]. scales: [N] int32, MXFP4's."""
    return (((scales >> (8 * PLANE_INDEX)) & 255) * 0x00800080 + 0x3F003F00)[:, None]


@triton.jit
def scales_by_16(scales, PLANE_INDEX: tl.constexpr):
    """Bits of a plane's scales times 2^118 as bfloat16, twice in 32 bits: [N, 32]. scales: [N, 2] int32, NVFP4's.

    Broadcast and reshaped, not chosen by a comparison of inputs: past that the compiler would not move its loads to
    the layout of the product, and values would go through shared memory.
    """
    factors = ((scales >> (8 * PLANE_INDEX)) & 255) * 0x00100010 + 0x75807580
    spread = tl.broadcast_to(factors[:, :, None], [scales.shape[0], 2, 16])
    return tl.reshape(spread, [scales.shape[0], 32])


@triton.jit
def e2m1(words, factors, dtype: tl.constexpr, PLANE_INDEX: tl.constexpr, HAS_PTX: tl.constexpr):
    """Plane PLANE_INDEX of words [N, 32] times its factors, in dtype. factors: of scales_by_32 or scales_by_16."""
    if HAS_PTX:
        ASM: tl.constexpr = _E2M1[PLANE_INDEX]
        return tl.inline_asm_elementwise(
            ASM, "=r,r,r,r", [words, tl.broadcast_to(factors, words.shape)],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        words = words.to(tl.int32)
        if PLANE_INDEX < 3:
            bits = (words << (3 * PLANE_INDEX)) & 0x81C0
        else:
            bits = ((words << 1) & 0x8000) | ((words >> 5) & 0x0100) | ((words >> 4) & 0x00C0)
        values = (bits << 16).to(tl.float32, bitcast=True) * (factors << 16).to(tl.float32, bitcast=True)
        return values.to(dtype)


def e2m1_asm(plane: int) -> str:
    """PTX for two neighbours of a plane; see kernels/linear/planes.py. $1: their words; $2: the factor, twice."""
    if plane < 3:
        bits = f"shl.b32 size, $1, {3 * plane}; and.b32 size, size, 0x81C081C0;"
    else:
        bits = (
            "shl.b32 size, $1, 1; and.b32 size, size, 0x80008000;"
            " shr.u32 sign, $1, 5; and.b32 sign, sign, 0x01000100; or.b32 size, size, sign;"
            " shr.u32 sign, $1, 4; and.b32 sign, sign, 0x00C000C0; or.b32 size, size, sign;"
        )
    declared = "{ .reg .b32 sign, size, zero; mov.b32 zero, 0x80008000; "
    return declared + bits + " fma.rn.bf16x2 $0, size, $2, zero; }"


_E2M1 = tl.constexpr(tuple(e2m1_asm(plane) for plane in range(4)))
