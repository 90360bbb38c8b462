"""A model that answers in OpenAI's harmony format, over HTTP: answers, stop tokens, the history, the efforts."""

import json

import pytest

from server.api.chat.harmony_messages import harmony_messages
from server.text.parsers import harmony
from tests.support import templates
from tests.support.chat_models import TOOLS, ChatModels, prompt_of
from tests.unit.server.conftest import USER_HI, stream_chunks

ANSWER = (
    "<|channel|>analysis<|message|>I need it.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Köln"}'
)


@pytest.fixture
def model(harness, tmp_path):
    models = ChatModels(harness, tmp_path / "model")
    return lambda text=ANSWER, **options: models(text, template=templates.HARMONY_LIKE, special=harmony.TAGS, **options)


@pytest.mark.parametrize("tokens_per_delta", [1, 3, 50])
# rule: Tools and reasoning: Harmony's channels are reasoning and text, and messages to tools are calls
def test_an_answer_in_channels(model, tokens_per_delta):
    app = model(tokens_per_delta=tokens_per_delta)
    choice = app.chat(tools=TOOLS).json()["choices"][0]
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == ("I need it.", "Let me see.")
    assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Köln"}'}
    assert choice["finish_reason"] == "tool_calls"
    joined = {"reasoning": "", "content": "", "arguments": ""}
    for chunk in stream_chunks(app.chat(tools=TOOLS, stream=True).text):
        delta = chunk["choices"][0]["delta"]
        for name in ("reasoning", "content"):
            joined[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            joined["arguments"] += call["function"]["arguments"]
    assert joined == {"reasoning": "I need it.", "content": "Let me see.", "arguments": '{"city": "Köln"}'}


def test_the_other_apis(model):
    app = model()
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    output = app.post("/v1/responses", {"input": "hi", "tools": tools}).json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert output[2]["arguments"] == '{"city": "Köln"}'
    function = TOOLS[0]["function"]
    tools = [{"name": function["name"], "input_schema": function["parameters"]}]
    body = {"model": "tiny", "messages": USER_HI, "tools": tools, "max_tokens": 900}
    content = app.post("/v1/messages", body).json()["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use"]
    assert content[2]["input"] == {"city": "Köln"}


def test_channels_are_read_without_tools_too(model):
    app = model("<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Hi")
    message = app.chat().json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm", "Hi")


def test_call_and_return_end_an_answer(model):
    app = model()
    app.chat()
    stops = [
        app.tokenizer.decode([id_], skip_special_tokens=False) for id_ in app.client.submitted[-1].params.stop_token_ids
    ]
    assert {"<|call|>", "<|return|>"} <= set(stops)
    app.chat(ignore_eos=True)
    assert app.client.submitted[-1].params.stop_token_ids == []


@pytest.mark.parametrize(
    ("effort", "word"), [("none", "low"), ("minimal", "low"), ("low", "low"), ("high", "high"), ("max", "high")]
)
def test_efforts_are_in_the_formats_words(model, effort, word):
    app = model()
    assert "x-quire-ignored" not in app.chat(reasoning_effort=effort).headers
    assert f"Reasoning: {word}<|end|>" in prompt_of(app)


def asked(call_id: str, name: str) -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def test_the_history_keeps_every_call_result_and_instruction(model):
    app = model()
    calls = [asked("1", "a"), asked("2", "b")]
    messages = [
        {"role": "system", "content": "S"},
        {"role": "developer", "content": "D"},
        *USER_HI,
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "2", "content": "rb"},
        {"role": "tool", "tool_call_id": "1", "content": "ra"},
    ]
    assert app.chat(messages=messages).status_code == 200
    prompt = prompt_of(app)
    assert prompt.partition("<|start|>developer")[2].startswith("<|message|>S\n\nD<|end|>")
    assert prompt.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>Hm.\nLet me see.<|end|>"
        "<|start|>assistant to=functions.a<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.a to=assistant<|channel|>commentary<|message|>"ra"<|end|>'
        "<|start|>assistant to=functions.b<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.b to=assistant<|channel|>commentary<|message|>"rb"<|end|><|start|>assistant'
    )
    app.chat(messages=[*messages, {"role": "assistant", "content": "Done."}, *USER_HI])
    assert "Hm." not in prompt_of(app), "the template drops the reasoning of earlier turns"


def test_messages_that_fit_stay_as_they_are():
    messages = [*USER_HI, {"role": "assistant", "content": "a", "reasoning_content": "b"}, *USER_HI]
    copy = json.loads(json.dumps(messages))
    assert harmony_messages(messages) == copy == messages
    lost = [*USER_HI, {"role": "tool", "tool_call_id": "1", "content": "x"}]
    assert harmony_messages(lost) == lost
    wrong = {"role": "tool", "tool_call_id": "other", "content": "x"}
    call = {"role": "assistant", "tool_calls": [asked("1", "a")]}
    assert harmony_messages([*USER_HI, call, wrong]) == [*USER_HI, call, wrong]
