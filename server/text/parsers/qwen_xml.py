"""Qwen3-Coder's format, with unquoted values that the tool's schema gives a type:

    <tool_call> <function=NAME> <parameter=KEY> VALUE </parameter> … </function> </tool_call>

Arguments become JSON: a string by the schema is emitted as it arrives, another value once it is complete, as JSON
if it parses, else as a string.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from server.text.parsers.base import PartSink
from server.text.parsers.formats import HERMES_END, HERMES_START, read_end
from server.text.parsers.tool_calls import CallParser, Malformed, Reading, copy_until, skip_space

TAGS = (HERMES_START, HERMES_END)
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_MAX_NAME_CHARS = 256
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}

_STRING = {"string"}

Schema = Mapping[str, Any]


def is_string(schema: object) -> bool:
    """Return True if a property's schema allows strings only."""
    return _types(schema) <= _STRING


def qwen_xml_parser(schemas: Mapping[str, Schema]) -> CallParser:
    """Return a parser for one choice. `schemas`: the parameters of each tool of the request."""

    def read_call(sink: PartSink, tag: str) -> Reading[str]:
        if tag == HERMES_START:
            yield from _read_exactly(_FUNCTION)
        name = yield from _read_name()
        properties = schemas.get(name, {}).get("properties")
        sink.start(name)
        sink.arguments("{")
        rest = yield from _read_parameters(sink, properties if isinstance(properties, Mapping) else {})
        sink.arguments("}")
        return rest or ((yield from read_end(HERMES_END, "")) if tag == HERMES_START else "")

    return CallParser((HERMES_START, _FUNCTION), read_call, ends=(_END_FUNCTION, HERMES_END))


def _read_parameters(sink: PartSink, properties: Schema) -> Reading[str]:
    """Read up to the function's end; return the text found instead of it, if any."""
    separator = ""
    while True:
        seen = yield from skip_space()
        while seen not in (_PARAMETER, _END_FUNCTION):
            if not (_PARAMETER.startswith(seen) or _END_FUNCTION.startswith(seen)):
                return seen
            char = yield
            if not char:
                yield  # cut off: what was called stays open
            seen += char
        if seen == _END_FUNCTION:
            return ""
        try:
            key = yield from _read_name()
        except Malformed as fault:
            return seen + fault.unread
        sink.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        types = _types(properties.get(key))
        if types <= _STRING:
            yield from _stream_string(sink.arguments)
        else:
            value: list[str] = []
            yield from copy_until(_END_PARAMETER, (yield), value.append)
            sink.arguments(_typed("".join(value), types))


def _stream_string(emit: Callable[[str], None]) -> Reading[None]:
    """Emit a value as a JSON string, without the newlines next to its tags."""
    emit('"')
    newline = ""

    def escape(text: str) -> None:
        nonlocal newline
        for char in text:
            emit(newline)
            newline = "\\n" if char == "\n" else ""
            if not newline:
                emit(json.dumps(char, ensure_ascii=False)[1:-1])

    char = yield
    if char == "\n":
        char = yield
    yield from copy_until(_END_PARAMETER, char, escape)
    emit('"')


def _typed(value: str, types: set[str]) -> str:
    """Return the JSON of a value that is not merely a string by its schema."""
    text = value.strip()
    text = _PYTHON_LITERALS.get(text, text)
    try:
        kinds = _kinds(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        kinds = set()
    if kinds & types - _STRING:
        return text
    return json.dumps(value.removeprefix("\n").removesuffix("\n"), ensure_ascii=False)


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


def _types(schema: object) -> set[str]:
    """The JSON types that a property's schema names, anyOf and oneOf included; none if it names none."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        types |= {name for name in declared if isinstance(name, str)}
    for word in ("anyOf", "oneOf"):
        choices = schema.get(word)
        if isinstance(choices, list):
            types = types.union(*map(_types, choices))
    return types


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _read_exactly(tag: str) -> Reading[None]:
    char = yield from skip_space()
    for expected in tag[:-1]:
        if char != expected:
            raise Malformed(char)
        char = yield
    if char != tag[-1]:
        raise Malformed(char)


def _read_name() -> Reading[str]:
    """Read a name and the > after it."""
    name = ""
    while (char := (yield)) != ">":
        if not char:
            yield  # cut off
        if not char.isprintable() or char == "<" or len(name) == _MAX_NAME_CHARS:
            raise Malformed(name + char)
        name += char
    if not name.strip():
        raise Malformed(name + char)
    return name.strip()
