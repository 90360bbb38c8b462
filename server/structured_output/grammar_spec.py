"""Translates response_format and structured_outputs to a GrammarSpec. Pure; imports no grammar engine.

Each *_grammar function writes one kind of constraint in llguidance's Lark; server/structured_output/tool_grammar.py
adds the reasoning before it. Only server/structured_output/compile_check.py finds out if a grammar compiles.

The pydantic models below are the request fields, strict like server/api/schemas.py.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from engine.interface.errors import InvalidParameter
from engine.interface.protocol import GrammarSpec
from server.document_rules import ONE_OUTPUT, RESPONSE_FORMAT, rules
from server.structured_output.schema_check import checked_schema

Json = Any

MAX_SOURCE_BYTES = 128 * 1024  # of a schema as JSON, of all choices, of a grammar
MAX_SCHEMA_DEPTH = 48
MAX_REGEX_BYTES = 8 * 1024
MAX_CHOICE_STRINGS = 4096
_WHOLE_ESCAPES = r"^([^\\]|\\[\s\S])*$"
_REGEX_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_REGEX_BYTES, "pattern": _WHOLE_ESCAPES}
_LARK_SCHEMA = {"type": "string", "maxLength": MAX_SOURCE_BYTES, "not": {"pattern": r"::=|^\s*\{"}}
LARK_FIELD = "structured_outputs.grammar"  # the one field whose text the compiler sees as it stands
_CHOICE_SCHEMA = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}
_CHOICE_SCHEMA |= {"maxItems": MAX_CHOICE_STRINGS}
FORMATS = ("text", "json_object", "json_schema")
_STRICT = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class JsonSchemaFormat(BaseModel):
    """response_format.json_schema of OpenAI's API. The schema is enforced for every value of `strict`."""

    model_config = _STRICT

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    schema_: Annotated[Json, Field(alias="schema"), WithJsonSchema({"type": ["object", "boolean", "string"]})]
    strict: bool | None = None
    description: Annotated[str, Field(max_length=65_536)] | None = None


class ResponseFormat(BaseModel):
    """response_format: text, json_object, json_schema or a grammar of an extension."""

    model_config = ConfigDict(**_STRICT, json_schema_extra=rules(RESPONSE_FORMAT))

    type: Annotated[str, WithJsonSchema({"enum": list(FORMATS)})]  # checked below, with a better message
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(BaseModel):
    """structured_outputs, vLLM's extension."""

    model_config = ConfigDict(**_STRICT, json_schema_extra={"additionalProperties": False, **rules(ONE_OUTPUT)})

    # a schema, or one as a string
    json_: Annotated[Json, Field(alias="json"), WithJsonSchema({"type": ["object", "boolean", "string", "null"]})] = (
        None
    )
    regex: Annotated[str, WithJsonSchema(_REGEX_SCHEMA)] | None = None
    choice: Annotated[list[str], WithJsonSchema(_CHOICE_SCHEMA)] | None = None
    grammar: Annotated[str, WithJsonSchema(_LARK_SCHEMA)] | None = None

    @property
    def is_given(self) -> bool:
        """True if it constrains the answer."""
        return any(value is not None for value in (self.json_, self.regex, self.choice, self.grammar))


# Where JSON allows whitespace: one space, or a new line and its indentation. A model can lose itself in more.
_JSON_STYLE = {"whitespace_pattern": r" |\n[ \t]{0,32}"}
_ASCII_CLASSES = {"d": "[0-9]", "D": "[^0-9]"}  # else any digit of Unicode


class ConstraintRequest(NamedTuple):
    """A constraint on the answer, with the request field that it comes from."""

    spec: GrammarSpec
    param: str


def json_schema_grammar(schema: dict[str, Any] | bool) -> GrammarSpec:
    """Return the grammar of the JSON values that a schema (draft 2020-12) allows, properties in the schema's order."""
    return GrammarSpec(f"start: {json_part(schema)}")


def json_part(schema: dict[str, Any] | bool) -> str:
    """Return the Lark expression that matches a schema's values."""
    styled = {**schema, "x-guidance": _JSON_STYLE} if isinstance(schema, dict) else schema
    return f"%json {_quoted(styled)}"


def regex_grammar(regex: str) -> GrammarSpec:
    """Return the grammar of the texts that a regular expression matches as a whole (Rust's syntax; \\d is ASCII)."""
    parts: list[str] = []
    characters = iter(regex)
    for character in characters:
        escaped = next(characters, "") if character == "\\" else ""
        if escaped in _ASCII_CLASSES:
            parts.append(_ASCII_CLASSES[escaped])
        elif escaped.isprintable() and character.isprintable() and character != "/":
            parts.append(character + escaped)
        else:
            parts.append(f"\\x{{{ord(escaped or character):x}}}")
    return GrammarSpec(f"start: /{''.join(parts)}/")


def choice_grammar(choices: Sequence[str]) -> GrammarSpec:
    """Return the grammar of exactly one of some strings."""
    texts = " | ".join(map(_quoted, choices))
    return GrammarSpec(f"start: CHOICE\nCHOICE: {texts}")


def _quoted(value: Any) -> str:
    """Return JSON in characters that Lark takes everywhere."""
    return json.dumps(value).replace("\x7f", "\\u007f")


