"""The JSON of /v1/responses, as msgspec structs: answers and their items. A struct's tag is its `type` in JSON.

Fields that OpenAI's Response has and this server cannot fill are null.
"""

from typing import Any

import msgspec

from server.api.objects import ChatTokenLogprob


class OutputText(msgspec.Struct, tag_field="type", tag="output_text", kw_only=True):
    """The text of a message."""

    text: str = ""
    annotations: list[None] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text", kw_only=True):
    """The text of a reasoning item."""

    text: str = ""


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text", kw_only=True):
    """The text of a reasoning item where a summary was asked for."""

    text: str = ""


class MessageOutput(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """An item: what the model says."""

    id: str
    status: str
    role: str = "assistant"
    content: list[OutputText] = []


class ReasoningOutput(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True):
    """An item: what the model thought."""

    id: str
    status: str
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: str | None = None


class FunctionCallOutput(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True):
    """An item: a function that the model wants called."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str = ""


OutputItem = MessageOutput | ReasoningOutput | FunctionCallOutput
Part = OutputText | ReasoningText


class InputTokensDetails(msgspec.Struct):
    """Part of ResponsesUsage. Writing to the prefix cache costs nothing, and is not counted."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """Part of ResponsesUsage."""

    reasoning_tokens: int


class ResponsesUsage(msgspec.Struct):
    """OpenAI's usage object of this endpoint."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    """Why an answer is incomplete."""

    reason: str


class ResponseFault(msgspec.Struct):
    """Why an answer failed; `code` is one of OpenAI's few."""

    code: str
    message: str


class FunctionTool(msgspec.Struct, tag_field="type", tag="function", kw_only=True):
    """A tool as the answer repeats it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class ReasoningEcho(msgspec.Struct):
    """reasoning, as it was asked for."""

    effort: str | None = None
    summary: str | None = None


class TextEcho(msgspec.Struct):
    """text, as it was asked for."""

    format: dict[str, Any]
    verbosity: str = "medium"


class ResponsesEcho(msgspec.Struct, kw_only=True):
    """What every answer repeats of its request."""

    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    prompt_cache_key: str | None = None
    reasoning: ReasoningEcho
    safety_identifier: str | None = None
    temperature: float | None = None  # None: the model's own, as top_p
    text: TextEcho
    tool_choice: Any = "auto"
    tools: list[FunctionTool] = []
    top_logprobs: int = 0
    top_p: float | None = None
    user: str | None = None


class Response(msgspec.Struct, kw_only=True):
    """A whole answer, or its state so far in an event."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    background: bool = False
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    prompt_cache_key: str | None
    reasoning: ReasoningEcho
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool = False
    temperature: float
    text: TextEcho
    tool_choice: Any
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None
