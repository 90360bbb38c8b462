"""checked_schema: a JSON schema whose values the grammar compiler enforces exactly, or a refusal that names the place.

llguidance computes with 64-bit floats, and takes a recursion that never ends for a grammar. Here a bound that it would
round is refused, a bound that it would let through is moved, and a schema of no finite value is refused. Pure.
server/structured_output/grammar_spec.py bounds the schema's size and depth before.
"""

import math
import re
from collections.abc import Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

import msgspec

from engine.interface.errors import GrammarError
from server.structured_output.discriminators import require_discriminators
from server.structured_output.schema_references import (
    MAX_SHOWN_CHARS,
    OF_NAMED,
    OF_ONE,
    OF_SCHEMAS,
    References,
    Subschema,
    resolve_references,
)
from server.structured_output.schema_values import finite_values

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_CHECKED = {*_BOUNDS, "const", "enum", "multipleOf", "format"}
_VALIDATION = {*_BOUNDS, *OF_SCHEMAS, *OF_NAMED, *OF_ONE, "multipleOf", "type", "enum", "const", "required"}
_VALIDATION |= {"minLength", "maxLength", "pattern", "format", "minItems", "maxItems", "uniqueItems"}
_VALIDATION |= {"minContains", "maxContains", "minProperties", "maxProperties", "dependentRequired", "dependencies"}
_VALIDATION |= {"$ref", "$dynamicRef", "$recursiveRef"}
_ANNOTATIONS = {"$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$comment"}
_ANNOTATIONS |= {"title", "description", "default", "deprecated", "readOnly", "writeOnly", "examples"}
_ANNOTATIONS |= {"contentMediaType", "contentEncoding", "discriminator"}  # the last one: pydantic's, from OpenAPI

_DIALECT = re.compile(r"https?://json-schema\.org/(draft-0[3467]/|draft/(?:2019-09|2020-12|next)/)?schema#?")
_MAX_EXACT = 2**53
_MAX_EXACT_EXPONENT = 22
_NUM_EXACT_DIGITS = 15
_INT64_MAX = 2**63 - 1  # the one bound beyond for which llguidance's rounding is undone by its saturation
_MAX_MULTIPLE = 10_000  # states of the automaton that divides; they take a tenth of a second
_MAX_PRODUCT = 2**32
_MAX_HOSTNAME_CHARS = 253


def checked_schema(schema: dict[str, Any] | bool, param: str, *, is_strict: bool = False) -> dict[str, Any] | bool:
    """Return a copy of the schema that llguidance enforces exactly. Raises GrammarError, which names the place.

    is_strict: refuse keywords that are not of JSON Schema.
    """
    if isinstance(schema, bool):
        return schema
    copy, references = _resolved_copy(schema, param, is_strict=is_strict)
    nodes = references.nodes
    require_discriminators(copy, [node for node, _ in nodes])
    multiples: set[Decimal] = set()
    for node, path in nodes:
        if node.keys() & _CHECKED:
            _check_numbers(node, param, path, multiples)
            _move_bounds(node)
    _check_common_multiple(nodes, multiples, param)
    reason = finite_values(copy, references)
    if reason is not None:
        raise _refusal(param, reason.path, f"{reason.words}, so that no text satisfies the schema")
    return copy


def check_keywords(schema: dict[str, Any], param: str) -> None:
    """Refuse keywords that are not of JSON Schema, and references to nowhere. Raises GrammarError."""
    _resolved_copy(schema, param, is_strict=True)


def _resolved_copy(schema: dict[str, Any], param: str, *, is_strict: bool) -> tuple[dict[str, Any], References]:
    copy: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(schema))
    references = resolve_references(copy, param)
    for node, path in references.nodes:
        if "$schema" in node:
            node["$schema"] = _dialect(node["$schema"], param, path)
        if is_strict and (unknown := node.keys() - _VALIDATION - _ANNOTATIONS):
            raise _refusal(param, path, f"has the keyword {min(unknown)[:MAX_SHOWN_CHARS]!r}, unknown to JSON Schema")
    return copy, references


def _dialect(value: Any, param: str, path: str) -> str:
    """Return the URL of a draft as llguidance knows it: https and http, with "#" or without, mean the same."""
    found = _DIALECT.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        shown = repr(value[:MAX_SHOWN_CHARS]) if isinstance(value, str) else "no string"
        raise _refusal(param, f"{path}.$schema", f"is {shown}, which is no draft of JSON Schema from 3 to 2020-12")
    draft = found[1] or "draft/2020-12/"  # without a number, the latest
    return f"http{'s' if draft.startswith('draft/') else ''}://json-schema.org/{draft}schema"


def _check_numbers(node: dict[str, Any], param: str, path: str, multiples: set[Decimal]) -> None:
    for word in _BOUNDS:
        value = _number(node.get(word))
        if value is not None and not _is_exact_bound(value, word):
            raise _refusal(
                param, f"{path}.{word}", f"is {str(value)[:MAX_SHOWN_CHARS]}; bounds are enforced up to {_MAX_EXACT}"
            )
    for word in ("const", "enum"):
        inexact = next((value for value in _numbers_in(node.get(word)) if not _is_exact(value)), None)
        if inexact is not None:
            shown = str(inexact)[:MAX_SHOWN_CHARS]
            reason = f"has {shown}; integers are enforced up to {_MAX_EXACT}, decimals with {_NUM_EXACT_DIGITS} digits"
            raise _refusal(param, f"{path}.{word}", reason)
    multiple = _number(node.get("multipleOf"))
    if multiple is not None and multiple <= 0:
        shown = str(multiple)[:MAX_SHOWN_CHARS]
        raise _refusal(param, f"{path}.multipleOf", f"is {shown}; it must be above 0")
    if multiple is not None:
        multiples.add(_checked_multiple(multiple, param, f"{path}.multipleOf"))


