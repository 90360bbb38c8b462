"""Mistral's formats: [TOOL_CALLS] [{"name": …, "arguments": {…}}, …], and since v11 [TOOL_CALLS]name[ARGS]{…} per
call, with [CALL_ID]… before [ARGS] or without either of the two.
"""

import re

from server.text.parsers.base import PartSink
from server.text.parsers.json_call import JsonCallReader
from server.text.parsers.tool_calls import CallParser, Malformed, Reading, copy_rest, skip_space

START, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
TAGS = (START, CALL_ID, ARGS)
_MAX_HEAD_CHARS = 256
_HEAD_CHAR = re.compile(r"[\w.:\-\[\] ]")
_NAME = re.compile(r"[\w.:\-]+")


def mistral_parser() -> CallParser:
    """Return a parser for one choice."""
    return CallParser((START,), _read_calls)


def _read_calls(sink: PartSink, tag: str) -> Reading[str]:
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
    name = head.partition(ARGS)[0].partition(CALL_ID)[0].strip()
    if not _NAME.fullmatch(name):
        raise Malformed(char)
    return name
