"""Llama 3's format: {"name": …, "parameters": {…}} as the whole answer, or after <|python_tag|>; separated by ;.

Without the tag, only an object that begins the answer and names a tool of the request is a call, because the client
may have asked for JSON. Text after <|python_tag|> that is no such object (code for built-in tools) stays text.
"""

from collections.abc import Collection

from server.text.parsers.base import PartSink
from server.text.parsers.json_call import JsonCallReader
from server.text.parsers.tool_calls import CallParser, Reading, copy_rest, skip_space

START = "<|python_tag|>"
TAGS = (START,)
_BARE = "{"
_KEYS = ("name", "parameters", "arguments", "type", "id")
_SEPARATORS = (";", ",")


def llama3_parser(names: Collection[str]) -> CallParser:
    """Return a parser for one choice. `names`: the request's tools."""

    def read_calls(sink: PartSink, tag: str) -> Reading[str]:
        is_bare = tag == _BARE
        char = tag if is_bare else (yield from skip_space())
        while True:
            reader = JsonCallReader(sink, names=names if is_bare else None, keys=_KEYS if is_bare else None)
            char = yield from reader.read(char)
            if reader.is_broken:
                return (yield from copy_rest(char, sink.arguments))
            sink.release()
            char = char or (yield)
            while char.isspace() or char in _SEPARATORS:
                char = yield
            if char != _BARE:
                return char

    return CallParser(TAGS, read_calls, bare=_BARE)
