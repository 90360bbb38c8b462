"""What response_format and structured_outputs mean: the texts a grammar takes, and the 400s of what means nothing."""

import asyncio
import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.grammar.compiler import GrammarCompiler
from engine.interface.errors import GrammarError, InvalidParameter
from engine.interface.protocol import GrammarSpec
from server.api.schemas import ChatBody, CompletionBody
from server.api.strict_json import parse_body
from server.config.model_source import DEMO_FOLDER
from server.structured_output.grammar_spec import (
    MAX_CHOICE_STRINGS,
    MAX_REGEX_BYTES,
    MAX_SCHEMA_DEPTH,
    MAX_SOURCE_BYTES,
    choice_grammar,
    constraint_of,
    json_schema_grammar,
    regex_grammar,
)
from tests.unit.server.conftest import check_error

TOKENIZER = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
COMPILER = GrammarCompiler((DEMO_FOLDER / "tokenizer.json").read_bytes())
CHOICES = st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=12), min_size=1, max_size=6, unique=True)


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=20))
@example("/\n\x7f\u2028 #")
@settings(deadline=None)
def test_any_text_can_stand_in_a_regex_and_in_a_schema(text):
    assert takes(regex_grammar(re.escape(text).replace("\\#", "#").replace("\\ ", " ")), text)
    shown = "".join(char for char in text if char >= " " and char != "\x7f")  # JSON has several forms of the others
    spec = json_schema_grammar({"type": "object", "properties": {shown: {"enum": [shown]}}, "required": [shown]})
    assert takes(spec, json.dumps({shown: shown}, ensure_ascii=False))


def takes(spec: GrammarSpec, text: str) -> bool:
    """True if a text is one of a grammar's, whole."""
    matcher = COMPILER.compile(spec)
    token_ids = [token_id for char in text for token_id in TOKENIZER.encode(char).ids]  # never a tag
    return all(matcher.accept(token_id) for token_id in token_ids) and matcher.inner.is_accepting()


@pytest.mark.parametrize(
    "spec",
    [
        choice_grammar(["<think>"]), choice_grammar(["<|im_end|>"]), choice_grammar(["<|im_end|>", "<|im_start|>"]),
        json_schema_grammar({"enum": ["</think>a", "<tool_call>"]}), regex_grammar("<think>[a-c]</think>"),
    ],
)  # fmt: skip
def test_a_text_that_reads_as_a_tag_is_written_in_characters(spec):
    matcher = COMPILER.compile(spec)
    while not matcher.is_ended:
        (words,) = COMPILER.fill_masks([matcher])
        allowed = [t for t in range(COMPILER.end_token_id) if words[t // 32] >> t % 32 & 1]
        assert allowed
        assert not any(COMPILER._tokenizer.is_special_token(token_id) for token_id in allowed)
        assert matcher.accept(allowed[-1]), matcher.error


def asked(**fields):
    body = parse_body(ChatBody, {"messages": [{"role": "user", "content": "hi"}], **fields})
    return constraint_of(body.response_format, body.structured_outputs)


@given(CHOICES)
@example(['"', "\\", "\n", "a\\n", '"]', "😀", "\x00", "é/"])
@settings(deadline=None)
def test_a_choice_takes_each_of_its_strings_and_no_other(choices):
    spec = choice_grammar(choices)
    assert all(takes(spec, choice) for choice in choices)
    other = "".join(choices) + "x"
    assert not takes(spec, other)


@pytest.mark.parametrize(
    ("regex", "good", "bad"),
    [
        (r"\d{3}-[\d.]+", "123-4.5", "1٣3-4"),
        (r"a/b\/c", "a/b/c", "a-b/c"),
        ("a\nb", "a\nb", "a b"),
        (r"^\w+@x\.(org|com)$", "me@x.org", "me@xcom"),
        (r"\\d", "\\d", "5"),
        (r"[^\D5]", "4", "5"),
        (r'"[^"]*"', '"hi # // %json"', '"a"b"'),
    ],
)
def test_a_regex_takes_what_it_matches_as_a_whole(regex, good, bad):
    assert takes(regex_grammar(regex), good)
    assert not takes(regex_grammar(regex), bad)


def test_a_schema_takes_its_values_with_little_whitespace():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    spec = json_schema_grammar(schema)
    assert takes(spec, '{"a":1}')
    assert takes(spec, json.dumps({"a": 1}))
    assert takes(spec, json.dumps({"a": 1, "b": {"c": [1, None]}}, indent=4))
    assert not takes(spec, '{"b":1}')
    assert not takes(spec, '{"a":  1}')
    assert not takes(spec, '{"a":\n\n1}')
    assert takes(json_schema_grammar(True), '[1, "a"]')
    assert takes(json_schema_grammar({"type": "object"}), '{"x": [{"y": null}]}')
    assert not takes(json_schema_grammar({"type": "object"}), "[]")


def test_references_and_the_keywords_of_pydantic_compile():
    from typing import Annotated, Literal

    from pydantic import BaseModel, Field

    class Cat(BaseModel):
        kind: Literal["cat"]
        lives: int = Field(ge=0, le=9, description="nine at most")

    class Dog(BaseModel):
        kind: Literal["dog"]
        friends: "list[Dog]" = []

    class Owner(BaseModel):
        pet: Annotated[Cat | Dog, Field(discriminator="kind")]
        note: str | None = None

    spec = json_schema_grammar(Owner.model_json_schema())
    assert takes(spec, '{"pet": {"kind": "dog", "friends": [{"kind": "dog"}]}}')
    assert not takes(spec, '{"pet": {"kind": "dog", "lives": 3}, "note": 1}')


def test_the_discriminator_of_a_tagged_union_is_written_though_it_has_a_default():
    from typing import Annotated, Literal

    from pydantic import BaseModel, ConfigDict, Field

    class Cat(BaseModel):
        kind: Literal["cat"] = "cat"
        lives: int

    class Dog(BaseModel):
        model_config = ConfigDict(extra="forbid")
        kind: Literal["dog"] = "dog"
        name: str = "Rex"

    class Owner(BaseModel):
        pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]]

    schema = Owner.model_json_schema()
    assert "required" not in schema["$defs"]["Dog"]
    constraint = asked(structured_outputs={"json": schema})
    assert takes(constraint.spec, '{"pets": [{"kind": "dog"}, {"kind": "cat", "lives": 9}]}')
    for without in ('{"pets": [{"lives": 9}]}', '{"pets": [{}]}', '{"pets": [{"name": "Rex"}]}'):
        assert not takes(constraint.spec, without)  # pydantic would refuse it
    assert "required" not in schema["$defs"]["Dog"]


