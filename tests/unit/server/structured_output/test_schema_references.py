"""References of schemas are followed inside the document by every form of name, or refused by their place."""

import copy
import json

import pytest

from engine.grammar.compiler import GrammarCompiler
from engine.interface.errors import GrammarError
from server.structured_output.schema_check import checked_schema
from server.structured_output.schema_references import resolve_references
from tests.unit.server.structured_output.test_schema_check import CHARACTERS, compiled, refusal, takes

INTEGER = {"type": "integer"}
TEXT = {"type": "string"}
OLD = "http://json-schema.org/draft-07/schema#"
OLDEST = "http://json-schema.org/draft-04/schema#"


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"$ref": "#/$defs/a", "$defs": {"a": INTEGER}}, "#/$defs/a"),
        ({"$ref": "#z", "$defs": {"a": {"$anchor": "z", **INTEGER}}}, "#/$defs/a"),
        ({"$ref": "#z", "$defs": {"a": {"$dynamicAnchor": "z", **INTEGER}}}, "#/$defs/a"),
        ({"$ref": "a.json", "$defs": {"a": {"$id": "a.json", **INTEGER}}}, "#/$defs/a"),
        ({"$id": "http://x.org/b/c.json", "$ref": "a", "$defs": {"a": {"$id": "/b/a", **INTEGER}}}, "#/$defs/a"),
        ({"$id": "app://x/b/c", "$ref": "a", "$defs": {"a": {"$id": "app://x/b/a", **INTEGER}}}, "#/$defs/a"),
        ({"$ref": "http://x.org/a#", "$defs": {"a": {"$id": "http://x.org/a", **INTEGER}}}, "#/$defs/a"),
        ({"$id": "urn:x:1", "$ref": "urn:x:1#/$defs/a", "$defs": {"a": INTEGER}}, "#/$defs/a"),
        ({"$ref": "a#/$defs/b", "$defs": {"b": TEXT, "a": {"$id": "a", "$defs": {"b": INTEGER}}}}, "#/$defs/a/$defs/b"),
        ({"$ref": "a#z", "$defs": {"b": {"$anchor": "z"}, "a": {"$id": "a", "items": {"$anchor": "z", **INTEGER}}}},
         "#/$defs/a/items"),
        ({"$ref": "#/$defs/a~1b~0c%25%20%C3%A9", "$defs": {"a/b~c% é": INTEGER}}, "#/$defs/a~1b~0c%25%20%C3%A9"),
        ({"$ref": "#%2F$defs%2Fa", "$defs": {"a": INTEGER}}, "#/$defs/a"),
        ({"$ref": "#/anyOf/1", "anyOf": [TEXT, INTEGER]}, "#/anyOf/1"),
        ({"$ref": "#/components/schemas/a", "components": {"schemas": {"a": INTEGER}}}, "#/components/schemas/a"),
        ({"$schema": OLD, "$ref": "#z", "definitions": {"a": {"$id": "#z", **INTEGER}}}, "#/definitions/a"),
        ({"$schema": OLDEST, "$ref": "a", "definitions": {"a": {"id": "a", **INTEGER}}}, "#/definitions/a"),
        ({"$ref": "a", "$defs": {"a": {"$id": "a", **INTEGER}}, "enum": [1, {"$id": "a"}]}, "#/$defs/a"),
        ({"$ref": "a", "properties": {"$id": {"$id": "a", **INTEGER}}}, "#/properties/$id"),
    ],
)  # fmt: skip
def test_every_name_of_a_subschema_becomes_a_pointer_that_is_enforced(schema, pointer):
    assert checked_schema(schema, "schema")["$ref"] == pointer
    matcher = compiled(schema, CHARACTERS)
    assert takes(matcher, "1")
    assert not takes(matcher, '"a"')


@pytest.mark.parametrize("anchor", [True, False])
def test_a_bound_behind_a_name_is_checked_like_any_other(anchor):
    name, reference = ({"$anchor": "z"}, "#z") if anchor else ({"$id": "http://x.org/z"}, "http://x.org/z")
    for reached, words in (
        ({"minimum": 2**53 + 1}, "schema.$defs.a.minimum is 9007199254740993"),
        (
            {"type": "object", "properties": {"a": {"$ref": reference}}, "required": ["a"]},
            "requires itself without end",
        ),
    ):
        assert words in refusal({"$ref": reference, "$defs": {"a": {**name, **reached}}})
    schema = {"$ref": reference, "$defs": {"a": {**name, "type": "number", "exclusiveMinimum": 1}}}
    matcher = compiled(schema, CHARACTERS)
    assert takes(matcher, "1.5")
    assert not takes(matcher, "1")


def test_a_reference_is_relative_to_the_nearest_id_around_it():
    inner = {"$id": "http://x.org/a", "items": {"$ref": "#/$defs/b"}, "type": "array", "$defs": {"b": INTEGER}}
    matcher = compiled({"$ref": "#/$defs/a", "$defs": {"a": inner, "b": TEXT}}, CHARACTERS)
    assert takes(matcher, "[1]")
    assert not takes(matcher, '["a"]')
    far = {"$id": "a", "$defs": {"b": TEXT, "c": {"type": "array", "items": {"$ref": "#/$defs/b"}}}}
    matcher = compiled({"$ref": "a#/$defs/c", "$defs": {"a": far, "b": INTEGER}}, CHARACTERS)
    assert takes(matcher, '["a"]')
    assert not takes(matcher, "[1]")
    itself = {"$id": "a", "type": "array", "items": {"$ref": "#"}, "maxItems": 1}
    matcher = compiled({"type": "object", "properties": {"a": itself}, "required": ["a"]}, CHARACTERS)
    assert takes(matcher, '{"a":[[]]}')
    assert not takes(matcher, '{"a":[{}]}')


