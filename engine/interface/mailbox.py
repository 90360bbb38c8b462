"""Mailboxes: the unread outputs of a client's open requests, and their journals. Plain asyncio; never torch."""

import asyncio
from collections.abc import AsyncGenerator, Callable

import msgspec

from engine.interface.errors import EngineDead, PromptTooLong, ServiceError, error_from_code
from engine.interface.protocol import (
    Accepted,
    AddRequest,
    Alone,
    Begun,
    CacheReport,
    RequestFailed,
    SetAside,
    Started,
    StepEvents,
    TokenLogprobs,
)
from engine.interface.replays import Journal
from engine.interface.tenant import Rates


class RequestOutput(msgspec.Struct):
    """The next tokens of one request, in order: several if the reader is slow, none if the request ends without one."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per token, if requested
    prompt_logprobs: list[TokenLogprobs] = []  # the next ones of the prompt, which start at its second token
    embedding: bytes = b""  # float32s, if requested; in the last output
    arrival_s: float = 0.0  # time.monotonic() when the newest token was read from the socket
    num_cached_tokens: int | None = None  # in the output with the first tokens, as the next three
    queue_s: float | None = None
    prefill_s: float | None = None
    cache: CacheReport | None = None
    finish_reason: str | None = None  # in the last output: "stop" | "length" | "abort"
    stop_token_id: int | None = None
    rates: Rates | None = None  # in the first output, which may have nothing else, if the key has limits a minute
    num_replays: int = 0  # engines that ended before and during this request's answer


class Mailboxes:
    """The mailboxes of the open requests of one client."""

    def __init__(self) -> None:
        self.by_id: dict[str, Mailbox] = {}  # by request id

    async def outputs(
        self, request: AddRequest, *, send: Callable[["Mailbox"], object], abort: Callable[[], object]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Send a request and iterate over its outputs, as EngineClient.submit; an early end calls abort.

        send: gets the new mailbox, and raises if the request cannot be sent; then there is nothing to abort.
        """
        request_id = request.request_id
        mailbox = self.by_id[request_id] = Mailbox(request)
        try:
            send(mailbox)
        except BaseException:
            self.by_id.pop(request_id, None)
            raise
        try:
            while True:
                output = await mailbox.get()
                if output.finish_reason is not None:
                    self.by_id.pop(request_id, None)
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            if self.by_id.pop(request_id, None) is not None:
                abort()

    def fail_all(self, make_error: Callable[[], ServiceError]) -> None:
        """End every open request with an error of its own."""
        mailboxes, self.by_id = self.by_id, {}
        for mailbox in mailboxes.values():
            mailbox.fail(make_error())

    def is_decided(self, request_id: str) -> bool:
        """See EngineClient.is_decided."""
        mailbox = self.by_id.get(request_id)
        return mailbox is None or mailbox.journal.is_accepted

    def begin(self, message: Begun) -> None:
        """Record that the engine works on requests."""
        for request_id, cache in zip(message.request_ids, message.caches, strict=True):
            if request_id in self.by_id:
                self.by_id[request_id].journal.begin(cache)

    def isolate(self, message: Alone) -> None:
        """Record that a request is alone in the engine."""
        if message.request_id in self.by_id:
            self.by_id[message.request_id].journal.isolate()

    def set_aside(self, message: SetAside) -> None:
        """Record that requests are in no step of the engine."""
        for request_id in message.request_ids:
            if request_id in self.by_id:
                self.by_id[request_id].journal.set_aside()

    def deliver(self, message: StepEvents | RequestFailed | Accepted, now: float) -> None:
        """Hand on what the engine sent; now: time.monotonic()."""
        if isinstance(message, StepEvents):
            self._deliver_step(message, now)
        elif isinstance(message, RequestFailed):
            mailbox = self.by_id.pop(message.request_id, None)
            if mailbox is not None and message.code == PromptTooLong.code and mailbox.journal.has_output:
                mailbox.put(RequestOutput([], finish_reason="length"))  # no room behind them in the next engine
            elif mailbox is not None:
                mailbox.fail(
                    error_from_code(
                        message.code,
                        message.message,
                        message.param,
                        retry_after_s=message.retry_after_s,
                        rates=message.rates,
                    )
                )
        elif message.request_id in self.by_id:
            mailbox = self.by_id[message.request_id]
            mailbox.journal.accept()
            if message.rates is not None:
                mailbox.put(RequestOutput([], arrival_s=now, rates=message.rates))

    def _deliver_step(self, events: StepEvents, now: float) -> None:
        started = {entry.row: entry for entry in events.started}
        finished = {entry.row: entry for entry in events.finished}
        # Most rows of most steps have tokens alone
        with_more = {*started, *finished, *events.logprobs, *events.prompt_logprobs, *events.embeddings}
        mailboxes, token_ids, start = self.by_id, events.token_ids, 0
        for row, (request_id, num_tokens) in enumerate(zip(events.request_ids, events.num_tokens, strict=True)):
            end = start + num_tokens
            mailbox = mailboxes.get(request_id)
            if mailbox is None:  # its reader closed while this step was in flight
                pass
            elif row not in with_more:
                mailbox.put(RequestOutput(token_ids[start:end], arrival_s=now))
            else:
                output = RequestOutput(token_ids[start:end], events.logprobs.get(row), arrival_s=now)
                output.prompt_logprobs = events.prompt_logprobs.get(row, [])
                output.embedding = events.embeddings.get(row, b"")
                if row in started:
                    copy_start(started[row], output)
                    mailbox.keep_first_start(output)
                if row in finished:
                    output.finish_reason, output.stop_token_id = finished[row].reason, finished[row].stop_token_id
                mailbox.put(output)
            start = end


