"""MetricsRegistry: the daemon's only registry of metrics, in the launcher. Imports engine.interface.metrics and
prometheus_client; never torch.

Children send MetricsDelta messages; merge() adds them up, render() writes the Prometheus text page: each metric under
its quire_* name, under its old name if it was renamed and, if compat is "vllm", under vLLM's name. Counts survive the
restart of a child, because they are kept here. A gauge is the sum over the processes that set it and
are running, a ratio their mean.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as generate_open_metrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as Example

from engine.interface.control import KeyUsage, Ledger
from engine.interface.metrics import METRICS, Exemplar, Histogram, Key, Metric, MetricsDelta

_Bucket = tuple[str, float] | tuple[str, float, Example]

_LAUNCHER = "launcher"
_BUILD_LABELS = ("version", "torch", "cuda", "device", "dtype")  # but the first from the engine, "" until it is ready
_USAGE_FIELDS = {  # of KeyUsage, by counter and its labels after the key's name
    ("key_requests_total", "accepted"): "requests",
    ("key_requests_total", "refused"): "refused_requests",
    ("key_tokens_total", "computed"): "computed_tokens",
    ("key_tokens_total", "cached"): "cached_tokens",
    ("key_tokens_total", "generated"): "generated_tokens",
    ("key_device_seconds_total",): "device_seconds",
    ("key_grammar_seconds_total",): "grammar_seconds",
}
_MEANS = ("kv_cache_usage_ratio",)  # of several engines; all other gauges are sums
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


class MetricsRegistry(Collector):
    """Sums deltas and renders the page. One per daemon.

    sample: returns what the launcher itself measures, at each render; its delta is merged like any other.
    """

    def __init__(
        self,
        *,
        model_name: str,
        version: str,
        compat: str = "vllm",
        sample: Callable[[], MetricsDelta] = MetricsDelta,
    ) -> None:
        self._model_name = model_name
        self._build = {"version": version}
        self._compat = compat
        self._sample = sample
        self._cache_config: tuple[int, int] | None = None
        # every series exists at 0 from the start: a rate over a counter that appears late misses its first increase
        self._counters: dict[Key, float] = {
            (metric.name, label): 0.0
            for metric in METRICS.values()
            if metric.kind == "counter" and isinstance(metric.label, str)
            for label in metric.label_values or ("",)
        }
        self._gauges: dict[Key, dict[str, float]] = {  # by source
            (metric.name, label): {}
            for metric in METRICS.values()
            if metric.kind == "gauge"
            for label in metric.label_values or ("",)
        }
        self._histograms = {
            metric.name: Histogram([0] * (len(metric.buckets) + 1))
            for metric in METRICS.values()
            if metric.kind == "histogram"
        }
        self._exemplars: dict[str, dict[int, Exemplar]] = {}  # by histogram and bucket
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def merge(self, delta: MetricsDelta, *, source: str = _LAUNCHER) -> None:
        """Add the delta of a process. What is not in the table is a bug of the sender, and raises KeyError."""
        for key, n in delta.counters.items():
            metric = METRICS[key[0]]
            if metric.kind != "counter" or len(key) != max(len(metric.labels), 1) + 1:
                raise KeyError(key)
            self._counters[key] = self._counters.get(key, 0.0) + n
        for key, value in delta.gauges.items():
            self._gauges[key][source] = value
        for name, added in delta.histograms.items():
            total = self._histograms[name]
            total.counts = [a + b for a, b in zip(total.counts, added.counts, strict=True)]
            total.sum += added.sum
        for name, newest in delta.exemplars.items():
            if METRICS[name].kind != "histogram":
                raise KeyError(name)
            self._exemplars.setdefault(name, {}).update(newest)

    def count(self, name: str) -> None:
        """Add one to a counter of the launcher itself."""
        self.merge(MetricsDelta({(name, ""): 1.0}))

    def forget(self, source: str) -> None:
        """Drop the gauges of a process that has ended."""
        for by_source in self._gauges.values():
            by_source.pop(source, None)

    def set_cache_config(self, *, block_size: int, num_blocks: int) -> None:
        """Set the block size and the number of blocks, once the engine has decided them."""
        self._cache_config = (block_size, num_blocks)

    def set_build(self, build: dict[str, str]) -> None:
        """Set the engine's build labels, once it is ready."""
        self._build |= build

    def ledger(self, number: int) -> Ledger:
        """Return the counts of all names of API keys, as the reply with this number."""
        self.merge(self._sample())
        by_key: dict[str, KeyUsage] = {}
        for (name, *labels), value in self._counters.items():
            if name.startswith("key_"):
                usage = by_key.setdefault(labels[0], KeyUsage(labels[0]))
                field = _USAGE_FIELDS[name, *labels[1:]]
                setattr(usage, field, value if field.endswith("seconds") else int(value))
        start_s = sum(self._gauges["start_time_seconds", ""].values())
        return Ledger(number, start_s, [by_key[key] for key in sorted(by_key)])

    def render(self, *, is_open_metrics: bool = False) -> bytes:
        """Return the whole page in the Prometheus text format 0.0.4, or in OpenMetrics 1.0.0 with exemplars."""
        self.merge(self._sample())
        if is_open_metrics:
            return generate_open_metrics(self._registry, ALLOWUTF8)  # its default turns vllm:* into vllm_*
        return generate_latest(self._registry)

    def collect(self) -> Iterator[MetricFamily]:
        """Yield every family, as prometheus_client asks of a collector."""
        build = GaugeMetricFamily("quire_build_info", "What runs here; always 1.", labels=_BUILD_LABELS)
        build.add_metric([self._build.get(label, "") for label in _BUILD_LABELS], 1.0)
        yield build
        if self._cache_config is not None:
            yield from self._cache_config_info(*self._cache_config)
        samples = self._by_name()
        is_vllm = self._compat == "vllm"
        for metric in METRICS.values():
            yield self._family(metric, f"quire_{metric.name}", metric.labels, samples[metric.name])
            if metric.old_name:
                text = f"Deprecated: renamed to quire_{metric.name}."
                old = metric._replace(help=text)
                yield self._family(old, f"quire_{metric.old_name}", metric.labels, samples[metric.name])
            if is_vllm and metric.alias:
                labels = metric.alias_label or metric.labels
                yield self._family(metric, metric.alias, labels, samples[metric.name])
        if is_vllm:
            yield self._sleep_state()

    def _by_name(self) -> dict[str, list[tuple[list[str], float]]]:
        """Return the label values and the value of each counter and gauge, by metric."""
        samples: dict[str, list[tuple[list[str], float]]] = {name: [] for name in METRICS}
        for (name, *labels), value in self._counters.items():
            samples[name].append((labels, value))
        for (name, *labels), by_source in self._gauges.items():
            total = sum(by_source.values())
            samples[name].append((labels, total / max(len(by_source), 1) if name in _MEANS else total))
        return samples

    def _family(
        self, metric: Metric, name: str, labels: tuple[str, ...], samples: list[tuple[list[str], float]]
    ) -> MetricFamily:
        if metric.kind == "histogram":
            histogram = HistogramMetricFamily(name, metric.help, labels=["model_name"])
            total = self._histograms[metric.name]
            buckets = _cumulative(metric.buckets, total.counts, self._exemplars.get(metric.name, {}))
            histogram.add_metric([self._model_name], buckets, total.sum)
            return histogram
        make = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
        family = make(name, metric.help, labels=["model_name", *labels])
        for values, value in samples:
            family.add_metric([self._model_name, *values[: len(labels)]], value)
        return family

    def _cache_config_info(self, block_size: int, num_blocks: int) -> Iterator[MetricFamily]:
        for name in ("quire_cache_config_info", *(["vllm:cache_config_info"] if self._compat == "vllm" else [])):
            info = GaugeMetricFamily(
                name, "How the KV pool is cut; always 1.", labels=["model_name", "block_size", "num_gpu_blocks"]
            )
            info.add_metric([self._model_name, str(block_size), str(num_blocks)], 1.0)
            yield info

    def _sleep_state(self) -> MetricFamily:
        """Return vLLM's sleep state, by which its dashboards detect a server; Quire has no sleep mode."""
        state = GaugeMetricFamily(
            "vllm:engine_sleep_state", "awake is quire_engine_up, the others 0.", labels=["model_name", "sleep_state"]
        )
        is_up = sum(self._gauges["engine_up", ""].values())
        for name in _SLEEP_STATES:
            state.add_metric([self._model_name, name], is_up if name == "awake" else 0.0)
        return state


def _cumulative(bounds: tuple[float, ...], counts: list[int], exemplars: dict[int, Exemplar]) -> list[_Bucket]:
    """Turn counts per bucket into Prometheus' cumulative (le, count), with an exemplar where there is one."""
    buckets: list[_Bucket] = []
    total = 0
    for place, (bound, count) in enumerate(zip([*map(str, bounds), "+Inf"], counts, strict=True)):
        total += count
        found = exemplars.get(place)
        if found is None:
            buckets.append((bound, float(total)))
        else:
            buckets.append((bound, float(total), Example({"trace_id": found.trace_id}, found.value, found.time)))
    return buckets
