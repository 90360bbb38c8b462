"""Chat events joined into whole messages. Imports server only."""

from collections.abc import Sequence

import msgspec

from engine.interface.protocol import TokenLogprobs
from server.generation.chat_events import ChatEvent, ReasoningDelta, TextDelta, ToolArguments, ToolCallStart
from server.generation.generation import Ended


class FoldedCall(msgspec.Struct):
    """One whole tool call."""

    id: str
    name: str
    arguments: str = ""


class FoldedMessage(msgspec.Struct):
    """All events of one choice, joined."""

    index: int
    text: str = ""
    reasoning: str = ""
    calls: list[FoldedCall] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str = ""

    @property
    def content(self) -> str | None:
        """The message's content: null where there are calls and no text."""
        return self.text or (None if self.calls else "")


def fold_chat(events: Sequence[ChatEvent]) -> list[FoldedMessage]:
    """Join the events of each choice that ended, in order of index."""
    texts: dict[int, list[str]] = {}
    reasonings: dict[int, list[str]] = {}
    arguments: dict[tuple[int, int], list[str]] = {}
    messages: dict[int, FoldedMessage] = {}
    for event in events:
        message = messages.setdefault(event.index, FoldedMessage(event.index))
        match event:
            case TextDelta():
                texts.setdefault(event.index, []).append(event.text)
                _add_tokens(message, event)
            case ReasoningDelta():
                reasonings.setdefault(event.index, []).append(event.text)
                _add_tokens(message, event)
            case ToolCallStart():
                message.calls.append(FoldedCall(event.id, event.name))
            case ToolArguments():
                arguments.setdefault((event.index, event.call_index), []).append(event.text)
            case Ended():
                message.finish_reason = event.finish_reason
    for index, message in messages.items():
        message.text = "".join(texts.get(index, ()))
        message.reasoning = "".join(reasonings.get(index, ()))
        for i, call in enumerate(message.calls):
            call.arguments = "".join(arguments.get((index, i), ()))
    return [messages[index] for index in sorted(messages) if messages[index].finish_reason]


def _add_tokens(message: FoldedMessage, event: TextDelta | ReasoningDelta) -> None:
    message.token_ids += event.token_ids
    if event.logprobs is not None:
        message.logprobs = message.logprobs or []
        message.logprobs += event.logprobs
