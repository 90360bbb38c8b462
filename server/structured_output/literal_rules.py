"""LiteralRules: a JSON schema as grammar rules for values that are written as Python's or Gemma 4's literals. Pure.

What has no literal of its own (numbers) is left to JSON of llguidance. A reference has one rule, so that schemas may
refer to themselves. Members come in one order, without those that are not required, if the model leaves them out.
An object without named properties may have any members. For strict tools a keyword for strings that a pattern of
characters cannot enforce is a GrammarError.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from engine.interface.errors import GrammarError
from server.text.parsers.json_pointer import pointed
from server.text.parsers.literals import GEMMA_QUOTE
from server.text.parsers.typed_values import Schema

_KINDS = ("string", "number", "boolean", "null", "array", "object")
_NOT_ENFORCED = ("pattern", "format")
_NUMBER_WORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAX_LENGTH = 4096  # characters; a longer bound is left out
_MAX_ITEMS = 256
_MAX_CHARS = 256 * 1024  # of all rules; alternatives repeat what they share


class Style(NamedTuple):
    """How one language writes values."""

    constants: Mapping[bool | None, str]
    comma: str
    colon: str
    is_sorted: bool  # members by their names
    is_gemma: bool


PYTHON = Style({True: "True", False: "False", None: "None"}, ", ", ": ", is_sorted=False, is_gemma=False)
GEMMA = Style({True: "true", False: "false", None: "null"}, ",", ":", is_sorted=True, is_gemma=True)


class LiteralRules:
    """Collects the rules of all tools."""

    def __init__(self, style: Style, tag: Callable[[str], str]) -> None:
        """`tag`: returns the terminals of a text with tags in it."""
        self.rules: list[str] = []
        self._style = style
        self._tag = tag
        self._root: Schema = {}
        self._is_strict = False
        self._of_references: dict[str, str] = {}
        self._of_any: str | None = None
        self._num_chars = 0

    def arguments(self, schema: Schema, *, separator: str, is_strict: bool) -> str:
        """Return the rule of a call's arguments, without the brackets. `separator`: after a name."""
        self._root, self._is_strict, self._of_references = schema, is_strict, {}
        try:
            return self._members(schema, separator=separator)
        except RecursionError:
            raise GrammarError("The schemas of tools are nested too deeply for this model's form of calls.") from None

    def _add(self, body: str) -> str:
        name = f"literal_{len(self.rules)}"
        self._num_chars += len(body)
        if self._num_chars > _MAX_CHARS:
            raise GrammarError(f"The schemas of tools make a grammar of more than {_MAX_CHARS} characters, the limit.")
        self.rules.append(f"{name}: {body}")
        return name

    def _value(self, schema: Any) -> str:
        """Return the rule of a value."""
        if not isinstance(schema, Mapping):
            return self._any()
        reference = schema.get("$ref")
        if isinstance(reference, str):
            return self._reference(reference)
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            return self._add(" | ".join(self._literal(value) for value in values) or '"" /(?!)/')
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list) and schema[word]:
                return self._add(" | ".join(self._value({**_without(schema, word), **_dict(c)}) for c in schema[word]))
        if isinstance(schema.get("allOf"), list) and schema["allOf"]:
            return self._value(_joined(schema, self._root))
        declared = schema.get("type")
        kinds = declared if isinstance(declared, list) else [declared] if isinstance(declared, str) else _KINDS
        if declared is None and not schema.keys() & {"properties", "items"}:
            return self._any()
        if declared is None:
            kinds = ["object" if "properties" in schema else "array"]
        return self._add(" | ".join(self._kind(kind, schema) for kind in kinds))

    def _reference(self, reference: str) -> str:
        if reference not in self._of_references:
            name = self._of_references[reference] = f"literal_{len(self.rules)}"
            self.rules.append("")  # its place, since it may refer to itself
            place = len(self.rules) - 1
            target = pointed(self._root, reference)
            self.rules[place] = f"{name}: {self._value(target)}"
        return self._of_references[reference]

    def _kind(self, kind: str, schema: Schema) -> str:
        match kind:
            case "string":
                return self._string(schema)
            case "boolean":
                return f"({_text(self._style.constants[True])} | {_text(self._style.constants[False])})"
            case "null":
                return _text(self._style.constants[None])
            case "array":
                return self._array(schema)
            case "object":
                return f'"{{" {self._members(schema, separator=self._style.colon)} "}}"'
        number = {"type": kind} | {word: schema[word] for word in _NUMBER_WORDS if word in schema}
        return self._add("%json " + json.dumps(number))

    def _string(self, schema: Schema) -> str:
        found = next((word for word in _NOT_ENFORCED if word in schema), None)
        if found is not None and self._is_strict:
            raise GrammarError(
                f"A strict tool has the keyword {found}, which this model's form of calls cannot enforce."
            )
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        low = least if isinstance(least, int) and 0 <= least <= _MAX_LENGTH else 0
        high = most if isinstance(most, int) and low <= most <= _MAX_LENGTH else None
        count = "*" if not low and high is None else f"{{{low},{'' if high is None else high}}}"
        if not self._style.is_gemma:
            return self._add(f"/'([^'\\\\\\n\\r]|\\\\['\"\\\\nrt]){count}'/")
        quote = self._tag(GEMMA_QUOTE)
        if count != "*" or quote.startswith("<["):
            character = "(?s:.)" if quote.startswith("<[") else "[^<]"
            return f"{quote} {self._add(f'/{character}{count}/')} {quote}"
        text = f"literal_{len(self.rules)}"
        self.rules.append(f"{text}[suffix={_text(GEMMA_QUOTE)}]: /(?s:.*)/")
        return f"{quote} {text}"

    def _array(self, schema: Schema) -> str:
        item = self._value(schema.get("items", {}))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        low = least if isinstance(least, int) and 0 <= least <= _MAX_ITEMS else 0
        high = most if isinstance(most, int) and low <= most <= _MAX_ITEMS else None
        if high == 0:
            return '"[" "]"'
        count = f"{{{max(low - 1, 0)},{'' if high is None else high - 1}}}"
        items = f"{item} ({_text(self._style.comma)} {item}){count}"
        return f'"[" {items} "]"' if low else f'"[" ({items})? "]"'

    def _members(self, schema: Schema, *, separator: str) -> str:
        """Return the rule of the members of an object, without its braces."""
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, Mapping) or not properties:
            is_closed = schema.get("additionalProperties") is False
            return self._add('""' if is_closed else self._any_members(schema, separator))
        keys = sorted(properties, key=str.lower) if self._style.is_sorted else list(properties)
        first = more = self._add('""')  # the rest, if no member came before, and if one did
        for key in reversed(keys):
            member = f"{self._key(key, separator)} {self._value(properties[key])}"
            skip_first, skip_more = (
                ("", "") if isinstance(required, list) and key in required else (f" | {first}", f" | {more}")
            )
            first = self._add(f"{member} {more}{skip_first}")
            more = self._add(f"{_text(self._style.comma)} {member} {more}{skip_more}")
        return first

    def _any_members(self, schema: Schema, separator: str) -> str:
        others = schema.get("additionalProperties")
        value = self._value(others) if isinstance(others, Mapping) else self._any()
        name = "/[A-Za-z_]\\w*/" if self._style.is_gemma or separator == "=" else "/'[^'\\\\\\n\\r]*'/"
        member = f"{self._add(name)} {_text(separator)} {value}"
        return f"({member} ({_text(self._style.comma)} {member})*)?"

    def _key(self, key: str, separator: str) -> str:
        is_bare = self._style.is_gemma or separator == "="
        return _text(key + separator if is_bare else _python_string(key) + separator)

    def _literal(self, value: Any) -> str:
        """Return a value of an enum as terminals."""
        style = self._style
        match value:
            case bool() | None:
                return _text(style.constants[value])
            case str():
                return (
                    self._tag(f"{GEMMA_QUOTE}{value}{GEMMA_QUOTE}") if style.is_gemma else _text(_python_string(value))
                )
            case list():
                items = f" {_text(style.comma)} ".join(map(self._literal, value))
                return f'"[" {items} "]"'
            case dict():
                pairs = (f"{self._key(key, style.colon)} {self._literal(item)}" for key, item in value.items())
                return f'"{{" {f" {_text(style.comma)} ".join(pairs)} "}}"'
        return _text(json.dumps(value))

    def _any(self) -> str:
        if self._of_any is None:
            self._of_any = f"literal_{len(self.rules)}"
            self.rules.append("")
            place = len(self.rules) - 1
            kinds = [self._kind(kind, {}) for kind in _KINDS]
            self.rules[place] = f"{self._of_any}: {' | '.join(kinds)}"
        return self._of_any


def _joined(schema: Schema, root: Schema) -> dict[str, Any]:
    """Return the schemas of allOf as one: the last has the last word, except for properties, which are added."""
    joined: dict[str, Any] = {}
    for part in (_without(schema, "allOf"), *schema["allOf"]):
        own = _dict(part)
        own = _dict(pointed(root, own["$ref"])) if "$ref" in own else own
        properties = {**_dict(joined.get("properties")), **_dict(own.get("properties"))}
        required = [*joined.get("required", ()), *own.get("required", ())]
        joined |= {**own, **({"properties": properties, "required": required} if properties else {})}
    return joined


def _without(schema: Schema, word: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != word}


def _dict(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _python_string(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")
    return f"'{escaped}'"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
