"""The form of a model's answers is read off its chat template."""

import pytest

from server.text.chat_template import ChatTemplate
from server.text.parsers import harmony
from server.text.parsers.detect import ChatFormat, detect_format
from server.text.parsers.reasoning import ReasoningTags, reasoning_place
from tests.support import templates
from tests.support.parsing import THINK


def detect(source: str, added_tokens: tuple[str, ...] = ()) -> ChatFormat:
    template = ChatTemplate(source, variables={}, special_tokens=[], added_tokens=[])
    return detect_format(source, names_read=template.names_read, added_tokens=added_tokens)


# rule: Tools and reasoning: The form of calls and reasoning is detected from the chat template, without a flag
@pytest.mark.parametrize(
    ("source", "form", "reasoning", "switch"),
    [
        (templates.CHATML, None, None, None),
        (templates.QWEN3_LIKE, "hermes", THINK, "enable_thinking"),
        (templates.HERMES_LIKE, "hermes", None, None),
        (templates.QWEN_CODER_LIKE, "qwen_xml", None, None),
        (templates.QWEN3_5_LIKE, "qwen_xml", THINK, "enable_thinking"),
        # as Nemotron 3's
        ("{{ tools }}{{ enable_thinking }}<think></think><tool_call><function=", "qwen_xml", THINK, "enable_thinking"),
        ("{{ tools }}List of tools: [", "lfm2", None, None),
        (templates.GLM_LIKE, "glm", THINK, "enable_thinking"),
        (templates.GLM_LIKE.replace("<arg_key>", "<k>"), "hermes", THINK, "enable_thinking"),
        ("{{ tools }}<tool_call></think><response></response>", "hermes", THINK, None),  # as ERNIE's
        ("{{ tools }}<|python_start|><|python_end|>", "llama4", None, None),
        ("{{ tools }}[func_name1(params_name1=1)]", "llama4", None, None),
        ("{{ tools }}<function_calls></function_calls>", "olmo3", None, None),
        ("{{ tools }}<|tool_call_start|>", "lfm2", None, None),
        ("{{ tools }}<|tool_call>call:<channel|>", "gemma4", ReasoningTags("<|channel>thought", "<channel|>"), None),
        ("{{ tools }}<｜tool▁sep｜>", "deepseek_v31", None, None),
        ("{{ tools }}<｜tool▁sep｜>```json", "deepseek_v3", None, None),
        ("[gMASK]<sop>{{ tools }}# 可用工具", "glm4", None, None),
        ("{{ tools }}<tool_calls>[", "hunyuan", None, None),
        ("{{ tools }}<|tool_calls_section_begin|>", "kimi", None, None),
        ('{{ tools }}<tool_call><invoke name="a">', None, None, None),  # a form that is not known
        (templates.SEED_LIKE, "seed", ReasoningTags("<seed:think>", "</seed:think>"), None),
        (templates.SEED_LIKE.replace("seed:", "minimax:"), "minimax", None, None),
        (templates.DSML_LIKE, "dsml", THINK, "thinking"),
        (templates.DSML_LIKE.replace("function_calls", "tool_calls"), "dsml_v4", THINK, "thinking"),
        (templates.LLAMA3_LIKE, "llama3", None, None),
        (templates.LLAMA3_LIKE.replace('"parameters"', '"p"') + "{# <|python_tag|> #}", "llama3", None, None),
        (templates.MISTRAL_LIKE, None, None, None),
        (templates.MISTRAL_V3_LIKE, "mistral", None, None),
        (templates.MISTRAL_V11_LIKE, "mistral_args", None, None),
        (templates.GRANITE_LIKE, "granite", None, None),
        (templates.HARMONY_LIKE, "harmony", harmony.REASONING, None),
        (templates.R1_LIKE, None, THINK, None),
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}", None, None, "thinking"),
        ("{{ messages[0].thinking }} thinking {{ 'enable_thinking' }}", None, None, None),
        ("{{ tools }}", None, None, None),
    ],
)
def test_forms_of_tools_and_reasoning(source, form, reasoning, switch):
    found = detect(source)
    assert (found.tools, found.reasoning, found.thinking_switch) == (form, reasoning, switch)
    assert found.takes_tools == (("tools" in source and "{{ tools" in source) or form is not None)


def test_added_tokens_tell_of_reasoning_too():
    assert detect(templates.CHATML, ("<think>", "</think>")).reasoning == THINK
    assert detect(templates.CHATML, ("[THINK]", "[/THINK]")).reasoning == ReasoningTags("[THINK]", "[/THINK]")
    assert detect(templates.CHATML, ("<think>",)).reasoning is None


def test_tags_around_answers_are_found():
    assert detect("<response></response>").wrapper == ReasoningTags("<response>", "</response>")
    assert detect('<invoke name="f"><response></response>').wrapper is None
    assert detect(templates.QWEN3_LIKE).wrapper is None


def test_reasoning_effort_is_found():
    assert detect(templates.EFFORT_LIKE).takes_effort
    assert not detect(templates.QWEN3_LIKE).takes_effort


# rule: Tools and reasoning: The form of calls and reasoning is detected from the chat template, without a flag
@pytest.mark.parametrize(
    ("prompt", "continued", "place"),
    [
        ("<|assistant|><think>\n", None, "open"),
        ("<|assistant|>", None, "possible"),
        ("<think>\n\n</think>\n\n", None, "none"),
        ("what is <think>?<|assistant|>", None, "possible"),
        ("…", "<think>\nLet me", "open"),
        ("…", "<think>\nx</think>\nSo", "none"),
        ("…", "So", "none"),
        ("…", " ", "possible"),
    ],
)
def test_where_in_its_reasoning_an_answer_begins(prompt, continued, place):
    assert reasoning_place(THINK, prompt, continued=continued) == place
    assert reasoning_place(None, prompt, continued=continued) == "none"
