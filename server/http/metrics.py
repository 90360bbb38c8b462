"""HttpMetrics: a worker's metrics of its requests and its event loop. Imports engine.interface.metrics; pure asyncio.

It counts per request, not per token, and sets gauges when the counts are sent to the launcher.
"""

import asyncio
import time
from collections.abc import Callable, Iterable

from starlette.types import Scope

from engine.interface.metrics import FAILURES, Exemplar, Metrics
from server.api.request_record import NO_ROUTE, RequestRecord, route_of, trace_context
from server.generation.spec import Stats

_CLASSES = ("2xx", "4xx", "5xx")
_CLIENT_LEFT = 499
_LAG_INTERVAL_S = 0.25
_WITH_EXEMPLARS = ("time_to_first_token_seconds", "e2e_request_latency_seconds")
_OF_ADAPTERS = (
    "adapter_requests_total",
    "adapter_prompt_tokens_total",
    "adapter_generation_tokens_total",
    "adapter_first_token_seconds_total",
)


class HttpMetrics:
    """The HTTP metrics of one worker. num_connections: set by the worker once its server exists.

    adapters: the names of the LoRA adapters, whose requests are counted apart; wall: returns the Unix time.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        num_requests: Callable[[], int],
        adapters: Iterable[str] = (),
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._metrics = metrics
        self._adapters = frozenset(adapters)
        self._wall = wall
        self._num_requests = num_requests
        self.num_connections: Callable[[], int] = lambda: 0

    def create_series(self, paths: Iterable[str]) -> None:
        """Count nothing on the path of each route, so that every series is there from the start."""
        for path in (*sorted(set(paths)), NO_ROUTE):
            for status in _CLASSES:
                self._metrics.count("http_requests_total", 0, (path, status))
        for adapter in sorted(self._adapters):
            for name in _OF_ADAPTERS:
                self._metrics.count(name, 0, adapter)

    def end(self, scope: Scope, record: RequestRecord) -> None:
        """Count a request whose reply is complete."""
        status = f"{(record.status or _CLIENT_LEFT) // 100}xx"
        self._metrics.count("http_requests_total", label=(route_of(scope), status))
        if record.outcome in FAILURES:
            self._metrics.count("requests_failed_total", label=record.outcome)
        if record.stats is None:
            return
        stats = record.stats()
        if record.model in self._adapters:
            self._count_adapter(record.model, stats)
        trace_id = _sampled_trace(scope, record)
        if trace_id and stats.ttft_s is not None:
            now = self._wall()
            for name, value in zip(_WITH_EXEMPLARS, (stats.ttft_s, stats.total_s), strict=True):
                self._metrics.exemplify(name, Exemplar(trace_id, value, now))

    def _count_adapter(self, adapter: str, stats: Stats) -> None:
        values = (1, stats.num_prompt_tokens, stats.num_output_tokens, stats.ttft_s or 0.0)
        for name, value in zip(_OF_ADAPTERS, values, strict=True):
            self._metrics.count(name, value, adapter)

    def record_state(self) -> None:
        """Set the gauges."""
        self._metrics.gauge("http_requests_in_progress", self._num_requests())
        self._metrics.gauge("http_connections", self.num_connections())

    async def watch_lag(self) -> None:
        """Observe the event loop's lag until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            self._metrics.observe("event_loop_lag_seconds", max(0.0, loop.time() - due_s))


def _sampled_trace(scope: Scope, record: RequestRecord) -> str:
    """Return the id of the trace that someone keeps of a request: Quire, or without tracing its client. "": none."""
    if record.trace is not None:
        return record.trace.trace_id if record.trace.is_sampled else ""
    headers = [(name, value) for name, value in scope.get("headers", ()) if name == b"traceparent"]
    context = trace_context(headers) if headers else None
    return context.trace_id if context is not None and context.parent_id and context.is_sampled else ""
