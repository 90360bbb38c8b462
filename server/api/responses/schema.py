"""Bodies of POST /v1/responses and /v1/responses/input_tokens, strict as in server/api/schemas.py. Imports pydantic.

Some of the types of items and tools are served: the body holds all as plain objects, and input_items() and
served_tool() check the served ones. The caller refuses or skips the other types.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from engine.interface.errors import InvalidParameter
from server.api.prompt_pins import PromptCacheOptions, Retention
from server.api.sampling_fields import MAX_TOKENS, SharedSampling
from server.api.schemas import (
    MAX_LOGPROBS,
    MAX_TOOLS,
    Json,
    Label,
    Metadata,
    Name,
    OtherKind,
    Parameters,
    ReasoningEffort,
    StreamOptions,
    TemplateKwargs,
    ToolName,
    one_of,
    text_schema,
)
from server.api.strict_json import StrictModel, any_of, parse_body
from server.document_rules import CUSTOM_FORMAT, RESPONSES, TEXT_FORMAT, either, rules, where

MAX_ITEMS = 8192
MAX_DEFINITION_CHARS = 65_536

TEXT_KINDS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_Content = Annotated[Any, WithJsonSchema(text_schema(0, **TEXT_KINDS))]
_BY_ROLE: dict[str, Any] = either(  # an answer without text may come back
    where(role={"const": "assistant"}), where(content={"not": {"type": "array", "maxItems": 0}})
)
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class _Item(StrictModel):
    """An item that comes back as an answer had it, or a client's own."""

    id: Label | None = None
    status: ItemStatus | None = None


class MessageItem(_Item):
    """A message of the input. An answer's own message, sent back, has an id and a status."""

    model_config = ConfigDict(json_schema_extra=_BY_ROLE)

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content
    phase: Label | None = None


class FunctionCallItem(_Item):
    """A function call of the model."""

    type: Literal["function_call"]
    call_id: Label
    name: Name
    arguments: str


class FunctionOutputItem(_Item):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: Label
    output: _Content


class CustomCallItem(_Item):
    """A call of a custom tool by the model."""

    type: Literal["custom_tool_call"]
    call_id: Label
    name: Name
    input: str


class CustomOutputItem(_Item):
    """The result of a custom tool's call."""

    type: Literal["custom_tool_call_output"]
    call_id: Label
    output: _Content


class ReasoningPart(StrictModel):
    """A piece of reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class ReasoningItem(_Item):
    """Reasoning of the model before its answer."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningPart], Field(max_length=MAX_ITEMS)] | None = None
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_ITEMS)] | None = None
    encrypted_content: str | None = None


class OtherItem(OtherKind):
    """An item of a type that is not served."""


InputItem = (
    MessageItem | FunctionCallItem | FunctionOutputItem | CustomCallItem | CustomOutputItem | ReasoningItem | OtherItem
)

_ITEM_MODELS: dict[str, type[InputItem]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CustomOutputItem,
    "reasoning": ReasoningItem,
}


class FunctionToolBody(StrictModel):
    """A function the model may call, in the flat form of this endpoint."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class CustomFormat(StrictModel):
    """The format of a custom tool's input: any text, or one that a grammar describes."""

    model_config = ConfigDict(json_schema_extra=rules(CUSTOM_FORMAT))

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Annotated[str, Field(min_length=1, max_length=MAX_DEFINITION_CHARS)] | None = None


class CustomToolBody(StrictModel):
    """A tool whose input is plain text."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None


class TextFormat(StrictModel):
    """text.format"""

    model_config = ConfigDict(json_schema_extra=rules(TEXT_FORMAT))

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Json] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(StrictModel):
    """text"""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(StrictModel):
    """reasoning"""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


_ITEM = any_of(*_ITEM_MODELS.values(), but=("item_reference",))
_ITEMS_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _ITEM, "minItems": 1, "maxItems": MAX_ITEMS}]}
_Tool = Annotated[dict[str, Json], WithJsonSchema(any_of(FunctionToolBody, CustomToolBody))]


_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": [None, "auto", "none", "required"]},
        {
            "type": "object",
            "properties": {"type": {"enum": ["function", "custom"]}, "name": {"type": "string"}},
            "required": ["type", "name"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "allowed_tools"},
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array"},
            },
            "required": ["type", "mode", "tools"],
        },
    ]
}


class InputTokensBody(StrictModel):
    """POST /v1/responses/input_tokens: the fields that make the prompt."""

    model_config = ConfigDict(json_schema_extra=rules(*RESPONSES))

    model: Label | None = None
    input: Annotated[Any, WithJsonSchema(_ITEMS_SCHEMA)]
    instructions: str | None = None
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[Json, WithJsonSchema(_CHOICE_SCHEMA)] = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # not in OpenAI's form of this endpoint; the same as in chat
    chat_template_kwargs: TemplateKwargs | None = None
    # known fields, refused if they ask for something
    previous_response_id: Annotated[Json, one_of(None, "")] = None
    conversation: Annotated[Json, one_of(None, "")] = None


class ResponsesBody(SharedSampling, InputTokensBody):
    """POST /v1/responses."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Annotated[list[Label], Field(max_length=64)] | None = None
    # metadata of the request without effect on the answer
    metadata: Metadata | None = None
    client_metadata: dict[str, Json] | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    service_tier: Label | None = None
    store: bool | None = None
    # how long the prompt stays in the prefix cache
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Retention | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    # known fields, refused if they ask for something
    background: Annotated[bool | None, one_of(None, False)] = None
    prompt: Annotated[Json, one_of(None, "")] = None


def input_items(body: InputTokensBody) -> list[InputItem]:
    """Return the input as checked items; a string is one user message. Raises InvalidParameter."""
    if isinstance(body.input, str):
        return [MessageItem(role="user", content=body.input)]
    if not isinstance(body.input, list) or not body.input:
        raise InvalidParameter("input must be a string or a list of items, not empty.", param="input")
    if len(body.input) > MAX_ITEMS:
        raise InvalidParameter(f"input has {len(body.input)} items, the limit is {MAX_ITEMS}.", param="input")
    return [_item(value, at=f"input[{i}]") for i, value in enumerate(body.input)]


def served_tool(value: dict[str, Json], *, at: str) -> FunctionToolBody | CustomToolBody | None:
    """Return a checked tool, or None if its type is not served. Raises InvalidParameter."""
    kind = value.get("type")
    if kind == "function":
        return parse_body(FunctionToolBody, value, at=at)
    if kind != "custom":
        parse_body(OtherKind, value, at=at)
        return None
    tool = parse_body(CustomToolBody, value, at=at)
    if tool.format is not None and tool.format.type == "grammar":
        for name, given in (("syntax", tool.format.syntax), ("definition", tool.format.definition)):
            if given is None:
                raise InvalidParameter(f"{at}.format.{name} is required for a grammar.", param=f"{at}.format.{name}")
    return tool


def _item(value: Any, *, at: str) -> InputItem:
    if not isinstance(value, dict):
        raise InvalidParameter(f"{at} must be an object.", param=at)
    kind = value.get("type")
    if kind is None:  # the short form of a message, or a reference: {"id": …}
        kind = "message" if "role" in value or "id" not in value else "item_reference"
        value = {**value, "type": kind}
    model = _ITEM_MODELS.get(kind, OtherItem) if isinstance(kind, str) else OtherItem
    return parse_body(model, value, at=at)
