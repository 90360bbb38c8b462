"""The metrics page, the JSON log and the traces of a real daemon with two workers."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.conftest import needs_proc
from tests.support.daemon import ROOT, Daemon, wait_for

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs quire[otel]")
from tests.support.otlp_collector import Collector

MODEL = "quire-demo"
SECRET = "xyzzy-plugh"
CELL = re.compile(r"`([a-z0-9_:]+)(?:\{([a-z_,]+)\})?`")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Daemon]:
    """A daemon that tells all it can, with a key: two workers, JSON log, traces."""
    flags = ["--http-workers", "2", "--log-format", "json", "--otlp-traces-endpoint", collector.url]
    folder = tmp_path_factory.mktemp("observed")
    with Daemon("--device", "cpu", *flags, folder=folder, env={"QUIRE_API_KEY": SECRET}) as daemon:
        wait_for(lambda: "Ready in" in daemon.log, timeout_s=90, what="ready")
        yield daemon


@pytest.fixture(scope="module")
def http(observed: Daemon) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=re.search(r"listening url=([^\s\"]+)", observed.log)[1],
        headers={"authorization": f"Bearer {SECRET}"},
        timeout=60,
    ) as client:
        yield client


def samples(http: httpx.Client) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return {(name, label values but the model's): value}."""
    return {
        (sample.name, tuple(value for label, value in sample.labels.items() if label != "model_name")): sample.value
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for sample in family.samples
    }


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    """Return {name: (kind, labels)} of docs/reference/metrics.md."""
    found = {}
    for line in (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 5 and cells[1] in ("counter", "gauge", "histogram"):
            own, alias = CELL.fullmatch(cells[0]), CELL.fullmatch(cells[3])
            labels = [name for match in (own, alias) if match for name in (match[2] or "").split(",") if name]
            for match in filter(None, (own, alias)):
                own_labels = match[2].split(",") if match[2] else labels
                found[match[1]] = (cells[1], frozenset(own_labels))
            assert cells[2], line
            assert cells[4], line
    return found


def test_the_page_has_exactly_the_metrics_that_the_documents_explain(http: httpx.Client) -> None:
    """Names as on the page, with _total; kinds; labels."""
    page, name, kinds = {}, "", {}
    text = http.get("/metrics").text
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            kinds[name] = kind
    for family in text_string_to_metric_families(text):
        name = family.name + "_total" if family.type == "counter" else family.name
        assert kinds[name] == family.type
        labels = {label for sample in family.samples for label in sample.labels}
        if name.startswith("quire_adapter_"):  # there are no adapters here, so no series
            assert family.samples == []
            labels = {"adapter"}
        page[name] = (family.type, frozenset(labels - {"model_name", "le"}))
    assert page == documented()


def test_what_happens_to_requests_is_counted_apart(http: httpx.Client) -> None:
    before = samples(http)
    body = {"model": MODEL, "prompt": "Count", "max_tokens": 7, "ignore_eos": True, "n": 2}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert http.post("/v1/completions", json={**body, "n": 0}).status_code == 400
    assert http.post("/v1/completions", json={**body, "timeout": 0.001}).status_code == 408
    assert http.get("/no/such/page").status_code == 404
    after = samples(http)
    grown = {key: after[key] - before[key] for key in after if after[key] != before.get(key)}
    route = "/v1/completions"
    assert grown["quire_http_requests_total", (route, "2xx")] == 1
    assert grown["quire_http_requests_total", (route, "4xx")] == 2
    assert grown["http_requests_total", (route, "4xx")] == 2
    assert grown["quire_http_requests_total", ("other", "4xx")] == 1
    assert grown["quire_requests_rejected_total", ("invalid",)] == 1  # the unknown page was a GET
    assert grown["quire_requests_failed_total", ("deadline_exceeded",)] == 1
    assert grown["quire_request_generation_tokens_count", ()] >= 2
    assert grown["vllm:request_max_num_generation_tokens_sum", ()] == 7


@needs_proc
def test_processes_memory_and_loops_are_measured(http: httpx.Client, observed: Daemon) -> None:
    found = samples(http)
    for role, num in (("launcher", 1), ("engine", 1), ("worker", 2)):
        assert found["quire_process_cpu_seconds_total", (role,)] > 0.05
        assert found["quire_process_resident_memory_bytes", (role,)] > num * 10 * 2**20
        assert found["quire_process_open_fds", (role,)] >= num * 5
    assert found["quire_ready", ()] == found["quire_engine_up", ()] == 1
    assert found["vllm:engine_sleep_state", ("awake",)] == 1
    assert 0 < time.time() - found["quire_start_time_seconds", ()] < 3600
    assert found["quire_http_connections", ()] >= 1
    assert found["quire_event_loop_lag_seconds_count", ()] > 0
    assert found["quire_kv_cache_bytes", ()] > 2**20
    assert found["quire_gpu_memory_total_bytes", ()] == 0
    (build,) = [labels for name, labels in found if name == "quire_build_info"]
    assert {"cpu", "float32"} <= set(build)


def test_gauges_are_fresh_while_a_stream_runs_and_when_it_is_over(http: httpx.Client) -> None:
    names = ("quire_num_requests_running", "vllm:num_requests_running", "quire_http_requests_in_progress")
    body = {"model": MODEL, "prompt": "Go on", "max_tokens": 3500, "ignore_eos": True, "stream": True}

    def shown() -> list[float]:
        found = samples(http)
        return [found[name, ()] for name in names]

    with http.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()  # kept: its end would close the connection
        next(lines)
        wait_for(lambda: shown() == [1, 1, 1], timeout_s=60, what="one request")  # a step may be longer than a scrape
        found = samples(http)
        assert found["quire_kv_cache_blocks_used", ()] > 0
        assert found["quire_engine_progress_age_seconds", ()] < 60
    wait_for(lambda: shown() == [0, 0, 0], timeout_s=60, what="no request")


def test_each_request_is_one_json_line_with_fields_and_no_secret(http: httpx.Client, observed: Daemon) -> None:
    ids = {"good": "id-good", "bad": "id-bad", "left": "id-left"}
    body = {"model": MODEL, "prompt": f"{SECRET} is a word", "max_tokens": 5, "ignore_eos": True, "user": SECRET}
    http.post("/v1/completions", json=body, headers={"x-request-id": ids["good"]})
    http.post("/v1/completions", json={**body, "n": 0}, headers={"x-request-id": ids["bad"]})
    stream = {**body, "stream": True, "max_tokens": 3000}
    with http.stream("POST", "/v1/completions", json=stream, headers={"x-request-id": ids["left"]}) as reply:
        next(reply.iter_lines())
    wait_for(lambda: all(name in observed.log for name in ids.values()), timeout_s=60, what="three lines")
    lines = [json.loads(line) for line in observed.log.splitlines()]
    of_requests = {name: [line for line in lines if line.get("request_id") == ids[name]] for name in ids}
    assert [len(found) for found in of_requests.values()] == [1, 1, 1]
    good, bad, left = (found[0] for found in of_requests.values())
    assert (good["method"], good["path"], good["status"], good["outcome"]) == ("POST", "/v1/completions", 200, "length")
    assert (good["output_tokens"], good["cached_tokens"]) == (5, 0)
    assert good["ttft_ms"] > good["queue_ms"] >= 0
    assert re.fullmatch(r"[0-9a-f]{32}", good["trace_id"])
    assert good["message"].endswith("length id-good")
    assert (bad["status"], bad["outcome"]) == (400, "invalid_parameter")
    assert (left["status"], left["outcome"]) == (200, "abort")
    assert SECRET not in observed.log


def test_a_request_arrives_at_the_collector_as_one_span_with_three_below(
    http: httpx.Client, collector: Collector
) -> None:
    trace_id, parent_id = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key=SECRET, max_retries=0)
    reply = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=[{"role": "user", "content": SECRET}],
        max_tokens=4,
        extra_body={"ignore_eos": True},
        extra_headers={"traceparent": f"00-{trace_id}-{parent_id}-01"},
    )
    span_id = reply.headers["traceresponse"].split("-")[2]

    def family() -> dict[str, object]:
        return {span.name: span for span in collector.spans if span.trace_id == trace_id}

    wait_for(lambda: len(family()) == 4, timeout_s=60, what="four spans")
    spans = family()
    assert spans[f"chat {MODEL}"].parent_id == parent_id
    assert spans[f"chat {MODEL}"].attributes["gen_ai.usage.output_tokens"] == 4
    assert {spans[name].parent_id for name in ("queue", "prefill", "decode")} == {span_id}
    assert set(collector.paths) == {"/v1/traces"}
    assert SECRET.encode() not in b"".join(collector.bodies)


@pytest.mark.full
def test_without_compat_there_is_no_name_of_vllms(start) -> None:
    daemon = start("--metrics-compat", "none").wait_ready()
    text = daemon.get("/metrics").text
    assert "quire_num_requests_running" in text
    assert "vllm:" not in text
    assert "\nhttp_requests" not in text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--metrics-compat", "sglang"], "invalid choice"),
        (["--otlp-traces-endpoint", "localhost:4317"], "is not a URL such as"),
    ],
)
def test_a_wrong_flag_is_one_sentence(flags: list[str], said: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "server", "serve", "--port", "0", *flags]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
