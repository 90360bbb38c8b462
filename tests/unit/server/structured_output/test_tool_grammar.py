"""Forced tool calls: what the grammar lets pass is what the parser reads, and nothing else passes."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from engine.interface.protocol import GrammarSpec
from server.api.chat.tools import plan_tools
from server.api.messages.request import translate_messages
from server.api.messages.schema import MessagesBody
from server.api.responses.request import translate_responses
from server.api.responses.schema import ResponsesBody
from server.api.schemas import ChatBody
from server.api.strict_json import parse_body
from server.structured_output.tool_grammar import answer_grammar, tool_grammar
from server.text.parsers.base import ToolSpec
from server.text.parsers.detect import ChatFormat
from tests.support.parsing import THINK, TOOLS, WEATHER, parse
from tests.unit.server.conftest import train_byte_level
from tests.unit.server.text.parsers.test_parsers import FORMS, written

TAGS = ["<|tool_call|>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>"]
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
        ids = {tag: self.tokenizer.token_to_id(tag) for tag in TAGS if self.tokenizer.token_to_id(tag) is not None}
        chat_format = ChatFormat(tools=form, reasoning=THINK, takes_tools=True)
        spec = tool_grammar(tools, chat_format, is_parallel=is_parallel, tag_ids=ids)
        self.spec = answer_grammar([spec], THINK, reasoning, tag_ids=ids)
        error = LLMatcher.validate_grammar(self.spec.source, self.llg)
        assert not error, error

    def accepts(self, text: str) -> bool:
        matcher = LLMatcher(self.llg, self.spec.source)
        ids = self.tokenizer.encode(text).ids
        return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


def forced(form: str, *calls: tuple[str, dict]) -> str:
    """Calls as the grammar wants them."""
    texts = [written(form, name, arguments) for name, arguments in calls]
    if form == "llama3":
        return texts[0].removeprefix("<|python_tag|>")
    if form == "granite":
        return f"<|tool_call|>[{', '.join(text.removeprefix('<|tool_call|>[')[:-1] for text in texts)}]"
    if form == "mistral":
        inner = [text.removeprefix("[TOOL_CALLS] [").removesuffix(', "id": "123456789"}]') + "}" for text in texts]
        return f"[TOOL_CALLS] [{', '.join(inner)}]"
    return ("" if form == "mistral_args" else "\n").join(texts)


# rule: Tools and reasoning: `required` and named choices are forced by a grammar
@pytest.mark.parametrize("form", FORMS)
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


@pytest.mark.parametrize("form", FORMS)
def test_only_parallel_calls_may_be_several(form):
    two = forced(form, PARIS, PARIS) if form != "llama3" else "; ".join([forced(form, PARIS)] * 2)
    assert Judge("added", form).accepts(two) == (form != "llama3")
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


@pytest.mark.parametrize("place", ["none", "possible", "open"])
def test_an_answer_may_be_a_call_or_of_another_form(place):
    judge = Judge("added", "hermes")
    form = GrammarSpec('start: "yes" | "no"')
    ids = {tag: judge.tokenizer.token_to_id(tag) for tag in TAGS}
    judge.spec = answer_grammar([judge.spec, form], THINK, place, tag_ids=ids)
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
    for form in FORMS:
        judge = Judge("added", form, [ToolSpec("f", schema, True)])
        assert not judge.accepts("x")
        if form != "qwen_xml":
            assert judge.accepts(forced(form, ("f", {"a": "é", "b": 3})))
            assert not judge.accepts(forced(form, ("f", {"a": "é", "b": "3"})))


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
@pytest.mark.parametrize("form", FORMS)
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
def test_a_function_without_parameters_is_called_with_none(form, parameters, meaning):
    function = {"name": "now", **parameters}
    bodies = [as_chat(function), as_responses(function)]
    bodies += [as_messages(function)] if function.get("parameters") is not None else []  # is required there
    for body in bodies:
        judge = Judge("added", form, plan_tools(body).callable)
        assert judge.accepts(forced(form, ("now", {})))
        if form != "qwen_xml":  # writes the parameters that the schema names
            assert judge.accepts(forced(form, ("now", {"a": 1}))) == (meaning == ANYTHING)
