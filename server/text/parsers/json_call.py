"""Parses a call that is one JSON object: {"name": …, "arguments": {…}}, or "parameters" for the arguments.

Arguments are emitted as they arrive, in the model's own characters, from the moment that the name is known; if the
object breaks before that, there is no call. Control characters inside strings, which JSON forbids, are escaped.
Raises Malformed only. Imports server.text.parsers.
"""

import json
from collections.abc import Callable, Collection

from server.text.parsers.base import PartSink
from server.text.parsers.tool_calls import Malformed, Reading, skip_space

_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
_CLOSING = {"{": "}", "[": "]"}
_MAX_NAME_CHARS = 256


class JsonCallReader:
    """Reads one call.

    `names`: the only ones that make a call, or None for any. `keys`: the only ones that the object may have.
    """

    def __init__(
        self, sink: PartSink, *, names: Collection[str] | None = None, keys: Collection[str] | None = None
    ) -> None:
        self.is_broken = False  # the call was given out, but its arguments are not JSON
        self._sink = sink
        self._names = names
        self._keys = keys
        self._name: str | None = None
        self._arguments: list[str] | None = None  # held until the name is known

    def read(self, char: str) -> Reading[str]:
        """Read an object that begins with `char`; return the first character that is not its own, or "" if none was
        read. Raises Malformed if it is no call.
        """
        try:
            yield from self._object(char)
        except Malformed as fault:
            if not self._sink.is_committed:
                raise
            return fault.unread
        return ""

    def read_arguments(self, name: str, char: str) -> Reading[str]:
        """As read(), for arguments whose name came before, with the whitespace after them."""
        self._name = name
        try:
            return (yield from self._read_arguments(char))
        except Malformed as fault:
            if not self._sink.is_committed:
                raise
            return fault.unread

    def _object(self, char: str) -> Reading[None]:
        _expect(char, "{")
        char = yield from skip_space()
        while char == '"':
            key = yield from read_string()
            if self._keys is not None and key not in self._keys and not self._sink.is_committed:
                raise Malformed('"')
            _expect((yield from skip_space()), ":")
            char = yield from self._member(key, (yield from skip_space()))
            if char != ",":
                break
            char = yield from skip_space()
        _expect(char, "}")
        if not self._sink.is_committed:
            self._start(char)
            self._sink.arguments("".join(self._arguments or ("{}",)))

    def _member(self, key: str, char: str) -> Reading[str]:
        """Read a value that begins with `char`; return the first character after it and after its whitespace."""
        is_first = self._arguments is None and not self._sink.is_committed
        if key in _ARGUMENT_KEYS and is_first:
            return (yield from self._read_arguments(char))
        value: list[str] = []
        char = yield from _read_value(char, value.append)
        if key in _NAME_KEYS and self._name is None:
            name = _decoded("".join(value), char)
            if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_CHARS or not name.isprintable():
                raise Malformed(char)
            self._name = name
            self._check_name(char)
            if self._arguments is not None:
                self._start(char)
                self._sink.arguments("".join(self._arguments))
        return char

    def _read_arguments(self, char: str) -> Reading[str]:
        if char != "{":
            value: list[str] = []
            char = yield from _read_value(char, value.append)
            self._arguments = [_object_text("".join(value), char)]
            if self._name is not None:
                self._start(char)
                self._sink.arguments(self._arguments[0])
            return char
        if self._name is None:
            self._arguments = []
            return (yield from _read_value(char, self._arguments.append))
        self._start(char)
        self.is_broken = True
        yield from _read_nested(char, self._sink.arguments)
        self.is_broken = False
        return (yield from skip_space())

    def _check_name(self, char: str) -> None:
        if self._name is None or (self._names is not None and self._name not in self._names):
            raise Malformed(char)

    def _start(self, char: str) -> None:
        self._check_name(char)
        self._sink.start(self._name or "")


def _expect(char: str, expected: str) -> None:
    if char != expected:
        raise Malformed(char)


def read_string() -> Reading[str]:
    """Read a string whose opening quote was read; return its value."""
    raw: list[str] = []
    yield from _copy_string(raw.append)
    value = _decoded('"' + "".join(raw), "")
    assert isinstance(value, str)
    return value


def _read_value(char: str, emit: Callable[[str], None]) -> Reading[str]:
    """Read any value; return the first character after it and after its whitespace."""
    if char in _CLOSING:
        yield from _read_nested(char, emit)
    elif char == '"':
        emit(char)
        yield from _copy_string(emit)
    else:
        num_chars = 0
        while char.isalnum() or char in ("-", "+", "."):
            emit(char)
            num_chars += 1
            char = yield
        if not num_chars:
            raise Malformed(char)
        return (yield from skip_space()) if char.isspace() else char
    return (yield from skip_space())


def _read_nested(char: str, emit: Callable[[str], None]) -> Reading[None]:
    """Read an object or array up to the bracket that closes it. Raises Malformed if the brackets do not match."""
    emit(char)
    closing = [_CLOSING[char]]
    while closing:
        char = yield
        if char in _CLOSING:
            closing.append(_CLOSING[char])
        elif char in ("}", "]"):
            if closing.pop() != char:
                raise Malformed(char)
        elif char in ("<", ""):  # of a closing tag; JSON has it only in strings
            raise Malformed(char)
        emit(char)
        if char == '"':
            yield from _copy_string(emit)


def _copy_string(emit: Callable[[str], None]) -> Reading[None]:
    """Read the rest of a string, its closing quote included."""
    while True:
        char = yield
        if not char:
            raise Malformed(char)
        emit(json.dumps(char)[1:-1] if char < " " else char)
        if char == "\\":
            emit((yield))
        elif char == '"':
            return


class JsonEscaper:
    """Escapes the control characters inside strings of JSON text that arrives in pieces."""

    def __init__(self) -> None:
        self.is_empty = True  # but for whitespace
        self._is_in_string = False
        self._is_escaped = False

    def push(self, text: str) -> str:
        """Return the escaped text, without whitespace before the value."""
        if self.is_empty:
            text = text.lstrip()
        self.is_empty = self.is_empty and not text
        return "".join(map(self._escape, text))

    def _escape(self, char: str) -> str:
        if not self._is_in_string:
            self._is_in_string = char == '"'
            return char
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_in_string = False
        return json.dumps(char)[1:-1] if char < " " else char


def _object_text(value: str, char: str) -> str:
    """Return the arguments for a value that is no object. `char`: the character that an error names."""
    decoded = _decoded(value, char)
    if decoded is None or (isinstance(decoded, str) and not decoded.strip()):
        return "{}"
    arguments = _decoded(decoded, char) if isinstance(decoded, str) else None
    if not isinstance(decoded, str) or not isinstance(arguments, dict):
        raise Malformed(char)
    is_text = all(not "\ud800" <= letter <= "\udfff" for letter in decoded)
    return decoded if is_text else json.dumps(arguments)


def _decoded(text: str, char: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed(char) from None
