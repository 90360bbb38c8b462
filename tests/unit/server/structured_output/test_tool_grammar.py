"""Forced tool calls: what the grammar lets pass is what the parser reads, and nothing else passes."""

import json
import re

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from engine.interface.errors import GrammarError, InvalidParameter
from engine.interface.protocol import GrammarSpec
from server.api.chat.tools import plan_tools
from server.api.messages.request import translate_messages
from server.api.messages.schema import MessagesBody
from server.api.responses.request import translate_responses
from server.api.responses.schema import ResponsesBody
from server.api.schemas import ChatBody
from server.api.strict_json import parse_body
from server.structured_output.schema_check import checked_schema
from server.structured_output.tool_grammar import answer_grammar, tool_grammar
from server.text.parsers import harmony
from server.text.parsers.base import ToolSpec
from server.text.parsers.detect import ChatFormat
from server.text.parsers.json_forms import APERTUS, COHERE, DEEPSEEK, HUNYUAN, KIMI
from server.text.parsers.literal_calls import GEMMA_TAGS, LFM2, LLAMA4, OLMO3
from server.text.parsers.xml_calls import DSML, GLM, MINIMAX, SEED
from tests.support.call_forms import FORMS, TAG_FORMS, XML_FORMS, written
from tests.support.parsing import TOOLS, WEATHER, format_of, parse
from tests.unit.server.conftest import train_byte_level

ALL_FORMS = [*FORMS, "harmony", "glm4"]
ONE_AT_A_TIME = ("llama3", "harmony", "glm4")
TAGS = [
    *harmony.TAGS,
    *SEED.tags,
    *MINIMAX.tags,
    *DSML.tags,
    *GLM.tags,
    *GEMMA_TAGS,
    *LFM2.tags,
    *LLAMA4.tags,
    *OLMO3.tags,
    *KIMI.tags,
    *DEEPSEEK.tags,
    *HUNYUAN,
    *COHERE,
    *APERTUS,
    "<|tool_call|>",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<think>",
    "</think>",
]
PARIS = ("get_weather", {"city": "Paris"})


def tokenizer_with(tags: list[str], *, special: bool) -> Tokenizer:
    tokenizer = train_byte_level()
    tokenizer.add_tokens([AddedToken(tag, special=special) for tag in tags])
    return tokenizer


TOKENIZERS = {
    "special": tokenizer_with(TAGS, special=True),
    "added": tokenizer_with(TAGS, special=False),
    "text": train_byte_level(),
}


class Judge:
    """Says which texts a grammar accepts as a whole answer."""

    def __init__(self, kind: str, form: str, tools=TOOLS, *, is_parallel=True, reasoning="none") -> None:
        self.tokenizer = TOKENIZERS[kind]
        self.llg = LLTokenizer(self.tokenizer.to_str())
        self.ids = ids = {
            tag: self.tokenizer.token_to_id(tag) for tag in TAGS if self.tokenizer.token_to_id(tag) is not None
        }
        chat_format = format_of(form)
        spec = tool_grammar(tools, chat_format, is_parallel=is_parallel, tag_ids=ids)
        self.spec = answer_grammar([], spec, chat_format, reasoning, tag_ids=ids)
        error = LLMatcher.validate_grammar(self.spec.source, self.llg)
        assert not error, error

    def accepts(self, text: str) -> bool:
        matcher = LLMatcher(self.llg, self.spec.source)
        ids = self.tokenizer.encode(text).ids
        return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


def forced_in_tags(form: str, texts: list[str]) -> str:
    """Calls in one pair of tags. `texts`: each in a pair of its own."""
    first, last, comma = {
        "kimi": ("<|tool_call_begin", "<|tool_calls_section_end", ""),
        "deepseek_v3": ("<｜tool▁call▁b", "<｜tool▁calls▁e", "\n"),
        "deepseek_v31": ("<｜tool▁call▁b", "<｜tool▁calls▁e", ""),
        "cohere": ("{", "\n]<", ",\n    "),
    }.get(form, ("{", "]<", ", "))
    start, end = texts[0][: texts[0].index(first)], texts[0][texts[0].rindex(last) :]
    return start + comma.join(text.removeprefix(start).removesuffix(end) for text in texts) + end


