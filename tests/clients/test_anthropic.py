"""Anthropic's Python SDK, /v1/messages; every answer is held against the package's types."""

import anthropic
import pytest

from tests.clients.questions import (
    CAPITAL,
    FOLLOW_UP,
    MADRID,
    MODEL,
    PARIS,
    REPORT,
    WEATHER,
    WEATHER_PARAMETERS,
    uses_report,
)

TOOL = {"name": "get_weather", "description": "Get the weather of a city.", "input_schema": WEATHER_PARAMETERS}


@pytest.fixture
def claude(daemon):
    return anthropic.Anthropic(
        base_url=daemon.base_url, api_key="none", max_retries=0, _strict_response_validation=True
    )


def ask(messages, **more):
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    body = {"temperature": 0}  # the package has no word for it any more; the API has
    return {"model": MODEL, "max_tokens": 200, "messages": messages, "extra_body": body, **more}


# rule: Endpoints: Messages and their count answer in Anthropic's form
def test_chat(claude):
    answer = claude.messages.create(**ask(CAPITAL, system="Answer shortly."))
    (block,) = answer.content
    assert PARIS in block.text
    assert answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens > 0


def test_stream(claude):
    with claude.messages.stream(**ask(CAPITAL)) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == claude.messages.create(**ask(CAPITAL)).content[0].text
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens > 0


def test_multi_turn(claude):
    history = [{"role": "user", "content": CAPITAL}]
    first = claude.messages.create(**ask(history))
    history += [{"role": "assistant", "content": first.content}, {"role": "user", "content": FOLLOW_UP}]
    assert MADRID in claude.messages.create(**ask(history)).content[0].text


def test_a_tool_is_called_and_its_result_used(claude):
    history = [{"role": "user", "content": WEATHER}]
    first = claude.messages.create(**ask(history, tools=[TOOL]))
    assert first.stop_reason == "tool_use"
    (call,) = (block for block in first.content if block.type == "tool_use")
    assert (call.name, call.input) == ("get_weather", {"city": PARIS})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": REPORT}
    history += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert uses_report(claude.messages.create(**ask(history, tools=[TOOL])).content[0].text)


def test_a_streamed_tool_call_is_the_whole_one(claude):
    with claude.messages.stream(**ask(WEATHER, tools=[TOOL])) as stream:
        final = stream.get_final_message()
    assert [block.input for block in final.content if block.type == "tool_use"] == [{"city": PARIS}]


def test_a_forced_tool_is_called(claude):
    answer = claude.messages.create(**ask(CAPITAL, tools=[TOOL], tool_choice={"type": "any"}))
    assert [block.name for block in answer.content if block.type == "tool_use"] == ["get_weather"]


def test_stop_sequences_and_limits(claude):
    assert claude.messages.create(**ask(CAPITAL, stop_sequences=[PARIS])).stop_reason == "stop_sequence"
    assert claude.messages.create(**{**ask(CAPITAL), "max_tokens": 2}).stop_reason == "max_tokens"


def test_count_tokens(claude):
    counted = claude.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": CAPITAL}])
    usage = claude.messages.create(**ask(CAPITAL)).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_errors_are_the_clients_own(claude):
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**{**ask(CAPITAL), "model": "nobody"})
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(**{**ask(CAPITAL), "max_tokens": 0})
