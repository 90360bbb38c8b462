"""Tools over HTTP: what the model is shown, what is refused, and the answers' exact form."""

import json

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.support import templates
from tests.support.chat_models import ANSWER, CALL, NOW, NOW_CALL, TOOLS, WEATHER, ChatModels, prompt_of
from tests.unit.server.conftest import USER_HI, check_error, serving, stream_chunks


@pytest.fixture
def model(harness, tmp_path):
    return ChatModels(harness, tmp_path / "model")


# rule: Streams: Reasoning is read from the history and counted
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


# rule: Streams: Deltas of tool calls have index always, id, type and name once, arguments as strings
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
    app = model(tokens_per_delta=tokens_per_delta)
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


def called(*ids):
    function = {"name": "now", "arguments": "{}"}
    calls = [{"type": "function", "function": function} | ({"id": id_} if id_ else {}) for id_ in ids]
    return {"role": "assistant", "tool_calls": calls}


def result(call_id):
    return {"role": "tool", "tool_call_id": call_id, "content": "7"}


# rule: Fields: A tool message without a call of an assistant message before it is refused, as OpenAI refuses it
@pytest.mark.parametrize(
    ("messages", "wrong"),
    [
        ([result("a")], 1),
        ([result("a"), called("a")], 1),
        ([called("a", "b"), result("a"), result("c")], 3),
        ([{"role": "assistant", "content": "x"}, result("a")], 2),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completions/render", "/tokenize"])
def test_a_result_of_no_call_is_refused(model, path, messages, wrong):
    reply = model().post(path, {"messages": [*USER_HI, *messages]})
    error = check_error(reply, 400, "invalid_parameter")
    assert error["param"] == f"messages[{wrong}].tool_call_id"
    assert error["message"].startswith(error["param"])


@pytest.mark.parametrize(
    "messages",
    [
        [called("a", "b"), result("b"), result("a")],
        [called("a"), result("a"), {"role": "user", "content": "x"}, result("a")],
        [called(None), result("a")],
    ],
)
def test_the_results_of_calls_pass(model, messages):
    reply = model().post("/tokenize", {"messages": [*USER_HI, *messages]})
    assert reply.status_code == 200


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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("end", "is_whole"),
    [
        ('{"city": "Par', False),
        ('{"city": "Paris"', False),
        ("{", False),
        ('{"city": Par}}\n</tool_call>', False),
        ('{"city": "Paris"}', True),
        ('{"city": "Paris"}}\n</tool_call>', True),
    ],
)
def test_a_call_that_the_model_left_unfinished_is_not_announced(model, end, is_whole, stream):
    """Also after one that is whole; what there was of it is given out."""
    head = '<tool_call>{"name": "get_weather", "arguments": '
    for before in ("", NOW_CALL):
        reply = model(f"{before}{head}{end}").chat(tools=TOOLS, stream=stream)
        if stream:
            message = folded(stream_chunks(reply.text))
            reason, calls = message["finish_reason"], message["tool_calls"]
        else:
            (choice,) = reply.json()["choices"]
            reason, calls = choice["finish_reason"], [call["function"] for call in choice["message"]["tool_calls"]]
        assert reason == ("tool_calls" if is_whole else "stop")
        assert len(calls) == (2 if before else 1)
        assert end.startswith(calls[-1]["arguments"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}, "auto"])
@pytest.mark.slow
def test_a_call_that_is_cut_before_its_name_is_known_is_text_only_where_none_was_forced(model, choice, stream):
    """Reasoning is kept, wherever the cut; so is every token."""
    thought = "<think>I need it</think>"
    app = model(thought + CALL)
    head = CALL[: CALL.index(" {")]
    num_thought = len(app.ids(thought))
    for num_tokens in range(1, len(app.ids(thought + head)) - 1):
        reply = app.chat(tools=TOOLS, tool_choice=choice, max_tokens=num_tokens, stream=stream, return_token_ids=True)
        if stream:
            message = answer = folded(stream_chunks(reply.text))
            assert not message["tool_calls"]
        else:
            (answer,) = reply.json()["choices"]
            message = answer["message"]
            assert "tool_calls" not in message
        assert (answer["finish_reason"], len(answer["token_ids"])) == ("length", num_tokens)
        if num_tokens > num_thought:
            assert message["reasoning"] == "I need it"
        text = app.tokenizer.decode(answer["token_ids"], skip_special_tokens=False)
        shown = text.partition("</think>")[2] if text.startswith("<think>") else text
        assert message["content"] == (shown if choice == "auto" else "")


