"""LocalTransport and generate(): run an Engine inside this process, without sockets. Never imports torch.

transport = LocalTransport()
engine = Engine(EngineParts(executor=..., scheduler=..., transport=transport, ...))
generations = generate(engine, transport, prompts, params)
"""

import time
from collections import deque
from collections.abc import Sequence

import msgspec

from engine.core.engine import Engine
from engine.interface.protocol import (
    AddRequest,
    ClientGone,
    FromEngine,
    PoolingKind,
    RequestFailed,
    SamplingParams,
    StepEvents,
    ToEngine,
    TokenLogprobs,
    pack_token_ids,
)


class LocalTransport:
    """The transport of an engine whose only client runs in the same thread: two queues."""

    def __init__(self) -> None:
        self.inbox: deque[tuple[int, ToEngine | ClientGone]] = deque()
        self.outbox: deque[FromEngine] = deque()

    def receive(self, timeout_s: float | None) -> list[tuple[int, ToEngine | ClientGone]]:
        """Return and clear `inbox`. If it is empty, sleep for timeout_s; None does not wait.

        No other thread could add a message, so an unlimited wait would never end.
        """
        if timeout_s and not self.inbox:
            time.sleep(timeout_s)
        messages = list(self.inbox)
        self.inbox.clear()
        return messages

    def has_arrivals(self) -> bool:
        """Return whether `inbox` has messages."""
        return bool(self.inbox)

    def send(self, client_id: int, message: FromEngine) -> None:
        """Keep the message in `outbox`."""
        self.outbox.append(message)

    def broadcast(self, message: FromEngine) -> None:
        """Keep the message in `outbox`."""
        self.outbox.append(message)


class GenerationResult(msgspec.Struct):
    """The result of one prompt: tokens and finish_reason, or `error`."""

    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []  # one per token, if requested
    prompt_logprobs: list[TokenLogprobs] = []  # one per prompt token except the first, if requested
    embedding: bytes = b""  # float32s, if requested
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    stop_token_id: int | None = None
    error: RequestFailed | None = None


def generate(
    engine: Engine,
    transport: LocalTransport,
    prompts: list[list[int]],
    params: list[SamplingParams],
    pooling: Sequence[PoolingKind | None] | None = None,
    *,
    lora_indices: Sequence[int] | None = None,
) -> list[GenerationResult]:
    """Run all prompts to their ends and return the results in order. The engine must be idle, and is idle afterwards.

    pooling: for each prompt the kind of embedding to compute instead of tokens, or None. lora_indices: each prompt's
    adapter, as in AddRequest; None: the base model for all.
    """
    generations = [GenerationResult() for _ in prompts]
    by_id = {str(index): generation for index, generation in enumerate(generations)}
    nothing, no_loras = [None] * len(prompts), [0] * len(prompts)
    todo = deque(zip(by_id, prompts, params, pooling or nothing, lora_indices or no_loras, strict=True))
    while todo or not engine.is_idle:
        while todo and len(engine.scheduler.waiting) + len(transport.inbox) < engine.max_queued_requests:
            request_id, prompt, sampling, kind, lora_index = todo.popleft()
            now = engine.clock()
            added = AddRequest(
                request_id, pack_token_ids(prompt), sampling, arrival_s=now, pooling=kind, lora_index=lora_index
            )
            transport.inbox.append((0, added))
        engine.run_once()
        while transport.outbox:
            _apply(transport.outbox.popleft(), by_id)
    return generations


def _apply(message: FromEngine, by_id: dict[str, GenerationResult]) -> None:
    if isinstance(message, RequestFailed):
        by_id[message.request_id].error = message
    elif isinstance(message, StepEvents):
        _apply_events(message, by_id)


def _apply_events(events: StepEvents, by_id: dict[str, GenerationResult]) -> None:
    start = 0
    for row, request_id in enumerate(events.request_ids):
        generation = by_id[request_id]
        end = start + events.num_tokens[row]
        generation.token_ids += events.token_ids[start:end]
        generation.logprobs += events.logprobs.get(row, [])
        generation.prompt_logprobs += events.prompt_logprobs.get(row, [])
        generation.embedding += events.embeddings.get(row, b"")
        start = end
    for started in events.started:
        by_id[events.request_ids[started.row]].num_cached_tokens = started.num_cached_tokens
    for finished in events.finished:
        generation = by_id[events.request_ids[finished.row]]
        generation.finish_reason, generation.stop_token_id = finished.reason, finished.stop_token_id
