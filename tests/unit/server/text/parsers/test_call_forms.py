"""Tool calls in what is of one form each: oddities of models, types by schema, calls that are cut off."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.parsers.base import ToolSpec
from server.text.parsers.detect import ChatFormat, make_parser
from server.text.parsers.reasoning import ReasoningTags
from tests.support.call_forms import (
    CALLS,
    LITERAL_FORMS,
    PLACES,
    SCHEMA_FORMS,
    VALUES,
    XML_FORMS,
    written,
)
from tests.support.parsing import THINK, TOOLS, Answer, cut, join, parse


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
    st.sampled_from(list(XML_FORMS)),
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
def test_values_without_quotes_are_typed_by_the_schema_or_by_what_they_say(form, arguments, places):
    shown = arguments
    if form in SCHEMA_FORMS:
        shown = {
            key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for key, value in arguments.items()
        }
    answer = parse(cut(written(form, "get_weather", shown), places), form)
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


@pytest.mark.parametrize(
    ("written_value", "schema", "meant"),
    [
        ("['a', \"it's\"]", {"type": "array"}, ["a", "it's"]),
        ("{'a': True, \"b\": None, 'c': [1.5, -2], 'd': {}}", {"type": "object"},
         {"a": True, "b": None, "c": [1.5, -2], "d": {}}),
        ("\n(1, 2)\n", {"type": ["array", "null"]}, [1, 2]),
        ('{"a": True}', {"anyOf": [{"type": "object"}, {"type": "null"}]}, {"a": True}),
        ("['a']", {"type": ["array", "string"]}, "['a']"),  # a string by the schema, so it may be meant as it is
        ("['a']", {"type": "integer"}, "['a']"),
        ("['a'", {"type": "array"}, "['a'"),
        ("['a'] or so", {"type": "array"}, "['a'] or so"),
        ("[see above]", {"type": "array"}, "[see above]"),
        ("__import__('os')", {"type": "array"}, "__import__('os')"),
        ("[" * 99, {"type": "array"}, "[" * 99),
        ("", {"type": "array"}, ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["qwen_xml", "glm", "minimax"])
def test_a_list_or_dict_may_be_pythons_where_no_string_may_be(form, written_value, schema, meant):
    tool = ToolSpec("f", {"type": "object", "properties": {"x": schema}})
    ((_, text),) = parse(written(form, "f", {"x": written_value}), form, tools=[tool]).calls
    assert json.loads(text) == {"x": meant}


def test_glms_calls_may_have_no_newlines_and_keep_what_is_odd():
    flat = "<tool_call>get_weather<arg_key>city</arg_key><arg_value> a\n</arg_value><arg_key>days</arg_key><arg_value>"
    assert parse(f"{flat}3</arg_value></tool_call><tool_call>now</tool_call>", "glm") == Answer(
        "", "", [("get_weather", '{"city": " a\\n", "days": 3}'), ("now", "{}")]
    )
    assert parse(f"{flat}3</arg_value>oops</tool_call>bye", "glm") == Answer(
        "", "oopsbye", [("get_weather", '{"city": " a\\n", "days": 3}')]
    )
    assert parse(f"{flat}3</arg_val", "glm").calls == [("get_weather", '{"city": " a\\n", "days": 3</arg_val')]
    no_value = "<tool_call>now<arg_key>a</arg_key>x</tool_call>"
    assert parse(no_value, "glm") == Answer("", "<arg_key>x", [("now", "{}")])


def test_several_functions_in_one_tag():
    two = (
        '<invoke name="now">\n</invoke>\n<invoke name="get_weather">\n<parameter name="city">x</parameter>\n</invoke>\n'
    )
    text = f"<minimax:tool_call>\n{two}</minimax:tool_call>"
    calls = [("now", "{}"), ("get_weather", '{"city": "x"}')]
    assert parse(f"Well.{text}\nSo.", "minimax") == Answer("", "Well.\nSo.", calls)
    assert parse(text.replace("</minimax:tool_call>", "#"), "minimax") == Answer("", "#", calls)
    assert parse(text.replace('name="get', '="get'), "minimax").text.startswith('<invoke ="get')
    assert parse(text[:-20], "minimax") == Answer("", "", calls)


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"enum": [1, 2]}, "2", "2"),
        ({"enum": ["1", "2"]}, "2", '"2"'),
        ({"const": True}, "true", "true"),
        ({"$ref": "#/$defs/n"}, "3", "3"),
        ({"$ref": "#/$defs/none"}, "3", "3"),  # what it refers to may be anything
        ({"allOf": [{"$ref": "#/$defs/n"}]}, "3", "3"),
        ({"$ref": "#/$defs/loop"}, "3", '"3"'),
        ({"type": "number"}, "3.5", "3.5"),
        ({"type": "integer"}, "3.5", '"3.5"'),
        ({"type": ["integer", "null"]}, "null", "null"),
        ({"type": "array"}, "[1, NaN]", '"[1, NaN]"'),
        ({}, "3", '"3"'),
    ],
)
def test_the_type_of_a_value_is_what_its_schema_says(schema, value, expected):
    definitions = {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}
    tool = ToolSpec("f", {"type": "object", "properties": {"a": schema}, "$defs": definitions})
    for form in SCHEMA_FORMS:
        assert parse(written(form, "f", {"a": value}), form, tools=[tool]).calls == [("f", f'{{"a": {expected}}}')]


def test_a_value_of_deepseek_v3_2_is_of_the_type_that_it_says():
    def read(kind, value):
        parameter = f'<｜DSML｜parameter name="days" string="{kind}">{value}</｜DSML｜parameter>'
        text = f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n{parameter}\n</｜DSML｜invoke>\n'
        return parse(f"{text}</｜DSML｜function_calls>bye", "dsml")

    for kind, value, expected in (
        ("true", "3", '"3"'),
        ("true", "</p>\n ", '"</p>\\n "'),
        ("false", "3", "3"),
        ("false", ' {"a": [1]}', '{"a": [1]}'),
        ("false", '"x"', '"x"'),
        ("false", "True", "true"),
        ("false", "x", '"x"'),
        ("false", "[1, NaN]", '"[1, NaN]"'),
    ):
        assert read(kind, value) == Answer("", "bye", [("get_weather", f'{{"days": {expected}}}')])
    odd = read("maybe", "3")
    assert odd.calls == [("get_weather", "{}")]
    assert odd.text == '<｜DSML｜parameter name="maybe">3</｜DSML｜parameter>\n\nbye'


def test_the_calls_of_deepseek_v3_2_and_of_v4_differ_in_their_tag():
    for form, other in (("dsml", "dsml_v4"), ("dsml_v4", "dsml")):
        text = written(form, "now", {})
        assert parse(text, form) == Answer("", "", [("now", "{}")])
        assert parse(text, other).calls == [("now", "{}")]


@pytest.mark.parametrize("form", ["kimi", "deepseek_v3", "deepseek_v31"])
def test_sections_may_have_several_calls_or_be_left_out(form):
    one, two = written(form, "now", {}), written(form, "get_weather", {"city": "<"})
    start = one[: one.index("<", 1)]
    end = one[one.rindex("<") :]
    inner = [text.removeprefix(start).removesuffix(end) for text in (one, two)]
    calls = [("now", "{}"), ("get_weather", '{"city": "<"}')]
    for text in (start + "\n".join(inner) + end, start + "".join(inner), "".join(inner)):
        assert parse(text, form) == parse([text], form) == Answer("", "", calls)
    assert parse(f"{start}{inner[0]}oops{inner[1]}", form) == Answer("", "oops", calls)


def test_objects_without_an_array_and_calls_that_are_cut_off():
    lines = '{"name": "now", "arguments": {}}\n{"name": "get_weather", "arguments": {"city": "x"}}\n'
    lines = f"<tool_calls>\n{lines}</tool_calls>"
    calls = [("now", "{}"), ("get_weather", '{"city": "x"}')]
    assert parse(f"{lines}bye", "hunyuan") == Answer("", "bye", calls)
    assert parse(written("cohere", "now", {"a": 1})[:-16], "cohere").calls == [("now", '{"a": 1}')]
    assert parse('<|tools_prefix|>[{"now": {}}, oops', "apertus") == Answer("", ", oops", [("now", "{}")])


def test_glm4s_call_is_a_tools_name_and_an_object_as_the_whole_answer():
    assert parse('now\n{"a": 1}', "glm4") == Answer("", "", [("now", '{"a": 1}')])
    assert parse('\nget_weather\n{"city": "x"}\nnow\n{}', "glm4").calls == [
        ("get_weather", '{"city": "x"}'),
        ("now", "{}"),
    ]
    for text in ("now", "nowhere\n{}", "now\nit rains", "Use now\n{}", "later\n{}", "n"):
        assert parse(text, "glm4") == parse([text], "glm4") == Answer("", text, [])
    assert parse('now\n{"a": 1} bye', "glm4") == Answer("", "bye", [("now", '{"a": 1}')])


# rule: Tools and reasoning: A stream with tools joins to the whole answer, however the text is cut
@settings(deadline=None)
@given(
    pieces=st.lists(
        CALLS | st.sampled_from(["now", "now\n", "get_", "later\n{}", "\n", "\n\n", " ", "{", "{}", "[1]", "bye"]),
        max_size=6,
    ),
    places=PLACES,
)
def test_the_cut_of_an_answer_in_glm4s_form_changes_nothing(pieces, places):
    text = "".join(
        piece if isinstance(piece, str) else f"{piece[0]}\n{json.dumps(piece[1], ensure_ascii=False)}\n"
        for piece in pieces
    )
    whole = parse([text], "glm4")
    assert parse(text, "glm4") == whole  # one character at a time
    assert parse(cut(text, places), "glm4") == whole


@settings(deadline=None)
@given(calls=st.lists(CALLS, min_size=1, max_size=3), places=PLACES)
def test_calls_in_glm4s_form_are_found_however_they_are_cut(calls, places):
    shown = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    text = "\n".join(f"{name}\n{arguments}" for name, arguments in shown)
    assert parse(cut(text, places), "glm4") == Answer("", "", shown)


def test_tags_around_the_answers_text_are_dropped():
    tags = ReasoningTags("<response>", "</response>")

    def read(pieces, form="hermes"):
        chat_format = ChatFormat(tools=form, reasoning=THINK, wrapper=tags)
        parser = make_parser(chat_format, tools=TOOLS, is_reasoning=False)
        return join([part for piece in pieces for part in parser.push(piece)] + parser.finish())

    call = written("hermes", "now", {})
    for text, expected in (
        ("<think>a</think>\n<response>\nb\n\nc\n</response>", Answer("a", "b\n\nc", [])),
        ("<response>b", Answer("", "b", [])),
        ("<response>\n", Answer("", "", [])),
        ("b</response>", Answer("", "b</response>", [])),
        ("a <response>", Answer("", "a <response>", [])),
        ("<resp", Answer("", "<resp", [])),
        (f"<response>b</response>{call}", Answer("", "b", [("now", "{}")])),
        (f"<think>a</think>{call}", Answer("a", "", [("now", "{}")])),
        ("<response>b\n</resp", Answer("", "b\n</resp", [])),
    ):
        assert read([text]) == read(text) == expected


# rule: Tools and reasoning: Arguments that are written as literals become JSON
@given(
    form=st.sampled_from(LITERAL_FORMS),
    calls=st.lists(
        st.tuples(
            st.sampled_from(["get_weather", "now"]), st.dictionaries(st.sampled_from(["a", "b_2"]), VALUES, max_size=2)
        ),
        min_size=1,
        max_size=2,
    ),
    places=PLACES,
)
def test_literals_become_json(form, calls, places):
    text = "".join(written(form, *call) for call in calls)
    answer = parse(cut(text, places), form)
    assert answer.text == ""
    assert [(name, json.loads(text)) for name, text in answer.calls] == calls


# rule: Streams: Reasoning has both names, and none of it is in the content
@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"$ref": "#/$defs/place"}, '{"a": 1}'),
        ({"allOf": [{"$ref": "#/$defs/place"}], "description": "d"}, '{"a": 1}'),
        ({"$ref": "#/$defs/loop"}, "7"),
        ({"$ref": "#anchor"}, "7"),
        ({"$ref": "#/$defs/text"}, '"7"'),
        ({"description": "d"}, '"7"'),
    ],
)
def test_qwens_xml_is_typed_by_what_the_schema_refers_to(schema, value):
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "integer"}]}
    parameters = {"type": "object", "properties": {"x": schema}}
    parameters["$defs"] = {"place": {"type": "object"}, "text": {"type": "string"}, "loop": loop}
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{value.strip(chr(34))}\n</parameter>\n"
    answer = parse(f"{text}</function>\n</tool_call>", "qwen_xml", tools=[ToolSpec("f", parameters)])
    assert answer.calls == [("f", f'{{"x": {value}}}')]


@pytest.mark.parametrize("form", [*XML_FORMS, *LITERAL_FORMS])
def test_a_value_that_is_cut_off_is_not_lost(form):
    text = written(form, "get_weather", {"days": 12345})
    text = text[: text.index("123") + 3]
    ((name, arguments),) = parse(text, form).calls
    assert (name, arguments.replace("\n", "")) == ("get_weather", '{"days": 123')
