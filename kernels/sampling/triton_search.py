# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""Finding the largest entry of a row such that entries at and above it weigh enough, without a sort.

A weight is 1 (top-k: a count) or the entry's probability relative to the most likely one (top-p: a mass). Rows are
visited by a list of their chunks of 128 entries, so that chunks too small to matter cost nothing. Imports triton at
once; only modules that already need it import this one.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = tl.constexpr(128)
MINUS_INF = tl.constexpr(float("-inf"))


@triton.jit
def search(
    data_ptr, live_ptr, num_live, size, target, low, value_low, maximum, scale, limit,
    IS_COUNT: tl.constexpr, IS_DENSE: tl.constexpr, TILE_CHUNKS: tl.constexpr,
):  # fmt: skip
    """The largest entry at and above which entries weigh `target`: (it, their weight, the weight of those above it).

    The answer lies in [low, high) throughout, and no entry there exceeds `top`. A pass weighs three thresholds: the
    middle, for a sure halving, and two around a linear guess, which mostly cut the interval to an eighth. Ends with one
    distinct entry inside, with a threshold that hits the target, or after `limit` passes, when low is still a bound.
    value_low: the weight at low, negative if unknown.
    """
    top = maximum
    high = tl.full([], float("inf"), tl.float32)
    value_high = tl.full([], 0.0, tl.float32)
    num_passes = 0
    while (low < top) & (value_low != target) & (num_passes < limit):
        width = top - low
        share = (value_low - target) / tl.maximum(value_low - value_high, 1.0e-30)
        guess = low + width * tl.clamp(share, 0.0, 1.0)
        middle = low + 0.5 * width
        middle = tl.where(middle > low, middle, top)
        left = tl.where(guess - width * 0.0625 > low, guess - width * 0.0625, middle)
        right = tl.where(guess + width * 0.0625 < top, guess + width * 0.0625, middle)
        first, last, at_left, at_middle, at_right = _measure(
            data_ptr, live_ptr, num_live, size, low, high, left, middle, right, maximum, scale,
            IS_COUNT, IS_DENSE, TILE_CHUNKS,
        )  # fmt: skip
        low, top = tl.maximum(low, first), tl.minimum(top, last)
        low, value_low, high, value_high = _narrow(low, value_low, high, value_high, target, left, at_left)
        low, value_low, high, value_high = _narrow(low, value_low, high, value_high, target, middle, at_middle)
        low, value_low, high, value_high = _narrow(low, value_low, high, value_high, target, right, at_right)
        top = tl.minimum(top, high)
        num_passes += 1
    return low, value_low, value_high


@triton.jit
def _narrow(low, value_low, high, value_high, target, threshold, value):
    """Move the end of the interval on whose side the threshold stands."""
    suffices = value >= target
    known_low = tl.where(value_low < 0.0, value, tl.minimum(value_low, value))
    return (
        tl.where(suffices, tl.maximum(low, threshold), low),
        tl.where(suffices, known_low, value_low),
        tl.where(suffices, high, tl.minimum(high, threshold)),
        tl.where(suffices, value_high, tl.maximum(value_high, value)),
    )


@triton.jit
def _measure(
    data_ptr, live_ptr, num_live, size, low, high, left, middle, right, maximum, scale,
    IS_COUNT: tl.constexpr, IS_DENSE: tl.constexpr, TILE_CHUNKS: tl.constexpr,
):  # fmt: skip
    """One pass: smallest and largest entry in [low, high), and the weight at and above each threshold."""
    first = tl.full([TILE_CHUNKS, CHUNK], float("inf"), tl.float32)
    last = tl.full([TILE_CHUNKS, CHUNK], MINUS_INF, tl.float32)
    at_left = tl.zeros([TILE_CHUNKS, CHUNK], tl.float32)
    at_middle = tl.zeros([TILE_CHUNKS, CHUNK], tl.float32)
    at_right = tl.zeros([TILE_CHUNKS, CHUNK], tl.float32)
    for start in range(0, num_live, TILE_CHUNKS):
        _, x = _load_chunks(data_ptr, live_ptr, start, num_live, size, IS_DENSE, TILE_CHUNKS)
        weight = weigh(x, maximum, scale, IS_COUNT)
        is_inside = (x >= low) & (x < high)
        first = tl.minimum(first, tl.where(is_inside, x, float("inf")))
        last = tl.maximum(last, tl.where(is_inside, x, MINUS_INF))
        at_left += tl.where(x >= left, weight, 0.0)
        at_middle += tl.where(x >= middle, weight, 0.0)
        at_right += tl.where(x >= right, weight, 0.0)
    return (
        tl.min(tl.min(first, 1), 0), tl.max(tl.max(last, 1), 0),
        tl.sum(tl.sum(at_left, 1), 0), tl.sum(tl.sum(at_middle, 1), 0), tl.sum(tl.sum(at_right, 1), 0),
    )  # fmt: skip


@triton.jit
def settle(row_ptr, live_ptr, num_live, size, cut, num_ties, maximum, scale, TILE_CHUNKS: tl.constexpr):
    """Keep all above the cut and the first num_ties equal to it: (token id of the last one kept, mass kept)."""
    mass = tl.zeros([TILE_CHUNKS, CHUNK], tl.float32)
    cut_id = tl.full([], 0, tl.int32) + size
    num_seen = tl.full([], 0, tl.int32)
    for start in range(0, num_live, TILE_CHUNKS):
        ids, x = _load_chunks(row_ptr, live_ptr, start, num_live, size, False, TILE_CHUNKS)
        mass += tl.where(x > cut, weigh(x, maximum, scale, False), 0.0)
        ties = (x == cut).to(tl.int32)
        in_chunk = tl.sum(ties, 1)
        in_tile = tl.sum(in_chunk, 0)
        if (num_seen < num_ties) & (num_seen + in_tile >= num_ties):
            rank = num_seen + (tl.cumsum(in_chunk, 0) - in_chunk)[:, None] + tl.cumsum(ties, 1)
            cut_id = tl.max(tl.max(tl.where((ties > 0) & (rank <= num_ties), ids, -1), 1), 0)
        num_seen += in_tile
    kept_ties = tl.minimum(num_seen, num_ties).to(tl.float32)
    return cut_id, tl.sum(tl.sum(mass, 1), 0) + kept_ties * weigh(cut, maximum, scale, False)


@triton.jit
def _load_chunks(
    data_ptr, live_ptr, start, num_live, size, IS_DENSE: tl.constexpr, TILE_CHUNKS: tl.constexpr
):  # fmt: skip
    """(places, entries) of TILE_CHUNKS chunks from the start-th of the list, or of all chunks; -inf past the end."""
    places = start + tl.arange(0, TILE_CHUNKS)
    chunks = places if IS_DENSE else tl.load(live_ptr + places, mask=places < num_live, other=0)
    ids = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    is_there = (places < num_live)[:, None] & (ids < size)
    return ids, tl.load(data_ptr + ids, mask=is_there, other=MINUS_INF).to(tl.float32)


@triton.jit
def weigh(x, maximum, scale, IS_COUNT: tl.constexpr):
    """What an entry adds: 1 to a count, its probability relative to the most likely to a mass."""
    return tl.full(x.shape, 1.0, tl.float32) if IS_COUNT else tl.exp2((x - maximum) * scale)