def _number(value: Any) -> int | float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _is_exact(value: float) -> bool:
    """Return whether llguidance writes a number as it is: it reads a float, and prints its shortest digits."""
    if isinstance(value, int):
        return abs(value) < 10**300 and Decimal(repr(float(value))) == value
    number = Decimal(repr(value)).as_tuple()  # its reader is exact for digits and a power of ten that are floats
    return int("".join(map(str, number.digits))) <= _MAX_EXACT and abs(int(number.exponent)) <= _MAX_EXACT_EXPONENT


def _is_exact_bound(value: float, word: str) -> bool:
    if abs(value) <= _MAX_EXACT - word.startswith("exclusive"):
        return True
    return word == "maximum" and value == _INT64_MAX


def _numbers_in(value: Any) -> Iterator[int | float]:
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list | dict):
            waiting += item.values() if isinstance(item, dict) else item
        elif (number := _number(item)) is not None:
            yield number


def _checked_multiple(value: float, param: str, where: str) -> Decimal:
    exact, scaled, exponent = Decimal(repr(value)), float(min(value, 1e300)), 0
    while scaled % 1 and exponent < 20:  # as llguidance does it, rounding included
        scaled, exponent = scaled * 10, exponent + 1
    shown = str(value)[:MAX_SHOWN_CHARS]
    if scaled >= _MAX_PRODUCT or Decimal(int(scaled)).scaleb(-exponent) != exact:
        raise _refusal(param, where, f"is {shown}, which has too many digits to be enforced")
    factor = int(scaled)
    while factor % 10 == 0:
        factor //= 10
    if factor > _MAX_MULTIPLE:
        reason = f"is {shown}; without its zeros at the end it can have a value of {_MAX_MULTIPLE} at most"
        raise _refusal(param, where, reason)
    return exact


def _check_common_multiple(nodes: list[Subschema], multiples: set[Decimal], param: str) -> None:
    """Refuse multiples whose least common one, where subschemas are combined, would exceed llguidance's integers."""
    if len(multiples) < 2 or not any("allOf" in node or _combines(node) for node, _ in nodes):
        return
    digits = max(0, *(-int(multiple.normalize().as_tuple().exponent) for multiple in multiples))
    if math.prod(int(multiple.scaleb(digits)) for multiple in multiples) >= _MAX_PRODUCT:
        shown = ", ".join(str(multiple) for multiple in sorted(multiples)[:8])
        raise _refusal(param, "", f"combines multipleOf of {shown}, whose common multiple can be too large")


def _combines(node: dict[str, Any]) -> bool:
    return bool(node.keys() & {"$ref", "anyOf", "oneOf"}) and len(node.keys() - _ANNOTATIONS - OF_NAMED) > 1


def _move_bounds(node: dict[str, Any]) -> None:
    """Write what llguidance misses: exclusive bounds that are integers, bounds of many digits, a host name's length."""
    for exclusive, word, direction in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        value, other = _number(node.get(exclusive)), _number(node.get(word, 0))
        if value is None or other is None:
            continue
        if not _is_exact(value):
            beyond = _rounded(value, direction)  # another number, and one that the bound allows
        elif value % 1 == 0 and value * direction >= 0:
            # llguidance lets the bound itself through where the other bound has the same integer part
            beyond = _next_after(abs(value)) * direction
        else:
            continue
        node[word] = beyond if word not in node else direction * max(direction * other, direction * beyond)
        del node[exclusive]
    for word, direction in (("minimum", 1), ("maximum", -1)):
        value = _number(node.get(word))
        if value is not None and value != _INT64_MAX and not _is_exact(value):
            node[word] = _rounded(value, direction)
    length = node.get("maxLength", _MAX_HOSTNAME_CHARS)
    if node.get("format") == "hostname" and isinstance(length, int):
        node["maxLength"] = min(length, _MAX_HOSTNAME_CHARS)


def _rounded(value: float, direction: int) -> float:
    """Return the next number of 15 digits, up or down."""
    rounding = ROUND_CEILING if direction > 0 else ROUND_FLOOR
    digit = Decimal((0, (1,), Decimal(value).adjusted() - _NUM_EXACT_DIGITS + 1))
    rounded = Decimal(repr(value)).quantize(max(digit, Decimal("1e-22")), rounding=rounding)
    return float(rounded) + 0.0  # never -0


def _next_after(value: float) -> float:
    """Return a number a little above an integer of 0 or more, one that llguidance reads exactly."""
    if value >= 10 ** (_NUM_EXACT_DIGITS - 1):
        return int(value) + 1
    num_digits = len(str(int(value))) if value else 0
    return float(Decimal(value) + Decimal((0, (1,), num_digits - _NUM_EXACT_DIGITS)))


def _refusal(param: str, path: str, reason: str) -> GrammarError:
    return GrammarError(f"{param}{path} {reason}.", param=param)
