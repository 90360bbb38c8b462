"""The alert rules for Prometheus. Runbook: docs/how-to/alerts.md; tests: deploy/prometheus/alerts_test.yml.

Each is about one server (job, instance, model_name). Windows are for scrapes every 15 s or faster.
"""

from dataclasses import dataclass
from typing import Any

from deploy.grafana.slo import ERROR_RATIO, TTFT_S

RUNBOOK = "docs/how-to/alerts.md"
PREFIX = "Quire"
_SERVER = "job, instance, model_name"
_WHO = "{{ $labels.instance }}"


@dataclass(frozen=True)
class Alert:
    """One rule. name: without the prefix; holds_for: how long the expression must be true."""

    name: str
    severity: str  # critical: requests fail now | warning: requests will fail soon
    expr: str
    holds_for: str
    summary: str
    description: str

    def rule(self) -> dict[str, Any]:
        """Return the rule in Prometheus's format."""
        return {
            "alert": PREFIX + self.name,
            "expr": self.expr,
            "for": self.holds_for,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook": f"{RUNBOOK}#{(PREFIX + self.name).lower()}",
            },
        }


ALERTS = (
    Alert(
        "Down",
        "critical",
        'up{job="quire"} == 0 or absent(up{job="quire"})',
        "1m",
        f"Quire on {_WHO} does not answer",
        "Prometheus could not read /metrics for a minute: the daemon, its machine or the way to it is gone.",
    ),
    Alert(
        "NotReady",
        "critical",
        "quire_ready == 0",
        "5m",
        f"Quire on {_WHO} is up but not ready",
        "/ready answers 503 for five minutes: the engine loads, fails to load, restarts, or a drain does not end.",
    ),
    Alert(
        "HighErrorRatio",
        "critical",
        f"sum by ({_SERVER}) (rate(quire_requests_failed_total[5m]))"
        f' / sum by ({_SERVER}) (rate(quire_http_requests_total{{route=~"/v1/.+"}}[5m])) > {ERROR_RATIO}',
        "5m",
        f"{{{{ $value | humanizePercentage }}}} of the requests to Quire on {_WHO} fail",
        f"More than {ERROR_RATIO:.0%} of the requests of the last five minutes failed for a reason of the server's, "
        "for five minutes.",
    ),
    Alert(
        "TTFTp95OverSLO",
        "warning",
        f"histogram_quantile(0.95, sum by ({_SERVER}, le) (rate(quire_time_to_first_token_seconds_bucket[5m])))"
        f" > {TTFT_S:g}",
        "10m",
        f"First tokens of Quire on {_WHO} are late: p95 is {{{{ $value | humanizeDuration }}}}",
        f"One request in twenty waited longer than {TTFT_S:g} s for its first token, for ten minutes.",
    ),
    Alert(
        "QueueGrowing",
        "warning",
        "deriv(quire_num_requests_waiting[10m]) > 0 and min_over_time(quire_num_requests_waiting[10m]) > 0"
        f' or sum by ({_SERVER}) (rate(quire_requests_rejected_total{{reason="overloaded"}}[5m])) > 0',
        "5m",
        f"More requests come to Quire on {_WHO} than it serves",
        "The queue was never empty for ten minutes and grows, or it is full and requests are refused.",
    ),
    Alert(
        "KVFull",
        "warning",
        "avg_over_time(quire_kv_cache_usage_ratio[5m]) > 0.9 and ignoring (reason)"
        ' min_over_time(quire_num_requests_waiting_by_reason{reason="capacity"}[5m]) > 0',
        "5m",
        f"The KV cache of Quire on {_WHO} is full and requests wait",
        "Requests hold {{ $value | humanizePercentage }} of the KV blocks on average, and the queue is never empty.",
    ),
    Alert(
        "PreemptionStorm",
        "warning",
        f"sum by ({_SERVER}) (rate(quire_num_preemptions_total[5m])) > 0.1 and"
        f" sum by ({_SERVER}) (rate(quire_num_preemptions_total[5m]))"
        f" > 0.2 * sum by ({_SERVER}) (rate(quire_requests_finished_total[5m]))",
        "5m",
        f"Quire on {_WHO} computes requests again and again",
        "{{ $value | humanize }} requests a second give up their KV blocks, more than one for five that end: what was "
        "computed for them is computed again.",
    ),
    Alert(
        "KVDiskFailing",
        "warning",
        f"sum by ({_SERVER}) (increase(quire_kv_disk_errors_total[10m])) >= 5",
        "5m",
        f"The disk of Quire's KV cache on {_WHO} fails",
        "{{ $value | humanize }} calls to the disk of --kv-disk failed in ten minutes. Requests are served; what only "
        "the disk has of their prompts is computed again.",
    ),
    Alert(
        "KVDiskSlow",
        "warning",
        f'sum by ({_SERVER}) (rate(quire_kv_disk_blocks_total{{event="dropped"}}[10m])) > 0.1 and'
        f' sum by ({_SERVER}) (rate(quire_kv_disk_blocks_total{{event="dropped"}}[10m]))'
        f' > sum by ({_SERVER}) (rate(quire_kv_disk_blocks_total{{event="written"}}[10m]))',
        "10m",
        f"The disk of Quire's KV cache on {_WHO} is too slow",
        "{{ $value | humanize }} blocks a second are not written to the disk of --kv-disk, more than are: they will "
        "not be found there.",
    ),
    Alert(
        "EngineStalled",
        "critical",
        # two conditions: an engine that hangs in its first step has not reported a running request
        "min_over_time(quire_num_requests_running[1m]) > 0 and increase(quire_iteration_tokens_count[1m]) == 0"
        " or quire_engine_progress_age_seconds > 60",
        "0m",
        f"The engine of Quire on {_WHO} hangs",
        "Requests run and no step was made for a minute, or the engine's loop has not turned for a minute.",
    ),
    Alert(
        "RestartLoop",
        "critical",
        "changes(quire_engine_restarts_total[15m]) + changes(quire_worker_restarts_total[15m])"
        " + changes(quire_start_time_seconds[15m]) >= 3",
        "0m",
        f"Quire on {_WHO} restarts again and again",
        "Engine, HTTP workers or the whole daemon started again {{ $value }} times in 15 minutes.",
    ),
    Alert(
        "PrefillMissing",
        "warning",
        f"sum by ({_SERVER}) (rate(quire_prefill_fallbacks_total[5m])) > 0",
        "10m",
        f"Long prompts of Quire on {_WHO} are computed where they are decoded",
        "For ten minutes prompts found no prefill engine (--disaggregate): none serves, all are full, or they die.",
    ),
)


def rules() -> dict[str, Any]:
    """Return the rules file."""
    return {"groups": [{"name": "quire", "rules": [alert.rule() for alert in ALERTS]}]}
