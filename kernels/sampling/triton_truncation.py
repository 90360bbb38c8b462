"""Top-k, top-p and min-p without a sort: the first two launches of a truncated batch.

Entries are ordered by (logit descending, token id ascending), so the kept set ends at one place in that order: a logit
(`cut`), the last token id kept of those equal to it (`cut_id`), and for min-p a scaled logit (`floor`). Launch one
computes the maximum and the mass of each chunk of 128 logits. Launch two searches, one program per row: first over the
chunk maxima, which bounds the cut from below, then over the logits of the chunks above that bound. A peaked
distribution therefore costs a few chunks; a flat one several passes over its row in L2.

`search` finds the largest entry of a row such that entries at and above it reach a target weight. A weight is 1
(top-k: a count) or the entry's probability relative to the most likely one (top-p: a mass). It visits a list of chunks
of the row, so that irrelevant chunks cost nothing. Imports triton at once; only modules that already need it import
this one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.attention.triton_common import LOG2_E
from kernels.sampling.reference import SamplingState

# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types: kernel arguments carry none)


CHUNK = tl.constexpr(128)
MINUS_INF = tl.constexpr(float("-inf"))


@triton.jit
def search(
    data_ptr, live_ptr, num_live, size, target, low, value_low, maximum, scale, limit,
    IS_COUNT: tl.constexpr, IS_DENSE: tl.constexpr, TILE_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Return the largest entry at and above which entries weigh `target`: (entry, their weight, weight above it).

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
    """Move the end of the interval on the threshold's side."""
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
    """Return an entry's weight: 1 for a count, its probability relative to the most likely for a mass."""
    return tl.full(x.shape, 1.0, tl.float32) if IS_COUNT else tl.exp2((x - maximum) * scale)


_LOWEST = tl.constexpr(-1.0e38)


@dataclass(frozen=True)
class TruncationScratch:
    """Buffers passed between the launches of one step. One per stream."""

    # [max_rows, num_chunks] float32: the largest logit of each chunk, and its mass relative to that
    chunk_max: torch.Tensor
    chunk_sum: torch.Tensor
    # [max_rows, num_chunks] int32: the chunks that a search visits
    live: torch.Tensor
    # [max_rows] float32, int32, float32: the cut of each row; -inf, V, -inf if it keeps all
    cut: torch.Tensor
    cut_id: torch.Tensor
    floor: torch.Tensor

    @classmethod
    def allocate(cls, *, max_rows: int, vocab_size: int, device: torch.device) -> TruncationScratch:
        """Allocate for any batch of up to max_rows rows: 14 KB a row for 150,000 tokens."""
        shape = (max_rows, triton.cdiv(vocab_size, CHUNK.value))
        return cls(
            chunk_max=torch.empty(shape, dtype=torch.float32, device=device),
            chunk_sum=torch.empty(shape, dtype=torch.float32, device=device),
            live=torch.empty(shape, dtype=torch.int32, device=device),
            cut=torch.empty(max_rows, dtype=torch.float32, device=device),
            cut_id=torch.empty(max_rows, dtype=torch.int32, device=device),
            floor=torch.empty(max_rows, dtype=torch.float32, device=device),
        )


