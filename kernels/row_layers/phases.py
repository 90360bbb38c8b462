# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""The phases of a decoder layer of one row, as one program computes its share of each.

Rows of weights are staged in shared memory up to a layer ahead, those of the output product alone in registers. Who
stages does so right behind a wait: loads that are under way would make the next wait longer.
"""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from kernels.row_layers.arithmetic import (
    FACTORS,
    HEADS,
    KEY_ROWS,
    KEYS,
    LINES,
    MATRIX,
    OUTPUTS,
    PARTS,
    PLACES,
    QUERIES,
    ROW_STATE,
    SPLITS_OF_HEADS,
    TILE_KEYS,
    TOKENS,
    VECTOR,
    attend_tile,
    begin_softmax,
    end_softmax,
    key_offsets,
    load_keys,
    load_turn,
    merge_splits,
    multiply_rows,
    norm_and_turn,
    rms_normed,
    rounded,
    row_pointers,
    silu_and_mul,
    spread,
)
from kernels.row_layers.exchange import post, receive, receive_pairs

UP_ROWS = gl.constexpr(8)  # of gates, and of ups, in a tile


@jit
def stage_qkv(buffer, w_ptr, program, zero, HIDDEN: gl.constexpr, ROWS: gl.constexpr) -> None:
    """Begin to copy a program's rows of the first product to shared memory."""
    async_copy.async_copy_global_to_shared(buffer, row_pointers(w_ptr, program * ROWS, 0, HIDDEN, ROWS, HIDDEN, zero))


@jit
def stage_up(
    buffer, w_ptr, program, zero, HIDDEN: gl.constexpr, INTERMEDIATE: gl.constexpr, TILES: gl.constexpr
) -> None:
    """Begin to copy a program's rows of gates, then of ups."""
    for tile in gl.static_range(TILES):
        first = (program * TILES + tile) * UP_ROWS
        gates = row_pointers(w_ptr, first, 0, HIDDEN, UP_ROWS, HIDDEN, zero)
        async_copy.async_copy_global_to_shared(buffer.index(tile), gates)
        ups = row_pointers(w_ptr, first + INTERMEDIATE, 0, HIDDEN, UP_ROWS, HIDDEN, zero)
        async_copy.async_copy_global_to_shared(buffer.index(TILES + tile), ups)


@jit
def stage_down(
    buffer, w_ptr, program, zero, HIDDEN: gl.constexpr, INTERMEDIATE: gl.constexpr, ROWS: gl.constexpr
) -> None:
    """Begin to copy a program's rows of the down product, as many inputs at a time as the model is wide."""
    for tile in gl.static_range(INTERMEDIATE // HIDDEN):
        pointers = row_pointers(w_ptr, program * ROWS, tile * HIDDEN, INTERMEDIATE, ROWS, HIDDEN, zero)
        async_copy.async_copy_global_to_shared(buffer.index(tile), pointers)


@jit
def cut_keys(past, split, SPLITS: gl.constexpr):
    """Cut the keys before the newest one. Returns a split's first key, end and tiles, if it is used, and how many are.

    The first split also has the newest key, so it is always used.
    """
    past = gl.maximum(past, 0)
    split_keys = gl.maximum(gl.cdiv(gl.cdiv(past, SPLITS), TILE_KEYS), 1) * TILE_KEYS
    used = gl.maximum(gl.cdiv(past, split_keys), 1)
    first = split * split_keys
    end = gl.minimum(first + split_keys, past)
    return first, end, gl.maximum(gl.cdiv(end - first, TILE_KEYS), 1), split < used, used


@jit
def first_tiles(cut, table_ptr, stride_block, stride_slot, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Return masks and offsets of a split's first two tiles of keys, and of the lines of the first one.

    They are equal in all layers.
    """
    first, end, _num_tiles, _is_used, _used = cut
    keys = first + _in_tile()
    valid, next_valid = keys < end, keys + TILE_KEYS < end
    offsets = key_offsets(table_ptr, keys, valid, stride_block, stride_slot, BLOCK_SIZE)
    next_offsets = key_offsets(table_ptr, keys + TILE_KEYS, next_valid, stride_block, stride_slot, BLOCK_SIZE)
    keys = first + gl.arange(0, TILE_KEYS, gl.SliceLayout(1, LINES))
    lines = key_offsets(table_ptr, keys, keys < end, stride_block, stride_slot, BLOCK_SIZE)[:, None]
    lines = lines + gl.arange(0, 2, gl.SliceLayout(0, LINES))[None, :] * (HEAD_DIM // 2)
    return valid, offsets, next_valid, next_offsets, lines


@jit
def next_stream(x, norm_ptr, words, layer, epoch, zero, HIDDEN: gl.constexpr, WAITS: gl.constexpr):
    """Return the residual stream with the last layer's down product, [HIDDEN] in VECTOR, and the norm's weight."""
    features = gl.arange(0, HIDDEN, VECTOR) + zero
    weight = gl.load(norm_ptr + features)
    if WAITS and layer > 0:
        x = rounded(x + receive(words + features, features >= 0, epoch - 1, HIDDEN // (32 * gl.num_warps()), True))
    return x, weight


@jit
def multiply_qkv(x, weight, buffer, words, program, epoch, eps, ROWS: gl.constexpr) -> None:
    """Norm the stream and post this program's queries, keys or values."""
    normed = spread(rms_normed(x, weight, eps))
    async_copy.wait_group(2)
    products = multiply_rows(buffer.load(MATRIX), normed)
    post(words + program * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, MATRIX)), rounded(products), epoch)


