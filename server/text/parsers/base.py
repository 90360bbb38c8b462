"""The parts that parsers split a model's text into, and the protocols of the parsers. Imports msgspec.

The parts of all push() calls and of finish(), joined by kind, depend on the text alone, never on how it was cut.
PartSink collects the parts of a call parser. Whitespace next to a call belongs to the call's format: it is dropped,
unless there is text on both sides of the call. Until a call is committed, PartSink keeps the raw text of the
attempt, so that a malformed call can still become text. ToolSpec is a checked tool of a request.
"""

from typing import Any, Protocol

import msgspec


class Text(msgspec.Struct):
    """Text of the message."""

    text: str


class Reasoning(msgspec.Struct):
    """Text of the model's reasoning."""

    text: str


class CallStart(msgspec.Struct):
    """A tool call begins; the arguments that follow are its own."""

    name: str


class Arguments(msgspec.Struct):
    """More of the last call's arguments."""

    text: str


Part = Text | Reasoning | CallStart | Arguments


class AnswerParser(Protocol):
    """Splits the text after the reasoning into parts."""

    def push(self, text: str) -> list[Part]:
        """Return what is certain after this text."""
        ...

    def finish(self) -> list[Part]:
        """Return what was held back: nothing follows."""
        ...


class PartsParser(AnswerParser, Protocol):
    """Splits one choice's text into parts."""

    @property
    def is_reasoning(self) -> bool:
        """True while the text is reasoning."""
        ...


class PartSink:
    """Collects the parts of one choice; take() removes them after each piece of text."""

    def __init__(self) -> None:
        self.is_committed = False  # the call being read was given out
        self._parts: list[Part] = []
        self._pending: list[str] = []  # arguments that come character by character
        self._raw: list[str] = []
        self._space = ""
        self._has_text = False
        self._touches_call = False  # the held space does

    def text(self, text: str) -> None:
        """Add text of the message."""
        self._flush()
        held = self._space + text
        body = held.rstrip()
        self._space = held[len(body) :]
        if body:
            if not self._has_text and self._touches_call:
                body = body.lstrip()
            self._has_text, self._touches_call = True, False
            self._parts.append(Text(body))

    def attempt(self, tag: str) -> None:
        """Begin an attempt at a call, with this tag."""
        self.is_committed, self._raw = False, [tag]

    def keep(self, char: str) -> None:
        """Remember a character of the attempt before it is read."""
        if not self.is_committed:
            self._raw.append(char)

    def start(self, name: str) -> None:
        """Commit the attempt as a call."""
        self._flush()
        self.is_committed, self._raw, self._touches_call = True, [], True
        self._parts.append(CallStart(name))

    def arguments(self, text: str) -> None:
        """Add to the committed call's arguments."""
        self._pending.append(text)

    def release(self) -> None:
        """End the committed call and begin another attempt."""
        self.is_committed, self._raw = False, []

    def give_up(self, *, num_unread: int) -> None:
        """Turn the attempted call into text, except its last characters, which were not read."""
        self.text("".join(self._raw[: len(self._raw) - num_unread]))
        self._raw = []

    def take(self) -> list[Part]:
        """Return the parts since the last call."""
        self._flush()
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[Part]:
        """Return the rest: nothing follows."""
        self._flush()
        if self._space and not self._touches_call:
            self._parts.append(Text(self._space))
        return self.take()

    def _flush(self) -> None:
        if not self._pending:
            return
        if text := "".join(self._pending):
            self._parts.append(Arguments(text))
        self._pending = []


class ToolSpec(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any]  # a JSON schema of an object
    is_strict: bool = False  # arguments must match the schema, all of it
