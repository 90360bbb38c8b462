"""ChatEquivalent: a /v1/responses or /v1/messages request as a chat request, and helpers of both translations.

    ResponsesBody, MessagesBody ─→ ChatEquivalent(ChatBody, ignored, field_names) ─→ prepare_chat ─→ their writers

Errors in the chat request name fields of the client's request: `field_names` maps a path in the chat request to a path
in the client's request. Imports server.api and engine.interface.
"""

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from engine.interface.errors import InvalidParameter, RequestError, UnsupportedFeature
from server.api.known_fields import asks
from server.api.schemas import ChatBody
from server.api.strict_json import parse_body

_PATH = re.compile(r"(?<![\w.\]])[a-z]\w*(?:\[\d+\]|\.\w+)*")
_PATH_ENDS = re.compile(r"[.\[]")
_SEAL = "quire1."  # version of the format; a text sealed by another server is not opened


class ChatEquivalent(msgspec.Struct, frozen=True):
    """A request of another API, translated to a chat request."""

    body: ChatBody
    ignored: list[str]  # fields of the client's request that have no effect
    field_names: dict[str, str]  # path in the chat request → path in the client's request


class Turn(msgspec.Struct, kw_only=True):
    """One message of the chat request while it is built. `at`: path in the client's request where it begins."""

    role: str
    at: str
    parts: list[dict[str, str]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    call_id: str | None = None  # of the call that this is the result of

    def message(self) -> dict[str, Any]:
        """Return the message."""
        message: dict[str, Any] = {"role": self.role}
        if self.parts or not self.calls:
            message["content"] = self.parts or ""
        if self.thoughts:
            message["reasoning_content"] = "\n".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        if self.call_id is not None:
            message["tool_call_id"] = self.call_id
        return message


def field_names_of(turns: Sequence[Turn]) -> dict[str, str]:
    """Return the path in the client's request of each message."""
    return {f"messages[{i}]": turn.at for i, turn in enumerate(turns)}


def chat_body(fields: Mapping[str, Any], *, field_names: Mapping[str, str]) -> ChatBody:
    """Return a ChatBody of the fields that are not None. Raises RequestErrors that name the client's fields."""
    with errors_in_client_fields(field_names):
        return parse_body(ChatBody, {name: value for name, value in fields.items() if value is not None})


@contextmanager
def errors_in_client_fields(field_names: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields in the param and the message of a RequestError raised inside the block."""
    try:
        yield
    except RequestError as error:
        error.message = rename_fields(error.message, field_names)
        if error.param is not None:
            error.param = rename_fields(error.param, field_names)
        raise


def rename_fields(text: str, field_names: Mapping[str, str]) -> str:
    """Return the text with each path of the chat request replaced by the path in the client's request."""

    def replace(match: re.Match[str]) -> str:
        path = match[0]
        ends = [end.start() for end in _PATH_ENDS.finditer(path)]
        for end in (len(path), *reversed(ends)):
            if path[:end] in field_names:
                return field_names[path[:end]] + path[end:]
        return path

    return _PATH.sub(replace, text)


def text_parts(content: Any, *, at: str, kinds: Mapping[str, str], ignored: list[str]) -> list[dict[str, str]]:
    """Return a string or a list of text parts as the parts of a chat message; add fields without effect to `ignored`.

    `kinds`: the types of part that are text, and the key that holds it. Raises for any other part.
    """
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    if not isinstance(content, list):
        raise InvalidParameter(f"{at} must be a string or a list of parts.", param=at)
    parts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise InvalidParameter(f"{at}[{i}] must be an object with a type.", param=at)
        if kind not in kinds:
            raise not_text(kind, at=f"{at}[{i}]", param=at)
        text = part.get(kinds[kind])
        if not isinstance(text, str):
            raise InvalidParameter(f"{at}[{i}].{kinds[kind]} must be a string.", param=at)
        if len(part) > 2:
            ignored += named_extras(part, known={"type", kinds[kind], *HARMLESS_IN_PARTS}, at=f"{at}[{i}]")
        parts.append({"type": "text", "text": text})
    return parts


# Of parts and blocks: what a part of an answer carries when it comes back in the history, and marks of the prefix that
# is to be cached, which count for the whole prompt.
HARMLESS_IN_PARTS = frozenset({"annotations", "logprobs", "citations", "cache_control", "prompt_cache_breakpoint"})


def named_extras(fields: Mapping[str, Any], *, known: set[str], at: str) -> list[str]:
    """Return the paths of unknown fields that have a value."""
    prefix = f"{at}." if at else ""
    return [f"{prefix}{name}" for name in sorted(fields.keys() - known) if asks(name, fields[name])]


def no_parts(at: str) -> InvalidParameter:
    """Return the error for an empty list of parts, which stands for no text in a model's own words only."""
    return InvalidParameter(f"{at} is an empty list; it must have at least one part.", param=at)


def not_text(kind: str, *, at: str, param: str) -> UnsupportedFeature:
    """Return the error for content that is not text."""
    return UnsupportedFeature(f"{at} is of type {kind[:40]!r}: this model reads text only.", param=param)


def seal(text: str) -> str:
    """Return reasoning in an opaque form, for clients that return it with the next request but do not keep its text.

    It is encoded, not encrypted: its reader may see the text anyway.
    """
    return _SEAL + base64.urlsafe_b64encode(text.encode()).decode()


def unseal(sealed: str) -> str | None:
    """Return the text that seal() was given; None if it is broken or comes from another server."""
    if not sealed.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(_SEAL), altchars=b"-_", validate=True).decode()
    except ValueError:  # not base64, or not UTF-8
        return None
