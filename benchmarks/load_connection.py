"""StreamConnection: sends one streamed completion at a time and records each token's arrival.

Chunks are parsed as JSON, about 1 µs each, so that counting tokens does not depend on the server's JSON formatting.
"""

import asyncio
import json
import time
from typing import Any

import msgspec

from benchmarks.http_stream import ReplyError, StreamedReply


class RequestTiming(msgspec.Struct):
    """A request's timing at its client, in time.perf_counter() seconds. Unfinished while end_s is 0, error empty."""

    start_s: float
    first_s: float = 0.0  # the first token's arrival
    last_s: float = 0.0  # the last token's arrival
    end_s: float = 0.0  # the reply's end
    num_input_tokens: int = 0  # from the server's usage; 0: not reported
    num_cached_tokens: int = 0  # cached input tokens, from the usage
    num_tokens: int = 0  # from the server's usage, otherwise the number of chunks
    num_asked: int = 0  # tokens that the request asked for
    num_token_ids: int = 0  # ids that came with the chunks, where the request asked for them
    num_chunks: int = 0  # chunks with text
    has_usage: bool = False
    itl_s: list[float] = []  # between chunks
    error_kind: str = ""  # a few words, the same for errors of one kind
    error: str = ""


class Answer(msgspec.Struct):
    """The content of an answer, as far as it has arrived."""

    texts: list[str] = []
    token_ids: list[int] = []  # if the request asked for them, and if the server returns them


class RequestFailed(Exception):
    """A request failed. `kind`: a few words, the same for errors of one kind."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def brings_token(self) -> bool:
        """True if a token came with this event: not for chat's opening and closing chunks, nor text's closing chunk."""
        if self.delta is not None:
            return bool(self.delta.content or self.delta.reasoning_content or self.delta.reasoning)
        return bool(self.text) or self.finish_reason is None


class _Event(msgspec.Struct):
    """The fields read from a chunk, chat or text; other fields are skipped."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


class StreamConnection(asyncio.Protocol):
    """One connection; one streamed reply at a time."""

    def __init__(self) -> None:
        self.is_reusable = False
        self._transport: asyncio.Transport | None = None
        self._timing = RequestTiming(0.0)
        self._answer = Answer()
        self._done: asyncio.Future[None] | None = None
        self._reply = StreamedReply()
        self._has_end = False  # the stream's end was seen: a finish reason, or [DONE]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        self._reply.feed_end()
        if self._reply.is_complete:
            self._finish(time.perf_counter())
        else:
            self._fail("connection closed", "the connection closed before the reply's end")

    async def request(self, body: bytes, timing: RequestTiming, answer: Answer) -> None:
        """Send one request, return at the end of its stream; fills in `timing` and `answer`. Raises RequestFailed."""
        assert self._transport is not None
        self.is_reusable = False
        self._timing, self._answer, self._reply, self._has_end = timing, answer, StreamedReply(), False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(body)
        await self._done

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        try:
            for payload in self._reply.feed(data):
                if payload == b"[DONE]":
                    self._has_end = True
                else:
                    self._apply(_decode_event(payload), now)
        except (ReplyError, msgspec.DecodeError) as error:
            self._fail("malformed reply", f"the reply cannot be read: {error}")
            return
        if self._reply.is_complete:
            self._finish(now)

    def _apply(self, event: _Event, now: float) -> None:
        timing = self._timing
        if event.error is not None:
            self._fail("error in the stream", _message_of(event.error))
        if event.usage is not None:
            timing.has_usage = True
            timing.num_input_tokens, timing.num_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
            details = event.usage.prompt_tokens_details
            timing.num_cached_tokens = (details.cached_tokens or 0) if details is not None else 0
        for choice in event.choices:
            self._has_end = self._has_end or choice.finish_reason is not None
            self._answer.texts.append(choice.text or (choice.delta.content if choice.delta else None) or "")
            if choice.token_ids:
                self._answer.token_ids += choice.token_ids
                timing.num_token_ids += len(choice.token_ids)
            if not choice.brings_token():
                continue
            if timing.num_chunks == 0:
                timing.first_s = now
            else:
                timing.itl_s.append(now - timing.last_s)
            timing.last_s = now
            timing.num_chunks += 1

    def _finish(self, now: float) -> None:
        timing = self._timing
        if self._done is None or self._done.done():
            return
        if self._reply.status != 200:
            self._fail(f"HTTP {self._reply.status}", _message_of(self._reply.error_body))
            return
        if timing.num_chunks == 0 and timing.num_tokens > 0:  # tokens without text, such as special ones
            timing.first_s = timing.last_s = now
        if not self._has_end or timing.first_s == 0.0:
            self._fail("incomplete stream", "the stream ended " + ("without a token" if self._has_end else "too early"))
            return
        if not timing.has_usage:
            timing.num_tokens = timing.num_chunks
        timing.end_s = now
        self.is_reusable = self._reply.keeps_alive
        self._done.set_result(None)

    def _fail(self, kind: str, message: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(RequestFailed(kind, message))


def _message_of(error: object) -> str:
    """Return an error's message: OpenAI's body, its inner object, or any text. Shortened."""
    if isinstance(error, bytes):
        body = error
        try:
            error = json.loads(body)
        except ValueError:
            error = body.decode(errors="replace")
    while isinstance(error, dict):
        error = error.get("error") or error.get("message") or error.get("detail") or json.dumps(error)
    return " ".join(str(error).split())[:300]
