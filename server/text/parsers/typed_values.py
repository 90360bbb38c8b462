"""Values that models write without quotes, as JSON: their types are those of the tool's schema. Imports server.text."""

import json
from collections.abc import Mapping
from typing import Any

from server.text.parsers.json_pointer import pointed

Schema = Mapping[str, Any]

STRING = {"string"}
_ALL = ["string", "number", "integer", "boolean", "null", "array", "object"]
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}


class Properties:
    """The parameters of one tool by its schema."""

    def __init__(self, schema: Schema) -> None:
        properties = schema.get("properties")
        self._schemas = properties if isinstance(properties, Mapping) else {}
        self._root = schema

    @property
    def names(self) -> list[str]:
        """The parameters in their order."""
        return list(self._schemas)

    def types(self, key: str) -> set[str]:
        """Return the JSON types of a parameter, as far as the schema names them."""
        return _types(self._schemas.get(key), self._root)


def is_string(schema: object, root: Schema) -> bool:
    """Return True if a property's schema allows strings only, or says nothing. `root`: the schema that it is in."""
    return _types(schema, root) <= STRING


def quoted(text: str) -> str:
    """Return a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def typed_json(value: str, types: set[str]) -> str:
    """Return the JSON of a text: a value of one of the types, else a string."""
    text, kinds = parsed(value)
    return text if kinds & types - STRING else quoted(value)


def parsed(value: str) -> tuple[str, set[str]]:
    """Return a text as JSON, and the JSON types that it has: none if it is not JSON."""
    text = value.strip()
    text = _PYTHON_LITERALS.get(text, text)
    try:
        return text, _kinds(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return text, set()


def _kinds(value: object) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case list():
            return {"array"}
        case dict():
            return {"object"}
    return {"string"}


def _types(schema: object, root: Schema) -> set[str]:
    """The JSON types that a schema names: by type, else by its values, its alternatives and what it refers to."""
    types: set[str] = set()
    seen: set[int] = set()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        declared = part.get("type")
        named = {name for name in (declared if isinstance(declared, list) else [declared]) if isinstance(name, str)}
        values = part.get("enum")
        if not named and isinstance(values, list):
            named = named.union(*map(_kinds, values))
        if not named and "const" in part:
            named = _kinds(part["const"])
        if not named and isinstance(part.get("$ref"), str):
            target = pointed(root, part["$ref"])
            waiting.append(target if isinstance(target, Mapping) else {"type": _ALL})
        for word in ("anyOf", "oneOf", *(() if named else ("allOf",))):
            choices = part.get(word)
            waiting += choices if isinstance(choices, list) else ()
        types |= named
    return types


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
