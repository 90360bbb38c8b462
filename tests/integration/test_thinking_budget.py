"""Limits of reasoning with the demo model over HTTP: streamed, with calls, schemas, several choices and drafts."""

import json
from collections.abc import Callable

import openai
import pytest

from tests.integration.test_forced_tools import COUNT
from tests.integration.test_tools import WEATHER

FLAGS = ("--speculative", "ngram", "--num-speculative-tokens", "6", "--ngram-min", "1")
ASK = {
    "model": "quire-demo",
    "messages": [{"role": "user", "content": "What is a quire?"}],
    "temperature": 0,
    "max_tokens": 200,
    "reasoning_effort": "low",
}


@pytest.fixture(params=[(), FLAGS], ids=["plain", "speculative"])
def any_client(request: pytest.FixtureRequest, client_with: Callable[..., openai.OpenAI]) -> openai.OpenAI:
    return client_with(*request.param)


def num_reasoning(usage: object) -> int:
    return usage.completion_tokens_details.reasoning_tokens


# rule: Tools and reasoning: A budget of reasoning tokens ends the reasoning and leaves the answer free
def test_reasoning_ends_at_its_budget_and_the_answer_follows(any_client: openai.OpenAI) -> None:
    free = any_client.chat.completions.create(**ASK)
    thoughts = free.choices[0].message.model_extra["reasoning"]
    most = num_reasoning(free.usage)
    lengths = []
    for budget in (0, 3, most):
        body = {"thinking_token_budget": budget}
        whole = any_client.chat.completions.create(**ASK, extra_body=body)
        (choice,) = whole.choices
        own = choice.message.model_extra.get("reasoning") or ""
        assert thoughts.startswith(own)
        assert choice.message.content
        assert num_reasoning(whole.usage) <= budget + 4  # the tags and the newline before the last
        lengths.append(len(own))
        streamed = {"content": "", "reasoning": ""}
        for chunk in any_client.chat.completions.create(**ASK, extra_body=body, stream=True):
            delta = chunk.choices[0].delta
            streamed["content"] += delta.content or ""
            streamed["reasoning"] += (delta.model_extra or {}).get("reasoning", "")
        assert streamed == {"content": choice.message.content, "reasoning": own}
    assert lengths[0] == 0 < lengths[1] < lengths[2] == len(thoughts)


def test_calls_schemas_and_choices_keep_to_it(any_client: openai.OpenAI) -> None:
    body = {"thinking_token_budget": 2}
    named = {"type": "function", "function": {"name": "zebra-count"}}
    reply = any_client.chat.completions.create(**ASK, tools=[WEATHER, COUNT], tool_choice=named, extra_body=body)
    (call,) = reply.choices[0].message.tool_calls
    assert list(json.loads(call.function.arguments)) == ["kind", "old"]
    assert num_reasoning(reply.usage) <= 6
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {**schema, "additionalProperties": False}}}
    reply = any_client.chat.completions.create(**ASK, response_format=form, extra_body=body)
    assert list(json.loads(reply.choices[0].message.content)) == ["yes"]
    assert num_reasoning(reply.usage) <= 6
    reply = any_client.chat.completions.create(**{**ASK, "temperature": 1}, seed=1, n=3, extra_body=body)
    assert num_reasoning(reply.usage) <= 18
    assert all(choice.message.content for choice in reply.choices)
