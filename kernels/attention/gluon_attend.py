# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""The warpgroups of gluon_prefill.py that attend: products on the tensor cores, the softmax between them."""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# A power of two, so that MASKED * scale is exact: where a row sees no key, weights must be exp2(0), not exp2(rounding)
_MASKED = gl.constexpr(-(2.0**100))
# What the loading warp tells of a tile, in this order
UNIT, TOKEN, LEFT, POSITION, SEQ_LEN, END = (gl.constexpr(field) for field in range(6))


@jit
def attend(attending, PACK: gl.constexpr, PAGE: gl.constexpr, WHICH: gl.constexpr):
    """One warpgroup: the attention of its 64 query rows in each tile. Row m is token m // PACK, head m % PACK."""
    out_ptr, stride_out, rings, turns, work, scale = attending
    queries, keys, values = rings
    q_tiles, q_loaded, q_free = queries
    k_tiles, _k_loaded, k_free = keys
    _v_tiles, _v_loaded, v_free = values
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[1]
    HEAD_DIM: gl.constexpr = k_tiles.shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    done = 0  # tiles of keys
    tiles = 0
    mbarrier.wait(q_loaded.index(0), 0)
    end = _told(work, END)
    while end > 0:
        unit, token, left = _told(work, UNIT), _told(work, TOKEN), _told(work, LEFT)
        first_position, seq_len = _told(work, POSITION), _told(work, SEQ_LEN)
        q = q_tiles.index(WHICH).load(gl.DotOperandLayout(0, SCORES, 2))
        mbarrier.arrive(q_free.index(0))
        positions = first_position + (WHICH * 64 + gl.arange(0, 64, ROWS)) // PACK

        scores = _score(q, keys, turns, done, q_tiles.shape[0], WHICH)
        _pass_turn(turns, q_tiles.shape[0], WHICH)
        logits = hopper.warpgroup_mma_wait(0, [scores])
        mbarrier.arrive(k_free.index(done % STAGES))
        if first_position + 1 < BLOCK_N:
            logits = _mask(logits, positions, 0, seq_len, PAGE)
        maximum = gl.full([64], float("-inf"), gl.float32, ROWS)
        total = gl.full([64], 0.0, gl.float32, ROWS)
        weights, _shrink, maximum, total = _softmax(logits, maximum, total, scale)
        weights = gl.convert_layout(weights.to(q.dtype), WEIGHTS)
        acc = gl.full([64, HEAD_DIM], 0.0, gl.float32, OUTPUT)
        for start in range(BLOCK_N, end, BLOCK_N):
            scores = _score(q, keys, turns, done + 1, q_tiles.shape[0], WHICH)
            weighed = _weigh(weights, values, acc, done)
            _pass_turn(turns, q_tiles.shape[0], WHICH)
            logits = hopper.warpgroup_mma_wait(1, [scores])
            mbarrier.arrive(k_free.index((done + 1) % STAGES))
            if start + BLOCK_N > first_position + 1:
                logits = _mask(logits, positions, start, seq_len, PAGE)
            next_weights, shrink, maximum, total = _softmax(logits, maximum, total, scale)
            acc, weights = hopper.warpgroup_mma_wait(0, [weighed, weights])
            mbarrier.arrive(v_free.index(done % STAGES))
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUTPUT))[:, None]
            weights = gl.convert_layout(next_weights.to(q.dtype), WEIGHTS)
            done += 1
        acc, weights = hopper.warpgroup_mma_wait(0, [_weigh(weights, values, acc, done), weights])
        mbarrier.arrive(v_free.index(done % STAGES))
        done += 1
        acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, OUTPUT))[:, None]
        _store(acc, out_ptr, stride_out, unit, token, left, PACK, WHICH)
        tiles += 1
        mbarrier.wait(q_loaded.index(0), tiles & 1)
        end = _told(work, END)


@jit
def _told(work, FIELD: gl.constexpr):
    return gl.sum(work.index(FIELD).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@jit
def _score(q, keys, turns, done, CONSUMERS: gl.constexpr, WHICH: gl.constexpr):
    """Start q @ k.T for the next keys, once they are there and it is this warpgroup's turn."""
    tiles, loaded, _free = keys
    stage = done % tiles.shape[0]
    mbarrier.wait(loaded.index(stage), (done // tiles.shape[0]) & 1)
    if CONSUMERS > 1:
        mbarrier.wait(turns.index(WHICH), done & 1)
    zeros = gl.full([64, tiles.shape[1]], 0.0, gl.float32, q.type.layout.parent)
    return hopper.warpgroup_mma(q, tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)


@jit
def _weigh(weights, values, acc, done):
    """Start acc + weights @ v, once the values are there."""
    tiles, loaded, _free = values
    stage = done % tiles.shape[0]
    mbarrier.wait(loaded.index(stage), (done // tiles.shape[0]) & 1)
    return hopper.warpgroup_mma(weights, tiles.index(stage), acc, is_async=True)


@jit
def _pass_turn(turns, CONSUMERS: gl.constexpr, WHICH: gl.constexpr):
    if CONSUMERS > 1:
        mbarrier.arrive(turns.index(1 - WHICH))


@jit
def _mask(logits, positions, start, seq_len, PAGE: gl.constexpr):
    """Hide keys after the query and slots past the row's end, which stand first in the row's last page."""
    columns = gl.arange(0, logits.shape[1], gl.SliceLayout(0, logits.type.layout))
    slots = columns & (PAGE - 1)
    last_start = (seq_len - 1) // PAGE * PAGE
    shift = gl.where(columns - slots == last_start - start, last_start + PAGE - seq_len, 0)
    keys = columns - slots + ((slots - shift) & (PAGE - 1))
    return gl.where(keys[None, :] <= (positions - start)[:, None], logits, _MASKED)


@jit
def _softmax(logits, maximum, total, scale):
    """One step of the online softmax, in base 2. Returns weights, what shrinks those before, maximum, total."""
    new_maximum = gl.maximum(maximum, gl.max(logits, 1) * scale)
    shrink = gl.exp2(maximum - new_maximum)
    weights = gl.exp2(logits * scale - new_maximum[:, None])
    return weights, shrink, new_maximum, total * shrink + gl.sum(weights, 1)


@jit
def _store(acc, out_ptr, stride_out, unit, token, left, PACK: gl.constexpr, WHICH: gl.constexpr):
    """Write 64 rows of output, those of the row's own tokens, 16 bytes a thread."""
    HEAD_DIM: gl.constexpr = acc.shape[1]
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    members = WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, LINES))
    tokens = members // PACK
    offsets = (token + tokens).to(gl.int64) * stride_out + (unit * PACK + members % PACK) * HEAD_DIM
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LINES))
    out = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), LINES)
    gl.store(
        out_ptr + offsets[:, None] + dims[None, :], out, mask=(tokens < left)[:, None] & (dims < HEAD_DIM)[None, :]
    )
