"""Detects the formats of reasoning and tool calls from a model's chat template and added tokens. Pure.

A template that shows the model how to call tools contains the format that the model was trained on, so no flag is
needed. If nothing is found, answers are plain text.
"""

from collections.abc import Collection, Sequence
from typing import Literal

import msgspec

from server.text.parsers import formats, qwen_xml
from server.text.parsers.base import AnswerParser, PartsParser, ToolSpec
from server.text.parsers.reasoning import PlainText, ReasoningParser, ReasoningTags

ToolForm = Literal["hermes", "qwen_xml", "llama3", "mistral", "mistral_args", "granite"]

_REASONING_TAGS = (ReasoningTags("<think>", "</think>"), ReasoningTags("[THINK]", "[/THINK]"))
_THINKING_SWITCHES = ("enable_thinking", "thinking")
_TAGS: dict[ToolForm, tuple[str, ...]] = {
    "hermes": formats.HERMES_TAGS,
    "qwen_xml": qwen_xml.TAGS,
    "llama3": formats.LLAMA3_TAGS,
    "mistral": formats.MISTRAL_TAGS,
    "mistral_args": formats.MISTRAL_TAGS,
    "granite": formats.GRANITE_TAGS,
}


class ChatFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The formats of one model's reasoning and tool calls."""

    tools: ToolForm | None = None
    reasoning: ReasoningTags | None = None
    takes_tools: bool = False  # the template shows them to the model
    thinking_switch: str | None = None  # the template's variable that turns reasoning on and off
    takes_effort: bool = False  # the template reads reasoning_effort

    def tags(self, *, has_tools: bool) -> tuple[str, ...]:
        """Tags that a parser must see even if they are special tokens. `has_tools`: the request has tools to call."""
        return (*(self.reasoning or ()), *(_TAGS[self.tools] if has_tools and self.tools is not None else ()))


def detect_format(source: str, *, names_read: Collection[str], added_tokens: Collection[str]) -> ChatFormat:
    """Look for the known forms in a chat template. `names_read`: the variables that it reads."""
    return ChatFormat(
        tools=_tool_form(source) if "tools" in names_read else None,
        reasoning=_reasoning_tags(source, added_tokens),
        takes_tools="tools" in names_read,
        thinking_switch=next((name for name in _THINKING_SWITCHES if name in names_read), None),
        takes_effort="reasoning_effort" in names_read,
    )


def make_parser(chat_format: ChatFormat, *, tools: Sequence[ToolSpec], is_reasoning: bool) -> PartsParser | None:
    """Return a parser for one choice, or None if its text is just text.

    `tools`: those that may be called. `is_reasoning`: the prompt opened it.
    """
    if chat_format.reasoning is None and not (tools and chat_format.tools):
        return None
    answer: AnswerParser = PlainText()
    if tools:
        match chat_format.tools:
            case "hermes":
                answer = formats.hermes_parser()
            case "qwen_xml":
                answer = qwen_xml.qwen_xml_parser({tool.name: tool.parameters for tool in tools})
            case "llama3":
                answer = formats.llama3_parser({tool.name for tool in tools})
            case "mistral" | "mistral_args":
                answer = formats.mistral_parser()
            case "granite":
                answer = formats.granite_parser()
    return ReasoningParser(chat_format.reasoning, is_open=is_reasoning, answer=answer)


def _tool_form(source: str) -> ToolForm | None:
    if formats.HERMES_START in source:
        return "qwen_xml" if "<function=" in source else "hermes"
    if formats.MISTRAL_START in source:
        return "mistral_args" if formats.MISTRAL_ARGS in source else "mistral"
    if formats.GRANITE_START in source:
        return "granite"
    if formats.LLAMA3_START in source or ('"name": ' in source and '"parameters": ' in source):
        return "llama3"
    return None


def _reasoning_tags(source: str, added_tokens: Collection[str]) -> ReasoningTags | None:
    written = [tags for tags in _REASONING_TAGS if tags.closing in source]
    known = [tags for tags in _REASONING_TAGS if set(tags) <= set(added_tokens)]
    return next(iter(written + known), None)
