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

pytestmark = pytest.mark.slow

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


PATCH = '*** Begin Patch\n*** Add File: "ä".txt\n+\\ 😀\n*** End Patch\n'
PATCH_CALL = f"<tool_call>\n{json.dumps({'name': 'apply_patch', 'arguments': {'input': PATCH}})}\n</tool_call>"
LARK = 'start: "*** Begin Patch" /(?s:.*)/ "*** End Patch" "\\n"'
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": LARK}
PATCH_TOOL = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": GRAMMAR}


# rule: Tools and reasoning: Codex's custom tools are called with plain text
@pytest.mark.parametrize("tokens_per_delta", [1, 7])
def test_a_custom_tool_is_called_with_plain_text(ask, tokens_per_delta):
    _, client, _ = ask("Let me see." + PATCH_CALL + CALL, tokens_per_delta=tokens_per_delta)
    fields = {"model": "tiny", "input": "Write it.", "tools": [PATCH_TOOL, RESPONSES_TOOL]}
    answers = [client.responses.create(**fields)]
    with client.responses.stream(**fields) as stream:
        events = list(stream)
        answers.append(stream.get_final_response())
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done.input == PATCH
    assert len(deltas) > 3
    for answer in answers:
        _, custom, call = answer.output
        assert (custom.type, custom.name, custom.input) == ("custom_tool_call", "apply_patch", PATCH)
        assert custom.call_id.startswith("call_")
        assert custom.id.startswith("ctc_")
        assert (call.type, json.loads(call.arguments)) == ("function_call", {"city": "Köln"})
        assert answer.tools[0].to_dict() == PATCH_TOOL


def test_a_custom_tool_is_a_function_with_one_string_to_the_model(ask):
    app, client, _ = ask("ok")
    reply = client.responses.with_raw_response.create(model="tiny", input="hi", tools=[PATCH_TOOL])
    assert reply.headers["x-quire-ignored"] == "tools[0].format"  # the model reads the grammar; nothing enforces it
    prompt = app.tokenizer.decode(app.client.submitted[-1].prompt_token_ids, skip_special_tokens=False)
    assert '"name": "apply_patch"' in prompt
    assert "Edits files.\\n\\nThe input must match this Lark grammar:" in prompt
    assert '"required": ["input"]' in prompt


def test_the_result_of_a_custom_tool_goes_back(ask):
    app, client, _ = ask(PATCH_CALL)
    history = [{"role": "user", "content": "Write it."}]
    (call,) = client.responses.create(model="tiny", input=history, tools=[PATCH_TOOL]).output
    history += [call.to_dict(), {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}]
    reply = client.responses.with_raw_response.create(model="tiny", input=history, tools=[PATCH_TOOL])
    assert reply.headers["x-quire-ignored"] == "tools[0].format"
    prompt = app.tokenizer.decode(app.client.submitted[-1].prompt_token_ids, skip_special_tokens=False)
    assert json.dumps({"input": PATCH}, ensure_ascii=False) in prompt
    assert "Done." in prompt


def test_a_custom_tool_can_be_forced_and_its_regular_expression_holds(ask):
    app, client, _ = ask('<tool_call>\n{"name": "sum", "arguments": {"input": "1+2"}}\n</tool_call>')
    tool = {"type": "custom", "name": "sum", "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9+]+"}}
    choice = {"type": "custom", "name": "sum"}
    reply = client.responses.with_raw_response.create(model="tiny", input="hi", tools=[tool], tool_choice=choice)
    (call,) = reply.parse().output
    assert (call.name, call.input) == ("sum", "1+2")
    assert "x-quire-ignored" not in reply.headers
    assert "^(?:[0-9+]+)$" in app.client.submitted[-1].grammar.source


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "custom"}, "tools[0].name"),
        ({"type": "custom", "name": "a b"}, "tools[0].name"),
        ({"type": "custom", "name": "f", "format": {"type": "xml"}}, "tools[0].format.type"),
        (
            {"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "lark"}},
            "tools[0].format.definition",
        ),
        ({"type": "custom", "name": "f", "format": {**GRAMMAR, "syntax": "gbnf"}}, "tools[0].format.syntax"),
        (
            {"type": "custom", "name": "f", "format": {**GRAMMAR, "definition": "x" * 65_537}},
            "tools[0].format.definition",
        ),
    ],
)
def test_a_faulty_custom_tool_is_named(ask, tool, param):
    _, client, _ = ask("ok")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="tiny", input="hi", tools=[tool])
    assert caught.value.param == param


def test_a_custom_call_that_is_cut_off_has_the_input_so_far(ask):
    _, client, _ = ask(PATCH_CALL)
    answer = client.responses.create(model="tiny", input="hi", tools=[PATCH_TOOL], max_output_tokens=90)
    (call,) = answer.output
    assert answer.status == call.status == "incomplete"
    assert call.input
    assert PATCH.startswith(call.input)