@jit
def attend_split(
    cut, firsts, caches, pool, turn, staging, turned_heads, words, program, epoch, zero,
    NUM_HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_ROWS: gl.constexpr,
    SPLITS: gl.constexpr, HIDDEN: gl.constexpr, QKV_ROWS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    HAS_NORM: gl.constexpr, WAITS: gl.constexpr,
) -> None:  # fmt: skip
    """Norm and rotate a KV head's queries and newest key, attend a split, post it; the first one writes the pool."""
    GROUP: gl.constexpr = NUM_HEADS // KV_HEADS
    first, end, num_tiles, _is_used, _used = cut
    valid, offsets, next_valid, next_offsets, _lines = firsts
    table_ptr, stride_block, stride_slot, slot_offset = pool
    q_norm_ptr, k_norm_ptr, angles_ptr, scale, eps = turn
    k_ptr, v_ptr = caches
    qkv_words, parts_words, lse_words = words
    kv_head, split = program // SPLITS, program % SPLITS
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(0, KEYS))) + zero
    k, v = load_keys(k_ptr, offsets, valid, dims), load_keys(v_ptr, offsets, valid, dims)
    rows = gl.arange(0, HEAD_ROWS, gl.SliceLayout(1, HEADS))
    head_dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, HEADS)) + zero
    weights = load_turn(head_dims, q_norm_ptr, k_norm_ptr, angles_ptr, HEAD_DIM, HAS_NORM)
    heads = gl.where(rows < GROUP, kv_head * GROUP + rows, NUM_HEADS + kv_head + (rows - GROUP) * KV_HEADS)
    base = qkv_words + (heads * HEAD_DIM)[:, None]
    own, partner = receive_pairs(
        base + head_dims[None, :], base + ((head_dims + HEAD_DIM // 2) % HEAD_DIM)[None, :],
        (rows < GROUP + 2)[:, None], epoch, 4, WAITS,
    )  # fmt: skip
    qkv_rows, next_qkv_ptr, has_next = staging
    if has_next:
        stage_qkv(qkv_rows, next_qkv_ptr, program, zero, HIDDEN, QKV_ROWS)
    turned = norm_and_turn(own, partner, rows, head_dims, weights, eps, GROUP, HEAD_DIM, HAS_NORM)
    turned_heads.store(turned)
    q = turned_heads.slice(0, GROUP).load(QUERIES) * scale
    new_key, new_value = turned_heads.slice(GROUP, 1).load(QUERIES), turned_heads.slice(GROUP + 1, 1).load(OUTPUTS)
    if split == 0:
        places = slot_offset + head_dims[None, :] + (rows * 0)[:, None]
        is_key, is_value = (rows == GROUP)[:, None], (rows == GROUP + 1)[:, None]
        gl.store(k_ptr + places, turned.to(gl.bfloat16), mask=is_key & (places >= 0))
        gl.store(v_ptr + places, turned.to(gl.bfloat16), mask=is_value & (places >= 0))
    state = begin_softmax(q, new_key, new_value, split == 0)
    for tile in range(num_tiles):
        next_k = load_keys(k_ptr, next_offsets, next_valid, dims)
        next_v = load_keys(v_ptr, next_offsets, next_valid, dims)
        keys = first + (tile + 2) * TILE_KEYS + _in_tile()
        next_offsets = key_offsets(table_ptr, keys, keys < end, stride_block, stride_slot, BLOCK_SIZE)
        state = attend_tile(q, k, v, valid, state)
        k, v, valid, next_valid = next_k, next_v, next_valid, keys < end
    attended, lse = end_softmax(state)
    entries = split * NUM_HEADS + kv_head * GROUP
    places = (entries + gl.arange(0, GROUP, gl.SliceLayout(1, OUTPUTS)))[:, None] * HEAD_DIM
    places = places + (gl.arange(0, HEAD_DIM, gl.SliceLayout(0, OUTPUTS)) + zero)[None, :]
    post(parts_words + places, attended, epoch)
    post(lse_words + entries + gl.arange(0, GROUP, gl.SliceLayout(1, ROW_STATE)), lse, epoch)


@jit
def multiply_output(
    w_ptr, words, used_splits, program, epoch, zero,
    HIDDEN: gl.constexpr, NUM_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, NUM_PARTS: gl.constexpr,
    SPLITS: gl.constexpr, PROGRAMS: gl.constexpr, WAITS: gl.constexpr,
) -> None:  # fmt: skip
    """Merge the splits of a part of the heads, and post what these add to some outputs."""
    part_heads: gl.constexpr = NUM_HEADS // NUM_PARTS
    part_width: gl.constexpr = part_heads * HEAD_DIM
    num_rows: gl.constexpr = HIDDEN * NUM_PARTS // PROGRAMS
    parts_words, lse_words, output_words = words
    part, first_row = program % NUM_PARTS, program // NUM_PARTS * num_rows
    w = gl.load(row_pointers(w_ptr, first_row, part * part_width, NUM_HEADS * HEAD_DIM, num_rows, part_width, zero))
    splits = gl.arange(0, SPLITS, gl.SliceLayout(1, gl.SliceLayout(2, SPLITS_OF_HEADS)))[:, None]
    heads = part * part_heads + gl.arange(0, part_heads, gl.SliceLayout(0, gl.SliceLayout(2, SPLITS_OF_HEADS)))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(0, SPLITS_OF_HEADS))) + zero
    dims = gl.expand_dims(dims[None, :], 0)
    entries = (splits * NUM_HEADS + heads[None, :])[:, :, None] + dims * 0
    used = (splits < used_splits)[:, :, None]
    places = parts_words + entries * HEAD_DIM + dims
    parts, lse = receive_pairs(places, lse_words + entries, used, epoch, 16, WAITS)
    attended = gl.reshape(merge_splits(parts, lse, used), [part_width])
    outputs = first_row + gl.arange(0, num_rows, gl.SliceLayout(1, MATRIX))
    post(output_words + part * HIDDEN + outputs, multiply_rows(w, spread(attended)), epoch)


