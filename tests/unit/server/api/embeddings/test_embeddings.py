"""/v1/embeddings: OpenAI's form and client, every form of input, limits, and models that make none."""

import base64

import msgspec
import numpy as np
import openai
import pytest
from openai.types import CreateEmbeddingResponse

from engine.interface.errors import EngineError, Overloaded
from server.api.limits import RequestLimits
from tests.support.client_types import check_type
from tests.support.embedding_folder import PROMPTS, write_embedding_files
from tests.support.fakes import READY, fake_embedding
from tests.unit.server.api.embeddings.conftest import EMBEDDINGS, TEXTS, embed
from tests.unit.server.conftest import (
    CHAT,
    COMPLETIONS,
    USER_HI,
    Harness,
    check_error,
    serving,
    write_model_folder,
)


def expected(app: Harness, dimensions: int = READY.hidden_size) -> list[np.ndarray]:
    cut = [fake_embedding(request)[:dimensions] for request in app.client.submitted]
    return [vector / np.linalg.norm(vector) for vector in cut]


def in_order(app: Harness) -> None:
    app.client.submitted.sort(key=lambda request: int(request.request_id.rsplit("-", 1)[1]))


# rule: Endpoints: Embeddings answer in OpenAI's form, as numbers and in base64
def test_an_embedding_has_openais_form(app):
    running = app(num_cached_tokens=2)
    reply = embed(running)
    assert reply.status_code == 200, reply.text
    body = check_type(CreateEmbeddingResponse, reply.json(), extras=frozenset({"prompt_tokens_details"}))
    in_order(running)
    assert [entry.index for entry in body.data] == [0, 1, 2]
    assert body.model == "tiny"
    for entry, wanted in zip(body.data, expected(running), strict=True):
        np.testing.assert_allclose(entry.embedding, wanted, atol=1e-6)
        assert np.linalg.norm(entry.embedding) == pytest.approx(1, abs=1e-6)
    num_tokens = sum(len(running.ids(text)) for text in TEXTS)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "prompt_tokens_details": {"cached_tokens": 6}}
    assert reply.json()["usage"] == usage


# rule: Endpoints: Embeddings answer in OpenAI's form, as numbers and in base64
def test_the_openai_client_reads_both_formats(app):
    running = app()
    with serving(running.app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        default = client.embeddings.create(model="tiny", input=TEXTS)  # base64, which it decodes
        floats = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
        raw = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="base64")
        short = client.embeddings.create(model="tiny", input="fox", dimensions=3)
    assert [entry.embedding for entry in default.data] == [entry.embedding for entry in floats.data]  # bit-equal
    assert [np.frombuffer(base64.b64decode(entry.embedding), "<f4").tolist() for entry in raw.data] == [
        entry.embedding for entry in floats.data
    ]
    assert len(short.data[0].embedding) == 3
    assert np.linalg.norm(short.data[0].embedding) == pytest.approx(1, abs=1e-6)


# rule: Fields: `input` is a text, a list of texts, a list of ids or a list of lists of ids
@pytest.mark.parametrize("form", ["text", "texts", "ids", "lists of ids"])
def test_every_form_of_input_is_taken(app, form):
    running = app()
    ids = [running.ids(text) for text in TEXTS]
    wanted = {"text": [ids[0]], "texts": ids, "ids": [ids[1]], "lists of ids": ids}[form]
    given = {"text": TEXTS[0], "texts": TEXTS, "ids": ids[1], "lists of ids": ids}[form]
    reply = embed(running, input=given, encoding_format="base64")
    assert reply.status_code == 200
    assert len(reply.json()["data"]) == len(wanted)
    in_order(running)
    assert [request.prompt_token_ids for request in running.client.submitted] == wanted


# rule: Fields: `input` is a text, a list of texts, a list of ids or a list of lists of ids
def test_langchains_token_arrays_are_taken_as_they_are(app):
    running = app()
    body = {"input": [[9, 8, 7], [6, 5]], "model": "tiny", "encoding_format": "base64"}
    assert len(running.post(EMBEDDINGS, body).json()["data"]) == 2
    assert sorted(request.prompt_token_ids for request in running.client.submitted) == [[6, 5], [9, 8, 7]]


