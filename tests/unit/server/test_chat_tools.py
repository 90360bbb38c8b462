"""Tools and reasoning over HTTP: what the model is shown, and the answers' exact form."""

import json

import msgspec
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import AddedToken

from tests.fakes import READY
from tests.unit.server import templates
from tests.unit.server.conftest import (
    USER_HI,
    check_error,
    serving,
    stream_chunks,
    train_byte_level,
    write_model_folder,
)

ROOMY = msgspec.structs.replace(READY, max_model_len=8192)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
NOW_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
ANSWER = f"<think>\nI need it.\n</think>\n\nLet me see.\n{CALL}\n{NOW_CALL}"


@pytest.fixture
def model(harness, tmp_path):
    """Make a harness with a template, tags of its tokenizer, and what the model answers."""

    def make(text: str = ANSWER, *, template=templates.QWEN3_LIKE, special=(), added=(), engine=None, **config):
        tokenizer = train_byte_level()
        tokenizer.add_tokens([AddedToken(tag, special=True) for tag in special])
        tokenizer.add_tokens([AddedToken(tag, special=False) for tag in added])
        folder = write_model_folder(tmp_path / "model", chat_template=template, tokenizer=tokenizer)
        return harness(text, folder=folder, engine={"ready": ROOMY, **(engine or {})}, **config)

    return make


def prompt_of(app) -> str:
    return app.tokenizer.decode(app.client.submitted[-1].prompt_token_ids, skip_special_tokens=False)


def test_a_whole_answer_with_reasoning_text_and_calls(model):
    app = model()
    body = app.chat(tools=TOOLS).json()
    (choice,) = body["choices"]
    message = choice["message"]
    assert list(message) == ["role", "content", "refusal", "reasoning_content", "reasoning", "tool_calls"]
    assert (message["content"], message["refusal"]) == ("Let me see.", None)
    assert message["reasoning"] == message["reasoning_content"] == "I need it."
    assert choice["finish_reason"] == "tool_calls"
    first, second = message["tool_calls"]
    assert first["function"] == {"name": "get_weather", "arguments": '{"city": "Köln"}'}
    assert second["function"] == {"name": "now", "arguments": "{}"}
    assert (first["type"], first["id"][:5], len(first["id"])) == ("function", "call_", 29)
    assert first["id"] != second["id"]
    reasoning = "<think>\nI need it.\n</think>"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(app.ids(reasoning))}
    assert body["usage"]["completion_tokens"] == len(app.ids(ANSWER))
    ChatCompletion.model_validate(body)


def test_calls_without_text_have_no_content(model):
    message = model(CALL).chat(tools=TOOLS).json()["choices"][0]["message"]
    assert message["content"] is None
    assert "reasoning" not in message


