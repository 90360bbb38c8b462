"""Schemas as they are enforced: numbers keep to their bounds; what cannot be enforced names its place."""

import json
import math
import random
import string
from decimal import Decimal

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.grammar.compiler import GrammarCompiler, Matcher
from engine.interface.errors import GrammarError
from server.structured_output.grammar_spec import json_schema_grammar
from server.structured_output.schema_check import checked_schema
from tests.support.chat_models import ChatModels
from tests.unit.server.conftest import check_error
from tests.unit.server.structured_output.test_structured import COMPILER, TOKENIZER

CHARACTERS = GrammarCompiler(  # one token a character, so that a walk takes each way that a text can go
    Tokenizer.from_str(
        json.dumps(
            {
                **json.loads(TOKENIZER.to_str()),
                "added_tokens": [],
                "post_processor": None,
                "model": {"type": "BPE", "vocab": {c: i for i, c in enumerate(string.printable[:94])}, "merges": []},
            }
        )
    )
    .to_str()
    .encode()
)
LETTERS = string.printable[:94]
LARGE = st.integers(-(10**30), 10**30) | st.sampled_from(
    [s * 2**p + d for s in (1, -1) for p in (31, 53, 63, 64) for d in (-1, 0, 1)]
)
SMALL = st.integers(-120, 120)
DECIMALS = st.decimals(-120, 120, places=3, allow_nan=False).map(float) | st.floats(-120, 120)
BOUNDS = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", "number"])},
    optional=dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), SMALL | DECIMALS | LARGE),
)


def compiled(schema: object, compiler: GrammarCompiler = COMPILER, **options: bool) -> Matcher:
    return compiler.compile(json_schema_grammar(checked_schema(schema, "schema", **options)))


def refusal(schema: object, **options: bool) -> str:
    with pytest.raises(GrammarError) as info:
        compiled(schema, **options)
    return info.value.message


def takes(matcher: Matcher, text: str) -> bool:
    matcher = matcher.copy()
    return all(map(matcher.accept, map(LETTERS.index, text))) and matcher.inner.is_accepting()


