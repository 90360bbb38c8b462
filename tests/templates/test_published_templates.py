"""Chat templates as models were published with them, out of two packages (make test-templates): each prompt is
transformers' own, byte for byte, and the form of the answers is found."""

import copy
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.interface.errors import InvalidParameter
from server.text.chat_template import ChatTemplate
from server.text.parsers.base import ToolSpec
from server.text.parsers.detect import detect_format, make_parser
from server.text.parsers.reasoning import reasoning_place
from tests.support.parsing import join
from tests.support.templates import published_templates

FILES = published_templates()
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

SPECS = tuple(ToolSpec(tool["function"]["name"], tool["function"]["parameters"]) for tool in TOOLS)


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
    "gemma.": (None, None),
    "gemma3.": (None, None),
    "google-gemma-2": (None, None),
    "gemma4": ("gemma4", "<|channel>thought"),
    "google-gemma-4": ("gemma4", "<|channel>thought"),
    "LFM2": ("lfm2", None),
    "Kimi-K2": ("kimi", None),
    "moonshotai-Kimi-K2": ("kimi", None),
    "Apertus": ("apertus", "<|inner_prefix|>"),
    "CohereForAI-c4ai-command-r7b": ("cohere", "<|START_THINKING|>"),
    "Cohere2MoE": ("cohere", "<|START_THINKING|>"),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron", None),
    "llama-cpp-deepseek-r1": ("deepseek_v3", "<think>"),
    "poolside-Laguna": ("glm", "<think>"),
    "unsloth-Apriel": ("hunyuan", None),
    "phi3": (None, None),
    "GLM-4": ("glm", "<think>"),
    "glm4moe": ("glm", "<think>"),
    "MiniMax-M2": ("minimax", "<think>"),
    "deepseek-ai-DeepSeek-V3.2": ("dsml", "<think>"),
    "deepseek-ai-DeepSeek-V4": ("dsml_v4", "<think>"),
    "MiniMax-M3": (None, None),
    "muse": (None, None),
    "ByteDance-Seed-OSS": ("seed", "<seed:think>"),
    "gptoss": ("harmony", "<|channel|>analysis<|message|>"),
    "openai-gpt-oss": ("harmony", "<|channel|>analysis<|message|>"),
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
        form, opening = FORMS[beginning]
        assert found.tools == form, path.name
        assert opening in (None, found.reasoning and found.reasoning.opening), path.name


# rule: Tools and reasoning: The form of calls and reasoning is detected from the chat template, without a flag
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_call_in_the_history_is_read_as_that_call(path: Path) -> None:
    """What a template writes of a call is what the model was trained to write."""
    found = detect_format(path.read_text(), names_read=template(path).names_read, added_tokens=[])
    if not found.takes_tools or found.tools is None:
        pytest.skip("no known form of calls")
    chat = [user("a"), {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [FIRST, SECOND]}]
    if found.tools in ("harmony", "llama3"):
        chat[1]["tool_calls"] = [FIRST]
    written = outcome(lambda: template(path).render(chat, tools=TOOLS, add_generation_prompt=False))
    if not isinstance(written, str):
        pytest.skip("the template refuses the chat")
    prompt = template(path).render(chat[:1], tools=TOOLS)
    num_shared = next((i for i, (a, b) in enumerate(zip(prompt, written, strict=False)) if a != b), len(prompt))
    shared = written[:num_shared]
    if (tag := shared.rfind("<")) > shared.rfind(">"):  # two tags with one beginning
        shared = shared[:tag]
    text = written.removeprefix(shared)
    if "get_weather" not in text:
        pytest.skip("the template does not show its calls")
    place = reasoning_place(found.reasoning, shared, continued=None)
    parser = make_parser(found, tools=SPECS, is_reasoning=place == "open")
    assert parser is not None
    answer = join(parser.push(text) + parser.finish())
    assert [name for name, _ in answer.calls] == [made["function"]["name"] for made in chat[1]["tool_calls"]], text
    assert json.loads(answer.calls[0][1])["city"] == "Zürich"
