"""The rows about the server: saturation, caching, the HTTP side, adapters and processes."""

from deploy.grafana.panels import Panel, Query, Row
from deploy.grafana.promql import rate, selected, total
from deploy.grafana.rows_requests import heatmap, percentiles

SATURATION = Row(
    "Saturation",
    (
        Panel(
            "timeseries",
            "Requests running and waiting",
            "Running: hold KV blocks. Waiting for room: --max-num-seqs or the KV cache is full. "
            "Waiting for a grammar: structured output that is being compiled.",
            "none",
            (
                Query(total("quire_num_requests_running"), "running"),
                Query(total("quire_num_requests_waiting_by_reason", 'reason="capacity"'), "waiting for room"),
                Query(total("quire_num_requests_waiting_by_reason", 'reason="deferred"'), "waiting for a grammar"),
            ),
        ),
        Panel(
            "timeseries",
            "KV cache held",
            "Share of the KV blocks that requests hold, by server. Near 1, requests wait or are preempted.",
            "percentunit",
            (Query(f"max by (instance) ({selected('quire_kv_cache_usage_ratio')})", "{{instance}}"),),
            max=1,
            steps=((None, "transparent"), (0.98, "red")),
        ),
        Panel(
            "timeseries",
            "Preemptions",
            "Requests per second that gave up their blocks, and those that go on: swapped from host memory, or computed"
            " again, which is work done twice.",
            "cps",
            (
                Query(rate("quire_num_preemptions_total"), "preemptions"),
                Query(rate("quire_preempted_requests_resumed_total", by="by"), "{{by}}"),
            ),
        ),
        percentiles(
            "Step time",
            "Between the ends of two steps of the engine: the least possible time between tokens.",
            "s",
            "quire_step_time_seconds",
        ),
        heatmap("Step time, all", "How many steps took how long.", "s", "quire_step_time_seconds"),
        Panel(
            "timeseries",
            "Since the engine's last progress",
            "About a second at most, idle or not. It grows while the engine is stuck; above 10 s /health answers 503.",
            "s",
            (
                Query(
                    f"max by (instance) ({selected('quire_engine_progress_age_seconds')})",
                    "{{instance}}",
                ),
            ),
        ),
    ),
)

CACHING = Row(
    "Caching",
    (
        Panel(
            "timeseries",
            "Prefix hits",
            "Share of prompt tokens that were found in the prefix cache and not computed. Low although prompts begin "
            "alike: look for a date or an id in the first block.",
            "percentunit",
            (
                Query(
                    f"{rate('quire_prefix_cache_hits_total')} / {rate('quire_prefix_cache_queries_total')}", "hit ratio"
                ),
            ),
            max=1,
            width=12,
        ),
        Panel(
            "timeseries",
            "Prefix cache",
            "Prompt tokens per second that were looked up, and found.",
            "suffix: tok/s",
            (
                Query(rate("quire_prefix_cache_queries_total"), "looked up"),
                Query(rate("quire_prefix_cache_hits_total"), "found"),
            ),
            width=12,
        ),
        Panel(
            "timeseries",
            "KV blocks",
            "Blocks that requests hold, of all there are; the rest caches prefixes.",
            "none",
            (
                Query(total("quire_kv_cache_blocks_used"), "held"),
                Query(total("quire_kv_cache_blocks_total"), "all"),
            ),
            width=12,
        ),
        Panel(
            "timeseries",
            "Prefix hits by tier",
            "Prompt tokens per second that were found, and of them those whose blocks came from host memory, and those "
            "that the disk had given it before.",
            "suffix: tok/s",
            (
                Query(rate("quire_prefix_cache_hits_total"), "all"),
                Query(rate("quire_kv_host_hit_tokens_total"), "host memory"),
                Query(rate("quire_kv_disk_hit_tokens_total"), "disk"),
            ),
            width=12,
        ),
        Panel(
            "timeseries",
            "Bytes between tiers",
            "Bytes per second that were copied to host memory and from it, and written to the disk and read from it. "
            "Nothing without --kv-host-memory and --kv-disk.",
            "Bps",
            (
                Query(rate("quire_kv_host_copied_bytes_total", by="direction"), "host: {{direction}}"),
                Query(rate("quire_kv_disk_copied_bytes_total", by="direction"), "disk: {{direction}}"),
            ),
            width=12,
        ),
        Panel(
            "timeseries",
            "Evictions",
            "Cached blocks per second that were overwritten. With falling prefix hits: the cache is too small.",
            "cps",
            (Query(rate("quire_prefix_cache_evictions_total"), "blocks"),),
            width=12,
        ),
        Panel(
            "timeseries",
            "Prompts by why no more was found",
            "all: nothing was missing. differs: cached prompts go on differently. evicted: it was overwritten. "
            "no_checkpoint: recurrent layers have no saved state there.",
            "reqps",
            (Query(rate("quire_prefix_cache_requests_total", by="reason"), "{{reason}}"),),
            width=12,
            is_stacked=True,
        ),
        Panel(
            "timeseries",
            "States of recurrent layers",
            "Saved states per second, those not saved for want of memory, those that prompts went on from, and those "
            "that were overwritten. Nothing for models without such layers.",
            "cps",
            (Query(rate("quire_prefix_cache_states_total", by="event"), "{{event}}"),),
            width=12,
        ),
        Panel(
            "timeseries",
            "Memory of states",
            "Live states of requests, and saved ones that prompts can find.",
            "bytes",
            (Query(total("quire_kv_cache_state_bytes", by="use"), "{{use}}"),),
            width=12,
            is_stacked=True,
        ),
    ),
)

