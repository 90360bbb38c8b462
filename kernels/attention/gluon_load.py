"""How gluon_prefill.py loads a row's keys and values: by TMA, or from an e4m3 pool through registers, as float16.

TMA moves bytes as they are, and wgmma reads keys and values of 16 bits from shared memory. So over an e4m3 pool a
warpgroup takes the loading warp's place: it writes the tiles that TMA would, slot by slot, in float16, in which e4m3 is
exact.
"""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.attention.gluon_decode_tiles import E4M3_WORD, FOUR_HALVES

# ruff: noqa: ANN001, ANN201, ANN202, RUF005  (Triton reads annotations as types and unpacks no tuples)


@jit
def load_row(descs, boxes, rings, loaded, table, column, oldest, seq_len, end, BLOCK_SIZE: gl.constexpr):
    """Load keys and values of tokens [oldest, end), one tile of each in turn, from the page of the oldest on.

    Returns the number of tiles loaded so far.
    """
    PAGE: gl.constexpr = boxes[1].shape[2]
    PAGES: gl.constexpr = rings[1][0].shape[1] // PAGE
    STAGES: gl.constexpr = rings[1][0].shape[0]
    last = (seq_len - 1) // PAGE
    shift = (last + 1) * PAGE - seq_len
    first = oldest // PAGE
    hidden = oldest - first * PAGE
    for start in range(first * PAGE, end, PAGES * PAGE):
        blocks = ()  # type: tuple[gl.tensor, ...]
        slots = ()  # type: tuple[gl.tensor, ...]
        for i in gl.static_range(PAGES):
            page = gl.minimum(start // PAGE + i, last)
            blocks = blocks + (gl.load(table + page * PAGE // BLOCK_SIZE),)
            late = gl.where(page == first, hidden, 0) - gl.where(page == last, shift, 0)
            slots = slots + (page * PAGE % BLOCK_SIZE + late,)
        stage = loaded % STAGES
        phase = (loaded // STAGES) & 1
        _load_pages(descs[1], boxes[1], rings[1], stage, phase, blocks, slots, column)
        _load_pages(descs[2], boxes[2], rings[2], stage, phase, blocks, slots, column)
        loaded += 1
    return loaded


@jit
def _load_pages(desc, boxes, ring, stage, phase, blocks, slots, column) -> None:
    """Load one tile, page by page, into a stage once it is free."""
    tiles, loaded, free = ring
    PAGES: gl.constexpr = tiles.shape[1] // boxes.shape[2]
    PANELS: gl.constexpr = tiles.shape[2] // 64
    mbarrier.wait(free.index(stage), phase ^ 1)
    mbarrier.expect(loaded.index(stage), tiles.shape[1] * PANELS * 128)
    for i in gl.static_range(PAGES):
        for panel in gl.static_range(PANELS):
            box = boxes.index((stage * PANELS + panel) * PAGES + i)
            tma.async_copy_global_to_shared(desc, [blocks[i], slots[i], column + panel * 64], loaded.index(stage), box)


@jit
def load_row_of_bytes(
    pool, rings, loaded, table, column, oldest, seq_len, end, PAGE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    IS_WIDE: gl.constexpr,
):  # fmt: skip
    """Load keys and values of tokens [oldest, end) as load_row does: pages are rotated alike.

    pool: pointers to words of keys and values, strides of blocks and slots in words; column: the head's first word. The
    next tile's loads are in flight while one is written. Returns the number of tiles loaded so far.
    """
    STAGES: gl.constexpr = rings[1][0].shape[0]
    KEYS: gl.constexpr = rings[1][0].shape[1]
    first = oldest // PAGE
    row = (table, column, seq_len, first, oldest - first * PAGE)
    k, v = _fetch(pool, row, first * PAGE, rings[1][0], PAGE, BLOCK_SIZE, IS_WIDE)
    for start in range(first * PAGE, end, KEYS):
        next_k, next_v = _fetch(pool, row, start + KEYS, rings[1][0], PAGE, BLOCK_SIZE, IS_WIDE)
        stage = loaded % STAGES
        phase = (loaded // STAGES) & 1
        _put(k, rings[1], stage, phase)
        _put(v, rings[2], stage, phase)
        k = next_k
        v = next_v
        loaded += 1
    return loaded


@jit
def _fetch(pool, row, start, tiles, PAGE: gl.constexpr, BLOCK_SIZE: gl.constexpr, IS_WIDE: gl.constexpr):
    """Load a tile of keys and one of values, 16 bytes a thread at a time. Past the row's last page it comes again."""
    k_ptr, v_ptr, stride_block, stride_slot = pool
    table, column, seq_len, first, hidden = row
    WORDS: gl.constexpr = tiles.shape[2] // 4
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [128 // WORDS, WORDS // 4], [gl.num_warps(), 1], [1, 0])
    keys = gl.arange(0, tiles.shape[1], gl.SliceLayout(1, LAYOUT))
    words = column + gl.arange(0, WORDS, gl.SliceLayout(0, LAYOUT))
    last = (seq_len - 1) // PAGE
    pages = gl.minimum((start + keys) // PAGE, last)
    blocks = gl.load(table + pages * PAGE // BLOCK_SIZE)
    late = gl.where(pages == first, hidden, 0) - gl.where(pages == last, (last + 1) * PAGE - seq_len, 0)
    slots = pages * PAGE % BLOCK_SIZE + late + keys % PAGE
    if IS_WIDE:
        blocks = blocks.to(gl.int64)
    offsets = gl.expand_dims(blocks * stride_block + slots * stride_slot, 1) + gl.expand_dims(words, 0)
    is_slot = gl.expand_dims((slots >= 0) & (slots < BLOCK_SIZE), 1)  # else zeros, as of TMA
    return gl.load(k_ptr + offsets, mask=is_slot, other=0), gl.load(v_ptr + offsets, mask=is_slot, other=0)


@jit
def _put(words, ring, stage, phase) -> None:
    """Write a tile into a stage once it is free."""
    tiles, loaded, free = ring
    x0, x1, x2, x3 = gl.inline_asm_elementwise(
        E4M3_WORD, "=h,=h,=h,=h,r", [words], dtype=FOUR_HALVES, is_pure=True, pack=1
    )  # fmt: skip
    halves = gl.join(gl.join(x0, x2), gl.join(x1, x3)).reshape([tiles.shape[1], tiles.shape[2]])
    mbarrier.wait(free.index(stage), phase ^ 1)
    tiles.index(stage).store(halves)
    hopper.fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(loaded.index(stage))