# rule: Fields: `input` is a text, a list of texts, a list of ids or a list of lists of ids
def test_texts_are_encoded_as_transformers_does(app, embedder):
    from transformers import AutoTokenizer

    running = app()
    theirs = AutoTokenizer.from_pretrained(embedder)(TEXTS)["input_ids"]
    embed(running)
    in_order(running)
    assert [request.prompt_token_ids for request in running.client.submitted] == theirs
    assert {ids[-1] for ids in theirs} == {running.tokenizer.token_to_id("<|endoftext|>")}


# rule: Fields: `dimensions`, `encoding_format` and `prompt_name` act
@pytest.mark.parametrize("dimensions", [1, 5, READY.hidden_size])
def test_dimensions_cut_and_renormalise(app, dimensions):
    running = app()
    data = embed(running, dimensions=dimensions).json()["data"]
    in_order(running)
    for entry, wanted in zip(data, expected(running, dimensions), strict=True):
        assert len(entry["embedding"]) == dimensions
        np.testing.assert_allclose(entry["embedding"], wanted, atol=1e-6)


# rule: Fields: `dimensions`, `encoding_format` and `prompt_name` act
def test_a_prompt_of_the_model_goes_before_a_text(app):
    running = app()
    embed(running, input="fox", prompt_name="query")
    embed(running, input="fox", prompt_name="")
    embed(running, input="fox")
    first, none, default = (request.prompt_token_ids for request in running.client.submitted)
    assert first == running.ids(PROMPTS["query"] + "fox")
    assert none == default == running.ids("fox")
    error = check_error(embed(running, prompt_name="title"), 400, "invalid_parameter")
    assert error["param"] == "prompt_name"
    assert "query, document" in error["message"]
    check_error(embed(running, input=[[1, 2]], prompt_name="query"), 400, "invalid_parameter")


# rule: Fields: `dimensions`, `encoding_format` and `prompt_name` act
def test_a_models_default_prompt_goes_before_texts_alone(harness, tmp_path):
    folder = write_model_folder(tmp_path / "m")
    write_embedding_files(folder, default_prompt="query")
    running = harness(folder=folder)
    embed(running, input="fox")
    embed(running, input="fox", prompt_name="document")
    embed(running, input=[[5, 6]])
    found = [request.prompt_token_ids for request in running.client.submitted]
    assert found == [running.ids(PROMPTS["query"] + "fox"), running.ids("fox"), [5, 6]]


def test_salt_priority_and_unknown_fields(app):
    running = app()
    reply = embed(running, input="fox", cache_salt="s", priority=-3, user="me", truncate_prompt_tokens=5)
    assert reply.headers["x-quire-ignored"] == "truncate_prompt_tokens"
    (request,) = running.client.submitted
    assert (request.cache_salt, request.priority, request.pooling) == ("s", -3, "last")


