"""Tiles of 8-bit keys and values of gluon_decode.py: from memory to registers, then float16, and the two products.

A thread loads 16 bytes of a key, and of four keys' values. In registers these bytes are the parts of mma.sync's first
operand that the thread needs, with dimensions and keys in an order of their own, which the queries' dimensions, the
weights' keys and the output's rows share. e4m3 and integers of 8 bits are exact in float16.
"""

from __future__ import annotations

import triton
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.attention.triton_common import LOWER

# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types)

# PTX for a word, four neighbours, as float16
E4M3_WORD = gl.constexpr(
    "{ .reg .b32 x, y; .reg .b16 l, h; mov.b32 {l, h}, $4;"
    " cvt.rn.f16x2.e4m3x2 x, l; cvt.rn.f16x2.e4m3x2 y, h; mov.b32 {$0, $1}, x; mov.b32 {$2, $3}, y; }"
)
# For a word of each of two keys: of each dimension both keys' numbers
_E4M3_PAIRS = gl.constexpr(
    "{ .reg .b32 x, y; .reg .b16 l, h; prmt.b32 x, $4, $5, 0x5140; prmt.b32 y, $4, $5, 0x7362;"
    " mov.b32 {l, h}, x; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h;"
    " mov.b32 {l, h}, y; cvt.rn.f16x2.e4m3x2 $2, l; cvt.rn.f16x2.e4m3x2 $3, h; }"
)
# An integer with its highest bit turned is the lowest bits of 1,024 + 128 + itself. 0x64 begins 1,024; 0x6480 is 1,152
_DECLARED = ".reg .b32 x, y, high, less; mov.b32 high, 0x64646464; mov.b32 less, 0x64806480;"
_INT8_WORD = gl.constexpr(
    f"{{ {_DECLARED} xor.b32 x, $4, 0x80808080;"
    " prmt.b32 y, x, high, 0x4140; sub.f16x2 y, y, less; mov.b32 {$0, $1}, y;"
    " prmt.b32 y, x, high, 0x4342; sub.f16x2 y, y, less; mov.b32 {$2, $3}, y; }"
)
_INT8_PAIRS = gl.constexpr(
    f"{{ {_DECLARED} prmt.b32 x, $4, $5, 0x5140; xor.b32 x, x, 0x80808080;"
    " prmt.b32 y, x, high, 0x4140; sub.f16x2 $0, y, less; prmt.b32 y, x, high, 0x4342; sub.f16x2 $1, y, less;"
    " prmt.b32 x, $4, $5, 0x7362; xor.b32 x, x, 0x80808080;"
    " prmt.b32 y, x, high, 0x4140; sub.f16x2 $2, y, less; prmt.b32 y, x, high, 0x4342; sub.f16x2 $3, y, less; }"
)
FOUR_HALVES = gl.constexpr((gl.float16, gl.float16, gl.float16, gl.float16))


@triton.constexpr_function
def _bits(limit):
    """Return the powers of two below a power of two."""
    return [1 << i for i in range(limit.bit_length() - 1)]


