"""Grammars for tool calls: the call's format, with arguments constrained by the tools' schemas. Pure.

The source is llguidance's Lark dialect. Tags that are one token of the vocabulary are written by their id, because
text never matches a special token. Reasoning is unconstrained: answer_grammar() allows it before any grammar.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engine.interface.errors import InvalidParameter
from engine.interface.protocol import GrammarSpec
from server.structured_output.discriminators import with_discriminators
from server.structured_output.literal_rules import GEMMA, PYTHON, LiteralRules, Style
from server.structured_output.schema_references import pointer, resolve_references
from server.text.parsers import formats, harmony, json_forms, literal_calls, xml_calls
from server.text.parsers.base import ToolSpec
from server.text.parsers.detect import ChatFormat
from server.text.parsers.reasoning import ReasoningPlace
from server.text.parsers.typed_values import is_string

MAX_GRAMMAR_BYTES = 256 * 1024
# What templates' tojson writes, and so what models were trained on; where whitespace is free, small ones never stop it.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_REFERENCE = '"$ref"'
_XML = {
    "qwen_xml": xml_calls.QWEN,
    "seed": xml_calls.SEED,
    "minimax": xml_calls.MINIMAX,
    "dsml": xml_calls.DSML,
    "dsml_v4": xml_calls.DSML_V4,
    "glm": xml_calls.GLM,
}
_ARRAYS = {
    "hunyuan": json_forms.HUNYUAN,
    "nemotron": json_forms.NEMOTRON,
    "cohere": json_forms.COHERE,
    "apertus": json_forms.APERTUS,
}
_PYTHON = {"lfm2": literal_calls.LFM2, "llama4": literal_calls.LLAMA4, "olmo3": literal_calls.OLMO3}


def tool_grammar(
    tools: Sequence[ToolSpec], chat_format: ChatFormat, *, is_parallel: bool, tag_ids: Mapping[str, int]
) -> GrammarSpec:
    """Return the grammar of a call of one of `tools`, or of several calls. `tag_ids`: the tags that are one token."""
    tag = _Tags(tag_ids)
    tools = [msgspec.structs.replace(tool, parameters=with_discriminators(tool.parameters)) for tool in tools]
    rules = ["start: calls", _choice(tools)]
    match chat_format.tools:
        case "harmony":  # an answer ends with its call
            rules += ["calls: function", *_harmony_calls(tools, tag), *_argument_rules(tools)]
        case "llama3":  # whose template takes one call at a time
            rules += ["calls: function", *_json_rules(tools, "parameters")]
        case "mistral" | "granite":
            start = tag(formats.MISTRAL_START if chat_format.tools == "mistral" else formats.GRANITE_START)
            more = ' (", " function)*' if is_parallel else ""
            rules += [f'calls: {start} " "? "[" function{more} "]"', *_json_rules(tools, "arguments")]
        case "hunyuan" | "nemotron" | "cohere" | "apertus":
            rules += _array_calls(tools, chat_format.tools, tag, is_parallel=is_parallel)
        case "kimi" | "deepseek_v3" | "deepseek_v31":
            rules += _section_calls(tools, chat_format.tools, tag, is_parallel=is_parallel)
        case "glm4":
            rules += ["calls: function", *_argument_rules(tools)]
            rules += [f"function_{i}: {_text(tool.name)} NEWLINE arguments_{i}" for i, tool in enumerate(tools)]
            rules.append('NEWLINE: "\\n"')
        case "mistral_args":
            rules += ["calls: call+" if is_parallel else "calls: call", f"call: {tag(formats.MISTRAL_START)} function"]
            for i, tool in enumerate(tools):
                rules.append(f"function_{i}: {_text(tool.name)} {tag(formats.MISTRAL_ARGS)} arguments_{i}")
            rules += _argument_rules(tools)
        case "qwen_xml" | "seed" | "minimax" | "dsml" | "dsml_v4" | "glm" as form:
            rules += _xml_calls(tools, _XML[form], tag, is_parallel=is_parallel)
        case "gemma4" | "lfm2" | "llama4" | "olmo3":
            rules += _literal_calls(tools, chat_format.tools, tag, is_parallel=is_parallel)
        case _:
            rules.append('calls: call ("\\n" call)*' if is_parallel else "calls: call")
            rules.append(f'call: {tag(formats.HERMES_START)} "\\n" function "\\n" {tag(formats.HERMES_END)}')
            rules += _json_rules(tools, "arguments")
    return GrammarSpec("\n".join(rules) + "\n")


def answer_grammar(
    texts: Sequence[GrammarSpec],
    calls: GrammarSpec | None,
    chat_format: ChatFormat,
    place: ReasoningPlace,
    *,
    tag_ids: Mapping[str, int],
) -> GrammarSpec:
    """Return the grammar of a whole answer: one of `texts`, or calls, after reasoning if that may come or the prompt
    opened it. `tag_ids`: as for tool_grammar.
    """
    parts = [*texts, *([calls] if calls is not None else [])]
    names = [f"part_{i}" for i in range(len(parts))]
    tag = _Tags(tag_ids)
    has_reasoning = chat_format.reasoning is not None and place != "none"
    if chat_format.is_harmony and place != "none":
        rules = _harmony_rules(names, num_texts=len(texts), is_open=place == "open", tag=tag)
    elif len(parts) == 1 and not has_reasoning and (chat_format.wrapper is None or not texts):
        return parts[0]
    else:
        opening = f"({tag(chat_format.wrapper.opening)} NEWLINE)? " if chat_format.wrapper is not None else ""
        answers = [f"{opening if i < len(texts) else ''}@{name}" for i, name in enumerate(names)]
        answer = f"({' | '.join(answers)})"
        rules = [f"start: {answer}"]
        if chat_format.reasoning is not None and has_reasoning:
            tags = chat_format.reasoning
            free = "thoughts SPACE" if place == "open" else f"({tag(tags.opening)} thoughts SPACE)?"
            rules = [f"start: {free} {answer}", "SPACE: /[ \\n]{0,4}/", _up_to("thoughts", tags.closing, tag)]
        rules += ["NEWLINE: /\\n?/"] if opening and texts else []
    grammars = [{"lark_grammar": "\n".join(rules)}]
    grammars += [{"name": name, "lark_grammar": part.source} for name, part in zip(names, parts, strict=True)]
    return GrammarSpec(json.dumps({"grammars": grammars}))


def check_grammar_size(num_bytes: int) -> None:
    """Raise InvalidParameter if the schemas of a request's tools are too large to be enforced."""
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidParameter(
            f"tools have schemas of {num_bytes} bytes together; where enforced, the limit is {MAX_GRAMMAR_BYTES}.",
            param="tools",
        )


