"""The rows about requests: overview with the targets, latency, throughput, workload."""

from deploy.grafana.panels import Panel, Query, Row, Steps
from deploy.grafana.promql import RANGE, growth, mean, quantile, rate, selected, share_within, total
from deploy.grafana.slo import ERROR_RATIO, ITL_S, SHARE_WITHIN, TTFT_S

_TTFT = "quire_time_to_first_token_seconds"
_ITL = "quire_inter_token_latency_seconds"
_TPOT = "quire_request_time_per_output_token_seconds"
_E2E = "quire_e2e_request_latency_seconds"
_WITH_EXEMPLARS = (_TTFT, _E2E)  # server/http/metrics.py
_ANSWERS = 'route=~"/v1/.+"'
_FAILED = f"({growth('quire_requests_failed_total', over=RANGE)})"
_ANSWERED = f"({growth('quire_http_requests_total', _ANSWERS, over=RANGE)})"

_GOOD_FROM: Steps = ((None, "red"), (SHARE_WITHIN, "green"))
_PLAIN: Steps = ()


def percentiles(title: str, description: str, unit: str, histogram: str, *, width: int = 8) -> Panel:
    """Return a time series of p50, p95 and p99."""
    queries = tuple(
        Query(
            quantile(share, histogram),
            f"p{share * 100:g}",
            has_exemplars=histogram in _WITH_EXEMPLARS and share == 0.99,
        )
        for share in (0.5, 0.95, 0.99)
    )
    return Panel("timeseries", title, description, unit, queries, width=width)


def heatmap(title: str, description: str, unit: str, histogram: str, *, width: int = 8) -> Panel:
    """Return a heat map of a histogram's buckets."""
    query = Query(growth(histogram + "_bucket", by="le"), "{{le}}")
    return Panel("heatmap", title, description, unit, (query,), width=width)


def _tile(title: str, description: str, unit: str, expr: str, *, steps: Steps = _PLAIN, decimals: int = 1) -> Panel:
    return Panel("stat", title, description, unit, (Query(expr),), width=4, steps=steps, decimals=decimals)


OVERVIEW = Row(
    "Overview",
    (
        _tile(
            "Servers ready",
            "Servers whose /ready answers 200. Below the number of servers that run: one loads, drains or is broken.",
            "none",
            total("quire_ready"),
            steps=((None, "red"), (1, "green")),
            decimals=0,
        ),
        _tile(
            "Alerts firing",
            "Of Quire's alerts (deploy/prometheus/alerts.yml), on all servers. Prometheus' page /alerts names them.",
            "none",
            'count(ALERTS{alertname=~"Quire.+",alertstate="firing"}) or vector(0)',
            steps=((None, "green"), (1, "red")),
            decimals=0,
        ),
        _tile(
            "Without our error",
            f"Share of requests in the time shown that did not fail through our fault. Target: {1 - ERROR_RATIO:.0%}.",
            "percentunit",
            f"1 - {_FAILED} / {_ANSWERED}",
            steps=((None, "red"), (1 - ERROR_RATIO, "green")),
            decimals=2,
        ),
        _tile(
            f"First token within {TTFT_S:g} s",
            f"Share of requests in the time shown whose first token came in time. Target: {SHARE_WITHIN:.0%}.",
            "percentunit",
            share_within(TTFT_S, _TTFT),
            steps=_GOOD_FROM,
        ),
        _tile(
            f"Next token within {ITL_S * 1000:g} ms",
            f"Share of the times between two tokens, in the time shown, that were short. Target: {SHARE_WITHIN:.0%}.",
            "percentunit",
            share_within(ITL_S, _ITL),
            steps=_GOOD_FROM,
        ),
        _tile(
            "Requests",
            "Requests that the engine ended, for whatever reason, per second.",
            "reqps",
            rate("quire_requests_finished_total"),
        ),
        _tile(
            "TTFT p95",
            "95 in 100 requests got their first token sooner.",
            "s",
            quantile(0.95, _TTFT),
            steps=((None, "green"), (TTFT_S, "red")),
            decimals=2,
        ),
        _tile(
            "ITL p95",
            "95 in 100 tokens came sooner after the token before.",
            "s",
            quantile(0.95, _ITL),
            steps=((None, "green"), (ITL_S, "red")),
        ),
        _tile(
            "Generated",
            "Tokens generated per second, of all requests.",
            "suffix: tok/s",
            rate("quire_generation_tokens_total"),
            decimals=0,
        ),
        _tile("Running", "Requests that hold KV blocks now.", "none", total("quire_num_requests_running"), decimals=0),
        _tile(
            "Waiting",
            "Requests in the queue now. For a moment: a burst. For minutes: see Saturation.",
            "none",
            total("quire_num_requests_waiting"),
            steps=((None, "green"), (1, "orange")),
            decimals=0,
        ),
        _tile(
            "KV cache held",
            "The fullest server's share of KV blocks that requests hold. What is only cached counts as free.",
            "percentunit",
            f"max({selected('quire_kv_cache_usage_ratio')})",
            steps=((None, "green"), (0.9, "orange"), (0.98, "red")),
        ),
    ),
)