def find_cuts(
    logits: torch.Tensor,
    *,
    req_index: torch.Tensor,
    state: SamplingState,
    scratch: TruncationScratch,
    pdl: bool = False,
) -> None:
    """Fill cut, cut_id and floor of the S rows of logits [S, V]. Two launches; never syncs."""
    num_rows, size = logits.shape
    parameters = (req_index, state.temperature, state.top_k, state.top_p, state.min_p)
    num_chunks = triton.cdiv(size, CHUNK.value)
    _chunk_kernel[(triton.cdiv(num_chunks, 32), num_rows)](
        logits, *parameters, scratch.chunk_max, scratch.chunk_sum, logits.stride(0), size, scratch.chunk_max.stride(0),
        TILE_CHUNKS=32, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    _cut_kernel[(num_rows,)](
        logits, *parameters, scratch.chunk_max, scratch.chunk_sum, scratch.live,
        scratch.cut, scratch.cut_id, scratch.floor, logits.stride(0), size, num_chunks, scratch.chunk_max.stride(0),
        CHUNKS_PAD=triton.next_power_of_2(num_chunks), TILE_CHUNKS=32, PDL=pdl, num_warps=16, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _chunk_kernel(
    logits_ptr, req_index_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, max_ptr, sum_ptr,
    stride_row, size, stride_chunks, TILE_CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Maximum and mass of TILE_CHUNKS chunks of one row."""
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    temperature, top_k, top_p, min_p = _parameters(row, req_index_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr)
    if not _is_truncated(temperature, top_k, top_p, min_p):
        return
    chunks = tl.program_id(0) * TILE_CHUNKS + tl.arange(0, TILE_CHUNKS)
    ids = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = tl.load(logits_ptr + row * stride_row + ids, mask=ids < size, other=MINUS_INF).to(tl.float32)
    maxima = tl.max(x, 1)
    weights = tl.where(x > MINUS_INF, tl.exp2((x - maxima[:, None]) * (LOG2_E / temperature)), 0.0)
    targets = row * stride_chunks + chunks
    tl.store(max_ptr + targets, maxima, mask=chunks * CHUNK < size)
    tl.store(sum_ptr + targets, tl.sum(weights, 1), mask=chunks * CHUNK < size)


@triton.jit
def _cut_kernel(
    logits_ptr, req_index_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, max_ptr, sum_ptr, live_ptr,
    cut_ptr, cut_id_ptr, floor_ptr, stride_row, size, num_chunks, stride_chunks,
    CHUNKS_PAD: tl.constexpr, TILE_CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: the cut of top_k, then of top_p over the remaining mass, then of min_p."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    temperature, top_k, top_p, min_p = _parameters(row, req_index_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr)
    cut = tl.full([], MINUS_INF, tl.float32)
    floor = tl.full([], MINUS_INF, tl.float32)
    cut_id = tl.full([], 0, tl.int32) + size
    if _is_truncated(temperature, top_k, top_p, min_p):
        row_ptr = logits_ptr + row * stride_row
        max_row_ptr = max_ptr + row * stride_chunks
        live_row_ptr = live_ptr + row * stride_chunks
        places = tl.arange(0, CHUNKS_PAD)
        maxima = tl.load(max_row_ptr + places, mask=places < num_chunks, other=MINUS_INF)
        sums = tl.load(sum_ptr + row * stride_chunks + places, mask=places < num_chunks, other=0.0)
        scale = LOG2_E / temperature
        maximum = tl.max(maxima, 0)
        mass = tl.sum(tl.where(maxima > MINUS_INF, sums * tl.exp2((maxima - maximum) * scale), 0.0), 0)
        lowest = tl.full([], _LOWEST, tl.float32)
        if (top_k > 0) & (top_k < size):
            cut, cut_id, mass = _find_cut(
                row_ptr, max_row_ptr, live_row_ptr, maxima, top_k.to(tl.float32), mass, lowest, cut, cut_id,
                maximum, scale, size, num_chunks,
                IS_COUNT=True, CHUNKS_PAD=CHUNKS_PAD, TILE_CHUNKS=TILE_CHUNKS,
            )  # fmt: skip
        if top_p < 1.0:
            # Entries below this weigh less than 1 - top_p even if all V were there
            bound = maximum + tl.log2((1.0 - top_p) * 0.999 * mass / size) / scale
            cut, cut_id, mass = _find_cut(
                row_ptr, max_row_ptr, live_row_ptr, maxima, tl.maximum(top_p * mass, 1.0e-30), mass, bound, cut,
                cut_id, maximum, scale, size, num_chunks,
                IS_COUNT=False, CHUNKS_PAD=CHUNKS_PAD, TILE_CHUNKS=TILE_CHUNKS,
            )  # fmt: skip
        if min_p > 0.0:
            floor = divide(maximum, temperature) + tl.log(min_p)
            # A little below the floor: it only saves the last launch the noise of dropped entries
            coarse = floor * temperature
            coarse -= 1.0e-5 * tl.abs(coarse) + 1.0e-5
            cut_id = tl.where(coarse > cut, size, cut_id)
            cut = tl.maximum(cut, coarse)
    tl.store(cut_ptr + row, cut)
    tl.store(cut_id_ptr + row, cut_id)
    tl.store(floor_ptr + row, floor)


@triton.jit
def divide(x, divisor):
    """x / divisor, correctly rounded: Triton's own fp32 division is approximate. divisor: a scalar."""
    inverse = tl.div_rn(1.0, divisor)
    quotient = x * inverse
    return tl.fma(tl.fma(-quotient, divisor, x), inverse, quotient)


@triton.jit
def _parameters(row, req_index_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr):
    """Gather a row's parameters."""
    req_index = tl.load(req_index_ptr + row)
    temperature, top_k = tl.load(temperature_ptr + req_index), tl.load(top_k_ptr + req_index)
    return temperature, top_k, tl.load(top_p_ptr + req_index), tl.load(min_p_ptr + req_index)


@triton.jit
def _is_truncated(temperature, top_k, top_p, min_p):
    """Return True if a row draws from a subset of the entries."""
    return (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))


@triton.jit
def _find_cut(
    row_ptr, max_row_ptr, live_row_ptr, maxima, target, mass, bound, cut, cut_id, maximum, scale, size, num_chunks,
    IS_COUNT: tl.constexpr, CHUNKS_PAD: tl.constexpr, TILE_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Find the shortest prefix, within (cut, cut_id), that holds `target` entries or mass: (cut, cut_id, mass kept).

    bound: a logit at or below the answer; mass: the mass that (cut, cut_id) keeps.
    """
    # The chunk maxima at or above a logit are some of its entries: if they suffice, the answer is not lower
    is_finite = maxima > MINUS_INF
    known = tl.sum(tl.where(is_finite, weigh(maxima, maximum, scale, IS_COUNT), 0.0), 0)
    if known >= target:
        lowest = tl.min(tl.where(is_finite, maxima, maximum), 0)
        chunk_bound, _, _ = search(
            max_row_ptr, live_row_ptr, (num_chunks + CHUNK - 1) // CHUNK, num_chunks, target, lowest, known,
            maximum, scale, 6, IS_COUNT=IS_COUNT, IS_DENSE=True, TILE_CHUNKS=TILE_CHUNKS,
        )  # fmt: skip
        bound = tl.maximum(bound, chunk_bound)
    bound = tl.maximum(bound, cut)
    is_live = maxima >= bound
    tl.debug_barrier()  # all threads have read the list of the previous search
    places = tl.arange(0, CHUNKS_PAD)
    tl.store(live_row_ptr + tl.cumsum(is_live.to(tl.int32), 0) - 1, places, mask=is_live)
    num_live = tl.sum(is_live.to(tl.int32), 0)
    tl.debug_barrier()
    unknown = tl.full([], -1.0, tl.float32)
    found, value_at, value_above = search(
        row_ptr, live_row_ptr, num_live, size, target, bound, unknown if IS_COUNT else mass, maximum, scale, 64,
        IS_COUNT=IS_COUNT, IS_DENSE=False, TILE_CHUNKS=TILE_CHUNKS,
    )  # fmt: skip
    weight = tl.maximum(weigh(found, maximum, scale, IS_COUNT), 1.0e-30)
    num_ties = tl.clamp(tl.ceil((target - value_above) / weight), 1.0, 1.0e9)
    found_id = tl.full([], 0, tl.int32) + size
    # A mass search need not count ties if it keeps them all, as it does when logits are distinct
    if (num_ties + 0.5 < (value_at - value_above) / weight) | IS_COUNT:
        found_id, mass = settle(
            row_ptr, live_row_ptr, num_live, size, found, num_ties.to(tl.int32), maximum, scale, TILE_CHUNKS
        )
    cut_id = tl.where(found > cut, found_id, tl.minimum(found_id, cut_id))
    return tl.maximum(found, cut), cut_id, mass
