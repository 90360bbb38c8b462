"""Objects of /v1/messages as msgspec structs: answers, their blocks, and the events of a stream. Imports msgspec.

The tag of a struct is its `type` in JSON; for an event it is also the name of the event.
"""

from typing import Any

import msgspec


class TextContent(msgspec.Struct, tag_field="type", tag="text", kw_only=True):
    """A content block: text of the answer."""

    text: str = ""


class ThinkingContent(msgspec.Struct, tag_field="type", tag="thinking", kw_only=True):
    """A content block: reasoning."""

    thinking: str = ""
    signature: str = ""


class ToolUseContent(msgspec.Struct, tag_field="type", tag="tool_use", kw_only=True):
    """A content block: a tool call."""

    id: str
    name: str
    input: dict[str, Any] = {}


Content = TextContent | ThinkingContent | ToolUseContent


class MessageOutputTokensDetails(msgspec.Struct):
    """Part of MessageUsage."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """Anthropic's usage object. input_tokens: tokens of the prompt that were not cached.

    Writes to the prefix cache are free and not counted.
    """

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageOutputTokensDetails


class Message(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """A whole answer, or its beginning in message_start."""

    id: str
    role: str = "assistant"
    model: str
    content: list[Content]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    """The answer of count_tokens."""

    input_tokens: int


class ModelInfo(msgspec.Struct, tag_field="type", tag="model", kw_only=True):
    """A model as Anthropic's clients read it. max_input_tokens: null while the engine is not serving."""

    id: str
    display_name: str
    created_at: str  # RFC 3339
    lifecycle: str = "active"
    max_input_tokens: int | None
    max_tokens: int | None


class ModelPage(msgspec.Struct, kw_only=True):
    """All models as Anthropic's clients read them."""

    data: list[ModelInfo]
    first_id: str
    last_id: str
    has_more: bool = False


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    """The first event."""

    message: Message


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: Content


class TextPiece(msgspec.Struct, tag_field="type", tag="text_delta"):
    """New text of a text block."""

    text: str


class ThinkingPiece(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """New text of a thinking block."""

    thinking: str


class SignaturePiece(msgspec.Struct, tag_field="type", tag="signature_delta"):
    """The signature of a thinking block, at its end."""

    signature: str


class InputPiece(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """New text of a tool's input."""

    partial_json: str


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: TextPiece | ThinkingPiece | SignaturePiece | InputPiece


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    """A block is whole."""

    index: int


class StopDelta(msgspec.Struct):
    """Part of MessageDelta."""

    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    """The stop reason and the usage of the whole answer."""

    delta: StopDelta
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """The last event."""


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    """Sent while there is no other event."""
