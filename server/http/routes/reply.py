"""answer: run a generation and reply with a whole answer or a stream, for generating routes. Imports server only."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing

import msgspec
from fastapi import Request, Response

from engine.interface.errors import ServiceError
from server.api.app_state import AppState
from server.api.large_bodies import release_body
from server.api.objects import cache_header
from server.api.rate_headers import rate_headers
from server.api.reply_options import PreparedReply
from server.api.request_record import RequestRecord, record_of
from server.api.sse import (
    EventStreamResponse,
    SseWriter,
    begin,
    cancel,
    run_while_connected,
    wait_watched,
    watch_client,
)
from server.generation.events import ChoiceFinished, Event
from server.generation.generation import CompletionStream

logger = logging.getLogger(__name__)

MANY_SCORES = 500  # log-probabilities, or tokens without them, of which eight take the time of one
_TOKENS_PER_SCORE = 8
_BYTES_PER_SCORE = 16
FIRST_EVENT_GRACE_S = 1.0  # an error within it is a real HTTP status; later, the stream begins without a token
DECISION_GRACE_S = 10.0  # the same for a request that no engine has accepted or refused yet
_POLL_S = 0.05


async def answer(app_state: AppState, request: Request, prepared: PreparedReply, writer: SseWriter) -> Response:
    """Run the generation and return its response. Raises errors that occur before the first byte."""
    release_body(request)
    record, generation, headers = record_of(request.scope), prepared.generation, prepared.headers
    record.stats, record.cancel, record.answer_id = generation.stats, generation.cancel, generation.request_id
    if record.is_cancelled:  # while its prompt was made
        generation.cancel()
    if not prepared.options.is_stream:
        events = await run_while_connected(request.receive, _collect(generation))
        num_scores = _num_scores(prepared)
        if num_scores > MANY_SCORES:  # which take seconds to write: other requests' streams go on meanwhile
            size = _BYTES_PER_SCORE * num_scores
            body = await app_state.work.run(size, lambda: msgspec.json.encode(writer.whole(events)), may_wait=True)
        else:
            body = msgspec.json.encode(writer.whole(events))
        stats = generation.stats()
        headers = {**headers, **cache_header(stats), **rate_headers(stats.rates)}
        return Response(body, media_type="application/json", headers=headers)

    batches = generation.batches()
    first = begin(_next(batches))  # which sends the request
    gone = watch_client(request.receive)  # until the end: to begin again with the first token would delay that
    try:
        await wait_watched(gone, first, timeout_s=FIRST_EVENT_GRACE_S)
        latest_s = time.monotonic() + DECISION_GRACE_S - FIRST_EVENT_GRACE_S
        while not (first.done() or generation.is_decided or time.monotonic() >= latest_s):
            await wait_watched(gone, first, timeout_s=_POLL_S)  # a step may take seconds, or an engine start
        stats = generation.stats()
        if first.done():
            first.result()
            headers = {**headers, **cache_header(stats)}
        headers = {**headers, **rate_headers(stats.rates)}
    except BaseException:
        await cancel(gone)
        await batches.aclose()
        raise

    def on_disconnect() -> None:
        record.outcome = "abort"
        app_state.metrics.count("http_disconnects_total")

    async def close() -> None:
        await cancel(gone)
        await cancel(first)
        await batches.aclose()

    def on_error(error: ServiceError) -> None:
        record.outcome = error.code
        if not generation.stats().num_output_tokens:
            app_state.count_rejected(error)

    stream = _stream(generation, writer, batches=batches, first=first, record=record, on_error=on_error)
    return EventStreamResponse(
        stream, headers=headers, on_disconnect=on_disconnect, close=close, gone=gone, ping=writer.ping
    )


def json_reply(value: msgspec.Struct | Sequence[msgspec.Struct], headers: Mapping[str, str] | None = None) -> Response:
    """Return the response of a value that is at hand."""
    return Response(msgspec.json.encode(value), media_type="application/json", headers=headers)


def _num_scores(prepared: PreparedReply) -> int:
    """Return the number of log-probabilities of a finished answer, and what its tokens count for."""
    generation, options = prepared.generation, prepared.options
    params, num_tokens = generation.spec.params, generation.stats().num_output_tokens
    num_scored = sum(len(generation.prompt_logprobs(index)) for index in range(generation.num_choices))
    of_answer = 0 if options.logprobs is None else num_tokens * (options.logprobs + 1)
    return of_answer + num_tokens // _TOKENS_PER_SCORE + num_scored * ((params.prompt_logprobs or 0) + 1)


async def _collect(generation: CompletionStream) -> list[Event]:
    async with aclosing(generation.batches()) as batches:
        return [event async for batch in batches for event in batch]


async def _next(batches: AsyncGenerator[list[Event], None]) -> list[Event]:
    return await anext(batches)


async def _stream(
    generation: CompletionStream,
    writer: SseWriter,
    *,
    batches: AsyncGenerator[list[Event], None],
    first: "asyncio.Task[list[Event]]",
    record: RequestRecord,
    on_error: Callable[[ServiceError], None],
) -> AsyncGenerator[bytes, None]:
    """Yield the whole stream; an error ends it in the writer's own form."""
    num_open, shown = generation.num_choices, b""
    try:
        shown = writer.opening()
        if shown and not first.done():
            yield shown
            shown = b""
        batch = await first
        while num_open:
            for event in batch:
                num_open -= isinstance(event, ChoiceFinished)
                shown += writer.event(event, is_last=num_open == 0)
            if num_open == 0:
                shown += writer.closing()
            if shown:
                yield shown  # what arrived together is written together
                shown = b""
            if num_open:
                batch = await anext(batches)
    except ServiceError as error:
        on_error(error)
        yield shown + writer.failed(error, request_id=record.request_id)
    except Exception:
        logger.exception("stream failed request_id=%s", record.request_id)
        record.outcome = ServiceError.code
        yield shown + writer.failed(ServiceError("internal error"), request_id=record.request_id)
