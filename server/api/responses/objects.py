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


OutputItem = MessageOutput | ReasoningOutput | FunctionCallOutput
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


class ResponseCreated(msgspec.Struct, tag_field="type", tag="response.created", kw_only=True):
    """The first event."""

    sequence_number: int = 0
    response: Response


class ResponseInProgress(msgspec.Struct, tag_field="type", tag="response.in_progress", kw_only=True):
    """The second event."""

    sequence_number: int = 0
    response: Response


class ResponseCompleted(msgspec.Struct, tag_field="type", tag="response.completed", kw_only=True):
    """The last event of a complete answer."""

    sequence_number: int = 0
    response: Response


class ResponseIncomplete(msgspec.Struct, tag_field="type", tag="response.incomplete", kw_only=True):
    """The last event of an answer that was cut off."""

    sequence_number: int = 0
    response: Response


class ResponseFailed(msgspec.Struct, tag_field="type", tag="response.failed", kw_only=True):
    """The last event after an error."""

    sequence_number: int = 0
    response: Response


class ErrorEvent(msgspec.Struct, tag_field="type", tag="error", kw_only=True):
    """An error after the first byte of the stream."""

    sequence_number: int = 0
    code: str
    message: str
    param: str | None


class ItemAdded(msgspec.Struct, tag_field="type", tag="response.output_item.added", kw_only=True):
    """An item begins."""

    sequence_number: int = 0
    output_index: int
    item: OutputItem


class ItemDone(msgspec.Struct, tag_field="type", tag="response.output_item.done", kw_only=True):
    """An item is whole."""

    sequence_number: int = 0
    output_index: int
    item: OutputItem


class PartAdded(msgspec.Struct, tag_field="type", tag="response.content_part.added", kw_only=True):
    """A part of an item begins."""

    sequence_number: int = 0
    item_id: str
    output_index: int
    content_index: int = 0
    part: Part


class PartDone(msgspec.Struct, tag_field="type", tag="response.content_part.done", kw_only=True):
    """A part of an item is whole."""

    sequence_number: int = 0
    item_id: str
    output_index: int
    content_index: int = 0
    part: Part


class OutputTextDelta(msgspec.Struct, tag_field="type", tag="response.output_text.delta", kw_only=True):
    """New text of a message."""

    sequence_number: int = 0
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str
    logprobs: list[ChatTokenLogprob] = []


class OutputTextDone(msgspec.Struct, tag_field="type", tag="response.output_text.done", kw_only=True):
    """The whole text of a message."""

    sequence_number: int = 0
    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: list[ChatTokenLogprob] = []


class ReasoningTextDelta(msgspec.Struct, tag_field="type", tag="response.reasoning_text.delta", kw_only=True):
    """New text of a reasoning item."""

    sequence_number: int = 0
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str


class ReasoningTextDone(msgspec.Struct, tag_field="type", tag="response.reasoning_text.done", kw_only=True):
    """The whole text of a reasoning item."""

    sequence_number: int = 0
    item_id: str
    output_index: int
    content_index: int = 0
    text: str


class SummaryPartAdded(msgspec.Struct, tag_field="type", tag="response.reasoning_summary_part.added", kw_only=True):
    """The summary of a reasoning item begins."""

    sequence_number: int = 0
    item_id: str
    output_index: int
    summary_index: int = 0
    part: SummaryText


class SummaryPartDone(msgspec.Struct, tag_field="type", tag="response.reasoning_summary_part.done", kw_only=True):
    """The summary of a reasoning item is whole."""

    sequence_number: int = 0
    item_id: str
    output_index: int
    summary_index: int = 0
    part: SummaryText


class SummaryTextDelta(msgspec.Struct, tag_field="type", tag="response.reasoning_summary_text.delta", kw_only=True):
    """New text of a summary."""

    sequence_number: int = 0
    item_id: str
    output_index: int
    summary_index: int = 0
    delta: str


class SummaryTextDone(msgspec.Struct, tag_field="type", tag="response.reasoning_summary_text.done", kw_only=True):
    """The whole text of a summary."""

    sequence_number: int = 0
    item_id: str
    output_index: int
    summary_index: int = 0
    text: str


class ArgumentsDelta(msgspec.Struct, tag_field="type", tag="response.function_call_arguments.delta", kw_only=True):
    """New text of a call's arguments."""

    sequence_number: int = 0
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(msgspec.Struct, tag_field="type", tag="response.function_call_arguments.done", kw_only=True):
    """The whole arguments of a call."""

    sequence_number: int = 0
    item_id: str
    output_index: int
    name: str
    arguments: str