API_SERVER = Row(
    "API server",
    (
        Panel(
            "timeseries",
            "HTTP requests by route",
            "Per second, of the routes that are asked.",
            "reqps",
            (Query(f"{rate('quire_http_requests_total', by='route')} > 0", "{{route}}"),),
        ),
        Panel(
            "timeseries",
            "HTTP requests by status",
            "Per second. A stream that breaks after its begin is a 2xx here, and counted as failed.",
            "reqps",
            (Query(rate("quire_http_requests_total", by="status"), "{{status}}"),),
            is_stacked=True,
        ),
        Panel(
            "timeseries",
            "Open now",
            "Connections of clients, and POST requests that are being answered.",
            "none",
            (
                Query(total("quire_http_connections"), "connections"),
                Query(total("quire_http_requests_in_progress"), "requests"),
            ),
        ),
        Panel(
            "timeseries",
            "Rejected",
            "Per second, by reason: invalid is the client's, overloaded a long queue, draining the end of a server.",
            "reqps",
            (Query(rate("quire_requests_rejected_total", by="reason"), "{{reason}}"),),
            is_stacked=True,
        ),
        Panel(
            "timeseries",
            "Failed",
            "Requests per second that we could not answer to their end, by reason.",
            "reqps",
            (Query(rate("quire_requests_failed_total", by="reason"), "{{reason}}"),),
            is_stacked=True,
        ),
        Panel(
            "timeseries",
            "Clients that left",
            "Disconnects per second before the answer's end. Many: time-outs of clients or proxies that are too short.",
            "reqps",
            (Query(rate("quire_http_disconnects_total"), "disconnects"),),
        ),
        percentiles(
            "Event loop lag",
            "How late a worker's event loop wakes up. Above 50 ms: more --http-workers, or a freer machine.",
            "s",
            "quire_event_loop_lag_seconds",
            width=12,
        ),
        heatmap(
            "Event loop lag, all",
            "How often a worker's event loop woke up how late.",
            "s",
            "quire_event_loop_lag_seconds",
            width=12,
        ),
    ),
)

API_KEYS = Row(
    "API keys",
    (
        Panel(
            "timeseries",
            "Tokens by key",
            "Tokens per second by the name of the API key: prompt tokens, cached or computed, and generated ones.",
            "suffix: tok/s",
            (Query(rate("quire_key_tokens_total", by="key"), "{{key}}"),),
            is_stacked=True,
        ),
        Panel(
            "timeseries",
            "Device time by key",
            "Seconds of engine steps per second by the name of the API key. All together near 1: the device is busy.",
            "percentunit",
            (Query(rate("quire_key_device_seconds_total", by="key"), "{{key}}"),),
            is_stacked=True,
        ),
        Panel(
            "timeseries",
            "Requests by key",
            "HTTP requests per second by the name of the API key: accepted, and refused by its limits or the queue.",
            "reqps",
            (Query(rate("quire_key_requests_total", by="key, result"), "{{key}} {{result}}"),),
            is_stacked=True,
        ),
    ),
)

