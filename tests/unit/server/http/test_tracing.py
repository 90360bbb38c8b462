"""Spans of requests, as a collector gets them."""

import subprocess
import sys
import time

import pytest

from engine.interface.errors import StartupError
from server.config.serve_flags import traces_endpoint
from server.http import tracing
from tests.support.embedding_folder import write_embedding_files
from tests.support.fakes import FakeEngineClient
from tests.unit.server.conftest import write_model_folder

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs quire[otel]")
from tests.support.otlp_collector import Collector

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "xyzzy-plugh"


@pytest.fixture
def traced(harness):
    """Return (app, collector, finish); finish() sends what there is and returns the spans by name."""
    with Collector() as collector:
        tracer = tracing.Tracer(f"{collector.url}/v1/traces", model_name="tiny", version="1", instance="worker-0")

        def finish():
            tracer.close()
            return {span.name: span for span in collector.spans}

        yield harness("Hello, world!", engine={"num_cached_tokens": 2}, tracer=tracer), collector, finish
        tracer.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_is_a_span_with_its_phases_below(traced, stream):
    app, collector, finish = traced
    before_s = time.time()
    reply = app.post(
        "/v1/chat/completions",
        {"model": "alias/tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": stream},
        headers={"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "shop=1"},
    )
    spans = finish()
    assert set(spans) == {"chat alias/tiny", "queue", "prefill", "decode"}
    span = spans["chat alias/tiny"]
    assert reply.headers["traceresponse"] == f"00-{TRACE}-{span.span_id}-01"
    assert (span.trace_id, span.parent_id, span.is_error) == (TRACE, SPAN, False)
    num_in = len(app.client.submitted[0].prompt_token_ids)
    assert span.attributes.pop("gen_ai.response.id").startswith("chatcmpl-")
    assert span.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "http.response.header.x-request-id": [reply.headers["x-request-id"]],
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": "alias/tiny",
        "gen_ai.response.model": "alias/tiny",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": num_in,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.usage.output_tokens": 3,
    }
    assert collector.resource["service.name"] == "quire"
    queue, prefill, decode = (spans[name] for name in ("queue", "prefill", "decode"))
    for child in (queue, prefill, decode):
        assert (child.trace_id, child.parent_id) == (TRACE, span.span_id)
        assert child.start_s <= child.end_s
    assert before_s - 0.05 <= span.start_s == pytest.approx(queue.start_s)
    assert queue.end_s == pytest.approx(prefill.start_s, abs=1e-6)
    assert decode.end_s <= span.end_s + 1e-6
    assert span.end_s <= time.time() + 0.05


def test_embeddings_have_a_span_with_their_adapter_and_no_decode(harness, tmp_path):
    folder = write_model_folder(tmp_path)
    write_embedding_files(folder)
    with Collector() as collector:
        tracer = tracing.Tracer(f"{collector.url}/v1/traces", model_name="tiny", version="1", instance="worker-0")
        app = harness(folder=folder, tracer=tracer, lora_names=["sql"])
        assert app.post("/v1/embeddings", {"model": "sql", "input": ["a", "b"]}).status_code == 200
        tracer.close()
        spans = {span.name: span for span in collector.spans}
    assert set(spans) == {"embeddings sql", "queue", "prefill"}
    span = spans["embeddings sql"]
    assert (span.attributes["gen_ai.request.model"], span.attributes["gen_ai.response.model"]) == ("sql", "sql")
    assert span.attributes["gen_ai.usage.input_tokens"] > 0
    for name in ("queue", "prefill"):
        assert spans[name].parent_id == span.span_id
        assert spans[name].start_s <= spans[name].end_s


def test_a_state_that_is_none_is_in_no_log(traced, caplog):
    app, _, finish = traced
    app.post(
        "/v1/completions",
        {"prompt": "Hello"},
        headers={"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": SECRET},
    )
    assert finish()["text_completion tiny"].parent_id == SPAN
    assert SECRET not in caplog.text


