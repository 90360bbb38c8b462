"""Latency figures from request timings: TTFT, TPOT, ITL, E2EL, their percentiles, and goodput. Pure arithmetic.

TTFT: request sent to first token; TPOT: (last - first token) / (tokens - 1); ITL: between chunks; E2EL: sent to the
reply's end. All in milliseconds.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.load_connection import RequestTiming

METRICS = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def ttft_ms(timing: RequestTiming) -> float:
    """Time to the first token."""
    return 1e3 * (timing.first_s - timing.start_s)


def tpot_ms(timing: RequestTiming) -> float:
    """Mean time per token after the first; 0 for an answer of one token."""
    return 1e3 * (timing.last_s - timing.first_s) / (timing.num_tokens - 1) if timing.num_tokens > 1 else 0.0


def e2el_ms(timing: RequestTiming) -> float:
    """Time to the end of the reply."""
    return 1e3 * (timing.end_s - timing.start_s)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The percentile of sorted values, interpolated linearly between the two nearest."""
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def samples(timings: Sequence[RequestTiming]) -> dict[str, list[float]]:
    """The sorted values of each of METRICS, over completed requests."""
    values = {
        "ttft_ms": [ttft_ms(t) for t in timings],
        "tpot_ms": [tpot_ms(t) for t in timings if t.num_tokens > 1],
        "itl_ms": [1e3 * itl for t in timings for itl in t.itl_s],
        "e2el_ms": [e2el_ms(t) for t in timings],
    }
    return {name: sorted(of_metric) for name, of_metric in values.items()}


def summarise(name: str, ordered: Sequence[float]) -> dict[str, float]:
    """Return mean, median and p99 of sorted values under vLLM's names; {} without values."""
    if not ordered:
        return {}
    return {
        f"mean_{name}": statistics.fmean(ordered),
        f"median_{name}": percentile(ordered, 50),
        f"p99_{name}": percentile(ordered, 99),
    }


def parse_goodput(text: str) -> dict[str, float]:
    """Parse limits in milliseconds, such as ttft:500,tpot:50. Raises ValueError in one sentence."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, separator, value = part.strip().partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in GOODPUT_METRICS or not separator or not 0 < limit < math.inf:
            raise ValueError(f"{part.strip()!r} is not one of {', '.join(GOODPUT_METRICS)}, a colon and milliseconds")
        limits[name] = limit
    return limits


def num_good(timings: Sequence[RequestTiming], limits: Mapping[str, float]) -> int:
    """Count the completed requests that met every limit."""
    measure = {"ttft": ttft_ms, "tpot": tpot_ms, "e2el": e2el_ms}
    return sum(all(measure[name](timing) <= limit for name, limit in limits.items()) for timing in timings)