class Mailbox:
    """Holds the unread output of one request: at most one output, into which later ones are merged, or an error."""

    def __init__(self, request: AddRequest) -> None:
        self.journal = Journal(request)
        self.end_reason: str | None = None  # with which the engine was told to end it
        self._output: RequestOutput | None = None
        self._error: ServiceError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        """Add an output."""
        journal = self.journal
        journal.add(output.token_ids)
        if output.prompt_logprobs:
            journal.add_prompt_logprobs(len(output.prompt_logprobs))
        output.num_replays = journal.num_replays
        if self._output is None:
            self._output = output
        else:
            _merge(self._output, output)
        if self._waiter is not None:
            self._wake(self._waiter)

    def keep_first_start(self, output: RequestOutput) -> None:
        """Let the start of a replayed request tell what the cache had at its first admission."""
        if self.journal.num_replays and (cache := self.journal.cache) is not None:
            output.num_cached_tokens, output.cache = cache.num_cached_tokens, cache

    def fail(self, error: ServiceError) -> None:
        """Set the error that get() raises once the unread output is taken."""
        if isinstance(error, EngineDead):
            error.was_accepted, error.was_begun = self.journal.is_accepted, self.journal.is_begun
        self._error = error
        if self._waiter is not None:
            self._wake(self._waiter)

    async def get(self) -> RequestOutput:
        """Wait for an output and take it. Raises the error of fail()."""
        while self._output is None:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        output, self._output = self._output, None
        return output

    def _wake(self, waiter: asyncio.Future[None]) -> None:
        self._waiter = None
        if not waiter.done():  # the reader was cancelled
            waiter.set_result(None)


def copy_start(source: Started | RequestOutput, output: RequestOutput) -> None:
    """Copy the facts of a request's start."""
    output.num_cached_tokens, output.queue_s = source.num_cached_tokens, source.queue_s
    output.prefill_s, output.cache = source.prefill_s, source.cache


def _merge(first: RequestOutput, second: RequestOutput) -> None:
    """Append `second` to `first` in place. Only the first output with a token has cached tokens and start times."""
    if not first.token_ids and second.queue_s is not None:  # `first` has only prompt log-probabilities
        copy_start(second, first)
    first.token_ids += second.token_ids
    first.prompt_logprobs += second.prompt_logprobs
    first.embedding += second.embedding
    if second.logprobs is not None:
        first.logprobs = (first.logprobs or []) + second.logprobs
    first.rates = first.rates or second.rates
    first.arrival_s = second.arrival_s
    first.num_replays = second.num_replays
    first.finish_reason, first.stop_token_id = second.finish_reason, second.stop_token_id
