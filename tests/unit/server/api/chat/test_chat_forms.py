"""Every form of tool calls over HTTP, with tags that are special tokens: whole, streamed, and in other APIs."""

import json

import pytest

from tests.support import templates
from tests.support.call_forms import FORMS, written
from tests.support.chat_models import TOOLS, ChatModels
from tests.unit.server.conftest import USER_HI, stream_chunks
from tests.unit.server.structured_output.test_tool_grammar import TAGS

pytestmark = pytest.mark.slow

MARKS = {
    "hermes": "<tool_call>",
    "llama3": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "mistral_args": "[TOOL_CALLS][ARGS]",
    "granite": "<|tool_call|>",
    "hunyuan": "<tool_calls>",
    "nemotron": "<TOOLCALL>",
    "cohere": "<|START_ACTION|>",
    "apertus": "<|tools_prefix|>",
    "kimi": "<|tool_calls_section_begin|>",
    "deepseek_v3": "<｜tool▁sep｜>```json",
    "deepseek_v31": "<｜tool▁sep｜>",
    "qwen_xml": "<tool_call><function=",
    "seed": "<seed:tool_call>",
    "minimax": "<minimax:tool_call>",
    "dsml": "｜DSML｜function_calls>",
    "dsml_v4": "｜DSML｜tool_calls>",
    "glm": "<tool_call><arg_key>",
    "gemma4": "<|tool_call>",
    "lfm2": "<|tool_call_start|>",
    "llama4": "<|python_start|>",
    "olmo3": "<function_calls>",
}
TEMPLATE = (
    "{{% if tools %}}{{{{ tools | tojson }}}}{{% endif %}}"
    "{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}{{# {} </think> #}}"
)


@pytest.fixture
def model(harness, tmp_path):
    return ChatModels(harness, tmp_path / "model")


# rule: Tools and reasoning: A stream with tools joins to the whole answer, however the text is cut
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_special", [True, False])
def test_a_call_in_every_form(model, form, is_special):
    call = written(form, "get_weather", {"city": "Köln"})
    text = f"<think>\nI need it.\n</think>\n\nLet me see.{call}"
    tags = {"special" if is_special else "added": TAGS}
    app = model(text, template=TEMPLATE.format(MARKS[form]), **tags)
    choice = app.chat(tools=TOOLS).json()["choices"][0]
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == ("I need it.", "Let me see.")
    (made,) = message["tool_calls"]
    assert made["function"]["name"] == "get_weather"
    assert json.loads(made["function"]["arguments"]) == {"city": "Köln"}
    assert choice["finish_reason"] == "tool_calls"
    joined = {"reasoning": "", "content": "", "arguments": ""}
    for chunk in stream_chunks(app.chat(tools=TOOLS, stream=True).text):
        delta = chunk["choices"][0]["delta"]
        for name in ("reasoning", "content"):
            joined[name] += delta.get(name) or ""
        for part in delta.get("tool_calls", ()):
            joined["arguments"] += part["function"]["arguments"]
    expected = made["function"]["arguments"]
    assert joined == {"reasoning": "I need it.", "content": "Let me see.", "arguments": expected}
    assert app.chat(tools=TOOLS, tool_choice="required").status_code == 200  # its grammar compiles


@pytest.mark.parametrize("thinks", [True, False])
def test_a_call_after_reasoning_that_the_prompt_opened_or_closed(model, thinks):
    call = "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n</function>\n</tool_call>"
    text = f"I need it.\n</think>\n\nLet me see.\n\n{call}" if thinks else f"Let me see.\n\n{call}"
    app = model(text, template=templates.QWEN3_5_LIKE, added=("<think>", "</think>", "<tool_call>", "</tool_call>"))
    options = {} if thinks else {"chat_template_kwargs": {"enable_thinking": False}}
    message = app.chat(tools=TOOLS, **options).json()["choices"][0]["message"]
    assert (message.get("reasoning"), message["content"]) == ("I need it." if thinks else None, "Let me see.")
    (made,) = message["tool_calls"]
    assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == ("get_weather", {"city": "Köln"})


@pytest.mark.parametrize("form", ["gemma4", "glm", "kimi", "minimax", "dsml", "deepseek_v31"])
def test_the_other_apis_have_the_same_call(model, form):
    app = model(written(form, "get_weather", {"city": "Köln"}), template=TEMPLATE.format(MARKS[form]), special=TAGS)
    function = TOOLS[0]["function"]
    output = app.post("/v1/responses", {"input": "hi", "tools": [{"type": "function", **function}]}).json()["output"]
    assert json.loads(output[0]["arguments"]) == {"city": "Köln"}
    tools = [{"name": function["name"], "input_schema": function["parameters"]}]
    body = {"model": "tiny", "messages": USER_HI, "tools": tools, "max_tokens": 900}
    (block,) = app.post("/v1/messages", body).json()["content"]
    assert (block["type"], block["input"]) == ("tool_use", {"city": "Köln"})


def test_gemmas_wait_for_a_result_ends_its_answer(model):
    app = model("Hi", template=TEMPLATE.format(MARKS["gemma4"]), special=["<|tool_response>"])
    app.chat(tools=TOOLS)
    assert app.ids("<|tool_response>")[0] in app.client.submitted[-1].params.stop_token_ids
