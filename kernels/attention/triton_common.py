# ruff: noqa: ANN001, ANN201  (Triton reads annotations as types: kernel arguments carry none)
"""Shared parts of the Triton attention kernels: softmax constants, head sizes, reaches, page addressing, logit capping.

Imports triton at once; only modules that already need it import this one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.elementwise.reference import KVScales

# Used as -inf in masked logits. Finite, so that a tile in which a row sees no key gives exp2(0), not NaN; the next
# visible key's maximum then scales that tile's garbage by exp2(MASKED - maximum) = 0 exactly. A power of two, so that
# MASKED * scale is exact: in an fma its rounding alone would be past exp2's range.
MASKED = tl.constexpr(-(2.0**100))
LOG2_E = tl.constexpr(1.4426950408889634)
# Which of the keys before it a query sees: all; those of a window; those of its own chunk of positions
WHOLE, WINDOW, CHUNK = (tl.constexpr(number) for number in range(3))

# The weights of int8 values hold their scales, which are small: float16 has few numbers so small. No scale of a float16
# is above 65504 / 127, so weights that are lifted by this factor are below its largest number
LIFT = tl.constexpr(64.0)

# bfloat16 queries become float16 times this factor: its largest number is 65504, so that those up to a million fit.
# Those below 2^-13 lose bits, of at most 2^-21: times the largest number of fp8, 448, that is still less than 2^-12
# They are of their own dtype again before float16: LLVM makes a product in float32 that becomes float16 one of float16,
# as if bfloat16 had no larger numbers
LOWER = tl.constexpr(2.0**-4)

# PTX for four numbers, $2: 1024 + 128 + x has x's byte, its sign bit flipped, as the low bits of its mantissa
INT8_TO_FLOAT16 = tl.constexpr(
    "{ .reg .b32 bytes, low, high, offset; xor.b32 bytes, $2, 0x80808080; mov.b32 offset, 0x64806480;"
    " prmt.b32 low, bytes, 0x64, 0x4140; prmt.b32 high, bytes, 0x64, 0x4342;"
    " sub.rn.f16x2 $0, low, offset; sub.rn.f16x2 $1, high, offset; }"
)


def reach_of(sliding_window: int | None, chunk: int | None) -> tuple[int, int]:
    """Return the most keys that a query sees, 0 for all, and the kind of reach: WHOLE, WINDOW or CHUNK."""
    assert sliding_window is None or chunk is None, "a layer has a sliding window or chunks, not both"
    if sliding_window is not None:
        return sliding_window, WINDOW.value
    return (0, WHOLE.value) if chunk is None else (chunk, CHUNK.value)


def split_dims(head_dim: int) -> tuple[int, int]:
    """Return the sizes of the one or two tiles, powers of two, that hold a head: 192 is 128 and 64, not 256."""
    padded = triton.next_power_of_2(head_dim)
    rest = triton.next_power_of_2(max(16, head_dim - padded // 2))
    return (padded // 2, rest) if padded > 128 and rest <= padded // 4 else (padded, 0)


def value_strides(k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[int | None, int | None, int | None]:
    """Return the strides of v_cache, or three times None if they are k_cache's: then one offset serves both."""
    assert k_cache.stride(3) == v_cache.stride(3) == 1, "heads must be dense"
    same = k_cache.stride() == v_cache.stride()
    return (None, None, None) if same else (v_cache.stride(0), v_cache.stride(1), v_cache.stride(2))


def scale_arguments(
    kv_scales: KVScales, dtype: torch.dtype
) -> tuple[float, float, tuple[torch.Tensor | int | None, ...]]:
    """Return the factors of all logits and of the output, and the rest of KVScales.for_kernel. dtype: of queries."""
    k, v, others = kv_scales.for_kernel()
    is_lifted = others[2] is not None and dtype == torch.float16
    return k, v / LIFT.value if is_lifted else v, others


def is_wide(*caches: torch.Tensor) -> bool:
    """Return True if element offsets into one of the caches overflow int32."""
    return any(cache.shape[0] * cache.stride(0) >= 2**31 for cache in caches)


def has_ptx(q: torch.Tensor) -> bool:
    """Return True if kernels may hold PTX: Triton's interpreter runs none."""
    return q.is_cuda


