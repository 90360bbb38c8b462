"""ignored_fields: accepted fields of a body that have no effect, for the x-quire-ignored header. Pure.

A field is named if it has a value: null, empty and most false values do not count (server.api.known_fields.asks).
Imports server.api.schemas.
"""

from collections.abc import Iterator
from typing import Any

from server.api.known_fields import asks
from server.api.schemas import ChatBody, ChatMessage, CompletionBody
from server.structured_output.grammar_spec import ResponseFormat

_MESSAGE_FIELDS = ("annotations", "audio", "function_call", "refusal")
_OF_TEXTS = "add_special_tokens"
_PART_FIELDS = frozenset({"type", "text", "refusal", "prompt_cache_breakpoint"})


def ignored_fields(body: ChatBody | CompletionBody) -> list[str]:
    """Return the fields of a checked body that have no effect, e.g. "foo", "messages[0].cache_control"."""
    ignored = _with_value(body.model_extra)
    if isinstance(body, ChatBody):
        if (body.model_extra or {}).get(_OF_TEXTS) is False:
            ignored.remove(_OF_TEXTS)  # so it is: the template adds special tokens itself
        ignored += _ignored_in_chat(body)
    ignored += _ignored_in_format(body.response_format)
    options = body.stream_options
    if options is not None:
        ignored += [f"stream_options.{name}" for name in _with_value(options.model_extra)]
        if options.include_obfuscation:
            ignored.append("stream_options.include_obfuscation")
    return ignored


def _with_value(extra: dict[str, Any] | None) -> list[str]:
    return sorted(name for name, value in (extra or {}).items() if asks(name, value))


def _ignored_in_format(asked: ResponseFormat | None) -> Iterator[str]:
    if asked is not None:
        extra = _with_value(asked.model_extra)
        yield from (f"response_format.{name}" for name in extra if name != "schema")  # which is refused
        if asked.json_schema is not None:
            yield from (f"response_format.json_schema.{name}" for name in _with_value(asked.json_schema.model_extra))


def _ignored_in_chat(body: ChatBody) -> Iterator[str]:
    if body.store:
        yield "store"  # nothing is stored
    yield from _ignored_in_tools(body)
    if body.prompt_cache_options is not None:
        yield from (f"prompt_cache_options.{name}" for name in _with_value(body.prompt_cache_options.model_extra))
    if body.functions:
        yield "functions"  # check_chat() lets them pass only if none may be called
    for i, message in enumerate(body.messages):
        yield from (f"messages[{i}].{name}" for name in _ignored_in_message(message))


def _ignored_in_tools(body: ChatBody) -> Iterator[str]:
    if not body.tools or body.tool_choice == "none":  # then the model sees no tools and calls none
        if body.tools:
            yield "tools"
        if body.parallel_tool_calls is not None:
            yield "parallel_tool_calls"
        return
    is_forced = _is_forced(body.tool_choice)
    if is_forced:  # the answer is a call; response_format and structured_outputs constrain no call
        if body.response_format is not None and body.response_format.type != "text":
            yield "response_format"
        if body.structured_outputs is not None and body.structured_outputs.is_given:
            yield "structured_outputs"
    for i, tool in enumerate(body.tools):
        yield from (f"tools[{i}].{name}" for name in _with_value(tool.model_extra))
        yield from (f"tools[{i}].function.{name}" for name in _with_value(tool.function.model_extra))
        if tool.function.strict and not is_forced:
            yield f"tools[{i}].function.strict"  # arguments are unconstrained unless a call is required


def _is_forced(choice: Any) -> bool:
    """Return whether a choice of tools, "none" left out, requires a call."""
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return bool(choice["allowed_tools"]["mode"] == "required")
    return choice not in (None, "auto")


def _ignored_in_message(message: ChatMessage) -> Iterator[str]:
    yield from _with_value(message.model_extra)
    values = (message.annotations, message.audio, message.function_call, message.refusal)
    yield from (name for name, value in zip(_MESSAGE_FIELDS, values, strict=True) if value)
    if message.reasoning is not None and message.reasoning_content not in (None, message.reasoning):
        yield "reasoning"  # two names of one text
    parts: list[Any] = message.content if isinstance(message.content, list) else []
    for i, part in enumerate(parts):
        if isinstance(part, dict):
            yield from (f"content[{i}].{name}" for name in _with_value(part) if name not in _PART_FIELDS)
