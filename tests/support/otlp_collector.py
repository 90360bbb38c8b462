"""An OTLP/HTTP collector in this process, for tests: keeps the spans that are posted to it."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Span(NamedTuple):
    """One span. Ids are hex; times are seconds of the Unix clock."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_s: float
    end_s: float
    is_error: bool
    attributes: dict[str, Any]


class Collector:
    """Use as a context manager. `url` is its root; `resource` the attributes of who sent last."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.paths: list[str] = []
        self.bodies: list[bytes] = []
        self.resource: dict[str, Any] = {}
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.take(self.path, self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as its base has it
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "Collector":
        # a quick poll, because shutdown() waits for the next one
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def take(self, path: str, body: bytes) -> None:
        """Decode one export."""
        self.paths.append(path)
        self.bodies.append(body)
        for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = _attributes(resource_spans.resource.attributes)
            for scope_spans in resource_spans.scope_spans:
                self.spans += [_span(span) for span in scope_spans.spans]


def _span(span: Any) -> Span:
    return Span(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano / 1e9,
        span.end_time_unix_nano / 1e9,
        span.status.code == span.status.STATUS_CODE_ERROR,
        _attributes(span.attributes),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)