# rule: Limits: Embeddings: 2,048 inputs, each within the context, tokens in all, no more at once than the engine
#     holds
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": None}, "input", "must be"), ({"input": []}, "input", "must be"), ({"input": [[]]}, "input", "must"),
        ({"input": ["a", 5]}, "input", "must be"), ({"input": [1.5]}, "input", "must be"),
        ({"input": ["a"] * 2049}, "input", "2048"), ({"input": [5, 512]}, "input", "511"),
        ({"input": [[-1]]}, "input", "-1"), ({"encoding_format": "int8"}, "encoding_format", "base64"),
        ({"dimensions": 9}, "dimensions", "8"), ({"dimensions": 0}, "dimensions", "1"),
        ({"dimensions": True}, "dimensions", "integer"), ({"user": 5}, "user", "string"),
        ({"timeout": 0}, "timeout", "greater"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_is_named(app, fields, param, words):
    error = check_error(embed(app(), **fields), 400, "invalid_parameter")
    assert error["param"] == param
    assert words in error["message"]


def test_a_missing_input_and_an_unknown_model_are_named(app):
    error = check_error(app().post(EMBEDDINGS, {"model": "tiny"}), 400, "invalid_parameter")
    assert error["message"] == "input is required."
    check_error(embed(app(), model="other"), 404, "model_not_found")


# rule: Limits: Embeddings: 2,048 inputs, each within the context, tokens in all, no more at once than the engine
#     holds
@pytest.mark.parametrize("given", [[[5] * 257], "fox " * 400, ["fox", "fox " * 9000]])
def test_an_input_longer_than_the_context_is_refused(app, given):
    running = app()
    error = check_error(embed(running, input=given), 400, "context_length_exceeded")
    assert "256" in error["message"]
    assert error["param"] == "input"
    assert running.client.submitted == []
    assert embed(running, input=[[5] * 256]).status_code == 200


# rule: Limits: Embeddings: 2,048 inputs, each within the context, tokens in all, no more at once than the engine
#     holds
def test_too_many_tokens_in_all_are_refused(app, monkeypatch):
    monkeypatch.setattr(RequestLimits, "prompt_tokens_of", lambda self, max_model_len: 10)
    running = app()
    assert embed(running, input=[[5] * 5, [6] * 5]).status_code == 200
    error = check_error(embed(running, input=[[5] * 5, [6] * 6]), 400, "invalid_parameter")
    assert "11" in error["message"]
    assert "10" in error["message"]


def test_an_empty_text_without_an_end_token_has_nothing_to_embed(harness, app, tmp_path):
    folder = write_model_folder(tmp_path / "m")
    write_embedding_files(folder)
    error = check_error(embed(harness(folder=folder), input=["fox", ""]), 400, "invalid_parameter")
    assert "input[1]" in error["message"]
    assert embed(app(), input="").status_code == 200  # the end token alone, as in transformers


# rule: Fields: Only embedding models and `--pooling` give embeddings; only models with a head give text
def test_a_generator_makes_embeddings_only_if_told_how(harness):
    error = check_error(embed(harness()), 400, "unsupported_feature")
    assert error["param"] == "model"
    assert "--pooling" in error["message"]
    for kind in ("last", "mean"):
        running = harness(pooling=kind)
        assert embed(running, input="fox").status_code == 200
        assert [request.pooling for request in running.client.submitted] == [kind]
        assert running.complete().status_code == 200


# rule: Fields: Only embedding models and `--pooling` give embeddings; only models with a head give text
def test_a_model_without_a_head_generates_nothing(app):
    running = app(ready=msgspec.structs.replace(READY, can_generate=False))
    assert embed(running).status_code == 200
    for path, body in (
        (CHAT, {"messages": USER_HI}),
        (COMPLETIONS, {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
    ):
        error = check_error(running.post(path, body), 400, "unsupported_feature")
        assert "/v1/embeddings" in error["message"]
    reply = running.post("/v1/messages", {"model": "tiny", "max_tokens": 5, "messages": USER_HI})
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert running.post("/tokenize", {"prompt": "a"}).status_code == 200


def test_errors_of_the_engine_are_answers(app):
    check_error(embed(app(fail=EngineError("It broke."))), 500, "engine_error")
    check_error(embed(app(fail=Overloaded("full"))), 429, "overloaded")
    check_error(embed(app(ready=None)), 503, "not_ready")
    full = app()
    full.client.is_full = True
    check_error(embed(full), 429, "overloaded")


def test_hidden_states_that_are_no_numbers_are_an_error_and_not_null(app, monkeypatch):
    nan = np.full(READY.hidden_size, np.nan, dtype=np.float32)
    monkeypatch.setattr("tests.support.fakes.fake_embedding", lambda request: nan)
    error = check_error(embed(app()), 500, "engine_error")
    assert "finite" in error["message"]


def test_what_was_embedded_is_in_the_log_and_the_metrics(app, caplog):
    running = app(num_cached_tokens=1)
    with caplog.at_level("INFO", logger="quire.access"):
        embed(running)
    num_tokens = sum(len(running.ids(text)) for text in TEXTS)
    assert f"in={num_tokens} cached=3 out=0 stop" in caplog.text
    histograms = running.metrics.drain().histograms
    assert sum(histograms["e2e_request_latency_seconds"].counts) == 3
    assert "time_to_first_token_seconds" not in histograms
