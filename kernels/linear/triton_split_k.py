# ruff: noqa: ANN001  (Triton reads annotations as types: kernel arguments carry none)
"""store_split: products whose K is split over programs.

The last split of a tile to arrive adds the parts in their fixed order and stores the sum, so the result does not depend
on which one is last. For kernels with a grid of (tiles of rows, tiles of outputs, splits) that hold w @ x.T:
[BLOCK_N, M_PAD].
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_split(
    acc, out_ptrs, mask, partial_ptr, arrivals_ptr, bias_ptr, features, n,
    M_PAD: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr,
) -> None:  # fmt: skip
    """Sum this tile over its splits, add the bias and store, rounded to the output's dtype.

    acc: this split's part, [BLOCK_N, M_PAD] fp32; out_ptrs, mask: of that shape. features: [BLOCK_N], of n.
    """
    if SPLITS > 1:
        entries = tl.arange(0, BLOCK_N)[:, None] * M_PAD + tl.arange(0, M_PAD)[None, :]
        meeting = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        parts = partial_ptr + meeting * (SPLITS * BLOCK_N * M_PAD) + entries
        tl.store(parts + tl.program_id(2) * (BLOCK_N * M_PAD), acc)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + meeting, 1, sem="acq_rel")
        tl.device_assert(arrived < SPLITS, "arrivals were not zero before the launch")  # with TRITON_DEBUG=1
        if arrived == SPLITS - 1:
            tl.store(arrivals_ptr + meeting, 0)
            total = tl.zeros([BLOCK_N, M_PAD], tl.float32)
            for index in tl.static_range(SPLITS):
                total += tl.load(parts + index * (BLOCK_N * M_PAD), cache_modifier=".cg")
            _store(out_ptrs, total, bias_ptr, features, n, mask, HAS_BIAS)
    else:
        _store(out_ptrs, acc, bias_ptr, features, n, mask, HAS_BIAS)


@triton.jit
def _store(out_ptrs, values, bias_ptr, features, n, mask, HAS_BIAS: tl.constexpr) -> None:
    if HAS_BIAS:
        values += tl.load(bias_ptr + features, mask=features < n, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptrs, values.to(out_ptrs.dtype.element_ty), mask=mask)