ADAPTERS = Row(
    "LoRA adapters",
    (
        Panel(
            "timeseries",
            "Requests by adapter",
            "Requests per second that ended. Those of the model itself are not among them. No data without --lora.",
            "reqps",
            (Query(rate("quire_adapter_requests_total", by="adapter"), "{{adapter}}"),),
            is_stacked=True,
        ),
        Panel(
            "timeseries",
            "Tokens by adapter",
            "Generated tokens per second.",
            "suffix: tok/s",
            (Query(rate("quire_adapter_generation_tokens_total", by="adapter"), "{{adapter}}"),),
            is_stacked=True,
        ),
        Panel(
            "timeseries",
            "Prompt tokens by adapter",
            "Prompt tokens per second, cached ones included. Adapters share no cached prefixes.",
            "suffix: tok/s",
            (Query(rate("quire_adapter_prompt_tokens_total", by="adapter"), "{{adapter}}"),),
            is_stacked=True,
        ),
        Panel(
            "timeseries",
            "First token by adapter",
            "Mean time to the first token.",
            "s",
            (
                Query(
                    f"{rate('quire_adapter_first_token_seconds_total', by='adapter')}"
                    f" / {rate('quire_adapter_requests_total', by='adapter')}",
                    "{{adapter}}",
                ),
            ),
            width=12,
        ),
    ),
)

PROCESSES = Row(
    "Processes",
    (
        Panel(
            "timeseries",
            "CPU",
            "Cores in use, by role of process. The workers are added up.",
            "suffix: cores",
            (Query(rate("quire_process_cpu_seconds_total", by="role"), "{{role}}"),),
            is_stacked=True,
        ),
        Panel(
            "timeseries",
            "Memory",
            "Resident memory, by role of process.",
            "bytes",
            (Query(total("quire_process_resident_memory_bytes", by="role"), "{{role}}"),),
            is_stacked=True,
        ),
        Panel(
            "timeseries",
            "Open files",
            "File descriptors, by role of process. Each connection is one of a worker's.",
            "none",
            (Query(total("quire_process_open_fds", by="role"), "{{role}}"),),
        ),
        Panel(
            "timeseries",
            "Restarts",
            "Since the daemon's start: of the engine, of HTTP workers; takeovers that failed. The log has reasons.",
            "none",
            (
                Query(total("quire_engine_restarts_total"), "engine"),
                Query(total("quire_worker_restarts_total"), "workers"),
                Query(total("quire_takeovers_failed_total"), "failed takeovers"),
            ),
            width=12,
        ),
        Panel(
            "timeseries",
            "Scrape",
            "Time that Prometheus needs to read /metrics. It includes the rest of the engine's step.",
            "s",
            (Query('max by (instance) (scrape_duration_seconds{job="quire",instance=~"$instance"})', "{{instance}}"),),
            width=12,
        ),
        Panel(
            "stat",
            "Up for",
            "Time since the daemon started, of each server.",
            "s",
            (Query(f"time() - max by (instance) ({selected('quire_start_time_seconds')})", "{{instance}}"),),
        ),
        Panel(
            "stat",
            "Engine gone for",
            "When it last ended, until the next one was ready, of each server: back-off and load. 0 if it never ended.",
            "s",
            (Query(f"max by (instance) ({selected('quire_engine_restart_seconds')})", "{{instance}}"),),
        ),
        Panel(
            "stat",
            "What runs",
            "Version, torch, CUDA, device and type of the weights, of each server.",
            "none",
            (
                Query(
                    'quire_build_info{instance=~"$instance"}',
                    "Quire {{version}} · torch {{torch}} · {{device}} · {{dtype}}",
                ),
            ),
            shows_names=True,
        ),
    ),
)
