"""Custom tools, whose input is plain text: to the model each is a function with one string argument. Pure.

    custom tool ─ function_of() ─→ function          arguments {"input": "…"} ─ CustomInput ─→ input, as it arrives

Codex's apply_patch is one. A model may write other arguments than the schema's, unless the call is forced; the input
is then the only string among them, else their JSON as it is. Imports server only.
"""

import json
import re
from typing import Any

from server.api.responses.schema import CustomToolBody

_ARGUMENT = "input"
_OPENING = re.compile(rf'\s*\{{\s*"{_ARGUMENT}"\s*:\s*"')
_MAX_WAITING = 256  # characters; the opening and half an escape sequence are shorter
# Characters of a JSON string that are whole: half of a surrogate pair waits for the other one
_WHOLE = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+"
)


def function_of(tool: CustomToolBody) -> dict[str, Any]:
    """Return the function of a custom tool. A grammar is part of its description; a regular expression, of its schema
    as well, so that it holds where calls are forced.
    """
    text: dict[str, Any] = {"type": "string", "description": "The input of the tool, as plain text."}
    description = tool.description or ""
    grammar = tool.format
    if grammar is not None and grammar.type == "grammar":
        kind = "Lark grammar" if grammar.syntax == "lark" else "regular expression"
        description += f"\n\nThe input must match this {kind}:\n{grammar.definition}"
        if grammar.syntax == "regex":
            text["pattern"] = f"^(?:{grammar.definition})$"
    parameters = {
        "type": "object",
        "properties": {_ARGUMENT: text},
        "required": [_ARGUMENT],
        "additionalProperties": False,
    }
    function = {"name": tool.name, "parameters": parameters}
    return function | ({"description": description.strip()} if description.strip() else {})


def arguments_of(text: str) -> str:
    """Return the function's arguments of a custom tool's input in the history."""
    return json.dumps({_ARGUMENT: text}, ensure_ascii=False)


class CustomInput:
    """Reads the input out of the arguments of one call while they arrive."""

    def __init__(self) -> None:
        self._arguments: list[str] = []
        self._sent: list[str] = []
        self._rest = ""  # not decoded yet
        self._is_open = False  # inside the input's string

    def push(self, text: str) -> str:
        """Return the new text of the input after more of the arguments."""
        self._arguments.append(text)
        if len(self._rest) > _MAX_WAITING:  # other arguments, or what follows the input
            return ""
        self._rest += text
        if not self._is_open:
            opening = _OPENING.match(self._rest)
            if opening is None:
                return ""
            self._is_open, self._rest = True, self._rest[opening.end() :]
        match = _WHOLE.match(self._rest)
        assert match is not None, "it matches the empty text"
        self._rest = self._rest[match.end() :]
        return self._send(json.loads(f'"{match[0]}"', strict=False))

    def finish(self) -> str:
        """Return the text that is still missing: nothing follows."""
        sent, whole = "".join(self._sent), _input_of("".join(self._arguments))
        if whole is None:
            return "" if self._is_open else self._send("".join(self._arguments))
        return self._send(whole.removeprefix(sent)) if whole.startswith(sent) else ""

    @property
    def text(self) -> str:
        """The input so far."""
        return "".join(self._sent)

    def _send(self, text: str) -> str:
        self._sent.append(text)
        return text


def _input_of(arguments: str) -> str | None:
    """Return the input in whole arguments: the argument of its name, or the only one; None if there is none."""
    try:
        values = json.loads(arguments or "{}", strict=False)
    except (ValueError, RecursionError):
        return None
    if values == {}:
        return ""
    if not isinstance(values, dict):
        return None
    value = values.get(_ARGUMENT, next(iter(values.values())) if len(values) == 1 else None)
    if not isinstance(value, str):
        return None
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # lone surrogates are no text