def walk(matcher: Matcher, chance: random.Random, *, max_chars: int = 60) -> str | None:
    """Return a text of random allowed characters that ends as soon as it may, mostly; None: it never could."""
    matcher, text = matcher.copy(), ""
    while len(text) < max_chars:
        (words,) = CHARACTERS.fill_masks([matcher])
        if matcher.inner.is_accepting() and chance.random() < 0.3:
            return text
        allowed = [t for t in range(len(LETTERS)) if words[t // 32] >> t % 32 & 1]
        if not allowed:
            return text if matcher.inner.is_accepting() else None
        token_id = chance.choice(allowed)
        assert matcher.accept(token_id)
        text += LETTERS[token_id]
    return text if matcher.inner.is_accepting() else None


def is_within(schema: dict, text: str) -> bool:
    """Judge a number as it is written, in decimals, by its bounds."""
    if "e" in text.lower():  # an exponent of any size: only numbers without bounds may have one
        return schema == {"type": "number"}
    value, exact = Decimal(text), {word: Decimal(repr(bound)) for word, bound in schema.items() if word != "type"}
    return (
        exact.get("minimum", value) <= value <= exact.get("maximum", value)
        and ("exclusiveMinimum" not in exact or exact["exclusiveMinimum"] < value)
        and ("exclusiveMaximum" not in exact or value < exact["exclusiveMaximum"])
        and (schema["type"] == "number" or value == value.to_integral_value())
    )


# rule: Fields: `response_format` and `structured_outputs` are enforced
@given(BOUNDS, st.integers(0, 2**32))
@example({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, 0)
@example({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, 0)
@example({"type": "integer", "minimum": 2**53 + 1}, 0)
@example({"type": "integer", "exclusiveMinimum": 2**53 - 1}, 0)
@example({"type": "integer", "maximum": 2**63 - 1}, 0)
@settings(deadline=None, max_examples=40)
def test_numbers_keep_to_their_bounds_or_the_bound_is_refused(schema, seed):
    try:
        matcher = compiled(schema, CHARACTERS)
    except GrammarError:
        assume(False)
    chance = random.Random(seed)
    texts = {text for _ in range(20) if (text := walk(matcher, chance)) is not None}
    for word, bound in schema.items():  # and both sides of each bound
        if word != "type":
            near = Decimal(repr(bound))
            steps = [Decimal(step) for step in ("0", "1", "-1", "0.1", "-0.1", "0.001", "-0.001")]
            beside = {format(near + step, "f") for step in steps} | {str(math.floor(near)), str(math.ceil(near)), "-0"}
            texts |= {text for text in beside if takes(matcher, text)}
            if schema["type"] == "integer":
                whole = {str(int(near) + step) for step in (-1, 0, 1)}
                assert {text for text in whole if is_within(schema, text)} == {t for t in whole if takes(matcher, t)}
    assert all(is_within(schema, text) for text in texts), [text for text in texts if not is_within(schema, text)]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"minimum": 2**53 + 1}}}, "schema.properties.a.minimum is 9007199254740993; bounds"),
        ({"items": {"maximum": 10**30}}, f"schema.items.maximum is {10**30}; bounds are enforced up to {2**53}."),
        ({"anyOf": [{"exclusiveMinimum": -(2**53)}]}, "schema.anyOf[0].exclusiveMinimum is -9007199254740992"),
        ({"maximum": 1.7976931348623157e308}, "schema.maximum is 1.7976931348623157e+308"),
        ({"enum": [1, {"a": [2**53 + 1]}]}, "schema.enum has 9007199254740993"),
        ({"const": 91.00000000000001}, "schema.const has 91.00000000000001; integers are enforced"),
        ({"const": 1234567890123456789}, "schema.const has 1234567890123456789"),
        ({"$ref": "#/hidden/a", "hidden": {"a": {"minimum": 2**60 + 1}}}, "schema.hidden.a.minimum is"),
        ({"type": "integer", "multipleOf": 100_000_007}, "schema.multipleOf is 100000007; without its zeros"),
        ({"multipleOf": 0.07}, "schema.multipleOf is 0.07, which has too many digits"),
        ({"multipleOf": 10**4000}, "schema.multipleOf is 1000"),
        ({"multipleOf": 1e300}, "schema.multipleOf is 1e+300, which"),
        ({"allOf": [{"multipleOf": 1_000_000}, {"multipleOf": 0.000001}]}, "schema combines multipleOf of 0.000001, 1"),
        ({"items": {"multipleOf": -3}}, "schema.items.multipleOf is -3; it must be above 0."),
        ({"type": "number", "multipleOf": 0}, "schema.multipleOf is 0; it must be above 0."),
    ],
)
def test_a_number_that_would_be_rounded_is_refused_by_its_place(schema, words):
    assert words in refusal(schema)


def test_numbers_that_are_exact_pass():
    assert takes(compiled({"const": 10**25}, CHARACTERS), str(10**25))
    int64 = compiled({"type": "integer", "minimum": -(2**53), "maximum": 2**63 - 1}, CHARACTERS)
    assert takes(int64, str(2**63 - 1))
    assert not takes(int64, str(2**63))
    for schema in ({"multipleOf": 0.01}, {"multipleOf": 1_000_000}, {"multipleOf": 9_999}, {"enum": [1.5e20, -0.1]}):
        compiled(schema)
    compiled({"properties": {str(m): {"multipleOf": m} for m in (0.01, 5, 1000, 9999, 7777)}})


def test_a_host_name_has_at_most_253_characters():
    name = ".".join(["a" * 49] * 5)  # 249
    for schema in ({"format": "hostname"}, {"type": "string", "format": "hostname", "maxLength": 1000}):
        matcher = compiled(schema, CHARACTERS)
        assert takes(matcher, f'"{name}.abc"')
        assert not takes(matcher, f'"{name}.abcd"')
    assert not takes(compiled({"format": "hostname", "maxLength": 9}, CHARACTERS), '"aaaaa.aaaa"')