@triton.jit
def oldest_seen(positions, length, REACH: tl.constexpr):
    """The first key that a query at each position sees; 0 for the negative positions of padding rows."""
    if REACH == WINDOW:
        return tl.maximum(positions - length + 1, 0)
    else:
        return tl.maximum(positions, 0) // length * length


@triton.jit
def load_sinks(sinks_ptr, heads, mask):
    """The sink of each head, in base 2."""
    return tl.load(sinks_ptr + heads, mask=mask, other=0.0).to(tl.float32) * LOG2_E


@triton.jit
def page_offsets(
    table_ptr,  # this row's block_table
    keys,  # [BLOCK_N] key indices in the row
    in_row,  # [BLOCK_N] bool, or None: every key exists
    stride_block,
    stride_slot,
    BLOCK_SIZE: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    """Return the element offset of each key's slot; int64 (IS_WIDE) only from 2^31 elements: it costs registers."""
    if in_row is None:
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE)
    else:
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=in_row, other=0)
    if IS_WIDE:
        blocks = blocks.to(tl.int64)
    return blocks * stride_block + (keys % BLOCK_SIZE) * stride_slot


@triton.jit
def load_scales(pointers, mask, MASK: tl.constexpr, LIFTED: tl.constexpr):
    """The scales of keys or values of an int8 pool, 0 where masked. LIFTED: those of values, for float16 weights."""
    scales = tl.load(pointers, mask=mask, other=0.0) if MASK else tl.load(pointers)
    return scales * LIFT if LIFTED else scales


@triton.jit
def lower_queries(q, q_rest, scale, POOL: tl.constexpr):
    """Two tiles of queries in the dtype of the products with keys of dtype POOL, the scale of their logits, and 1.

    bfloat16 queries meet fp8 keys in float16, which holds these exactly too: GPUs convert fp8 to float16 in pairs, and
    from there to bfloat16 each number by itself, at a rate that would limit decoding.
    The 1 is for a loop around all products, in which both tiles become zeros at the end. Triton keeps the queries of
    wgmma in shared memory only if they are what was loaded, or a variable of a loop; else they take registers, and each
    wgmma waits for the one before. The compiler does not know the 1, unless the queries are what was loaded.
    """
    rounds = 1
    if POOL.is_fp8e4nv() and q.dtype == tl.bfloat16:
        q = (q.to(tl.float32) * LOWER).to(q.dtype).to(tl.float16)
        q_rest = (q_rest.to(tl.float32) * LOWER).to(q_rest.dtype).to(tl.float16)
        scale = scale / LOWER
        rounds = tl.minimum(tl.num_programs(0), 1)
    return q, q_rest, scale, rounds


@triton.jit
def widen(x, dtype: tl.constexpr, HAS_PTX: tl.constexpr):
    """Numbers of a pool in dtype; int8 becomes float16 by its bits, as Triton makes it bfloat16.

    For float16 Triton has an instruction that converts one number, slowly.
    """
    if HAS_PTX and x.dtype == tl.int8 and dtype == tl.float16:
        return tl.inline_asm_elementwise(INT8_TO_FLOAT16, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
    else:
        return x.to(dtype)


@triton.jit
def widen_values(x, dtype: tl.constexpr, HAS_PTX: tl.constexpr):
    """Values of a pool in dtype, as widen. Those of 8 bits are widened where they are loaded, by a move in PTX.

    Triton does not convert past that; else it would widen operands of the product. mma wants these transposed, which
    ldmatrix does to numbers of 16 bits as it reads them from shared memory; bytes are read one by one.
    """
    values = widen(x, dtype, HAS_PTX)
    if HAS_PTX and x.dtype.primitive_bitwidth == 8 and dtype.primitive_bitwidth == 16:
        values = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [values], dtype=values.dtype, is_pure=False, pack=2
        )  # fmt: skip
    return values


@triton.jit
def cap_logits(logits, softcap):
    """softcap * tanh(logits / softcap), tanh by exp2: libdevice does not run in the interpreter."""
    grown = tl.exp2(logits * (2.0 * LOG2_E / softcap))
    return softcap * (1.0 - 2.0 / (grown + 1.0))


@triton.jit
def prefetch_l2(pointers) -> None:
    """Prefetch the line of each pointer into L2. Any address of the pool is valid: all writers share L2."""
    addresses = pointers.to(tl.uint64, bitcast=True)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )
