"""Translation of a Responses request to a chat request. Pure; imports server only.

Items become messages. The items of one assistant turn (reasoning, a message, calls) are joined: an item is added to the
open assistant message if its kind may follow there, and any other item closes that message. The server stores nothing,
so references to stored objects are refused.
"""

from typing import Any

from engine.interface.errors import InvalidParameter, UnsupportedFeature
from server.api.as_chat import (
    ChatEquivalent,
    Turn,
    chat_body,
    field_names_of,
    named_extras,
    no_parts,
    text_parts,
    unseal,
)
from server.api.known_fields import RESPONSES_FIELDS, refuse_known
from server.api.prompt_pins import longest_breakpoint, longest_of
from server.api.responses.custom_tools import arguments_of, function_of
from server.api.responses.objects import CustomTool, FunctionTool, ReasoningEcho, ResponsesEcho, TextEcho
from server.api.responses.schema import (
    TEXT_KINDS,
    CustomCallItem,
    CustomOutputItem,
    CustomToolBody,
    FunctionCallItem,
    FunctionOutputItem,
    FunctionToolBody,
    InputItem,
    InputTokensBody,
    MessageItem,
    OtherItem,
    ReasoningItem,
    ResponsesBody,
    TextFormat,
    input_items,
    served_tool,
)
from server.api.sampling_fields import shared_values

SEALED_REASONING, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"

_FIELDS = {"max_completion_tokens": "max_output_tokens", "response_format": "text.format"}
_FIELDS |= {"response_format.json_schema": "text.format", "reasoning_effort": "reasoning.effort", "messages": "input"}
_SYSTEM = ("system", "developer")
_CHOICES = (None, "auto", "none", "required")
_FUNCTION_KEYS = {"name", "description", "parameters", "strict"}
_THINKS, _SAYS, _CALL = 0, 1, 2  # the order of an assistant's items within one turn


def translate_responses(body: ResponsesBody) -> ChatEquivalent:
    """Return the chat request. Raises RequestErrors that name fields of the Responses request."""
    _refuse(
        ("background", body.background or None, "a background answer could not be fetched later; use stream"),
        ("prompt", body.prompt, "send its text as instructions and input"),
    )
    has_logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    fields = shared_values(body) | {
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": has_logprobs or None,
        "top_logprobs": body.top_logprobs if has_logprobs else None,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": longest_of(
            body.prompt_cache_retention, longest_breakpoint(body.prompt_cache_options, [body.input])
        ),
        "stream": body.stream,
    }
    return _translate(body, fields, ignored=_ignored_in_generation(body))


def translate_input_tokens(body: InputTokensBody) -> ChatEquivalent:
    """Return the chat request whose prompt is counted. Raises RequestErrors that name the client's fields."""
    return _translate(body, {}, ignored=[])


