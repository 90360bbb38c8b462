"""The forms of tool calls as texts: each form's calls as models write them, and texts that only look like calls."""

import json

from hypothesis import strategies as st

from server.text.parsers.xml_calls import DSML, DSML_V4, GLM, MINIMAX, QWEN, SEED

PLACES = st.lists(st.integers(0, 400), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["city", 'q"', "<tool_call>", "ü", "{"]), VALUES, max_size=3)
CALLS = st.tuples(st.sampled_from(["get_weather", "now"]), ARGUMENTS)
WORDS = st.text(alphabet='ab<>/[]{}"\\;: \n</tool_call>é', max_size=12)  # what tags and calls are made of, mostly
SCHEMA_FORMS = {"qwen_xml": QWEN, "seed": SEED, "minimax": MINIMAX, "glm": GLM}  # whose values are typed by the schema
XML_FORMS = SCHEMA_FORMS | {"dsml": DSML, "dsml_v4": DSML_V4}
JSON_FORMS = ["hermes", "llama3", "mistral", "mistral_args", "granite"]
LITERAL_FORMS = ["gemma4", "lfm2", "llama4", "olmo3"]
TAG_FORMS = ["hunyuan", "nemotron", "cohere", "apertus", "kimi", "deepseek_v3", "deepseek_v31"]
JSON_FORMS += TAG_FORMS
FORMS = [*JSON_FORMS, *XML_FORMS, *LITERAL_FORMS]
# text that looks like a call, and is none
MALFORMED = {
    "hermes": ["<tool_call>", "<tool_call>{}", '<tool_call>{"name": 3}', "<tool_call>[1]</tool_call>", "<tool_",
               "</tool_call>",
               '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', '<tool_call>{"name": "f" "arguments": {}}',
               '<tool_call>{"name": "", "arguments": {}}', '<tool_call>{"arguments": {"a": 1]',
               "<tool_call>hi</tool_call>"],
    "qwen_xml": ["<tool_call>", "<tool_call><function>", "<tool_call>{}", "<function=\n>", "<function=>", "<func",
                 "<parameter=a>1</parameter>", "</tool_call>"],
    "llama3": ["<|python_tag|>print(1)", "<|python_tag|>{}", '<|python_tag|>{"name": 1}', "<|python_",
               "<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS] [", "[TOOL_CALLS]{}", "[TOOL_CALLS]?{}", "[TOOL_CALLS] [1]", "[TOOL_",
                "[TOOL_CALLS][ARGS]{}", '[TOOL_CALLS]{"name": 1}', "[ARGS]{}", '[TOOL_CALLS] [{"name": "f" }, {}]'],
}  # fmt: skip
# what may stand between a call's arguments and its closing tag
JUNK = ["junk", " } junk", ", junk}", "]", "<", "</tool_", "<tool", "</", ".</tool_calls>"]
MALFORMED["mistral_args"] = MALFORMED["mistral"]
MALFORMED["granite"] = ["<|tool_call|>", "<|tool_call|>x", '<|tool_call|>[{"name"}]', "<|tool_call|>{}", "<|tool_"]

for _form in ("seed", "minimax", "dsml", "dsml_v4"):
    _tags = XML_FORMS[_form]
    MALFORMED[_form] = [
        text.replace("<tool_call>", _tags.start)
        .replace("</tool_call>", _tags.end)
        .replace("<function=", _tags.function)
        for text in MALFORMED["qwen_xml"]
    ]
MALFORMED["glm"] = ["<tool_call>", "<tool_call>{}", "<tool_call>two words", "<tool_", "</tool_call>",
                    "<arg_key>a</arg_key>", "<tool_call></tool_call>"]  # fmt: skip

MALFORMED["gemma4"] = [
    "<|tool_call>",
    "<|tool_call>now{}",
    "<|tool_call>call:{}",
    "<|tool_call>call:now()",
    "<|tool_call>call:",
    "<|tool_c",
    "<tool_call|>",
]
MALFORMED["lfm2"] = [
    "<|tool_call_start|>",
    "<|tool_call_start|>now()",
    "<|tool_call_start|>[now{}]",
    "<|tool_call_start|>[]",
    "<|tool_call_end|>",
    "<|tool_",
]
MALFORMED["llama4"] = [text.replace("tool_call_", "python_") for text in MALFORMED["lfm2"]]
MALFORMED["olmo3"] = [
    "<function_calls>",
    "<function_calls></function_calls>",
    "<function_calls>()",
    "<function_calls>now",
    "</function_calls>",
    "<function_",
]