def test_what_asks_for_nothing_is_no_grammar():
    for fields in (
        {}, {"response_format": None}, {"response_format": {"type": "text"}}, {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "regex": None, "choice": None, "grammar": None}},
        {"structured_outputs": None, "response_format": {"type": "text", "json_schema": None}},
    ):  # fmt: skip
        assert asked(**fields) is None


def test_each_form_names_its_field():
    schema = {"type": "object"}
    format_ = {"type": "json_schema", "json_schema": {"name": "a-B_9", "strict": False, "schema": schema}}
    assert asked(response_format=format_) == (json_schema_grammar(schema), "response_format.json_schema.schema")
    assert asked(response_format={"type": "json_object"}) == (json_schema_grammar(schema), "response_format")
    assert asked(structured_outputs={"json": schema}) == (json_schema_grammar(schema), "structured_outputs.json")
    assert asked(structured_outputs={"json": json.dumps(schema)}).spec == json_schema_grammar(schema)
    assert asked(structured_outputs={"regex": "a+"}) == (regex_grammar("a+"), "structured_outputs.regex")
    assert asked(structured_outputs={"choice": ["a"]}) == (choice_grammar(["a"]), "structured_outputs.choice")
    lark = 'start: "a"'
    assert asked(structured_outputs={"grammar": lark}) == (GrammarSpec(lark), "structured_outputs.grammar")


