"""MessagesWriter: the events of a chat as an Anthropic Message, whole or as named events. Imports server only.

    message_start ─ (block start ─ delta* ─ block stop)* ─ message_delta ─ message_stop | error

One block is open at a time: an event of another kind, or another call, closes it. The whole answer is the list of
blocks from the same events.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.interface.errors import ServiceError
from server.api.as_chat import seal
from server.api.error_replies import anthropic_body
from server.api.messages.objects import (
    BlockDelta,
    BlockStart,
    BlockStop,
    Content,
    InputPiece,
    Message,
    MessageDelta,
    MessageOutputTokensDetails,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    SignaturePiece,
    StopDelta,
    TextContent,
    TextPiece,
    ThinkingContent,
    ThinkingPiece,
    ToolUseContent,
)
from server.api.sse import ReplyHead, TextEvent, named_event
from server.generation.events import ChoiceFinished, Event, TextDelta, TextKind, ToolArguments, ToolCallStart
from server.generation.generation import CompletionStream

_CONTENT: dict[TextKind, type[TextContent | ThinkingContent]] = {"text": TextContent, "reasoning": ThinkingContent}
_UNSIGNED = "quire"  # clients drop reasoning without a signature; this one marks that there is none to check


class MessagesWriter:
    """Makes one answer. `max_tokens`: the requested one; `omits_thinking`: reasoning is sent in signatures only."""

    ping = named_event(Ping())

    def __init__(self, head: ReplyHead, *, generation: CompletionStream, max_tokens: int, omits_thinking: bool) -> None:
        self._head = head
        self._generation = generation
        self._max_tokens = max_tokens
        self._omits_thinking = omits_thinking
        self._blocks: list[Content] = []
        self._open: Content | None = None
        self._texts: list[str] = []  # of the open block
        self._text_event: TextEvent | None = None  # writes more of the open block, once a text has begun it
        self._stop = StopDelta("end_turn", None)

    def opening(self) -> bytes:
        """message_start."""
        return named_event(MessageStart(self._message([])))

    def event(self, event: Event, *, is_last: bool) -> bytes:
        """Return the stream events of one chat event."""
        if isinstance(event, TextDelta) and event.text and isinstance(self._open, _CONTENT[event.kind]):
            self._texts.append(event.text)
            return self._more_text(event)
        return b"".join(map(named_event, self._feed(event)))

    def closing(self) -> bytes:
        """message_delta and message_stop."""
        return named_event(MessageDelta(self._stop, self._usage())) + named_event(MessageStop())

    def failed(self, error: ServiceError, *, request_id: str) -> bytes:
        """The error as the last event."""
        return named_event(anthropic_body(error, request_id=request_id))

    def whole(self, events: Sequence[Event]) -> msgspec.Struct:
        """The answer as one body."""
        for event in events:
            self._feed(event)
        message = self._message(self._blocks)
        message.stop_reason, message.stop_sequence = self._stop.stop_reason, self._stop.stop_sequence
        return message

    def _feed(self, event: Event) -> list[msgspec.Struct]:
        match event:
            case TextDelta():
                return self._add(event) if event.text else []
            case ToolCallStart():
                return [*self._close(), *self._begin(ToolUseContent(id=event.id, name=event.name))]
            case ToolArguments():
                return [self._more_input(event.text)] if event.text else []
            case _:
                self._stop = self._stop_of(event)
                events = [] if self._blocks or self._open else self._begin(TextContent())  # there is always a block
                return [*events, *self._close()]

    def _more_input(self, text: str) -> msgspec.Struct:
        assert isinstance(self._open, ToolUseContent), "arguments outside of a call"  # no call begins without an id
        self._texts.append(text)
        return BlockDelta(len(self._blocks), InputPiece(text))

    def _add(self, event: TextDelta) -> list[msgspec.Struct]:
        kind = _CONTENT[event.kind]
        events = [] if isinstance(self._open, kind) else [*self._close(), *self._begin(kind())]
        self._texts.append(event.text)
        return events if self._hides(event.kind) else [*events, self._delta(event.kind, event.text)]

    def _more_text(self, event: TextDelta) -> bytes:
        """Return what _add() gives for text of the open block's kind."""
        if self._hides(event.kind):
            return b""
        if self._text_event is None:
            self._text_event = TextEvent(named_event(self._delta(event.kind, TextEvent.TEXT)))
        return self._text_event(event.text)

    def _hides(self, kind: TextKind) -> bool:
        return self._omits_thinking and kind == "reasoning"

    def _delta(self, kind: TextKind, text: str) -> BlockDelta:
        return BlockDelta(len(self._blocks), TextPiece(text) if kind == "text" else ThinkingPiece(text))

    def _begin(self, block: Content) -> list[msgspec.Struct]:
        self._open, self._texts, self._text_event = block, [], None
        # A copy: the block is filled when it is closed, which may be before this event is written.
        return [BlockStart(len(self._blocks), msgspec.structs.replace(block))]

    def _close(self) -> list[msgspec.Struct]:
        block, self._open = self._open, None
        if block is None:
            return []
        text, index = "".join(self._texts), len(self._blocks)
        self._blocks.append(block)
        match block:
            case TextContent():
                block.text = text
            case ToolUseContent():
                block.input = _input_of(text)
            case ThinkingContent():
                block.thinking = "" if self._omits_thinking else text
                block.signature = seal(text) if self._omits_thinking else _UNSIGNED
                return [BlockDelta(index, SignaturePiece(block.signature)), BlockStop(index)]
        return [BlockStop(index)]

    def _stop_of(self, event: ChoiceFinished) -> StopDelta:
        if event.stop_string is not None:
            return StopDelta("stop_sequence", event.stop_string)
        if event.finish_reason == "tool_calls":
            return StopDelta("tool_use", None)
        if event.finish_reason != "length":
            return StopDelta("end_turn", None)
        has_all = self._generation.stats().num_output_tokens >= self._max_tokens
        return StopDelta("max_tokens" if has_all else "model_context_window_exceeded", None)

    def _message(self, content: list[Content]) -> Message:
        return Message(id=self._head.id, model=self._head.model, content=content, usage=self._usage())

    def _usage(self) -> MessageUsage:
        stats = self._generation.stats()
        return MessageUsage(
            input_tokens=stats.num_prompt_tokens - stats.num_cached_tokens,
            cache_read_input_tokens=stats.num_cached_tokens,
            output_tokens=stats.num_output_tokens,
            output_tokens_details=MessageOutputTokensDetails(stats.num_reasoning_tokens),
        )


def _input_of(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object. Text that is no JSON object is kept under one key."""
    if not arguments:
        return {}
    try:
        value = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        value = None
    return value if isinstance(value, dict) else {"unparsed": arguments}
