"""Tracer: OpenTelemetry traces, one span per POST request with queue, prefill and decode below it (extra `otel`).

    begin, when a request arrives: ids for the reply's header → end, when its reply is complete: four spans, made from
    timestamps that exist anyway → the SDK's own thread sends them to a collector, OTLP over HTTP
Nothing happens per token. Attributes follow the semantic conventions for generative AI and never contain text.
Only this module imports opentelemetry, and only when a Tracer is made.
"""

import threading
import time
from collections.abc import Iterable
from typing import Any

from starlette.types import Scope

from engine.interface.metrics import FAILURES
from server.api.request_record import RequestRecord, TraceContext, route_of, trace_context
from server.generation.spec import Stats

_EXPORT_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 2.0
_OPERATIONS = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}
_CHATS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")

Attributes = dict[str, str | int | list[str]]


class Tracer:
    """Makes spans of one worker's requests. endpoint: a URL with its path. Raises ImportError without the extra."""

    def __init__(self, endpoint: str, *, model_name: str, version: str, instance: str) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased

        class Ids(RandomIdGenerator):
            """Random ids, except for a request's span, whose ids are in the reply's header."""

            context: TraceContext | None = None

            def generate_span_id(self) -> int:
                context, self.context = self.context, None
                return super().generate_span_id() if context is None else int(context.span_id, 16)

            def generate_trace_id(self) -> int:
                return super().generate_trace_id() if self.context is None else int(self.context.trace_id, 16)

        self._trace = trace
        self._model_name = model_name
        self._ids = Ids()
        resource = {"service.name": "quire", "service.version": version, "service.instance.id": instance}
        self._provider = TracerProvider(
            sampler=ParentBased(ALWAYS_ON),
            resource=Resource.create(resource),
            shutdown_on_exit=False,
            id_generator=self._ids,
        )
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("quire", version)

    def begin(self, headers: Iterable[tuple[bytes, bytes]]) -> TraceContext:
        """Return the place of a request in its trace."""
        return trace_context(headers)

    def end(self, scope: Scope, record: RequestRecord) -> None:
        """Make the spans of a request whose reply is complete. Does not block."""
        context = record.trace
        if context is None or not context.is_sampled:
            return
        trace, route = self._trace, route_of(scope)
        now_s = time.monotonic()
        epoch_s = time.time() - now_s
        stats = record.stats() if record.stats is not None else None
        self._ids.context = context
        span = self._tracer.start_span(
            _span_name(route, record.model or self._model_name),
            context=self._parent(context),
            kind=trace.SpanKind.SERVER,
            attributes=_attributes(scope, record, stats, served=self._model_name),
            start_time=_ns(epoch_s + record.arrival_s),
        )
        if record.outcome in FAILURES or record.status >= 500:
            span.set_status(trace.StatusCode.ERROR, record.outcome)
        below = trace.set_span_in_context(span)
        for name, start_s, end_s in _phases(record.arrival_s, stats):
            child = self._tracer.start_span(name, context=below, start_time=_ns(epoch_s + start_s))
            child.end(_ns(epoch_s + end_s))
        span.end(_ns(epoch_s + now_s))

    def close(self) -> None:
        """Send the remaining spans, within two seconds. Blocks."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)

    def _parent(self, context: TraceContext) -> Any:
        """Return the SDK's context that has the client's span, or one that has none."""
        trace = self._trace
        empty = trace.set_span_in_context(trace.INVALID_SPAN)
        if not context.parent_id:
            return empty
        parent = trace.SpanContext(
            int(context.trace_id, 16),
            int(context.parent_id, 16),
            is_remote=True,
            trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
            trace_state=trace.TraceState.from_header([context.tracestate]) if context.tracestate else None,
        )
        return trace.set_span_in_context(trace.NonRecordingSpan(parent), empty)


def _span_name(route: str, model: str) -> str:
    operation = _operation(route)
    return f"{operation} {model}" if operation else f"POST {route}"


def _operation(route: str) -> str:
    return "chat" if route in _CHATS else _OPERATIONS.get(route, "")


def _attributes(scope: Scope, record: RequestRecord, stats: Stats | None, *, served: str) -> Attributes:
    """Names of the OpenTelemetry semantic conventions: HTTP server spans, generative AI."""
    route = route_of(scope)
    attributes: Attributes = {
        "http.request.method": scope["method"],
        "http.route": route,
        "http.response.status_code": record.status or 499,
        "http.response.header.x-request-id": [record.request_id],
    }
    if record.outcome:
        attributes["error.type"] = record.outcome
    if operation := _operation(route):
        attributes["gen_ai.operation.name"] = operation
        attributes["gen_ai.provider.name"] = "quire"
        attributes["gen_ai.request.model"] = record.model or served
    if stats is not None:
        attributes["gen_ai.response.model"] = record.model or served
        attributes["gen_ai.response.id"] = record.answer_id
        attributes["gen_ai.response.finish_reasons"] = stats.finish_reasons
        attributes["gen_ai.usage.input_tokens"] = stats.num_prompt_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = stats.num_cached_tokens
        attributes["gen_ai.usage.output_tokens"] = stats.num_output_tokens
    return attributes


def _phases(arrival_s: float, stats: Stats | None) -> list[tuple[str, float, float]]:
    """Return name, start and end of each phase that a request reached."""
    if stats is None or stats.queue_s is None:
        return []
    scheduled_s = arrival_s + stats.queue_s
    phases = [("queue", arrival_s, scheduled_s)]
    if stats.prefill_s is not None:
        phases.append(("prefill", scheduled_s, scheduled_s + stats.prefill_s))
    if stats.ttft_s is not None:  # an embedding has no tokens
        phases.append(("decode", arrival_s + stats.ttft_s, arrival_s + stats.total_s))
    return phases


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
