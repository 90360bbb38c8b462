"""attend: the warpgroups of gluon_prefill.py that compute attention of the tiles that its loading warp has loaded.

Two of 64 query rows alternate on the tensor cores, so that the softmax of one overlaps the products of the other; each
starts the scores of its next keys while it weighs the values of the last ones. Heads of 512 leave registers for 64
query rows only: two warpgroups share them, each with half of the keys' scores and half of the output, and pass weights
through shared memory. Imported by gluon_prefill.py alone, which checks Triton's version.
"""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.attention.triton_common import LOG2_E, LOWER, WHOLE, WINDOW

# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types)

# A power of two, so that MASKED * scale is exact: if a row sees no key, weights must be exp2(0), not exp2(rounding)
_MASKED = gl.constexpr(-(2.0**100))
# Fields that the loading warp writes for each tile, in this order
UNIT, TOKEN, LEFT, POSITION, SEQ_LEN, END = (gl.constexpr(field) for field in range(6))


@jit
def attend(
    attending, GROUP: gl.constexpr, PACK: gl.constexpr, PAGE: gl.constexpr, REACH: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, IS_FP8: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """One warpgroup: attention of its 64 query rows in each tile. Row m is token m // PACK, head m % PACK."""
    out_ptr, stride_out, sinks_ptr, rings, turns, work, shared_weights, scales, reach = attending
    scale_of_all, cap_scale_of_all, v_scale_of_all, k_scales_ptr, v_scales_ptr, stride_scale_head = scales
    queries, keys, values = rings
    q_tiles, q_loaded, q_free = queries
    k_tiles, _k_loaded, k_free = keys
    _v_tiles, _v_loaded, v_free = values
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[1]
    HEAD_DIM: gl.constexpr = k_tiles.shape[2]
    CONSUMERS: gl.constexpr = q_tiles.shape[0]
    SPREAD: gl.constexpr = gl.num_warps() // 4  # warpgroups that share the tile
    SHARES_WEIGHTS: gl.constexpr = SPREAD > 1
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, SPREAD], [16, BLOCK_N // SPREAD, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, SPREAD], [16, HEAD_DIM // SPREAD, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    # In registers, unless they would not fit beside the output
    HOLDS_QUERIES: gl.constexpr = HEAD_DIM <= 128
    done = 0  # tiles of keys
    tiles = 0
    mbarrier.wait(q_loaded.index(0), 0)
    end = _told(work, END)
    while end > 0:
        unit, token, left = _told(work, UNIT), _told(work, TOKEN), _told(work, LEFT)
        first_position, seq_len = _told(work, POSITION), _told(work, SEQ_LEN)
        scale, cap_scale, v_scale = scale_of_all, cap_scale_of_all, v_scale_of_all
        if k_scales_ptr is not None:  # constants of each KV head
            kv_head = unit * PACK // GROUP
            k_scale = gl.load(k_scales_ptr + kv_head * stride_scale_head)
            v_scale *= gl.load(v_scales_ptr + kv_head * stride_scale_head)
            if HAS_SOFTCAP:
                cap_scale *= k_scale
            else:
                scale *= k_scale
        if HOLDS_QUERIES:
            q = q_tiles.index(WHICH).load(gl.DotOperandLayout(0, SCORES, 2))
            mbarrier.arrive(q_free.index(0))
            if IS_FP8:
                q = (q.to(gl.float32) * LOWER).to(q.dtype).to(gl.float16)
        else:
            q = q_tiles.index(WHICH)
        members = WHICH * 64 + gl.arange(0, 64, ROWS)
        positions = first_position + members // PACK
        begin = 0
        full_start = 0  # the first key that all queries of the tile see
        if REACH != WHOLE:
            begin = oldest_seen(first_position, reach, REACH) // PAGE * PAGE
            full_start = oldest_seen(first_position + (CONSUMERS * 64 // PACK - 1), reach, REACH)
        borders = (positions, first_position, seq_len, reach)

        scores = _score(q, keys, turns, done, SCORES, CONSUMERS, WHICH)
        _pass_turn(turns, CONSUMERS, WHICH)
        logits = hopper.warpgroup_mma_wait(0, [scores])
        mbarrier.arrive(k_free.index(done % STAGES))
        if HAS_SOFTCAP:
            logits = _tanh(logits * cap_scale)
        if (begin + BLOCK_N > first_position + 1) | (begin < full_start):
            logits = _mask(logits, borders, begin, PAGE, REACH)
        maximum = gl.full([64], float("-inf"), gl.float32, ROWS)
        total = gl.full([64], 0.0, gl.float32, ROWS)
        if sinks_ptr is not None:  # as one more key, whose value is zero
            maximum = gl.load(sinks_ptr + unit * PACK + members % PACK) * LOG2_E
            total += 1.0
        weights, _shrink, maximum, total = _softmax(logits, maximum, total, scale)
        if SHARES_WEIGHTS:
            weights = _share(weights, shared_weights)
        else:
            weights = gl.convert_layout(weights.to(k_tiles.dtype), WEIGHTS)
        acc = gl.full([64, HEAD_DIM], 0.0, gl.float32, OUTPUT)
        for start in range(begin + BLOCK_N, end, BLOCK_N):
            scores = _score(q, keys, turns, done + 1, SCORES, CONSUMERS, WHICH)
            weighed = _weigh(weights, values, acc, done)
            _pass_turn(turns, CONSUMERS, WHICH)
            logits = hopper.warpgroup_mma_wait(1, [scores])
            mbarrier.arrive(k_free.index((done + 1) % STAGES))
            if HAS_SOFTCAP:
                logits = _tanh(logits * cap_scale)
            if REACH == WHOLE:
                if start + BLOCK_N > first_position + 1:
                    logits = _mask(logits, borders, start, PAGE, REACH)
            else:
                if (start + BLOCK_N > first_position + 1) | (start < full_start):
                    logits = _mask(logits, borders, start, PAGE, REACH)
            next_weights, shrink, maximum, total = _softmax(logits, maximum, total, scale)
            if SHARES_WEIGHTS:
                acc = hopper.warpgroup_mma_wait(0, [weighed])
            else:
                acc, weights = hopper.warpgroup_mma_wait(0, [weighed, weights])
            mbarrier.arrive(v_free.index(done % STAGES))
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUTPUT))[:, None]
            if SHARES_WEIGHTS:
                _share(next_weights, shared_weights)
            else:
                weights = gl.convert_layout(next_weights.to(k_tiles.dtype), WEIGHTS)
            done += 1
        if not HOLDS_QUERIES:
            mbarrier.arrive(q_free.index(0))
        if SHARES_WEIGHTS:
            acc = hopper.warpgroup_mma_wait(0, [_weigh(weights, values, acc, done)])
        else:
            acc, weights = hopper.warpgroup_mma_wait(0, [_weigh(weights, values, acc, done), weights])
        mbarrier.arrive(v_free.index(done % STAGES))
        done += 1
        acc = acc * gl.convert_layout(v_scale / total, gl.SliceLayout(1, OUTPUT))[:, None]
        _store(acc, out_ptr, stride_out, unit, token, left, PACK, WHICH)
        tiles += 1
        mbarrier.wait(q_loaded.index(0), tiles & 1)
        end = _told(work, END)


@jit
def oldest_seen(position, reach, REACH: gl.constexpr):
    """The first key that a query at that position sees; 0 for the negative positions of padding rows."""
    if REACH == WINDOW:
        return gl.maximum(position - reach + 1, 0)
    else:
        return gl.maximum(position, 0) // reach * reach


@jit
def _told(work, FIELD: gl.constexpr):
    return gl.sum(work.index(FIELD).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@jit
def _score(q, keys, turns, done, SCORES: gl.constexpr, CONSUMERS: gl.constexpr, WHICH: gl.constexpr):
    """Start q @ k.T for the next keys, once they are loaded and it is this warpgroup's turn."""
    tiles, loaded, _free = keys
    stage = done % tiles.shape[0]
    mbarrier.wait(loaded.index(stage), (done // tiles.shape[0]) & 1)
    if CONSUMERS > 1:
        mbarrier.wait(turns.index(WHICH), done & 1)
    zeros = gl.full([64, tiles.shape[1]], 0.0, gl.float32, SCORES)
    return hopper.warpgroup_mma(q, tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)


@jit
def _weigh(weights, values, acc, done):
    """Start acc + weights @ v, once the values are loaded."""
    tiles, loaded, _free = values
    stage = done % tiles.shape[0]
    mbarrier.wait(loaded.index(stage), (done // tiles.shape[0]) & 1)
    return hopper.warpgroup_mma(weights, tiles.index(stage), acc, is_async=True)


@jit
def _share(weights, tile):
    """Write the weights for the product with the values: each warpgroup of a tile has only some of their columns."""
    gl.thread_barrier()  # the other warpgroup's last product has read them
    tile.store(weights.to(tile.dtype))
    hopper.fence_async_shared()
    gl.thread_barrier()
    return tile


@jit
def _pass_turn(turns, CONSUMERS: gl.constexpr, WHICH: gl.constexpr):
    if CONSUMERS > 1:
        mbarrier.arrive(turns.index(1 - WHICH))


@jit
def _tanh(x):
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@jit
def _mask(logits, borders, start, PAGE: gl.constexpr, REACH: gl.constexpr):
    """Hide keys after the query, and before its window, where the first and last pages of the row are rotated.

    Slots past the row's end come first in its last page; those before the window of the tile's first query come last.
    """
    positions, first_position, seq_len, reach = borders
    columns = gl.arange(0, logits.shape[1], gl.SliceLayout(0, logits.type.layout))
    slots = columns & (PAGE - 1)
    last_start = (seq_len - 1) // PAGE * PAGE
    shift = gl.where(columns - slots == last_start - start, last_start + PAGE - seq_len, 0)
    if REACH != WHOLE:
        oldest = oldest_seen(first_position, reach, REACH)
        hidden = oldest & (PAGE - 1)
        shift -= gl.where(columns - slots == oldest - hidden - start, hidden, 0)
    keys = columns - slots + ((slots - shift) & (PAGE - 1))
    visible = keys[None, :] <= (positions - start)[:, None]
    if REACH != WHOLE:
        visible = visible & (keys[None, :] >= (oldest_seen(positions, reach, REACH) - start)[:, None])
    return gl.where(visible, logits, _MASKED)


@jit
def _softmax(logits, maximum, total, scale):
    """One step of the online softmax, in base 2. Returns weights, the factor on earlier ones, maximum, total."""
    new_maximum = gl.maximum(maximum, gl.max(logits, 1) * scale)
    shrink = gl.exp2(maximum - new_maximum)
    weights = gl.exp2(logits * scale - new_maximum[:, None])
    return weights, shrink, new_maximum, total * shrink + gl.sum(weights, 1)


@jit
def _store(acc, out_ptr, stride_out, unit, token, left, PACK: gl.constexpr, WHICH: gl.constexpr):
    """Write 64 rows of output, only tokens of the row itself, 16 bytes a thread."""
    HEAD_DIM: gl.constexpr = acc.shape[1]
    # For heads of 512 no shared memory is left to gather lines in
    LINES: gl.constexpr = (
        gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
        if HEAD_DIM <= 256
        else acc.type.layout
    )
    members = WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, LINES))
    tokens = members // PACK
    offsets = (token + tokens).to(gl.int64) * stride_out + (unit * PACK + members % PACK) * HEAD_DIM
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LINES))
    out = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), LINES)
    gl.store(
        out_ptr + offsets[:, None] + dims[None, :], out, mask=(tokens < left)[:, None] & (dims < HEAD_DIM)[None, :]
    )