def _harmony_rules(names: Sequence[str], *, num_texts: int, is_open: bool, tag: "_Tags") -> list[str]:
    """Any number of messages to analysis, then one of the parts: the first `num_texts` in the channel final."""
    final = tag(f"{harmony.CHANNEL}final{harmony.MESSAGE}")
    answers = [f"{final} @{name}" if i < num_texts else f"@{name}" for i, name in enumerate(names)]
    first = "thoughts " if is_open else ""
    return [
        f"start: {first}analysis* ({' | '.join(answers)})",
        f"analysis: {tag(harmony.REASONING.opening)} thoughts",
        _up_to("thoughts", f"{harmony.END}{harmony.START}assistant", tag),
    ]


def _up_to(rule: str, end: str, tag: "_Tags") -> str:
    """Return the rule of any text up to an end, that included."""
    text, rest = tag.split_at_token(end)
    if rest:
        before = re.escape(text).replace("/", "\\/")
        return f"{rule}: /(?s:.*{before})/ {tag(rest)}"
    return f"{rule}[suffix={_text(end)}]: /(?s:.*)/"


class _Tags:
    """Texts with tags in them as terminals."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        self._pattern = re.compile("|".join(map(re.escape, sorted(ids, key=len, reverse=True))) or "(?!)")

    def __call__(self, text: str) -> str:
        terminals, start = [], 0
        for match in self._pattern.finditer(text):
            terminals += [_text(text[start : match.start()])] if match.start() > start else []
            terminals.append(f"<[{self._ids[match[0]]}]>")
            start = match.end()
        return " ".join([*terminals, *([_text(text[start:])] if start < len(text) else [])])

    def split_at_token(self, text: str) -> tuple[str, str]:
        """Return what stands before the first token, and what begins with it."""
        match = self._pattern.search(text)
        return (text, "") if match is None else (text[: match.start()], text[match.start() :])


def _harmony_calls(tools: Sequence[ToolSpec], tag: _Tags) -> list[str]:
    """The recipient stands after the channel's name, or before it."""
    rules = [f'json: (" " {tag(harmony.CONSTRAIN)}? "json")?']
    for i, tool in enumerate(tools):
        recipient, channel = f"to={harmony.NAMESPACE}{tool.name}", f"{harmony.CHANNEL}commentary"
        heads = f"({tag(f'{channel} {recipient}')} | {tag(f' {recipient}{channel}')})"
        rules.append(f"function_{i}: {heads} json {tag(harmony.MESSAGE)} arguments_{i}")
    return rules


