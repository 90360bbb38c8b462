"""bad_words and allowed_token_ids through every API of a daemon with the demo model."""

from collections.abc import Callable

import httpx
import openai
import pytest

from tests.support.daemon import Daemon

MODEL = "quire-demo"
TEXT = "one two three four five six seven eight nine ten, one two three four five six seven eight nine ten, one two"
USER = [{"role": "user", "content": "Which page is it?"}]


def post(daemon: Daemon, path: str, body: object) -> httpx.Response:
    return httpx.post(f"{daemon.base_url}{path}", json=body, timeout=60)


def completion(daemon: Daemon, **fields: object) -> dict:
    body = {"model": MODEL, "prompt": TEXT, "max_tokens": 30, "temperature": 0, "ignore_eos": True, **fields}
    return post(daemon, "/v1/completions", body).json()


def text_of(reply: dict) -> str:
    return reply["choices"][0]["text"]


def test_a_bad_word_is_not_in_the_answer_and_the_rest_goes_on(daemon: Daemon) -> None:
    free = text_of(completion(daemon)).split()
    bound = completion(daemon, bad_words=free[1:3])
    assert not set(free[1:3]) & set(text_of(bound).split())
    assert bound["usage"]["completion_tokens"] == 30


def test_only_allowed_tokens_are_sampled(daemon: Daemon) -> None:
    ids = post(daemon, "/tokenize", {"prompt": " one two", "add_special_tokens": False}).json()["tokens"]
    for temperature in (0, 1.3):
        reply = completion(daemon, allowed_token_ids=ids, return_token_ids=True, temperature=temperature, seed=3)
        assert set(reply["choices"][0]["token_ids"]) <= set(ids)
        assert reply["choices"][0]["finish_reason"] == "length"


def test_an_answer_ends_with_stop_where_nothing_is_left(daemon: Daemon) -> None:
    (one, *_) = post(daemon, "/tokenize", {"prompt": "e", "add_special_tokens": False}).json()["tokens"]
    reply = completion(daemon, allowed_token_ids=[one], bad_words=["eee"], return_token_ids=True)
    assert reply["choices"][0]["token_ids"] in ([one], [one, one])
    assert reply["choices"][0]["finish_reason"] == "stop"


def test_words_that_leave_nothing_to_begin_with_are_a_400(daemon: Daemon) -> None:
    (one, *_) = post(daemon, "/tokenize", {"prompt": "e", "add_special_tokens": False}).json()["tokens"]
    for more in ({}, {"prompt_logprobs": 1}, {"stream": True}, {"echo": True, "logprobs": 1, "max_tokens": 0}):
        body = {"model": MODEL, "prompt": TEXT, "allowed_token_ids": [one], "bad_words": ["e"], **more}
        reply = post(daemon, "/v1/completions", body)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == "bad_words"
        assert "leave none to sample" in reply.json()["error"]["message"]


def test_a_filter_and_a_choice_hold_together(daemon: Daemon) -> None:
    fields = {"structured_outputs": {"choice": ["red", "green", "blue"]}, "temperature": 1}
    texts = {text_of(completion(daemon, **fields, bad_words=["red", "r"], seed=seed)) for seed in range(12)}
    assert texts
    assert texts <= {"green", "blue"}


def chat(daemon: Daemon, **fields: object) -> str:
    body = {"model": MODEL, "messages": USER, "max_tokens": 12, "temperature": 0, **fields}
    return post(daemon, "/v1/chat/completions", body).json()["choices"][0]["message"]["content"]


def responses(daemon: Daemon, **fields: object) -> str:
    body = {"model": MODEL, "input": USER[0]["content"], "max_output_tokens": 12, "temperature": 0, **fields}
    (item,) = post(daemon, "/v1/responses", body).json()["output"]
    return item["content"][0]["text"]


def messages(daemon: Daemon, **fields: object) -> str:
    body = {"model": MODEL, "messages": USER, "max_tokens": 12, "temperature": 0, **fields}
    (block,) = post(daemon, "/v1/messages", body).json()["content"]
    return block["text"]


@pytest.mark.parametrize("ask", [chat, responses, messages])
def test_every_api_takes_them(daemon: Daemon, ask: Callable[..., str]) -> None:
    free = ask(daemon)
    (one, *_) = post(daemon, "/tokenize", {"prompt": "e", "add_special_tokens": False}).json()["tokens"]
    assert ask(daemon, bad_words=free.split()[:1]) != free
    assert ask(daemon, allowed_token_ids=[one]) == "e" * 12


def test_the_openai_client_sends_them_as_extra_fields(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model=MODEL, prompt=TEXT, max_tokens=5, extra_body={"allowed_token_ids": [40, 41], "bad_words": ["never"]}
    )
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 5
