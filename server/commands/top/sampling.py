"""Monitor: samples /metrics and /kv/snapshot of a server, and computes what happened between two samples.

Life of a Monitor: created → sample …, each a Snapshot of the last `window_s` → close. A server without Quire's
metric names is read by vLLM's names, which are aliases of Quire's. Imports httpx and prometheus_client's parser;
prints nothing.
"""

import itertools
import time
from collections import deque

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from engine.interface.metrics import METRICS
from server.commands.server_target import (
    ServerEndpoint,
    ToolError,
    check_key,
    error_message,
    make_client,
    one_line,
    transport_message,
)

_TIMEOUT_S = 5.0


class Percentiles(msgspec.Struct):
    """Percentiles of `count` observations in seconds, as exact as the buckets; null without observations."""

    count: int
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


class Activity(msgspec.Struct):
    """Counts and latencies of a period."""

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
    """The values of one read of /metrics. Names are Quire's, without quire_."""

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
    """Return the activity from `old` to `new`; None: since the server's start, also after a restart in between."""
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


class KvRow(msgspec.Struct):
    """One request that holds or waits for KV blocks, as GET /kv/snapshot lists it."""

    id: str
    state: str
    index: int = 0
    num_blocks: int = 0
    num_shared_blocks: int = 0
    num_tokens: int = 0
    num_computed_tokens: int = 0
    num_hit_tokens: int = 0
    age_s: float = 0.0
    num_preemptions: int = 0


class Snapshot(msgspec.Struct):
    """The figures of one sample. requests: null if the server does not list them."""

    url: str
    time: float  # Unix seconds
    model: str
    version: str
    num_running: int
    num_waiting: int
    kv_usage: float
    kv_blocks_used: int | None
    kv_blocks_total: int | None
    block_size: int | None
    recent: Activity
    total: Activity
    requests: list[KvRow] | None
    num_unlisted: int


class _KvSnapshot(msgspec.Struct):
    requests: list[KvRow]
    num_unlisted: int = 0


class Monitor:
    """Samples one server."""

    def __init__(self, endpoint: ServerEndpoint, *, window_s: float) -> None:
        self._endpoint = endpoint
        self._window_s = window_s
        self._client = make_client(endpoint, timeout_s=_TIMEOUT_S)
        self._readings: deque[Reading] = deque()
        self._has_requests = True  # until the server replies that it has no such route

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def sample(self) -> Snapshot:
        """Return the figures now. Raises ToolError if the server does not reply with metrics."""
        response = self._get("/metrics")
        check_key(self._endpoint, response)
        if response.status_code != 200:
            raise ToolError(
                f"{self._endpoint.url} shows no metrics: {error_message(response.status_code, response.content)}"
            )
        try:
            new = read_metrics(response.text, time_s=time.monotonic())
        except ValueError as error:
            raise ToolError(f"{self._endpoint.url}/metrics cannot be read: {one_line(str(error))}.") from error
        self._readings.append(new)
        while len(self._readings) > 2 and new.time_s - self._readings[1].time_s >= self._window_s:
            self._readings.popleft()
        return self._snapshot(new, self._read_kv())

    def _snapshot(self, new: Reading, kv: _KvSnapshot | None) -> Snapshot:
        values = new.values
        old = self._readings[0] if len(self._readings) > 1 else None
        total = values.get("kv_cache_blocks_total")
        return Snapshot(
            url=self._endpoint.url,
            time=time.time(),
            model=new.model,
            version=new.version,
            num_running=int(values.get("num_requests_running", 0)),
            num_waiting=int(values.get("num_requests_waiting", 0)),
            kv_usage=values.get("kv_cache_usage_ratio", 0.0),
            kv_blocks_used=int(values.get("kv_cache_blocks_used", 0)) if total is not None else None,
            kv_blocks_total=int(total) if total is not None else None,
            block_size=new.block_size or None,
            recent=activity(new, old),
            total=activity(new, None),
            requests=kv.requests if kv is not None else None,
            num_unlisted=kv.num_unlisted if kv is not None else 0,
        )

    def _read_kv(self) -> _KvSnapshot | None:
        """Return the list of requests; None if the server has no such route or cannot reply now."""
        if not self._has_requests:
            return None
        response = self._get("/kv/snapshot")
        if response.status_code in (401, 403, 404, 405):
            self._has_requests = False
        if response.status_code != 200:
            return None
        try:
            return msgspec.json.decode(response.content, type=_KvSnapshot)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._has_requests = False
            return None

    def _get(self, path: str) -> httpx.Response:
        try:
            return self._client.get(path)
        except httpx.HTTPError as error:
            raise ToolError(transport_message(self._endpoint, error)) from error


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
