"""Mailbox: the unread output of one request at the HTTP worker, and its journal. Plain asyncio; never torch."""

import asyncio

import msgspec

from engine.interface.errors import ServiceError
from engine.interface.protocol import AddRequest, CacheReport, Started, TokenLogprobs
from engine.interface.replays import Journal


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
    num_replays: int = 0  # engines that ended before and during this request's answer


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
    first.arrival_s = second.arrival_s
    first.num_replays = second.num_replays
    first.finish_reason, first.stop_token_id = second.finish_reason, second.stop_token_id
