"""Bodies of POST /v1/messages and /v1/messages/count_tokens, strict as in server/api/schemas.py. Imports pydantic.

Some of the types of blocks and tools are served: content_blocks() and client_tool() check those. The caller refuses or
skips the other types.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from engine.interface.errors import InvalidParameter
from server.api.sampling_fields import MAX_TOKENS, SharedSampling
from server.api.schemas import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Json,
    Label,
    Name,
    Parameters,
    Stop,
    TextOrParts,
    ToolName,
    text_schema,
)
from server.api.strict_json import StrictModel, any_of, parse_body

MAX_BLOCKS = 32_768  # of one request


class TextBlock(StrictModel):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: Json = None
    citations: Json = None


class ThinkingBlock(StrictModel):
    """Reasoning of the model; without its text, the signature contains it."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    cache_control: Json = None


class ToolUseBlock(StrictModel):
    """A tool call of the model."""

    type: Literal["tool_use"]
    id: Label
    name: Name
    input: dict[str, Json]
    cache_control: Json = None
    caller: Json = None


class ToolResultBlock(StrictModel):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: Label
    content: Annotated[Any, WithJsonSchema({"anyOf": [*text_schema(0, text="text")["anyOf"], {"type": "null"}]})] = None
    is_error: bool | None = None
    cache_control: Json = None


class OtherBlock(StrictModel):
    """A block of a type that is not served."""

    type: Label


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | OtherBlock

_BLOCK_MODELS: dict[str, type[Block]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
}


_UNREADABLE = ("image", "document", "search_result", "container_upload")  # content of the user
_BLOCKS = {"type": "array", "items": any_of(*_BLOCK_MODELS.values(), but=_UNREADABLE), "minItems": 1}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, _BLOCKS]}


class ClientTool(StrictModel):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: Parameters
    strict: bool | None = None
    cache_control: Json = None
    eager_input_streaming: bool | None = None  # arguments are streamed as they come in any case


_Tool = Annotated[dict[str, Json], WithJsonSchema(any_of(ClientTool))]


class MessageParam(StrictModel):
    """One message of the history."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Any, WithJsonSchema(_CONTENT_SCHEMA)]


class Thinking(StrictModel):
    """thinking"""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(StrictModel):
    """tool_choice"""

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

    model: Label
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: TextOrParts = None
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # harmless by meaning: prefixes are cached anyway
    cache_control: Json = None


class MessagesBody(SharedSampling, CountTokensBody):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    stream: bool | None = None
    stop_sequences: Stop | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    # metadata of the request without effect on the answer
    metadata: RequestMetadata | None = None
    service_tier: Label | None = None
    # beyond Anthropic's form, as in chat; so is seed
    chat_template_kwargs: dict[str, Json] | None = None


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


def client_tool(value: dict[str, Json], *, at: str) -> ClientTool | None:
    """Return a checked tool, or None for a tool type that Anthropic defines. Raises InvalidParameter."""
    if value.get("type") not in (None, "custom"):
        return None
    return parse_body(ClientTool, value, at=at)


def _block(value: Any, *, at: str) -> Block:
    if not isinstance(value, dict):
        raise InvalidParameter(f"{at} must be an object.", param=at)
    kind = value.get("type")
    return parse_body(_BLOCK_MODELS.get(kind, OtherBlock) if isinstance(kind, str) else OtherBlock, value, at=at)