def _literal_calls(tools: Sequence[ToolSpec], form: str, tag: _Tags, *, is_parallel: bool) -> list[str]:
    if form == "gemma4":
        rules = ["calls: call" + ("+" if is_parallel else "")]
        call = f"call: {tag(f'{literal_calls.GEMMA_START}{literal_calls.GEMMA_CALL}')} function"
        return [*rules, f"{call} {tag(literal_calls.GEMMA_END)}", *_literal_functions(tools, GEMMA, ":", "{}", tag)]
    start, end = map(tag, _PYTHON[form].tags)
    comma = "\n" if form == "olmo3" else ", "
    functions = f"function ({_text(comma)} function)*" if is_parallel else "function"
    rules = _literal_functions(tools, PYTHON, "=", "()", tag)
    if form == "olmo3":
        return [f"calls: {start} {functions} {end}", *rules]
    if form == "lfm2":
        return [f'calls: {start} "[" {functions} "]" {end}', *rules]
    bare = [f"json_{rule.removeprefix('function')}" for rule in _json_rules(tools, "parameters")[: len(tools)]]
    names = " | ".join(f"json__{i}" for i in range(len(tools)))
    rules += [f'list: "[" {functions} "]"', *bare, *_argument_rules(tools)]
    return [f"calls: list | {start} list {end} | {names}", *rules]


def _literal_functions(tools: Sequence[ToolSpec], style: Style, separator: str, brackets: str, tag: _Tags) -> list[str]:
    literals, rules = LiteralRules(style, tag), []
    for i, tool in enumerate(tools):
        arguments = literals.arguments(tool.parameters, separator=separator, is_strict=tool.is_strict)
        rules.append(f"function_{i}: {_text(tool.name + brackets[0])} {arguments} {_text(brackets[1])}")
    return rules + literals.rules


def _array_calls(tools: Sequence[ToolSpec], form: str, tag: _Tags, *, is_parallel: bool) -> list[str]:
    tags, is_cohere = _ARRAYS[form], form == "cohere"
    comma, space = (_text(",\n    "), _text("\n    ")) if is_cohere else (_text(", "), '""')
    end = _text("\n]" if is_cohere else "]")
    more = f" ({comma} function)*" if is_parallel else ""
    rules = [f'calls: {tag(tags.start)} "[" {space} function{more} {end} {tag(tags.end)}', *_argument_rules(tools)]
    for i, tool in enumerate(tools):
        name = json.dumps(tool.name)
        if is_cohere:
            head = f"{_text(chr(123) + chr(34) + 'tool_call_id' + chr(34) + ': ' + chr(34))} /[0-9]+/ "
            head += _text(f'", "tool_name": {name}, "parameters": ')
        else:
            head = _text(f"{{{name}: " if form == "apertus" else f'{{"name": {name}, "arguments": ')
        rules.append(f'function_{i}: {head} arguments_{i} "}}"')
    return rules


