"""What Quire counts, and the recorder every process counts with. Pure Python; never torch, never prometheus_client.

The registry is in the launcher alone (server/exposition.py). Workers and engine record into a Metrics, and drain() it
into small MetricsDelta messages; merging deltas is addition, so counts are exact with any number of processes.
"""

from bisect import bisect_left
from typing import NamedTuple

import msgspec

_LATENCY_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    1.5,
    2.0,
    3.0,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_ITL_S = (
    0.0005,
    0.001,
    0.002,
    0.003,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1.0,
    2.0,
    5.0,
)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)
_TOKENS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)


class Metric(NamedTuple):
    """One row of the table. name: without the quire_ prefix; alias: the name other tools read, or ""."""

    name: str
    kind: str  # counter | gauge | histogram
    help: str
    alias: str = ""
    label: str = ""  # one label beside model_name at most
    label_values: tuple[str, ...] = ()  # created at 0
    buckets: tuple[float, ...] = ()


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        # counted by the HTTP workers
        Metric("time_to_first_token_seconds", "histogram", "Request received to first token.", "vllm:time_to_first_token_seconds", buckets=_LATENCY_S),
        Metric("inter_token_latency_seconds", "histogram", "Time between tokens of one request.", "vllm:inter_token_latency_seconds", buckets=_ITL_S),
        Metric("e2e_request_latency_seconds", "histogram", "Request received to last token.", "vllm:e2e_request_latency_seconds", buckets=_E2E_S),
        Metric("requests_rejected_total", "counter", "Requests refused before they reached the engine, by reason.", label="reason",
               label_values=("invalid", "overloaded", "not_ready", "draining")),
        Metric("http_disconnects_total", "counter", "Clients that left before their answer ended."),
        # counted by the engine
        Metric("request_queue_time_seconds", "histogram", "Request received to first scheduled.", "vllm:request_queue_time_seconds", buckets=_LATENCY_S),
        Metric("request_prefill_time_seconds", "histogram", "First scheduled to first token.", "vllm:request_prefill_time_seconds", buckets=_LATENCY_S),
        Metric("request_decode_time_seconds", "histogram", "First token to last token.", "vllm:request_decode_time_seconds", buckets=_E2E_S),
        Metric("prompt_tokens_total", "counter", "Prompt tokens of started requests, cached ones included.", "vllm:prompt_tokens_total"),
        Metric("generation_tokens_total", "counter", "Tokens generated.", "vllm:generation_tokens_total"),
        Metric("requests_finished_total", "counter", "Requests ended, by reason.", "vllm:request_success_total", label="finished_reason",
               label_values=("stop", "length", "abort", "error")),
        Metric("num_requests_running", "gauge", "Requests holding KV blocks.", "vllm:num_requests_running"),
        Metric("num_requests_waiting", "gauge", "Requests queued.", "vllm:num_requests_waiting"),
        Metric("kv_cache_usage_ratio", "gauge", "Share of KV blocks held by requests, 0 to 1.", "vllm:kv_cache_usage_perc"),
        Metric("kv_cache_blocks_used", "gauge", "KV blocks held by requests."),
        Metric("kv_cache_blocks_total", "gauge", "KV blocks in the pool."),
        Metric("prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache.", "vllm:prefix_cache_queries_total"),
        Metric("prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.", "vllm:prefix_cache_hits_total"),
        Metric("num_preemptions_total", "counter", "Requests put back to the queue for want of KV blocks.", "vllm:num_preemptions_total"),
        Metric("spec_decode_num_drafts_total", "counter", "Rows with draft tokens.", "vllm:spec_decode_num_drafts_total"),
        Metric("spec_decode_num_draft_tokens_total", "counter", "Tokens guessed ahead.", "vllm:spec_decode_num_draft_tokens_total"),
        Metric("spec_decode_num_accepted_tokens_total", "counter", "Tokens guessed ahead that became output.", "vllm:spec_decode_num_accepted_tokens_total"),
        Metric("iteration_tokens", "histogram", "Tokens computed per engine step.", "vllm:iteration_tokens_total", buckets=_TOKENS),
        Metric("step_time_seconds", "histogram", "Time between commits of consecutive engine steps.", buckets=_ITL_S),
        # counted by the launcher
        Metric("engine_restarts_total", "counter", "Times the engine process was started again."),
    )
}  # fmt: skip


class Histogram(msgspec.Struct, array_like=True):
    """Observations since the last drain. counts: per bucket, not cumulative, the last one above every bound."""

    counts: list[int]
    sum: float = 0.0


class MetricsDelta(msgspec.Struct, tag=True, omit_defaults=True):
    """What one process recorded since it last sent one. Keys are (metric name, label value or "")."""

    counters: dict[tuple[str, str], float] = {}
    gauges: dict[str, float] = {}
    histograms: dict[str, Histogram] = {}


class Metrics:
    """Records until drained. Not thread-safe: one per event loop."""

    def __init__(self) -> None:
        self._delta = MetricsDelta({}, {}, {})

    def count(self, name: str, n: float = 1, label: str = "") -> None:
        """Add `n` to a counter."""
        counters = self._delta.counters
        counters[name, label] = counters.get((name, label), 0) + n

    def gauge(self, name: str, value: float) -> None:
        """Set a gauge."""
        self._delta.gauges[name] = value

    def observe(self, name: str, value: float, n: int = 1) -> None:
        """Add `n` observations of `value` to a histogram."""
        histogram = self._delta.histograms.get(name)
        if histogram is None:
            histogram = self._delta.histograms[name] = Histogram([0] * (len(METRICS[name].buckets) + 1))
        histogram.counts[bisect_left(METRICS[name].buckets, value)] += n
        histogram.sum += value * n

    def drain(self) -> MetricsDelta:
        """Return what was recorded since the last call and start afresh."""
        delta, self._delta = self._delta, MetricsDelta({}, {}, {})
        return delta
