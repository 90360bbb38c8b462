"""Reasoning and tool calls in a model's text: every form, any cut, nothing lost."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.parsers.base import Arguments, CallStart
from server.text.parsers.formats import hermes_parser
from tests.support.parsing import Answer, cut, parse

PLACES = st.lists(st.integers(0, 400), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["city", 'q"', "<tool_call>", "ü", "{"]), VALUES, max_size=3)
CALLS = st.tuples(st.sampled_from(["get_weather", "now"]), ARGUMENTS)
WORDS = st.text(alphabet='ab<>/[]{}"\\;: \n</tool_call>é', max_size=12)  # what tags and calls are made of, mostly
FORMS = ["hermes", "qwen_xml", "llama3", "mistral", "mistral_args", "granite"]
# text that looks like a call, and is none
MALFORMED = {
    "hermes": ["<tool_call>", "<tool_call>{}", '<tool_call>{"name": 3}', "<tool_call>[1]</tool_call>", "<tool_",
               "</tool_call>",
               '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', '<tool_call>{"name": "f" "arguments": {}}',
               '<tool_call>{"name": "", "arguments": {}}', '<tool_call>{"arguments": {"a": 1]',
               "<tool_call>hi</tool_call>"],
    "qwen_xml": ["<tool_call>", "<tool_call><function>", "<tool_call>{}", "<function=\n>", "<function=>", "<func",
                 "<parameter=a>1</parameter>", "</tool_call>"],
    "llama3": ["<|python_tag|>print(1)", "<|python_tag|>{}", '<|python_tag|>{"name": 1}', "<|python_",
               "<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS] [", "[TOOL_CALLS]{}", "[TOOL_CALLS]?{}", "[TOOL_CALLS] [1]", "[TOOL_",
                "[TOOL_CALLS][ARGS]{}", '[TOOL_CALLS]{"name": 1}', "[ARGS]{}", '[TOOL_CALLS] [{"name": "f" }, {}]'],
}  # fmt: skip
# what may stand between a call's arguments and its closing tag
JUNK = ["junk", " } junk", ", junk}", "]", "<", "</tool_", "<tool", "</", ".</tool_calls>"]
MALFORMED["mistral_args"] = MALFORMED["mistral"]
MALFORMED["granite"] = ["<|tool_call|>", "<|tool_call|>x", '<|tool_call|>[{"name"}]', "<|tool_call|>{}", "<|tool_"]


def written(form: str, name: str, arguments: dict) -> str:
    """A call as a model writes it."""
    text = json.dumps(arguments, ensure_ascii=False)
    match form:
        case "hermes":
            return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'
        case "llama3":
            return f'<|python_tag|>{{"name": "{name}", "parameters": {text}}}'
        case "mistral":
            return f'[TOOL_CALLS] [{{"name": "{name}", "arguments": {text}, "id": "123456789"}}]'
        case "granite":
            return f'<|tool_call|>[{{"name": "{name}", "arguments": {text}}}]'
        case "mistral_args":
            return f"[TOOL_CALLS]{name}[ARGS]{text}"
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def with_junk(form: str, name: str, arguments: dict, junk: str) -> str:
    """A call with something between its arguments and what closes it."""
    text = written(form, name, arguments)
    head, end = {"hermes": ("}", "}\n</tool_call>"), "qwen_xml": ("", "</function>\n</tool_call>")}.get(form, ("", ""))
    return text.removesuffix(end) + junk + end.removeprefix(head)


# rule: Tools and reasoning: A stream with tools joins to the whole answer, however the text is cut
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
@given(form=st.sampled_from(FORMS[:1] + FORMS[2:]), calls=st.lists(CALLS, min_size=1, max_size=3), data=st.data())
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
@pytest.mark.parametrize("form", ["hermes", "qwen_xml"])
def test_what_stands_between_arguments_and_the_closing_tag_is_text_without_the_tag(form, call, junk, after, places):
    """One closing tag belongs to the call; a second one, and that of a malformed call, stay."""
    text = with_junk(form, call[0], call[1] if form == "hermes" else {}, f"#{junk}#")
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


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "now"}', '{"a": 1}'),
        ('{"name": "now"}', "{}"),
        ('{"name": "now", "arguments": null}', "{}"),
        ('{"name": "now", "arguments": ""}', "{}"),
        ('{"name": "now", "arguments": "{\\"a\\": \\"\\u00fc\\"}"}', '{"a": "ü"}'),
        ('{"name": "now", "arguments": "{\\"a\\": \\"\\ud800\\"}"}', '{"a": "\\ud800"}'),
        ('{"id": [{"x": "}"}], "name": "now", "parameters": {"a": "\n\t"}}', '{"a": "\\n\\t"}'),
        ('{"name": "now", "arguments": {"a": 1}', '{"a": 1}'),
        ('{"name": "now", "arguments": {"a": 1}}}}', '{"a": 1}'),
        ('{"name": "now", "arguments": {"a": "</tool_call>"}}', '{"a": "</tool_call>"}'),
        ('{"name": "now", "arguments": {"a": [1}}', '{"a": [1}}'),  # broken: all that the model wrote
        ('{"name": "now", "arguments": {"a": tru', '{"a": tru'),
    ],
)
def test_what_models_make_of_hermes(body, arguments):
    for text in (f"<tool_call>\n{body}\n</tool_call>", f"<tool_call>{body}</tool_call>bye"):
        answer = parse(text, "hermes")
        assert [(name, text.strip()) for name, text in answer.calls] == [("now", arguments)]
        assert answer.text == ("bye" if text.endswith("bye") else "")


def test_a_call_that_is_cut_off_keeps_what_there_was():
    text = '<tool_call>\n{"name": "now", "arguments": {"a": "b'
    assert parse(text, "hermes").calls == [("now", '{"a": "b')]
    for length in range(len(text) - 8):
        assert parse(text[:length], "hermes") == Answer("", text[:length] if text[:length].strip() else "", [])


# rule: Tools and reasoning: Calls in the forms of Hermes, Qwen's XML, Llama 3's JSON and Mistral are parsed, and
#     think tags
def test_llamas_bare_object_is_a_call_only_if_it_begins_the_answer_and_names_a_tool():
    call = '{"name": "now", "parameters": {"a": {}}}'
    assert parse(f" {call}", "llama3") == Answer("", "", [("now", '{"a": {}}')])
    assert parse(f"{call}; {call}\n", "llama3").calls == [("now", '{"a": {}}')] * 2
    assert parse(f"Use {call}", "llama3") == Answer("", f"Use {call}", [])
    other = call.replace("now", "later")
    assert parse(other, "llama3") == Answer("", other, [])
    data = ' {"city": "Paris", "name": "now"} '
    assert parse(data, "llama3") == Answer("", data, [])
    assert parse(f"<|python_tag|>{other}", "llama3").calls == [("later", '{"a": {}}')]


# rule: Tools and reasoning: Calls in the forms of Hermes, Qwen's XML, Llama 3's JSON and Mistral are parsed, and
#     think tags
def test_mistrals_forms():
    two = '[TOOL_CALLS] [{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {}}]'
    assert parse(two, "mistral").calls == [("a", '{"x": 1}'), ("b", "{}")]
    new = '[TOOL_CALLS]a[CALL_ID]123[ARGS]{"x": 1}[TOOL_CALLS]b{"y": 2}'
    assert parse(f"Well. {new}", "mistral_args") == Answer("", "Well.", [("a", '{"x": 1}'), ("b", '{"y": 2}')])


# rule: Tools and reasoning: Calls in the forms of Hermes, Qwen's XML, Llama 3's JSON and Mistral are parsed, and
#     think tags
@given(
    st.fixed_dictionaries(
        {"city": st.text(alphabet='ab<"\\\n é/', max_size=10)},
        optional={
            "days": st.integers(),
            "exact": st.booleans(),
            "where": st.dictionaries(st.text(max_size=3), VALUES, max_size=2),
            "note": st.none() | st.text(alphabet="xyz", max_size=4),
        },
    ),
    PLACES,
)
def test_qwens_xml_is_typed_by_the_schema(arguments, places):
    shown = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in arguments.items()
    }
    answer = parse(cut(written("qwen_xml", "get_weather", shown), places), "qwen_xml")
    assert answer.text == ""
    ((name, text),) = answer.calls
    assert (name, json.loads(text)) == ("get_weather", arguments)


def test_qwens_xml_that_is_cut_off_or_odd():
    head = "<tool_call>\n<function=get_weather>\n"
    assert parse(f"{head}<parameter=city>\nPar", "qwen_xml").calls == [("get_weather", '{"city": "Par')]
    assert parse(f"{head}<parameter=days>\nsome\n</parameter>", "qwen_xml").calls == [
        ("get_weather", '{"days": "some"')
    ]
    assert parse(f"{head}<parameter=exact>True</parameter>\n</function>", "qwen_xml").calls == [
        ("get_weather", '{"exact": true}')
    ]
    assert parse(f"{head}oops</function>", "qwen_xml") == Answer("", "oops", [("get_weather", "{}")])
    assert parse("<function=now></function>bye", "qwen_xml") == Answer("", "bye", [("now", "{}")])


# rule: Streams: Reasoning has both names, and none of it is in the content
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
