"""The events of an answer, from the engine's tokens to the writers of all APIs. Imports engine.interface only.

Tokens and log-probabilities are on the TextDeltas. Every token of a choice is on exactly one of them, in the model's
order; tokens that are neither text nor reasoning (tags, a tool call's JSON, held-back text) are on one without text.
"""

from typing import Literal

import msgspec

from engine.interface.protocol import TokenLogprobs

TextKind = Literal["text", "reasoning"]


class TextDelta(msgspec.Struct):
    """New text of one choice and its tokens. The text is "" if the tokens show none.

    The tokens of kind "reasoning" are the reasoning tokens of the usage. Completions have kind "text" only.
    """

    index: int  # of the choice
    kind: TextKind
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None  # one per token


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


class ChoiceFinished(msgspec.Struct):
    """The end of one choice. finish_reason: "stop" | "length", in a chat also "tool_calls"."""

    index: int
    finish_reason: str
    stop_string: str | None = None  # the stop string that was found


Event = TextDelta | ToolCallStart | ToolArguments | ChoiceFinished
