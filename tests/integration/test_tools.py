"""The demo model calls tools and reasons, through the whole house and the real OpenAI client."""

import json

import openai
import pytest

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASK = {
    "model": "quire-demo",
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": [WEATHER],
    "temperature": 0,
    "max_tokens": 200,
}


def test_the_demo_model_calls_a_tool_and_reads_its_result(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(**ASK).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "sky": "sunny"}'}
    history = [*ASK["messages"], choice.message, result]
    (answer,) = client.chat.completions.create(**{**ASK, "messages": history}).choices
    assert answer.finish_reason == "stop"
    assert answer.message.content


def test_a_streamed_call_with_reasoning_is_the_whole_answer(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(**ASK, reasoning_effort="low")
    message = plain.choices[0].message
    assert message.model_extra["reasoning"] == message.model_extra["reasoning_content"] != ""
    assert 0 < plain.usage.completion_tokens_details.reasoning_tokens < plain.usage.completion_tokens
    with client.chat.completions.stream(
        **ASK, reasoning_effort="low", stream_options={"include_usage": True}
    ) as stream:
        deltas = [event.chunk for event in stream if event.type == "chunk"]
        final = stream.get_final_completion()
    reasoning = [chunk.choices[0].delta.model_extra.get("reasoning", "") for chunk in deltas if chunk.choices]
    assert "".join(reasoning) == message.model_extra["reasoning"]
    assert final.choices[0].finish_reason == plain.choices[0].finish_reason == "tool_calls"
    streamed, whole = final.choices[0].message.tool_calls[0], message.tool_calls[0]
    assert (streamed.function.name, streamed.function.arguments) == (whole.function.name, whole.function.arguments)
    assert final.usage.completion_tokens_details == plain.usage.completion_tokens_details


@pytest.mark.parametrize(("effort", "has_reasoning"), [("none", False), ("medium", True)])
def test_reasoning_effort_turns_the_reasoning_on_and_off(
    client: openai.OpenAI, effort: str, has_reasoning: bool
) -> None:
    reply = client.chat.completions.create(
        model="quire-demo",
        messages=[{"role": "user", "content": "What is a quire?"}],
        temperature=0,
        max_tokens=200,
        reasoning_effort=effort,
    )
    message = reply.choices[0].message
    assert ("reasoning" in message.model_extra) == has_reasoning
    assert "think>" not in message.content
    assert (reply.usage.completion_tokens_details.reasoning_tokens > 0) == has_reasoning
