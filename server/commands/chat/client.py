"""Answer: one streamed chat answer, as pieces of text. Imports httpx; does not use the terminal.

Life of an Answer: created → iterated, which sends the request → its figures read. Leaving the iteration closes the
connection, which ends the request on the server.
"""

import time
from collections.abc import Generator, Iterator
from typing import NamedTuple

import httpx
import msgspec

from engine.interface.errors import ServiceError
from server.commands.server_target import ServerEndpoint, error_message, transport_message


class AnswerFailed(ServiceError):
    """The answer is missing or incomplete; the chat continues."""


class Piece(NamedTuple):
    """Some text of an answer."""

    text: str
    is_thinking: bool


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


class Answer:
    """Iterate once for its pieces. Raises AnswerFailed, then or before."""

    def __init__(self, client: httpx.Client, endpoint: ServerEndpoint, body: dict[str, object]) -> None:
        self.text = ""
        self.finish_reason = ""
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.ttft_s = 0.0
        self._last_s = 0.0  # from the first token to the last
        self._client = client
        self._endpoint = endpoint
        self._body = body

    def __iter__(self) -> Iterator[Piece]:
        started_s, first_s = time.monotonic(), 0.0
        for piece in self._pieces():
            now_s = time.monotonic()
            if first_s == 0.0:
                first_s, self.ttft_s = now_s, now_s - started_s
            self._last_s = now_s - first_s
            if not piece.is_thinking:
                self.text += piece.text
            yield piece

    def tokens_per_s(self) -> float | None:
        """Return the rate after the first token; None for an answer too short to have one."""
        if self.completion_tokens < 2 or self._last_s <= 0:
            return None
        return (self.completion_tokens - 1) / self._last_s

    def _pieces(self) -> Iterator[Piece]:
        content = msgspec.json.encode({**self._body, "stream": True, "stream_options": {"include_usage": True}})
        headers = {"content-type": "application/json"}
        try:
            with self._client.stream("POST", "/v1/chat/completions", content=content, headers=headers) as response:
                if response.status_code != 200:
                    raise AnswerFailed(error_message(response.status_code, response.read()))
                for payload in data_lines(response.iter_bytes()):
                    if payload == b"[DONE]":
                        return
                    yield from self._read(payload)
        except httpx.HTTPError as error:
            raise AnswerFailed(transport_message(self._endpoint, error)) from error
        if not self.finish_reason:
            raise AnswerFailed(f"{self._endpoint.url} closed the connection in mid-answer.")

    def _read(self, payload: bytes) -> Iterator[Piece]:
        try:
            chunk = msgspec.json.decode(payload, type=_Chunk)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise AnswerFailed(f"{self._endpoint.url} sent what is no chunk of a chat: {error}.") from error
        if bytes(chunk.error) != b"null":
            raise AnswerFailed(error_message(500, payload))
        if chunk.usage is not None:
            self.prompt_tokens, self.completion_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
            if chunk.usage.prompt_tokens_details is not None:
                self.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens or 0
        for choice in chunk.choices:
            thinking = choice.delta.reasoning_content or choice.delta.reasoning
            if thinking:
                yield Piece(thinking, is_thinking=True)
            if choice.delta.content:
                yield Piece(choice.delta.content, is_thinking=False)
            self.finish_reason = choice.finish_reason or self.finish_reason


def data_lines(chunks: Iterator[bytes]) -> Generator[bytes]:
    """Yield the payloads of a stream's data lines. Lines end where bytes say so: U+2028 inside one does not end it."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
