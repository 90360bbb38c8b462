"""Formats with a tag for each parameter, whose values are unquoted:

Qwen3-Coder   <tool_call> <function=NAME> <parameter=KEY> VALUE </parameter> … </function> </tool_call>
Seed-OSS      <seed:tool_call> the same </seed:tool_call>
MiniMax-M2    <minimax:tool_call> <invoke name="NAME"> <parameter name="KEY">VALUE</parameter> … </invoke> …
              </minimax:tool_call>
GLM 4.5 on    <tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> … </tool_call>
DeepSeek V3.2 <｜DSML｜function_calls> <｜DSML｜invoke name="NAME"> <｜DSML｜parameter name="KEY" string="true">VALUE
              </｜DSML｜parameter> … </｜DSML｜invoke> … </｜DSML｜function_calls>
              VALUE is JSON if string="false"; V4 has tool_calls in place of function_calls

A string by the schema is emitted as it arrives; another value once it is complete, as JSON if it parses to one of the
schema's types, else as a string. A list or a dict may be Python's, as some models write them.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from server.text.parsers.base import PartSink
from server.text.parsers.formats import HERMES_END, HERMES_START, read_end
from server.text.parsers.literals import Emit, literal_json
from server.text.parsers.tool_calls import (
    CallParser,
    Malformed,
    Reading,
    copy_until,
    read_name,
    read_one_of,
    read_tag,
    skip_space,
)
from server.text.parsers.typed_values import STRING, Properties, Schema, parsed, quoted, typed_json

_MAX_NAME_CHARS = 256
TYPE, IS_TEXT, IS_JSON = '" string="', 'true">', 'false">'  # of a parameter
_NAME_CHAR = re.compile(r"[\w.:\-]")


class XmlForm(NamedTuple):
    """The tags of one format."""

    start: str
    end: str
    function: str  # begins a function; its name follows
    parameter: str  # begins a parameter; its name follows
    name_end: str  # ends a name
    function_end: str
    parameter_end: str = "</parameter>"
    value_start: str = ""  # between a parameter's name and its value
    is_padded: bool = False  # a newline on each side of a value
    is_shared: bool = False  # one start for several functions
    says_type: bool = False  # a parameter's name is followed by whether its value is a string
    token: str = ""  # what may be a token within each tag

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags that may be tokens."""
        if self.token:
            return (self.token,)
        inner = (self.parameter, self.name_end, self.value_start, self.parameter_end) if self.value_start else ()
        return (self.start, self.end, *inner)

    def parameter_head(self, name: str, *, is_string: bool) -> str:
        """Return what stands before the value, or before value_start."""
        kind = IS_TEXT if is_string else IS_JSON
        return f"{self.parameter}{name}{f'{TYPE}{kind}' if self.says_type else self.name_end}"


QWEN = XmlForm(HERMES_START, HERMES_END, "<function=", "<parameter=", ">", "</function>", is_padded=True)
SEED = QWEN._replace(start="<seed:tool_call>", end="</seed:tool_call>", is_padded=False)
MINIMAX = XmlForm(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    '<invoke name="',
    '<parameter name="',
    '">',
    "</invoke>",
    is_shared=True,
)
GLM = XmlForm(
    HERMES_START,
    HERMES_END,
    "",
    "<arg_key>",
    "</arg_key>",
    HERMES_END,
    parameter_end="</arg_value>",
    value_start="<arg_value>",
)
DSML = XmlForm(
    "<｜DSML｜function_calls>",
    "</｜DSML｜function_calls>",
    '<｜DSML｜invoke name="',
    '<｜DSML｜parameter name="',
    '">',
    "</｜DSML｜invoke>",
    parameter_end="</｜DSML｜parameter>",
    is_shared=True,
    says_type=True,
    token="｜DSML｜",
)
DSML_V4 = DSML._replace(start="<｜DSML｜tool_calls>", end="</｜DSML｜tool_calls>")


