"""The table of all metrics (METRICS), and Metrics, the recorder of each process. Never torch or prometheus_client.

Only the launcher has a registry (server/launcher/metrics_registry.py). Workers and engine record into a Metrics and
drain() it into small MetricsDelta messages. Deltas are merged by addition, so counts are exact with any number of
processes. docs/reference/metrics.md is generated from this table; a test compares it with the page of a running server.
"""

from bisect import bisect_left
from typing import NamedTuple

import msgspec

from engine.interface.kv_snapshot import CACHE_REASONS
from engine.interface.tenant import UNNAMED

# Bucket bounds include usual latency targets: 50 to 500 ms and whole seconds to the first token, 10 to 200 ms between
# tokens
# fmt: off
_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_ITL_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)
_LAG_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_TOKENS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
_LENGTH = (*_TOKENS, 32768.0, 65536.0, 131072.0)
_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
# fmt: on

Key = tuple[str, ...]  # a metric's name and its label values; "" without a label


class Metric(NamedTuple):
    """One row of the table. name: without the prefix quire_; alias: the equivalent name of other servers, or "".

    old_name: Quire's previous name of the metric, without the prefix, or ""; /metrics shows it too, as deprecated.
    """

    name: str
    kind: str  # counter | gauge | histogram
    help: str
    alias: str = ""
    label: str | tuple[str, ...] = ""  # beside model_name
    label_values: tuple[str, ...] = ()  # with one label: the values that exist from the start, at 0
    buckets: tuple[float, ...] = ()
    alias_label: tuple[str, ...] = ()  # label names of the alias, if they differ
    old_name: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the labels beside model_name."""
        return self.label if isinstance(self.label, tuple) else tuple(filter(None, (self.label,)))


# fmt: off
FAILURES = ("deadline_exceeded", "engine_dead", "engine_error", "internal_error", "model_output_invalid", "out_of_memory", "poison_request", "server_shutting_down")
_ROLES = ("launcher", "engine", "worker")
KINDS = ("full", "window", "state")  # of CacheGroup
# fmt: on

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        # counted by the HTTP workers
        Metric("time_to_first_token_seconds", "histogram", "Request received to first token.", "vllm:time_to_first_token_seconds", buckets=_LATENCY_S),
        Metric("inter_token_latency_seconds", "histogram", "Time between tokens of one request.", "vllm:inter_token_latency_seconds", buckets=_ITL_S),
        Metric("e2e_request_latency_seconds", "histogram", "Request received to last token.", "vllm:e2e_request_latency_seconds", buckets=_E2E_S),
        Metric("request_max_num_generation_tokens", "histogram", "Tokens of the longest choice of an answer.", "vllm:request_max_num_generation_tokens", buckets=_LENGTH),
        Metric("requests_rejected_total", "counter", "Requests refused before they reached the engine, by reason; invalid counts 4xx replies to POST requests only.", label="reason",
               label_values=("invalid", "overloaded", "rate_limit_exceeded", "not_ready", "draining")),
        Metric("requests_failed_total", "counter", "Requests that the server failed to complete, by reason.", label="reason", label_values=FAILURES),
        Metric("request_replays_total", "counter", "Submissions of open requests to the next engine after one had ended."),
        Metric("http_requests_total", "counter", "HTTP requests answered, by route and class of status.", "http_requests_total",
               label=("route", "status"), alias_label=("handler", "status")),
        Metric("http_disconnects_total", "counter", "Clients that left before their answer ended."),
        Metric("http_requests_in_progress", "gauge", "POST requests being answered."),
        Metric("http_connections", "gauge", "Open connections of clients."),
        Metric("adapter_requests_total", "counter", "Generations and embeddings that ended, by LoRA adapter; those of the model itself are not among them.", label=("adapter",)),
        Metric("adapter_prompt_tokens_total", "counter", "Prompt tokens of these, cached ones included.", label=("adapter",)),
        Metric("adapter_generation_tokens_total", "counter", "Tokens generated for these.", label=("adapter",)),
        Metric("adapter_first_token_seconds_total", "counter", "Their times to the first token, added up.", label=("adapter",)),
        Metric("event_loop_lag_seconds", "histogram", "Delay of a worker's event loop, measured four times a second.", buckets=_LAG_S),
        Metric("prefill_fallbacks_total", "counter", "Long prompts that no prefill engine computed for a decode engine (--disaggregate), by reason: none served, all were full, or it died before the first token.", label="reason",
               label_values=("missing", "full", "died")),
        # counted by the engine
        Metric("request_queue_time_seconds", "histogram", "Request received to first scheduled.", "vllm:request_queue_time_seconds", buckets=_LATENCY_S),
        Metric("request_prefill_time_seconds", "histogram", "First scheduled to first token.", "vllm:request_prefill_time_seconds", buckets=_LATENCY_S),
        Metric("request_decode_time_seconds", "histogram", "First token to last token.", "vllm:request_decode_time_seconds", buckets=_E2E_S),
        Metric("request_inference_time_seconds", "histogram", "First scheduled to last token.", "vllm:request_inference_time_seconds", buckets=_E2E_S),
        Metric("request_time_per_output_token_seconds", "histogram", "A request's mean time per token after its first.", "vllm:request_time_per_output_token_seconds", buckets=_ITL_S),
        Metric("request_prompt_tokens", "histogram", "Prompt tokens of a request that ended.", "vllm:request_prompt_tokens", buckets=_LENGTH),
        Metric("request_generation_tokens", "histogram", "Tokens generated for a request that ended.", "vllm:request_generation_tokens", buckets=_LENGTH),
        Metric("prompt_tokens_total", "counter", "Prompt tokens of started requests, cached ones included.", "vllm:prompt_tokens_total"),
        Metric("prompt_tokens_cached_total", "counter", "Prompt tokens of started requests that were not computed again.", "vllm:prompt_tokens_cached_total"),
        Metric("generation_tokens_total", "counter", "Tokens generated.", "vllm:generation_tokens_total"),
        Metric("requests_finished_total", "counter", "Requests ended by the engine, by reason.", "vllm:request_success_total", label="finished_reason",
               label_values=("stop", "length", "abort", "error")),
        Metric("nonfinite_requests_total", "counter", "Requests ended because the model's output for them was not finite (NaN or infinite)."),
        Metric("num_requests_running", "gauge", "Requests holding KV blocks.", "vllm:num_requests_running"),
        Metric("num_requests_waiting", "gauge", "Requests queued.", "vllm:num_requests_waiting"),
        Metric("num_requests_waiting_by_reason", "gauge", "Requests queued for a place or KV blocks (capacity) or for their grammar (deferred).", "vllm:num_requests_waiting_by_reason",
               label="reason", label_values=("capacity", "deferred")),
        Metric("kv_cache_usage_ratio", "gauge", "Share of KV blocks that requests hold, 0 to 1.", "vllm:kv_cache_usage_perc"),
        Metric("kv_cache_blocks_used", "gauge", "KV blocks held by requests."),
        Metric("kv_cache_blocks_total", "gauge", "KV blocks in the pool."),
        Metric("kv_cache_bytes", "gauge", "Memory of the KV pool; with several GPUs, on each."),
        Metric("gpu_memory_used_bytes", "gauge", "GPU memory in use by all programs; with several GPUs, of the first; 0 without a GPU."),
        Metric("gpu_memory_total_bytes", "gauge", "Total GPU memory; with several GPUs, of the first; 0 without a GPU."),
        Metric("prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache.", "vllm:prefix_cache_queries_total"),
        Metric("prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.", "vllm:prefix_cache_hits_total"),
        Metric("prefix_cache_evictions_total", "counter", "Cached KV blocks that were overwritten."),
        Metric("kv_cache_pages_held", "gauge", "Pages of the KV pool that requests hold, by kind of layer.", label="kind", label_values=KINDS),
        Metric("kv_cache_pages_cached", "gauge", "Pages of the KV pool that only the prefix cache has, by kind of layer.", label="kind", label_values=KINDS),
        Metric("kv_cache_pages_pinned", "gauge", "Pages of the KV pool that requests asked to keep: they are reused after all others."),
        Metric("prefix_cache_pinned_blocks_total", "counter", "Blocks that requests asked to keep and that are kept no more, by the reason: their time was over, the budget of their API key or of all keys was full, or their pages were needed.", label="reason",
               label_values=("expired", "over_budget", "reused")),
        Metric("kv_cache_states", "gauge", "States of recurrent layers: live ones of requests, and saved ones that prompts can find.", label="use", label_values=("live", "saved")),
        Metric("kv_cache_state_bytes", "gauge", "Memory of these states; with several GPUs, on each.", label="use", label_values=("live", "saved")),
        Metric("prefix_cache_limited_tokens_total", "counter", "Prompt tokens that the layers with full attention found and others did not, by the kind that lacked them.", label="kind", label_values=KINDS[1:]),
        Metric("prefix_cache_requests_total", "counter", "Prompts looked up in the prefix cache, by the reason why no more of them was found.", label="reason", label_values=CACHE_REASONS[:-1]),
        Metric("prefix_cache_states_total", "counter", "Saved states of recurrent layers, by event; skipped ones found no free pages.", label="event",
               label_values=("saved", "skipped", "restored", "evicted")),
        Metric("kv_host_bytes", "gauge", "Host memory behind the KV pool (--kv-host-memory): what blocks take of it, what those that requests asked to keep may take, and all that can be used, which grows while memory is pinned after the start; of all ranks together.", label="use", label_values=("used", "pinned", "total")),
        Metric("kv_host_blocks_total", "counter", "Blocks by what became of them in host memory: copied there, overwritten there, or missed: the pool reused them without a copy, which came too late or would have exceeded the time for copies.", label="event",
               label_values=("stored", "evicted", "missed")),
        Metric("kv_host_lookups_total", "counter", "Admissions that asked host memory for a longer prefix: it had one, it had none, or copying it would have cost more than computing it.", label="result",
               label_values=("longer", "none", "too_costly")),
        Metric("kv_host_hit_tokens_total", "counter", "Prompt tokens found in the prefix cache whose blocks came from host memory."),
        Metric("kv_host_copied_bytes_total", "counter", "Bytes copied between the KV pool and host memory; of all ranks together.", label="direction", label_values=("to_host", "from_host")),
        Metric("kv_host_copy_bytes_per_second", "gauge", "Rate of copies from host memory to the KV pool, as measured at the start; of each rank. 0: not measured."),
        Metric("kv_host_wait_seconds_total", "counter", "Time that requests waited for their blocks from host memory before their admission, over all requests."),
        Metric("kv_disk_bytes", "gauge", "Bytes of the blocks in the folder of --kv-disk, those of other models and servers included."),
        Metric("kv_disk_limit_bytes", "gauge", "The most bytes of these blocks (--kv-disk-size)."),
        Metric("kv_disk_pinned_bytes", "gauge", "Bytes of the pinned ones of them, which leave after all others."),
        Metric("kv_disk_queued_bytes", "gauge", "Bytes of the blocks that wait to be written to disk, or are being written."),
        Metric("kv_disk_paused", "gauge", "1 while the disk of --kv-disk is left alone after errors in a row."),
        Metric("kv_disk_errors_total", "counter", "Calls to the disk of --kv-disk that failed."),
        Metric("kv_disk_blocks_total", "counter", "Blocks by what became of them on disk: written, dropped since the disk was behind or failing, read for a prompt, not read after all, deleted to make room, or found damaged.", label="event",
               label_values=("written", "dropped", "read", "failed", "evicted", "damaged")),
        Metric("kv_disk_hit_tokens_total", "counter", "Prompt tokens found in the prefix cache whose blocks were read from disk."),
        Metric("kv_disk_copied_bytes_total", "counter", "Bytes written to the disk of --kv-disk, and read from it.", label="direction", label_values=("written", "read")),
        Metric("kv_disk_copy_seconds_total", "counter", "Time of the calls that wrote these bytes, and of those that read them, each by itself.", label="direction", label_values=("written", "read")),
        Metric("kv_disk_lookups_total", "counter", "Admissions that found blocks on disk: they were worth reading, or computing would have been quicker, or host memory was too small for them.", label="result",
               label_values=("longer", "too_costly")),
        Metric("kv_disk_wait_seconds_total", "counter", "Time that requests waited for their blocks from disk before their admission, over all requests."),
        Metric("kv_tier_requests_waiting", "gauge", "Requests that wait for blocks before their admission, by the tier that has them.", label="tier", label_values=("host", "disk")),
        Metric("kv_event_batches_total", "counter", "Batches of events of the prefix cache (--kv-events-config): published, or lost since the queue was full.", label="result",
               label_values=("published", "lost")),
        Metric("kv_handover_requests_total", "counter", "Requests whose prompt a prefill engine computed for a decode engine, by result: all of its blocks came or were known, the prefill engine was lost, or they came too late.", label="result",
               label_values=("complete", "lost", "late")),
        Metric("kv_handover_blocks_total", "counter", "Blocks of prompts between prefill and decode engines: offered, evicted before they could be, and of those offered: copied, known already, without room in host memory, or not copied after all.", label="event",
               label_values=("offered", "evicted", "taken", "known", "no_room", "failed")),
        Metric("kv_handover_bytes_total", "counter", "Bytes that decode engines copied from prefill engines."),
        Metric("kv_handover_wait_seconds_total", "counter", "Time that requests waited for blocks of prefill engines, over all requests."),
        Metric("kv_handover_open_offers", "gauge", "Offers of blocks whose memory prefill engines keep for copies that run."),
        Metric("kv_handover_peers", "gauge", "Connections between prefill and decode engines, counted where they decode."),
        Metric("num_preemptions_total", "counter", "Requests returned to the queue because no KV block was free.", "vllm:num_preemptions_total"),
        Metric("preempted_requests_resumed_total", "counter", "Preempted requests that were admitted again: with blocks from host memory, or computed but for what the pool still had.", label="by",
               label_values=("swapped", "computed")),
        Metric("preempted_tokens_resumed_total", "counter", "Tokens of preempted requests that were admitted again, by where they came from: found in the pool, copied from host memory, or to be computed.", label="by",
               label_values=("pool", "host", "computed")),
        Metric("spec_decode_num_drafts_total", "counter", "Rows with draft tokens.", "vllm:spec_decode_num_drafts_total"),
        Metric("spec_decode_num_draft_tokens_total", "counter", "Draft tokens of speculation.", "vllm:spec_decode_num_draft_tokens_total"),
        Metric("spec_decode_num_accepted_tokens_total", "counter", "Draft tokens that became output.", "vllm:spec_decode_num_accepted_tokens_total"),
        Metric("iteration_tokens", "histogram", "Tokens computed per engine step.", "vllm:iteration_tokens_total", buckets=_TOKENS),
        Metric("iteration_requests", "histogram", "Requests computed per engine step.", buckets=_ROWS, old_name="iteration_rows"),
        Metric("step_time_seconds", "histogram", "Time between commits of consecutive engine steps.", buckets=_ITL_S),
        Metric("key_requests_total", "counter", "HTTP requests by the name of their API key: accepted, or refused by a limit of the key or since the queue is too long.", label=("key", "result")),
        Metric("key_tokens_total", "counter", "Tokens by the name of the API key, as answers report them in their usage: prompt tokens computed and cached, and tokens generated.", label=("key", "kind")),
        Metric("key_device_seconds_total", "counter", "Time of engine steps by the name of the API key, each split by the tokens of its rows.", label="key", label_values=(UNNAMED,)),
        Metric("key_grammar_seconds_total", "counter", "Processor time of HTTP workers to test-compile grammars, by the name of the API key.", label="key", label_values=(UNNAMED,)),
        # counted by the launcher
        Metric("ready", "gauge", "1 if /ready answers 200."),
        Metric("engine_up", "gauge", "1 if the engine serves and its loop makes progress."),
        Metric("engine_progress_age_seconds", "gauge", "Time since the engine's loop last made progress; about a second while idle."),
        Metric("start_time_seconds", "gauge", "When the daemon started, in Unix time."),
        Metric("engine_restarts_total", "counter", "Restarts of the engine process."),
        Metric("engine_restart_seconds", "gauge", "Time from the engine's last end until the next one was ready; 0 before."),
        Metric("takeovers_failed_total", "counter", "Takeovers that a next daemon began and did not complete."),
        Metric("takeover_pause_seconds", "gauge", "Time without an engine when this daemon took another one's place with --takeover; 0 if it did not."),
        Metric("worker_restarts_total", "counter", "Restarts of an HTTP worker."),
        Metric("process_cpu_seconds_total", "counter", "CPU time, by role of process.", label="role", label_values=_ROLES),
        Metric("process_resident_memory_bytes", "gauge", "Resident memory, by role of process.", label="role", label_values=_ROLES),
        Metric("process_open_fds", "gauge", "Open file descriptors, by role of process.", label="role", label_values=_ROLES),
    )
}  # fmt: skip
_BUCKETS = {metric.name: metric.buckets for metric in METRICS.values() if metric.kind == "histogram"}


class Histogram(msgspec.Struct, array_like=True):
    """Observations since the last drain. counts: per bucket, not cumulative; the last counts values above all bounds."""

    counts: list[int]
    sum: float = 0.0


class Exemplar(msgspec.Struct, array_like=True):
    """One observation of a histogram, and the trace that it is of. time: Unix seconds."""

    trace_id: str
    value: float
    time: float


class MetricsDelta(msgspec.Struct, tag=True, omit_defaults=True):
    """The metrics that one process recorded since its previous delta."""

    counters: dict[Key, float] = {}
    gauges: dict[Key, float] = {}
    histograms: dict[str, Histogram] = {}
    exemplars: dict[str, dict[int, Exemplar]] = {}  # by histogram and bucket, the newest of each


class Metrics:
    """Records counters, gauges and histograms until drained. Not thread-safe: each event loop has its own."""

    def __init__(self) -> None:
        self._delta = MetricsDelta({}, {}, {}, {})

    def count(self, name: str, n: float = 1, label: str | tuple[str, ...] = "") -> None:
        """Add `n` to a counter. label: the label's value, or several values in the order of the table."""
        key = (name, label) if isinstance(label, str) else (name, *label)
        counters = self._delta.counters
        counters[key] = counters.get(key, 0) + n

    def gauge(self, name: str, value: float, label: str = "") -> None:
        """Set a gauge."""
        self._delta.gauges[name, label] = value

    def observe(self, name: str, value: float, n: int = 1) -> None:
        """Add `n` observations of `value` to a histogram."""
        buckets = _BUCKETS[name]
        histogram = self._delta.histograms.get(name)
        if histogram is None:
            histogram = self._delta.histograms[name] = Histogram([0] * (len(buckets) + 1))
        histogram.counts[bisect_left(buckets, value)] += n
        histogram.sum += value * n

    def exemplify(self, name: str, exemplar: Exemplar) -> None:
        """Keep an exemplar of an observation, which was counted by observe()."""
        self._delta.exemplars.setdefault(name, {})[bisect_left(_BUCKETS[name], exemplar.value)] = exemplar

    def drain(self) -> MetricsDelta:
        """Return the delta recorded since the last call, and start a new one."""
        delta, self._delta = self._delta, MetricsDelta({}, {}, {}, {})
        return delta
