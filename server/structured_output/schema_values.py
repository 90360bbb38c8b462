"""finite_values: finds subschemas of a JSON schema that no finite value satisfies. Pure.

A schema that requires itself has no finite value, but llguidance compiles it: an answer would never end. The search is
a least fixed point: a subschema has a value if a value can be built of subschemas that have one.
Only what rules out every value is looked at (types, bounds, required members, references), so what is called
impossible is impossible; llguidance finds other contradictions itself.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from server.structured_output.schema_references import References

_MAX_WORK = 10_000  # looks at subschemas; a tenth of a second
_RULE_OUT = {"$ref", "allOf", "anyOf", "oneOf", "enum", "required", "minimum", "minLength", "minItems", "minProperties"}
_SCALARS = frozenset({"null", "boolean", "number", "integer", "string"})
_RANGES = (
    ("minimum", "maximum", {"number", "integer"}),
    ("minLength", "maxLength", {"string"}),
    ("minItems", "maxItems", {"array"}),
    ("minProperties", "maxProperties", {"object"}),
)


class Reason(NamedTuple):
    """The place at which a schema is impossible, and the words for it."""

    path: str
    words: str


class _TooMuchWork(Exception):
    """The schema takes too long to be searched."""


def finite_values(schema: dict[str, Any], references: References) -> Reason | None:
    """Make the subschemas without a finite value unsatisfiable, in place; return why, if the whole schema is one.

    references: of the schema.
    """
    search = _Search(references)
    try:
        impossible = search.run()
    except _TooMuchWork:
        return None
    if id(schema) in impossible:
        return search.reason(schema)
    if references.targets:  # without, llguidance finds them itself
        for node, _ in references.nodes:
            if id(node) in impossible:
                node.clear()
                node["enum"] = []
    return None


class _Search:
    """The subschemas found possible so far."""

    def __init__(self, references: References) -> None:
        self._nodes = references.nodes
        self._targets = references.targets
        self._paths = {id(node): path for node, path in references.nodes}
        self._possible: set[int] = set()
        self._faults: dict[int, tuple[str, Any]] = {}  # by id of a subschema: words, and the subschema at fault
        self._work = 0

    def run(self) -> set[int]:
        """Return the ids of the impossible subschemas. Raises _TooMuchWork."""
        rest = [node for node, _ in reversed(self._nodes) if node.keys() & _RULE_OUT]  # the inner ones first
        self._possible = self._paths.keys() - set(map(id, rest))
        while True:
            left = [node for node in rest if not self._judge(node)]
            if len(left) == len(rest):
                return {id(node) for node in left}
            rest = left

    def reason(self, schema: dict[str, Any]) -> Reason:
        """Return the innermost cause that an impossible schema has none."""
        node, seen = schema, {id(schema)}
        while True:
            words, cause = self._faults.get(id(node), ("allows no value", None))
            if not isinstance(cause, dict) or id(cause) not in self._paths:
                return Reason(self._paths[id(node)], words)
            if id(cause) in seen:
                return Reason(self._paths[id(cause)], "requires itself without end")
            node = cause
            seen.add(id(node))

    def _judge(self, node: dict[str, Any]) -> bool:
        self._spend(1)
        fault = self._fault(node)
        if fault is None:
            self._possible.add(id(node))
        else:
            self._faults[id(node)] = fault
        return fault is None

    def _fault(self, node: dict[str, Any]) -> tuple[str, Any] | None:
        """Return why the subschema has no value, as far as is known; None: it has one."""
        parts = list(self._parts(node))
        if sum(part is node for part in parts) > 1:
            return "allows no value", node
        for part in parts:
            if part is not node and isinstance(part, dict) and not self._has_value(part):
                return "allows no value", part
            if not isinstance(part, dict):
                return "allows no value", None
            if part.get("enum") == []:
                return "has an empty enum", None
            for word in ("anyOf", "oneOf"):
                options = part.get(word)
                self._spend(len(options) // 16 if isinstance(options, list) else 0)
                if isinstance(options, list) and not any(map(self._has_value, options)):
                    return f"has no possible {word}", next((o for o in options if isinstance(o, dict)), None)
        if any("enum" in part or "const" in part for part in parts):
            return None
        kinds = _kinds(parts)
        faults = []
        for kind in sorted(kinds):
            fault = _range_fault(parts, kind)
            if fault is None and kind not in _SCALARS:
                cause = self._member_fault(parts, kind)
                fault = None if cause is None else ("allows no value", cause)
            if fault is None:
                return None
            faults.append(fault)
        return faults[0] if faults else ("has no type in common with what it is combined with", None)

    def _parts(self, node: dict[str, Any]) -> Iterator[Any]:
        """Yield a subschema and all that applies to the same value: what it refers to, and its allOf.

        One that comes back to itself so is yielded again.
        """
        seen: set[int] = set()
        waiting: list[Any] = [node]
        while waiting:
            part = waiting.pop()
            self._spend(1)
            if id(part) in seen:
                if part is node:
                    yield node
                continue
            seen.add(id(part))
            if part is not True and part is not None:
                yield part
            if isinstance(part, dict):
                waiting.append(self._targets.get(id(part), True))
                every = part.get("allOf")
                waiting += every if isinstance(every, list) else ()

    def _member_fault(self, parts: list[Any], kind: str) -> Any:
        """Return the schema of a member that every array or object of these subschemas has, if it is impossible."""
        members = _items if kind == "array" else _properties
        for member in members(parts):
            self._spend(1)
            if not self._has_value(member):
                return member
        return None

    def _spend(self, work: int) -> None:
        self._work += work
        if self._work > _MAX_WORK:
            raise _TooMuchWork

    def _has_value(self, schema: Any) -> bool:
        if isinstance(schema, dict):
            return id(schema) in self._possible or id(schema) not in self._paths
        return schema is not False


def _kinds(parts: list[Any]) -> set[str]:
    kinds = {"null", "boolean", "number", "integer", "string", "array", "object"}
    for part in parts:
        names = part.get("type", [*kinds])
        names = {names} if isinstance(names, str) else set(_names(names))
        kinds &= names | ({"integer"} if "number" in names else set())
    return kinds


def _range_fault(parts: list[Any], kind: str) -> tuple[str, Any] | None:
    for least, most, kinds in _RANGES:
        if kind in kinds:
            lows, highs = _numbers(parts, least), _numbers(parts, most)
            if lows and highs and max(lows) > min(highs):
                return f"has a {least} of {max(lows)} and a {most} of {min(highs)}", None
    return None


def _numbers(parts: list[Any], word: str) -> list[int | float]:
    values = [part.get(word) for part in parts]
    return [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]


def _items(parts: list[Any]) -> Iterable[Any]:
    least = max(_numbers(parts, "minItems"), default=0)
    for part in parts:
        first = part.get("prefixItems")
        first = first if isinstance(first, list) else []
        yield from first[: int(least)]
        if least > len(first):
            yield part.get("items", True)


def _properties(parts: list[Any]) -> Iterable[Any]:
    required = {name for part in parts for name in _names(part.get("required"))}
    for part in parts:
        properties = part.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        other = True if "patternProperties" in part else part.get("additionalProperties", True)
        yield from (properties.get(name, other) for name in required)


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []
