# ruff: noqa: ANN001, ANN201  (Triton reads annotations as types: kernel arguments carry none)
"""The arithmetic of a decoder layer of one row, as parts of products and of attention that a program computes.

A program has 8 warps. Vectors lie as VECTOR, one value of each thread after the other; the rows of a matrix are a
warp's each, so that their sums need no shared memory.
"""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

NUM_WARPS = 8
MASKED = gl.constexpr(-1.0e30)
# [N, K]: a row of a warp
MATRIX = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [NUM_WARPS, 1], [1, 0]))
FACTORS = gl.constexpr(gl.SliceLayout(0, MATRIX.value))  # [K]
# [parts, N]: a thread has all parts of its values
PARTS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [1, NUM_WARPS], [1, 0]))
VECTOR = gl.constexpr(gl.SliceLayout(0, PARTS.value))
# [splits, heads, head_dim]: a thread has all splits of its values
SPLITS_OF_HEADS = gl.constexpr(gl.BlockedLayout([1, 1, 1], [1, 1, 32], [1, 2, NUM_WARPS // 2], [2, 1, 0]))
# [rows, head_dim]: queries, key and value of a KV head
HEADS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [NUM_WARPS, 1], [1, 0]))
# [queries, TOKENS, KEY_ROWS, 128]: a thread has 8 dimensions of all queries and of TOKENS keys
ATTENTION = gl.constexpr(gl.BlockedLayout([1, 1, 1, 8], [1, 1, 2, 16], [1, 1, NUM_WARPS, 1], [3, 2, 1, 0]))
KEYS = gl.constexpr(gl.SliceLayout(0, ATTENTION.value))  # [TOKENS, KEY_ROWS, 128]
PLACES = gl.constexpr(gl.SliceLayout(2, KEYS.value))  # [TOKENS, KEY_ROWS]
LOGITS = gl.constexpr(gl.SliceLayout(3, ATTENTION.value))  # [queries, TOKENS, KEY_ROWS]
ROW_STATE = gl.constexpr(gl.SliceLayout(1, LOGITS.value))  # [queries, KEY_ROWS]
SUMS = gl.constexpr(gl.SliceLayout(1, ATTENTION.value))  # [queries, KEY_ROWS, 128]
QUERIES = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, ATTENTION.value)))  # [queries, 128]
OUTPUTS = gl.constexpr(gl.SliceLayout(1, SUMS.value))  # [queries, 128]
# [TILE_KEYS, lines of 128 bytes]
LINES = gl.constexpr(gl.BlockedLayout([1, 1], [16, 2], [NUM_WARPS, 1], [1, 0]))
TOKENS = gl.constexpr(4)
KEY_ROWS = gl.constexpr(2 * NUM_WARPS)
TILE_KEYS = gl.constexpr(8 * NUM_WARPS)


@jit
def row_pointers(w_ptr, first_row, first_column, K: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, zero):
    """Return pointers to a part of w, [N, K]: [ROWS, COLUMNS] in MATRIX. zero: of fresh_zero."""
    rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, MATRIX))
    columns = gl.arange(0, COLUMNS, FACTORS) + zero
    return w_ptr + (rows * K + first_column)[:, None] + columns[None, :]


@jit
def multiply_rows(w, x):
    """w: [ROWS, K] in MATRIX; x: [K] fp32 in FACTORS; returns their products, [ROWS] fp32."""
    return gl.sum(w.to(gl.float32) * x[None, :], 1)


@jit
def spread(x):
    """Round a vector to bf16 and give each warp all of it: [K] fp32 in FACTORS."""
    return gl.convert_layout(x.to(gl.bfloat16), FACTORS).to(gl.float32)


@jit
def rounded(x):
    """Round fp32 to bf16's values: the specification rounds there."""
    return x.to(gl.bfloat16).to(gl.float32)


@jit
def rms_normed(x, weight, eps):
    """Equal kernels.elementwise.triton.rms_normed. x: [N] fp32; weight: [N] bf16; fp32 before the last rounding."""
    inverse = gl.rsqrt(gl.sum(x * x, 0) / x.shape[0] + eps)
    return weight.to(gl.float32) * rounded(x * inverse)


@jit
def silu_and_mul(gate, up):
    """Equal kernels.elementwise.triton.gated: of fp32 products, rounded as theirs would be; fp32 of bf16's values."""
    gate, up = rounded(gate), rounded(up)
    return rounded(rounded(gate / (1.0 + gl.exp(-gate))) * up)


@jit
def load_turn(
    dims, q_weight_ptr, k_weight_ptr, angles_ptr, HEAD_DIM: gl.constexpr, HAS_NORM: gl.constexpr
):  # fmt: skip
    """Load what norm_and_turn needs beside the values: weights of each dimension and its other one, cos and sin."""
    HALF: gl.constexpr = HEAD_DIM // 2
    cos = gl.load(angles_ptr + dims % HALF).to(gl.float32)
    sin = gl.load(angles_ptr + HALF + dims % HALF).to(gl.float32)
    if HAS_NORM:
        others = (dims + HALF) % HEAD_DIM
        q_weight, q_other = gl.load(q_weight_ptr + dims).to(gl.float32), gl.load(q_weight_ptr + others).to(gl.float32)
        k_weight, k_other = gl.load(k_weight_ptr + dims).to(gl.float32), gl.load(k_weight_ptr + others).to(gl.float32)
        return q_weight, q_other, k_weight, k_other, cos, sin
    else:
        return cos, cos, cos, cos, cos, sin


