"""A tool of a request, checked. Imports msgspec."""

from typing import Any

import msgspec


class ToolSpec(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any]  # a JSON schema of an object
    is_strict: bool = False  # arguments must match the schema, all of it
