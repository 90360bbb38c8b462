"""Loads of gluon_prefill.py over an e4m3 pool: pages from memory to registers, and to shared memory as float16.

TMA moves bytes as they are, and wgmma reads keys and values of 16 bits from shared memory. So a warpgroup takes the
loading warp's place: it writes the tiles that TMA would, slot by slot, in float16, in which e4m3 is exact.
"""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# ruff: noqa: ANN001, ANN201  (Triton reads annotations as types)


@jit
def load_row_of_bytes(
    pool, rings, loaded, table, column, oldest, seq_len, end, PAGE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    IS_WIDE: gl.constexpr,
):  # fmt: skip
    """Load keys and values of tokens [oldest, end) as gluon_prefill's _load_row does: pages are rotated alike.

    pool: pointers to keys and values, strides of blocks and slots. Returns the number of tiles loaded so far.
    """
    k_ptr, v_ptr, stride_block, stride_slot = pool
    STAGES: gl.constexpr = rings[1][0].shape[0]
    KEYS: gl.constexpr = rings[1][0].shape[1]
    HEAD_DIM: gl.constexpr = rings[1][0].shape[2]
    # 16 bytes a thread
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [512 // HEAD_DIM, HEAD_DIM // 16], [gl.num_warps(), 1], [1, 0])
    keys = gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))
    dims = column + gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LAYOUT))
    last = (seq_len - 1) // PAGE
    shift = (last + 1) * PAGE - seq_len
    first = oldest // PAGE
    hidden = oldest - first * PAGE
    for start in range(first * PAGE, end, KEYS):
        pages = gl.minimum((start + keys) // PAGE, last)
        blocks = gl.load(table + pages * PAGE // BLOCK_SIZE)
        late = gl.where(pages == first, hidden, 0) - gl.where(pages == last, shift, 0)
        slots = pages * PAGE % BLOCK_SIZE + late + keys % PAGE
        if IS_WIDE:
            blocks = blocks.to(gl.int64)
        offsets = gl.expand_dims(blocks * stride_block + slots * stride_slot, 1) + gl.expand_dims(dims, 0)
        is_slot = gl.expand_dims((slots >= 0) & (slots < BLOCK_SIZE), 1)  # else zeros, as of TMA
        k = gl.load(k_ptr + offsets, mask=is_slot, other=0.0)
        v = gl.load(v_ptr + offsets, mask=is_slot, other=0.0)
        stage = loaded % STAGES
        phase = (loaded // STAGES) & 1
        _put(k, rings[1], stage, phase)
        _put(v, rings[2], stage, phase)
        loaded += 1
    return loaded


@jit
def _put(values, ring, stage, phase) -> None:
    """Write a tile into a stage once it is free."""
    tiles, loaded, free = ring
    mbarrier.wait(free.index(stage), phase ^ 1)
    tiles.index(stage).store(values.to(gl.float16))
    hopper.fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(loaded.index(stage))
