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
_ALLOWED_MODES = ("auto", "required")
_MAX_SHOWN_CHARS = 64


class _Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What tool_choice asks for. `names`: of the tools that may be called and are shown; None allows all."""

    mode: str = "auto"  # of _MODES
    names: tuple[str, ...] | None = None
    is_single: bool = False  # one call of one function


class ToolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of a request's tools on the prompt and the answer."""

    shown: list[dict[str, Any]] | None = None  # to the model, by its template
    callable: tuple[ToolSpec, ...] = ()  # empty: text is never read as a call
    must_call: bool = False  # one of the callable ones
    is_parallel: bool = True  # more than one call may be made


def plan_tools(body: ChatBody) -> ToolPlan:
    """Check tools, tool_choice and parallel_tool_calls against each other."""
    tools = body.tools or []
    choice = _choice_of(body.tool_choice)
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
    unknown = next((name for name in choice.names or () if name not in names), None)
    if unknown is not None:
        raise InvalidParameter(
            f"tool_choice names the function {unknown[:_MAX_SHOWN_CHARS]!r}, which is not among the tools.",
            param="tool_choice",
        )
    if choice.mode == "none":
        return ToolPlan()
    allowed = names if choice.names is None else choice.names
    # nothing but a grammar keeps a model from a tool that it sees, and auto has none: it sees the allowed ones
    seen = names if choice.is_single else allowed
    return ToolPlan(
        shown=[_shown_tool(tool) for tool in tools if tool.function.name in seen],
        callable=tuple(spec for spec in specs if spec.name in allowed),
        must_call=choice.mode == "required",
        is_parallel=not choice.is_single and body.parallel_tool_calls is not False,
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


def _choice_of(choice: Any) -> _Choice:
    """Read tool_choice. Raises RequestErrors."""
    if choice is None or choice in _MODES:
        return _Choice(mode=choice or "auto")
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function" and (name := _function_name(choice)) is not None:
        return _Choice(mode="required", names=(name,), is_single=True)
    if kind == "allowed_tools":
        return _allowed(choice.get("allowed_tools"))
    if kind == "custom":
        raise UnsupportedFeature(
            "tool_choice of the type custom is not supported: functions alone are tools in this API.",
            param="tool_choice",
        )
    raise InvalidParameter(
        'tool_choice must be "none", "auto", "required", {"type": "function", "function": {"name": …}} or '
        f'{{"type": "allowed_tools", "allowed_tools": {{"mode": …, "tools": […]}}}}, got {_shown(choice)}.',
        param="tool_choice",
    )


def _allowed(value: Any) -> _Choice:
    mode, tools = (value.get("mode"), value.get("tools")) if isinstance(value, dict) else (None, None)
    if mode not in _ALLOWED_MODES or not isinstance(tools, list) or not tools:
        raise InvalidParameter(
            "tool_choice.allowed_tools must have the mode auto or required, and tools, a list of at least one tool.",
            param="tool_choice",
        )
    names = []
    for i, tool in enumerate(tools):
        name = _function_name(tool) if isinstance(tool, dict) and tool.get("type") == "function" else None
        if name is None:
            raise InvalidParameter(
                f'tool_choice.allowed_tools.tools[{i}] must be {{"type": "function", "function": {{"name": …}}}}.',
                param="tool_choice",
            )
        names.append(name)
    return _Choice(mode=mode, names=tuple(dict.fromkeys(names)))  # once each: every tool is looked up in them


def _function_name(value: dict[str, Any]) -> str | None:
    function = value.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


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