def test_the_keys_of_a_streams_deltas_are_openais(model):
    app = model(f"<think>a</think>b{CALL}", added=["<tool_call>", "</tool_call>"])
    chunks = stream_chunks(app.chat(tools=TOOLS, stream=True).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert deltas[1] == {"reasoning_content": "a", "reasoning": "a"}
    assert deltas[2] == {"content": "b"}
    (start,) = deltas[3]["tool_calls"]
    call_id = start.pop("id")
    assert start == {"index": 0, "type": "function", "function": {"name": "get_weather", "arguments": ""}}
    assert len(call_id) == 29
    arguments = ""
    for delta in deltas[4:-1]:
        ((index, function),) = [list(call.values()) for call in delta["tool_calls"]]
        assert (list(delta), index, list(function)) == (["tool_calls"], 0, ["arguments"])
        assert list(delta["tool_calls"][0]) == ["index", "function"]
        arguments += function["arguments"]
    assert arguments == '{"city": "Köln"}'
    assert len(deltas) > 8, "arguments are streamed as they come"
    assert (deltas[-1], chunks[-1]["choices"][0]["finish_reason"]) == ({}, "tool_calls")


def folded(chunks: list[dict]) -> dict:
    """Join a stream as clients do; each chunk must be one that the openai package takes."""
    message = {"content": "", "reasoning": "", "tool_calls": [], "token_ids": [], "logprobs": [], "usage": None}
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        message["usage"] = chunk.get("usage") or message["usage"]
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content", "")
            message["reasoning"] += delta.get("reasoning", "")
            message["token_ids"] += choice.get("token_ids", [])
            message["logprobs"] += (choice["logprobs"] or {}).get("content", [])
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    message["tool_calls"].append(call["function"])
                else:
                    message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"]
            if chunk.get("usage") and "token_ids" in choice and choice["token_ids"]:
                assert chunk["usage"]["completion_tokens"] >= len(message["token_ids"])
    return message


@pytest.mark.parametrize("tokens_per_delta", [1, 2, 7, 1000])
def test_the_stream_is_the_whole_answer_and_has_every_token_once(model, tokens_per_delta):
    app = model(engine={"tokens_per_delta": tokens_per_delta})
    fields = {"tools": TOOLS, "return_token_ids": True, "logprobs": True}
    whole = app.chat(**fields).json()
    (choice,) = whole["choices"]
    assert choice["token_ids"] == app.ids(ANSWER)
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = folded(stream_chunks(app.chat(**fields, stream=True, stream_options=options).text))
    assert stream["token_ids"] == choice["token_ids"]
    assert stream["logprobs"] == choice["logprobs"]["content"]
    assert len(stream["logprobs"]) == len(app.ids(ANSWER))
    assert stream["content"] == choice["message"]["content"]
    assert stream["reasoning"] == choice["message"]["reasoning"]
    assert stream["tool_calls"] == [call["function"] for call in choice["message"]["tool_calls"]]
    assert stream["usage"] == whole["usage"]
    assert stream["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(app.ids(ANSWER.split("\n\n")[0]))}


def test_choices_have_calls_of_their_own(model):
    choices = model().chat(tools=TOOLS, n=3).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    ids = {call["id"] for choice in choices for call in choice["message"]["tool_calls"]}
    assert len(ids) == 6


def test_the_openai_client_reads_calls_whole_and_streamed(model):
    app = model()
    with serving(app.app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        request = {"model": "tiny", "messages": USER_HI, "tools": TOOLS}
        message = client.chat.completions.create(**request).choices[0].message
        assert [call.function.name for call in message.tool_calls] == ["get_weather", "now"]
        assert message.model_extra["reasoning_content"] == "I need it."
        with client.chat.completions.stream(**request) as stream:
            events = [event.type for event in stream]
            final = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.done" in events
        assert final.finish_reason == "tool_calls"
        assert [call.function.arguments for call in final.message.tool_calls] == ['{"city": "Köln"}', "{}"]
        history = [
            *USER_HI,
            message,
            *({"role": "tool", "tool_call_id": c.id, "content": "7"} for c in message.tool_calls),
        ]
        client.chat.completions.create(model="tiny", messages=history, tools=TOOLS)
    prompt = prompt_of(app)
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>' in prompt
    assert prompt.count("<tool_response>\n7\n</tool_response>") == 2


def test_only_the_first_call_stays_where_parallel_calls_are_not_wanted(model):
    app = model()
    (choice,) = app.chat(tools=TOOLS, parallel_tool_calls=False).json()["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
    stream = folded(stream_chunks(app.chat(tools=TOOLS, parallel_tool_calls=False, stream=True).text))
    assert [call["name"] for call in stream["tool_calls"]] == ["get_weather"]


def test_an_answer_that_is_cut_off_within_a_call_ended_by_length(model):
    app = model(CALL)
    (choice,) = app.chat(tools=TOOLS, max_tokens=len(app.ids(CALL)) - 25).json()["choices"]
    assert choice["finish_reason"] == "length"
    arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert '{"city": "Köln"}'.startswith(arguments)


def test_tools_are_shown_to_the_model_unless_none_may_be_called(model):
    app = model("Hello")
    assert app.chat(tools=TOOLS).json()["choices"][0]["finish_reason"] == "stop"
    shown = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    assert json.dumps(WEATHER) in prompt_of(app)
    assert json.dumps(shown) in prompt_of(app)
    reply = app.chat(tools=TOOLS, tool_choice="none")
    assert "get_weather" not in prompt_of(app)
    assert reply.headers["x-quire-ignored"] == "tools"


def test_without_tools_a_call_in_the_answer_is_text(model):
    app = model(CALL)
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        (choice,) = app.chat(**fields).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "required"}, "tools", "no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "'f'"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "'any'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "an object"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "now"}}, "tool_choice", "an object"),
        ({"tools": [NOW, NOW]}, "tools[1].function.name", "'now'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        ({"tools": [{"type": "function", "function": {"name": "a" * 65}}]}, "tools[0].function.name", "pattern"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type", "function"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools[0].function.parameters",
            "'string'",
        ),
        ({"reasoning_effort": "lots"}, "reasoning_effort", "'lots'"),
    ],
)
def test_wrong_tools_are_refused_by_name(model, fields, param, words):
    error = check_error(model().chat(**fields), 400, "invalid_parameter")
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize("template", [templates.CHATML, "{{ tools }}{{ messages[0].content }}"])
def test_a_model_without_tools_refuses_them_unless_none_may_be_called(model, template):
    app = model("Hi", template=template)
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "required"}):
        assert check_error(app.chat(tools=TOOLS, **choice), 400, "unsupported_feature")["param"] == "tools"
    assert app.chat(tools=TOOLS, tool_choice="none").status_code == 200


@pytest.mark.parametrize(
    ("choice", "has_grammar"),
    [("auto", False), ("none", False), ("required", True), ({"type": "function", "function": {"name": "now"}}, True)],
)
def test_a_forced_call_is_a_grammar_for_the_engine(model, choice, has_grammar):
    app = model(NOW_CALL)
    (answer,) = app.chat(tools=TOOLS, tool_choice=choice).json()["choices"]
    grammar = app.client.submitted[0].grammar
    assert (grammar is not None) == has_grammar
    if has_grammar:
        assert "now" in grammar.source
        assert ("get_weather" in grammar.source) == (choice == "required")
        assert "@answer" in grammar.source, "reasoning may come first"
        assert answer["message"]["tool_calls"][0]["function"]["name"] == "now"
        app.chat(tools=TOOLS, tool_choice=choice, reasoning_effort="none")
        assert "@answer" not in app.client.submitted[1].grammar.source


def test_strict_is_reported_where_the_model_may_call_or_not(model):
    strict = {"type": "function", "function": {"name": "f", "strict": True, "x": 1}, "y": 2}
    reply = model("Hi").chat(tools=[strict])
    assert reply.headers["x-quire-ignored"] == "tools[0].y, tools[0].function.x, tools[0].function.strict"


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