LINK = {"type": "object", "properties": {"next": {"$ref": "#/$defs/a"}}, "required": ["next"]}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
BOTH = {"anyOf": [{"$ref": "#/$defs/node"}, {"$ref": "#/$defs/pair"}]}
PAIR = {"type": "array", "items": BOTH, "minItems": 2}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}, "schema requires itself"),
        ({"$ref": "#/$defs/node", "$defs": {"node": NODE}}, "schema.$defs.node requires itself without end"),
        ({**BOTH, "$defs": {"node": NODE, "pair": PAIR}}, "requires itself without end, so that no text"),
        ({"allOf": [NODE, {"required": ["next"]}], "$defs": {"node": NODE}}, "requires itself without end"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "requires itself"),
        ({"prefixItems": [{}, {"$ref": "#"}], "minItems": 2, "type": "array"}, "schema requires itself without end"),
        ({"$ref": "#/$defs/a%20b", "$defs": {"a b": {"allOf": [{"$ref": "#/$defs/a%20b"}]}}}, "requires itself"),
        ({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]},
         "schema.properties.a requires itself without end, so that no text satisfies the schema."),
        ({"allOf": [{"$ref": "#"}], "type": "integer"}, "schema requires itself without end"),
        ({"type": "object", "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 3}}, "required": ["a"]},
         "schema.properties.a has a minimum of 5 and a maximum of 3, so that no text satisfies the schema."),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "schema has a minItems of 3 and a maxItems of 2"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "schema has a minLength of 3 and a maxLength of 2"),
        ({"type": "object", "minProperties": 3, "maxProperties": 2}, "schema has a minProperties of 3"),
        ({"enum": []}, "schema has an empty enum"),
        ({"anyOf": []}, "schema has no possible anyOf"),
        ({"items": {"enum": []}, "type": "array", "minItems": 1}, "schema.items has an empty enum"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "schema has no type in common"),
    ],
)  # fmt: skip
def test_a_schema_of_no_finite_value_is_refused_by_its_place(schema, words):
    assert words in refusal(schema)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "properties": {"next": {"$ref": "#"}}}, '{"next":{}}'),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "null"}, LINK]}}}, '{"next":{"next":null}}'),
        ({"type": "array", "items": {"$ref": "#"}}, "[[],[[]]]"),
        ({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}, "b": {"const": 1}}}, '{"b":1}'),
        ({"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "integer"}}}, "1"),
        ({"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, '{"a":null}'),
        ({"type": "number", "minLength": 3, "maxLength": 2}, "1"),
        ({"$ref": "#z", "$defs": {"z": {"$anchor": "z", "type": "integer"}}}, "1"),
        ({"type": ["integer"], "allOf": [{"type": "number"}]}, "1"),
    ],
)  # fmt: skip
def test_a_recursion_that_can_end_is_no_fault(schema, text):
    assert takes(compiled(schema, CHARACTERS), text)


def test_an_optional_member_that_could_never_end_is_never_begun():
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/node"}}, "$defs": {"node": NODE}}
    matcher = compiled(schema, CHARACTERS)
    assert takes(matcher, "{}")
    texts = {walk(matcher, random.Random(seed), max_chars=6) for seed in range(40)}
    assert not any(text is not None and text.startswith('{"a"') for text in texts)
    begun = matcher.copy()
    assert not all(map(begun.accept, map(LETTERS.index, '{"a":')))


def test_only_strict_schemas_refuse_unknown_keywords():
    schema = {"type": "object", "title": "T", "properties": {"a": {"type": "string", "maxLenght": 3}}}
    compiled(schema)
    assert refusal(schema, is_strict=True).startswith("schema.properties.a has the keyword 'maxLenght', unknown")
    compiled({"type": "object", "properties": {"x-any": {"default": {"y": 1}, "examples": [1]}}}, is_strict=True)


def test_the_schema_of_a_client_stays_as_it_is():
    schema = {"type": "number", "exclusiveMinimum": 0, "properties": {"a": {"format": "hostname"}}}
    before = json.dumps(schema)
    checked_schema(schema, "schema")
    assert json.dumps(schema) == before


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "$ref", "allOf", "anyOf", "items", "properties", "required", "enum", "minimum", "maximum",
                 "exclusiveMinimum", "multipleOf", "format", "maxLength", "prefixItems", "minItems", "a",
                 "$id", "id", "$anchor", "$schema", "$defs"]
            ),
            inner | st.sampled_from(["#", "#/properties/a", "#/allOf/0", "#a", "a", "a#/$defs/a", "//[", "http://json-schema.org/draft-04/schema#",
                                       "object", "hostname", ["a"]]),
            max_size=4,
        ),
        max_leaves=12,
    )
)  # fmt: skip
@settings(deadline=None, max_examples=100)
def test_no_schema_breaks_the_check(value):
    if isinstance(value, dict):
        for is_strict in (False, True):
            try:
                checked_schema(value, "schema", is_strict=is_strict)
            except GrammarError as error:
                assert error.message.startswith("schema")  # noqa: PT017