def test_without_a_parent_a_trace_begins_and_others_have_their_own(traced):
    app, _, finish = traced
    replies = [app.chat(max_tokens=1), app.complete(max_tokens=1)]
    spans = finish()
    for reply, name in zip(replies, ("chat tiny", "text_completion tiny"), strict=True):
        assert reply.headers["traceresponse"] == f"00-{spans[name].trace_id}-{spans[name].span_id}-01"
        assert spans[name].parent_id == ""
    assert spans["chat tiny"].trace_id != spans["text_completion tiny"].trace_id


def test_what_a_client_does_not_sample_is_not_sent(traced):
    app, _, finish = traced
    reply = app.post("/v1/completions", {"prompt": "Hello"}, headers={"traceparent": f"00-{TRACE}-{SPAN}-00"})
    assert reply.headers["traceresponse"].startswith(f"00-{TRACE}-")
    assert finish() == {}


def test_refused_requests_and_unknown_paths_have_a_span_without_phases(traced):
    app, _, finish = traced
    app.chat(n=0)
    app.post(f"/{SECRET}", {})
    assert app.get("/v1/models").headers.get("traceresponse") is None
    spans = finish()
    assert set(spans) == {"chat tiny", "POST other"}
    assert spans["chat tiny"].attributes["error.type"] == "invalid_parameter"
    assert not spans["chat tiny"].is_error  # the client's fault, by the conventions for servers
    assert spans["POST other"].attributes["http.response.status_code"] == 404


def test_no_text_of_a_request_or_an_answer_leaves_in_a_span(traced):
    app, collector, finish = traced
    app.chat(messages=[{"role": "user", "content": SECRET}], user=SECRET, metadata={"a": SECRET})
    app.post("/v1/completions", {"prompt": SECRET, "stop": [SECRET]}, headers={"authorization": f"Bearer {SECRET}"})
    app.post(f"/{SECRET}?key={SECRET}", {})
    finish()
    sent = b"".join(collector.bodies)
    assert sent
    assert SECRET.encode() not in sent
    assert b"world" not in sent


def test_a_failure_of_ours_is_an_error(traced):
    app, _, finish = traced
    app.client.delay_s = 60
    app.chat(timeout=0.02)
    span = finish()["chat tiny"]
    assert span.is_error
    assert span.attributes["error.type"] == "deadline_exceeded"


@pytest.mark.slow
def test_a_collector_that_is_not_there_holds_nothing_up(harness):
    tracer = tracing.Tracer("http://127.0.0.1:9/v1/traces", model_name="tiny", version="1", instance="worker-0")
    app = harness(tracer=tracer)
    assert isinstance(app.client, FakeEngineClient)
    assert app.chat(max_tokens=2).status_code == 200
    tracer.close()


@pytest.mark.slow
def test_the_sdk_is_imported_for_a_tracer_alone():
    code = "import sys, server.http.worker, server.http.tracing; sys.exit('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_collectors_url_gets_the_path_of_traces():
    assert traces_endpoint(None) is None
    assert traces_endpoint("http://localhost:4318") == "http://localhost:4318/v1/traces"
    assert traces_endpoint("https://c.example/") == "https://c.example/v1/traces"
    assert traces_endpoint("http://c.example/otlp/v1/traces") == "http://c.example/otlp/v1/traces"


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://c:4317", "http://", "http://[", "http://c:99999"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(StartupError, match="is not a URL") as raised:
        traces_endpoint(url)
    assert raised.value.exit_code == 2


def test_without_the_extra_the_flag_says_what_to_install(monkeypatch):
    monkeypatch.setattr("server.config.serve_flags._OPENTELEMETRY", ("opentelemetry_of_nobody.sdk",))
    with pytest.raises(StartupError, match="pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"):
        traces_endpoint("http://localhost:4318")
