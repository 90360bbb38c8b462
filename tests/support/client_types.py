"""Answers checked against the client packages' own types, strictly, and for fields that those do not have."""

import functools
import json
from collections.abc import Iterator
from typing import Any

import pydantic


def check_type(kind: Any, value: Any, *, extras: frozenset[str] = frozenset()) -> Any:
    """Return the value as the type; fail if it does not fit exactly, or has fields the type does not know."""
    parsed = _adapter(kind).validate_json(json.dumps(value), strict=True)
    assert set(_extras(parsed)) <= extras
    return parsed


@functools.cache
def _adapter(kind: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(kind)


def named_events(text: str) -> list[tuple[str, dict]]:
    """Parse a stream of named events; each must carry its name as its type."""
    events = []
    for block in text.split("\n\n"):
        if not block or block.startswith(":"):
            continue
        name, data = block.split("\n", 1)
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append((event["type"], event))
    return events


def _extras(value: Any) -> Iterator[str]:
    if isinstance(value, pydantic.BaseModel):
        yield from value.model_extra or ()
        for field in type(value).model_fields:
            yield from _extras(vars(value).get(field))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _extras(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _extras(item)
