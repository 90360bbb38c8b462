"""Formats whose arguments are literals (literals.py makes JSON of them):

    Gemma 4    <|tool_call>call:NAME{key:value,…}<tool_call|>, repeated
    LFM2       <|tool_call_start|>[f(k="v"), g()]<|tool_call_end|>
    Llama 4    <|python_start|>[f(k="v"), g()]<|python_end|>, or the list alone as the whole answer, or Llama 3's JSON
    OLMo 3     <function_calls>f(k="v")
               g()</function_calls>

A positional argument gets the name of the schema's property in its place. A list without a tag is a call only if its
first function is a tool of the request, because the client may have asked for a list.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from server.text.parsers.base import PartSink
from server.text.parsers.formats import read_end, read_llama3_calls
from server.text.parsers.literals import GEMMA_QUOTE, LiteralReader
from server.text.parsers.tool_calls import CallParser, Malformed, Reading, skip_space
from server.text.parsers.typed_values import Properties, Schema, quoted

GEMMA_START, GEMMA_END = "<|tool_call>", "<tool_call|>"
GEMMA_TAGS = (GEMMA_START, GEMMA_END, GEMMA_QUOTE)
GEMMA_RESPONSE = "<|tool_response>"  # after its calls the model waits for what follows this
GEMMA_CALL = "call:"
_NAME_CHAR = re.compile(r"[\w.\-]")
_MAX_NAME_CHARS = 256
_LIST, _OBJECT = "[", "{"


class PythonForm(NamedTuple):
    """The tags around calls in Python."""

    start: str
    end: str
    is_list: bool = True

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags that may be tokens."""
        return (self.start, self.end)


LFM2 = PythonForm("<|tool_call_start|>", "<|tool_call_end|>")
LLAMA4 = PythonForm("<|python_start|>", "<|python_end|>")
OLMO3 = PythonForm("<function_calls>", "</function_calls>", is_list=False)


def gemma_parser(schemas: Mapping[str, Schema]) -> CallParser:
    """Return a parser for one choice. `schemas`: the parameters of each tool of the request."""

    def read_call(sink: PartSink, tag: str) -> Reading[str]:
        char = yield from skip_space()
        for i, expected in enumerate(GEMMA_CALL):
            if char != expected:
                raise Malformed(char)
            char = (yield) if i < len(GEMMA_CALL) - 1 else ""
        name, char = yield from _read_name((yield))
        if char != "{":
            raise Malformed(char)
        rest = yield from _read_pairs(sink, name, schemas, separator=":", closing="}", quote=GEMMA_QUOTE)
        return rest or (yield from read_end(GEMMA_END, ""))

    return CallParser((GEMMA_START,), read_call, ends=(GEMMA_END,))


def python_parser(form: PythonForm, schemas: Mapping[str, Schema]) -> CallParser:
    """Return a parser for one choice. `schemas`: the parameters of each tool of the request."""

    def read_calls(sink: PartSink, tag: str) -> Reading[str]:
        char = tag if tag == _LIST else (yield from skip_space())
        return (yield from _read_python(sink, form, char, schemas, is_bare=tag == _LIST))

    return CallParser((form.start,), read_calls, ends=(form.end,))


def llama4_parser(schemas: Mapping[str, Schema]) -> CallParser:
    """Return a parser for one choice. `schemas`: the parameters of each tool of the request."""

    def read_calls(sink: PartSink, tag: str) -> Reading[str]:
        is_bare = tag in (_LIST, _OBJECT)
        char = tag if is_bare else (yield from skip_space())
        if char == _OBJECT:
            rest = yield from read_llama3_calls(sink, char, names=set(schemas) if is_bare else None)
            return rest if is_bare else (yield from read_end(LLAMA4.end, rest))
        return (yield from _read_python(sink, LLAMA4, char, schemas, is_bare=is_bare))

    return CallParser((LLAMA4.start,), read_calls, bare=(_LIST, _OBJECT), ends=(LLAMA4.end,))


def _read_python(
    sink: PartSink, form: PythonForm, char: str, schemas: Mapping[str, Schema], *, is_bare: bool
) -> Reading[str]:
    is_list = char == _LIST
    if is_list:
        char = yield from skip_space()
    elif form.is_list:
        raise Malformed(char)
    while True:
        name, char = yield from _read_name(char)
        if char != "(" or (is_bare and name not in schemas):
            raise Malformed(char)
        rest = yield from _read_pairs(sink, name, schemas, separator="=", closing=")")
        if rest:
            return rest
        sink.release()
        char = yield from skip_space()
        if char in (",", ";"):
            char = yield from skip_space()
        elif is_list:
            if char != "]":
                raise Malformed(char)
            return "" if is_bare else (yield from read_end(form.end, ""))
        if char == form.end[0]:
            return (yield from read_end(form.end, char))


def _read_name(char: str) -> Reading[tuple[str, str]]:
    """Return a name that begins with `char`, and the character after it."""
    name = ""
    while char and _NAME_CHAR.fullmatch(char) and len(name) < _MAX_NAME_CHARS:
        name, char = name + char, (yield)
    if not name:
        raise Malformed(char)
    return name, char


def _read_pairs(
    sink: PartSink, name: str, schemas: Mapping[str, Schema], *, separator: str, closing: str, quote: str = ""
) -> Reading[str]:
    """Read arguments up to the bracket that closes them; return the text found instead of it, if any."""
    sink.start(name)
    sink.arguments("{")
    properties = Properties(schemas.get(name, {}))
    reader = LiteralReader(sink.arguments, quote=quote)
    num_read = 0
    try:
        char = yield from skip_space()
        while char != closing:
            sink.arguments(", " if num_read else "")
            char = yield from _read_pair(sink, reader, char, properties, place=num_read, separator=separator)
            num_read += 1
            if char == ",":
                char = yield from skip_space()
            elif char != closing:
                raise Malformed(char)
    except Malformed as fault:
        return fault.unread
    sink.arguments("}")
    return ""


def _read_pair(
    sink: PartSink, reader: LiteralReader, char: str, properties: Properties, *, place: int, separator: str
) -> Reading[str]:
    """Read a key and its value, or a value alone; return the character after it."""
    is_positional = separator == "=" and (char in "'\"[{-" or char.isdigit())
    if is_positional and place < len(properties.names):
        key = properties.names[place]
    else:
        key = yield from reader.key(char, separator)
        char = yield from skip_space()
    sink.arguments(f"{quoted(key)}: ")
    return (yield from reader.value(char, properties.types(key)))
