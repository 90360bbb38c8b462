# ruff: noqa: ANN001, ANN201  (Triton reads annotations as types: kernel arguments carry none)
"""Shared parts of the Triton attention kernels: softmax constants, page addressing, logit capping.

Imports triton at once; only modules that already need it import this one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Used as -inf in masked logits. Finite, so that a tile in which a row sees no key gives exp2(0), not NaN; the next
# visible key's maximum then scales that tile's garbage by exp2(MASKED - maximum) = 0 exactly. A power of two, so that
# MASKED * scale is exact: in an fma its rounding alone would be past exp2's range.
MASKED = tl.constexpr(-(2.0**100))
LOG2_E = tl.constexpr(1.4426950408889634)


def is_wide(cache: torch.Tensor) -> bool:
    """Return True if element offsets into the cache overflow int32."""
    return cache.shape[0] * cache.stride(0) >= 2**31


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
