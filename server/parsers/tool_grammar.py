"""Grammars that make a model call tools: the form of its calls, and arguments by their schemas. Pure.

The source is llguidance's Lark dialect. Tags that are one token of the vocabulary are named by their id, since text
never matches a special token. Reasoning stays free: the grammar of a call begins after its closing tag.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.protocol import GrammarSpec
from server.parsers import hermes, mistral, qwen_xml
from server.parsers.detect import ChatFormat
from server.parsers.reasoning import ReasoningPlace
from server.parsers.tool_spec import ToolSpec

# What templates' tojson writes, and so what models were trained on; free whitespace lets small ones write nothing else.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_SPACE = "SPACE: /[ \\n]{0,4}/"


def tool_grammar(
    tools: Sequence[ToolSpec],
    chat_format: ChatFormat,
    *,
    is_parallel: bool,
    reasoning: ReasoningPlace,
    tag_ids: Mapping[str, int],
) -> GrammarSpec:
    """Return the grammar of one or more calls of `tools`. `tag_ids`: the tags that are one token."""
    tag = _Tags(tag_ids)
    rules = [_start(chat_format, reasoning, tag)]
    match chat_format.tools:
        case "qwen_xml":
            rules += _xml_rules(tools, tag)
        case "mistral_args":
            rules += [f"call: {tag(mistral.START)} function"]
            rules += [_choice("function", tools)]
            rules += [f"function_{i}: {_text(tool.name)} {tag(mistral.ARGS)} args_{i}" for i, tool in enumerate(tools)]
            rules += _argument_rules(tools)
        case _:
            key = "parameters" if chat_format.tools == "llama3" else "arguments"
            rules += [_choice("function", tools)]
            for i, tool in enumerate(tools):
                head = _text(f'{{"name": "{tool.name}", "{key}": ')
                rules.append(f'function_{i}: {head} args_{i} "}}"')
            rules += _argument_rules(tools)
    many = is_parallel and chat_format.tools != "llama3"  # Llama's template takes one call at a time
    match chat_format.tools:
        case "hermes":
            rules += [f'call: {tag(hermes.START)} "\\n" function "\\n" {tag(hermes.END)}']
            rules += ['calls: call ("\\n" call)*' if many else "calls: call"]
        case "llama3":
            rules += ["calls: function"]
        case "mistral":
            more = ' (", " function)*' if many else ""
            rules += [f'calls: {tag(mistral.START)} " "? "[" function{more} "]"']
        case "mistral_args":
            rules += ["calls: call+" if many else "calls: call"]
        case _:
            rules += ['calls: call ("\\n" call)*' if many else "calls: call"]
    return GrammarSpec("\n".join(rules) + "\n")


class _Tags:
    """Tags as terminals."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids

    def __call__(self, tag: str) -> str:
        return f"<[{self._ids[tag]}]>" if tag in self._ids else _text(tag)

    def any_text_before(self, rule: str, tag: str) -> str:
        """A rule for any text, and the tag that ends it."""
        if tag in self._ids:
            return f"{rule}: /(?s:.*)/ {self(tag)}"
        return f"{rule}[suffix={_text(tag)}]: /(?s:.*)/"


def _start(chat_format: ChatFormat, reasoning: ReasoningPlace, tag: _Tags) -> str:
    tags = chat_format.reasoning
    if tags is None or reasoning == "none":
        return "start: calls"
    thoughts = tag.any_text_before("thoughts", tags.closing)
    if reasoning == "open":
        return f"start: thoughts SPACE calls\n{thoughts}\n{_SPACE}"
    return f"start: ({tag(tags.opening)} thoughts SPACE)? calls\n{thoughts}\n{_SPACE}"


def _choice(rule: str, tools: Sequence[ToolSpec]) -> str:
    return f"{rule}: " + " | ".join(f"{rule}_{i}" for i in range(len(tools)))


def _argument_rules(tools: Sequence[ToolSpec]) -> list[str]:
    return [f"args_{i}: {_json(tool.parameters, is_strict=tool.is_strict)}" for i, tool in enumerate(tools)]


def _xml_rules(tools: Sequence[ToolSpec], tag: _Tags) -> list[str]:
    rules = [f'call: {tag(hermes.START)} "\\n" function "\\n" {tag(hermes.END)}', _choice("function", tools)]
    for i, tool in enumerate(tools):
        properties = tool.parameters.get("properties")
        required = tool.parameters.get("required")
        names = []
        for j, (key, schema) in enumerate(properties.items() if isinstance(properties, dict) else ()):
            is_required = isinstance(required, list) and key in required
            names.append(f"parameter_{i}_{j}" + ("" if is_required else "?"))
            rules += _xml_parameter_rules(f"{i}_{j}", key, schema, tool)
        head = _text(f"<function={tool.name}>\n")
        rules.append(f"function_{i}: {head} {' '.join(names)} {_text('</function>')}")
    return rules


def _xml_parameter_rules(suffix: str, key: str, schema: Any, tool: ToolSpec) -> list[str]:
    head = _text(f"<parameter={key}>\n")
    if qwen_xml.is_string(schema):
        return [
            f'parameter_{suffix}: {head} value_{suffix} "\\n"',
            f"value_{suffix}[suffix={_text(chr(10) + '</parameter>')}]: /(?s:.*)/",
        ]
    definitions = {word: tool.parameters[word] for word in ("$defs", "definitions") if word in tool.parameters}
    schema = {**definitions, **schema} if isinstance(schema, dict) else {}
    end = _text("\n</parameter>\n")
    return [
        f"parameter_{suffix}: {head} value_{suffix} {end}",
        f"value_{suffix}: {_json(schema, is_strict=tool.is_strict)}",
    ]


def _json(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """A schema as a terminal. What llguidance cannot enforce is an error for strict tools, and left out for others."""
    return "%json " + json.dumps({**schema, "x-guidance": {**_JSON_STYLE, "lenient": not is_strict}})


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