@pytest.mark.parametrize("stop", ["call>", "name", "Köln"])
def test_a_forced_call_that_a_stop_string_cuts_is_no_text(model, stop):
    (choice,) = model(CALL).chat(tools=TOOLS, tool_choice="required", stop=stop).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None if stop == "Köln" else "", "stop")


def test_a_dropped_call_that_is_unfinished_does_not_matter(model):
    app = model(f'{CALL}<tool_call>{{"name": "now", "arguments": {{"a')
    (choice,) = app.chat(tools=TOOLS, parallel_tool_calls=False).json()["choices"]
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("tool_calls", 1)


def test_tools_are_shown_to_the_model_unless_none_may_be_called(model):
    app = model("Hello")
    assert app.chat(tools=TOOLS).json()["choices"][0]["finish_reason"] == "stop"
    shown = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    assert json.dumps(WEATHER) in prompt_of(app)
    assert json.dumps(shown) in prompt_of(app)
    reply = app.chat(tools=TOOLS, tool_choice="none")
    assert "get_weather" not in prompt_of(app)
    assert reply.headers["x-quire-ignored"] == "tools"


# rule: Tools and reasoning: Without tools, a call in the answer is text
def test_without_tools_a_call_in_the_answer_is_text(model):
    app = model(CALL)
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
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
        assert "@part_0" in grammar.source, "reasoning may come first"
        assert answer["message"]["tool_calls"][0]["function"]["name"] == "now"
        app.chat(tools=TOOLS, tool_choice=choice, reasoning_effort="none")
        assert "@part_0" not in app.client.submitted[1].grammar.source


def test_strict_is_reported_where_the_model_may_call_or_not(model):
    strict = {"type": "function", "function": {"name": "f", "strict": True, "x": 1}, "y": 2}
    reply = model("Hi").chat(tools=[strict])
    assert reply.headers["x-quire-ignored"] == "tools[0].y, tools[0].function.x, tools[0].function.strict"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_constraint_beside_a_forced_call_is_reported(model, choice):
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    app = model(CALL)
    for field, value in (("response_format", schema), ("structured_outputs", {"regex": "a"})):
        assert app.chat(tools=TOOLS, tool_choice=choice, **{field: value}).headers["x-quire-ignored"] == field
        assert "x-quire-ignored" not in app.chat(tools=TOOLS, **{field: value}).headers
    for fields in ({"response_format": {"type": "text"}}, {"structured_outputs": {}}):
        assert "x-quire-ignored" not in app.chat(tools=TOOLS, tool_choice=choice, **fields).headers
    both = app.chat(tools=TOOLS, tool_choice=choice, response_format=schema, structured_outputs={"regex": "a"})
    assert check_error(both, 400, "invalid_parameter")["param"] == "structured_outputs"
    format_ = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    function = TOOLS[0]["function"]
    reply = app.post(
        "/v1/responses",
        {"model": "tiny", "input": "hi", "tools": [{"type": "function", **function}], "tool_choice": "required",
         "text": {"format": format_}},
    )  # fmt: skip
    assert reply.headers["x-quire-ignored"] == "text.format"
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    fields = {"model": "tiny", "messages": USER_HI, "max_tokens": 99, "tools": [tool], "tool_choice": {"type": "any"}}
    config = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    assert app.post("/v1/messages", {**fields, "output_config": config}).headers["x-quire-ignored"] == (
        "output_config.format"
    )
