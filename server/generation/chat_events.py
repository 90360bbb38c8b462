"""What a chat generation yields: text, reasoning and tool calls of each choice, and its end. Imports server only.

Tokens and log-probabilities ride on the text and reasoning events. Every token of a choice is on exactly one of them,
in the model's order; those that are neither (tags, a tool call's JSON, what is held back) are on an event without text.
"""

import msgspec

from engine.interface.protocol import TokenLogprobs
from server.generation.generation import Ended


class TextDelta(msgspec.Struct):
    """New text of one choice's message. The text can be "": it only carries tokens then."""

    index: int  # of the choice
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None  # one per token


class ReasoningDelta(msgspec.Struct):
    """New text of one choice's reasoning, as TextDelta. Its tokens are the reasoning tokens of the usage."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None


class ToolCallStart(msgspec.Struct):
    """A tool call begins; `call_index` counts the choice's calls from 0."""

    index: int
    call_index: int
    id: str
    name: str


class ToolArguments(msgspec.Struct):
    """More of a call's arguments, which are JSON once whole."""

    index: int
    call_index: int
    text: str


ChatEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolArguments | Ended
TokenEvent = TextDelta | ReasoningDelta
