"""CallParser: finds where a tool call may begin in a text, and parses it character by character. Never raises.

A format is a coroutine, a Reading: it receives characters, returns when the call is complete, and raises Malformed
if there was no call. So a format is written as a sequence of steps, and its result cannot depend on how the text
was cut. At the end of the text a Reading receives "".
"""

from collections.abc import Callable, Generator
from typing import TypeVar

from server.text.parsers.base import Part, PartSink

T = TypeVar("T")
_MAX_NAME_CHARS = 256
Reading = Generator[None, str, T]
ReadCall = Callable[[PartSink, str], Reading[str]]  # (sink, tag) → the last characters, if they are not the call's


class Malformed(Exception):
    """The text is no call. `unread`: the text that was not consumed; its last character is the one that is wrong."""

    def __init__(self, unread: str) -> None:
        super().__init__(unread)
        self.unread = unread


class CallParser:
    """Splits one choice's text into text and calls."""

    def __init__(
        self, tags: tuple[str, ...], read_call: ReadCall, *, bare: tuple[str, ...] = (), ends: tuple[str, ...] = ()
    ) -> None:
        """`bare`: characters that count only as the text's beginning. `ends`: what closes a call, in order; where
        something else stands before one of these tags, that is text, and the tag is dropped.
        """
        self._tags = tags
        self._read_call = read_call
        self._bare = bare
        self._ends = ends
        self._missing: tuple[str, ...] = ()  # what may yet close the last call
        self._first_chars = frozenset(tag[0] for tag in tags + ends)
        self._sink = PartSink()
        self._held = ""  # text that may become a tag
        self._reading: Reading[str] | None = None

    def push(self, text: str) -> list[Part]:
        while text:
            text = self._in_text(text) if self._reading is None else self._in_call(self._reading, text)
        return self._sink.take()

    def finish(self) -> list[Part]:
        if self._reading is not None:
            self._end(self._reading)
        self._sink.text(self._held)
        self._held = ""
        return self._sink.finish()

    def _in_text(self, text: str) -> str:
        """Take text up to a tag; return what follows it."""
        buffer = self._held + text
        self._held = ""
        if self._bare:
            stripped = buffer.lstrip()
            if not stripped:  # too short to tell
                self._held = buffer
                return ""
            bare, self._bare = self._bare, ()
            if stripped[0] in bare:
                self._sink.text(buffer[: len(buffer) - len(stripped)])
                return self._begin(stripped[0], stripped[1:])
        if self._first_chars.isdisjoint(buffer):
            self._sink.text(buffer)
            return ""
        tags = self._tags + self._missing
        start, tag = min(((buffer.find(tag), tag) for tag in tags if tag in buffer), default=(-1, ""))
        if start < 0:
            cut = len(buffer) - max(held_length(buffer, tag) for tag in tags)
            self._sink.text(buffer[:cut])
            self._held = buffer[cut:]
            return ""
        self._sink.text(buffer[:start])
        rest = buffer[start + len(tag) :]
        if tag in self._missing:
            self._missing = self._missing[self._missing.index(tag) + 1 :]
            return rest
        return self._begin(tag, rest)

    def _begin(self, tag: str, rest: str) -> str:
        self._missing = ()
        self._sink.attempt(tag)
        self._reading = self._read_call(self._sink, tag)
        next(self._reading)
        return rest

    def _in_call(self, reading: Reading[str], text: str) -> str:
        """Take the characters of a call; return those after it."""
        for i, char in enumerate(text):
            self._sink.keep(char)
            try:
                reading.send(char)
            except StopIteration as end:
                self._reading = None
                self._missing = self._ends if end.value else ()
                return end.value + text[i + 1 :]
            except Malformed:
                self._reading = None
                self._sink.give_up(num_unread=1)
                return text[i:]
        return ""

    def _end(self, reading: Reading[str]) -> None:
        self._reading = None
        try:
            reading.send("")
        except StopIteration:
            return
        except Malformed:
            pass
        reading.close()
        self._sink.give_up(num_unread=0)


def held_length(text: str, tag: str) -> int:
    """Return how many characters at the text's end may become the tag."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


def skip_space() -> Reading[str]:
    """Return the first character that is not whitespace."""
    char = yield
    while char.isspace():
        char = yield
    return char


def copy_until(tag: str, char: str, emit: Callable[[str], None]) -> Reading[str]:
    """Emit characters, from `char` on, until the tag is read. No prefix of `tag` may recur within it."""
    held = ""
    while True:
        if char and tag.startswith(held + char):
            held += char
            if held == tag:
                return ""
        else:
            emit(held)
            held = ""
            if char and tag.startswith(char):
                held = char
            else:
                emit(char)
        char = yield


def copy_rest(char: str, emit: Callable[[str], None]) -> Reading[str]:
    """Emit all characters from `char` on: a malformed value ends only with the text."""
    while True:
        emit(char)
        char = yield


def read_one_of(tags: tuple[str, ...], *, seen: str = "") -> Reading[tuple[str, str]]:
    """Read a tag, after whitespace; return it, or "" and the text found instead. `seen`: what was read of it."""
    seen = seen or (yield from skip_space())
    while seen not in tags:
        if not any(tag.startswith(seen) for tag in tags):
            return "", seen
        char = yield
        if not char:
            yield  # cut off: what was called stays open
        seen += char
    return seen, ""


def read_tag(tag: str) -> Reading[None]:
    """Read a tag, after whitespace."""
    char = yield from skip_space()
    for i, expected in enumerate(tag):
        if char != expected:
            raise Malformed(tag[:i] + char)
        if i < len(tag) - 1:
            char = yield


def read_name(end: str) -> Reading[str]:
    """Read a name and its end."""
    name, char = "", (yield)
    while char != end[0]:
        if not char:
            yield  # cut off
        if not char.isprintable() or char in "<>" or len(name) == _MAX_NAME_CHARS:
            raise Malformed(name + char)
        name, char = name + char, (yield)
    for i, expected in enumerate(end[1:], 1):
        char = yield
        if char != expected:
            raise Malformed(name + end[:i] + char)
    if not name.strip():
        raise Malformed(name + end)
    return name.strip()
