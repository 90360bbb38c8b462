"""A Messages request as a chat request: every rule of the equivalent, and what is refused or named as ignored."""

import pytest

from engine.interface.errors import RequestError, UnsupportedFeature
from server.api.as_chat import ChatEquivalent, rename_fields, seal
from server.api.messages.request import translate_count, translate_messages
from server.api.messages.schema import CountTokensBody, MessagesBody
from server.api.schemas import ChatBody
from server.api.strict_json import parse_body

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "f", "description": "d", "input_schema": SCHEMA}
BASH = {"type": "bash_20250124", "name": "bash"}
HI = {"role": "user", "content": "hi"}
CALL = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "é"}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "done"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
SWITCHES = {"enable_thinking": False, "thinking": False}


def translate(**fields: object) -> ChatEquivalent:
    return translate_messages(parse_body(MessagesBody, {"model": "m", "max_tokens": 9, "messages": [HI], **fields}))


def messages(*turns: object, **fields: object) -> list[dict]:
    body = translate(messages=list(turns), **fields).body
    return [message.model_dump(exclude_none=True) for message in body.messages]


def text(*values: str) -> list[dict]:
    return [{"type": "text", "text": value} for value in values]


def user(*blocks: object) -> dict:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: object) -> dict:
    return {"role": "assistant", "content": list(blocks)}


def error_of(**fields: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        translate(**fields)
    return caught.value


def test_options_have_their_names_in_chat():
    equivalent = translate(
        stop_sequences=["a", "b"],
        temperature=0.5,
        top_p=0.25,
        top_k=5,
        seed=3,
        stream=True,
        metadata={"user_id": "u"},
    )
    assert equivalent.body == parse_body(
        ChatBody,
        {
            "model": "m",
            "max_completion_tokens": 9,
            "messages": [{"role": "user", "content": text("hi")}],
            "stop": ["a", "b"],
            "temperature": 0.5,
            "top_p": 0.25,
            "top_k": 5,
            "seed": 3,
            "stream": True,
            "user": "u",
            "chat_template_kwargs": SWITCHES,
        },
    )
    assert equivalent.ignored == []


@pytest.mark.parametrize("system", ["be nice", text("be nice")])
def test_the_system_prompt_is_the_first_message(system):
    assert messages(HI, system=system)[0] == {"role": "system", "content": text("be nice")}


def test_system_blocks_are_parts_of_one_message():
    blocks = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, *text("b")]
    assert messages({"role": "system", "content": "c"}, HI, system=blocks)[0]["content"] == text("a", "b", "c")


def test_a_billing_header_is_not_shown_to_the_model():
    """It changes from request to request: with it no prefix would be found in the cache."""
    blocks = text("x-anthropic-billing-header: cc_version=2; cch=12ab;", "be nice")
    equivalent = translate(system=blocks)
    assert equivalent.body.messages[0].content == text("be nice")
    assert equivalent.ignored == ["system[0]"]
    assert [m["role"] for m in messages(HI, system=blocks[:1])] == ["user"]


def test_a_later_system_message_is_a_reminder_in_the_users_turn():
    later = {"role": "system", "content": "be brief"}
    reminder = "<system-reminder>\nbe brief\n</system-reminder>"
    assert messages(HI, later) == [{"role": "user", "content": text("hi", reminder)}]
    assert messages(HI, assistant(*text("a")), later)[-1] == {"role": "user", "content": text(reminder)}


def test_turns_of_one_role_are_one_turn():
    assert messages(HI, user(*text("a", "b")), assistant(*text("c")), {"role": "assistant", "content": "d"}, HI) == [
        {"role": "user", "content": text("hi", "a", "b")},
        {"role": "assistant", "content": text("c", "d")},
        {"role": "user", "content": text("hi")},
    ]


def test_thoughts_text_and_calls_of_a_turn_are_one_message():
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    [_, turn, result] = messages(HI, assistant(thinking, *text("ok"), CALL), user(RESULT))
    assert (turn["reasoning_content"], turn["content"]) == ("hm", text("ok"))
    function = {"name": "f", "arguments": '{"a":"é"}'}
    assert turn["tool_calls"] == [{"id": "1", "type": "function", "function": function}]
    assert result == {"role": "tool", "tool_call_id": "1", "content": text("done")}


def test_thoughts_that_were_omitted_are_read_from_their_signature():
    thinking = {"type": "thinking", "thinking": "", "signature": seal("hm")}
    assert messages(HI, assistant(thinking, *text("ok")), HI)[1]["reasoning_content"] == "hm"
    foreign = translate(messages=[HI, assistant(thinking | {"signature": "Erc"}, *text("ok")), HI])
    assert foreign.ignored == ["messages[1].content[0]"]


def test_tool_results_are_messages_before_the_text_beside_them():
    second = RESULT | {"tool_use_id": "2", "content": text("a", "b")}
    empty = {"type": "tool_result", "tool_use_id": "3"}
    turns = messages(HI, assistant(CALL), user(RESULT, second, empty, *text("go on")))
    assert [(m["role"], m.get("tool_call_id"), m.get("content")) for m in turns[2:]] == [
        ("tool", "1", text("done")),
        ("tool", "2", text("a", "b")),
        ("tool", "3", ""),
        ("user", None, text("go on")),
    ]


def test_a_last_message_of_the_assistant_is_gone_on_with():
    body = translate(messages=[HI, {"role": "assistant", "content": "The answer is ("}]).body
    assert body.continue_final_message is True
    assert translate().body.continue_final_message is None


