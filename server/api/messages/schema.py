"""Bodies of POST /v1/messages and /v1/messages/count_tokens, strict as in server/api/schemas.py. Imports pydantic.

Some of the types of blocks and tools are served: content_blocks() and client_tool() check those. The caller refuses or
skips the other types.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from engine.interface.errors import InvalidParameter
from server.api.sampling_fields import MAX_TOKENS, SharedSampling
from server.api.schemas import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Json,
    Label,
    Name,
    OtherKind,
    Parameters,
    Stop,
    TemplateKwargs,
    ToolName,
    text_schema,
)
from server.api.strict_json import StrictModel, any_of, parse_body
from server.document_rules import MESSAGES, NAMED_TOOL, either, having, rules

MAX_BLOCKS = 32_768  # of one request


_Text = Annotated[Any, WithJsonSchema({"anyOf": [*text_schema(0, text="text")["anyOf"], {"type": "null"}]})]


class CacheControl(StrictModel):
    """cache_control"""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(StrictModel):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Json = None


class ThinkingBlock(StrictModel):
    """Reasoning of the model; without its text, the signature contains it."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    cache_control: CacheControl | None = None


class ToolUseBlock(StrictModel):
    """A tool call of the model."""

    type: Literal["tool_use"]
    id: Label
    name: Name
    input: dict[str, Json]
    cache_control: CacheControl | None = None
    caller: Json = None


class ToolResultBlock(StrictModel):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: Label
    content: _Text = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class OtherBlock(OtherKind):
    """A block of a type that is not served."""


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | OtherBlock

_BLOCK_MODELS: dict[str, type[Block]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
}


_UNREADABLE = ("image", "document", "search_result", "container_upload")  # content of the user


def _message_of(role: str, *kinds: str) -> dict[str, Any]:
    """Return the document's schema of a role's message with these kinds of blocks. An answer may begin empty."""
    refused = (*_UNREADABLE, *(kind for kind in _BLOCK_MODELS if kind not in kinds))
    items = any_of(*(_BLOCK_MODELS[kind] for kind in kinds), but=refused)
    blocks = {"type": "array", "items": items, "minItems": 0 if role == "assistant" else 1}
    return having(role={"const": role}, content=either({"type": "string"}, blocks))


_BY_ROLE = either(
    _message_of("user", "text", "tool_result"),
    _message_of("assistant", "text", "thinking", "tool_use"),
    _message_of("system", "text"),
)


class ClientTool(StrictModel):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: Parameters
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None  # arguments are streamed as they come in any case


_Tool = Annotated[dict[str, Json], WithJsonSchema(any_of(ClientTool, but=("function",)))]


class MessageParam(StrictModel):
    """One message of the history."""

    model_config = ConfigDict(json_schema_extra=_BY_ROLE)

    role: Literal["user", "assistant", "system"]
    content: Annotated[Any, WithJsonSchema({"type": ["string", "array"]})]


class Thinking(StrictModel):
    """thinking"""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(StrictModel):
    """tool_choice"""

    model_config = ConfigDict(json_schema_extra=rules(NAMED_TOOL))

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(StrictModel):
    """output_config.format"""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Json], Field(alias="schema")]


class OutputConfig(StrictModel):
    """output_config"""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class RequestMetadata(StrictModel):
    """metadata"""

    user_id: Label | None = None


class CountTokensBody(StrictModel):
    """POST /v1/messages/count_tokens."""

    model_config = ConfigDict(json_schema_extra=rules(*MESSAGES))

    model: Label
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: _Text = None
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # beyond Anthropic's form, as in chat; so is a message's seed
    chat_template_kwargs: TemplateKwargs | None = None
    # how long the prompt stays in the prefix cache, as in its blocks
    cache_control: CacheControl | None = None


class MessagesBody(SharedSampling, CountTokensBody):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    stream: bool | None = None
    stop_sequences: Stop | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    # metadata of the request without effect on the answer
    metadata: RequestMetadata | None = None
    service_tier: Label | None = None


def content_blocks(content: Any, *, at: str, num_before: int) -> list[Block]:
    """Return content as checked blocks; a string is one text block. Raises InvalidParameter.

    `num_before`: blocks of the messages before this one.
    """
    if isinstance(content, str):
        return [TextBlock(type="text", text=content)]
    if not isinstance(content, list):
        raise InvalidParameter(f"{at} must be a string or a list of blocks.", param=at)
    if num_before + len(content) > MAX_BLOCKS:
        raise InvalidParameter(f"messages has more than {MAX_BLOCKS} blocks, the limit of a request.", param="messages")
    return [_block(value, at=f"{at}[{i}]") for i, value in enumerate(content)]


def check_marks(parts: Any, *, at: str) -> None:
    """Check the cache_control of text parts that are no blocks of a message. Raises InvalidParameter."""
    for i, part in enumerate(parts if isinstance(parts, list) else ()):
        if isinstance(part, dict) and part.get("cache_control") is not None:
            parse_body(CacheControl, part["cache_control"], at=f"{at}[{i}].cache_control")


def client_tool(value: dict[str, Json], *, at: str) -> ClientTool | None:
    """Return a checked tool, or None for a tool type that Anthropic defines. Raises InvalidParameter."""
    if value.get("type") == "function":
        raise InvalidParameter(
            f'{at}.type is "function", of OpenAI\'s tools: here a tool is {{"name": …, "input_schema": {{…}}}}.',
            param=f"{at}.type",
        )
    if value.get("type") not in (None, "custom"):
        parse_body(OtherKind, value, at=at)
        return None
    return parse_body(ClientTool, value, at=at)


def _block(value: Any, *, at: str) -> Block:
    if not isinstance(value, dict):
        raise InvalidParameter(f"{at} must be an object.", param=at)
    kind = value.get("type")
    return parse_body(_BLOCK_MODELS.get(kind, OtherBlock) if isinstance(kind, str) else OtherBlock, value, at=at)
