"""MessageSplitter: splits the text of one choice of a chat into reasoning, text and tool calls as it arrives.

    TextDelta, one per token ─→ PartsParser ─ Parts ─→ TextDeltas by kind, ToolCallStart, ToolArguments

A choice without a parser needs no splitter: its text is the message's. Imports server only.
"""

import json
import secrets
import string

from server.generation.events import ChoiceFinished, Event, TextDelta, ToolArguments, ToolCallStart
from server.text.parsers.base import Arguments, CallStart, Part, PartsParser, Reasoning, Text

_ID_CHARS = string.ascii_letters + string.digits
_NUM_ID_CHARS = 24


class MessageSplitter:
    """One choice: its parser, its calls, its counts.

    `max_calls`: further tool calls are dropped. `must_call`: the grammar allows nothing but calls (after
    reasoning), so text that is cut off before the call's name is no answer text.
    """

    def __init__(self, index: int, parser: PartsParser, *, max_calls: int | None, must_call: bool) -> None:
        self.num_reasoning_tokens = 0
        self._index = index
        self._parser = parser
        self._max_calls = max_calls
        self._must_call = must_call
        self._num_calls = 0
        self._arguments: list[str] = []  # of the last call that was sent

    def feed(self, deltas: list[TextDelta], end: ChoiceFinished | None) -> list[Event]:
        """Return the events of one engine output, adjacent ones of a kind joined. Each delta has one token.

        The finish_reason of `end` becomes "tool_calls" after whole calls.
        """
        events: list[Event] = []
        for delta in deltas:
            self._parse(events, delta)
        if end is not None:
            self._finish(events, end)
        return events

    def _finish(self, events: list[Event], end: ChoiceFinished) -> None:
        is_cut = end.finish_reason == "length" or end.stop_string is not None
        for part in self._parser.finish():
            if not (isinstance(part, Text) and is_cut and self._must_call):
                self._add_part(events, part)
        if end.finish_reason == "stop" and self._num_calls and _is_object("".join(self._arguments)):
            end.finish_reason = "tool_calls"
        events.append(end)

    def _parse(self, events: list[Event], delta: TextDelta) -> None:
        is_reasoning = self._parser.is_reasoning
        parts = self._parser.push(delta.text)
        if is_reasoning or self._parser.is_reasoning:  # its tags count as reasoning tokens
            self.num_reasoning_tokens += len(delta.token_ids)
            delta.kind = "reasoning"
        shown = Reasoning if delta.kind == "reasoning" else Text
        if len(parts) == 1 and isinstance(parts[0], shown):
            delta.text = parts[0].text
            _add_text(events, delta)
            return
        delta.text = ""
        _add_text(events, delta)
        for part in parts:
            self._add_part(events, part)

    def _add_part(self, events: list[Event], part: Part) -> None:
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
                _add_text(events, TextDelta(self._index, "text", part.text, [], None))
            case Reasoning():
                _add_text(events, TextDelta(self._index, "reasoning", part.text, [], None))

    def _is_dropped(self) -> bool:
        return self._max_calls is not None and self._num_calls > self._max_calls


def _is_object(arguments: str) -> bool:
    """Return whether the arguments are a complete JSON object."""
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def _add_text(events: list[Event], event: TextDelta) -> None:
    """Append, or join with the last event that may carry tokens if no text would change its place."""
    if not events:
        events.append(event)
        return
    for last in reversed(events):
        if isinstance(last, TextDelta):
            is_last = last is events[-1]
            if last.kind == event.kind and (is_last or not event.text):
                last.text += event.text
                last.token_ids = last.token_ids + event.token_ids
                if event.logprobs is not None:
                    last.logprobs = (last.logprobs or []) + event.logprobs
                return
            break
    events.append(event)


def _add_arguments(events: list[Event], event: ToolArguments) -> None:
    """Append, or join with the same call's last event if only tokens without text came between."""
    for last in reversed(events):
        if isinstance(last, ToolArguments):
            last.text += event.text
            return
        if not isinstance(last, TextDelta) or last.text:
            break
    events.append(event)
