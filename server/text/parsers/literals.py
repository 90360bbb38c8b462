"""Reads values that models write as literals, and emits them as JSON while they arrive.

Python's: 'a', "b", 1, True, None, [1, 2], (1, 2), {'k': 3}. Gemma 4's: <|"|>a<|"|>, 1, true, [1,2], {k:3}; its strings
have no escapes. A bare word that is no number and no constant is a string. In Python's strings a quotation mark that
neither a comma nor a bracket follows is text: templates write values between quotes as they are. The schema's types
have the last word on a whole value: a number may be a string, and a string a number. Imports server.text.parsers.
"""

import json
import re
from collections.abc import Callable
from functools import partial

from server.text.parsers.tool_calls import Malformed, Reading, copy_until, skip_space
from server.text.parsers.typed_values import quoted, typed_json

GEMMA_QUOTE = '<|"|>'
_QUOTES = ("'", '"')
_CLOSING = {"[": "]", "{": "}", "(": ")"}
_AFTER_STRING = (",", ")", "]", "}", ":", "")
_WORD_ENDS = (*_AFTER_STRING, "<", "\n")
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"[-+]?(\d[\d_]*)?\.?\d*([eE][-+]?\d+)?")
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "0": "\0",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "/": "/",
    "\n": "",
}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_MAX_KEY_CHARS = 256
_MAX_DEPTH = 64

Emit = Callable[[str], None]


class LiteralReader:
    """Reads the values of one call."""

    def __init__(self, emit: Emit, *, quote: str = "", takes_words: bool = True) -> None:
        """`quote`: the tag around a string, or "" for Python's marks. `takes_words`: bare words are strings."""
        self._emit = emit
        self._quote = quote
        self._takes_words = takes_words

    def value(self, char: str, types: set[str] | None = None) -> Reading[str]:
        """Read a value that begins with `char`; return the first character after it and after its whitespace.

        `types`: those of the schema. Raises Malformed.
        """
        if not types:
            return (yield from self._value(char, self._emit, 0))
        if char in _CLOSING or ("string" in types and self._may_quote(char)):
            return (yield from self._value(char, self._emit, 0))
        held: list[str] = []
        try:
            after = yield from self._value(char, held.append, 0)
        except Malformed as fault:
            raise Malformed("".join(held) + fault.unread) from None
        except GeneratorExit:  # cut off
            self._emit("".join(held))
            raise
        self._emit(_fitting("".join(held), types))
        return after

    def key(self, char: str, end: str) -> Reading[str]:
        """Read a key that begins with `char`, quoted or not, and `end`, its separator; return the key."""
        chars: list[str] = []
        is_quoted = self._may_quote(char)
        if is_quoted:
            after = yield from self._string(char, chars.append)
            key = json.loads("".join(chars)).encode(errors="replace").decode()
        else:
            after = char
            while after != end and after not in (",", "(", ")", "{", "}", "[", "]", "") and len(chars) < _MAX_KEY_CHARS:
                chars.append(after)
                after = yield
            key = "".join(chars).strip()
        if after != end or not (key or is_quoted):
            raise Malformed(key + after)
        return key

    def _may_quote(self, char: str) -> bool:
        return char == self._quote[0] if self._quote else char in _QUOTES

    def _value(self, char: str, emit: Emit, depth: int) -> Reading[str]:
        if self._may_quote(char):
            return (yield from self._string(char, emit))
        if char in _CLOSING:
            if depth == _MAX_DEPTH:
                raise Malformed(char)
            return (yield from self._nested(char, emit, depth + 1))
        return (yield from self._word(char, emit))

    def _nested(self, opening: str, emit: Emit, depth: int) -> Reading[str]:
        """Read a list, a tuple or a dict."""
        is_object, closing = opening == "{", _CLOSING[opening]
        emit("{" if is_object else "[")
        char, separator = (yield from skip_space()), ""
        while char != closing:
            emit(separator)
            separator = ", "
            if is_object:
                emit(quoted((yield from self.key(char, ":"))) + ": ")
                char = yield from skip_space()
            char = yield from self._value(char, emit, depth)
            if char == ",":
                char = yield from skip_space()
            elif char != closing:
                raise Malformed(char)
        emit("}" if is_object else "]")
        return (yield from skip_space())

    def _word(self, char: str, emit: Emit) -> Reading[str]:
        """Read a number, a constant or a bare word."""
        chars: list[str] = []
        while char not in _WORD_ENDS:
            chars.append(char)
            char = yield
        word = "".join(chars).strip()
        value = _CONSTANTS.get(word) or _number(word)
        if not word or (value is None and not self._takes_words):
            raise Malformed(char)
        emit(value or quoted(word))
        return (yield from skip_space()) if char == "\n" else char

    def _string(self, char: str, emit: Emit) -> Reading[str]:
        if not self._quote:
            return (yield from _python_string(char, emit))
        for i, expected in enumerate(self._quote[1:], 1):
            char = yield
            if char != expected:
                raise Malformed(self._quote[:i] + char)
        emit('"')
        yield from copy_until(self._quote, (yield), partial(_emit_escaped, emit))
        emit('"')
        return (yield from skip_space())


