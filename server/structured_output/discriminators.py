"""require_discriminators: makes each alternative of a discriminated union require the property that tells it. Pure.

`discriminator` is a keyword of OpenAPI (3.1.0, section 4.8.25), which pydantic writes for its tagged unions beside
`oneOf`. The property must be there, so that a reader can tell the alternatives apart, but a schema of one that has a
default does not require it. With it llguidance knows, too, that the alternatives exclude each other.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from server.structured_output.schema_references import OF_NAMED, OF_ONE, OF_SCHEMAS
from server.text.parsers.json_pointer import pointed

_KEYWORD = "discriminator"


def require_discriminators(schema: dict[str, Any], nodes: Iterable[dict[str, Any]]) -> None:
    """Change the alternatives of the unions among `nodes`, subschemas of `schema`, in place."""
    for node in nodes:
        name = node[_KEYWORD].get("propertyName") if isinstance(node.get(_KEYWORD), dict) else None
        if not isinstance(name, str):
            continue
        for word in ("oneOf", "anyOf"):
            for option in node[word] if isinstance(node.get(word), list) else ():
                _require(name, _target(schema, option))


def with_discriminators(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose unions require their discriminators; a copy if it has any."""
    if not any(_KEYWORD in node for node in _subschemas(schema)):
        return dict(schema)
    copy: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(schema))
    require_discriminators(copy, list(_subschemas(copy)))
    return copy


def _require(name: str, option: Any) -> None:
    properties = option.get("properties") if isinstance(option, dict) else None
    if not isinstance(properties, dict) or name not in properties:
        return
    required = option.setdefault("required", [])
    if isinstance(required, list) and name not in required:
        required.append(name)


def _target(schema: dict[str, Any], option: Any) -> Any:
    """Return what an alternative refers to, or the alternative itself."""
    seen: set[int] = set()
    while isinstance(option, dict) and isinstance(option.get("$ref"), str) and id(option) not in seen:
        seen.add(id(option))
        option = pointed(schema, option["$ref"])
    return option


def _subschemas(schema: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    waiting: list[Any] = [schema]
    seen: set[int] = set()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        for word, value in node.items():
            if word in OF_NAMED and isinstance(value, dict):
                waiting += value.values()
            elif word in OF_SCHEMAS and isinstance(value, list):
                waiting += value
            elif word in OF_ONE:
                waiting.append(value)
