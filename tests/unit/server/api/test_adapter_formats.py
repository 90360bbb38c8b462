"""text.format and output_config.format: parse() of both real clients, and a schema that does not compile."""

import contextlib

import anthropic
import openai
import pydantic
import pytest

from tests.unit.server.conftest import serving


class Fox(pydantic.BaseModel):
    """What the scripted engine answers."""

    jumps: bool
    dogs: list[str]


ANSWER = '{"jumps": true, "dogs": ["lazy"]}'
SCHEMA = {"type": "object", "properties": {"jumps": {"type": "boolean"}}}


@pytest.fixture
def clients(harness):
    with contextlib.ExitStack() as stack:
        app = harness(ANSWER)
        url = stack.enter_context(serving(app.app))
        yield (
            app,
            stack.enter_context(openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)),
            stack.enter_context(anthropic.Anthropic(base_url=url, api_key="x", max_retries=0)),
        )


def test_parse_gives_the_model_that_was_asked_for(clients):
    app, first, second = clients
    parsed = first.responses.parse(model="tiny", input="Fox?", text_format=Fox)
    assert parsed.output_parsed == Fox(jumps=True, dogs=["lazy"])
    assert parsed.text.format.type == "json_schema"
    ask = {"model": "tiny", "max_tokens": 99, "messages": [{"role": "user", "content": "Fox?"}]}
    assert second.messages.parse(**ask, output_format=Fox).parsed_output == Fox(jumps=True, dogs=["lazy"])
    for request in app.client.submitted:
        assert "jumps" in request.grammar.source


def test_a_schema_that_does_not_compile_is_told_in_each_apis_words(clients):
    _, first, second = clients
    schema = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        first.responses.create(
            model="tiny", input="x", text={"format": {"type": "json_schema", "name": "n", "schema": schema}}
        )
    assert caught.value.param == "text.format.schema"
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema"):
        second.messages.create(
            model="tiny",
            max_tokens=9,
            messages=[{"role": "user", "content": "x"}],
            output_config={"format": {"type": "json_schema", "schema": schema}},
        )
