"""ChatWriter: the events of a chat as chat.completion, or as a stream of chat.completion.chunk. Imports server only.

The whole answer is collected from the same events that the stream sends one by one.
"""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from engine.interface.errors import ServiceError
from engine.interface.protocol import TokenLogprobs
from server.api.collected import CollectedChoice, collect_choices
from server.api.logprobs import finite_logprob, prompt_logprobs_of, top_entries, written
from server.api.objects import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    FunctionDelta,
    PromptLogprobs,
    ToolCallDelta,
    TopLogprob,
    cache_of,
    timings_of,
    usage_of,
)
from server.api.reply_options import PreparedReply
from server.api.sse import PING, SSE_DONE, TextEvent, data_events, data_failure
from server.generation.events import ChoiceFinished, Event, TextDelta, TextKind, ToolArguments, ToolCallStart
from server.text.tokenizer import Tokenizer


class ChatWriter:
    """Makes one answer."""

    ping = PING

    def __init__(self, chat: PreparedReply, *, tokenizer: Tokenizer) -> None:
        self._head, self._options, self._generation = chat.head, chat.options, chat.generation
        self._tokenizer = tokenizer
        self._shows_text_alone = not (self._options.return_token_ids or self._options.continuous_usage)
        self._text_events: dict[tuple[int, str], TextEvent] = {}  # by choice and kind

    def opening(self) -> bytes:
        """One role chunk per choice; the first one shows the prompt's ids if asked for."""
        chunks = []
        for i in range(self._generation.num_choices):
            choice = ChatChunkChoice(i, ChatDelta(role="assistant", content="", refusal=None))
            chunk = self._chunk(choice)
            if i == 0:
                chunk.prompt_token_ids = self._prompt_ids()
            chunks.append(chunk)
        return data_events(*chunks)

    def event(self, event: Event, *, is_last: bool) -> bytes:
        """The chunk of one event, if it shows anything."""
        if isinstance(event, TextDelta) and event.logprobs is None and self._shows_text_alone:
            return self._text_event(event) if event.text else b""
        chunk = self._chunk_of(event, is_last=is_last)
        return data_events(chunk) if chunk is not None else b""

    def closing(self) -> bytes:
        """The usage chunk, if it was asked for."""
        if not self._options.include_usage:
            return SSE_DONE
        chunk, stats = self._chunk(), self._generation.stats()
        chunk.usage, chunk.timings, chunk.cache = usage_of(stats), timings_of(stats), cache_of(stats)
        return data_events(chunk) + SSE_DONE

    def failed(self, error: ServiceError, *, request_id: str) -> bytes:
        """The error."""
        return data_failure(error, request_id=request_id)

    def whole(self, events: Sequence[Event]) -> msgspec.Struct:
        """The answer as one body."""
        choices = []
        for collected in collect_choices(events):
            choice = ChatChoice(
                collected.index,
                _message(collected),
                self._logprobs(collected.logprobs, collected),
                collected.finish_reason,
            )
            choice.token_ids = collected.token_ids if self._options.return_token_ids else UNSET
            choices.append(choice)
        stats = self._generation.stats()
        return ChatCompletion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=choices,
            usage=usage_of(stats),
            timings=timings_of(stats),
            cache=cache_of(stats),
            prompt_token_ids=self._prompt_ids(),
            prompt_logprobs=self._prompt_logprobs(),
        )

    def _chunk_of(self, event: Event, *, is_last: bool) -> ChatChunk | None:
        match event:
            case ChoiceFinished():
                chunk = self._chunk(ChatChunkChoice(event.index, ChatDelta(), finish_reason=event.finish_reason))
                if is_last and not self._options.include_usage:
                    stats = self._generation.stats()
                    chunk.timings, chunk.cache = timings_of(stats), cache_of(stats)
                return chunk
            case ToolCallStart():
                call = ToolCallDelta(event.call_index, event.id, "function", FunctionDelta(event.name))
                return self._chunk(ChatChunkChoice(event.index, ChatDelta(tool_calls=[call])))
            case ToolArguments():
                call = ToolCallDelta(event.call_index, function=FunctionDelta(arguments=event.text))
                return self._chunk(ChatChunkChoice(event.index, ChatDelta(tool_calls=[call])))
        if not event.text and event.logprobs is None and not (self._options.return_token_ids and event.token_ids):
            return None
        choice = ChatChunkChoice(
            event.index, _text_delta(event.kind, event.text), self._logprobs(event.logprobs, event)
        )
        choice.token_ids = event.token_ids if self._options.return_token_ids else UNSET
        return self._chunk(choice)

    def _text_event(self, event: TextDelta) -> bytes:
        write = self._text_events.get((event.index, event.kind))
        if write is None:
            sample = ChatChunkChoice(event.index, _text_delta(event.kind, TextEvent.TEXT))
            write = TextEvent(data_events(self._chunk(sample)))
            self._text_events[event.index, event.kind] = write
        return write(event.text)

    def _prompt_logprobs(self) -> PromptLogprobs | UnsetType:
        count = self._options.prompt_logprobs
        if count is None:
            return UNSET
        entries, prompt = self._generation.prompt_logprobs(0), self._generation.spec.prompts[0]
        return prompt_logprobs_of(prompt, entries, num_top=count, tokenizer=self._tokenizer)

    def _chunk(self, *choices: ChatChunkChoice) -> ChatChunk:
        head = self._head
        chunk = ChatChunk(id=head.id, created=head.created, model=head.model, choices=list(choices))
        if self._options.continuous_usage:
            chunk.usage = usage_of(self._generation.stats())
        elif self._options.include_usage:
            chunk.usage = None
        return chunk

    def _prompt_ids(self) -> list[int] | UnsetType:
        return list(self._generation.spec.prompts[0]) if self._options.return_token_ids else UNSET

    def _logprobs(
        self, logprobs: list[TokenLogprobs] | None, source: TextDelta | CollectedChoice
    ) -> ChatLogprobs | None:
        if logprobs is None:
            return None
        num_top = self._options.logprobs or 0
        return ChatLogprobs(token_logprobs(source.token_ids, logprobs, tokenizer=self._tokenizer, num_top=num_top))


def token_logprobs(
    token_ids: Sequence[int], entries: Sequence[TokenLogprobs], *, tokenizer: Tokenizer, num_top: int
) -> list[ChatTokenLogprob]:
    """Return the log-probabilities of tokens, each with `num_top` alternatives, as JSON."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        data = tokenizer.token_bytes(token_id)
        tops = [_top(tokenizer.token_bytes(id_), value) for id_, value in top_entries(entry, num_top)]
        shown = ChatTokenLogprob(_text(data), finite_logprob(entry.logprob), list(data), tops)
        content.append(written(shown))
    return content


def _top(data: bytes, logprob: float) -> TopLogprob:
    return TopLogprob(_text(data), finite_logprob(logprob), list(data))


def _text_delta(kind: TextKind, text: str) -> ChatDelta:
    if kind == "text":
        return ChatDelta(content=text)
    return ChatDelta(reasoning_content=text, reasoning=text)


def _message(collected: CollectedChoice) -> ChatMessage:
    message = ChatMessage(content=collected.content)
    if collected.reasoning:
        message.reasoning_content = message.reasoning = collected.reasoning
    if collected.calls:
        message.tool_calls = collected.calls
    return message


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
