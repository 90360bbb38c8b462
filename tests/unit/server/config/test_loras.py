"""Adapters are models by name: in the list, in every endpoint that takes a model, and in what the engine is asked."""

import pytest

from tests.unit.server.conftest import check_error

NAMES = ["sql", "org/poems"]
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
}


@pytest.fixture
def app(harness):
    return harness(lora_names=NAMES)


def test_adapters_are_listed_behind_the_models_own_names(app):
    cards = app.get("/v1/models").json()["data"]
    shown = [(card["id"], card["root"], card["parent"]) for card in cards]
    assert shown == [
        ("tiny", "tiny", None),
        ("alias/tiny", "tiny", None),
        ("sql", "tiny", "tiny"),
        ("org/poems", "tiny", "tiny"),
    ]
    assert app.get("/v1/models/org/poems").json() == cards[3]


# rule: Endpoints: An adapter is a model by its name, and answers as the model with its weights merged
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("name", "index"), [("sql", 1), ("org/poems", 2), ("tiny", 0), ("alias/tiny", 0)])
def test_the_engine_is_asked_for_the_adapter_of_that_name(app, path, name, index):
    reply = app.post(path, {**BODIES[path], "model": name})
    assert (reply.status_code, reply.json()["model"]) == (200, name)
    assert app.client.submitted[0].lora_index == index
    assert app.client.submitted[0].cache_salt == ""


@pytest.mark.parametrize("path", BODIES)
def test_streams_and_all_choices_have_the_adapter(app, path):
    fields = {"n": 2} if path in ("/v1/chat/completions", "/v1/completions") else {}
    reply = app.post(path, {**BODIES[path], **fields, "model": "sql", "stream": True})
    assert reply.status_code == 200
    assert '"model":"sql"' in reply.text
    assert {request.lora_index for request in app.client.submitted} == {1}
    assert len(app.client.submitted) == fields.get("n", 1)


# rule: Endpoints: An adapter is a model by its name, and answers as the model with its weights merged
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "hi"}),
        ("/tokenize", {"messages": MESSAGES}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/chat/completions/render", {"messages": MESSAGES}),
        ("/v1/completions/render", {"prompt": "hi"}),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ],
)
def test_what_only_counts_tokens_knows_the_names_too(app, path, body):
    assert app.post(path, {**body, "model": "org/poems"}).status_code == 200
    assert app.post(path, {**body, "model": "prose"}).status_code == 404


def test_another_name_is_told_which_there_are(app):
    error = check_error(app.post("/v1/completions", {"prompt": "a", "model": "sq"}), 404, "model_not_found")
    assert "tiny, alias/tiny, sql, org/poems" in error["message"]
