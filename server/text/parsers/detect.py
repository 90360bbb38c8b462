"""Detects the formats of reasoning and tool calls from a model's chat template and added tokens. Pure.

A template that shows the model how to call tools contains the format that the model was trained on, so no flag is
needed. If nothing is found, answers are plain text.
"""

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from server.text.parsers import formats, harmony, json_forms, literal_calls, xml_calls
from server.text.parsers.base import AnswerParser, PartsParser, ToolSpec
from server.text.parsers.reasoning import PlainText, ReasoningParser, ReasoningTags, Unwrapped
from server.text.parsers.tool_calls import CallParser

ToolForm = Literal[
    "glm4",
    "cohere",
    "apertus",
    "kimi",
    "deepseek_v3",
    "deepseek_v31",
    "hunyuan",
    "nemotron",
    "harmony",
    "seed",
    "minimax",
    "dsml",
    "dsml_v4",
    "glm",
    "gemma4",
    "lfm2",
    "llama4",
    "olmo3",
    "qwen_xml",
    "hermes",
    "llama3",
    "mistral",
    "mistral_args",
    "granite",
]

_REASONING_TAGS = (
    ReasoningTags("<think>", "</think>"),
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<seed:think>", "</seed:think>"),
    ReasoningTags("<|channel>thought", "<channel|>"),
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningTags("<|inner_prefix|>", "<|inner_suffix|>"),
)
_WRAPPERS = (
    ReasoningTags("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ReasoningTags("<|START_TEXT|>", "<|END_TEXT|>"),
    ReasoningTags("<response>", "</response>"),
    ReasoningTags("<answer>", "</answer>"),
)
THINKING_SWITCHES = ("enable_thinking", "thinking")
_TAG_TOKEN = re.compile(r"<[^<>]+>")  # in a tag that is more than one token


class _Form(NamedTuple):
    """How one form is recognised and read. `marks`: each a string, or several, that the template contains."""

    marks: tuple[tuple[str, ...], ...]
    tags: tuple[str, ...]
    parser: Callable[[Sequence[ToolSpec]], CallParser]


def _schemas(tools: Sequence[ToolSpec]) -> dict[str, dict[str, Any]]:
    return {tool.name: tool.parameters for tool in tools}


def _xml(form: xml_calls.XmlForm) -> Callable[[Sequence[ToolSpec]], CallParser]:
    return lambda tools: xml_calls.xml_parser(form, _schemas(tools))


def _python(form: literal_calls.PythonForm) -> Callable[[Sequence[ToolSpec]], CallParser]:
    return lambda tools: literal_calls.python_parser(form, _schemas(tools))


def _array(form: json_forms.ArrayForm) -> Callable[[Sequence[ToolSpec]], CallParser]:
    return lambda tools: json_forms.array_parser(form)


def _section(form: json_forms.SectionForm) -> Callable[[Sequence[ToolSpec]], CallParser]:
    return lambda tools: json_forms.section_parser(form)


_INVOKE = 'invoke name="'  # of several forms, of which these are known; their templates contain marks of others
_INVOKING = ("minimax", "dsml", "dsml_v4")
# The first whose marks are in a template is its form
_FORMS: dict[ToolForm, _Form] = {
    "seed": _Form(((xml_calls.SEED.start,),), xml_calls.SEED.tags, _xml(xml_calls.SEED)),
    "minimax": _Form(((xml_calls.MINIMAX.start,),), xml_calls.MINIMAX.tags, _xml(xml_calls.MINIMAX)),
    # templates write the token by a variable
    "dsml": _Form(((xml_calls.DSML.token, "function_calls>"),), xml_calls.DSML.tags, _xml(xml_calls.DSML)),
    "dsml_v4": _Form(((xml_calls.DSML.token, "tool_calls>"),), xml_calls.DSML_V4.tags, _xml(xml_calls.DSML_V4)),
    "glm": _Form(
        ((formats.HERMES_START, xml_calls.GLM.parameter),),
        xml_calls.GLM.tags,
        lambda tools: xml_calls.glm_parser(_schemas(tools)),
    ),
    "gemma4": _Form(
        ((literal_calls.GEMMA_START,),),
        literal_calls.GEMMA_TAGS,
        lambda tools: literal_calls.gemma_parser(_schemas(tools)),
    ),
    "cohere": _Form(((json_forms.COHERE.start,),), json_forms.COHERE, _array(json_forms.COHERE)),
    "apertus": _Form(((json_forms.APERTUS.start,),), json_forms.APERTUS, lambda tools: json_forms.apertus_parser()),
    "kimi": _Form(((json_forms.KIMI.start,),), json_forms.KIMI.tags, _section(json_forms.KIMI)),
    "deepseek_v3": _Form(
        ((json_forms.DEEPSEEK.separator, f"{json_forms.FENCE}json"),),
        json_forms.DEEPSEEK.tags,
        _section(json_forms.DEEPSEEK),
    ),
    "deepseek_v31": _Form(((json_forms.DEEPSEEK.separator,),), json_forms.DEEPSEEK.tags, _section(json_forms.DEEPSEEK)),
    "hunyuan": _Form(((json_forms.HUNYUAN.start,),), json_forms.HUNYUAN, _array(json_forms.HUNYUAN)),
    "nemotron": _Form(((json_forms.NEMOTRON.start,),), json_forms.NEMOTRON, _array(json_forms.NEMOTRON)),
    "glm4": _Form(
        (("[gMASK]", "# 可用工具"),), (), lambda tools: json_forms.glm4_parser({tool.name for tool in tools})
    ),
    "lfm2": _Form(
        ((literal_calls.LFM2.start,), ("<|tool_list_start|>",), ("List of tools: [",)),
        literal_calls.LFM2.tags,
        _python(literal_calls.LFM2),
    ),
    "llama4": _Form(
        ((literal_calls.LLAMA4.start,), ("[func_name1(",)),
        literal_calls.LLAMA4.tags,
        lambda tools: literal_calls.llama4_parser(_schemas(tools)),
    ),
    "olmo3": _Form(((literal_calls.OLMO3.start,),), literal_calls.OLMO3.tags, _python(literal_calls.OLMO3)),
    "qwen_xml": _Form(((formats.HERMES_START, xml_calls.QWEN.function),), xml_calls.QWEN.tags, _xml(xml_calls.QWEN)),
    "hermes": _Form(((formats.HERMES_START,),), formats.HERMES_TAGS, lambda tools: formats.hermes_parser()),
    "mistral_args": _Form(
        ((formats.MISTRAL_START, formats.MISTRAL_ARGS),), formats.MISTRAL_TAGS, lambda tools: formats.mistral_parser()
    ),
    "mistral": _Form(((formats.MISTRAL_START,),), formats.MISTRAL_TAGS, lambda tools: formats.mistral_parser()),
    "granite": _Form(((formats.GRANITE_START,),), formats.GRANITE_TAGS, lambda tools: formats.granite_parser()),
    "llama3": _Form(
        ((formats.LLAMA3_START,), ('"name": ', '"parameters": ')),
        formats.LLAMA3_TAGS,
        lambda tools: formats.llama3_parser({tool.name for tool in tools}),
    ),
}


class ChatFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The formats of one model's reasoning and tool calls."""

    tools: ToolForm | None = None
    reasoning: ReasoningTags | None = None
    wrapper: ReasoningTags | None = None  # around the answer's text, if the model writes any
    is_harmony: bool = False  # the whole answer is in this format, with tools or without
    takes_tools: bool = False  # the template shows them to the model
    thinking_switch: str | None = None  # the template's variable that turns reasoning on and off
    takes_effort: bool = False  # the template reads reasoning_effort
    takes_budget: bool = False  # the template reads thinking_budget

    def tags(self, *, has_tools: bool) -> tuple[str, ...]:
        """Tags that a parser must see even if they are special tokens. `has_tools`: the request has tools to call."""
        if self.is_harmony:
            return harmony.TAGS
        of_reasoning = [part for tag in self.reasoning or () for part in (tag, *_TAG_TOKEN.findall(tag))]
        of_tools = _FORMS[self.tools].tags if has_tools and self.tools in _FORMS else ()
        return tuple(dict.fromkeys([*of_reasoning, *(self.wrapper or ()), *of_tools]))

    @property
    def stops(self) -> tuple[str, ...]:
        """Tokens that end an answer, even if the model's configuration does not name them."""
        if self.is_harmony:
            return harmony.STOPS
        return (literal_calls.GEMMA_RESPONSE,) if self.tools == "gemma4" else ()


def detect_format(source: str, *, names_read: Collection[str], added_tokens: Collection[str]) -> ChatFormat:
    """Look for the known forms in a chat template. `names_read`: the variables that it reads."""
    is_harmony = harmony.START in source and harmony.CHANNEL in source and harmony.MESSAGE in source
    form: ToolForm | None = "harmony" if is_harmony else _tool_form(source)
    return ChatFormat(
        tools=form if "tools" in names_read else None,
        reasoning=harmony.REASONING if is_harmony else _reasoning_tags(source, added_tokens),
        wrapper=None if _INVOKE in source else next((tags for tags in _WRAPPERS if tags.closing in source), None),
        is_harmony=is_harmony,
        takes_tools="tools" in names_read,
        thinking_switch=next((name for name in THINKING_SWITCHES if name in names_read), None),
        takes_effort="reasoning_effort" in names_read,
        takes_budget="thinking_budget" in names_read,
    )


def make_parser(chat_format: ChatFormat, *, tools: Sequence[ToolSpec], is_reasoning: bool) -> PartsParser | None:
    """Return a parser for one choice, or None if its text is just text.

    `tools`: those that may be called. `is_reasoning`: the prompt opened it.
    """
    if chat_format.is_harmony:
        return harmony.HarmonyParser({tool.name for tool in tools}, is_open=is_reasoning)
    form = _FORMS[chat_format.tools] if tools and chat_format.tools in _FORMS else None
    if chat_format.reasoning is None and chat_format.wrapper is None and form is None:
        return None
    answer: AnswerParser = PlainText() if form is None else form.parser(tools)
    if chat_format.wrapper is not None:
        answer = Unwrapped(chat_format.wrapper, answer)
    return ReasoningParser(chat_format.reasoning, is_open=is_reasoning, answer=answer)


def _tool_form(source: str) -> ToolForm | None:
    for name, form in _FORMS.items():
        if any(all(part in source for part in mark) for mark in form.marks):
            return name if name in _INVOKING or _INVOKE not in source else None
    return None


def _reasoning_tags(source: str, added_tokens: Collection[str]) -> ReasoningTags | None:
    written = [tags for tags in _REASONING_TAGS if tags.closing in source]
    known = [tags for tags in _REASONING_TAGS if set(tags) <= set(added_tokens)]
    return next(iter(written + known), None)
