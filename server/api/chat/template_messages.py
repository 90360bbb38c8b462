"""Template messages: chat messages of a request in the form that chat templates expect. Pure."""

import hashlib
from typing import Any

from engine.interface.errors import InvalidParameter, UnsupportedFeature
from server.api.as_chat import no_parts
from server.api.schemas import ChatBody, ChatMessage
from server.api.strict_json import parse_json
from server.errors import MalformedBody

_NUM_SHORT_ID_CHARS = 9


def template_messages(body: ChatBody, *, knows_developer: bool) -> list[dict[str, Any]]:
    """Return the messages as a chat template expects them. Raises for content that is not text."""
    messages = []
    for i, message in enumerate(body.messages):
        role = message.role if message.role != "developer" or knows_developer else "system"
        entry: dict[str, Any] = {"role": role}
        content = _text_content(message, index=i)
        if content is not None:
            entry["content"] = content
        reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
        if reasoning is not None:
            entry["reasoning_content"] = reasoning
        if message.tool_calls:
            entry["tool_calls"] = [
                _template_tool_call(call.model_dump(exclude_none=True)) for call in message.tool_calls
            ]
        if message.role == "tool" and message.tool_call_id is None:
            param = f"messages[{i}].tool_call_id"
            raise InvalidParameter(f"{param} is required for the role tool.", param=param)
        given = {"name": message.name, "tool_call_id": message.tool_call_id}
        entry |= {name: value for name, value in given.items() if value is not None}
        messages.append(entry)
    return messages


def shorten_call_ids(messages: list[dict[str, Any]]) -> None:
    """Replace tool call ids by the nine letters and digits that Mistral's templates insist on, a call's and its
    answer's by the same ones.
    """
    for message in messages:
        calls = message.get("tool_calls", [])
        for call in calls:
            if "id" in call:
                call["id"] = _short_id(call["id"])
        if "tool_call_id" in message:
            message["tool_call_id"] = _short_id(message["tool_call_id"])


def _short_id(call_id: str) -> str:
    if len(call_id) == _NUM_SHORT_ID_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_NUM_SHORT_ID_CHARS]


def _text_content(message: ChatMessage, *, index: int) -> str | None:
    """Return the message's text; text parts are joined by newlines, as vLLM does."""
    content, field = message.content, f"messages[{index}].content"
    if content is None:
        if message.role != "assistant":
            raise InvalidParameter(f"{field} is required for the role {message.role}.", param=field)
        return None if message.tool_calls else ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameter(f"{field} must be a string or a list of parts.", param=field)
    if not content:
        raise no_parts(field)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text" if kind == "text" else "refusal") if isinstance(part, dict) else None
        if kind in ("text", "refusal") and isinstance(text, str):
            texts.append(text)
        elif kind in ("text", "refusal") or not isinstance(kind, str):
            raise InvalidParameter(f"{field}[{i}] must be {{type: text, text: a string}}.", param=field)
        else:
            raise UnsupportedFeature(f"{field}[{i}] is of type {kind[:40]!r}: this model reads text only.", param=field)
    return "\n".join(texts)


def _template_tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, since templates print them with tojson."""
    arguments = call["function"].get("arguments") or "{}"
    try:
        parsed = parse_json(arguments.encode(), takes_last=True)
    except MalformedBody:  # not an object, or one that no body may contain: kept as text
        return call
    return {**call, "function": {**call["function"], "arguments": parsed}}
