"""Budgets of reasoning, to the end: what is forced is in the answer's grammar, and is read back as reasoning."""

import pytest
from llguidance import LLMatcher, LLTokenizer

from engine.core.thinking import ThinkingState
from engine.interface.protocol import ThinkingBudget
from tests.support.chat_models import TOOLS, ChatModels
from tests.unit.server.conftest import Harness

# By form: what its template shows, the tags that are tokens, and what opens the reasoning
FORMS = {
    "gemma4": (("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>"), "<|channel>thought"),
    "cohere": (("<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>"), "<|START_THINKING|>"),
    "apertus": (("<|tools_prefix|>", "<|tools_suffix|>", "<|inner_prefix|>", "<|inner_suffix|>"), "<|inner_prefix|>"),
    "seed": (("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"), "<seed:think>"),
    "hermes": (("<tool_call>", "</tool_call>", "<think>", "</think>"), "<think>"),
}
BUDGETS = pytest.mark.parametrize("budget", [0, 1, 12, 500])


@pytest.fixture
def model(harness, tmp_path):
    return ChatModels(harness, tmp_path / "model")


def make(model: ChatModels, form: str, text: str = "Hi") -> Harness:
    tags, _ = FORMS[form]
    shown = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    return model(text, template=f"{shown}{{# {' '.join(tags)} #}}", special=tags)


def sampled(limit: ThinkingBudget | None, wanted: list[int]) -> list[int]:
    """Return the tokens of a model that would write `wanted`, which ends its reasoning, up to that end."""
    assert limit is not None
    state, found = ThinkingState(limit), []
    while limit.end_id not in found:
        token = wanted[len(found)] if state.forced_token is None else state.forced_token
        found.append(token)
        state.advance([token])
    return found


def wanted_by(app: Harness, form: str) -> list[int]:
    tags, opening = FORMS[form]
    return app.ids(f"{opening}\nI think so and so\n{tags[3]}")


@BUDGETS
@pytest.mark.parametrize("form", FORMS)
def test_what_is_forced_is_read_back_as_reasoning(model, form, budget):
    app = make(model, form)
    assert "x-quire-ignored" not in app.chat(thinking_token_budget=budget).headers
    tokens = sampled(app.client.submitted[-1].thinking, wanted_by(app, form))
    text = app.tokenizer.decode(tokens, skip_special_tokens=False)
    message = make(model, form, f"{text}The answer.").chat().json()["choices"][0]["message"]
    assert message["content"] == "The answer."
    thought = app.tokenizer.decode(app.ids("\nI think so and so")[:budget])
    assert message.get("reasoning", "") == thought.strip()


@BUDGETS
@pytest.mark.parametrize("form", FORMS)
def test_what_is_forced_is_in_the_grammar_of_required_calls(model, form, budget):
    app = make(model, form)
    reply = app.chat(thinking_token_budget=budget, tools=TOOLS, tool_choice="required")
    assert reply.status_code == 200, reply.text
    request = app.client.submitted[-1]
    tokens = sampled(request.thinking, wanted_by(app, form))
    matcher = LLMatcher(LLTokenizer(app.tokenizer.to_str()), request.grammar.source)
    assert matcher.consume_tokens(tokens), app.tokenizer.decode(tokens, skip_special_tokens=False)


def test_a_name_after_the_opening_token_is_forced_however_the_model_cuts_it(model):
    app = make(model, "gemma4")
    app.chat(thinking_token_budget=3)
    limit = app.client.submitted[-1].thinking
    state, name = ThinkingState(limit), app.ids("thought")
    state.advance(app.ids("<|channel>"))
    for token in name:
        assert (state.forced_token, state.num_free) == (token, 0)
        state.advance([token])
    assert (state.forced_token, state.num_free) == (None, 3)