def xml_parser(form: XmlForm, schemas: Mapping[str, Schema]) -> CallParser:
    """Return a parser for one choice. `schemas`: the parameters of each tool of the request."""

    def read_calls(sink: PartSink, tag: str) -> Reading[str]:
        if tag == form.start:
            yield from read_tag(form.function)
        rest = yield from _read_function(sink, form, schemas)
        if rest or tag != form.start:
            return rest
        if not form.is_shared:
            return (yield from read_end(form.end, ""))
        while not rest:
            sink.release()
            found, seen = yield from read_one_of((form.function, form.end))
            if found != form.function:
                return seen
            try:
                rest = yield from _read_function(sink, form, schemas)
            except Malformed as fault:
                return found + fault.unread
        return rest

    return CallParser((form.start, form.function), read_calls, ends=(form.function_end, form.end))


def glm_parser(schemas: Mapping[str, Schema]) -> CallParser:
    """Return a parser for one choice."""

    def read_call(sink: PartSink, tag: str) -> Reading[str]:
        name, char = "", (yield from skip_space())
        while _NAME_CHAR.fullmatch(char) and len(name) < _MAX_NAME_CHARS:
            name, char = name + char, (yield)
        if char.isspace():
            char = yield from skip_space()
        if not name or char != "<":
            raise Malformed(char)
        return (yield from _read_body(sink, GLM, name, schemas, seen=char))

    return CallParser((GLM.start,), read_call, ends=(GLM.end,))


def _read_function(sink: PartSink, form: XmlForm, schemas: Mapping[str, Schema]) -> Reading[str]:
    name = yield from read_name(form.name_end)
    return (yield from _read_body(sink, form, name, schemas))


def _read_body(
    sink: PartSink, form: XmlForm, name: str, schemas: Mapping[str, Schema], *, seen: str = ""
) -> Reading[str]:
    """Read up to the function's end; return the text found instead of it, if any. `seen`: what was read of it."""
    sink.start(name)
    sink.arguments("{")
    rest = yield from _read_parameters(sink.arguments, form, Properties(schemas.get(name, {})), seen=seen)
    sink.arguments("}")
    return rest


def _read_parameters(emit: Emit, form: XmlForm, properties: Properties, *, seen: str) -> Reading[str]:
    separator = ""
    while True:
        found, seen = yield from read_one_of((form.parameter, form.function_end), seen=seen)
        if found != form.parameter:
            return seen
        try:
            key = yield from read_name(TYPE if form.says_type else form.name_end)
            kind, seen = (yield from read_one_of((IS_TEXT, IS_JSON))) if form.says_type else ("", "")
            if seen:
                raise Malformed(seen)
            if form.value_start:
                yield from read_tag(form.value_start)
        except Malformed as fault:
            return found + fault.unread
        emit(f"{separator}{quoted(key)}: ")
        separator, seen = ", ", ""
        if kind == IS_JSON:
            yield from _read_json(form.parameter_end, emit)
            continue
        types = STRING if kind == IS_TEXT else properties.types(key)
        yield from _read_value(types, form.parameter_end, emit, is_padded=form.is_padded)


def _read_value(types: set[str], end: str, emit: Emit, *, is_padded: bool) -> Reading[None]:
    """Read up to `end` and emit JSON. `is_padded`: a newline next to the value's tags belongs to them."""
    if types <= STRING:
        yield from _stream_string(end, emit, is_padded=is_padded)
        return
    value = yield from _read_whole(end, emit)
    value = value.removeprefix("\n").removesuffix("\n") if is_padded else value
    literal = literal_json(value) if types.isdisjoint(STRING) and not parsed(value)[1] else None
    emit(literal if literal is not None and parsed(literal)[1] & types else typed_json(value, types))


def _read_json(end: str, emit: Emit) -> Reading[None]:
    """Read up to `end` and emit what is read, if it is JSON, else a string of it."""
    value = yield from _read_whole(end, emit)
    text, kinds = parsed(value)
    emit(text if kinds else quoted(value))


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