LATENCY = Row(
    "Latency",
    (
        percentiles("Time to first token", "From a request's arrival to its first token.", "s", _TTFT, width=12),
        heatmap("Time to first token, all", "How many requests took how long.", "s", _TTFT, width=12),
        percentiles("Time between tokens", "Each gap between two tokens of a request.", "s", _ITL, width=12),
        heatmap("Time between tokens, all", "How many gaps were how long.", "s", _ITL, width=12),
        percentiles(
            "Time per output token",
            "A request's mean over its tokens after the first: what a reader feels as speed.",
            "s",
            _TPOT,
            width=12,
        ),
        heatmap("Time per output token, all", "How many requests had which mean.", "s", _TPOT, width=12),
        percentiles("End to end", "From a request's arrival to its last token.", "s", _E2E, width=12),
        heatmap("End to end, all", "How many requests took how long.", "s", _E2E, width=12),
        percentiles(
            "Time in the queue",
            "From a request's arrival until it is first computed: what more memory or more servers would save.",
            "s",
            "quire_request_queue_time_seconds",
            width=12,
        ),
        Panel(
            "timeseries",
            "Where the time goes",
            "Means of queue, prefill and decode: which one to shorten.",
            "s",
            (
                Query(mean("quire_request_queue_time_seconds"), "queue"),
                Query(mean("quire_request_prefill_time_seconds"), "prefill"),
                Query(mean("quire_request_decode_time_seconds"), "decode"),
            ),
            width=12,
            is_stacked=True,
        ),
    ),
)

THROUGHPUT = Row(
    "Throughput",
    (
        Panel(
            "timeseries",
            "Tokens",
            "Tokens per second: generated, and of prompts, computed or found in the prefix cache.",
            "suffix: tok/s",
            (
                Query(rate("quire_generation_tokens_total"), "generated"),
                Query(
                    f"{rate('quire_prompt_tokens_total')} - {rate('quire_prompt_tokens_cached_total')}",
                    "prompt, computed",
                ),
                Query(rate("quire_prompt_tokens_cached_total"), "prompt, cached"),
            ),
        ),
        Panel(
            "timeseries",
            "Requests ended",
            "Per second, by reason: stop and length are answers, abort is a client that left, error is ours.",
            "reqps",
            (Query(rate("quire_requests_finished_total", by="finished_reason"), "{{finished_reason}}"),),
            is_stacked=True,
        ),
        Panel(
            "timeseries",
            "Steps",
            "Steps of the engine per second; 0 while requests run means that it is stuck.",
            "cps",
            (Query(rate("quire_iteration_tokens_count"), "steps"),),
        ),
        Panel(
            "timeseries",
            "Tokens per step",
            "Prompt and decode tokens computed in one step, on average; --max-num-batched-tokens is the most.",
            "suffix: tok",
            (Query(mean("quire_iteration_tokens"), "tokens"),),
        ),
        Panel(
            "timeseries",
            "Requests per step",
            "Requests computed together in one step, on average: the batch.",
            "none",
            (Query(mean("quire_iteration_requests"), "requests"),),
        ),
        Panel(
            "timeseries",
            "Guesses accepted",
            "With --speculative: share of the tokens guessed ahead that became output. No data without.",
            "percentunit",
            (
                Query(
                    f"{rate('quire_spec_decode_num_accepted_tokens_total')}"
                    f" / {rate('quire_spec_decode_num_draft_tokens_total')}",
                    "accepted",
                ),
            ),
            max=1,
        ),
    ),
)

WORKLOAD = Row(
    "Workload",
    (
        percentiles(
            "Prompt length", "Tokens of a request's prompt.", "suffix: tok", "quire_request_prompt_tokens", width=12
        ),
        heatmap(
            "Prompt length, all",
            "How many requests had prompts of which length.",
            "suffix: tok",
            "quire_request_prompt_tokens",
            width=12,
        ),
        percentiles(
            "Answer length",
            "Tokens generated for a request.",
            "suffix: tok",
            "quire_request_generation_tokens",
            width=12,
        ),
        heatmap(
            "Answer length, all",
            "How many requests had answers of which length.",
            "suffix: tok",
            "quire_request_generation_tokens",
            width=12,
        ),
    ),
)
