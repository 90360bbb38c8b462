"""The events of a /v1/responses stream, as msgspec structs. A struct's tag is the event's name, and its `type` in JSON.

sequence_number is set by the writer, in the order in which events are sent.
"""

import msgspec

from server.api.objects import ChatTokenLogprob
from server.api.responses.objects import OutputItem, Part, Response, SummaryText


class ResponseCreated(msgspec.Struct, tag_field="type", tag="response.created", kw_only=True):
    """The first event."""

    sequence_number: int = 0
    response: Response


class ResponseInProgress(msgspec.Struct, tag_field="type", tag="response.in_progress", kw_only=True):
    """The second event."""

    sequence_number: int = 0
    response: Response


class ResponseCompleted(msgspec.Struct, tag_field="type", tag="response.completed", kw_only=True):
    """The last event of an answer that ended by itself."""

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
    """What went wrong after the first byte."""

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
