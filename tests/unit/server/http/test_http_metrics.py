"""What a worker counts of HTTP requests, and how rejected, failed and left ones are told apart."""

import asyncio
import time

import pytest

from engine.interface.control import Stage, State
from engine.interface.errors import EngineDead, ModelOutputInvalid, OutOfMemory, Overloaded
from engine.interface.metrics import METRICS, Metrics
from server.api.request_record import RequestRecord, TraceContext
from server.generation.spec import Stats
from server.http.metrics import HttpMetrics
from tests.support.fakes import FakeLauncherChannel
from tests.unit.server.conftest import CHAT


def counted(app, name: str) -> dict[tuple[str, ...], float]:
    """Return what a counter counted until now, by labels, without what is 0."""
    counters = app.metrics.drain().counters
    return {key[1:]: n for key, n in counters.items() if key[0] == name and n}


def test_every_route_is_there_at_zero_and_unknown_paths_are_one_series(harness):
    app = harness()
    counters = app.metrics.drain().counters
    assert {counters["http_requests_total", CHAT, status] for status in ("2xx", "4xx", "5xx")} == {0}
    assert counters["http_requests_total", "/v1/models/{model_id:path}", "4xx"] == 0
    app.get("/v1/models")
    app.chat()
    app.chat(n=0)
    app.post("/nothing/of/mine", {})
    app.get("/v1/models/tiny")
    assert counted(app, "http_requests_total") == {
        ("/v1/models", "2xx"): 1,
        (CHAT, "2xx"): 1,
        (CHAT, "4xx"): 1,
        ("other", "4xx"): 1,
        ("/v1/models/{model_id:path}", "2xx"): 1,
    }


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 2])
@pytest.mark.parametrize(
    ("error", "rejected", "failed"),
    [
        (Overloaded("full"), "overloaded", None),
        (EngineDead("dead"), None, "engine_dead"),
        (OutOfMemory("no room"), None, "out_of_memory"),
        (ModelOutputInvalid("not finite"), None, "model_output_invalid"),
    ],
)
def test_an_error_is_a_rejection_or_a_failure_and_never_both(harness, error, rejected, failed, num_tokens, stream):
    if rejected and num_tokens:
        return  # what is refused has no tokens
    app = harness(engine={"fail": error, "fail_after": num_tokens})
    app.chat(stream=stream)
    counters = app.metrics.drain().counters
    seen = {key[0]: key[1] for key, n in counters.items() if n and key[0].startswith("requests_")}
    expected = {"requests_rejected_total": rejected, "requests_failed_total": failed}
    assert seen == {name: reason for name, reason in expected.items() if reason}


def test_a_deadline_is_a_failure_of_ours(harness):
    app = harness(engine={"delay_s": 60})
    assert app.chat(timeout=0.05).status_code == 408
    counters = app.metrics.drain().counters
    assert counters["requests_failed_total", "deadline_exceeded"] == 1
    assert not any(n for key, n in counters.items() if key[0] == "requests_rejected_total")


def test_what_is_refused_while_the_model_loads_is_no_failure(harness):
    app = harness(launcher=(launcher := FakeLauncherChannel()))
    launcher.state = State(Stage("weights"), False)
    app.chat()
    assert counted(app, "requests_failed_total") == {}


def test_gauges_are_read_when_counts_are_sent():
    metrics, open_requests = Metrics(), [1, 2, 3]
    http_metrics = HttpMetrics(metrics, num_requests=lambda: len(open_requests))
    http_metrics.num_connections = lambda: 5
    http_metrics.record_state()
    assert metrics.drain().gauges == {("http_requests_in_progress", ""): 3, ("http_connections", ""): 5}


@pytest.mark.slow
def test_a_loop_that_is_held_up_shows():
    metrics = Metrics()

    async def hold_up() -> None:
        watching = asyncio.create_task(HttpMetrics(metrics, num_requests=lambda: 0).watch_lag())
        await asyncio.sleep(0.01)
        time.sleep(0.6)  # noqa: ASYNC251 - what is measured
        await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(hold_up())
    lag = metrics.drain().histograms["event_loop_lag_seconds"]
    assert sum(lag.counts) >= 1
    assert lag.sum > 0.2


def test_requests_of_adapters_are_counted_by_adapter_and_those_of_the_model_are_not():
    metrics = Metrics()
    http_metrics = HttpMetrics(metrics, num_requests=lambda: 0, adapters=["law", "poems"])
    http_metrics.create_series([])
    stats = Stats(num_prompt_tokens=20, num_output_tokens=5, ttft_s=0.25)
    for model in ("law", "law", "the-model"):
        http_metrics.end({}, RequestRecord("r", 0.0, status=200, stats=lambda: stats, model=model))
    http_metrics.end({}, RequestRecord("r", 0.0, status=400, model="poems"))
    found = {key: n for key, n in metrics.drain().counters.items() if key[0].startswith("adapter_")}
    names = ("requests", "prompt_tokens", "generation_tokens", "first_token_seconds")
    assert [found[f"adapter_{name}_total", "law"] for name in names] == [2, 40, 10, 0.5]
    assert [found[f"adapter_{name}_total", "poems"] for name in names] == [0, 0, 0, 0]
    assert {adapter for _, adapter in found} == {"law", "poems"}


def test_a_sampled_request_leaves_its_trace_id_as_an_exemplar_of_its_latencies():
    metrics = Metrics()
    http_metrics = HttpMetrics(metrics, num_requests=lambda: 0)
    stats = Stats(num_prompt_tokens=20, num_output_tokens=5, ttft_s=0.25, total_s=4.0)
    trace = TraceContext("ab" * 16, "cd" * 8)
    unsampled = TraceContext("ef" * 16, "cd" * 8, is_sampled=False)
    for one in (trace, unsampled, None):
        http_metrics.end({}, RequestRecord("r", 0.0, status=200, stats=lambda: stats, trace=one))
    for header in (b"00-" + b"12" * 16 + b"-" + b"34" * 8 + b"-00", b"nonsense"):
        scope = {"headers": [(b"traceparent", header)]}
        http_metrics.end(scope, RequestRecord("r", 0.0, status=200, stats=lambda: stats))
    exemplars = metrics.drain().exemplars
    for name, value in (("time_to_first_token_seconds", 0.25), ("e2e_request_latency_seconds", 4.0)):
        ((place, found),) = exemplars[name].items()
        assert (found.trace_id, found.value) == ("ab" * 16, value)
        buckets = METRICS[name].buckets
        assert buckets[place - 1] < value <= buckets[place]
    scope = {"headers": [(b"traceparent", b"00-" + b"12" * 16 + b"-" + b"34" * 8 + b"-01")]}
    http_metrics.end(scope, RequestRecord("r", 0.0, status=200, stats=lambda: stats))
    (found,) = metrics.drain().exemplars["time_to_first_token_seconds"].values()
    assert found.trace_id == "12" * 16  # its client keeps a trace, also of a server that keeps none
