"""Chat templates as models were published with them, out of two packages (make test-templates): each prompt is
transformers' own, byte for byte, and the form of the answers is found."""

import copy
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.interface.errors import InvalidParameter
from server.text.chat_template import ChatTemplate
from server.text.parsers.detect import detect_format

FOLDER = Path(os.environ.get("QUIRE_TEMPLATES", ".templates"))
FILES = sorted(path for path in FOLDER.rglob("*.jinja") if not path.stem.endswith("_training"))
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
WEATHER = {
    "name": "get_weather",
    "description": 'Weather of a <city> & "more".',
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "größe"},
            "unit": {"type": "string", "enum": ["c", "f"]},
        },
        "required": ["city"],
    },
}
TOOLS = [
    {"type": "function", "function": WEATHER},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


FIRST, SECOND = call("abcdefghi", "get_weather", {"city": "Zürich", "n": 1, "x": None}), call("abcdefgh2", "now", {})
CHATS = {
    "user": [user("Hi <b>&amp; 日本 {{ x }}")],
    "system": [{"role": "system", "content": "Be brief. "}, user("Hi")],
    "turns": [
        user("a"),
        {"role": "assistant", "content": "b"},
        user("c"),
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nd"},
        user("e"),
    ],
    "thoughts": [user("a"), {"role": "assistant", "content": "b", "reasoning_content": "why"}, user("c")],
    "a call": [
        {"role": "system", "content": "S"},
        user("a"),
        {"role": "assistant", "content": "", "tool_calls": [FIRST]},
        result("abcdefghi", '{"r": 1}'),
    ],
    "two calls": [
        user("a"),
        {"role": "assistant", "content": "t", "tool_calls": [FIRST, SECOND]},
        result("abcdefghi", "x"),
        result("abcdefgh2", "y"),
        {"role": "assistant", "content": "done"},
        user("b"),
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    "to be continued": [user("a"), {"role": "assistant", "content": " The answer is"}],
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": True},
    {"add_generation_prompt": True, "tools": TOOLS},
    {"add_generation_prompt": True, "enable_thinking": False},
    {"add_generation_prompt": True, "reasoning_effort": "low", "tools": TOOLS},
    {"continue_final_message": True},
]
# what answers look like, by the beginning of the file's name: (tools, reasoning)
FORMS = {
    "Qwen-Qwen2.5": ("hermes", None),
    "qwen2_5.": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "<think>"),
    "qwen3.": ("hermes", "<think>"),
    "qwen3_instruct_2507": ("hermes", None),
    "Qwen3-Coder": ("qwen_xml", None),
    "Qwen-QwQ": ("hermes", "<think>"),
    "NousResearch-Hermes": ("hermes", None),
    "meta-llama-Llama-3": ("llama3", None),
    "llama3_": ("llama3", None),
    "llama3.": (None, None),
    "mistralai-Mistral-Nemo": ("mistral", None),
    "Mistral-Small-3.2": ("mistral_args", None),
    "mistralai-Ministral-3": ("mistral_args", "[THINK]"),
    "ibm-granite-granite-3.3": ("granite", "<think>"),
    "ibm-granite-granite-4": ("hermes", None),
    "deepseek_r1_distill": (None, "<think>"),
    "gemma": (None, None),
    "google-gemma": (None, None),
    "phi3": (None, None),
    "microsoft-Phi": (None, None),
    "HuggingFaceTB-SmolLM3": (None, "<think>"),
}


def outcome(render: Callable[[], str]) -> str | type[BaseException]:
    """Return the text, or what a template raised of itself."""
    try:
        return render()
    except InvalidParameter as error:
        return type(error.__cause__)
    except Exception as error:
        return type(error)


def reference(source: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
    texts, _ = render_jinja_template([messages], chat_template=source, **VARIABLES, **options)
    return texts[0]


def template(path: Path) -> ChatTemplate:
    return ChatTemplate(path.read_text(), variables=VARIABLES, special_tokens=[], added_tokens=[])


def test_there_are_templates() -> None:
    assert len(FILES) > 100, "make test-templates fetches them"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_prompt_is_the_one_of_transformers(path: Path) -> None:
    source, own = path.read_text(), template(path)
    for (name, chat), options in itertools.product(CHATS.items(), SETTINGS):
        continues = "continue_final_message" in options
        if continues and name != "to be continued":
            continue
        expected = outcome(lambda: reference(source, copy.deepcopy(chat), options))  # noqa: B023 (called at once)
        kwargs = {key: value for key, value in options.items() if key in ("enable_thinking", "reasoning_effort")}
        given = {"add_generation_prompt": False, "template_kwargs": kwargs}
        given |= {key: value for key, value in options.items() if key not in kwargs}
        got = outcome(lambda: own.render(copy.deepcopy(chat), **given))  # noqa: B023
        if continues and not isinstance(expected, str):
            assert not isinstance(got, str)  # refused by both, each in its words
        else:
            assert got == expected, (name, options)


@pytest.mark.parametrize("beginning", FORMS)
def test_the_form_of_the_answers_is_found(beginning: str) -> None:
    paths = [path for path in FILES if path.name.startswith(beginning)]
    assert paths
    for path in paths:
        found = detect_format(path.read_text(), names_read=template(path).names_read, added_tokens=[])
        assert (found.tools, found.reasoning and found.reasoning.opening) == FORMS[beginning], path.name
