"""Reasoning over HTTP: turned on and off, told apart from the answer; tags and ids as templates want them."""

import pytest

from tests.support import templates
from tests.support.chat_models import TOOLS, ChatModels, prompt_of
from tests.unit.server.conftest import USER_HI


@pytest.fixture
def model(harness, tmp_path):
    return ChatModels(harness, tmp_path / "model")


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, True),
    ],
)
def test_reasoning_effort_turns_thinking_on_and_off(model, fields, thinks):
    app = model("Hi")
    reply = app.chat(**fields)
    assert "x-quire-ignored" not in reply.headers
    assert prompt_of(app).endswith("</think>\n\n") != thinks


def test_reasoning_effort_is_handed_to_templates_that_read_it_and_reported_by_others(model):
    app = model("Hi", template=templates.EFFORT_LIKE)
    app.chat(reasoning_effort="high")
    assert "Reasoning: high" in prompt_of(app)
    reply = model("Hi", template=templates.CHATML).chat(reasoning_effort="high")
    assert reply.headers["x-quire-ignored"] == "reasoning_effort"


def test_an_answer_begins_in_the_reasoning_that_the_prompt_opened(model):
    app = model("I see.\n</think>\n\nHello", template=templates.R1_LIKE)
    message = app.chat().json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("I see.", "Hello")
    user = [{"role": "user", "content": "What is <think>"}]
    assert model("</think>x").chat(messages=user).json()["choices"][0]["message"]["content"] == "</think>x"


def test_a_continued_message_goes_on_with_its_reasoning(model):
    messages = [*USER_HI, {"role": "assistant", "content": "<think>\nLet"}]
    app = model(" me.</think>\nHello", template=templates.CHATML)
    message = app.chat(messages=messages, continue_final_message=True).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("me.", "Hello")


@pytest.mark.parametrize("skip", [True, False])
def test_tags_that_are_special_tokens_are_seen(model, skip):
    app = model(
        f"[THINK]a[/THINK]b{'[TOOL_CALLS]'}now[ARGS]{{}}",
        template=templates.MISTRAL_V11_LIKE + "{# [THINK][/THINK] #}",
        special=["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"],
    )
    (choice,) = app.chat(tools=TOOLS, skip_special_tokens=skip).json()["choices"]
    message = choice["message"]
    assert (message["reasoning"], message["content"], choice["finish_reason"]) == ("a", "b", "tool_calls")
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}


def test_special_tags_stay_hidden_where_nothing_is_parsed(model):
    app = model("a[TOOL_CALLS]b", template=templates.MISTRAL_V3_LIKE, special=["[TOOL_CALLS]"])
    assert app.chat().json()["choices"][0]["message"]["content"] == "ab"


def test_mistrals_templates_get_ids_of_nine_characters(model):
    call = {"id": "call_" + "a" * 24, "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        *USER_HI,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "noon"},
    ]
    app = model("Noon", template=templates.MISTRAL_V3_LIKE)
    assert app.chat(messages=messages, tools=TOOLS).status_code == 200
    prompt = prompt_of(app)
    short = prompt.split('"id": "')[1][:9]
    assert short.isalnum()
    assert f"noon|{short}[" in prompt


# rule: Streams: Reasoning is read from the history and counted
@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_in_the_history_is_shown_to_the_model(model, field):
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    for content in ({}, {"content": None}, {"content": ""}):
        messages = [
            *USER_HI,
            {"role": "assistant", field: "hmm", "tool_calls": [call], **content},
            {"role": "tool", "tool_call_id": "c", "name": "now", "content": "noon"},
        ]
        app = model("Noon")
        assert app.chat(messages=messages, tools=TOOLS).json()["choices"][0]["message"]["content"] == "Noon"
        assert "<think>\nhmm\n</think>" in prompt_of(app)
        assert "<tool_response>\nnoon\n</tool_response>" in prompt_of(app)


def test_a_stop_string_ends_a_reasoning_and_the_rest_is_dropped(model):
    (choice,) = model().chat(tools=TOOLS, stop="need").json()["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("I ", "")
    assert choice["finish_reason"] == "stop"
