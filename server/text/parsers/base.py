"""What parsers make of a model's text, and the protocol that they share. Imports msgspec.

The parts of all push() calls and of finish(), joined by kind, depend on the text alone, never on how it was cut.
"""

from typing import Protocol

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


class PartsParser(Protocol):
    """Splits one choice's text into parts."""

    @property
    def is_reasoning(self) -> bool:
        """True while the text is reasoning."""
        ...

    def push(self, text: str) -> list[Part]:
        """Return what is certain after this text."""
        ...

    def finish(self) -> list[Part]:
        """Return what was held back: nothing follows."""
        ...
