"""The whole house answers through /v1/responses and /v1/messages: the real clients, the demo model, the same tokens."""

import json
from collections.abc import Iterator

import anthropic
import openai
import pytest

from tests.support.daemon import Daemon, wait_for

MODEL = "quire-demo"
QUESTION = "What is a page?"
WEATHER = "What is the weather in Paris?"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "get_weather", "description": "Get the weather of a city"}
RESULT = '{"temperature": 21, "sky": "sunny"}'


@pytest.fixture(scope="module")
def claude(daemon: Daemon) -> Iterator[anthropic.Anthropic]:
    """Return the real client of the other API; it does not retry, so that errors show."""
    with anthropic.Anthropic(base_url=daemon.base_url, api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def message(**more: object) -> dict[str, object]:
    """Return the arguments of a greedy message request."""
    ask = {"model": MODEL, "max_tokens": 12, "messages": [{"role": "user", "content": QUESTION}]}
    return {**ask, "extra_body": {"temperature": 0}, **more}  # which the client has no name for any more


def response(**more: object) -> dict[str, object]:
    """Return the arguments of a greedy response request that asks for the same."""
    off = {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}
    ask = {"model": MODEL, "max_output_tokens": 12, "temperature": 0, "input": QUESTION, "extra_body": off}
    return {**ask, **more}


def test_three_apis_give_the_same_answer_plain_and_streamed(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        max_completion_tokens=12,
        temperature=0,
        extra_body={"chat_template_kwargs": {"enable_thinking": False, "thinking": False}},
    )
    plain, other = client.responses.create(**response()), claude.messages.create(**message())
    with client.responses.stream(**response()) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    with claude.messages.stream(**message()) as other_stream:
        other_deltas = "".join(other_stream.text_stream)
        other_final = other_stream.get_final_message()
    texts = {plain.output_text, other.content[0].text, deltas, other_deltas, chat.choices[0].message.content}
    assert len(texts) == 1
    assert plain.usage.output_tokens == other.usage.output_tokens == chat.usage.completion_tokens
    assert other_final.usage.output_tokens == other.usage.output_tokens


def test_usage_tells_what_was_cached_and_a_count_what_it_will_be(
    client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    long = " ".join(f"word {i}" for i in range(60))
    count = claude.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": long}])
    first, again = (
        claude.messages.create(**message(messages=[{"role": "user", "content": long}])).usage for _ in range(2)
    )
    assert count.input_tokens == first.input_tokens + first.cache_read_input_tokens
    assert again.cache_read_input_tokens > 0
    assert again.input_tokens + again.cache_read_input_tokens == count.input_tokens
    usage = client.responses.create(**response(input=long)).usage
    assert usage.input_tokens == count.input_tokens
    assert usage.input_tokens_details.cached_tokens > 0


def test_the_demo_model_thinks_calls_and_reads_the_result_as_responses(client: openai.OpenAI) -> None:
    tools = [{"type": "function", **TOOL, "parameters": CITY}]
    more = {"tools": tools, "reasoning": {"effort": "low"}, "max_output_tokens": 200, "extra_body": {}}
    history: list = [{"role": "user", "content": WEATHER}]
    plain = client.responses.create(**response(input=history, **more))
    with client.responses.stream(**response(input=history, **more)) as stream:
        streamed = stream.get_final_response()
    for answer in (plain, streamed):
        thought, call = answer.output
        assert (thought.type, call.type, call.name) == ("reasoning", "function_call", "get_weather")
        assert json.loads(call.arguments) == {"city": "Paris"}
        assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    assert streamed.output[0].content == plain.output[0].content
    history += plain.output
    history.append({"type": "function_call_output", "call_id": plain.output[-1].call_id, "output": RESULT})
    last = client.responses.create(**response(input=history, **more))
    assert last.output[-1].type == "message"
    assert last.output_text


def test_the_demo_model_thinks_calls_and_reads_the_result_as_messages(claude: anthropic.Anthropic) -> None:
    more = {"tools": [{**TOOL, "input_schema": CITY}], "thinking": {"type": "adaptive"}, "max_tokens": 200}
    history: list = [{"role": "user", "content": WEATHER}]
    plain = claude.messages.create(**message(messages=history, **more))
    with claude.messages.stream(**message(messages=history, **more)) as stream:
        streamed = stream.get_final_message()
    for answer in (plain, streamed):
        thought, call = answer.content
        assert (thought.type, call.type, call.name, answer.stop_reason) == (
            *("thinking", "tool_use", "get_weather", "tool_use"),
        )
        assert call.input == {"city": "Paris"}
    assert streamed.content[0] == plain.content[0]
    result = {"type": "tool_result", "tool_use_id": plain.content[-1].id, "content": RESULT}
    history += [{"role": "assistant", "content": plain.content}, {"role": "user", "content": [result]}]
    last = claude.messages.create(**message(messages=history, **more))
    assert (last.content[-1].type, last.stop_reason) == ("text", "end_turn")
    assert last.content[-1].text


def test_a_client_that_leaves_a_stream_ends_its_request(daemon: Daemon, client: openai.OpenAI) -> None:
    before = daemon.metrics()["quire_http_disconnects_total"]
    stream = client.responses.create(**response(max_output_tokens=400, stream=True))
    next(iter(stream))
    stream.close()
    wait_for(
        lambda: (
            daemon.metrics()["quire_http_disconnects_total"] > before
            and daemon.metrics()["quire_num_requests_running"] == 0
        ),
        timeout_s=60,
        what="the request's end",
    )


def test_errors_have_each_apis_form(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    with pytest.raises(openai.NotFoundError) as openai_error:
        client.responses.create(**response(model="nobody"))
    assert openai_error.value.code == "model_not_found"
    with pytest.raises(anthropic.NotFoundError) as anthropic_error:
        claude.messages.create(**message(model="nobody"))
    assert anthropic_error.value.body["error"]["type"] == "not_found_error"
    assert anthropic_error.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        claude.messages.create(**message(messages=[{"role": "user", "content": "word " * 50_000}]))
