"""Translation of an Anthropic Messages request to a chat request. Pure; imports server only.

The blocks of a message become one or more chat messages: a tool result is a message of its own. Consecutive turns of a
role are joined, as in Anthropic's API. The answer continues a last message of the assistant.
"""

from typing import Any

import msgspec

from engine.interface.errors import InvalidParameter
from server.api.as_chat import (
    ChatEquivalent,
    Turn,
    chat_body,
    field_names_of,
    named_extras,
    no_parts,
    not_text,
    text_parts,
    unseal,
)
from server.api.known_fields import MESSAGES_FIELDS, refuse_known
from server.api.messages.schema import (
    Block,
    ClientTool,
    CountTokensBody,
    MessagesBody,
    OtherBlock,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    check_marks,
    client_tool,
    content_blocks,
)
from server.api.prompt_pins import longest_mark
from server.api.sampling_fields import shared_values
from server.api.strict_json import StrictModel

_FIELDS = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences", "reasoning_effort": "output_config.effort"}
_FIELDS |= {"thinking_token_budget": "thinking.budget_tokens"}
_FIELDS |= {"response_format": "output_config.format", "response_format.json_schema": "output_config.format"}
_FIELDS |= {"parallel_tool_calls": "tool_choice.disable_parallel_tool_use"}
# Content of the user: without it the model would answer another question. Other unserved blocks record server tools.
_NEEDED_BLOCKS = frozenset({"image", "document", "search_result", "container_upload"})
# A line that Claude Code puts before its system prompt. It is not meant for the model, and it differs from request to
# request, so that no prefix would be found in the cache.
_BILLING = "x-anthropic-billing-header:"
# The form of Claude Code's own system messages within a conversation. Few templates accept a system message that is
# not the first message.
_REMINDER = "<system-reminder>\n{}\n</system-reminder>"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING_SWITCHES = ("enable_thinking", "thinking")  # the variable names in templates
_TEXT_KINDS = {"text": "text"}


def translate_messages(body: MessagesBody) -> ChatEquivalent:
    """Return the chat request. Raises RequestErrors that name fields of the Messages request."""
    fields = shared_values(body) | {
        "max_completion_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "top_k": body.top_k,
        "stream": body.stream,
        "user": body.metadata.user_id if body.metadata else None,
    }
    equivalent = _translate(body, fields)
    if equivalent.body.messages[-1].tool_calls:
        raise InvalidParameter("messages ends with a tool_use block; its tool_result must follow.", param="messages")
    return equivalent


def translate_count(body: CountTokensBody) -> ChatEquivalent:
    """Return the chat request whose prompt is counted. Raises RequestErrors that name the client's fields."""
    return _translate(body, {})


def thinks(body: CountTokensBody) -> bool:
    """Return whether the request enables thinking; Anthropic's default is off."""
    return body.thinking is not None and body.thinking.type != "disabled"


def _translate(body: CountTokensBody, fields: dict[str, Any]) -> ChatEquivalent:
    refuse_known(body, MESSAGES_FIELDS)
    messages = _Messages()
    if body.system is not None:
        check_marks(body.system, at="system")
        parts = text_parts(body.system, at="system", kinds=_TEXT_KINDS, ignored=messages.ignored)
        if parts and parts[0]["text"].startswith(_BILLING):
            messages.ignored.append("system[0]")
            del parts[0]
        if parts:
            messages.add_text("system", parts, at="system")
    num_blocks = 0
    for i, message in enumerate(body.messages):
        at = f"messages[{i}]"
        messages.ignored += named_extras(message.model_extra or {}, known=set(), at=at)
        blocks = content_blocks(message.content, at=f"{at}.content", num_before=num_blocks)
        if not blocks and (message.role != "assistant" or i < len(body.messages) - 1):
            raise no_parts(f"{at}.content")
        num_blocks += len(blocks)
        for j, block in enumerate(blocks):
            messages.add(message.role, block, at=f"{at}.content[{j}]", turn_at=at)
    if not messages.turns:
        raise InvalidParameter("messages has no text, tool use or tool result.", param="messages")
    last = messages.turns[-1]
    field_names = _FIELDS | field_names_of(messages.turns)
    tools, skipped = _tools(body, field_names)
    config = body.output_config
    fields |= {
        "model": body.model,
        "messages": [turn.message() for turn in messages.turns],
        "continue_final_message": (last.role == "assistant" and not last.calls) or None,
        "tools": tools or None,
        "chat_template_kwargs": dict.fromkeys(_THINKING_SWITCHES, thinks(body)) | (body.chat_template_kwargs or {}),
        "reasoning_effort": config.effort if config is not None else None,
        "prompt_cache_retention": longest_mark(
            body.cache_control and body.cache_control.model_dump(),
            [body.system, body.tools, *(message.content for message in body.messages)],
        ),
        "response_format": _response_format(body),
        "thinking_token_budget": body.thinking.budget_tokens if body.thinking is not None and thinks(body) else None,
    }
    if tools and body.tool_choice is not None:
        fields |= _tool_choice(body.tool_choice)
    elif body.tool_choice is not None and body.tool_choice.type in ("any", "tool"):
        raise InvalidParameter(
            f"tool_choice.type is {body.tool_choice.type}, but there are no tools.", param="tool_choice"
        )
    return ChatEquivalent(
        chat_body(fields, field_names=field_names), [*_ignored(body), *messages.ignored, *skipped], field_names
    )


