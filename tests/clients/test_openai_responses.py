"""OpenAI's Python client, /v1/responses; every answer and event is held against the package's types."""

import asyncio
import json
import re

import openai

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
    WEATHER_FUNCTION,
    Person,
    uses_report,
)

TOOL = {"type": "function", "strict": True, **WEATHER_FUNCTION}


def ask(text, **more):
    return {"model": MODEL, "input": text, "temperature": 0, "store": False, **more}


# rule: Endpoints: Responses answer in OpenAI's form and store nothing
def test_text(client):
    answer = client.responses.create(**ask(CAPITAL, instructions="Answer shortly."))
    assert PARIS in answer.output_text
    assert answer.status == "completed"
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_stream(client):
    events = list(client.responses.create(**ask(CAPITAL, stream=True)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text
    assert PARIS in text


def test_stream_helper(client):
    with client.responses.stream(**ask(CAPITAL)) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text


def test_multi_turn(client):
    history = [{"role": "user", "content": CAPITAL}]
    first = client.responses.create(**ask(history))
    history += [item.to_dict() for item in first.output] + [{"role": "user", "content": FOLLOW_UP}]
    assert MADRID in client.responses.create(**ask(history)).output_text


def test_async(base_url):
    async def run():
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", _strict_response_validation=True) as client:
            return (await client.responses.create(**ask(CAPITAL))).output_text

    assert PARIS in asyncio.run(run())


def test_a_tool_is_called_and_its_result_used(client):
    history = [{"role": "user", "content": WEATHER}]
    first = client.responses.create(**ask(history, tools=[TOOL]))
    (call,) = (item for item in first.output if item.type == "function_call")
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": PARIS})
    history += [item.to_dict() for item in first.output]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": REPORT})
    assert uses_report(client.responses.create(**ask(history, tools=[TOOL])).output_text)


def test_a_streamed_tool_call_is_the_whole_one(client):
    whole = client.responses.create(**ask(WEATHER, tools=[TOOL])).output
    with client.responses.stream(**ask(WEATHER, tools=[TOOL])) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response().output
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds
    assert [item.arguments for item in final if item.type == "function_call"] == [
        item.arguments for item in whole if item.type == "function_call"
    ]


CUSTOM_FORMAT = {"type": "grammar", "syntax": "regex", "definition": "[a-z]{3,8}"}
CUSTOM_TOOL = {"type": "custom", "name": "write_word", "description": "Writes a word.", "format": CUSTOM_FORMAT}


# rule: Tools and reasoning: Codex's custom tools are called with plain text
def test_a_custom_tool_is_called_with_plain_text_and_its_result_goes_back(client):
    choice = {"type": "custom", "name": "write_word"}
    history = [{"role": "user", "content": "Write a word."}]
    asked = ask(history, tools=[CUSTOM_TOOL], tool_choice=choice, parallel_tool_calls=False)
    events = list(client.responses.create(**asked, stream=True))
    (call,) = [item for item in events[-1].response.output if item.type == "custom_tool_call"]
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done.input == call.input
    assert re.fullmatch("[a-z]{3,8}", call.input)
    history += [call.to_dict(), {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Written."}]
    answer = client.responses.create(**ask(history, tools=[CUSTOM_TOOL], tool_choice="none"))
    assert answer.status == "completed"


def test_parse(client):
    assert client.responses.parse(**ask(PERSON, text_format=Person)).output_parsed == GEORGE
