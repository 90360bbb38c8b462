"""instructor, in the modes that its users choose among."""

import instructor
import openai
import pytest

from tests.clients.questions import GEORGE, MODEL, PERSON, Person

ASK = {"model": MODEL, "messages": [{"role": "user", "content": PERSON}], "temperature": 0, "response_model": Person}


@pytest.fixture(params=["TOOLS", "JSON", "JSON_SCHEMA"])
def client(request, base_url):
    openai_client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    return instructor.from_openai(openai_client, mode=instructor.Mode[request.param])


def test_an_answer_is_an_object(client):
    assert client.chat.completions.create(**ASK, max_retries=0).model_dump() == GEORGE.model_dump()


def test_a_stream_is_an_object_that_grows(client):
    parts = list(client.chat.completions.create_partial(**ASK, max_retries=0))
    assert parts[-1].model_dump() == GEORGE.model_dump()