def test_an_old_draft_hides_the_id_beside_a_reference():
    schema = {"$schema": OLD, "items": {"$id": "b", "$ref": "#/definitions/a"}, "type": "array", "minItems": 1}
    matcher = compiled({**schema, "definitions": {"a": INTEGER}}, CHARACTERS)
    assert takes(matcher, "[1]")
    assert not takes(matcher, '["a"]')
    assert "schema.items.$ref is '#/definitions/a', where" in refusal(
        {**schema, "$schema": "", "definitions": {"a": INTEGER}}
    )


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"$ref": "http://x.org/a"}}}, "schema.properties.a.$ref is 'http://x.org/a', which"),
        ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, "which is not in the schema (nothing is fetched)."),
        ({"anyOf": [{"$ref": "a.json"}]}, "schema.anyOf[0].$ref is 'a.json', which is not in the schema"),
        ({"$ref": "#/$defs/b", "$defs": {"a": INTEGER}}, "schema.$ref is '#/$defs/b', where the schema has nothing."),
        ({"$ref": "#/anyOf/01", "anyOf": [INTEGER] * 2}, "schema.$ref is '#/anyOf/01', where the schema has nothing"),
        ({"$ref": "#/anyOf/" + "9" * 5000, "anyOf": [INTEGER]}, "where the schema has nothing"),
        ({"$ref": "#z"}, "schema.$ref is '#z', but no subschemas there have this anchor."),
        ({"$ref": "#z", "$defs": {"a": {"$id": "a", "$defs": {"b": {"$anchor": "z"}}}}}, "no subschemas there"),
        ({"$ref": "#z", "$defs": {n: {"$anchor": "z"} for n in "ab"}}, "'#z', but 2 subschemas there have this anchor"),
        ({"$ref": "z", "$defs": {n: {"$id": "z"} for n in "ab"}}, "schema.$ref is 'z', but 2 subschemas have this $id"),
        ({"$ref": "#/minimum", "minimum": 3}, "schema.$ref is '#/minimum', which is no schema."),
        ({"$ref": "#/anyOf", "anyOf": [INTEGER]}, "schema.$ref is '#/anyOf', which is no schema."),
        ({"items": {"$ref": 3}}, "schema.items.$ref is no string."),
        ({"$id": 3}, "schema.$id is no string."),
        ({"$defs": {"a": {"$anchor": []}}}, "schema.$defs.a.$anchor is no string."),
        ({"$ref": "http://[x/"}, "schema.$ref is 'http://[x/', which is no URL."),
        ({"$id": "http://[x/"}, "schema.$id is 'http://[x/', which is no URL."),
        ({"$dynamicRef": "#z", "$defs": {"z": {"$dynamicAnchor": "z"}}}, "schema.$dynamicRef is not supported; use $"),
        ({"type": "array", "items": {"$recursiveRef": "#"}}, "schema.items.$recursiveRef is not supported"),
        ({"$ref": "#/hidden", "hidden": {"$id": "a"}}, "schema.hidden.$id is at a place where JSON Schema has no"),
        ({"$ref": "#/enum/0", "enum": [{"$id": "a"}]}, "schema.enum[0].$id is at a place"),
        ({"properties": {"a": {"$ref": "#/properties/b/enum/0"}, "b": {"enum": [{"minimum": 3}]}}},
         "schema.properties.b.enum is referred to as a schema"),
    ],
)  # fmt: skip
def test_a_reference_that_cannot_be_followed_is_refused_by_its_place(schema, words):
    assert words in refusal(schema)


def test_names_of_many_characters_do_not_multiply():
    long = {"type": "object", "properties": {"a" * 60_000: {"$anchor": "z"}}, "anyOf": [{"$ref": "#z"}] * 20}
    assert "and those before it lead to places with more than 524288 characters together" in refusal(long)


def test_values_that_look_like_names_stay():
    value = {"$id": "a", "$anchor": "b", "$ref": "c", "minimum": 2}
    assert checked_schema({"const": value, "default": value}, "schema") == {"const": value, "default": value}


def test_the_compiler_sees_what_was_checked():
    """llguidance follows the pointers to the same places, also through names that need escapes."""
    names = ["a/b", "a~b", "a%b", "a b", "é", "", "~1", "%2F", "0", "#", "?", '"', "$id", "日本"]
    for name in names:
        schema = {"$ref": "#n", "$defs": {other: {"enum": [other]} for other in names}}
        schema["$defs"][name]["$anchor"] = "n"
        compiler: GrammarCompiler = CHARACTERS
        if name.isascii():
            matcher = compiled(schema, compiler)
            assert takes(matcher, json.dumps(name).replace(" ", "")) == (" " not in name), name
        resolved = copy.deepcopy(schema)
        assert resolve_references(resolved, "schema").targets[id(resolved)] is resolved["$defs"][name]


def test_a_refusal_names_the_parameter():
    with pytest.raises(GrammarError) as info:
        checked_schema({"$ref": "#x"}, "tools[0].function.parameters")
    assert info.value.param == "tools[0].function.parameters"