def _tools(body: CountTokensBody, field_names: dict[str, str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the tools in chat's form and the paths of what is ignored; add to `field_names`."""
    tools: list[dict[str, Any]] = []
    ignored: list[str] = []
    for i, value in enumerate(body.tools or ()):
        at = f"tools[{i}]"
        tool = client_tool(value, at=at)
        if tool is None:
            ignored.append(at)
            continue
        place = f"tools[{len(tools)}]"
        field_names |= {place: at, f"{place}.function": at, f"{place}.function.parameters": f"{at}.input_schema"}
        tools.append({"type": "function", "function": _function(tool)})
        ignored += named_extras(tool.model_extra or {}, known=set(), at=at)
    return tools, ignored


def _function(tool: ClientTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {key: value for key, value in (function | {"strict": tool.strict}).items() if value is not None}


def _tool_choice(choice: ToolChoice) -> dict[str, Any]:
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidParameter("tool_choice.name is required where tool_choice.type is tool.", param="tool_choice")
        chosen: Any = {"type": "function", "function": {"name": choice.name}}
    else:
        chosen = _CHOICES[choice.type]
    return {"tool_choice": chosen, "parallel_tool_calls": False if choice.disable_parallel_tool_use else None}


def _response_format(body: CountTokensBody) -> dict[str, Any] | None:
    if body.output_config is None or body.output_config.format is None:
        return None
    schema = {"name": "output", "schema": body.output_config.format.schema_, "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _ignored(body: CountTokensBody) -> list[str]:
    ignored = named_extras(body.model_extra or {}, known=set(), at="")
    parts: dict[str, StrictModel | None]
    parts = {"thinking": body.thinking, "tool_choice": body.tool_choice, "output_config": body.output_config}
    if body.output_config is not None:
        parts["output_config.format"] = body.output_config.format
    if isinstance(body, MessagesBody):
        parts["metadata"] = body.metadata
    for name, options in parts.items():
        ignored += named_extras((options and options.model_extra) or {}, known=set(), at=name)
    if body.thinking is not None and body.thinking.budget_tokens is not None and not thinks(body):
        ignored.append("thinking.budget_tokens")
    return ignored


class _Messages:
    """The chat messages of the blocks added so far."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.ignored: list[str] = []

    def add(self, role: str, block: Block, *, at: str, turn_at: str) -> None:
        """Add one block of the message at `turn_at`. Raises RequestErrors."""
        if not isinstance(block, OtherBlock):
            self.ignored += named_extras(block.model_extra or {}, known=set(), at=at)
        match block:
            case TextBlock():
                text = block.text
                if role == "system" and self.turns and self.turns[-1].role != "system":
                    role, text = "user", _REMINDER.format(text)
                self.add_text(role, [{"type": "text", "text": text}] if text else [], at=turn_at)
            case ThinkingBlock() if role == "assistant":
                self._add_thinking(block, at=at, turn_at=turn_at)
            case ToolUseBlock() if role == "assistant":
                function = {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()}
                call = {"id": block.id, "type": "function", "function": function}
                self._open("assistant", at=turn_at).calls.append(call)
            case ToolResultBlock() if role == "user":
                self._add_result(block, at=at)
            case OtherBlock(type=kind) if kind in _NEEDED_BLOCKS:
                raise not_text(kind, at=at, param=at)
            case OtherBlock():
                self.ignored.append(at)
            case _:
                raise InvalidParameter(f"{at} is a {block.type} block, which a {role} message cannot have.", param=at)

    def add_text(self, role: str, parts: list[dict[str, str]], *, at: str) -> None:
        """Add text to the open turn of its role, or to a new one."""
        turn = self._open(role, at=at)
        if turn.calls:  # text after calls begins a new turn
            turn = self._append(Turn(role=role, at=at))
        turn.parts.extend(parts)

    def _add_thinking(self, block: ThinkingBlock, *, at: str, turn_at: str) -> None:
        text = block.thinking or unseal(block.signature or "")
        if not text:
            self.ignored.append(at)
            return
        turn = self._open("assistant", at=turn_at)
        if turn.parts or turn.calls:  # reasoning begins a new turn
            turn = self._append(Turn(role="assistant", at=turn_at))
        turn.thoughts.append(text)

    def _add_result(self, block: ToolResultBlock, *, at: str) -> None:
        content = "" if block.content is None else block.content
        check_marks(content, at=f"{at}.content")
        parts = text_parts(content, at=f"{at}.content", kinds=_TEXT_KINDS, ignored=self.ignored)
        if block.is_error:
            self.ignored.append(f"{at}.is_error")  # templates have no mark for a failed call, only its text
        self._append(Turn(role="tool", at=at, parts=parts, call_id=block.tool_use_id))

    def _open(self, role: str, *, at: str) -> Turn:
        if self.turns and self.turns[-1].role == role:
            return self.turns[-1]
        return self._append(Turn(role=role, at=at))

    def _append(self, turn: Turn) -> Turn:
        self.turns.append(turn)
        return turn
