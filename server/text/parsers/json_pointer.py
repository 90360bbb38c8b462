"""JSON pointers (RFC 6901) into a JSON value. Pure."""

import re
from typing import Any
from urllib.parse import unquote

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


def pointed(root: Any, reference: str) -> Any:
    """Return what a reference from the root, "#" or "#/…", names; None: nothing, or it has another form."""
    start, *names = unquote(reference).split("/")
    step: tuple[Any, str | int] | None = (root, "") if start == "#" else None
    for name in names:
        step = None if step is None else member(step[0], name)
    return None if step is None else step[0]


def member(node: Any, escaped: str) -> tuple[Any, str | int] | None:
    """Return the child that a name of a pointer leads to, and its key."""
    name = escaped.replace("~1", "/").replace("~0", "~")
    if isinstance(node, dict) and name in node:
        return node[name], name
    if isinstance(node, list) and _INDEX.fullmatch(name) and int(name) < len(node):
        return node[int(name)], int(name)
    return None
