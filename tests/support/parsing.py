"""Feeding parsers in tests: any cut of a text, and what came out of it joined."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from server.text.parsers.base import Arguments, CallStart, Part, Reasoning, Text, ToolSpec
from server.text.parsers.detect import ChatFormat, make_parser
from server.text.parsers.harmony import REASONING
from server.text.parsers.reasoning import ReasoningTags

THINK = ReasoningTags("<think>", "</think>")
WEATHER = ToolSpec(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "where": {"type": "object"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["city"],
    },
)
TOOLS = (WEATHER, ToolSpec("now", {"type": "object", "properties": {}}))


def format_of(form: str | None) -> ChatFormat:
    """A model's format with these tool calls; its reasoning is in think tags, but for harmony."""
    is_harmony = form == "harmony"
    reasoning = REASONING if is_harmony else THINK
    return ChatFormat(tools=form, reasoning=reasoning, is_harmony=is_harmony, takes_tools=True)


class Answer(NamedTuple):
    """All parts of one kind, joined; each call with its arguments."""

    reasoning: str
    text: str
    calls: list[tuple[str, str]]


def parse(
    pieces: Iterable[str], form: str | None, *, tools: Sequence[ToolSpec] = TOOLS, is_reasoning: bool = False
) -> Answer:
    """Feed a fresh parser piece by piece."""
    parser = make_parser(format_of(form), tools=tools, is_reasoning=is_reasoning)
    assert parser is not None
    return join([part for piece in pieces for part in parser.push(piece)] + parser.finish())


def join(parts: Iterable[Part]) -> Answer:
    reasoning, text, calls = "", "", []
    for part in parts:
        match part:
            case Reasoning():
                reasoning += part.text
            case Text():
                text += part.text
            case CallStart():
                calls.append((part.name, ""))
            case Arguments():
                calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return Answer(reasoning, text, calls)


def cut(text: str, places: Sequence[int]) -> list[str]:
    """Cut a text at the given places, as far as it has them."""
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(ends)]