def nested(depth: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range((depth - 1) // 2):
        schema = {"properties": {"a": schema}}
    return schema


def schema_format(**changes):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, **changes}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}},
         "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
         "response_format.json_schema.name"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
         "response_format.json_schema.schema"),
        (schema_format(name="a" * 65), "response_format.json_schema.name"),
        (schema_format(name="a b"), "response_format.json_schema.name"),
        (schema_format(strict="yes"), "response_format.json_schema.strict"),
        (schema_format(schema=[1]), "response_format.json_schema.schema"),
        (schema_format(schema=None), "response_format.json_schema.schema"),
        (schema_format(schema={"x-guidance": {"lenient": True}}), "response_format.json_schema.schema"),
        (schema_format(schema=nested(MAX_SCHEMA_DEPTH + 2)), "response_format.json_schema.schema"),
        (schema_format(schema={"description": "x" * MAX_SOURCE_BYTES}), "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "3"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a\\\\\\"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a" * (MAX_REGEX_BYTES + 1)}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": {"choice": ["a"] * (MAX_CHOICE_STRINGS + 1)}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": '{"grammars": []}'}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_what_means_nothing_is_refused_by_name(fields, param):
    with pytest.raises(InvalidParameter) as info:
        asked(**fields)
    assert info.value.param == param
    assert param.split("[")[0] in info.value.message


def test_schemas_at_their_limits_pass():
    assert asked(**schema_format(schema=nested(MAX_SCHEMA_DEPTH)))
    assert asked(structured_outputs={"choice": [f"{i}" for i in range(MAX_CHOICE_STRINGS)]})
    assert asked(structured_outputs={"regex": "a" * MAX_REGEX_BYTES})


def test_the_largest_that_is_taken_compiles():
    COMPILER.compile(asked(structured_outputs={"choice": [f"choice {i}" for i in range(MAX_CHOICE_STRINGS)]}).spec)
    COMPILER.compile(asked(structured_outputs={"regex": "a" * MAX_REGEX_BYTES}).spec)
    COMPILER.compile(asked(**schema_format(schema=nested(MAX_SCHEMA_DEPTH))).spec)


def test_the_engine_gets_the_grammar_with_every_choice(harness):
    served = harness("yes")
    grammar = choice_grammar(["yes", "no"])
    assert served.chat(n=2, structured_outputs={"choice": ["yes", "no"]}).status_code == 200
    assert served.complete(structured_outputs={"choice": ["yes", "no"]}).status_code == 200
    assert served.chat().status_code == 200
    first, second, text, free = (request.grammar for request in served.client.submitted)
    assert (text, free) == (grammar, None)
    parts = json.loads(first.source)["grammars"]  # the tokenizer has <think>: reasoning may come first
    assert parts[1:] == [{"name": "part_0", "lark_grammar": grammar.source}]
    assert second == first


def test_a_grammar_that_does_not_compile_never_reaches_the_engine(harness):
    served = harness("yes")
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    reply = served.chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})
    error = check_error(reply, 400, "invalid_grammar")
    assert error["param"] == "response_format.json_schema.schema"
    assert '["not"]' in error["message"]
    error = check_error(served.complete(structured_outputs={"regex": "[a"}, stream=True), 400, "invalid_grammar")
    assert error["param"] == "structured_outputs.regex"
    assert "unclosed character class" in error["message"]
    error = check_error(served.chat(structured_outputs={"grammar": 'start: "a" b\nb: c'}), 400, "invalid_grammar")
    assert "2(4)" in error["message"]
    assert not served.client.submitted


def test_a_grammar_that_matches_nothing_is_refused_in_words(harness):
    served = harness("yes")
    for outputs in ({"regex": r"[^\s\S]"}, {"grammar": "start: start"}):
        error = check_error(served.complete(structured_outputs=outputs), 400, "invalid_grammar")
        assert error["message"] == f"{error['param']} does not compile: It matches no text at all."


def test_fields_of_a_format_without_effect_are_reported(harness):
    format_ = {"type": "json_object", "extra": 1}
    reply = harness("{}").chat(response_format=format_)
    assert reply.headers["x-quire-ignored"] == "response_format.extra"


def test_completions_know_the_same_fields():
    body = parse_body(CompletionBody, {"prompt": "a", "structured_outputs": {"regex": "a"}})
    assert constraint_of(body.response_format, body.structured_outputs).spec == regex_grammar("a")


def test_an_error_has_no_field_if_none_is_known(model_folder):
    from server.structured_output.compile_check import GrammarChecker

    async def check():
        async with GrammarChecker(model_folder) as _:
            checker = GrammarChecker(model_folder)
            try:
                await checker.check(GrammarSpec("start: x"))
            finally:
                checker.kill()

    with pytest.raises(GrammarError, match="The grammar does not compile"):
        asyncio.run(check())


def test_a_grammar_that_fails_in_mid_answer_names_the_field_that_asked(harness):
    def failing():
        fail = GrammarError("The grammar cannot be followed any further.")
        return harness("yes", engine={"fail": fail, "fail_after": 1})

    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    text = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}
    replies = {
        "response_format.json_schema.schema": failing().chat(response_format=schema),
        "structured_outputs.regex": failing().complete(structured_outputs={"regex": "a+"}),
        "text.format.schema": failing().post("/v1/responses", {"input": "hi", "text": text}),
        None: failing().chat(),
    }
    for param, reply in replies.items():
        assert check_error(reply, 400, "invalid_grammar")["param"] == param