def forced(form: str, *calls: tuple[str, dict]) -> str:
    """Calls as the grammar wants them."""
    texts = [] if form == "glm4" else [written(form, name, arguments) for name, arguments in calls]
    if form == "llama3":
        return texts[0].removeprefix("<|python_tag|>")
    if form == "harmony":
        return "<|start|>assistant".join(text.removesuffix("<|call|>") for text in texts)
    if form in XML_FORMS and XML_FORMS[form].is_shared:
        tags = XML_FORMS[form]
        return "\n".join(texts).replace(f"\n{tags.end}\n{tags.start}", "")
    if form == "glm4":
        return "\n".join(f"{name}\n{json.dumps(arguments, ensure_ascii=False)}" for name, arguments in calls)
    if form in TAG_FORMS:
        return forced_in_tags(form, texts)
    if form in ("lfm2", "llama4"):
        tags = LFM2 if form == "lfm2" else LLAMA4
        inner = ", ".join(text.removeprefix(f"{tags.start}[").removesuffix(f"]{tags.end}") for text in texts)
        return f"{tags.start}[{inner}]{tags.end}"
    if form in ("gemma4", "olmo3"):
        return "".join(texts).replace("</function_calls><function_calls>", "\n")
    if form == "granite":
        return f"<|tool_call|>[{', '.join(text.removeprefix('<|tool_call|>[')[:-1] for text in texts)}]"
    if form == "mistral":
        inner = [text.removeprefix("[TOOL_CALLS] [").removesuffix(', "id": "123456789"}]') + "}" for text in texts]
        return f"[TOOL_CALLS] [{', '.join(inner)}]"
    return ("" if form == "mistral_args" else "\n").join(texts)


# rule: Tools and reasoning: `required` and named choices are forced by a grammar
@pytest.mark.parametrize("form", ALL_FORMS)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_forced_call_is_a_call_of_the_request_with_arguments_of_its_schema(form, kind):
    judge = Judge(kind, form)
    for call in (PARIS, ("now", {}), ("get_weather", {"city": "x" * 9, "days": 3})):
        text = forced(form, call)
        assert judge.accepts(text), text
        assert [name for name, _ in parse(text, form).calls] == [call[0]]
    for text in ("It is sunny.", forced(form, ("later", {})), forced(form, PARIS)[:-2], f"So: {forced(form, PARIS)}"):
        assert not judge.accepts(text), text
    assert not judge.accepts(forced(form, ("get_weather", {"days": 3}))), "city is required"
    assert not judge.accepts(forced(form, ("get_weather", {"city": "x", "days": "many"})))


@pytest.mark.parametrize("form", ALL_FORMS)
def test_only_parallel_calls_may_be_several(form):
    two = forced(form, PARIS, PARIS) if form != "llama3" else "; ".join([forced(form, PARIS)] * 2)
    assert Judge("added", form).accepts(two) == (form not in ONE_AT_A_TIME)
    assert not Judge("added", form, is_parallel=False).accepts(two)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_reasoning_is_free_and_comes_before_the_call(kind):
    call = forced("hermes", PARIS)
    thoughts = "Hello, is it\n\n1 < 2?"
    possible, open_ = Judge(kind, "hermes", reasoning="possible"), Judge(kind, "hermes", reasoning="open")
    assert possible.accepts(call)
    assert possible.accepts(f"<think>\n{thoughts}\n</think>\n\n{call}")
    assert open_.accepts(f"{thoughts}\n</think>\n\n{call}")
    assert not open_.accepts(call)
    assert not Judge(kind, "hermes").accepts(f"<think>\n{thoughts}\n</think>\n\n{call}")
    for text in (f"{thoughts}</think>Hello", f"{thoughts}</think>{thoughts}{call}"):
        assert not open_.accepts(text)
        assert not possible.accepts(f"<think>{text}")


