"""ReasoningParser: separates a model's reasoning from its answer: <think> … </think> at the beginning. Never raises.

The prompt may have opened the reasoning already; reasoning_place() looks at its end. Whitespace next to the tags
belongs to them and is dropped. Later tags are text, and so is a closing tag without an opening one. Imports
server.text.parsers.
"""

from enum import Enum, auto
from typing import Literal, NamedTuple

from server.text.parsers.base import AnswerParser, Part, Reasoning, Text
from server.text.parsers.tool_calls import held_length

ReasoningPlace = Literal["none", "possible", "open"]  # the answer has none, may begin with it, is in it already


class ReasoningTags(NamedTuple):
    """The tags that a model puts around its reasoning."""

    opening: str
    closing: str


class PlainText:
    """An answer without calls."""

    def push(self, text: str) -> list[Part]:
        """Return all of it."""
        return [Text(text)] if text else []

    def finish(self) -> list[Part]:
        """Nothing is held back."""
        return []


class Unwrapped:
    """An answer whose text may be between tags, which are dropped with the newlines inside them.

    Only a tag at the beginning of the answer opens the text.
    """

    def __init__(self, tags: ReasoningTags, answer: AnswerParser) -> None:
        self._tags = tags
        self._answer = answer
        self._held = ""
        self._is_beginning = True
        self._is_open = False

    def push(self, text: str) -> list[Part]:
        """Return the parts of what is certain."""
        buffer, self._held = self._held + text, ""
        if self._is_beginning:
            stripped = buffer.lstrip()
            if stripped.startswith(self._tags.opening):
                buffer = stripped[len(self._tags.opening) :].lstrip("\n")
                self._is_open = True
                if not buffer:  # newlines may follow
                    self._held = self._tags.opening
                    return []
            elif self._tags.opening.startswith(stripped):  # too short to tell
                self._held = buffer
                return []
            self._is_beginning = False
        if not self._is_open:
            return self._answer.push(buffer) if buffer else []
        end = buffer.find(self._tags.closing)
        if end >= 0:
            self._is_open = False
            text, rest = buffer[:end].rstrip("\n"), buffer[end + len(self._tags.closing) :]
            return self._answer.push(text + rest) if text + rest else []
        end = len(buffer) - held_length(buffer, self._tags.closing)
        end = len(buffer[:end].rstrip("\n"))
        self._held = buffer[end:]
        return self._answer.push(buffer[:end]) if end else []

    def finish(self) -> list[Part]:
        """Return what was held back."""
        held, self._held = self._held, ""
        if self._is_open and self._is_beginning:
            held = ""
        return (self._answer.push(held) if held else []) + self._answer.finish()


class _State(Enum):
    BEGINNING = auto()  # the opening tag may come
    REASONING = auto()
    BETWEEN = auto()  # after the closing tag
    ANSWER = auto()


class ReasoningParser:
    """Splits one choice's text into reasoning and the parts that `answer` makes of the rest."""

    def __init__(self, tags: ReasoningTags | None, *, is_open: bool, answer: AnswerParser) -> None:
        """`tags`: None if the model has none. `is_open`: the prompt ends within reasoning."""
        self._tags = tags or ReasoningTags("", "")
        self._answer = answer
        self._held = ""
        self._has_reasoning = False
        self._state = _State.BEGINNING if tags is not None else _State.ANSWER
        if tags is not None and is_open:
            self._state = _State.REASONING

    @property
    def is_reasoning(self) -> bool:
        return self._state is _State.REASONING

    def push(self, text: str) -> list[Part]:
        if self._state is _State.ANSWER:
            return self._answer.push(text)
        parts: list[Part] = []
        if self._state is _State.BEGINNING:
            text = self._begin(text)
        if self._state is _State.REASONING:
            text = self._reason(text, parts)
        if self._state is _State.BETWEEN:
            text = text.lstrip()
            if text:
                self._state = _State.ANSWER
        return parts + self._answer.push(text) if text else parts

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._state is _State.REASONING:
            held = held if self._has_reasoning else held.lstrip()
            return [Reasoning(held)] if held else []
        return (self._answer.push(held) if held else []) + self._answer.finish()

    def _begin(self, text: str) -> str:
        """Return what follows the opening tag, or all text if there is none."""
        held = self._held + text
        stripped = held.lstrip()
        if stripped.startswith(self._tags.opening):
            self._held, self._state = "", _State.REASONING
            return stripped[len(self._tags.opening) :]
        if self._tags.opening.startswith(stripped):  # too short to tell
            self._held = held
            return ""
        self._held, self._state = "", _State.ANSWER
        return held

    def _reason(self, text: str, parts: list[Part]) -> str:
        """Emit reasoning; return the text after the closing tag."""
        buffer = self._held + text
        end = buffer.find(self._tags.closing)
        is_closed = end >= 0
        if not is_closed:
            end = len(buffer) - held_length(buffer, self._tags.closing)
        body = buffer[:end].rstrip()  # the whitespace before the closing tag is dropped, and any may be that
        self._held = "" if is_closed else buffer[len(body) :]
        if not self._has_reasoning:
            body = body.lstrip()
        if body:
            self._has_reasoning = True
            parts.append(Reasoning(body))
        if not is_closed:
            return ""
        self._state = _State.BETWEEN
        return buffer[end + len(self._tags.closing) :]


def reasoning_place(tags: ReasoningTags | None, prompt: str, *, continued: str | None) -> ReasoningPlace:
    """Return where in its reasoning the answer to a rendered prompt begins.

    `continued`: the beginning of the message that the answer goes on with, if it does.
    """
    if tags is None:
        return "none"
    if continued is not None:
        is_open = continued.rfind(tags.opening) > continued.rfind(tags.closing)
        return "open" if is_open else "none" if continued.strip() else "possible"
    end = prompt.rstrip()  # no more than the end: what stands before may be a user's
    if end.endswith(tags.opening):
        return "open"
    return "none" if end.endswith(tags.closing) else "possible"
