"""OpenAI's Python client, /v1/chat/completions and its neighbours; every answer is held against the package's types."""

import asyncio
import json

import openai
import pydantic
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

THINK = {"chat_template_kwargs": {"enable_thinking": True}}


def ask(text: str, **more):
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0, **more}


# rule: Endpoints: Models are listed, and each is there by its id
def test_models(client):
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


# rule: Endpoints: Chat completions answer in OpenAI's form
def test_chat(client):
    answer = client.chat.completions.create(**ask(CAPITAL))
    assert PARIS in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_multi_turn(client):
    messages = [{"role": "user", "content": CAPITAL}]
    first = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    messages += [first.choices[0].message.to_dict(), {"role": "user", "content": FOLLOW_UP}]
    second = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert MADRID in second.choices[0].message.content


def test_stream_with_usage(client):
    whole = client.chat.completions.create(**ask(CAPITAL))
    chunks = list(client.chat.completions.create(**ask(CAPITAL, stream=True, stream_options={"include_usage": True})))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


def test_stream_helper(client):
    with client.chat.completions.stream(**ask(CAPITAL)) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert PARIS in text
    assert final.choices[0].message.content == text


def test_async(base_url):
    async def run():
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", _strict_response_validation=True) as client:
            answers = await asyncio.gather(*(client.chat.completions.create(**ask(CAPITAL)) for _ in range(4)))
            stream = await client.chat.completions.create(**ask(CAPITAL, stream=True))
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert {answer.choices[0].message.content for answer in answers} == {text}

    asyncio.run(run())


# rule: Endpoints: Completions answer in OpenAI's form
def test_completion(client):
    answer = client.completions.create(model=MODEL, prompt=["A quire is", "Once upon a time"], max_tokens=8, logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) for choice in answer.choices)


def test_streamed_completion(base_url):
    # not strict: the package's type lacks the null that OpenAI's own chunks have for finish_reason
    client = openai.OpenAI(base_url=base_url, api_key="none")
    request = {"model": MODEL, "prompt": "A quire is", "max_tokens": 8, "temperature": 0}
    chunks = list(client.completions.create(**request, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == client.completions.create(**request).choices[0].text
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_several_choices_with_logprobs(client):
    answer = client.chat.completions.create(**ask(CAPITAL, n=2, logprobs=True, top_logprobs=3))
    for choice in answer.choices:
        assert all(len(token.top_logprobs) == 3 for token in choice.logprobs.content)
    chunks = client.chat.completions.create(**ask(CAPITAL, n=2, logprobs=True, stream=True))
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}


# rule: Fields: `response_format` and `structured_outputs` are enforced
def test_parse(client):
    answer = client.chat.completions.parse(**ask(PERSON, response_format=Person))
    assert answer.choices[0].message.parsed == GEORGE


def test_parse_in_a_stream(client):
    with client.chat.completions.stream(**ask(PERSON, response_format=Person)) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == GEORGE


def test_json_object(client):
    answer = client.chat.completions.create(**ask(PERSON, response_format={"type": "json_object"}))
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


def test_a_tool_is_called_and_its_result_used(client):
    request = ask(WEATHER, tools=[WEATHER_TOOL])
    first = client.chat.completions.create(**request).choices[0]
    assert first.finish_reason == "tool_calls"
    (call,) = first.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": PARIS}
    request["messages"] += [
        first.message.to_dict(),
        {"role": "tool", "tool_call_id": call.id, "content": REPORT},
    ]
    second = client.chat.completions.create(**request).choices[0]
    assert second.finish_reason == "stop"
    assert uses_report(second.message.content)


def test_a_streamed_tool_call_is_the_whole_one(client):
    request = ask(WEATHER, tools=[WEATHER_TOOL])
    with client.chat.completions.stream(**request) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    whole = client.chat.completions.create(**request).choices[0]
    assert "tool_calls.function.arguments.done" in kinds
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls[0].function.name == "get_weather"
    assert final.message.tool_calls[0].function.arguments == whole.message.tool_calls[0].function.arguments


# rule: Streams: Deltas of tool calls have index always, id, type and name once, arguments as strings
def test_tool_deltas_have_openais_form(client):
    deltas = [
        call
        for chunk in client.chat.completions.create(**ask(WEATHER, tools=[WEATHER_TOOL], stream=True))
        for call in chunk.choices[0].delta.tool_calls or ()
    ]
    first, *later = deltas
    assert (first.index, first.type, first.function.name) == (0, "function", "get_weather")
    assert first.id
    assert all(call.index == 0 and isinstance(call.function.arguments, str) for call in deltas)
    assert all(not call.model_fields_set & {"id", "type"} for call in later)
    assert all("name" not in call.function.model_fields_set for call in later)


# rule: Tools and reasoning: `required` and named choices are forced by a grammar
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_tool_is_called_whatever_is_asked(client, choice):
    answer = client.chat.completions.create(**ask(CAPITAL, tools=[WEATHER_TOOL], tool_choice=choice)).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)


def test_no_tool_is_called_where_none_may_be(client):
    answer = client.chat.completions.create(**ask(WEATHER, tools=[WEATHER_TOOL], tool_choice="none")).choices[0]
    assert not answer.message.tool_calls
    assert answer.finish_reason == "stop"


def test_strict_tools_are_parsed(client):
    class GetWeather(pydantic.BaseModel):
        """Get the weather of a city."""

        city: str

    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    answer = client.chat.completions.parse(**ask(WEATHER, tools=[tool], tool_choice="required"))
    assert answer.choices[0].message.tool_calls[0].function.parsed_arguments == GetWeather(city=PARIS)


# rule: Streams: Reasoning has both names, and none of it is in the content
def test_thoughts_stay_out_of_the_content(client):
    message = client.chat.completions.create(**ask(CAPITAL, extra_body=THINK)).choices[0].message
    assert message.reasoning_content
    assert message.reasoning == message.reasoning_content
    assert PARIS in message.content
    assert "think>" not in message.content
    deltas = [
        chunk.choices[0].delta
        for chunk in client.chat.completions.create(**ask(CAPITAL, extra_body=THINK, stream=True))
    ]
    assert "".join(delta.content or "" for delta in deltas) == message.content
    thoughts = "".join(delta.to_dict().get("reasoning_content") or "" for delta in deltas)
    assert thoughts == message.reasoning_content


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.chat.completions.create(**{**ask(CAPITAL), "model": "nobody"})
    with pytest.raises(openai.BadRequestError, match="4096") as caught:
        client.chat.completions.create(**ask("word " * 9000))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ask(CAPITAL, n=1000))
    assert caught.value.param == "n"