@jit
def norm_and_turn(
    x, partner, rows, dims, weights, eps, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, HAS_NORM: gl.constexpr
):  # fmt: skip
    """Norm and rotate the query heads of a KV head, rows 0 to GROUP - 1, and its key, row GROUP; leave its value.

    x, partner: [ROWS, HEAD_DIM] fp32, each dimension and the other one of its pair; weights: of load_turn. Equals
    norm_rope_write_kv but for one rounding: a product and a difference of bf16 may become one fused operation.
    """
    q_weight, q_other, k_weight, k_other, cos, sin = weights
    own, other = x, partner
    if HAS_NORM:
        inverse = gl.rsqrt(gl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        is_query = (rows < GROUP)[:, None]
        own = rounded(gl.where(is_query, q_weight[None, :], k_weight[None, :]) * rounded(x * inverse))
        other = rounded(gl.where(is_query, q_other[None, :], k_other[None, :]) * rounded(partner * inverse))
    turn = rounded(other * sin[None, :])
    turned = rounded(rounded(own * cos[None, :]) + gl.where((dims < HEAD_DIM // 2)[None, :], -turn, turn))
    return gl.where((rows > GROUP)[:, None], x, turned)


@jit
def key_offsets(table_ptr, keys, valid, stride_block, stride_slot, BLOCK_SIZE: gl.constexpr):
    """Return the element offset of each key's slot, int64."""
    blocks = gl.load(table_ptr + keys // BLOCK_SIZE, mask=valid, other=0).to(gl.int64)
    return blocks * stride_block + (keys % BLOCK_SIZE) * stride_slot


@jit
def load_keys(ptr, offsets, valid, dims):
    """Load a tile of keys or values, [TOKENS, KEY_ROWS, 128], zeros where not valid."""
    pointers = ptr + offsets[:, :, None] + gl.expand_dims(dims[None, :], 0)
    return gl.load(pointers, mask=gl.broadcast(valid[:, :, None], pointers)[0], other=0.0)


@jit
def begin_softmax(q, new_key, new_value, has_new):
    """Return the softmax of the newest key alone, or of none: (maxima, sums) [queries, KEY_ROWS], outputs [.., 128].

    q: [queries, 128] in QUERIES, times scale and log2(e); new_key: [1, 128] in it; new_value: in OUTPUTS.
    """
    logits = gl.convert_layout(gl.sum(q * new_key, 1), gl.SliceLayout(1, ROW_STATE))
    is_first = (gl.arange(0, KEY_ROWS, gl.SliceLayout(0, ROW_STATE)) == 0)[None, :] & has_new
    m = gl.where(is_first, logits[:, None], MASKED)
    total = gl.where(is_first, m * 0.0 + 1.0, 0.0)
    share = gl.convert_layout(total, gl.SliceLayout(2, SUMS))
    return m, total, share[:, :, None] * gl.expand_dims(new_value, 1)


@jit
def attend_tile(q, k, v, valid, state):
    """Add a tile of keys, [TOKENS, KEY_ROWS, 128], to the softmax of begin_softmax; valid: in PLACES.

    Each of KEY_ROWS neighbouring keys has a softmax of its own, so that no tile waits for a sum over warps.
    """
    m, total, acc = state
    q = gl.expand_dims(gl.expand_dims(q, 1), 2)
    logits = gl.sum(gl.expand_dims(k.to(gl.float32), 0) * q, 3)
    valid = gl.expand_dims(gl.convert_layout(valid, gl.SliceLayout(0, LOGITS)), 0)
    logits = gl.where(valid, logits, MASKED)
    new_m = gl.maximum(m, gl.max(logits, 1))
    p = gl.where(valid, gl.exp2(logits - gl.expand_dims(new_m, 1)), 0.0)
    kept = gl.exp2(m - new_m)
    added = gl.sum(gl.expand_dims(p, 3) * gl.expand_dims(v.to(gl.float32), 0), 1)
    acc = acc * gl.expand_dims(gl.convert_layout(kept, gl.SliceLayout(2, SUMS)), 2) + added
    return new_m, total * kept + gl.sum(p, 1), acc


@jit
def end_softmax(state):
    """Merge the softmaxes of KEY_ROWS keys: outputs, [queries, 128] in OUTPUTS, and log2 of the denominators."""
    m, total, acc = state
    largest = gl.max(m, 1)
    share = gl.exp2(m - largest[:, None])
    whole = gl.sum(total * share, 1)
    outputs = gl.sum(acc * gl.expand_dims(gl.convert_layout(share, gl.SliceLayout(2, SUMS)), 2), 1)
    divisor = gl.convert_layout(whole, gl.SliceLayout(1, OUTPUTS))
    return outputs / divisor[:, None], largest + gl.log2(whole)


@jit
def merge_splits(parts, lse, used):
    """Merge the splits of some heads. parts, lse: [splits, heads, head_dim]; used: [splits, 1, 1]; [heads, ...]."""
    lse = gl.where(used, lse, MASKED)
    share = gl.exp2(lse - gl.expand_dims(gl.max(lse, 0), 0))
    return gl.sum(parts * share, 0) / gl.sum(share, 0)