def constraint_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> ConstraintRequest | None:
    """Return the constraint that a body asks for; None: any text. Raises InvalidParameter."""
    by_format = None if response_format is None else _of_format(response_format)
    by_outputs = None if structured_outputs is None else _of_outputs(structured_outputs)
    if by_format is not None and by_outputs is not None:
        raise InvalidParameter(
            f"response_format and {by_outputs.param} both constrain the answer; only one of them can.",
            param="structured_outputs",
        )
    return by_format or by_outputs


def is_deeper_than(value: Any, limit: int) -> bool:
    """Return whether a JSON value has more than `limit` levels of objects and arrays."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if type(child) is dict or type(child) is list  # as decoded; four times as fast as isinstance()
        ]
        if not level:
            return False
    return True


def _of_format(asked: ResponseFormat) -> ConstraintRequest | None:
    if asked.type not in FORMATS:
        raise InvalidParameter(
            f"response_format.type is {asked.type[:100]!r}; it can be one of {', '.join(FORMATS)}.",
            param="response_format.type",
        )
    if (asked.model_extra or {}).get("schema") is not None:  # of llama.cpp and others
        raise InvalidParameter(
            'response_format.schema is not known: a schema is sent as {"type": "json_schema", "json_schema": '
            '{"name": …, "schema": {…}}}.',
            param="response_format.schema",
        )
    if asked.json_schema is not None and asked.type != "json_schema":
        raise InvalidParameter(
            f"response_format.json_schema needs the type json_schema, not {asked.type}.",
            param="response_format.json_schema",
        )
    if asked.type == "text":
        return None
    if asked.type == "json_object":
        return ConstraintRequest(json_schema_grammar({"type": "object"}), "response_format")
    if asked.json_schema is None:
        raise InvalidParameter("response_format.json_schema is required.", param="response_format.json_schema")
    param, form = "response_format.json_schema.schema", asked.json_schema
    schema = _bounded_schema(form.schema_, param)
    return ConstraintRequest(json_schema_grammar(checked_schema(schema, param, is_strict=bool(form.strict))), param)


def _of_outputs(asked: StructuredOutputs) -> ConstraintRequest | None:
    values = {"json": asked.json_, "regex": asked.regex, "choice": asked.choice, "grammar": asked.grammar}
    given = [name for name, value in values.items() if value is not None]
    if asked.model_extra:
        name = min(asked.model_extra)
        raise InvalidParameter(
            f"structured_outputs.{name[:100]} is not known; it can have one of json, regex, choice, grammar.",
            param=f"structured_outputs.{name}",
        )
    if len(given) > 1:
        raise InvalidParameter(
            f"structured_outputs has {' and '.join(given)}; only one of them can constrain an answer.",
            param="structured_outputs",
        )
    if not given:
        return None
    param = f"structured_outputs.{given[0]}"
    if asked.json_ is not None:
        schema = checked_schema(_bounded_schema(asked.json_, param), param)
        return ConstraintRequest(json_schema_grammar(schema), param)
    if asked.regex is not None:
        _check_regex(asked.regex, param)
        return ConstraintRequest(regex_grammar(asked.regex), param)
    if asked.choice is not None:
        _check_choices(asked.choice, param)
        return ConstraintRequest(choice_grammar(asked.choice), param)
    assert asked.grammar is not None
    return ConstraintRequest(GrammarSpec(_checked_lark(asked.grammar, param)), param)


def _bounded_schema(value: Any, param: str) -> dict[str, Any] | bool:
    """Return a schema, or the schema that a string holds, of bounded size and depth."""
    if isinstance(value, str):
        _check_size(value.encode(), param, limit=MAX_SOURCE_BYTES)
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidParameter(f"{param} is a string that is not JSON: {str(error)[:200]}.", param=param) from None
    if not isinstance(value, dict | bool):
        raise InvalidParameter(f"{param} must be a JSON schema, that is an object or a boolean.", param=param)
    if is_deeper_than(value, MAX_SCHEMA_DEPTH):
        raise InvalidParameter(f"{param} is nested deeper than {MAX_SCHEMA_DEPTH} levels, the limit.", param=param)
    _check_size(msgspec.json.encode(value), param, limit=MAX_SOURCE_BYTES)
    if isinstance(value, dict) and "x-guidance" in value:
        raise InvalidParameter(f"{param} must not contain x-guidance, which the server sets.", param=param)
    return value


def _checked_lark(source: str, param: str) -> str:
    _check_size(source.encode(), param, limit=MAX_SOURCE_BYTES)
    if "::=" in source or source.lstrip().startswith("{"):
        raise InvalidParameter(f"{param} must be written in Lark (start: …), not in GBNF, EBNF or JSON.", param=param)
    return source


def _check_regex(regex: str, param: str) -> None:
    _check_size(regex.encode(), param, limit=MAX_REGEX_BYTES)
    if not regex:
        raise InvalidParameter(f"{param} is empty.", param=param)
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise InvalidParameter(f"{param} ends with a backslash that escapes nothing.", param=param)


def _check_choices(choices: list[str], param: str) -> None:
    if not 1 <= len(choices) <= MAX_CHOICE_STRINGS:
        raise InvalidParameter(f"{param} has {len(choices)} strings; 1 to {MAX_CHOICE_STRINGS} can be.", param=param)
    if "" in choices:
        raise InvalidParameter(f"{param}[{choices.index('')}] is empty.", param=param)
    _check_size("".join(choices).encode(), param, limit=MAX_SOURCE_BYTES)


def _check_size(data: bytes, param: str, *, limit: int) -> None:
    if len(data) > limit:
        raise InvalidParameter(f"{param} has {len(data)} bytes, the limit is {limit}.", param=param)
