"""openai-agents over chat completions and over responses."""

import asyncio

import agents
import openai
import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool

from tests.clients import questions
from tests.clients.questions import CAPITAL, FOLLOW_UP, GEORGE, MADRID, MODEL, PARIS, PERSON, WEATHER, Person


@pytest.fixture(params=[OpenAIChatCompletionsModel, OpenAIResponsesModel], ids=["chat", "responses"])
def make_agent(request, base_url):
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    model = request.param(MODEL, openai_client=client)
    return lambda **more: Agent(name="Demo", model=model, model_settings=ModelSettings(temperature=0), **more)


def test_chat(make_agent):
    assert PARIS in Runner.run_sync(make_agent(), CAPITAL).final_output


def test_stream(make_agent):
    async def run():
        result = Runner.run_streamed(make_agent(), CAPITAL)
        deltas = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        return "".join(deltas), result.final_output

    text, final = asyncio.run(run())
    assert text == final
    assert PARIS in text


def test_multi_turn(make_agent):
    first = Runner.run_sync(make_agent(), CAPITAL)
    history = [*first.to_input_list(), {"role": "user", "content": FOLLOW_UP}]
    assert MADRID in Runner.run_sync(make_agent(), history).final_output


def test_a_tool_is_called_and_its_result_used(make_agent):
    agent = make_agent(tools=[function_tool(questions.get_weather)])
    assert questions.uses_report(Runner.run_sync(agent, WEATHER).final_output)


def test_structured_output(make_agent):
    assert Runner.run_sync(make_agent(output_type=Person), PERSON).final_output == GEORGE