@jit
def multiply_up(
    x, norm_ptr, buffer, words, residual_ptr, program, epoch, zero, eps,
    HIDDEN: gl.constexpr, NUM_PARTS: gl.constexpr, TILES: gl.constexpr, WAITS: gl.constexpr,
):  # fmt: skip
    """Add the output product to the stream and norm it, post some gated values; return the stream."""
    output_words, gated_words = words
    features = gl.arange(0, HIDDEN, VECTOR) + zero
    weight = gl.load(norm_ptr + features)
    parts = gl.arange(0, NUM_PARTS, gl.SliceLayout(1, PARTS))[:, None]
    num_words: gl.constexpr = NUM_PARTS * HIDDEN // (32 * gl.num_warps())
    products = receive(output_words + parts * HIDDEN + features[None, :], parts >= 0, epoch, num_words, WAITS)
    x = rounded(x + rounded(gl.sum(products, 0)))
    if program == 0:
        gl.store(residual_ptr + features, x.to(gl.bfloat16))
    normed = spread(rms_normed(x, weight, eps))
    async_copy.wait_group(2)
    for tile in gl.static_range(TILES):
        gate = multiply_rows(buffer.index(tile).load(MATRIX), normed)
        up = multiply_rows(buffer.index(TILES + tile).load(MATRIX), normed)
        outputs = (program * TILES + tile) * UP_ROWS + gl.arange(0, UP_ROWS, gl.SliceLayout(1, MATRIX))
        post(gated_words + outputs, silu_and_mul(gate, up), epoch)
    return x


@jit
def receive_inner(words, epoch, zero, INTERMEDIATE: gl.constexpr, PADDED: gl.constexpr, WAITS: gl.constexpr):
    """Receive all gated values, [PADDED] in VECTOR."""
    inner = gl.arange(0, PADDED, VECTOR) + zero
    return receive(words + inner, inner < INTERMEDIATE, epoch, PADDED // (32 * gl.num_warps()), WAITS)


@jit
def multiply_down(
    values, inner_row, buffer, words, out_ptr, program, epoch,
    HIDDEN: gl.constexpr, INTERMEDIATE: gl.constexpr, ROWS: gl.constexpr,
) -> None:  # fmt: skip
    """Post some outputs of the down product, and store them: the last layer's are the kernel's."""
    inner_row.store(values.to(gl.bfloat16))
    async_copy.wait_group(2)
    sums = gl.zeros([ROWS, HIDDEN], gl.float32, MATRIX)
    for tile in gl.static_range(INTERMEDIATE // HIDDEN):
        factors = inner_row.slice(tile * HIDDEN, HIDDEN).load(FACTORS).to(gl.float32)
        sums += buffer.index(tile).load(MATRIX).to(gl.float32) * factors[None, :]
    products = rounded(gl.sum(sums, 1))
    outputs = program * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, MATRIX))
    post(words + outputs, products, epoch)
    gl.store(out_ptr + outputs, products.to(gl.bfloat16))


@jit
def _in_tile():
    """Return each key's place in a tile, [TOKENS, KEY_ROWS]."""
    tokens = gl.arange(0, TOKENS, gl.SliceLayout(1, PLACES))
    return (tokens * KEY_ROWS)[:, None] + gl.arange(0, KEY_ROWS, gl.SliceLayout(0, PLACES))[None, :]
