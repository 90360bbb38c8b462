"""CollectedChoice: all events of one choice, joined for a whole answer. Imports server only."""

from collections.abc import Sequence

import msgspec

from engine.interface.protocol import TokenLogprobs
from server.api.objects import CalledFunction, ToolCall
from server.generation.events import ChoiceFinished, Event, TextDelta, ToolArguments, ToolCallStart


class CollectedChoice(msgspec.Struct):
    """All events of one choice, joined."""

    index: int
    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str = ""

    @property
    def content(self) -> str | None:
        """The message's content: null where there are calls and no text."""
        return self.text or (None if self.calls else "")


def collect_choices(events: Sequence[Event]) -> list[CollectedChoice]:
    """Join the events of each choice that ended, in order of index."""
    texts: dict[int, list[str]] = {}
    reasonings: dict[int, list[str]] = {}
    arguments: dict[tuple[int, int], list[str]] = {}
    choices: dict[int, CollectedChoice] = {}
    for event in events:
        choice = choices.setdefault(event.index, CollectedChoice(event.index))
        match event:
            case TextDelta():
                own = texts if event.kind == "text" else reasonings
                own.setdefault(event.index, []).append(event.text)
                _add_tokens(choice, event)
            case ToolCallStart():
                choice.calls.append(ToolCall(id=event.id, function=CalledFunction(event.name, "")))
            case ToolArguments():
                arguments.setdefault((event.index, event.call_index), []).append(event.text)
            case ChoiceFinished():
                choice.finish_reason = event.finish_reason
    for index, choice in choices.items():
        choice.text = "".join(texts.get(index, ()))
        choice.reasoning = "".join(reasonings.get(index, ()))
        for i, call in enumerate(choice.calls):
            call.function.arguments = "".join(arguments.get((index, i), ()))
    return [choices[index] for index in sorted(choices) if choices[index].finish_reason]


def _add_tokens(choice: CollectedChoice, event: TextDelta) -> None:
    choice.token_ids += event.token_ids
    if event.logprobs is not None:
        choice.logprobs = choice.logprobs or []
        choice.logprobs += event.logprobs
