"""From two readings of /metrics to what happened between them. Imports prometheus_client's parser; does no HTTP.

A server without Quire's names is read by vLLM's, which Quire's metrics have as aliases.
"""

import itertools

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from engine.interface.metrics import METRICS


class Percentiles(msgspec.Struct):
    """Of `count` observations, in seconds, as exact as the buckets are; null without any."""

    count: int
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


class Activity(msgspec.Struct):
    """What happened in a stretch of time."""

    seconds: float | None  # null: since the server's start
    num_finished: int
    num_rejected: int
    num_preemptions: int
    prompt_tokens: int
    generated_tokens: int
    prefix_hit_rate: float | None  # of prompt tokens looked up
    ttft_s: Percentiles
    itl_s: Percentiles
    e2e_s: Percentiles
    queue_s: Percentiles


class Histogram(msgspec.Struct):
    """Counts per bucket, not cumulative; the last bound is infinity."""

    bounds: list[float]
    counts: list[float]


class Reading(msgspec.Struct):
    """One look at /metrics. Names are Quire's, without quire_."""

    time_s: float
    model: str = ""
    version: str = ""
    block_size: int = 0
    values: dict[str, float] = {}
    histograms: dict[str, Histogram] = {}


def read_metrics(page: str, *, time_s: float) -> Reading:
    """Parse a page. Raises ValueError for one that is no Prometheus text, or has none of the metrics."""
    names = {metric.alias: metric.name for metric in METRICS.values() if metric.alias}
    own = {f"quire_{name}": name for name in METRICS}
    is_own = "\nquire_" in page
    reading = Reading(time_s=time_s)
    buckets: dict[str, dict[float, float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == "quire_build_info":
                reading.version = sample.labels.get("version", "")
            if sample.name in ("quire_cache_config_info", "vllm:cache_config_info"):
                reading.block_size = int(sample.labels.get("block_size", "0") or 0)
            name = (own if is_own else names).get(sample.name.removesuffix("_bucket"))
            if name is None:
                continue
            reading.model = sample.labels.get("model_name", reading.model)
            if "le" in sample.labels:
                by_bound = buckets.setdefault(name, {})
                bound = float(sample.labels["le"])
                by_bound[bound] = by_bound.get(bound, 0.0) + sample.value
            else:
                reading.values[name] = reading.values.get(name, 0.0) + sample.value
    if not reading.values:
        raise ValueError("it has no metrics of Quire or vLLM")
    for name, by_bound in buckets.items():
        bounds = sorted(by_bound)
        below = [0.0, *(by_bound[bound] for bound in bounds)]
        reading.histograms[name] = Histogram(bounds, [after - before for before, after in itertools.pairwise(below)])
    return reading


def activity(new: Reading, old: Reading | None) -> Activity:
    """Return what happened from `old` to `new`; None: since the server's start, as after a restart in between."""
    if old is not None and any(
        new.values.get(name, 0.0) < value for name, value in old.values.items() if METRICS[name].kind == "counter"
    ):
        old = None
        seconds = None
    else:
        seconds = new.time_s - old.time_s if old is not None else None
    queried = _delta(new, old, "prefix_cache_queries_total")
    return Activity(
        seconds=seconds,
        num_finished=int(_delta(new, old, "requests_finished_total")),
        num_rejected=int(_delta(new, old, "requests_rejected_total")),
        num_preemptions=int(_delta(new, old, "num_preemptions_total")),
        prompt_tokens=int(_delta(new, old, "prompt_tokens_total")),
        generated_tokens=int(_delta(new, old, "generation_tokens_total")),
        prefix_hit_rate=_delta(new, old, "prefix_cache_hits_total") / queried if queried else None,
        ttft_s=_percentiles(new, old, "time_to_first_token_seconds"),
        itl_s=_percentiles(new, old, "inter_token_latency_seconds"),
        e2e_s=_percentiles(new, old, "e2e_request_latency_seconds"),
        queue_s=_percentiles(new, old, "request_queue_time_seconds"),
    )


def quantile(histogram: Histogram, share: float) -> float | None:
    """Return a quantile as Prometheus' histogram_quantile does: a straight line within its bucket.

    In the last bucket, which has no end, it is that bucket's lower bound.
    """
    total = sum(histogram.counts)
    if total <= 0:
        return None
    rank, below, lower = share * total, 0.0, 0.0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=True):
        if below + count >= rank and count > 0:
            return lower if bound == float("inf") else lower + (bound - lower) * (rank - below) / count
        below, lower = below + count, (lower if bound == float("inf") else bound)
    return lower


def _delta(new: Reading, old: Reading | None, name: str) -> float:
    return new.values.get(name, 0.0) - (old.values.get(name, 0.0) if old is not None else 0.0)


def _percentiles(new: Reading, old: Reading | None, name: str) -> Percentiles:
    histogram = new.histograms.get(name)
    if histogram is None:
        return Percentiles(0)
    before = old.histograms.get(name) if old is not None else None
    if before is not None and before.bounds == histogram.bounds:
        counts = [a - b for a, b in zip(histogram.counts, before.counts, strict=True)]
        histogram = Histogram(histogram.bounds, counts)
    count = int(sum(histogram.counts))
    return Percentiles(count, *(quantile(histogram, share) for share in (0.5, 0.95, 0.99)))