def _translate(body: InputTokensBody, fields: dict[str, Any], *, ignored: list[str]) -> ChatEquivalent:
    _refuse(
        ("previous_response_id", body.previous_response_id, "send the whole conversation as input"),
        ("conversation", body.conversation, "send the whole conversation as input"),
    )
    refuse_known(body, RESPONSES_FIELDS)
    messages = _Messages()
    if body.instructions:
        messages.add_text("system", [{"type": "text", "text": body.instructions}], at="instructions")
    for i, item in enumerate(input_items(body)):
        messages.add(item, at=f"input[{i}]")
    if not messages.turns:
        raise InvalidParameter("input has no message, call, output or reasoning.", param="input")
    tools = _Tools(body)
    field_names = _FIELDS | field_names_of(messages.turns) | tools.field_names
    fields |= {
        "model": body.model,
        "messages": [turn.message() for turn in messages.turns],
        "tools": tools.tools or None,
        "tool_choice": tools.choice,
        "parallel_tool_calls": body.parallel_tool_calls if tools.tools else None,
        "response_format": _response_format(body),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    ignored = [*_ignored(body), *ignored, *messages.ignored, *tools.ignored]
    return ChatEquivalent(chat_body(fields, field_names=field_names), ignored, field_names)


def echo_of(body: ResponsesBody) -> ResponsesEcho:
    """Return the fields that the answer repeats. translate_responses() must have checked the body before."""
    text, reasoning = body.text, body.reasoning
    format_ = text.format if text is not None and text.format is not None else TextFormat(type="text")
    return ResponsesEcho(
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=ReasoningEcho(reasoning.effort, reasoning.summary) if reasoning else ReasoningEcho(),
        safety_identifier=body.safety_identifier,
        temperature=body.temperature,
        text=TextEcho(format_.model_dump(by_alias=True, exclude_none=True), (text and text.verbosity) or "medium"),
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=[_tool_echo(tool) for tool in _served_tools(body)],
        top_logprobs=body.top_logprobs or 0,
        top_p=body.top_p,
        user=body.user,
    )


def custom_names_of(body: ResponsesBody) -> frozenset[str]:
    """Return the names of the custom tools. translate_responses() must have checked the body before."""
    return frozenset(tool.name for tool in _served_tools(body) if isinstance(tool, CustomToolBody))


def asks_for_summary(body: ResponsesBody) -> bool:
    """Return whether reasoning is also sent as its summary: many clients show summaries only."""
    return body.reasoning is not None and bool(body.reasoning.summary or body.reasoning.generate_summary)


def _served_tools(body: ResponsesBody) -> list[FunctionToolBody | CustomToolBody]:
    tools = (served_tool(value, at=f"tools[{i}]") for i, value in enumerate(body.tools or ()))
    return [tool for tool in tools if tool is not None]


def _tool_echo(tool: FunctionToolBody | CustomToolBody) -> FunctionTool | CustomTool:
    if isinstance(tool, CustomToolBody):
        format_ = {"type": "text"} if tool.format is None else tool.format.model_dump(exclude_none=True)
        return CustomTool(name=tool.name, description=tool.description, format=format_)
    return FunctionTool(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=bool(tool.strict)
    )


def _refuse(*refused: tuple[str, Any, str]) -> None:
    """Refuse the first field that has a value. Each has its name, its value, and what to do instead."""
    for field, value, instead in refused:
        if value not in (None, ""):
            raise UnsupportedFeature(f"{field}: this server stores nothing; {instead}.", param=field)


def _response_format(body: InputTokensBody) -> dict[str, Any] | None:
    format_ = body.text.format if body.text is not None else None
    if format_ is None:
        return None
    if format_.schema_ is not None and format_.type != "json_schema":
        raise InvalidParameter(
            f"text.format.schema needs the type json_schema, not {format_.type}.", param="text.format.schema"
        )
    if format_.type == "text":
        return None
    if format_.type == "json_object":
        return {"type": "json_object"}
    if format_.name is None or format_.schema_ is None:
        missing = "name" if format_.name is None else "schema"
        raise InvalidParameter(f"text.format.{missing} is required.", param=f"text.format.{missing}")
    schema = {"name": format_.name, "schema": format_.schema_, "strict": format_.strict}
    return {
        "type": "json_schema",
        "json_schema": {key: value for key, value in schema.items() if value is not None}
        | ({"description": format_.description} if format_.description else {}),
    }


def _ignored(body: InputTokensBody) -> list[str]:
    ignored = named_extras(body.model_extra or {}, known=set(), at="")
    if body.truncation == "auto":
        ignored.append("truncation")  # an input that is too long is refused all the same
    for name, options in (("text", body.text), ("reasoning", body.reasoning)):
        ignored += named_extras((options and options.model_extra) or {}, known=set(), at=name)
    if body.text is not None and body.text.format is not None:
        format_ = body.text.format
        of_schemas = {"name": format_.name, "description": format_.description, "strict": format_.strict}
        unused = of_schemas if format_.type != "json_schema" else {}
        ignored += named_extras({**(format_.model_extra or {}), **unused}, known=set(), at="text.format")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        ignored.append("text.verbosity")
    return ignored


def _ignored_in_generation(body: ResponsesBody) -> list[str]:
    ignored = ["store"] if body.store else []
    options = body.stream_options
    if options is not None:
        chat_only = {"include_usage": options.include_usage, "continuous_usage_stats": options.continuous_usage_stats}
        asked = chat_only | {"include_obfuscation": options.include_obfuscation} | (options.model_extra or {})
        ignored += named_extras(asked, known=set(), at="stream_options")
    if body.prompt_cache_options is not None:
        ignored += named_extras(body.prompt_cache_options.model_extra or {}, known=set(), at="prompt_cache_options")
    for i, name in enumerate(body.include or ()):
        if name not in (SEALED_REASONING, LOGPROBS):
            ignored.append(f"include[{i}]")
    return ignored


class _Tools:
    """The functions of a request in chat's form, and the choice among them."""

    def __init__(self, body: InputTokensBody) -> None:
        self.tools: list[dict[str, Any]] = []
        self.ignored: list[str] = []
        self.field_names: dict[str, str] = {}
        self.choice: Any = body.tool_choice
        self._named: set[str] = set()  # functions that allowed_tools lists
        allowed = self._read_choice(body.tool_choice) if body.tool_choice not in _CHOICES else None
        for i, value in enumerate(body.tools or ()):
            tool = served_tool(value, at=f"tools[{i}]")
            if tool is None:
                self.ignored.append(f"tools[{i}]")
            elif allowed is None or tool.name in allowed:
                self._add(tool, at=f"tools[{i}]")
        unknown = self._named - {tool["function"]["name"] for tool in self.tools}
        if unknown:
            raise InvalidParameter(
                f"tool_choice names the function {min(unknown)[:64]!r}, which is not among the tools.",
                param="tool_choice",
            )
        if not self.tools and self.choice in ("auto", "none"):
            self.choice = None

    def _add(self, tool: FunctionToolBody | CustomToolBody, *, at: str) -> None:
        place = f"tools[{len(self.tools)}]"
        self.field_names |= {place: at, f"{place}.function": at}
        if isinstance(tool, CustomToolBody):
            function = function_of(tool)
            is_forced = self.choice not in (None, "auto", "none")
            if tool.format is not None and tool.format.type == "grammar":
                self.field_names[f"{place}.function.parameters"] = f"{at}.format"
                if tool.format.syntax == "lark" or not is_forced:
                    self.ignored.append(f"{at}.format")  # the model reads it, but may write something else
        else:
            function = tool.model_dump(include=_FUNCTION_KEYS, exclude_none=True)
        self.tools.append({"type": "function", "function": function})
        self.ignored += named_extras(tool.model_extra or {}, known=set(), at=at)

    def _read_choice(self, choice: Any) -> set[str] | None:
        """Set the choice in chat's form; return the names of the tools that are allowed, if not all are."""
        if not isinstance(choice, dict):
            raise InvalidParameter("tool_choice must be auto, none, required or an object.", param="tool_choice")
        kind, name = choice.get("type"), choice.get("name")
        if kind in ("function", "custom"):
            if not isinstance(name, str):
                raise InvalidParameter("tool_choice.name is required, and a string.", param="tool_choice")
            self.choice = {"type": "function", "function": {"name": name}}
            return None
        if kind != "allowed_tools":
            shown = kind[:40] if isinstance(kind, str) else "nothing"
            raise UnsupportedFeature(
                f"tool_choice.type must be function, custom or allowed_tools, got {shown}: other tools are not served.",
                param="tool_choice",
            )
        mode, tools = choice.get("mode"), choice.get("tools")
        if mode not in ("auto", "required") or not isinstance(tools, list):
            raise InvalidParameter(
                "tool_choice.mode must be auto or required, and tool_choice.tools a list.", param="tool_choice"
            )
        self.choice = mode
        served = [tool for tool in tools if isinstance(tool, dict) and tool.get("type") in ("function", "custom")]
        self._named = {str(tool.get("name")) for tool in served}  # of the others none is served
        return self._named


class _Messages:
    """The chat messages of the items added so far."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.ignored: list[str] = []
        self._rank: int | None = None  # of the last item in the assistant's open turn

    def add(self, item: InputItem, *, at: str) -> None:
        """Add one item. Raises RequestErrors."""
        if not isinstance(item, OtherItem):
            self.ignored += named_extras(item.model_extra or {}, known=set(), at=at)
        match item:
            case MessageItem():
                if item.content == [] and item.role != "assistant":
                    raise no_parts(f"{at}.content")
                parts = text_parts(item.content, at=f"{at}.content", kinds=TEXT_KINDS, ignored=self.ignored)
                self.add_text(item.role, parts, at=at)
            case FunctionCallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                self._assistant(_CALL, at=at).calls.append(call)
            case CustomCallItem():
                function = {"name": item.name, "arguments": arguments_of(item.input)}
                call = {"id": item.call_id, "type": "function", "function": function}
                self._assistant(_CALL, at=at).calls.append(call)
            case FunctionOutputItem() | CustomOutputItem():
                parts = text_parts(item.output, at=f"{at}.output", kinds=TEXT_KINDS, ignored=self.ignored)
                self._append(Turn(role="tool", at=at, parts=parts, call_id=item.call_id))
            case ReasoningItem():
                self._add_reasoning(item, at=at)
            case OtherItem(type="item_reference"):
                raise UnsupportedFeature(
                    f"{at} is an item_reference: this server stores nothing; send the item itself "
                    "(some clients do so once the request has store = false).",
                    param=at,
                )
            case OtherItem():
                self.ignored.append(at)

    def add_text(self, role: str, parts: list[dict[str, str]], *, at: str) -> None:
        """Add a message. Many templates take one system message, as the first, and no two of the user in a row."""
        last = self.turns[-1].role if self.turns else None
        is_instruction = role in _SYSTEM and last in _SYSTEM and len(self.turns) == 1
        if role == "assistant":
            self._assistant(_SAYS, at=at).parts.extend(parts)
        elif is_instruction or role == last == "user":
            self.turns[-1].parts.extend(parts)
        else:
            self._append(Turn(role=role, at=at, parts=parts))

    def _add_reasoning(self, item: ReasoningItem, *, at: str) -> None:
        text = "\n".join(part.text for part in item.content or ())
        if not text and item.encrypted_content:
            text = unseal(item.encrypted_content) or ""
            if not text:
                self.ignored.append(f"{at}.encrypted_content")
        text = text or "\n".join(part.text for part in item.summary or ())
        if text:
            self._assistant(_THINKS, at=at).thoughts.append(text)

    def _assistant(self, rank: int, *, at: str) -> Turn:
        """Return the assistant's turn that an item of this rank belongs to."""
        is_open = self._rank is not None and (rank > self._rank or (rank == self._rank and rank != _SAYS))
        if not is_open:
            self._append(Turn(role="assistant", at=at))
        self._rank = rank
        return self.turns[-1]

    def _append(self, turn: Turn) -> None:
        self.turns.append(turn)
        self._rank = None
