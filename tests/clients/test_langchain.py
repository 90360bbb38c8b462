"""langchain-openai: ChatOpenAI over chat completions and over responses."""

import asyncio

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

from tests.clients import questions
from tests.clients.questions import CAPITAL, FOLLOW_UP, GEORGE, MADRID, MODEL, PARIS, PERSON, WEATHER, Person


def make(base_url, *, responses):
    return ChatOpenAI(
        model=MODEL, base_url=base_url, api_key="none", temperature=0, max_retries=0, use_responses_api=responses
    )


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(request, base_url):
    return make(base_url, responses=request.param)


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return questions.get_weather(city)


def test_chat(model):
    answer = model.invoke(CAPITAL)
    assert PARIS in answer.text
    assert answer.usage_metadata["total_tokens"] > 0


def test_stream(model):
    assert "".join(chunk.text for chunk in model.stream(CAPITAL)) == model.invoke(CAPITAL).text


def test_async_stream(base_url):
    async def run(model):
        return "".join([chunk.text async for chunk in model.astream(CAPITAL)])

    async def both():  # in one event loop, since all models share one HTTP client
        return [await run(make(base_url, responses=responses)) for responses in (False, True)]

    assert all(PARIS in text for text in asyncio.run(both()))


def test_multi_turn(model):
    history = [HumanMessage(CAPITAL), model.invoke(CAPITAL), HumanMessage(FOLLOW_UP)]
    assert MADRID in model.invoke(history).text


def test_a_tool_is_called_and_its_result_used(model):
    armed = model.bind_tools([get_weather])
    first = armed.invoke(WEATHER)
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": PARIS})
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    answer = armed.invoke([HumanMessage(WEATHER), first, result])
    assert isinstance(answer, AIMessage)
    assert questions.uses_report(answer.text)


def test_a_streamed_tool_call_is_put_together(model):
    whole = None
    for chunk in model.bind_tools([get_weather]).stream(WEATHER):
        whole = chunk if whole is None else whole + chunk
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("get_weather", {"city": PARIS})]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(model, method):
    assert model.with_structured_output(Person, method=method).invoke(PERSON) == GEORGE


def test_completion(base_url):
    model = OpenAI(model=MODEL, base_url=base_url, api_key="none", temperature=0, max_tokens=8)
    assert "".join(model.stream("A quire is")) == model.invoke("A quire is")