@triton.constexpr_function
def sums_layout(warps):
    """Return the layout of logits, [warps, keys, heads], and of outputs, [warps, dim, heads]."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@triton.constexpr_function
def keys_layout(warps, keys, dim):
    """Return the layout of keys as words, [warps, keys / 16, 16, dim / 4]: four neighbours a thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[
            *([0, 0, 0, bit] for bit in (1, 2)),
            [0, 0, 8, 0],
            *([0, 0, 0, 16 * bit] for bit in _bits(dim // 64)),
            *([0, bit, 0, 0] for bit in _bits(keys // 16)),
        ],
        lane_bases=[[0, 0, 0, 4], [0, 0, 0, 8], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]],
        warp_bases=[[bit, 0, 0, 0] for bit in _bits(warps)],
        block_bases=[],
        shape=[warps, keys // 16, 16, dim // 4],
    )


@triton.constexpr_function
def scales_layout(warps, keys):
    """Return the layout of the scales of keys in the order of logits, [warps, keys / 16, 16]."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 8], *([0, bit, 0] for bit in _bits(keys // 16))],
        lane_bases=[[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]],
        warp_bases=[[bit, 0, 0] for bit in _bits(warps)],
        block_bases=[],
        shape=[warps, keys // 16, 16],
    )


@triton.constexpr_function
def _near(dim):
    """Return the neighbouring words of a value that a thread has: 16 bytes, or 8 of a head of 64."""
    return min(4, dim // 32)


@triton.constexpr_function
def values_layout(warps, keys, dim, pairs):
    """Return the layout of values as words, [warps, keys / 16, 16, dim / 4]. pairs: two keys follow each other."""
    near = _near(dim)
    words = [[0, 0, 0, bit] for bit in _bits(near)]
    first = [[0, 0, 1, 0]]
    return gl.DistributedLinearLayout(
        reg_bases=[
            *(first + words if pairs else words + first),
            [0, 0, 2, 0],
            *([0, 0, 0, near * 8 * bit] for bit in _bits(dim // 4 // (near * 8))),
            *([0, bit, 0, 0] for bit in _bits(keys // 16)),
        ],
        lane_bases=[[0, 0, 4, 0], [0, 0, 8, 0], *([0, 0, 0, near * bit] for bit in (1, 2, 4))],
        warp_bases=[[bit, 0, 0, 0] for bit in _bits(warps)],
        block_bases=[],
        shape=[warps, keys // 16, 16, dim // 4],
    )


@triton.constexpr_function
def _queries_layout(warps, heads, dim):
    """Return the layout of queries as loaded, [heads, dim]: sixteen neighbours a thread; all warps have all."""
    return gl.DistributedLinearLayout(
        reg_bases=[
            *([0, bit] for bit in (1, 2, 4, 8)),
            *([0, 64 * bit] for bit in _bits(dim // 64)),
            *([8 * bit, 0] for bit in _bits(heads // 8)),
        ],
        lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, 0] for _ in _bits(warps)],
        block_bases=[],
        shape=[heads, dim],
    )


@jit
def key_of(rows):
    """Return which of sixteen keys is a row of the operands: a thread has four neighbours of the values' keys."""
    return (rows & 1) | ((rows >> 3) << 1) | (((rows >> 1) & 3) << 2)


@jit
def dims_of(places, HEAD_DIM: gl.constexpr):
    """Return the dimension of a head that is a row of the output."""
    NEAR: gl.constexpr = _near(HEAD_DIM)
    words = (places // (32 * NEAR) * 8 + places % 8) * NEAR + places // 32 % NEAR
    return words * 4 + places // 8 % 4


@jit
def tile_pointers(k_ptr, v_ptr, stride_slot, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Return pointers to the words of sixteen keys and values of a block, for load_tile: [1, 1, 16, dim / 4] each."""
    WARPS: gl.constexpr = gl.num_warps()
    K: gl.constexpr = keys_layout(WARPS, KEYS, HEAD_DIM)
    V: gl.constexpr = values_layout(WARPS, KEYS, HEAD_DIM, False)
    k_rows = key_of(gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(3, K)))))
    k_words = gl.arange(0, HEAD_DIM // 4, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, K))))
    v_rows = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(3, V))))
    v_words = gl.arange(0, HEAD_DIM // 4, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, V))))
    return (
        k_ptr + _outer_sum(k_rows * stride_slot, k_words),
        v_ptr + _outer_sum(v_rows * stride_slot, v_words),
    )


@jit
def _outer_sum(rows, words):
    rows = gl.expand_dims(gl.expand_dims(gl.expand_dims(rows, 0), 0), 3)
    return rows + gl.expand_dims(gl.expand_dims(gl.expand_dims(words, 0), 0), 0)


@jit
def load_tile(pointers, offsets, is_any):
    """Load keys and values at sixteen slots from each of offsets on, [WARPS, KEYS / 16], of the keys' layout."""
    k_ptrs, v_ptrs = pointers
    k = gl.load(k_ptrs + gl.expand_dims(gl.expand_dims(offsets, 2), 3), mask=is_any)
    offsets = gl.convert_layout(offsets, gl.SliceLayout(2, gl.SliceLayout(3, v_ptrs.type.layout)))
    return k, gl.load(v_ptrs + gl.expand_dims(gl.expand_dims(offsets, 2), 3), mask=is_any)


@jit
def keys_of_values(first, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Return the keys of values as loaded, [WARPS, KEYS / 16, 16, 1]. first: of the tile."""
    V: gl.constexpr = values_layout(gl.num_warps(), KEYS, HEAD_DIM, False)
    warps = gl.arange(0, gl.num_warps(), gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, V))))
    groups = gl.arange(0, KEYS // 16, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, V))))
    rows = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(3, V))))
    firsts = first + gl.expand_dims(warps * KEYS, 1) + gl.expand_dims(groups * 16, 0)
    return gl.expand_dims(gl.expand_dims(firsts, 2) + gl.expand_dims(gl.expand_dims(rows, 0), 0), 3)


@jit
def load_queries(q_ptr, GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Return the queries of a KV head, lowered, as the second operand: [WARPS, dim, HEADS] float16."""
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = _queries_layout(WARPS, HEADS, HEAD_DIM)
    heads = gl.arange(0, HEADS, gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LAYOUT))
    offsets = gl.expand_dims(heads * HEAD_DIM, 1) + gl.expand_dims(dims, 0)
    q = gl.load(q_ptr + offsets, mask=gl.expand_dims(heads < GROUP, 1), other=0.0)
    q = (q.to(gl.float32) * LOWER).to(q.dtype).to(gl.float16)
    q = q.reshape([HEADS, HEAD_DIM // 64, 4, 4, 2, 2]).permute([1, 3, 4, 2, 5, 0]).reshape([HEAD_DIM, HEADS])
    q = gl.convert_layout(q, gl.SliceLayout(0, gl.DotOperandLayout(1, sums_layout(WARPS), 2)))
    return gl.expand_dims(q, 0).broadcast_to([WARPS, HEAD_DIM, HEADS])


@jit
def score(k, q, IS_INT8: gl.constexpr):
    """Return k @ q: [WARPS, KEYS, HEADS] fp32. k: words as loaded."""
    WARPS: gl.constexpr = k.shape[0]
    KEYS: gl.constexpr = k.shape[1] * 16
    D: gl.constexpr = k.shape[3] * 4
    SUMS: gl.constexpr = sums_layout(WARPS)
    k0, k1, k2, k3 = gl.inline_asm_elementwise(
        _INT8_WORD if IS_INT8 else E4M3_WORD, "=h,=h,=h,=h,r", [k], dtype=FOUR_HALVES, is_pure=True, pack=1
    )  # fmt: skip
    k = gl.join(gl.join(k0, k1), gl.join(k2, k3))  # [..., 2, 2]: bits 0 and 1 of the dimension
    k = k.reshape([WARPS, KEYS, D // 64, 4, 4, 2, 2]).permute([0, 1, 2, 4, 6, 3, 5]).reshape([WARPS, KEYS, D])
    k = gl.convert_layout(k, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)
    return mma_v2(k, q, gl.zeros([WARPS, KEYS, q.shape[2]], gl.float32, SUMS))


@jit
def weigh(v, weights, acc, IS_INT8: gl.constexpr):
    """Return acc + v.T @ weights. v: words as loaded; weights: [WARPS, KEYS, HEADS] float16, in the sums' layout."""
    WARPS: gl.constexpr = v.shape[0]
    KEYS: gl.constexpr = v.shape[1] * 16
    D: gl.constexpr = v.shape[3] * 4
    HEADS: gl.constexpr = weights.shape[2]
    SUMS: gl.constexpr = sums_layout(WARPS)
    NEAR: gl.constexpr = _near(D)
    v = gl.convert_layout(v, values_layout(WARPS, KEYS, D, True), assert_trivial=True)
    v0, v1, v2, v3 = gl.inline_asm_elementwise(
        _INT8_PAIRS if IS_INT8 else _E4M3_PAIRS, "=r,=r,=r,=r,r,r", [v], dtype=FOUR_HALVES, is_pure=True, pack=2
    )  # fmt: skip
    v = gl.join(gl.join(v0, v2), gl.join(v1, v3))  # [..., 2, 2]: bits 1 and 0 of the dimension
    v = v.reshape([WARPS, KEYS // 16, 4, 2, 2, D // (32 * NEAR), 8, NEAR, 2, 2])
    v = v.permute([0, 5, 7, 8, 9, 6, 1, 3, 2, 4]).reshape([WARPS, D, KEYS])
    v = gl.convert_layout(v, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)
    # A thread has two heads of a key, and needs two keys of a head
    weights = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [weights], dtype=gl.float16, is_pure=True, pack=2
    )  # fmt: skip
    weights = weights.reshape([WARPS, KEYS // 8, 8, HEADS // 8, 8]).permute([0, 1, 4, 3, 2])
    weights = weights.reshape([WARPS, KEYS, HEADS])
    weights = gl.convert_layout(weights, gl.DotOperandLayout(1, SUMS, 2), assert_trivial=True)
    return mma_v2(v, weights, acc)
