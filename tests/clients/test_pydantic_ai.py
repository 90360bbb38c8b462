"""pydantic-ai over chat completions and over responses."""

import asyncio

import pytest
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients import questions
from tests.clients.questions import CAPITAL, FOLLOW_UP, GEORGE, MADRID, MODEL, PARIS, PERSON, WEATHER, Person


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel], ids=["chat", "responses"])
def model(request, base_url):
    return request.param(MODEL, provider=OpenAIProvider(base_url=base_url, api_key="none"), settings={"temperature": 0})


def test_chat(model):
    result = Agent(model).run_sync(CAPITAL)
    assert PARIS in result.output
    assert result.usage.output_tokens > 0


def test_stream(model):
    async def run():
        async with Agent(model).run_stream(CAPITAL) as result:
            return "".join([delta async for delta in result.stream_text(delta=True, debounce_by=None)])

    assert asyncio.run(run()) == Agent(model).run_sync(CAPITAL).output


def test_multi_turn(model):
    agent = Agent(model)
    first = agent.run_sync(CAPITAL)
    assert MADRID in agent.run_sync(FOLLOW_UP, message_history=first.all_messages()).output


def test_a_tool_is_called_and_its_result_used(model):
    agent = Agent(model)
    agent.tool_plain(questions.get_weather)
    assert questions.uses_report(agent.run_sync(WEATHER).output)


@pytest.mark.parametrize("output", [Person, NativeOutput(Person)], ids=["tool", "schema"])
def test_structured_output(model, output):
    assert Agent(model, output_type=output).run_sync(PERSON).output == GEORGE
