"""Objects of /v1/responses as msgspec structs: answers, their items, and the events of a stream. Imports msgspec.

The tag of a struct is its `type` in JSON; for an event it is also the name of the event. Fields of OpenAI's Response
that this server cannot fill are null. The writer sets sequence_number, in the order in which events are sent.
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
    """An output item: a message."""

    id: str
    status: str
    role: str = "assistant"
    content: list[OutputText] = []


class ReasoningOutput(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True):
    """An output item: reasoning."""

    id: str
    status: str
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: str | None = None


class FunctionCallOutput(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True):
    """An output item: a function call."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str = ""


class CustomCallOutput(msgspec.Struct, tag_field="type", tag="custom_tool_call", kw_only=True):
    """An output item: a call of a custom tool."""

    id: str
    status: str
    call_id: str
    name: str
    input: str = ""


OutputItem = MessageOutput | ReasoningOutput | FunctionCallOutput | CustomCallOutput
Part = OutputText | ReasoningText


class InputTokensDetails(msgspec.Struct):
    """Part of ResponsesUsage. Writes to the prefix cache are free and not counted."""

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


class CustomTool(msgspec.Struct, tag_field="type", tag="custom", kw_only=True):
    """A custom tool as the answer repeats it."""

    name: str
    description: str | None = None
    format: dict[str, Any]


class ReasoningEcho(msgspec.Struct):
    """reasoning, as it was asked for."""

    effort: str | None = None
    summary: str | None = None


class TextEcho(msgspec.Struct):
    """text, as it was asked for."""

    format: dict[str, Any]
    verbosity: str = "medium"


class ResponsesEcho(msgspec.Struct, kw_only=True):
    """The fields of the request that every answer repeats."""

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
    tools: list[FunctionTool | CustomTool] = []
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
    tools: list[FunctionTool | CustomTool]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None


class StreamEvent(msgspec.Struct, tag_field="type", kw_only=True):
    """An event of a stream."""

    sequence_number: int = 0


class _ResponseEvent(StreamEvent, kw_only=True):
    response: Response


class ResponseCreated(_ResponseEvent, tag="response.created"):
    """The first event."""


class ResponseInProgress(_ResponseEvent, tag="response.in_progress"):
    """The second event."""


class ResponseCompleted(_ResponseEvent, tag="response.completed"):
    """The last event of a complete answer."""


class ResponseIncomplete(_ResponseEvent, tag="response.incomplete"):
    """The last event of an answer that was cut off."""


class ResponseFailed(_ResponseEvent, tag="response.failed"):
    """The last event after an error."""


class ErrorEvent(StreamEvent, tag="error", kw_only=True):
    """An error after the first byte of the stream."""

    code: str
    message: str
    param: str | None


class _WholeItemEvent(StreamEvent, kw_only=True):
    output_index: int
    item: OutputItem


class ItemAdded(_WholeItemEvent, tag="response.output_item.added"):
    """An item begins."""


class ItemDone(_WholeItemEvent, tag="response.output_item.done"):
    """An item is whole."""


class _ItemEvent(StreamEvent, kw_only=True):
    item_id: str
    output_index: int


class _ContentEvent(_ItemEvent, kw_only=True):
    content_index: int = 0


class PartAdded(_ContentEvent, tag="response.content_part.added", kw_only=True):
    """A part of an item begins."""

    part: Part


class PartDone(_ContentEvent, tag="response.content_part.done", kw_only=True):
    """A part of an item is whole."""

    part: Part


class OutputTextDelta(_ContentEvent, tag="response.output_text.delta", kw_only=True):
    """New text of a message."""

    delta: str
    logprobs: list[ChatTokenLogprob] = []


class OutputTextDone(_ContentEvent, tag="response.output_text.done", kw_only=True):
    """The whole text of a message."""

    text: str
    logprobs: list[ChatTokenLogprob] = []


class ReasoningTextDelta(_ContentEvent, tag="response.reasoning_text.delta", kw_only=True):
    """New text of a reasoning item."""

    delta: str


class ReasoningTextDone(_ContentEvent, tag="response.reasoning_text.done", kw_only=True):
    """The whole text of a reasoning item."""

    text: str


class _SummaryEvent(_ItemEvent, kw_only=True):
    summary_index: int = 0


class SummaryPartAdded(_SummaryEvent, tag="response.reasoning_summary_part.added", kw_only=True):
    """The summary of a reasoning item begins."""

    part: SummaryText


class SummaryPartDone(_SummaryEvent, tag="response.reasoning_summary_part.done", kw_only=True):
    """The summary of a reasoning item is whole."""

    part: SummaryText


class SummaryTextDelta(_SummaryEvent, tag="response.reasoning_summary_text.delta", kw_only=True):
    """New text of a summary."""

    delta: str


class SummaryTextDone(_SummaryEvent, tag="response.reasoning_summary_text.done", kw_only=True):
    """The whole text of a summary."""

    text: str


class ArgumentsDelta(_ItemEvent, tag="response.function_call_arguments.delta", kw_only=True):
    """New text of a call's arguments."""

    delta: str


class ArgumentsDone(_ItemEvent, tag="response.function_call_arguments.done", kw_only=True):
    """The whole arguments of a call."""

    name: str
    arguments: str


class CustomInputDelta(_ItemEvent, tag="response.custom_tool_call_input.delta", kw_only=True):
    """New text of a custom tool's input."""

    delta: str


class CustomInputDone(_ItemEvent, tag="response.custom_tool_call_input.done", kw_only=True):
    """The whole input of a custom tool."""

    input: str


class InputTokens(msgspec.Struct):
    """The answer of input_tokens."""

    input_tokens: int
    object: str = "response.input_tokens"
