"""Over a real socket: the real openai client's responses and the real anthropic client, plain and streamed."""

import asyncio
import contextlib

import anthropic
import openai
import pytest

from engine.interface.errors import EngineDead
from tests.unit.server.conftest import USER_HI, serving

TEXT = "Schöne Grüße, 日本語 😀!"


@pytest.fixture
def stack():
    """What is open until the test ends."""
    with contextlib.ExitStack() as open_ones:
        yield open_ones


@pytest.fixture
def openai_client(stack):
    """Return a function that serves a harness and gives a client of it."""
    return lambda app: stack.enter_context(
        openai.OpenAI(base_url=f"{stack.enter_context(serving(app.app))}/v1", api_key="x", max_retries=0)
    )


@pytest.fixture
def anthropic_client(stack):
    """Return a function that serves a harness and gives a client of it."""
    return lambda app: stack.enter_context(
        anthropic.Anthropic(base_url=stack.enter_context(serving(app.app)), api_key="x", max_retries=0)
    )


def test_the_openai_client_creates_and_streams_responses(harness, openai_client):
    app = harness(TEXT)
    client = openai_client(app)
    plain = client.responses.create(model="tiny", input="hi", instructions="be nice")
    assert (plain.output_text, plain.status) == (TEXT, "completed")
    events = list(client.responses.create(model="tiny", input="hi", stream=True))
    assert events[-1].response.output_text == TEXT
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with client.responses.stream(model="tiny", input=USER_HI) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == TEXT == final.output_text
    assert final.usage.output_tokens == len(app.ids(TEXT))


def test_a_response_goes_back_as_the_next_input(harness, openai_client):
    app = harness("Hello")
    client = openai_client(app)
    history = [{"role": "user", "content": "hi"}]
    first = client.responses.create(model="tiny", input=history, store=False)
    history += [item.model_dump() for item in first.output]
    reply = client.responses.with_raw_response.create(
        model="tiny", input=[*history, {"role": "user", "content": "more"}], store=False
    )
    assert "x-quire-ignored" not in reply.headers
    prompt = app.tokenizer.decode(app.client.submitted[-1].prompt_token_ids, skip_special_tokens=False)
    assert "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nmore<|im_end|>" in prompt


def test_the_openai_client_sees_errors_and_stored_responses_as_what_they_are(harness, openai_client):
    client = openai_client(harness(TEXT, engine={"fail": EngineDead("The engine died."), "fail_after": 3}))
    with pytest.raises(openai.BadRequestError, match="stores nothing"):
        client.responses.create(model="tiny", input="hi", previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError, match="stores none"):
        client.responses.retrieve("resp_1")
    events = list(client.responses.create(model="tiny", input="hi", stream=True))
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="tiny", input="hi")


def test_the_anthropic_client_creates_streams_and_counts(harness, anthropic_client):
    app = harness(TEXT)
    client = anthropic_client(app)
    ask = {"model": "tiny", "max_tokens": 99, "messages": USER_HI}
    plain = client.messages.create(**ask)
    assert (plain.content[0].text, plain.stop_reason) == (TEXT, "end_turn")
    assert plain._request_id.startswith("req-")
    with client.messages.stream(**ask) as stream:
        assert "".join(stream.text_stream) == TEXT
        final = stream.get_final_message()
    assert final.content[0].text == TEXT
    assert final.stop_reason == plain.stop_reason
    assert final.usage.output_tokens == len(app.ids(TEXT))
    count = client.messages.count_tokens(model="tiny", messages=USER_HI)
    assert count.input_tokens == plain.usage.input_tokens


# rule: Endpoints: Anthropic's clients get models in their form
def test_the_anthropic_client_lists_models(harness, anthropic_client):
    app = harness(TEXT)
    client = anthropic_client(app)
    models = list(client.models.list())
    assert [model.id for model in models] == ["tiny", "alias/tiny"]
    assert client.models.retrieve("alias/tiny") == models[1]
    assert (models[0].type, models[0].display_name, models[0].max_input_tokens) == ("model", "tiny", 256)
    assert models[0].created_at.timestamp() == app.get("/v1/models/tiny").json()["created"]
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("claude")


def test_the_async_anthropic_client_streams(harness):
    async def ask(url):
        async with anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as client:
            stream = await client.messages.create(model="tiny", max_tokens=99, messages=USER_HI, stream=True)
            return [event.type async for event in stream]

    with serving(harness(TEXT).app) as url:
        kinds = asyncio.run(ask(url))
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def test_the_anthropic_client_sees_errors_as_what_they_are(harness, anthropic_client):
    client = anthropic_client(harness(TEXT, engine={"fail": EngineDead("The engine died."), "fail_after": 3}))
    ask = {"model": "tiny", "max_tokens": 99, "messages": USER_HI}
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**ask | {"model": "claude"})
    assert caught.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**ask | {"messages": [{"role": "user", "content": "hi " * 400}]})
    with pytest.raises(anthropic.APIStatusError, match="The engine died"):
        list(client.messages.create(**ask, stream=True))
