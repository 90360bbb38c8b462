"""Hermes' and Qwen's format: <tool_call>{"name": …, "arguments": {…}}</tool_call>, repeated for several calls."""

from server.text.parsers.base import PartSink
from server.text.parsers.json_call import JsonCallReader
from server.text.parsers.tool_calls import CallParser, Reading, copy_until, skip_space

START, END = "<tool_call>", "</tool_call>"
TAGS = (START, END)


def hermes_parser() -> CallParser:
    """Return a parser for one choice."""
    return CallParser((START,), _read_call, ends=(END,))


def _read_call(sink: PartSink, tag: str) -> Reading[str]:
    reader = JsonCallReader(sink)
    char = yield from reader.read((yield from skip_space()))
    if reader.is_broken:
        return (yield from copy_until(END, char, sink.arguments))
    return (yield from read_end(END, char))


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
