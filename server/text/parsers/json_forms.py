"""Formats whose arguments are JSON between tags of their own:

Hunyuan          <tool_calls>[{"name": …, "arguments": {…}}, …]</tool_calls>, or objects without the brackets
Nemotron Nano 2  <TOOLCALL>[{"name": …, "arguments": {…}}, …]</TOOLCALL>
Command A, R7B   <|START_ACTION|>[{"tool_call_id": "0", "tool_name": …, "parameters": {…}}, …]<|END_ACTION|>
Apertus          <|tools_prefix|>[{"NAME": {…}}, …]<|tools_suffix|>
Kimi K2          <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}
                 <|tool_call_end|>…<|tool_calls_section_end|>
DeepSeek V3, R1  <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, then {…} as a block of Markdown,
                 <｜tool▁call▁end｜>…<｜tool▁calls▁end｜>; V3.1: NAME<｜tool▁sep｜>{…}
GLM-4-0414       NAME, and {…} on the next line, as the whole answer
"""

import re
from collections.abc import Callable, Collection
from typing import NamedTuple

from server.text.parsers.base import PartSink
from server.text.parsers.formats import read_array, read_end
from server.text.parsers.json_call import JsonCallReader, read_string
from server.text.parsers.tool_calls import (
    CallParser,
    Malformed,
    Reading,
    copy_rest,
    copy_until,
    read_name,
    read_one_of,
    skip_space,
)


class ArrayForm(NamedTuple):
    """The tags around an array of calls."""

    start: str
    end: str


HUNYUAN = ArrayForm("<tool_calls>", "</tool_calls>")
NEMOTRON = ArrayForm("<TOOLCALL>", "</TOOLCALL>")
COHERE = ArrayForm("<|START_ACTION|>", "<|END_ACTION|>")
APERTUS = ArrayForm("<|tools_prefix|>", "<|tools_suffix|>")


def array_parser(form: ArrayForm) -> CallParser:
    """Return a parser for one choice."""

    def read_calls(sink: PartSink, tag: str) -> Reading[str]:
        char = yield from skip_space()
        if char == "[":
            yield from read_array(sink)
            return (yield from read_end(form.end, ""))
        if char != "{":
            raise Malformed(char)
        while char == "{":
            reader = JsonCallReader(sink)
            char = yield from reader.read(char)
            if reader.is_broken:
                return (yield from copy_rest(char, sink.arguments))
            sink.release()
            if not char or char.isspace():
                char = yield from skip_space()
        return (yield from read_end(form.end, char))

    return CallParser((form.start,), read_calls, ends=(form.end,))


def apertus_parser() -> CallParser:
    """Return a parser for one choice."""

    def read_calls(sink: PartSink, tag: str) -> Reading[str]:
        _expect((yield from skip_space()), "[")
        while True:
            _expect((yield from skip_space()), "{")
            _expect((yield from skip_space()), '"')
            name = yield from read_string()
            char = yield from skip_space()
            if not name or not name.isprintable() or char != ":":
                raise Malformed(char)
            reader = JsonCallReader(sink)
            char = yield from reader.read_arguments(name, (yield from skip_space()))
            if reader.is_broken:
                return (yield from copy_rest(char, sink.arguments))
            if char != "}":
                return char
            sink.release()
            char = yield from skip_space()
            if char == "]":
                return (yield from read_end(APERTUS.end, ""))
            _expect(char, ",")

    return CallParser((APERTUS.start,), read_calls, ends=(APERTUS.end,))


class SectionForm(NamedTuple):
    """The tags of calls that have one each, within a section."""

    start: str
    end: str
    call: str
    call_end: str
    separator: str  # between the head, which has the name, and the arguments

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags that may be tokens."""
        return tuple(self)


KIMI = SectionForm(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)
DEEPSEEK = SectionForm(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
KIMI_NAMESPACE = "functions."
DEEPSEEK_KIND, FENCE = "function", "```"
_KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")
_FENCE_START = re.compile(r"(`{0,3}|```[a-z]*)\s*")
_NAME_CHAR = re.compile(r"[\w.:\-]")
_MAX_NAME_CHARS = 256

ReadHead = Callable[[], Reading[tuple[str, str]]]  # → the name, and the first character of the arguments


def section_parser(form: SectionForm) -> CallParser:
    """Return a parser for one choice."""
    read_head = _read_kimi_head if form is KIMI else _read_deepseek_head

    def read_calls(sink: PartSink, tag: str) -> Reading[str]:
        if tag == form.start:
            found, seen = yield from read_one_of((form.call,))
            if not found:
                raise Malformed(seen)
        while True:
            name, char = yield from read_head()
            reader = JsonCallReader(sink)
            char = yield from reader.read_arguments(name, char)
            if reader.is_broken:
                return (yield from copy_until(form.call_end, char, sink.arguments))
            while char == "`" or char.isspace():
                char = yield
            rest = yield from read_end(form.call_end, char)
            if rest or tag == form.call:
                return rest
            sink.release()
            found, seen = yield from read_one_of((form.call, form.end))
            if found != form.call:
                return seen

    return CallParser((form.start, form.call), read_calls, ends=(form.call_end, form.end))


def _read_kimi_head() -> Reading[tuple[str, str]]:
    head = yield from read_name(KIMI.separator)
    found = _KIMI_ID.fullmatch(head)
    assert found is not None
    return found[1], (yield from skip_space())


def _read_deepseek_head() -> Reading[tuple[str, str]]:
    name = yield from read_name(DEEPSEEK.separator)
    char = yield from skip_space()
    if char == "{":
        return name, char
    name = ""
    while _NAME_CHAR.fullmatch(char) and len(name) < _MAX_NAME_CHARS:
        name, char = name + char, (yield)
    if char != "\n" or not name:
        raise Malformed(char)
    fence, char = "", (yield)
    while char != "{":
        fence += char
        if not _FENCE_START.fullmatch(fence.lstrip()) or not char:
            raise Malformed(char)
        char = yield
    return name, char


def glm4_parser(names: Collection[str]) -> CallParser:
    """Return a parser for one choice. `names`: the request's tools."""

    def read_calls(sink: PartSink, char: str) -> Reading[str]:
        while True:
            name = ""
            while char != "\n":
                name += char
                if not any(known.startswith(name) for known in names):
                    raise Malformed(char)
                char = yield
            if name not in names:
                raise Malformed(char)
            char = yield from skip_space()
            if char != "{":
                raise Malformed(char)
            reader = JsonCallReader(sink)
            char = yield from reader.read_arguments(name, char)
            if reader.is_broken:
                return (yield from copy_rest(char, sink.arguments))
            sink.release()
            sink.keep(char)  # it was read while the call was committed

    return CallParser((), read_calls, bare=tuple({name[0] for name in names}))


def _expect(char: str, expected: str) -> None:
    if char != expected:
        raise Malformed(char)