def _section_calls(tools: Sequence[ToolSpec], form: str, tag: _Tags, *, is_parallel: bool) -> list[str]:
    tags = json_forms.KIMI if form == "kimi" else json_forms.DEEPSEEK
    newline = ' "\\n"?' if form == "deepseek_v3" else ""
    more = f"({newline} call)*" if is_parallel else ""
    rules = [f"calls: {tag(tags.start)} call {more} {tag(tags.end)}", *_argument_rules(tools)]
    rules.append(f"call: {tag(tags.call)} function {tag(tags.call_end)}")
    for i, tool in enumerate(tools):
        match form:
            case "kimi":
                head = f"{_text(f'{json_forms.KIMI_NAMESPACE}{tool.name}:')} /[0-9]+/ {tag(tags.separator)}"
                rules.append(f"function_{i}: {head} arguments_{i}")
            case "deepseek_v3":
                head = tag(f"{json_forms.DEEPSEEK_KIND}{tags.separator}{tool.name}\n{json_forms.FENCE}json\n")
                rules.append(f"function_{i}: {head} arguments_{i} {_text(chr(10) + json_forms.FENCE)}")
            case _:
                rules.append(f"function_{i}: {tag(f'{tool.name}{tags.separator}')} arguments_{i}")
    return rules


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


def _xml_calls(tools: Sequence[ToolSpec], form: xml_calls.XmlForm, tag: "_Tags", *, is_parallel: bool) -> list[str]:
    """Parameters come in the schema's order; those that are not required may be left out."""
    more = ' ("\\n" function)*' if is_parallel and form.is_shared else ""
    again = ' ("\\n" call)*' if is_parallel and not form.is_shared else ""
    # one format is written with newlines or, in later versions, without
    space = '"\\n"?' if form.value_start else '"\\n"'
    rules = [f"calls: call{again}"]
    if form.value_start:
        rules.append(f"call: {tag(form.start)} function")
    else:
        rules.append(f"call: {tag(form.start)} {space} function{more} {space} {tag(form.end)}")
    for i, tool in enumerate(tools):
        properties, required = tool.parameters.get("properties"), tool.parameters.get("required")
        whole = _as_definition(tool.parameters)
        names = []
        for j, (key, schema) in enumerate(properties.items() if isinstance(properties, dict) else ()):
            is_required = isinstance(required, list) and key in required
            names.append(f"parameter_{i}_{j}" + ("" if is_required else "?"))
            rules += _xml_parameter(f"{i}_{j}", key, schema, tool, whole, form, tag)
        head = tag(f"{form.function}{tool.name}{'' if form.value_start else form.name_end}")
        rules.append(f"function_{i}: {head} {space} {' '.join(names)} {tag(form.function_end)}")
    return rules


def _xml_parameter(
    suffix: str, key: str, schema: Any, tool: ToolSpec, whole: Mapping[str, Any], form: xml_calls.XmlForm, tag: "_Tags"
) -> list[str]:
    newline = "\n" if form.is_padded else ""
    space = '"\\n"?' if form.value_start else '"\\n"'
    holds_text = is_string(schema, tool.parameters)
    head = tag(f"{form.parameter_head(key, is_string=holds_text)}{newline}")
    if form.value_start:
        head += f" {space} {tag(form.value_start)}"
    end, value = f"{newline}{form.parameter_end}", f"value_{suffix}"
    if holds_text:
        return [f"parameter_{suffix}: {head} {value} {space}", _up_to(value, end, tag)]
    schema = schema if isinstance(schema, dict) else {}
    if _REFERENCE in json.dumps(schema):
        schema = {**whole, "$ref": pointer(("$defs", "parameters", "properties", key))}
    return [
        f"parameter_{suffix}: {head} {value} {tag(end)} {space}",
        f"{value}: {_json(schema, is_strict=tool.is_strict)}",
    ]


def _as_definition(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema to which one parameter's can refer; references in it mean what they mean in all parameters'.

    Raises InvalidParameter if the parameters that refer would copy too much.
    """
    text, properties = json.dumps(parameters), parameters.get("properties")
    values = properties.values() if isinstance(properties, dict) else ()
    num_copies = sum(_REFERENCE in json.dumps(schema) for schema in values)
    check_grammar_size(num_copies * len(text))
    if not num_copies:
        return {}
    definition = json.loads(text)
    draft = {"$schema": definition.pop("$schema")} if "$schema" in definition else {}  # in old ones a $ref hides an $id
    whole = {"$defs": {"parameters": {**definition, "$id": "parameters"}}}
    resolve_references(whole, "tools")
    return {**draft, **whole}


def _json(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """Return a schema as a terminal. Keywords unknown to llguidance are errors for strict tools, else ignored."""
    return "%json " + json.dumps({**schema, "x-guidance": {**_JSON_STYLE, "lenient": not is_strict}})


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
