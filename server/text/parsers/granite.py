"""Granite 3's format: <|tool_call|>[{"name": …, "arguments": {…}}, …]."""

from server.text.parsers.base import PartSink
from server.text.parsers.mistral import read_array
from server.text.parsers.tool_calls import CallParser, Malformed, Reading, skip_space

START = "<|tool_call|>"
TAGS = (START,)


def granite_parser() -> CallParser:
    """Return a parser for one choice."""
    return CallParser(TAGS, _read_calls)


def _read_calls(sink: PartSink, tag: str) -> Reading[str]:
    char = yield from skip_space()
    if char != "[":
        raise Malformed(char)
    return (yield from read_array(sink))
