"""LiteLLM, with the provider names that its users give an OpenAI-compatible server."""

import asyncio
import json

import litellm
import pytest

from tests.clients.questions import (
    CAPITAL,
    FOLLOW_UP,
    GEORGE,
    MADRID,
    MODEL,
    PARIS,
    PERSON,
    REPORT,
    WEATHER,
    WEATHER_TOOL,
    Person,
    uses_report,
)


@pytest.fixture(params=["openai", "hosted_vllm"])
def ask(request, base_url):
    def make(messages, **more):
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        where = {"model": f"{request.param}/{MODEL}", "api_base": base_url, "api_key": "none"}
        return {**where, "messages": messages, "temperature": 0, "num_retries": 0, **more}

    return make


def test_chat(ask):
    answer = litellm.completion(**ask(CAPITAL))
    assert PARIS in answer.choices[0].message.content
    assert answer.usage.total_tokens > 0


def test_stream(ask):
    chunks = list(litellm.completion(**ask(CAPITAL, stream=True)))
    assert PARIS in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_async(ask):
    assert PARIS in asyncio.run(litellm.acompletion(**ask(CAPITAL))).choices[0].message.content


def test_multi_turn(ask):
    history = [{"role": "user", "content": CAPITAL}]
    history += [litellm.completion(**ask(history)).choices[0].message, {"role": "user", "content": FOLLOW_UP}]
    assert MADRID in litellm.completion(**ask(history)).choices[0].message.content


def test_a_tool_is_called_and_its_result_used(ask):
    history = [{"role": "user", "content": WEATHER}]
    message = litellm.completion(**ask(history, tools=[WEATHER_TOOL])).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": PARIS}
    history += [message, {"role": "tool", "tool_call_id": call.id, "content": REPORT}]
    assert uses_report(litellm.completion(**ask(history, tools=[WEATHER_TOOL])).choices[0].message.content)


def test_a_streamed_tool_call_is_put_together(ask):
    chunks = list(litellm.completion(**ask(WEATHER, tools=[WEATHER_TOOL], stream=True)))
    (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": PARIS}


def test_structured_output(ask):
    answer = litellm.completion(**ask(PERSON, response_format=Person))
    assert Person.model_validate_json(answer.choices[0].message.content) == GEORGE


def test_errors_are_litellms_own(ask):
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**ask("word " * 9000))
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**ask(CAPITAL, n=1000))
