"""Forced calls: the demo model, which would rather not, calls what it must with arguments of the schema."""

import json

import openai
import pytest

from tests.integration.test_tools import WEATHER

COUNT = {
    "type": "function",
    "function": {
        "name": "zebra-count",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"kind": {"enum": ["plains", "mountain"]}, "old": {"type": "boolean"}},
            "required": ["kind", "old"],
            "additionalProperties": False,
        },
    },
}
ASK = {
    "model": "quire-demo",
    "messages": [{"role": "user", "content": "What is a quire?"}],
    "tools": [WEATHER, COUNT],
    "temperature": 0,
    "max_tokens": 300,
}


@pytest.mark.parametrize("effort", ["none", "low"])
def test_a_named_function_is_called_with_arguments_of_its_schema(client: openai.OpenAI, effort: str) -> None:
    named = {"type": "function", "function": {"name": "zebra-count"}}
    (choice,) = client.chat.completions.create(**ASK, tool_choice=named, reasoning_effort=effort).choices
    assert choice.finish_reason == "tool_calls"
    assert ("reasoning" in choice.message.model_extra) == (effort == "low")
    (call,) = choice.message.tool_calls
    assert call.function.name == "zebra-count"
    arguments = json.loads(call.function.arguments)
    assert list(arguments) == ["kind", "old"]
    assert arguments["kind"] in ("plains", "mountain")
    assert isinstance(arguments["old"], bool)


def test_some_tool_is_called_where_one_is_required(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": {**COUNT["function"], "name": name}} for name in ("one", "two")]
    for parallel in (True, False):
        (choice,) = client.chat.completions.create(
            **{**ASK, "tools": tools}, tool_choice="required", parallel_tool_calls=parallel
        ).choices
        assert choice.message.content is None
        calls = choice.message.tool_calls
        assert {call.function.name for call in calls} <= {"one", "two"}
        assert len(calls) == 1 or parallel


def test_a_forced_call_that_is_cut_early_shows_none_of_its_tags(client: openai.OpenAI) -> None:
    for max_tokens in (1, 4, 9):
        (choice,) = client.chat.completions.create(
            **{**ASK, "max_tokens": max_tokens}, tool_choice="required", reasoning_effort="none"
        ).choices
        assert choice.finish_reason == "length"
        assert not choice.message.content


def test_a_strict_schema_that_cannot_be_enforced_is_refused(client: openai.OpenAI) -> None:
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}
    with pytest.raises(openai.BadRequestError) as info:
        client.chat.completions.create(
            **{**ASK, "tools": [{"type": "function", "function": function}]}, tool_choice="required"
        )
    assert (info.value.code, info.value.param) == ("invalid_grammar", "tools")


def test_an_answer_in_a_form_may_be_a_call_instead(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {**schema, "additionalProperties": False}}}
    weather = [{"role": "user", "content": "What is the weather in Paris?"}]
    (choice,) = client.chat.completions.create(**{**ASK, "messages": weather}, response_format=form).choices
    assert choice.message.tool_calls[0].function.name == "get_weather"
    (choice,) = client.chat.completions.create(
        **ASK, tool_choice="none", response_format=form, reasoning_effort="low"
    ).choices
    assert list(json.loads(choice.message.content)) == ["yes"]
    assert choice.message.model_extra["reasoning"]