def test_tools_are_functions_and_anthropics_own_are_skipped():
    equivalent = translate(
        tools=[BASH, TOOL | {"type": "custom", "strict": True, "cache_control": {"type": "ephemeral"}}]
    )
    function = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
    assert [tool.model_dump() for tool in equivalent.body.tools] == [{"type": "function", "function": function}]
    assert equivalent.ignored == ["tools[0]"]
    assert rename_fields("tools[0].function.parameters.type", equivalent.field_names) == "tools[1].input_schema.type"


@pytest.mark.parametrize(
    ("choice", "expected", "is_parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", None),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, None),
    ],
)
def test_a_tool_choice_has_chats_form(choice, expected, is_parallel):
    body = translate(tools=[TOOL], tool_choice=choice).body
    assert (body.tool_choice, body.parallel_tool_calls) == (expected, is_parallel)


@pytest.mark.parametrize(
    ("thinking", "is_on"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "adaptive"}, True),
        ({"type": "enabled", "budget_tokens": 1024}, True),
    ],
)
def test_thinking_is_a_switch_of_the_template(thinking, is_on):
    equivalent = translate(thinking=thinking)
    assert equivalent.body.chat_template_kwargs == {"enable_thinking": is_on, "thinking": is_on}
    assert equivalent.ignored == []
    assert equivalent.body.thinking_token_budget == (thinking or {}).get("budget_tokens")
    assert translate(chat_template_kwargs={"a": 1}).body.chat_template_kwargs == {"a": 1, **SWITCHES}


def test_an_output_format_is_a_response_format():
    body = translate(output_config={"format": {"type": "json_schema", "schema": SCHEMA}}).body
    expected = {"name": "output", "schema": SCHEMA, "strict": True}
    assert body.response_format.model_dump(exclude_none=True, by_alias=True) == {
        "type": "json_schema",
        "json_schema": expected,
    }


def test_a_count_is_of_the_same_prompt():
    fields = {"messages": [HI], "system": "s", "tools": [TOOL], "thinking": {"type": "adaptive"}}
    counted = translate_count(parse_body(CountTokensBody, {"model": "m", **fields})).body
    asked = translate(**fields).body
    assert (counted.messages, counted.tools) == (asked.messages, asked.tools)
    assert counted.chat_template_kwargs == asked.chat_template_kwargs
    half = parse_body(CountTokensBody, {"model": "m", "messages": [HI, assistant(CALL)]})
    assert translate_count(half).body.messages[-1].tool_calls  # a part of a conversation can be counted as well


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [HI, {"role": "user", "content": []}]}, "messages[1].content"),
        ({"messages": [HI, {"role": "assistant", "content": []}, HI]}, "messages[1].content"),
        ({"messages": [user("x")]}, "messages[0].content[0]"),
        ({"messages": [user({"text": "x"})]}, "messages[0].content[0].type"),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text"),
        ({"messages": [user(CALL)]}, "messages[0].content[0]"),
        ({"messages": [HI, assistant(RESULT)]}, "messages[1].content[0]"),
        ({"messages": [HI, assistant(CALL)]}, "messages"),
        ({"messages": [HI, assistant(CALL | {"input": "{}"})]}, "messages[1].content[0].input"),
        ({"system": [IMAGE]}, "system"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"stop_sequences": ["a"] * 5}, "stop_sequences"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_a_faulty_field_is_named(fields, param):
    error = error_of(**fields)
    assert error.param == param
    assert param in error.message


@pytest.mark.parametrize(
    "turns",
    [
        [user(IMAGE)],
        [user({"type": "document", "source": {}})],
        [HI, assistant(CALL), user(RESULT | {"content": [IMAGE]})],
    ],
)
def test_what_is_not_text_is_refused(turns):
    error = error_of(messages=turns)
    assert isinstance(error, UnsupportedFeature)
    assert "reads text only" in error.message


def test_a_request_has_so_many_blocks_and_no_more():
    many = text(*["a"] * 20_000)
    assert len(messages(user(*many))[0]["content"]) == 20_000
    assert "32768" in error_of(messages=[user(*many), assistant(*many)]).message


def test_fields_without_effect_are_named():
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    equivalent = translate(
        messages=[
            HI,
            assistant({"type": "redacted_thinking", "data": "x"}, search, CALL),
            user(RESULT | {"is_error": True}, {"type": "text", "text": "a", "mood": "good"}),
        ],
        container="c",
        context_management={"edits": []},
        tools=[TOOL | {"defer_loading": True}],
    )
    assert sorted(equivalent.ignored) == [
        *("container", "context_management", "messages[1].content[0]", "messages[1].content[1]"),
        *("messages[2].content[0].is_error", "messages[2].content[1].mood", "tools[0].defer_loading"),
    ]


def test_fields_that_ask_for_nothing_are_not_named():
    cached = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "citations": None}
    equivalent = translate(
        messages=[user(cached)], cache_control={"type": "ephemeral"}, service_tier="auto", container=None
    )
    assert equivalent.ignored == []


# Anthropic takes these lists, unlike OpenAI's chat: clients without tools send them
def test_empty_lists_that_anthropic_takes_are_taken():
    assert translate(tools=[], system=[]).body.tools is None
    last = {"role": "assistant", "content": []}
    assert [message.role for message in translate(messages=[HI, last]).body.messages] == ["user"]
    result = {"type": "tool_result", "tool_use_id": "1", "content": []}
    assert translate(messages=[HI, assistant(CALL), user(result)]).body.messages[-1].content == ""
