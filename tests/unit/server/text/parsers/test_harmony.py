"""OpenAI's harmony format: channels, recipients, and whatever a model makes of them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.parsers.base import Arguments, CallStart, Reasoning
from server.text.parsers.harmony import TAGS, HarmonyParser
from tests.support import parsing
from tests.support.call_forms import CALLS, PLACES
from tests.support.parsing import TOOLS, Answer, cut
from tests.unit.server.text.parsers import test_parsers

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"


def parse(pieces, *, tools=TOOLS, is_open=False) -> Answer:
    return parsing.parse(pieces, "harmony", tools=tools, is_reasoning=is_open)


# rule: Tools and reasoning: Harmony's channels are reasoning and text, and messages to tools are calls
def test_channels_are_reasoning_and_text():
    assert parse([f"{ANALYSIS}Hm.{NEXT}{FINAL}Hi, *you*.\n<|return|>"]) == Answer("Hm.", "Hi, *you*.\n", [])
    assert parse([f"{FINAL}Hi"]) == Answer("", "Hi", [])
    assert parse([f"{ANALYSIS}Hm"]) == Answer("Hm", "", [])
    assert parse(["Hm.", f"{NEXT}{FINAL}Hi"], is_open=True) == Answer("Hm.", "Hi", [])
    two = f"{ANALYSIS} a\n{NEXT}{ANALYSIS}b{NEXT}<|channel|>commentary<|message|>c{NEXT}{FINAL}d"
    assert parse([two]) == Answer("a\nb", "c\nd", [])


# rule: Tools and reasoning: Harmony's channels are reasoning and text, and messages to tools are calls
@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.now<|message|>",
        "<|channel|>commentary to=functions.now json<|message|>",
        "<|channel|>analysis to=functions.now code<|message|>",
        " to=functions.now<|channel|>commentary <|constrain|>json<|message|>",
        " to=functions.now<|channel|>analysis<|message|>",
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=now <|constrain|>json<|message|>",
        "<|channel|>commentary to=tools.now <|constrain|>json<|message|>",
    ],
)
def test_a_message_to_a_tool_is_a_call(header):
    for end in ("<|call|>", "<|end|>", ""):
        assert parse(f'{header}{{"a": "x"}}{end}') == Answer("", "", [("now", '{"a": "x"}')])
    said = f"{ANALYSIS}Hm.{NEXT}<|channel|>commentary<|message|>Let me see.{NEXT}"
    text = f"{said}{header.removeprefix('<|start|>assistant')}{{}}"
    assert parse([text]) == Answer("Hm.", "Let me see.", [("now", "{}")])


def test_arguments_are_streamed_and_empty_ones_are_an_object():
    parser = HarmonyParser({"now"}, is_open=False)
    assert parser.push("<|channel|>commentary to=functions.now<|message|>") == [CallStart("now")]
    assert parser.push('{"a": "b') == [Arguments('{"a": "b')]
    assert parser.push('\n"}<|') == [Arguments('\\n"}')]
    assert parser.push("call|>") == []
    assert parse(["<|channel|>commentary to=functions.now<|message|> <|call|>"]).calls == [("now", "{}")]
    unknown = "<|channel|>commentary to=functions.later<|message|>{}"
    assert parse([unknown]).calls == [("later", "{}")]


def test_messages_to_what_is_no_tool_of_the_request_are_reasoning():
    code = "<|channel|>analysis to=python code<|message|>print(1)<|call|>"
    assert parse([code]) == Answer("print(1)", "", [])
    call = "<|channel|>commentary to=functions.now<|message|>{}<|call|>"
    assert parse([call], tools=()) == Answer("{}", "", [])
    assert parse([f"<|channel|>commentary to=browser.search<|message|>q{NEXT}{FINAL}a"]) == Answer("q", "a", [])
    back = "<|channel|>commentary to=assistant<|message|>x"
    assert parse([back]) == Answer("", "x", [])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("Just text", "Just text"),
        (" to=now", " to=now"),
        ("assistance", "assistance"),
        ("to=functions.now says", "to=functions.now says"),
        ("<|channel|>fin\nal<|message|>x", "<|channel|>fin\nal<|message|>x"),
        (f"<|channel|>{'x' * 600}", f"<|channel|>{'x' * 600}"),
        ("<|channel|>final<|start|>x", "<|channel|>final"),
        ("<|channel|>final<|end|>x", "<|channel|>final\nx"),
        (f"{FINAL}a<|end|>b{FINAL}c", "a\nb\nc"),
        (f"{FINAL}a<|end|>assistant{FINAL}c", "a\nc"),
        (f"{FINAL}a <|mess", "a <|mess"),
        (f"{FINAL}a<|channel|>final", "a"),
    ],
)
def test_what_is_no_header_is_text(text, shown):
    assert parse([text]) == parse(text) == Answer("", shown, [])


@given(calls=st.lists(CALLS, min_size=1, max_size=3), thoughts=st.sampled_from(["", "I need <|it"]))
def test_calls_come_out_as_they_were_written(calls, thoughts):
    head = f"{ANALYSIS}{thoughts}{NEXT}" if thoughts else ""
    expected = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    text = head + "<|start|>assistant".join(test_parsers.written("harmony", *call) for call in calls)
    assert parse([text]) == Answer(thoughts, "", expected)


# rule: Tools and reasoning: A stream with tools joins to the whole answer, however the text is cut
@settings(deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(
            [*TAGS, "assistant", "analysis", "final", " to=functions.now", "to=python", " ", "\n", "<|", "a b"]
        )
        | CALLS.map(lambda call: test_parsers.written("harmony", *call))
        | st.text(alphabet='ab<|>"\\{} to=\n', max_size=8),
        max_size=14,
    ),
    places=PLACES,
    is_open=st.booleans(),
)
def test_the_cut_of_a_text_changes_nothing(pieces, places, is_open):
    text = "".join(pieces)
    whole = parse([text], is_open=is_open)
    assert parse(text, is_open=is_open) == whole
    assert parse(cut(text, places), is_open=is_open) == whole


@given(
    st.lists(
        st.sampled_from([ANALYSIS, FINAL, "<|end|>", "<|start|>assistant", "<|start|>", "<|message|>"]), max_size=9
    )
)
def test_no_text_is_lost(tags):
    text = "".join(f"{tag}#{i}#" for i, tag in enumerate(tags))
    answer = parse([text])
    everything = answer.reasoning + answer.text
    assert all(everything.count(f"#{i}#") == 1 for i in range(len(tags)))


def test_reasoning_says_so():
    parser = HarmonyParser(set(), is_open=False)
    assert parser.push(ANALYSIS) == []
    assert parser.is_reasoning
    assert parser.push("a") == [Reasoning("a")]
    parser.push("<|end|>")
    assert not parser.is_reasoning
