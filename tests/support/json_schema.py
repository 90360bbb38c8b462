"""Whether a value fits a JSON schema: the keywords that the OpenAPI document's bodies are made of, and no others."""

import re
from collections.abc import Callable
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {"string": (str,), "array": (list,), "object": (dict,), "boolean": (bool,)}
_NOTES = {"title", "description", "default", "format"}
_OF_EXTRAS = {"additionalProperties", "propertyNames"}


def fits(value: Any, schema: dict[str, Any], document: dict[str, Any]) -> bool:
    """Return whether a value fits. `document`: the place of references. Raises KeyError for an unknown keyword."""
    for keyword, rule in schema.items():
        if keyword not in _NOTES | _OF_EXTRAS and not _CHECKS[keyword](value, rule, document):
            return False
    return _fits_extras(value, schema, document)


def _fits_extras(value: Any, schema: dict[str, Any], document: dict[str, Any]) -> bool:
    if not isinstance(value, dict):
        return True
    extras, names = schema.get("additionalProperties", True), schema.get("propertyNames", {})
    others = [child for name, child in value.items() if name not in schema.get("properties", {})]
    if isinstance(extras, bool):
        is_fine = extras or not others
    else:
        is_fine = all(fits(child, extras, document) for child in others)
    return is_fine and all(fits(name, names, document) for name in value)


def _is_type(value: Any, kinds: str | list[str]) -> bool:
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind == "null" and value is None:
            return True
        if kind in ("number", "integer"):
            number = int if kind == "integer" else int | float
            if isinstance(value, number) and not isinstance(value, bool):
                return True
        elif isinstance(value, _TYPES.get(kind, ())):
            return True
    return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other


_CHECKS: dict[str, Callable[[Any, Any, dict[str, Any]], bool]] = {
    "$ref": lambda v, name, doc: fits(v, doc["components"]["schemas"][name.rpartition("/")[2]], doc),
    "type": lambda v, kinds, _: _is_type(v, kinds),
    "const": lambda v, other, _: _same(v, other),
    "enum": lambda v, others, _: any(_same(v, other) for other in others),
    "allOf": lambda v, schemas, doc: all(fits(v, schema, doc) for schema in schemas),
    "anyOf": lambda v, schemas, doc: any(fits(v, schema, doc) for schema in schemas),
    "oneOf": lambda v, schemas, doc: sum(fits(v, schema, doc) for schema in schemas) == 1,
    "not": lambda v, schema, doc: not fits(v, schema, doc),
    "properties": lambda v, fields, doc: (
        not isinstance(v, dict) or all(fits(v[name], schema, doc) for name, schema in fields.items() if name in v)
    ),
    "required": lambda v, names, _: not isinstance(v, dict) or set(names) <= set(v),
    "maxProperties": lambda v, most, _: not isinstance(v, dict) or len(v) <= most,
    "items": lambda v, schema, doc: not isinstance(v, list) or all(fits(item, schema, doc) for item in v),
    "contains": lambda v, schema, doc: not isinstance(v, list) or any(fits(item, schema, doc) for item in v),
    "minItems": lambda v, least, _: not isinstance(v, list) or len(v) >= least,
    "maxItems": lambda v, most, _: not isinstance(v, list) or len(v) <= most,
    "minLength": lambda v, least, _: not isinstance(v, str) or len(v) >= least,
    "maxLength": lambda v, most, _: not isinstance(v, str) or len(v) <= most,
    "pattern": lambda v, pattern, _: not isinstance(v, str) or re.search(pattern, v) is not None,
    "minimum": lambda v, least, _: not _is_number(v) or v >= least,
    "maximum": lambda v, most, _: not _is_number(v) or v <= most,
    "exclusiveMinimum": lambda v, least, _: not _is_number(v) or v > least,
    "exclusiveMaximum": lambda v, most, _: not _is_number(v) or v < most,
}
