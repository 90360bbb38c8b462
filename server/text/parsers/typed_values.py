"""Values that models write without quotes, as JSON: their types are those of the tool's schema.

A string by the schema is emitted as it arrives; another value once it is complete, as JSON if it parses to one of the
schema's types, else as a string. Imports server.text.parsers.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from server.text.parsers.json_pointer import pointed
from server.text.parsers.tool_calls import Reading, copy_until

Schema = Mapping[str, Any]
Emit = Callable[[str], None]

_STRING = {"string"}
_ALL = ["string", "number", "integer", "boolean", "null", "array", "object"]
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}


class Properties:
    """The parameters of one tool by its schema."""

    def __init__(self, schema: Schema) -> None:
        properties = schema.get("properties")
        self._schemas = properties if isinstance(properties, Mapping) else {}
        self._root = schema

    @property
    def names(self) -> list[str]:
        """The parameters in their order."""
        return list(self._schemas)

    def types(self, key: str) -> set[str]:
        """Return the JSON types of a parameter, as far as the schema names them."""
        return _types(self._schemas.get(key), self._root)


def is_string(schema: object, root: Schema) -> bool:
    """Return True if a property's schema allows strings only, or says nothing. `root`: the schema that it is in."""
    return _types(schema, root) <= _STRING


def read_value(types: set[str], end: str, emit: Emit, *, is_padded: bool) -> Reading[None]:
    """Read up to `end` and emit JSON. `is_padded`: a newline next to the value's tags belongs to them."""
    if types <= _STRING:
        yield from _stream_string(end, emit, is_padded=is_padded)
        return
    value = yield from _read_whole(end, emit)
    emit(typed_json(value.removeprefix("\n").removesuffix("\n") if is_padded else value, types))


def read_json(end: str, emit: Emit) -> Reading[None]:
    """Read up to `end` and emit what is read, if it is JSON, else a string of it."""
    value = yield from _read_whole(end, emit)
    text, kinds = _parsed(value)
    emit(text if kinds else quoted(value))


def quoted(text: str) -> str:
    """Return a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _read_whole(end: str, emit: Emit) -> Reading[str]:
    """Return the text up to `end`; if it is cut off, emit it."""
    chars: list[str] = []
    try:
        yield from copy_until(end, (yield), chars.append)
    except GeneratorExit:  # cut off
        emit("".join(chars))
        raise
    return "".join(chars)


def _stream_string(end: str, emit: Emit, *, is_padded: bool) -> Reading[None]:
    emit('"')
    newline = ""

    def escape(text: str) -> None:
        nonlocal newline
        for char in text:
            emit(newline)
            newline = "\\n" if char == "\n" and is_padded else ""
            if not newline:
                emit(quoted(char)[1:-1])

    char = yield
    if char == "\n" and is_padded:
        char = yield
    yield from copy_until(end, char, escape)
    emit('"')


def typed_json(value: str, types: set[str]) -> str:
    """Return the JSON of a text: a value of one of the types, else a string."""
    text, kinds = _parsed(value)
    return text if kinds & types - _STRING else quoted(value)


def _parsed(value: str) -> tuple[str, set[str]]:
    """Return a text as JSON, and the JSON types that it has: none if it is not JSON."""
    text = value.strip()
    text = _PYTHON_LITERALS.get(text, text)
    try:
        return text, _kinds(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return text, set()


def _kinds(value: object) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case list():
            return {"array"}
        case dict():
            return {"object"}
    return {"string"}


def _types(schema: object, root: Schema) -> set[str]:
    """The JSON types that a schema names: by type, else by its values, its alternatives and what it refers to."""
    types: set[str] = set()
    seen: set[int] = set()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        declared = part.get("type")
        named = {name for name in (declared if isinstance(declared, list) else [declared]) if isinstance(name, str)}
        values = part.get("enum")
        if not named and isinstance(values, list):
            named = named.union(*map(_kinds, values))
        if not named and "const" in part:
            named = _kinds(part["const"])
        if not named and isinstance(part.get("$ref"), str):
            target = pointed(root, part["$ref"])
            waiting.append(target if isinstance(target, Mapping) else {"type": _ALL})
        for word in ("anyOf", "oneOf", *(() if named else ("allOf",))):
            choices = part.get(word)
            waiting += choices if isinstance(choices, list) else ()
        types |= named
    return types


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
