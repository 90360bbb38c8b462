"""The one metrics registry of the daemon, in the launcher. Imports engine.metrics and prometheus_client; never torch.

Children send MetricsDelta messages; merge() adds them up, render() writes the Prometheus text page: each metric under
its own quire_* name and, where other tools read one, under its vLLM alias. Counts live here, so they survive the
restart of any child.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from engine.metrics import METRICS, Histogram, Metric, MetricsDelta

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Exposition(Collector):
    """Sums deltas and renders the page. One per daemon."""

    def __init__(self, *, model_name: str, version: str) -> None:
        self._model_name = model_name
        self._version = version
        self._cache_config: tuple[int, int] | None = None
        # every series exists at 0 from the start: a rate over a counter that appears late misses its first increase
        self._counters = {
            (metric.name, label): 0.0
            for metric in METRICS.values()
            if metric.kind == "counter"
            for label in metric.label_values or ("",)
        }
        self._gauges = {metric.name: 0.0 for metric in METRICS.values() if metric.kind == "gauge"}
        self._histograms = {
            metric.name: Histogram([0] * (len(metric.buckets) + 1))
            for metric in METRICS.values()
            if metric.kind == "histogram"
        }
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def merge(self, delta: MetricsDelta) -> None:
        """Add one process's delta. A name that is not in the table is a bug of the sender and raises KeyError."""
        for (name, label), n in delta.counters.items():
            if METRICS[name].kind != "counter":
                raise KeyError(name)
            self._counters[name, label] = self._counters.get((name, label), 0.0) + n
        for name, value in delta.gauges.items():
            if name not in self._gauges:
                raise KeyError(name)
            self._gauges[name] = value
        for name, added in delta.histograms.items():
            total = self._histograms[name]
            total.counts = [a + b for a, b in zip(total.counts, added.counts, strict=True)]
            total.sum += added.sum

    def count(self, name: str) -> None:
        """Add one to a counter of the launcher itself."""
        self.merge(MetricsDelta({(name, ""): 1.0}))

    def reset_gauges(self) -> None:
        """Set every gauge to 0: they described an engine that is gone."""
        self._gauges = dict.fromkeys(self._gauges, 0.0)

    def set_cache_config(self, *, block_size: int, num_blocks: int) -> None:
        """Say how the KV pool is cut, once the engine has decided it."""
        self._cache_config = (block_size, num_blocks)

    def render(self) -> bytes:
        """Return the whole page in the Prometheus text format 0.0.4."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[MetricFamily]:
        """Yield every family, as prometheus_client asks of a collector."""
        build = GaugeMetricFamily("quire_build_info", "The running version; always 1.", labels=["version"])
        build.add_metric([self._version], 1.0)
        yield build
        if self._cache_config is not None:
            yield from self._cache_config_info(*self._cache_config)
        for metric in METRICS.values():
            for name in filter(None, (f"quire_{metric.name}", metric.alias)):
                yield self._family(metric, name)

    def _family(self, metric: Metric, name: str) -> MetricFamily:
        if metric.kind == "gauge":
            gauge = GaugeMetricFamily(name, metric.help, labels=["model_name"])
            gauge.add_metric([self._model_name], self._gauges[metric.name])
            return gauge
        if metric.kind == "histogram":
            histogram = HistogramMetricFamily(name, metric.help, labels=["model_name"])
            total = self._histograms[metric.name]
            histogram.add_metric([self._model_name], _cumulative(metric.buckets, total.counts), total.sum)
            return histogram
        counter = CounterMetricFamily(name, metric.help, labels=["model_name", *filter(None, [metric.label])])
        for (counter_name, label), value in self._counters.items():
            if counter_name == metric.name:
                counter.add_metric([self._model_name, *filter(None, [label])], value)
        return counter

    def _cache_config_info(self, block_size: int, num_blocks: int) -> Iterator[MetricFamily]:
        for name in ("quire_cache_config_info", "vllm:cache_config_info"):
            info = GaugeMetricFamily(
                name, "How the KV pool is cut; always 1.", labels=["model_name", "block_size", "num_gpu_blocks"]
            )
            info.add_metric([self._model_name, str(block_size), str(num_blocks)], 1.0)
            yield info


def _cumulative(bounds: tuple[float, ...], counts: list[int]) -> list[tuple[str, float]]:
    """Turn counts per bucket into Prometheus' cumulative (le, count) pairs."""
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
