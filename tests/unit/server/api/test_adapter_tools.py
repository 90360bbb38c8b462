"""Tool calls and thoughts through /v1/responses and /v1/messages, with the real clients, over a Qwen-like template."""

import contextlib
import json

import anthropic
import msgspec
import openai
import pytest

from tests.support.fakes import READY
from tests.support.templates import QWEN3_LIKE
from tests.unit.server.conftest import serving, write_model_folder

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
RESPONSES_TOOL = {"type": "function", "name": "get_weather", "description": "d", "parameters": SCHEMA}
MESSAGES_TOOL = {"name": "get_weather", "description": "d", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ROOMY = msgspec.structs.replace(READY, max_model_len=4096)
THOUGHT = "<think>\nRain?\n</think>\n\n"


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory):
    return write_model_folder(tmp_path_factory.mktemp("qwen"), chat_template=QWEN3_LIKE)


@pytest.fixture
def ask(harness, qwen_folder):
    """Return a function that serves an engine with a scripted answer: the app, and both clients of it."""
    with contextlib.ExitStack() as stack:

        def make(text: str, **engine: object):
            app = harness(text, folder=qwen_folder, engine={"ready": ROOMY, **engine})
            url = stack.enter_context(serving(app.app))
            first = stack.enter_context(openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0))
            second = stack.enter_context(anthropic.Anthropic(base_url=url, api_key="x", max_retries=0))
            return app, first, second

        yield make


@pytest.mark.parametrize("tokens_per_delta", [1, 7])
def test_a_response_has_reasoning_text_and_calls(ask, tokens_per_delta):
    _, client, _ = ask(THOUGHT + "Let me see." + CALL + CALL, tokens_per_delta=tokens_per_delta)
    fields = {"model": "tiny", "input": "Weather?", "tools": [RESPONSES_TOOL], "reasoning": {"effort": "high"}}
    answers = [client.responses.create(**fields)]
    with client.responses.stream(**fields) as stream:
        deltas = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
        answers.append(stream.get_final_response())
    assert "".join(deltas) == json.dumps({"city": "Köln"}, ensure_ascii=False) * 2
    for answer in answers:
        thought, message, *calls = answer.output
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
        assert (thought.content[0].text.strip(), message.content[0].text.strip()) == ("Rain?", "Let me see.")
        assert [(c.name, json.loads(c.arguments)) for c in calls] == [("get_weather", {"city": "Köln"})] * 2
        assert len({call.call_id for call in calls}) == 2
        assert answer.usage.output_tokens_details.reasoning_tokens > 0


def test_a_summary_is_the_reasoning_itself(ask):
    _, client, _ = ask(THOUGHT + "Hello")
    reply = client.responses.with_raw_response.create(model="tiny", input="hi", reasoning={"summary": "auto"})
    thought, message = reply.parse().output
    assert ([part.text.strip() for part in thought.summary], thought.content) == (["Rain?"], [])
    assert message.content[0].text == "Hello"
    assert "x-quire-ignored" not in reply.headers


def test_a_response_goes_on_after_its_calls(ask):
    app, client, _ = ask(THOUGHT + CALL)
    fields = {"model": "tiny", "tools": [RESPONSES_TOOL], "include": ["reasoning.encrypted_content"]}
    history = [{"role": "user", "content": "Weather?"}]
    first = client.responses.create(input=history, **fields)
    for item in first.output:  # as Codex does: thoughts go back sealed, without their text
        history.append(item.model_dump(exclude={"content"} if item.type == "reasoning" else None))
    call = first.output[-1]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"})
    client.responses.create(input=history, **fields)
    prompt = app.tokenizer.decode(app.client.submitted[-1].prompt_token_ids, skip_special_tokens=False)
    after = prompt.split("Weather?")[1]
    assert after.index("Rain?") < after.index('"city": "Köln"') < after.index("Sunny")


def test_a_message_has_thinking_text_and_tool_use(ask):
    _, _, client = ask(THOUGHT + "Let me see." + CALL)
    fields = {
        "model": "tiny",
        "max_tokens": 99,
        "tools": [MESSAGES_TOOL],
        "thinking": {"type": "adaptive"},
        "messages": [{"role": "user", "content": "Weather?"}],
    }
    answers = [client.messages.create(**fields)]
    with client.messages.stream(**fields) as stream:
        answers.append(stream.get_final_message())
    for answer in answers:
        thought, text, call = answer.content
        assert (thought.thinking.strip(), bool(thought.signature)) == ("Rain?", True)
        assert text.text.strip() == "Let me see."
        assert (call.name, call.input) == ("get_weather", {"city": "Köln"})
        assert answer.stop_reason == "tool_use"
        assert answer.usage.output_tokens_details.thinking_tokens > 0


def test_a_message_goes_on_after_its_tool_use(ask):
    app, _, client = ask(THOUGHT + CALL)
    fields = {"model": "tiny", "max_tokens": 99, "tools": [MESSAGES_TOOL], "thinking": {"type": "adaptive"}}
    history = [{"role": "user", "content": "Weather?"}]
    first = client.messages.create(messages=history, **fields)
    history.append({"role": "assistant", "content": first.content})
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "Sunny"}
    history.append({"role": "user", "content": [result]})
    count = client.messages.count_tokens(
        messages=history, model="tiny", tools=[MESSAGES_TOOL], thinking={"type": "adaptive"}
    )
    client.messages.create(messages=history, **fields)
    ids = app.client.submitted[-1].prompt_token_ids
    after = app.tokenizer.decode(ids, skip_special_tokens=False).split("Weather?")[1]
    assert after.index("Rain?") < after.index('"city": "Köln"') < after.index("Sunny")
    assert count.input_tokens == len(ids)


@pytest.mark.parametrize(("thinking", "is_open"), [(None, False), ({"type": "adaptive"}, True)])
def test_thoughts_are_off_unless_asked_for(ask, thinking, is_open):
    app, _, client = ask("Hello")
    more = {"thinking": thinking} if thinking else {}
    client.messages.create(model="tiny", max_tokens=9, messages=[{"role": "user", "content": "hi"}], **more)
    prompt = app.tokenizer.decode(app.client.submitted[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("<think>\n\n</think>\n\n") != is_open


def test_a_forced_call_is_constrained(ask):
    app, first, second = ask(CALL)
    choice = {"type": "function", "name": "get_weather"}
    first.responses.create(model="tiny", input="Weather?", tools=[RESPONSES_TOOL], tool_choice=choice)
    second.messages.create(
        model="tiny",
        max_tokens=99,
        messages=[{"role": "user", "content": "Weather?"}],
        tools=[MESSAGES_TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    assert all(request.grammar is not None for request in app.client.submitted)


def test_faults_of_tools_are_told_in_each_apis_words(ask):
    _, first, second = ask("x")
    skipped = {"type": "web_search"}
    with pytest.raises(openai.BadRequestError) as caught:
        first.responses.create(
            model="tiny", input="hi", tools=[skipped, RESPONSES_TOOL | {"parameters": {"type": "array"}}]
        )
    assert caught.value.param == "tools[1].parameters"
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[1\]\.input_schema"):
        second.messages.create(
            model="tiny",
            max_tokens=9,
            messages=[{"role": "user", "content": "hi"}],
            tools=[{"type": "bash_20250124", "name": "bash"}, MESSAGES_TOOL | {"input_schema": {"type": "array"}}],
        )