# rule: Tools and reasoning: `required` and named choices are forced by a grammar
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_harmonys_calls_come_after_any_analysis_and_texts_in_the_channel_final(kind):
    judge = Judge(kind, "harmony", reasoning="possible")
    call, again = forced("harmony", PARIS), "<|end|><|start|>assistant"
    thoughts = f"<|channel|>analysis<|message|>Hello{again}"
    other = call.replace(
        "<|channel|>commentary to=functions.get_weather ", " to=functions.get_weather<|channel|>commentary "
    )
    for text in (call, other, thoughts + call, thoughts + thoughts + other, call.replace(" <|constrain|>json", "")):
        assert judge.accepts(text), text
        assert parse([text], "harmony").calls[0][0] == "get_weather"
    for text in (f"{thoughts}<|channel|>final<|message|>Hello", thoughts, "Hello", call.replace("commentary", "final")):
        assert not judge.accepts(text), text
    is_open = Judge(kind, "harmony", reasoning="open")
    assert is_open.accepts(f"Hm{again}{call}")
    assert not is_open.accepts(call)
    judge.spec = answer_grammar(
        [GrammarSpec('start: "yes"')], None, format_of("harmony"), "possible", tag_ids=judge.ids
    )
    assert judge.accepts(f"{thoughts}<|channel|>final<|message|>yes")
    assert not judge.accepts("yes")
    judge.spec = answer_grammar([GrammarSpec('start: "yes"')], None, format_of("harmony"), "none", tag_ids=judge.ids)
    assert judge.accepts("yes")


LITERALS = ToolSpec(
    "f",
    {
        "type": "object",
        "properties": {
            "text": {"type": "string", "minLength": 1, "maxLength": 3},
            "kind": {"enum": ["a'b", 2, None, True]},
            "items": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "free": {},
        },
        "$defs": {
            "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"type": "number"}}}
        },
    },
)


# rule: Tools and reasoning: `required` and named choices are forced by a grammar
@pytest.mark.parametrize("form", ["gemma4", "lfm2", "llama4", "olmo3"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_literals_follow_their_schema(form, kind):
    judge = Judge(kind, form, [LITERALS])
    for arguments in (
        {
            "text": "abc",
            "kind": "a'b",
            "items": [{"next": {"next": {}, "v": 1.5}}, {}],
            "either": None,
            "free": [1, {"x": "y"}],
        },
        {"items": [], "either": 3},
        {"kind": True},
        {},
    ):
        text = forced(form, ("f", arguments))
        text = text.replace('"a\'b"', "'a\\'b'")  # Python's own choice of quotation marks
        if form == "gemma4":
            text = text.replace('{<|"|>next<|"|>', "{next").replace(',<|"|>v<|"|>', ",v").replace('{<|"|>x<|"|>', "{x")
        assert judge.accepts(text), text
        assert [(name, json.loads(own)) for name, own in parse([text], form, tools=[LITERALS]).calls] == [
            ("f", arguments)
        ]
    for arguments in (
        {"text": ""},
        {"text": "abcd"},
        {"kind": "c"},
        {"items": [{}, {}, {}]},
        {"either": "x"},
        {"other": 1},
    ):
        assert not judge.accepts(forced(form, ("f", arguments))), arguments


def test_a_keyword_that_literals_cannot_enforce_is_an_error_for_strict_tools():
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}}
    Judge("added", "gemma4", [ToolSpec("f", schema)])
    with pytest.raises(GrammarError, match="pattern"):
        Judge("added", "gemma4", [ToolSpec("f", schema, True)])


def test_schemas_that_are_too_deep_or_too_large_for_literals_are_errors():
    deep: dict = {"type": "string"}
    for _ in range(2000):
        deep = {"type": "array", "items": deep}
    loop = {"allOf": [{"$ref": "#/properties/a"}], "type": "object"}
    shared = {str(i): {"type": "string"} for i in range(300)}
    large = {"type": "object", "properties": shared, "anyOf": [{"title": str(i)} for i in range(300)]}
    for schema, words in ((deep, "deeply"), (loop, "deeply"), (large, "limit")):
        tool = ToolSpec("f", {"type": "object", "properties": {"a": schema}})
        with pytest.raises(GrammarError, match=words):
            tool_grammar([tool], format_of("gemma4"), is_parallel=True, tag_ids={})


