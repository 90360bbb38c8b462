"""Limits of reasoning over HTTP: what reaches the engine and the template, and what is reported or refused."""

import pytest

from engine.interface.protocol import ThinkingBudget
from server.text.parsers import harmony
from tests.support import templates
from tests.support.chat_models import TOOLS, ChatModels, prompt_of
from tests.unit.server.conftest import USER_HI, check_error

CONTINUED = [*USER_HI, {"role": "assistant", "content": "<think>\nLet"}]


@pytest.fixture
def model(harness, tmp_path):
    return ChatModels(harness, tmp_path / "model")


def budget_of(app) -> ThinkingBudget | None:
    return app.client.submitted[-1].thinking


# rule: Tools and reasoning: A budget of reasoning tokens ends the reasoning and leaves the answer free
@pytest.mark.parametrize(
    ("fields", "template", "expected"),
    [
        ({}, templates.QWEN3_LIKE, None),
        ({"thinking_token_budget": 7}, templates.QWEN3_LIKE, (7, False)),
        ({"thinking_token_budget": 0}, templates.R1_LIKE, (0, True)),
        ({"thinking_token_budget": 7, "reasoning_effort": "none"}, templates.QWEN3_LIKE, None),  # it does not think
        (
            {"thinking_token_budget": 7, "messages": CONTINUED, "continue_final_message": True},
            templates.CHATML,
            (7, True),
        ),
        ({"reasoning_effort": "low"}, templates.R1_LIKE, (2048, True)),
        ({"reasoning_effort": "none"}, templates.R1_LIKE, (0, True)),
        ({"reasoning_effort": "medium"}, templates.QWEN3_LIKE, (8192, False)),
        ({"reasoning_effort": "high"}, templates.QWEN3_LIKE, None),
        ({"reasoning_effort": "low", "thinking_token_budget": 3}, templates.QWEN3_LIKE, (3, False)),
        ({"reasoning_effort": "low"}, templates.EFFORT_LIKE, None),
    ],
)
def test_a_budget_reaches_the_engine(model, fields, template, expected):
    app = model("Hi", template=template)
    reply = app.chat(**fields)
    assert reply.status_code == 200, reply.text
    assert "x-quire-ignored" not in reply.headers
    found = budget_of(app)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert (found.max_tokens, found.is_open, found.is_repeated) == (*expected, False)
    assert (found.start_ids, found.end_id) == (app.ids("<think>"), app.ids("</think>")[0])
    assert app.tokenizer.decode(found.forced_ids) == "\n</think>"


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"thinking_token_budget": 7}, "thinking_token_budget"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"thinking_token_budget": 7, "reasoning_effort": "low"}, "reasoning_effort, thinking_token_budget"),
    ],
)
def test_a_model_that_does_not_mark_its_reasoning_reports_the_fields(model, fields, ignored, monkeypatch):
    app = model("Hi", template=templates.MISTRAL_V3_LIKE + "{# [/THINK] #}")  # whose tags are no tokens
    assert app.chat(**fields).headers["x-quire-ignored"] == ignored
    assert budget_of(app) is None


@pytest.mark.parametrize(
    ("value", "words"), [(-1, "greater than or equal to 0"), ("x", "integer"), (2**40, "less than")]
)
def test_a_bad_budget_is_a_400_that_names_it(model, value, words):
    error = check_error(model("Hi").chat(thinking_token_budget=value), 400, "invalid_parameter")
    assert error["param"] == "thinking_token_budget"


def test_every_choice_has_its_own_budget(model):
    app = model("Hi")
    app.chat(thinking_token_budget=5, n=3)
    assert [request.thinking.max_tokens for request in app.client.submitted] == [5, 5, 5]


def test_messages_and_responses_have_it_under_their_names(model):
    app = model("Hi", template=templates.R1_LIKE)
    body = {"model": "tiny", "messages": USER_HI, "max_tokens": 9}
    reply = app.post("/v1/messages", {**body, "thinking": {"type": "enabled", "budget_tokens": 1024}})
    assert budget_of(app).max_tokens == 1024
    assert "x-quire-ignored" not in reply.headers
    reply = app.post("/v1/messages", {**body, "thinking": {"type": "disabled", "budget_tokens": 1024}})
    assert budget_of(app) is None
    assert reply.headers["x-quire-ignored"] == "thinking.budget_tokens"
    reply = app.post("/v1/messages", {**body, "thinking": {"type": "enabled", "budget_tokens": 0}})
    assert check_error_param(reply) == "thinking.budget_tokens"
    app.post("/v1/responses", {"input": "hi", "reasoning": {"effort": "minimal"}})
    assert budget_of(app).max_tokens == 512
    plain = model("Hi", template=templates.MISTRAL_V3_LIKE + "{# [/THINK] #}")
    reply = plain.post("/v1/responses", {"input": "hi", "reasoning": {"effort": "low"}})
    assert reply.headers["x-quire-ignored"] == "reasoning.effort"
    reply = plain.post("/v1/messages", {**body, "thinking": {"type": "enabled", "budget_tokens": 1024}})
    assert "thinking.budget_tokens" in reply.headers["x-quire-ignored"]


def check_error_param(reply) -> str:
    assert reply.status_code == 400
    return reply.json()["error"]["message"].partition(" ")[0].strip(":")


def test_harmony_goes_on_in_another_channel(model):
    app = model("Hi", template=templates.HARMONY_LIKE, special=harmony.TAGS)
    app.chat(thinking_token_budget=9)
    found = budget_of(app)
    decode = lambda ids: app.tokenizer.decode(ids, skip_special_tokens=False)  # noqa: E731
    assert decode(found.start_ids) == "<|channel|>analysis<|message|>"
    assert decode([found.end_id]) == "<|end|>"
    assert decode(found.forced_ids) == "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert found.is_repeated
    app.chat(thinking_token_budget=9, tools=TOOLS)
    found = budget_of(app)
    assert decode(found.forced_ids) == "<|end|><|start|>assistant<|channel|>"
    assert "analysis".startswith(decode(found.not_after_ids))


def test_a_template_that_reads_a_budget_gets_it(model):
    template = "{{ thinking_budget if thinking_budget is defined else -1 }}{{ messages[0].content }}"
    app = model("Hi", template=template)
    app.chat(thinking_token_budget=9)
    assert prompt_of(app).startswith("9")
    app.chat(reasoning_effort="low")
    assert prompt_of(app).startswith("2048")
    app.chat()
    assert prompt_of(app).startswith("-1")
