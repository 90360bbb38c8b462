"""A Responses request as a chat request: every rule of the equivalent, and what is refused or named as ignored."""

import pytest

from engine.interface.errors import InvalidParameter, RequestError, UnsupportedFeature
from server.api.as_chat import ChatEquivalent, errors_in_client_fields, seal
from server.api.responses.request import echo_of, translate_responses
from server.api.responses.schema import ResponsesBody
from server.api.schemas import ChatBody
from server.api.strict_json import parse_body

TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
WEB = {"type": "web_search"}


def translate(**fields: object) -> ChatEquivalent:
    return translate_responses(parse_body(ResponsesBody, {"input": "hi", **fields}))


def messages(*items: object, **fields: object) -> list[dict]:
    body = translate(input=list(items), **fields).body
    return [message.model_dump(exclude_none=True) for message in body.messages]


def text(value: str, kind: str = "text") -> list[dict]:
    return [{"type": kind, "text": value}]


def call(call_id: str, name: str = "f", arguments: str = "{}") -> dict:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def output(call_id: str, value: object = "done") -> dict:
    return {"type": "function_call_output", "call_id": call_id, "output": value}


def says(value: str) -> dict:
    return {"type": "message", "role": "assistant", "content": text(value, "output_text")}


def thinks(value: str) -> dict:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": value}]}


def error_of(**fields: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        translate(**fields)
    return caught.value


def test_a_string_is_one_user_message():
    body = translate(instructions="be nice").body
    assert [(m.role, m.content) for m in body.messages] == [("system", text("be nice")), ("user", text("hi"))]


def test_messages_take_strings_and_all_kinds_of_text_parts():
    assert messages(
        {"role": "user", "content": "a"},
        {"type": "message", "role": "user", "content": text("b", "input_text")},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "id": "msg_1", "status": "completed"},
        {"role": "developer", "content": "c"},
    ) == [
        {"role": "user", "content": text("a") + text("b")},
        {"role": "assistant", "content": text("no")},
        {"role": "developer", "content": text("c")},
    ]


def test_what_instructs_before_the_first_turn_is_one_message():
    """Many templates refuse a second system message; Codex sends instructions and a developer message."""
    developer = {"role": "developer", "content": "b"}
    first, second = messages(developer, {"role": "user", "content": "x"}, instructions="a")
    assert first == {"role": "system", "content": text("a") + text("b")}
    assert second["role"] == "user"
    assert messages(developer, developer)[0] == {"role": "developer", "content": text("b") + text("b")}


def test_the_items_of_one_turn_are_one_message():
    [_, turn, result, last] = messages(
        {"role": "user", "content": "x"}, thinks("hm"), says("ok"), call("1"), call("2", "g"), output("1"), says("end")
    )
    assert (turn["reasoning_content"], turn["content"]) == ("hm", text("ok"))
    assert [(c["id"], c["function"]["name"]) for c in turn["tool_calls"]] == [("1", "f"), ("2", "g")]
    assert result == {"role": "tool", "tool_call_id": "1", "content": text("done")}
    assert last == {"role": "assistant", "content": text("end")}


@pytest.mark.parametrize(
    ("items", "roles"),
    [
        ([call("1"), output("1"), call("2"), output("2")], ["assistant", "tool", "assistant", "tool"]),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], ["user"]),
        ([says("a"), says("b")], ["assistant", "assistant"]),
        ([call("1"), says("a")], ["assistant", "assistant"]),
        ([says("a"), thinks("b"), says("c")], ["assistant", "assistant"]),
        ([thinks("a"), thinks("b"), call("1")], ["assistant"]),
    ],
)
def test_items_that_cannot_follow_each_other_in_a_turn_begin_another(items, roles):
    assert [message["role"] for message in messages(*items)] == roles


def test_reasoning_is_read_from_its_text_its_seal_or_its_summary():
    summary = [{"type": "summary_text", "text": "short"}]
    read = [
        messages(item, says("x"))[0].get("reasoning_content")
        for item in (
            {"type": "reasoning", "summary": summary, "content": [{"type": "reasoning_text", "text": "long"}]},
            {"type": "reasoning", "summary": summary, "encrypted_content": seal("sealed")},
            {"type": "reasoning", "summary": summary, "encrypted_content": "gAAAAAB"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": None},
        )
    ]
    assert read == ["long", "sealed", "short", None]
    foreign = translate(input=[{"type": "reasoning", "summary": [], "encrypted_content": "gAAAAAB"}, says("x")])
    assert foreign.ignored == ["input[0].encrypted_content"]


def test_options_have_their_names_in_chat():
    body = translate(
        max_output_tokens=5, temperature=0.5, top_p=0.25, seed=3, stream=True, model="m", chat_template_kwargs={"a": 1}
    ).body
    assert body == parse_body(
        ChatBody,
        {
            "messages": [{"role": "user", "content": text("hi")}],
            "max_completion_tokens": 5,
            "temperature": 0.5,
            "top_p": 0.25,
            "seed": 3,
            "stream": True,
            "model": "m",
            "chat_template_kwargs": {"a": 1},
        },
    )


def test_log_probabilities_are_asked_for_by_include_or_by_number():
    assert translate(include=["message.output_text.logprobs"]).body.logprobs is True
    body = translate(top_logprobs=3).body
    assert (body.logprobs, body.top_logprobs) == (True, 3)
    assert translate().body.logprobs is None


def test_tools_are_functions_and_others_are_skipped_by_name():
    equivalent = translate(tools=[WEB, TOOL, {"type": "shell"}], tool_choice="required")
    function = {key: value for key, value in TOOL.items() if key != "type"}
    assert [tool.model_dump() for tool in equivalent.body.tools] == [{"type": "function", "function": function}]
    assert equivalent.body.tool_choice == "required"
    assert equivalent.ignored == ["tools[0]", "tools[2]"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}, "required"),
    ],
)
def test_a_tool_choice_has_chats_form(choice, expected):
    body = translate(tools=[TOOL, TOOL | {"name": "g"}], tool_choice=choice, parallel_tool_calls=False).body
    assert body.tool_choice == expected
    assert body.parallel_tool_calls is False
    allowed = ["f"] if isinstance(choice, dict) and choice["type"] == "allowed_tools" else ["f", "g"]
    assert [tool.function.name for tool in body.tools] == allowed