@pytest.mark.parametrize("place", ["none", "possible", "open"])
def test_an_answer_may_be_a_call_or_of_another_form(place):
    judge = Judge("added", "hermes")
    form = GrammarSpec('start: "yes" | "no"')
    ids = {tag: judge.tokenizer.token_to_id(tag) for tag in TAGS}
    judge.spec = answer_grammar([form], judge.spec, format_of("hermes"), place, tag_ids=ids)
    thoughts = {"none": "", "possible": "<think>Hm\n</think>\n", "open": "Hm\n</think>\n"}[place]
    for text, is_fine in (("yes", True), (forced("hermes", PARIS), True), ("maybe", False)):
        assert judge.accepts(thoughts + text) == is_fine


def test_a_schema_that_cannot_be_enforced_fails_for_strict_tools_alone():
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    llg = LLTokenizer(TOKENIZERS["text"].to_str())

    def error(is_strict: bool) -> str:
        tool = ToolSpec("f", schema, is_strict)
        chat_format = ChatFormat(tools="hermes", takes_tools=True)
        spec = tool_grammar([tool], chat_format, is_parallel=True, tag_ids={})
        return LLMatcher.validate_grammar(spec.source, llg)

    assert error(is_strict=True)
    assert not error(is_strict=False)


def test_schemas_cannot_break_out_of_the_grammar():
    nasty = {'"\n start: "x"': {"type": "string"}, "a": {"enum": ['"\n}', "é"]}, "b": {"$ref": "#/$defs/b"}}
    schema = {"type": "object", "properties": nasty, "$defs": {"b": {"type": "integer"}}, "required": ["a", "b"]}
    for form in ALL_FORMS:
        judge = Judge("added", form, [ToolSpec("f", schema, True)])
        assert not judge.accepts("x")
        if form not in XML_FORMS:
            assert judge.accepts(forced(form, ("f", {"a": "é", "b": 3})))
            assert not judge.accepts(forced(form, ("f", {"a": "é", "b": "3"})))


@pytest.mark.parametrize("form", ["hermes", "qwen_xml", "gemma4"])
@pytest.mark.parametrize("is_strict", [True, False])
def test_the_discriminator_of_a_tagged_union_is_part_of_a_forced_call(form, is_strict):
    kinds = {name: {"type": "string", "const": name, "default": name} for name in ("cat", "dog")}
    cat = {"type": "object", "properties": {"kind": kinds["cat"], "lives": {"type": "integer"}}}
    dog = {"type": "object", "properties": {"kind": kinds["dog"], "lives": {"type": "integer"}}}
    union = {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "discriminator": {"propertyName": "kind"}}
    schema = {"type": "object", "properties": {"pet": union}, "required": ["pet"], "$defs": {"Cat": cat, "Dog": dog}}
    judge = Judge("added", form, [ToolSpec("f", schema, is_strict)])
    for pet, is_fine in (({"kind": "dog", "lives": 9}, True), ({"kind": "cat"}, True), ({"lives": 9}, False)):
        text = forced(form, ("f", {"pet": pet}))
        if form == "qwen_xml":
            text = text.replace("'", '"')
        if form == "gemma4":
            text = re.sub(r'<\|"\|>(\w+)<\|"\|>:', r"\1:", text)
        assert judge.accepts(text) == is_fine, text
    assert "required" not in cat


