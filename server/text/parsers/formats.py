"""Tool-call parsers of four formats, each a coroutine on characters; detect.py chooses one by the chat template.

Hermes and Qwen: <tool_call>{"name": …, "arguments": {…}}</tool_call>, repeated for several calls.

Llama 3: {"name": …, "parameters": {…}} as the whole answer, or after <|python_tag|>; separated by ;. Without the tag,
only an object that begins the answer and names a tool of the request is a call, because the client may have asked for
JSON. Text after <|python_tag|> that is no such object (code for built-in tools) stays text.

Mistral: [TOOL_CALLS] [{"name": …, "arguments": {…}}, …], and since v11 [TOOL_CALLS]name[ARGS]{…} per call, with
[CALL_ID]… before [ARGS] or without either of the two.

Granite 3: <|tool_call|>[{"name": …, "arguments": {…}}, …].
"""

import re
from collections.abc import Collection

from server.text.parsers.base import PartSink
from server.text.parsers.json_call import JsonCallReader
from server.text.parsers.tool_calls import CallParser, Malformed, Reading, copy_rest, copy_until, skip_space

HERMES_START, HERMES_END = "<tool_call>", "</tool_call>"
HERMES_TAGS = (HERMES_START, HERMES_END)


def hermes_parser() -> CallParser:
    """Return a parser for one choice."""
    return CallParser((HERMES_START,), _read_hermes_call, ends=(HERMES_END,))


def _read_hermes_call(sink: PartSink, tag: str) -> Reading[str]:
    reader = JsonCallReader(sink)
    char = yield from reader.read((yield from skip_space()))
    if reader.is_broken:
        return (yield from copy_until(HERMES_END, char, sink.arguments))
    return (yield from read_end(HERMES_END, char))


def read_end(tag: str, char: str) -> Reading[str]:
    """Read a closing tag after whitespace and superfluous braces, or return the text found instead."""
    char = char or (yield)
    while char.isspace() or char == "}":
        char = yield
    for i, expected in enumerate(tag):
        if char != expected:
            return tag[:i] + char
        if i < len(tag) - 1:
            char = yield
    return ""


LLAMA3_START = "<|python_tag|>"
LLAMA3_TAGS = (LLAMA3_START,)
_BARE = "{"
_KEYS = ("name", "parameters", "arguments", "type", "id")
_SEPARATORS = (";", ",")


def llama3_parser(names: Collection[str]) -> CallParser:
    """Return a parser for one choice. `names`: the request's tools."""

    def read_calls(sink: PartSink, tag: str) -> Reading[str]:
        if tag == _BARE:
            return (yield from read_llama3_calls(sink, tag, names=names))
        return (yield from read_llama3_calls(sink, (yield from skip_space()), names=None))

    return CallParser(LLAMA3_TAGS, read_calls, bare=(_BARE,))


def read_llama3_calls(sink: PartSink, char: str, *, names: Collection[str] | None) -> Reading[str]:
    """Read calls, the first of which begins with `char`. `names`: those that make a call, if there is no tag."""
    keys = None if names is None else _KEYS
    while True:
        reader = JsonCallReader(sink, names=names, keys=keys)
        char = yield from reader.read(char)
        if reader.is_broken:
            return (yield from copy_rest(char, sink.arguments))
        sink.release()
        char = char or (yield)
        while char.isspace() or char in _SEPARATORS:
            char = yield
        if char != _BARE:
            return char


MISTRAL_START, MISTRAL_CALL_ID, MISTRAL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MISTRAL_TAGS = (MISTRAL_START, MISTRAL_CALL_ID, MISTRAL_ARGS)
_MAX_HEAD_CHARS = 256
_HEAD_CHAR = re.compile(r"[\w.:\-\[\] ]")
_NAME = re.compile(r"[\w.:\-]+")


def mistral_parser() -> CallParser:
    """Return a parser for one choice."""
    return CallParser((MISTRAL_START,), _read_mistral_calls)


def _read_mistral_calls(sink: PartSink, tag: str) -> Reading[str]:
    char = yield from skip_space()
    if char == "[":
        return (yield from read_array(sink))
    reader = JsonCallReader(sink)
    if char == "{":
        char = yield from reader.read(char)
    else:
        name = yield from _read_head(char)
        char = yield from reader.read_arguments(name, "{")
    if reader.is_broken:
        return (yield from copy_rest(char, sink.arguments))
    return char


def read_array(sink: PartSink) -> Reading[str]:
    """Read calls up to the bracket that closes their array."""
    while True:
        reader = JsonCallReader(sink)
        char = yield from reader.read((yield from skip_space()))
        if reader.is_broken:
            return (yield from copy_rest(char, sink.arguments))
        sink.release()
        if not char or char.isspace():
            char = yield from skip_space()
        if char == "]":
            return ""
        if char != ",":
            raise Malformed(char)


def _read_head(char: str) -> Reading[str]:
    """Read up to the arguments' brace; return the name."""
    head = ""
    while char != "{":
        if not _HEAD_CHAR.match(char) or len(head) == _MAX_HEAD_CHARS:
            raise Malformed(char)
        head += char
        char = yield
    name = head.partition(MISTRAL_ARGS)[0].partition(MISTRAL_CALL_ID)[0].strip()
    if not _NAME.fullmatch(name):
        raise Malformed(char)
    return name


GRANITE_START = "<|tool_call|>"
GRANITE_TAGS = (GRANITE_START,)


def granite_parser() -> CallParser:
    """Return a parser for one choice."""
    return CallParser(GRANITE_TAGS, _read_granite_calls)


def _read_granite_calls(sink: PartSink, tag: str) -> Reading[str]:
    char = yield from skip_space()
    if char != "[":
        raise Malformed(char)
    return (yield from read_array(sink))
