"""Histograms of latencies, in buckets of equal ratio, so that any two runs share their edges. Pure arithmetic.

Bucket i begins at FIRST_MS · 10^(i/100): each is 2.3 % wide, a thousand from a microsecond to three hours. The
outermost buckets include all values beyond them, so a saved histogram is bounded for any number of requests.
"""

import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec

FIRST_MS = 1e-3
NUM_BUCKETS = 1000
_PER_DECADE = 100
_MAX_FOLDED = 0.005

_Index = Annotated[int, msgspec.Meta(ge=0, lt=NUM_BUCKETS)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Histogram(msgspec.Struct, frozen=True):
    """Counts of neighbouring buckets, the first of which has the index `first`."""

    first: _Index
    counts: Annotated[list[_Count], msgspec.Meta(min_length=1, max_length=NUM_BUCKETS)]


class Bars(NamedTuple):
    """Histograms on common edges. edges_ms: one more than bars; shares: a row per histogram, in percent."""

    edges_ms: list[float]
    shares: list[list[float]]


def count(values_ms: Sequence[float]) -> Histogram | None:
    """Count values into buckets; None if there are none."""
    if not values_ms:
        return None
    indices = [_bucket(value) for value in values_ms]
    first = min(indices)
    counts = [0] * (max(indices) - first + 1)
    for index in indices:
        counts[index - first] += 1
    return Histogram(first, counts)


def to_bars(histograms: Sequence[Histogram], *, max_bars: int) -> Bars:
    """Merge neighbouring buckets until all histograms fit on `max_bars` bars.

    The first bar also holds shorter values, at most half a percent of each histogram: a few chunks that arrived
    together would otherwise take most of a logarithmic axis. The longest values have their own bars.
    """
    first = min(map(_first_of_note, histograms))
    end = max(histogram.first + len(histogram.counts) for histogram in histograms)
    width = math.ceil((end - first) / max_bars)
    num_bars = math.ceil((end - first) / width)
    shares = []
    for histogram in histograms:
        bars, total = [0.0] * num_bars, max(sum(histogram.counts), 1)
        for i, number in enumerate(histogram.counts, histogram.first - first):
            bars[max(i, 0) // width] += 100 * number / total
        shares.append(bars)
    return Bars([_edge_ms(first + i * width) for i in range(num_bars + 1)], shares)


def _first_of_note(histogram: Histogram) -> int:
    """Return the bucket below which at most the foldable share lies."""
    left = sum(histogram.counts) * _MAX_FOLDED
    for i, number in enumerate(histogram.counts):
        left -= number
        if left < 0:
            return histogram.first + i
    return histogram.first


def _bucket(value_ms: float) -> int:
    if value_ms <= FIRST_MS:
        return 0
    return min(math.floor(_PER_DECADE * math.log10(value_ms / FIRST_MS)), NUM_BUCKETS - 1)


def _edge_ms(index: int) -> float:
    return FIRST_MS * 10 ** (index / _PER_DECADE)