def literal_json(text: str) -> str | None:
    """Return the JSON of a text that is a list, a tuple or a dict of Python's; None if it is none."""
    text = text.strip()
    parts: list[str] = []
    if text[:1] not in _CLOSING:
        return None
    reading = LiteralReader(parts.append, takes_words=False).value(text[0])
    next(reading)
    try:
        for char in (*text[1:], ""):
            reading.send(char)
    except StopIteration as end:
        return None if end.value else "".join(parts)
    except Malformed:
        pass
    return None


def _python_string(quote: str, emit: Emit) -> Reading[str]:
    emit('"')
    char = yield
    while True:
        if not char:
            yield  # cut off
        if char == quote:
            space = ""
            while (char := (yield)).isspace():
                space += char
            if char in _AFTER_STRING:
                emit('"')
                return char
            _emit_escaped(emit, quote + space)
            continue
        if char == "\\":
            char = yield from _escape(emit)
            continue
        _emit_escaped(emit, char)
        char = yield


def _escape(emit: Emit) -> Reading[str]:
    """Read what follows a backslash; return the first character after it."""
    char = yield
    if char in _ESCAPES:
        _emit_escaped(emit, _ESCAPES[char])
        return (yield)
    digits = ""
    while len(digits) < _HEX_DIGITS.get(char, 0):
        digit = yield
        if digit not in "0123456789abcdefABCDEF" or not digit:
            _emit_escaped(emit, f"\\{char}{digits}")
            return digit
        digits += digit
    if not digits:
        _emit_escaped(emit, "\\")
        return char
    code = int(digits, 16)
    emit(f"\\u{code:04x}" if code < 0x10000 else quoted(chr(code) if code < 0x110000 else f"\\{char}{digits}")[1:-1])
    return (yield)


def _emit_escaped(emit: Emit, text: str) -> None:
    if text:
        emit(quoted(text)[1:-1])


def _number(word: str) -> str | None:
    """Return the JSON of a Python number, if the word is a finite one."""
    if not _NUMBER.fullmatch(word) or not any(char.isdigit() for char in word):
        return None
    plain = word.replace("_", "").lstrip("+")
    try:
        json.loads(plain)
        return plain
    except ValueError:
        pass
    try:
        number = float(plain)
    except ValueError:
        return None
    return json.dumps(number) if abs(number) < float("inf") else None


def _fitting(value: str, types: set[str]) -> str:
    """Return a value, which is no object and no list, as the schema's types want it."""
    decoded = json.loads(value)
    if isinstance(decoded, str):
        is_text = decoded.isascii() or all(not "\ud800" <= char <= "\udfff" for char in decoded)
        return value if "string" in types or not is_text else typed_json(decoded, types)
    return quoted(value) if types == {"string"} else value
