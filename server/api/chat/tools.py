"""ToolPlan: the tools of a chat request: shown to the model, callable, required. Pure. Raises RequestErrors."""

from typing import Any

import msgspec

from engine.interface.errors import InvalidParameter, UnsupportedFeature
from server.api.schemas import ChatBody, Tool
from server.text.parsers.base import ToolSpec
from server.text.parsers.detect import ChatFormat

_NO_PARAMETERS = {"type": "object", "properties": {}}
_ALLOW_UNNAMED = {"additionalProperties", "unevaluatedProperties", "patternProperties"}  # beside empty properties
_ALLOW_UNNAMED |= {"allOf", "anyOf", "oneOf", "$ref"}
_MODES = ("none", "auto", "required")
_MAX_SHOWN_CHARS = 64


class ToolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of a request's tools on the prompt and the answer."""

    shown: list[dict[str, Any]] | None = None  # to the model, by its template
    callable: tuple[ToolSpec, ...] = ()  # empty: text is never read as a call
    must_call: bool = False  # one of the callable ones
    is_parallel: bool = True  # more than one call may be made


def plan_tools(body: ChatBody) -> ToolPlan:
    """Check tools, tool_choice and parallel_tool_calls against each other."""
    tools = body.tools or []
    named = _named_choice(body.tool_choice)
    specs = tuple(_spec(tool, index=i) for i, tool in enumerate(tools))
    names = [spec.name for spec in specs]
    for i, name in enumerate(names):
        if name in names[:i]:
            param = f"tools[{i}].function.name"
            raise InvalidParameter(f"{param} is {name!r}, which another tool is called already.", param=param)
    if not tools:
        if body.tool_choice not in (None, "none", "auto"):
            raise InvalidParameter(f"tool_choice is {_shown(body.tool_choice)}, but there are no tools.", param="tools")
        return ToolPlan()
    if named is not None and named not in names:
        raise InvalidParameter(
            f"tool_choice names the function {named[:_MAX_SHOWN_CHARS]!r}, which is not among the tools.",
            param="tool_choice",
        )
    if body.tool_choice == "none":
        return ToolPlan()
    return ToolPlan(
        shown=[_shown_tool(tool) for tool in tools],
        callable=tuple(spec for spec in specs if named in (None, spec.name)),
        must_call=named is not None or body.tool_choice == "required",
        is_parallel=named is None and body.parallel_tool_calls is not False,
    )


def check_tools(plan: ToolPlan, chat_format: ChatFormat) -> None:
    """Refuse tools that the model cannot call."""
    if not plan.shown:
        return
    if not chat_format.takes_tools:
        raise UnsupportedFeature(
            "tools: this model's chat template has no place for tools, so it cannot call any "
            '(tool_choice "none" lets them pass).',
            param="tools",
        )
    if chat_format.tools is None:
        raise UnsupportedFeature(
            "tools: the form of this model's tool calls is not one that this server knows "
            '(tool_choice "none" lets them pass).',
            param="tools",
        )


def check_tool_results(body: ChatBody) -> None:
    """Refuse a tool message that answers no call of an assistant message before it.

    The result of a call without an id may have any.
    """
    known: set[str | None] = set()
    for i, message in enumerate(body.messages):
        known.update(call.id for call in message.tool_calls or () if message.role == "assistant")
        if message.role == "tool" and message.tool_call_id is not None and not known & {message.tool_call_id, None}:
            param = f"messages[{i}].tool_call_id"
            raise InvalidParameter(
                f"{param} is {_shown(message.tool_call_id)}, which no tool call of an assistant message before it has.",
                param=param,
            )


def _named_choice(choice: Any) -> str | None:
    if choice is None or choice in _MODES:
        return None
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return name
    if isinstance(choice, dict) and choice.get("type") in ("allowed_tools", "custom"):
        raise UnsupportedFeature(
            f"tool_choice of the type {choice['type']} is not supported by this server.", param="tool_choice"
        )
    raise InvalidParameter(
        'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}, '
        f"got {_shown(choice)}.",
        param="tool_choice",
    )


def _spec(tool: Tool, *, index: int) -> ToolSpec:
    function = tool.function
    parameters = _NO_PARAMETERS if function.parameters is None else function.parameters
    if parameters.get("type", "object") != "object":
        param = f"tools[{index}].function.parameters"
        raise InvalidParameter(
            f"{param} must be the schema of an object, its type is {_shown(parameters['type'])}.", param=param
        )
    if parameters.get("properties") == {} and not parameters.keys() & _ALLOW_UNNAMED:
        parameters = {**parameters, "additionalProperties": False}  # an empty list of parameters, nothing to invent
    return ToolSpec(function.name, {"type": "object", **parameters}, bool(function.strict))


def _shown_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool as templates expect it: without `strict`, which only this server reads."""
    function = tool.function
    shown: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        shown["description"] = function.description
    shown["parameters"] = function.parameters or _NO_PARAMETERS
    return {"type": "function", "function": shown}


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return repr(value)[:_MAX_SHOWN_CHARS]