def test_a_choice_among_no_tools_asks_for_nothing():
    body = translate(tools=[WEB], tool_choice="auto", parallel_tool_calls=True).body
    assert body.tools is body.tool_choice is body.parallel_tool_calls is None


def test_a_text_format_is_a_response_format():
    schema = {"type": "object", "properties": {}}
    format_ = {"type": "json_schema", "name": "n", "schema": schema, "strict": True, "description": "d"}
    body = translate(text={"format": format_}).body
    assert body.response_format.model_dump(exclude_none=True, by_alias=True) == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": schema, "strict": True, "description": "d"},
    }
    assert translate(text={"format": {"type": "json_object"}}).body.response_format.type == "json_object"
    assert translate(text={"format": {"type": "text"}}).body.response_format is None
    assert error_of(text={"format": {"type": "json_schema", "name": "n"}}).param == "text.format.schema"


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"conversation": {"id": "c"}},
        {"background": True},
        {"prompt": {"id": "p"}},
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        {"input": [{"id": "msg_1"}]},
    ],
)
def test_what_would_need_a_store_is_refused(fields):
    error = error_of(**fields)
    assert isinstance(error, UnsupportedFeature)
    assert "stores nothing" in error.message
    assert error.param in (next(iter(fields)), "input[0]")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
        ({"input": [{"role": "developer", "content": []}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [output("1", [{"type": "input_file"}])]}, "input[0].output"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"truncation": "some"}, "truncation"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ],
)
def test_a_faulty_field_is_named(fields, param):
    error = error_of(**fields)
    assert error.param == param
    assert param in error.message


def test_fields_without_effect_are_named():
    equivalent = translate(
        store=True,
        truncation="auto",
        include=["file_search_call.results", "reasoning.encrypted_content"],
        text={"verbosity": "low"},
        reasoning={"summary": "auto", "pace": "slow"},
        max_tool_calls=3,
        stream_options={"include_obfuscation": True},
        input=[{"role": "user", "content": "a", "mood": "good"}, {"type": "web_search_call", "id": "w"}],
        tools=[TOOL | {"defer_loading": True}],
    )
    assert sorted(equivalent.ignored) == [
        *("include[0]", "input[0].mood", "input[1]", "max_tool_calls", "reasoning.pace", "store"),
        *("stream_options.include_obfuscation", "text.verbosity", "tools[0].defer_loading", "truncation"),
    ]


def test_fields_that_ask_for_nothing_are_not_named():
    part = {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}
    equivalent = translate(
        store=False,
        truncation="disabled",
        metadata={"a": "b"},
        user="u",
        service_tier="auto",
        prompt_cache_key="k",
        client_metadata={"x": "y"},
        max_tool_calls=None,
        background=False,
        previous_response_id=None,
        text={"verbosity": "medium", "format": {"type": "text"}},
        input=[{"type": "message", "role": "assistant", "content": [part], "id": "msg_1", "status": "completed"}],
    )
    assert equivalent.ignored == []


def test_the_chat_requests_faults_are_told_in_the_clients_words():
    equivalent = translate(
        input=[thinks("a"), says("b"), {"role": "user", "content": "c"}], tools=[WEB, TOOL], max_output_tokens=3
    )
    told = {
        "max_completion_tokens = 3": "max_output_tokens = 3",
        "messages[1].content": "input[2].content",
        "messages": "input",
        "tools[0].function.parameters": "tools[1].parameters",
        "reasoning_effort": "reasoning.effort",
        "response_format.json_schema.schema": "text.format.schema",
        "the tools and chats": "the tools and chats",
    }
    for chat, client in told.items():
        with pytest.raises(InvalidParameter) as caught, errors_in_client_fields(equivalent.field_names):
            raise InvalidParameter(f"{chat} is wrong.", param=chat)
        assert (caught.value.message, caught.value.param) == (f"{client} is wrong.", client)


def test_the_answer_repeats_the_request():
    fields = {
        "instructions": "i",
        "max_output_tokens": 9,
        "metadata": {"a": "b"},
        "tools": [TOOL, WEB],
        "user": "u",
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "reasoning": {"effort": "low"},
    }
    echo = echo_of(parse_body(ResponsesBody, {"input": "hi", **fields}))
    assert (echo.instructions, echo.max_output_tokens, echo.metadata, echo.user) == ("i", 9, {"a": "b"}, "u")
    assert (echo.tool_choice, echo.parallel_tool_calls) == (fields["tool_choice"], False)
    assert (echo.temperature, echo.top_p, echo.reasoning.effort) == (0.5, None, "low")
    assert [(tool.name, tool.strict) for tool in echo.tools] == [("f", True)]
    assert echo.text.format == {"type": "text"}


# Unlike in chat, OpenAI takes these: an answer without text comes back as it was, and Codex sends tools always
def test_empty_lists_that_openai_takes_here_are_taken():
    hi, empty = {"role": "user", "content": "hi"}, {"type": "message", "role": "assistant", "content": []}
    assert [message["role"] for message in messages(hi, empty, hi, tools=[])] == ["user", "assistant", "user"]
    assert messages(hi, call("1"), output("1", []))[-1]["content"] == ""
