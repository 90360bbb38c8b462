"""A real Prometheus reads /metrics as OpenMetrics, since it prefers that, and finds the same series and exemplars."""

import httpx

from tests.monitoring.prometheus import Prometheus
from tests.support.daemon import Daemon

TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_a_page_with_exemplars_has_the_trace_id_of_a_request(daemon: Daemon) -> None:
    body = {"messages": [{"role": "user", "content": "What is the capital of Peru?"}], "max_tokens": 8}
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    assert httpx.post(f"{daemon.base_url}/v1/chat/completions", json=body, headers=headers).status_code == 200
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    page = httpx.get(f"{daemon.base_url}/metrics", headers=accept)
    assert page.headers["content-type"].startswith("application/openmetrics-text")
    buckets = [line for line in page.text.splitlines() if line.startswith("quire_time_to_first_token_seconds_bucket")]
    assert any(f'# {{trace_id="{TRACE}"}}' in line for line in buckets)


def test_prometheus_takes_the_page(prometheus: Prometheus) -> None:
    for name in ("quire_time_to_first_token_seconds_count", "vllm:time_to_first_token_seconds_count", "quire_ready"):
        assert max(series.values[-1] for series in prometheus.ask(name)) > 0