def test_forced_calls_and_formats_name_the_field_of_each_api(harness, tmp_path):
    app = ChatModels(harness, tmp_path / "model")()
    bad = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 2**53 + 1}}}
    where = ".properties.a.minimum is 9007199254740993"
    user = {"messages": [{"role": "user", "content": "hi"}]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": bad}}
    function = {"name": "f", "parameters": bad}
    tools = {"tools": [{"type": "function", "function": {"name": "g"}}, {"type": "function", "function": function}]}
    text = {"text": {"format": {"type": "json_schema", "name": "n", "schema": bad}}}
    claude = {**user, "model": "tiny", "max_tokens": 9}
    for path, body, param in (
        ("/v1/chat/completions", {**user, "response_format": form}, "response_format.json_schema.schema"),
        ("/v1/chat/completions", {**user, **tools, "tool_choice": "required"}, "tools[1].function.parameters"),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": bad}}, "structured_outputs.json"),
        ("/v1/responses", {"input": "hi", **text}, "text.format.schema"),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **function}], "tool_choice": "required"},
         "tools[0].parameters"),
        ("/v1/messages", {**claude, "tools": [{"name": "f", "input_schema": bad}], "tool_choice": {"type": "any"}},
         "tools[0].input_schema"),
    ):  # fmt: skip
        reply = app.post(path, body)
        if path == "/v1/messages":
            assert (reply.status_code, param + where in reply.text) == (400, True), reply.text
            continue
        error = check_error(reply, 400, "invalid_grammar")
        assert error["param"] == param
        assert error["message"].startswith(param + where)


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_a_strict_tool_has_known_keywords_and_references_whether_it_is_forced_or_not(harness, tmp_path, choice):
    app = ChatModels(harness, tmp_path / "model")()
    user = {"messages": [{"role": "user", "content": "hi"}]}
    for word, value, fault in (
        ("maxLenght", 3, " has the keyword 'maxLenght', unknown to JSON Schema."),
        ("$ref", "#/$defs/a", ".$ref is '#/$defs/a', where the schema has nothing."),
    ):
        schema = {"type": "object", "properties": {"a": {"type": "string", word: value}}}
        for strict in (True, False):
            function = {"name": "f", "parameters": schema, "strict": strict}
            tools = [{"type": "function", "function": function}]
            flat = [{"type": "function", **function}]
            own = [{"name": "f", "input_schema": schema, "strict": strict}]
            claude = {**user, "model": "tiny", "max_tokens": 9, "tools": own}
            claude["tool_choice"] = {"type": {"required": "any"}.get(choice, choice)}
            for path, body, param in (
                (
                    "/v1/chat/completions",
                    {**user, "tools": tools, "tool_choice": choice},
                    "tools[0].function.parameters",
                ),
                ("/v1/responses", {"input": "hi", "tools": flat, "tool_choice": choice}, "tools[0].parameters"),
                ("/v1/messages", claude, "tools[0].input_schema"),
            ):
                reply = app.post(path, body)
                is_refused = strict or (choice == "required" and word == "$ref")
                assert (f"{param}.properties.a{fault}" in reply.text) == is_refused, (path, reply.text)
                assert (reply.status_code == 400) == is_refused, reply.text


@pytest.mark.parametrize("draft", ["draft-04", "draft-07", "draft/2019-09", "draft/2020-12", None])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_draft_may_be_named_by_http_or_https_with_a_hash_or_without(draft, scheme):
    for end in ("schema", "schema#"):
        url = f"{scheme}://json-schema.org/{f'{draft}/' if draft else ''}{end}"
        for schema in ({"$schema": url, "type": "integer"}, {"anyOf": [{"$schema": url, "type": "integer"}]}):
            assert takes(compiled(schema, CHARACTERS), "1")


@pytest.mark.parametrize("url", ["https://example.com/mine", "nope", "", "http://json-schema.org/draft-99/schema#"])
def test_a_dialect_that_is_no_draft_is_refused_by_its_place(url):
    said = f"schema.items.$schema is {url!r}, which is no draft of JSON Schema from 3 to 2020-12."
    assert refusal({"items": {"$schema": url}}) == said
    assert refusal({"$schema": 5}).startswith("schema.$schema is no string, which is no draft")
    assert takes(compiled({"type": "object", "properties": {"$schema": {"const": 1}}}, CHARACTERS), '{"$schema":1}')
