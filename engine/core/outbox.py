"""Outbox: collects one StepEvents message per client in each loop iteration. Never torch.

A message has at most one row per request, and no row follows a request's end.
"""

from collections.abc import Iterable
from typing import Protocol

from engine.core.request import Request
from engine.core.stats import EngineStats
from engine.core.step_in_flight import RowOutput
from engine.interface.protocol import ClientGone, Finished, FromEngine, Started, StepEvents, ToEngine


class Transport(Protocol):
    """Exchanges messages with the engine's clients.

    Implemented by SocketTransport (engine/interface/transport.py) and LocalTransport (engine/core/local_client.py).
    """

    def receive(self, timeout_s: float | None) -> Iterable[tuple[int, ToEngine | ClientGone]]:
        """Return arrived messages with their client ids. timeout_s: None may block until one arrives; 0 polls."""
        ...

    def send(self, client_id: int, message: FromEngine) -> None:
        """Send without blocking; a disconnected client is ignored."""
        ...

    def broadcast(self, message: FromEngine) -> None:
        """Send to every client."""
        ...


class Outbox:
    """Owns the messages being filled."""

    def __init__(self, transport: Transport, stats: EngineStats) -> None:
        self._transport = transport
        self._stats = stats
        self._events: dict[int, StepEvents] = {}  # by client_id

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to send."""
        return not self._events

    def add_tokens(self, output: RowOutput) -> None:
        """Add a request's committed tokens, with Started at the first and Finished at the last."""
        request = output.request
        events = self._events_for(request)
        row = len(events.request_ids)
        events.request_ids.append(request.request_id)
        events.num_tokens.append(len(output.token_ids))
        events.token_ids += output.token_ids
        if request.unsent_prompt_logprobs:
            events.prompt_logprobs[row], request.unsent_prompt_logprobs = request.unsent_prompt_logprobs, []
        if output.logprobs is not None:
            events.logprobs[row] = output.logprobs
        if len(request.output_token_ids) == len(output.token_ids):
            queue_s, prefill_s = self._stats.record_started(request)
            events.started.append(Started(row, request.num_cached_tokens, queue_s, prefill_s))
        if request.finish_reason is not None:
            events.finished.append(Finished(row, request.finish_reason, request.stop_token_id))
            self._stats.record_finished(request)

    def add_prompt_logprobs(self, request: Request) -> None:
        """Add log-probabilities of a prompt that is only partly computed."""
        events = self._events_for(request)
        events.prompt_logprobs[len(events.request_ids)] = request.unsent_prompt_logprobs
        request.unsent_prompt_logprobs = []
        events.request_ids.append(request.request_id)
        events.num_tokens.append(0)

    def add_embedding(self, request: Request) -> None:
        """Add a prompt's embedding, with both Started and Finished of its request."""
        assert request.embedding is not None
        events = self._events_for(request)
        row = len(events.request_ids)
        events.request_ids.append(request.request_id)
        events.num_tokens.append(0)
        events.embeddings[row] = request.embedding.vector()
        queue_s, prefill_s = self._stats.record_started(request)
        events.started.append(Started(row, request.num_cached_tokens, queue_s, prefill_s))
        events.finished.append(Finished(row, "stop", None))
        self._stats.record_finished(request)

    def add_end(self, request: Request, reason: str) -> None:
        """Add a request's end without a token."""
        events = self._events_for(request)
        events.finished.append(Finished(len(events.request_ids), reason, None))
        events.request_ids.append(request.request_id)
        events.num_tokens.append(0)
        self._stats.record_finished(request)

    def drop(self, client_id: int) -> None:
        """Discard the message for a disconnected client."""
        self._events.pop(client_id, None)

    def send(self, step_id: int) -> None:
        """Send all messages; step_id: the last committed step."""
        filled, self._events = self._events, {}
        for client_id, events in filled.items():
            events.step_id = step_id
            self._transport.send(client_id, events)

    def _events_for(self, request: Request) -> StepEvents:
        """Return the message being filled for the request's client."""
        events = self._events.get(request.client_id)
        if events is None:
            events = self._events[request.client_id] = StepEvents(0, [], [], [])
        return events
