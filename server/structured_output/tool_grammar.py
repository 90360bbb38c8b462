"""Grammars for tool calls: the call's format, with arguments constrained by the tools' schemas. Pure.

The source is llguidance's Lark dialect. Tags that are one token of the vocabulary are written by their id, because
text never matches a special token. Reasoning is unconstrained: answer_grammar() allows it before any grammar.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.interface.protocol import GrammarSpec
from server.text.parsers import formats, qwen_xml
from server.text.parsers.base import ToolSpec
from server.text.parsers.detect import ChatFormat
from server.text.parsers.reasoning import ReasoningPlace, ReasoningTags

# What templates' tojson writes, and so what models were trained on; where whitespace is free, small ones never stop it.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def tool_grammar(
    tools: Sequence[ToolSpec], chat_format: ChatFormat, *, is_parallel: bool, tag_ids: Mapping[str, int]
) -> GrammarSpec:
    """Return the grammar of a call of one of `tools`, or of several calls. `tag_ids`: the tags that are one token."""
    tag = _Tags(tag_ids)
    rules = ["start: calls", _choice(tools)]
    match chat_format.tools:
        case "llama3":  # whose template takes one call at a time
            rules += ["calls: function", *_json_rules(tools, "parameters")]
        case "mistral" | "granite":
            start = tag(formats.MISTRAL_START if chat_format.tools == "mistral" else formats.GRANITE_START)
            more = ' (", " function)*' if is_parallel else ""
            rules += [f'calls: {start} " "? "[" function{more} "]"', *_json_rules(tools, "arguments")]
        case "mistral_args":
            rules += ["calls: call+" if is_parallel else "calls: call", f"call: {tag(formats.MISTRAL_START)} function"]
            for i, tool in enumerate(tools):
                rules.append(f"function_{i}: {_text(tool.name)} {tag(formats.MISTRAL_ARGS)} arguments_{i}")
            rules += _argument_rules(tools)
        case _:
            rules.append('calls: call ("\\n" call)*' if is_parallel else "calls: call")
            rules.append(f'call: {tag(formats.HERMES_START)} "\\n" function "\\n" {tag(formats.HERMES_END)}')
            rules += _xml_rules(tools) if chat_format.tools == "qwen_xml" else _json_rules(tools, "arguments")
    return GrammarSpec("\n".join(rules) + "\n")


def answer_grammar(
    parts: Sequence[GrammarSpec], tags: ReasoningTags | None, place: ReasoningPlace, *, tag_ids: Mapping[str, int]
) -> GrammarSpec:
    """Return the grammar of a whole answer: one of the parts, after reasoning if that may come or the prompt opened it.

    `tags`: of the reasoning. `tag_ids`: as for tool_grammar.
    """
    has_reasoning = tags is not None and place != "none"
    if len(parts) == 1 and not has_reasoning:
        return parts[0]
    names = [f"part_{i}" for i in range(len(parts))]
    answer = f"({' | '.join(f'@{name}' for name in names)})"
    rules = [f"start: {answer}"]
    if tags is not None and has_reasoning:
        tag = _Tags(tag_ids)
        free = "thoughts SPACE" if place == "open" else f"({tag(tags.opening)} thoughts SPACE)?"
        rules = [f"start: {free} {answer}", "SPACE: /[ \\n]{0,4}/"]
        if tags.closing in tag_ids:
            rules.append(f"thoughts: /(?s:.*)/ {tag(tags.closing)}")
        else:
            rules.append(_any_text_before("thoughts", tags.closing))
    grammars = [{"lark_grammar": "\n".join(rules)}]
    grammars += [{"name": name, "lark_grammar": part.source} for name, part in zip(names, parts, strict=True)]
    return GrammarSpec(json.dumps({"grammars": grammars}))


class _Tags:
    """Tags as terminals."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids

    def __call__(self, tag: str) -> str:
        return f"<[{self._ids[tag]}]>" if tag in self._ids else _text(tag)


def _choice(tools: Sequence[ToolSpec]) -> str:
    return "function: " + " | ".join(f"function_{i}" for i in range(len(tools)))


def _json_rules(tools: Sequence[ToolSpec], key: str) -> list[str]:
    rules = []
    for i, tool in enumerate(tools):
        head = _text(f'{{"name": "{tool.name}", "{key}": ')
        rules.append(f'function_{i}: {head} arguments_{i} "}}"')
    return rules + _argument_rules(tools)


def _argument_rules(tools: Sequence[ToolSpec]) -> list[str]:
    return [f"arguments_{i}: {_json(tool.parameters, is_strict=tool.is_strict)}" for i, tool in enumerate(tools)]


def _xml_rules(tools: Sequence[ToolSpec]) -> list[str]:
    """Parameters come in the schema's order; those that are not required may be left out."""
    rules = []
    for i, tool in enumerate(tools):
        properties, required = tool.parameters.get("properties"), tool.parameters.get("required")
        names = []
        for j, (key, schema) in enumerate(properties.items() if isinstance(properties, dict) else ()):
            is_required = isinstance(required, list) and key in required
            names.append(f"parameter_{i}_{j}" + ("" if is_required else "?"))
            rules += _xml_parameter_rules(f"{i}_{j}", key, schema, tool)
        head = _text(f"<function={tool.name}>\n")
        rules.append(f"function_{i}: {head} {' '.join(names)} {_text('</function>')}")
    return rules


def _xml_parameter_rules(suffix: str, key: str, schema: Any, tool: ToolSpec) -> list[str]:
    head, end = _text(f"<parameter={key}>\n"), "\n</parameter>"
    if qwen_xml.is_string(schema):
        return [f'parameter_{suffix}: {head} value_{suffix} "\\n"', _any_text_before(f"value_{suffix}", end)]
    definitions = {word: tool.parameters[word] for word in ("$defs", "definitions") if word in tool.parameters}
    schema = {**definitions, **schema} if isinstance(schema, dict) else {}
    return [
        f"parameter_{suffix}: {head} value_{suffix} {_text(end)} " + '"\\n"',
        f"value_{suffix}: {_json(schema, is_strict=tool.is_strict)}",
    ]


def _any_text_before(rule: str, end: str) -> str:
    return f"{rule}[suffix={_text(end)}]: /(?s:.*)/"


def _json(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """Return a schema as a terminal. Keywords unknown to llguidance are errors for strict tools, else ignored."""
    return "%json " + json.dumps({**schema, "x-guidance": {**_JSON_STYLE, "lenient": not is_strict}})


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