REFERRING = {
    "type": "object",
    "properties": {
        "tree": {"type": "object", "properties": {"more": {"$ref": "#"}}, "additionalProperties": False},
        "same/": {"$ref": "#/properties/tree"},
        "own": {"$ref": "#a", "$defs": {"a": {"type": "boolean", "$anchor": "b"}}},
        "number": {"$id": "n", "type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "integer"}}},
    },
    "additionalProperties": False,
    "$defs": {"a": {"$anchor": "a", "type": "integer"}},
}


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize("draft", ["2020-12", "04", "07"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.table
def test_references_mean_the_same_places_in_every_form(form, draft, is_strict):
    text = json.dumps(REFERRING)
    schema = json.loads(text.replace('"$id"', '"id"') if draft == "04" else text)
    if draft != "2020-12":
        schema["$schema"] = f"http://json-schema.org/draft-{draft}/schema#"
    judge = Judge("added", form, [ToolSpec("f", checked_schema(schema, "tools"), is_strict)])
    for arguments, is_fine in (
        ({"tree": {"more": {"tree": {}}}}, True),
        ({"tree": {"more": {"more": {}}}}, False),
        ({"same/": {"more": {"own": 3}}}, True),
        ({"same/": {"more": {"own": True}}}, False),
        ({"own": 3}, True),
        ({"own": True}, False),
        ({"number": [1]}, True),
        ({"number": ["a"]}, False),
    ):
        text = forced(form, ("f", arguments))
        if form in XML_FORMS:  # where the grammar wants JSON
            text = text.replace("'", '"').replace("True", "true")
        if form == "gemma4":  # where the grammar wants bare keys
            text = re.sub(r'<\|"\|>(\w+/?)<\|"\|>:', r"\1:", text)
        assert judge.accepts(text) == is_fine, arguments


def test_copies_of_a_schema_for_each_parameter_are_bounded():
    large = {"type": "object", "$defs": {"a": {"enum": ["x" * 4000]}}}
    large["properties"] = {str(i): {"$ref": "#/$defs/a"} for i in range(80)}
    chat_format = ChatFormat(tools="qwen_xml", takes_tools=True)
    with pytest.raises(InvalidParameter, match="bytes together; where enforced, the limit is 262144"):
        tool_grammar([ToolSpec("f", large)], chat_format, is_parallel=True, tag_ids={})


def test_the_source_is_the_same_for_the_same_tools():
    assert Judge("text", "hermes", [WEATHER]).spec == Judge("text", "hermes", [WEATHER]).spec
    assert json.dumps(WEATHER.parameters)[1:-1] in Judge("text", "hermes", [WEATHER]).spec.source


EMPTY, ANYTHING = "no parameters", "any object"


def as_chat(function: dict) -> ChatBody:
    fields = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": function}]}
    return parse_body(ChatBody, {**fields, "tool_choice": "required"})


def as_responses(function: dict) -> ChatBody:
    fields = {"input": "hi", "tools": [{"type": "function", **function}], "tool_choice": "required"}
    return translate_responses(parse_body(ResponsesBody, fields)).body


def as_messages(function: dict) -> ChatBody:
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    fields = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "tool_choice": {"type": "any"}}
    return translate_messages(parse_body(MessagesBody, {**fields, "max_tokens": 9, "model": "m"})).body


# rule: Tools and reasoning: `required` and named choices are forced by a grammar
@pytest.mark.parametrize("form", ALL_FORMS)
@pytest.mark.parametrize(
    ("parameters", "meaning"),
    [
        ({}, EMPTY),  # the field is absent
        ({"parameters": None}, EMPTY),
        ({"parameters": {"type": "object", "properties": {}}}, EMPTY),
        ({"parameters": {"properties": {}, "required": []}}, EMPTY),
        ({"parameters": {}}, ANYTHING),
        ({"parameters": {"type": "object"}}, ANYTHING),
        ({"parameters": {"type": "object", "properties": {}, "additionalProperties": True}}, ANYTHING),
        ({"parameters": {"properties": {}, "patternProperties": {"a": {}}}}, ANYTHING),
    ],
)
@pytest.mark.table
def test_a_function_without_parameters_is_called_with_none(form, parameters, meaning):
    function = {"name": "now", **parameters}
    bodies = [as_chat(function), as_responses(function)]
    bodies += [as_messages(function)] if function.get("parameters") is not None else []  # is required there
    for body in bodies:
        judge = Judge("added", form, plan_tools(body).callable)
        assert judge.accepts(forced(form, ("now", {})))
        if form not in XML_FORMS:  # writes the parameters that the schema names
            assert judge.accepts(forced(form, ("now", {"a": 1}))) == (meaning == ANYTHING)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_text_before_a_tag_with_a_token_in_it_may_have_the_beginning_of_a_tag(kind):
    judge = Judge(kind, "dsml")
    call = forced("dsml", ("get_weather", {"city": "a </b>\n<｜ </", "where": {"x": "</p>"}}))
    assert judge.accepts(call)
    for wrong in (call.replace("</b>", "</b></｜DSML｜parameter>"), call.replace('string="true"', 'string="false"')):
        assert not judge.accepts(wrong)