for _form, _start, _end in (
    ("hunyuan", "<tool_calls>", "</tool_calls>"),
    ("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    ("cohere", "<|START_ACTION|>", "<|END_ACTION|>"),
    ("apertus", "<|tools_prefix|>", "<|tools_suffix|>"),
):
    MALFORMED[_form] = [
        _start,
        f"{_start}x",
        f"{_start}[]",
        f'{_start}[{{"name"}}]',
        f"{_start}{{}}{_end}",
        _start[:4],
        _end,
    ]
MALFORMED["kimi"] = [
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_begin|>x<|tool_calls_section_end|>",
    "<|tool_call_begin|>functions.a:0",
    "<|tool_call_begin|><|tool_call_argument_begin|>{}",
    "<|tool_call_begin|>a<|tool_call_argument_begin|>x",
    "<|tool_",
    "<|tool_call_end|>",
]
MALFORMED["deepseek_v3"] = MALFORMED["deepseek_v31"] = [
    text.replace("|", "｜").replace("_", "▁")
    for text in ("<|tool_calls_begin|>", "<|tool_calls_begin|>x", "<|tool_call_begin|>function<|tool_sep|>",
                 "<|tool_call_begin|>function<|tool_sep|>a\n```python\nx", "<|tool_call_begin|>a<|tool_sep|>x",
                 "<|tool_call_begin|>function", "<|tool", "<|tool_calls_end|>")
]  # fmt: skip


def written(form: str, name: str, arguments: dict) -> str:
    """A call as a model writes it."""
    text = json.dumps(arguments, ensure_ascii=False)
    match form:
        case "hermes":
            return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'
        case "llama3":
            return f'<|python_tag|>{{"name": "{name}", "parameters": {text}}}'
        case "mistral":
            return f'[TOOL_CALLS] [{{"name": "{name}", "arguments": {text}, "id": "123456789"}}]'
        case "granite":
            return f'<|tool_call|>[{{"name": "{name}", "arguments": {text}}}]'
        case "harmony":
            return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}<|call|>"
        case "mistral_args":
            return f"[TOOL_CALLS]{name}[ARGS]{text}"
    if form in TAG_FORMS:
        return written_in_tags(form, name, text)
    if form in LITERAL_FORMS:
        return written_literals(form, name, arguments)
    tags = XML_FORMS[form]
    pad = "\n" if tags.is_padded else ""
    if tags.says_type:
        values = [
            (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)) for value in arguments.values()
        ]
    else:
        values = list(map(str, arguments.values()))
    heads = [tags.parameter_head(key, is_string=isinstance(value, str)) for key, value in arguments.items()]
    values = "".join(
        f"{head}{tags.value_start and chr(10) + tags.value_start}{pad}{value}{pad}{tags.parameter_end}\n"
        for head, value in zip(heads, values, strict=True)
    )
    if form == "glm":
        return f"<tool_call>{name}\n{values}</tool_call>"
    return f"{tags.start}\n{tags.function}{name}{tags.name_end}\n{values}{tags.function_end}\n{tags.end}"


def written_in_tags(form: str, name: str, text: str) -> str:
    match form:
        case "hunyuan":
            return f'<tool_calls>[{{"name": "{name}", "arguments": {text}}}]</tool_calls>'
        case "nemotron":
            return f'<TOOLCALL>[{{"name": "{name}", "arguments": {text}}}]</TOOLCALL>'
        case "cohere":
            call = f'{{"tool_call_id": "0", "tool_name": "{name}", "parameters": {text}}}'
            return f"<|START_ACTION|>[\n    {call}\n]<|END_ACTION|>"
        case "apertus":
            return f'<|tools_prefix|>[{{"{name}": {text}}}]<|tools_suffix|>'
        case "kimi":
            call = f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{text}<|tool_call_end|>"
            return f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"
    inner = (
        f"function<｜tool▁sep｜>{name}\n```json\n{text}\n```"
        if form == "deepseek_v3"
        else f"{name}<｜tool▁sep｜>{text}"
    )
    return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{inner}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def written_literals(form: str, name: str, arguments: dict) -> str:
    if form == "gemma4":
        pairs = ",".join(f"{key}:{gemma_value(value)}" for key, value in sorted(arguments.items()))
        return f"<|tool_call>call:{name}{{{pairs}}}<tool_call|>"
    call = f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
    if form == "olmo3":
        return f"<function_calls>{call}</function_calls>"
    tag = "tool_call" if form == "lfm2" else "python"
    return f"<|{tag}_start|>[{call}]<|{tag}_end|>"


def gemma_value(value: object, *, is_inner: bool = False) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case list():
            return f"[{','.join(gemma_value(item) for item in value)}]"
        case dict():
            return f"{{{','.join(f'{gemma_value(key)}:{gemma_value(item)}' for key, item in value.items())}}}"
    return json.dumps(value)


def with_junk(form: str, name: str, arguments: dict, junk: str) -> str:
    """A call with something between its arguments and what closes it."""
    text = written(form, name, arguments)
    head, end = ("}", "}\n</tool_call>") if form == "hermes" else ("", "")
    if form in XML_FORMS:
        tags = XML_FORMS[form]
        end = tags.end if form == "glm" else f"{tags.function_end}\n{tags.end}"
    return text.removesuffix(end) + junk + end.removeprefix(head)


# rule: Tools and reasoning: A stream with tools joins to the whole answer, however the text is cut
