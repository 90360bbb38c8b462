"""Reasoning and tool calls in a model's text: every form, any cut, nothing lost."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.parsers.base import Arguments, CallStart
from server.text.parsers.formats import hermes_parser
from tests.support.call_forms import (
    CALLS,
    FORMS,
    JSON_FORMS,
    JUNK,
    MALFORMED,
    PLACES,
    WORDS,
    XML_FORMS,
    with_junk,
    written,
)
from tests.support.parsing import Answer, cut, parse


@settings(deadline=None)
@given(
    form=st.sampled_from(FORMS),
    pieces=st.lists(WORDS | CALLS | st.tuples(CALLS, st.sampled_from(JUNK)) | st.integers(0, 99), max_size=6),
    has_reasoning=st.booleans(),
    places=PLACES,
)
def test_the_cut_of_a_text_changes_nothing(form, pieces, has_reasoning, places):
    """Reasoning, words, calls, malformed calls, in any order and cut anywhere."""
    text = "<think>\nhm </thin\n</think>\n\n" if has_reasoning else ""
    for piece in pieces:
        match piece:
            case str():
                text += piece
            case int():
                text += MALFORMED[form][piece % len(MALFORMED[form])]
            case (tuple(call), junk):
                text += with_junk(form, *call, junk)
            case _:
                text += written(form, *piece)
    whole = parse([text], form)
    assert parse(text, form) == whole  # one character at a time
    assert parse(cut(text, places), form) == whole


# rule: Tools and reasoning: A stream with tools joins to the whole answer, however the text is cut
@settings(deadline=None)
@given(
    form=st.sampled_from([*FORMS, "harmony"]),
    calls=st.lists(CALLS, min_size=1, max_size=2),
    edits=st.lists(
        st.tuples(st.integers(0, 400), st.integers(0, 3), st.text(alphabet="()[]{}<|>\"'\\,:=\n aN0-`/_", max_size=2)),
        min_size=1,
        max_size=4,
    ),
    places=PLACES,
)
def test_spoilt_calls_end_nothing_and_depend_on_no_cut(form, calls, edits, places):
    text = "".join(written(form, *call) for call in calls)
    for place, num_gone, added in edits:
        at = place % (len(text) + 1)
        text = text[:at] + added + text[at + num_gone :]
    whole = parse([text], form)
    assert parse(text, form) == whole
    assert parse(cut(text, places), form) == whole
    for _, arguments in whole.calls:
        arguments.encode()  # no half of a character


@given(
    form=st.sampled_from(FORMS), pieces=st.lists(CALLS | st.integers(0, 99), max_size=6), has_reasoning=st.booleans()
)
def test_nothing_between_calls_is_lost(form, pieces, has_reasoning):
    """Marks between calls and malformed calls come out once each, in their order, wherever they end up."""
    text = "<think>#r#</think>" if has_reasoning else ""
    for i, piece in enumerate(pieces):
        malformed = MALFORMED[form][piece % len(MALFORMED[form])] if isinstance(piece, int) else None
        text += f"#{i}#" + (malformed if malformed is not None else written(form, *piece))
    answer = parse(text + "#end#", form)
    marks = [f"#{mark}#" for mark in [*range(len(pieces)), "end"]]
    found = [mark for mark in marks if mark in answer.text]
    assert answer.reasoning == ("#r#" if has_reasoning else "")
    assert all((answer.text + "".join(call[1] for call in answer.calls)).count(mark) == 1 for mark in marks)
    assert found == sorted(found, key=answer.text.index)


# rule: Tools and reasoning: Calls in the forms of Hermes, Qwen's XML, Llama 3's JSON and Mistral are parsed, and
#     think tags
@given(form=st.sampled_from(JSON_FORMS), calls=st.lists(CALLS, min_size=1, max_size=3), data=st.data())
def test_calls_come_out_as_they_were_written(form, calls, data):
    """Arguments are the model's own characters."""
    before = data.draw(st.sampled_from(["", "Let me see.\n"]))
    reasoning = data.draw(st.sampled_from(["", "I need <tool_call> it"]))
    text = f"<think>\n{reasoning}\n</think>\n\n{before}" + "\n".join(written(form, *call) for call in calls)
    expected = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    assert parse(text, form) == Answer(reasoning, before.strip() if before else "", expected)


