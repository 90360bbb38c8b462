"""A generation whose text is a chat message: reasoning, text and tool calls, told apart as they arrive.

    Generation.batches() ─ Pieces ─→ one parser per choice ─ Parts ─→ ChatEvents, tokens on exactly one of them each

Without a parser (nothing to tell apart) the text passes as it is.

What a chat generation yields: text, reasoning and tool calls of each choice, and its end. Imports server only.

Tokens and log-probabilities ride on the text and reasoning events. Every token of a choice is on exactly one of them,
in the model's order; those that are neither (tags, a tool call's JSON, what is held back) are on an event without text.
"""

import json
import secrets
import string
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from engine.interface.protocol import TokenLogprobs
from server.generation.generation import Ended, Event, Generation, GenerationSpec, Piece, Stats
from server.text.parsers.base import Arguments, CallStart, Part, PartsParser, Reasoning, Text


class TextDelta(msgspec.Struct):
    """New text of one choice's message. The text can be "": it only carries tokens then."""

    index: int  # of the choice
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None  # one per token


class ReasoningDelta(msgspec.Struct):
    """New text of one choice's reasoning, as TextDelta. Its tokens are the reasoning tokens of the usage."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None


class ToolCallStart(msgspec.Struct):
    """A tool call begins; `call_index` counts the choice's calls from 0."""

    index: int
    call_index: int
    id: str
    name: str


class ToolArguments(msgspec.Struct):
    """More of a call's arguments, which are JSON once whole."""

    index: int
    call_index: int
    text: str


ChatEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolArguments | Ended
TokenEvent = TextDelta | ReasoningDelta


_ID_CHARS = string.ascii_letters + string.digits
_NUM_ID_CHARS = 24


class ChatGeneration:
    """Runs one chat. `generation` must have been made with by_token=True if there is a parser.

    `max_calls`: tool calls of one choice after that many are dropped. `must_call`: the grammar allows nothing but calls
    (after reasoning), so that what is cut off before its name is known is no text.
    """

    def __init__(
        self,
        generation: Generation,
        *,
        make_parser: Callable[[], PartsParser | None] = lambda: None,
        max_calls: int | None = None,
        must_call: bool = False,
    ) -> None:
        self._generation = generation
        self._choices = [
            _Choice(i, parser=make_parser(), max_calls=max_calls, must_call=must_call)
            for i in range(generation.num_choices)
        ]

    @property
    def spec(self) -> GenerationSpec:
        """What is run."""
        return self._generation.spec

    @property
    def num_choices(self) -> int:
        """How many Ended events there will be."""
        return self._generation.num_choices

    @property
    def request_id(self) -> str:
        """The answer's id."""
        return self._generation.request_id

    def prompt_logprobs(self, index: int) -> list[TokenLogprobs]:
        """As Generation.prompt_logprobs()."""
        return self._generation.prompt_logprobs(index)

    def cancel(self) -> None:
        """As Generation.cancel()."""
        self._generation.cancel()

    async def events(self) -> AsyncGenerator[ChatEvent, None]:
        """Yield every choice's events and its end. Raises what Generation.events() raises."""
        async with aclosing(self._generation.batches()) as batches:
            async for batch in batches:
                if batch:
                    for event in self._choices[batch[0].index].feed(batch):
                        yield event

    def stats(self) -> Stats:
        """Add up what was used until now."""
        stats = self._generation.stats()
        stats.num_reasoning_tokens = sum(choice.num_reasoning_tokens for choice in self._choices)
        reasons = [choice.finish_reason for choice in self._choices if choice.finish_reason]
        stats.finish_reasons = list(dict.fromkeys(reasons))
        return stats


class _Choice:
    """One choice: its parser, its calls, its counts."""

    def __init__(self, index: int, *, parser: PartsParser | None, max_calls: int | None, must_call: bool) -> None:
        self.num_reasoning_tokens = 0
        self.finish_reason = ""
        self._index = index
        self._parser = parser
        self._max_calls = max_calls
        self._must_call = must_call
        self._num_calls = 0
        self._arguments: list[str] = []  # of the last call that is given out

    def feed(self, batch: list[Event]) -> list[ChatEvent]:
        """Turn what came at once into events, adjacent ones of a kind joined."""
        events: list[ChatEvent] = []
        for event in batch:
            if isinstance(event, Ended):
                if self._parser is not None:
                    is_cut = event.finish_reason == "length" or event.stop_string is not None
                    for part in self._parser.finish():
                        if not (isinstance(part, Text) and is_cut and self._must_call):
                            self._add_part(events, part)
                self.finish_reason = event.finish_reason
                if event.finish_reason == "stop" and self._num_calls and _is_object("".join(self._arguments)):
                    self.finish_reason = "tool_calls"
                events.append(Ended(self._index, self.finish_reason, event.stop_string))
            elif self._parser is None:
                _add_text(events, TextDelta(self._index, event.text, event.token_ids, event.logprobs))
            else:
                self._parse(events, self._parser, event)
        return events

    def _parse(self, events: list[ChatEvent], parser: PartsParser, piece: Piece) -> None:
        is_reasoning = parser.is_reasoning
        parts = parser.push(piece.text)
        kind: type[TextDelta] | type[ReasoningDelta] = TextDelta
        if is_reasoning or parser.is_reasoning:  # the tags are part of what it costs
            self.num_reasoning_tokens += len(piece.token_ids)
            kind = ReasoningDelta
        if len(parts) == 1 and type(parts[0]) is (Reasoning if kind is ReasoningDelta else Text):
            _add_text(events, kind(self._index, parts[0].text, piece.token_ids, piece.logprobs))
            return
        _add_text(events, kind(self._index, "", piece.token_ids, piece.logprobs))
        for part in parts:
            self._add_part(events, part)

    def _add_part(self, events: list[ChatEvent], part: Part) -> None:
        match part:
            case CallStart():
                self._num_calls += 1
                if not self._is_dropped():
                    self._arguments = []
                    call_id = "call_" + "".join(secrets.choice(_ID_CHARS) for _ in range(_NUM_ID_CHARS))
                    events.append(ToolCallStart(self._index, self._num_calls - 1, call_id, part.name))
            case Arguments():
                if not self._is_dropped():
                    self._arguments.append(part.text)
                    _add_arguments(events, ToolArguments(self._index, self._num_calls - 1, part.text))
            case Text():
                _add_text(events, TextDelta(self._index, part.text, [], None))
            case Reasoning():
                _add_text(events, ReasoningDelta(self._index, part.text, [], None))

    def _is_dropped(self) -> bool:
        return self._max_calls is not None and self._num_calls > self._max_calls


def _is_object(arguments: str) -> bool:
    """False for arguments that the model left unfinished, or that are no JSON."""
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def _add_text(events: list[ChatEvent], event: TextDelta | ReasoningDelta) -> None:
    """Append, or join with the last event that may carry tokens if no text would change its place."""
    for last in reversed(events):
        if isinstance(last, TextDelta | ReasoningDelta):
            is_last = last is events[-1]
            if type(last) is type(event) and (is_last or not event.text):
                last.text += event.text
                last.token_ids = last.token_ids + event.token_ids
                if event.logprobs is not None:
                    last.logprobs = (last.logprobs or []) + event.logprobs
                return
            break
    events.append(event)


def _add_arguments(events: list[ChatEvent], event: ToolArguments) -> None:
    """Append, or join with the same call's last event if only tokens without text came between."""
    for last in reversed(events):
        if isinstance(last, ToolArguments):
            last.text += event.text
            return
        if not isinstance(last, TextDelta | ReasoningDelta) or last.text:
            break
    events.append(event)
