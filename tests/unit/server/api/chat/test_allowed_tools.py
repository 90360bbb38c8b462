"""tool_choice of the type allowed_tools: the model sees and may call the listed tools alone; chat and Responses."""

import pytest

from server.api.chat.tools import plan_tools
from server.api.ignored_fields import ignored_fields
from server.api.schemas import ChatBody
from tests.support.chat_models import CALL, NOW_CALL, TOOLS, ChatModels, prompt_of
from tests.unit.server.conftest import check_error

NAMES = ("get_weather", "now")
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]  # as Responses has them


def allowed(*names: str, mode: str = "auto") -> dict:
    """Return a choice in the form of chat."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.fixture
def model(harness, tmp_path):
    return ChatModels(harness, tmp_path / "model")


def ask(app: ChatModels, path: str, *names: str, mode: str):
    """Ask at chat or at Responses with two tools, of which the model may call some."""
    if path == "chat":
        return app.chat(tools=TOOLS, tool_choice=allowed(*names, mode=mode))
    choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}
    return app.post("/v1/responses", {"model": "tiny", "input": "hi", "tools": FLAT, "tool_choice": choice})


@pytest.mark.parametrize("path", ["chat", "responses"])
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_model_sees_the_allowed_tools_alone(model, path, mode):
    app = model(NOW_CALL)
    for names in (NAMES, NAMES[:1], NAMES[1:]):
        assert ask(app, path, *names, mode=mode).status_code == 200
        assert [name for name in NAMES if f'"name": "{name}"' in prompt_of(app)] == list(names)


@pytest.mark.parametrize("path", ["chat", "responses"])
def test_the_mode_required_is_a_grammar_of_the_allowed_tools(model, path):
    app = model(NOW_CALL)
    ask(app, path, "now", mode="auto")
    assert app.client.submitted[-1].grammar is None
    ask(app, path, "now", mode="required")
    assert "now" in app.client.submitted[-1].grammar.source
    assert "get_weather" not in app.client.submitted[-1].grammar.source
    ask(app, path, *NAMES, mode="required")
    assert all(name in app.client.submitted[-1].grammar.source for name in NAMES)


def test_an_allowed_tool_is_called(model):
    for mode in ("auto", "required"):
        (choice,) = model(CALL).chat(tools=TOOLS, tool_choice=allowed("get_weather", mode=mode)).json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


def test_several_calls_may_be_made_where_they_may_without_a_choice(model):
    app = model(CALL + NOW_CALL)
    for more, number in (({}, 2), ({"parallel_tool_calls": False}, 1)):
        (choice,) = app.chat(tools=TOOLS, tool_choice=allowed(*NAMES), **more).json()["choices"]
        assert len(choice["message"]["tool_calls"]) == number


def test_a_constraint_is_reported_beside_the_mode_required_alone(model):
    app = model(CALL)
    for mode, header in (("auto", None), ("required", "structured_outputs")):
        reply = app.chat(tools=TOOLS, tool_choice=allowed(*NAMES, mode=mode), structured_outputs={"regex": "a"})
        assert reply.headers.get("x-quire-ignored") == header


def test_another_choice_with_a_list_of_allowed_tools_beside_it_is_what_its_type_says():
    choice = {"type": "function", "function": {"name": "now"}, "allowed_tools": {"mode": "auto"}}
    body = chat_body(TOOLS, choice, structured_outputs={"regex": "a"})
    assert plan_tools(body).must_call
    assert ignored_fields(body) == ["structured_outputs"]


class CountedName(str):
    """A function's name that counts how often a name is compared."""

    __slots__ = ()
    num_compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedName.num_compared += 1
        return str.__eq__(self, other)


def test_a_name_that_is_listed_a_thousand_times_is_not_compared_with_every_tool_a_thousand_times():
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(32)]
    plan = plan_tools(chat_body(tools, allowed(*(CountedName("f0") for _ in range(1000)))))
    assert [spec.name for spec in plan.callable] == ["f0"]
    assert 0 < CountedName.num_compared < 4000


def chat_body(tools: list[dict], choice: dict, **more: object) -> ChatBody:
    """Return a checked body."""
    messages = [{"role": "user", "content": "hi"}]
    return ChatBody.model_validate({"model": "m", "messages": messages, "tools": tools, "tool_choice": choice, **more})


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (allowed("f"), "tool_choice names the function 'f', which is not among the tools."),
        (allowed(), "a list of at least one tool"),
        (allowed("now", mode="none"), "the mode auto or required"),
        (allowed("now", mode=["auto"]), "the mode auto or required"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "tool_choice.allowed_tools must have the mode"),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "name": "now"}]},
            },
            'tool_choice.allowed_tools.tools[0] must be {"type": "function", "function": {"name": …}}.',
        ),
    ],
)
def test_a_faulty_choice_is_named(model, choice, words):
    error = check_error(model().chat(tools=TOOLS, tool_choice=choice), 400, "invalid_parameter")
    assert error["param"] == "tool_choice"
    assert words in error["message"]


def test_allowed_tools_need_tools(model):
    error = check_error(model().chat(tool_choice=allowed("now")), 400, "invalid_parameter")
    assert (error["param"], error["message"]) == ("tools", "tool_choice is an object, but there are no tools.")


def test_a_function_that_is_no_tool_is_named_at_responses_and_hosted_tools_are_left_out(model):
    app = model(NOW_CALL)
    error = check_error(ask(app, "responses", "now", "f", mode="auto"), 400, "invalid_parameter")
    assert error["message"] == "tool_choice names the function 'f', which is not among the tools."
    listed = [{"type": "web_search"}, {"type": "function", "name": "now"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": listed}
    body = {"model": "tiny", "input": "hi", "tools": [*FLAT, {"type": "web_search"}], "tool_choice": choice}
    assert app.post("/v1/responses", body).status_code == 200
    assert "get_weather" not in prompt_of(app)