@given(text=st.text(alphabet="ab <|think>/\n", max_size=60), places=PLACES)
def test_text_without_calls_is_kept_to_the_letter(text, places):
    answer = parse(cut(text, places), "hermes")
    if not text.lstrip().startswith("<think>"):
        assert answer == Answer("", text, [])


@pytest.mark.parametrize("form", FORMS)
def test_a_malformed_call_is_text(form):
    for malformed in MALFORMED[form]:
        answer = parse(f"a {malformed} b", form)
        if '"f" }' in malformed:  # its first call is well-formed
            assert answer == Answer("", "a , {}] b", [("f", "{}")])
        else:
            assert answer == Answer("", f"a {malformed} b", [])


def test_a_good_call_after_a_malformed_one_is_a_call():
    text = 'x<tool_call>{"name"<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert parse(text, "hermes") == Answer("", 'x<tool_call>{"name"', [("now", "{}")])


@settings(deadline=None)
@given(
    call=CALLS,
    junk=st.sampled_from(JUNK) | WORDS.filter(lambda text: "tool_call>" not in text),
    after=st.sampled_from(["", " tail", "\n#</tool_call>", '\n<tool_call>{"name"</tool_call>']),
    places=PLACES,
)
@pytest.mark.parametrize("form", ["hermes", "qwen_xml", "seed", "minimax", "dsml"])
def test_what_stands_between_arguments_and_the_closing_tag_is_text_without_the_tag(form, call, junk, after, places):
    """One closing tag belongs to the call; a second one, and that of a malformed call, stay."""
    text = with_junk(form, call[0], call[1] if form == "hermes" else {}, f"#{junk}#")
    if form in XML_FORMS:
        after = after.replace("</tool_call>", XML_FORMS[form].end)
    answer = parse(cut(f"{text}{after}", places), form)
    expected = [(call[0], json.dumps(call[1], ensure_ascii=False) if form == "hermes" else "{}")]
    assert answer == Answer("", f"#{junk}#\n{after}", expected)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('"arguments": {"a": 1} junk</tool_call> tail', "junk tail"),
        ('"arguments": {"a": 1}} junk</tool_call> tail', "junk tail"),
        ('"arguments": {"a": 1}, "x": !junk}\n</tool_call>', "!junk}\n"),
        ('"arguments": {"a": 1}} and </tool', "and </tool"),
        ('"arguments": {"a": 1}} <tool_call>{} </tool_call>', "<tool_call>{} </tool_call>"),
    ],
)
def test_junk_after_a_calls_arguments(text, shown):
    whole = f'<tool_call>{{"name": "f", {text}'
    assert parse([whole], "hermes") == parse(whole, "hermes") == Answer("", shown, [("f", '{"a": 1}')])


def test_arguments_are_streamed_as_they_come():
    parser = hermes_parser()
    assert parser.push('<tool_call>\n{"name": "now", "argum') == []
    assert parser.push('ents": {"a": "b') == [CallStart("now"), Arguments('{"a": "b')]
    assert parser.push("c") == [Arguments("c")]
    assert parser.push('"}}</tool_call>') == [Arguments('"}')]


def test_reasoning_ends_at_its_tag_and_leaks_nothing():
    assert parse("<think>\na</think>\n\nb", "hermes") == Answer("a", "b", [])
    assert parse(" \n<think>a b\n\n</think>b", None) == Answer("a b", "b", [])
    assert parse("a\n</think>\n\nb</think>", None, is_reasoning=True) == Answer("a", "b</think>", [])
    assert parse("<think>a </thi", None) == Answer("a </thi", "", [])
    assert parse("<think>\n\n</think>\n\n", None) == Answer("", "", [])
    assert parse("b <think>a</think>", None) == Answer("", "b <think>a</think>", [])
    assert parse('<think><tool_call>{"name": "now"}</tool_call></think>', "hermes").calls == []


def test_without_tools_a_call_is_text():
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert parse(text, "hermes", tools=()) == Answer("", text, [])
