"""Scoring a prompt through the real client and engine gives what generating it gave."""

import openai
import pytest

MODEL = "quire-demo"


def generate(client: openai.OpenAI, **more: object) -> openai.types.CompletionChoice:
    extra_body = {"ignore_eos": True, "return_token_ids": True}
    return client.completions.create(
        model=MODEL, prompt="A quire is a", max_tokens=24, temperature=0, logprobs=3, extra_body=extra_body, **more
    ).choices[0]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_generated_tokens_are_scored_as_they_were_generated(client: openai.OpenAI, max_tokens: int) -> None:
    made = generate(client)
    ids = made.model_extra["prompt_token_ids"] + made.model_extra["token_ids"]
    for _ in range(2):  # the second time the prompt is in the prefix cache
        reply = client.completions.create(
            model=MODEL, prompt=ids, max_tokens=max_tokens, temperature=0, logprobs=3, echo=True, seed=1234
        )
        scored = reply.choices[0].logprobs
        assert reply.usage.completion_tokens == max_tokens
        assert len(scored.token_logprobs) == len(ids) + max_tokens
        assert scored.token_logprobs[0] is None
        start, end = len(made.model_extra["prompt_token_ids"]), len(ids)
        assert scored.token_logprobs[start:end] == pytest.approx(made.logprobs.token_logprobs, abs=1e-4)
        assert scored.tokens[start:end] == made.logprobs.tokens
        for value, tops in zip(scored.token_logprobs[start:end], scored.top_logprobs[start:end], strict=True):
            assert value == max(tops.values())  # as lm-eval asks whether a token was the greedy one


# rule: Fields: Log-probabilities have both of OpenAI's forms
def test_a_chosen_tokens_logprob_is_its_entry_among_the_top_ones(client: openai.OpenAI) -> None:
    made = generate(client)
    for token, value, tops in zip(
        made.logprobs.tokens, made.logprobs.token_logprobs, made.logprobs.top_logprobs, strict=True
    ):
        assert tops[token] == value
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=12,
        temperature=0,
        logprobs=True,
        top_logprobs=4,
        extra_body={"ignore_eos": True},
    )
    for entry in chat.choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 4
        assert (entry.token, entry.logprob, entry.bytes) == (
            entry.top_logprobs[0].token,
            entry.top_logprobs[0].logprob,
            entry.top_logprobs[0].bytes,
        )


def test_prompt_logprobs_of_a_chat_cover_its_rendered_prompt(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=2,
        extra_body={"prompt_logprobs": 1, "return_token_ids": True},
    )
    ids, shown = chat.model_extra["prompt_token_ids"], chat.model_extra["prompt_logprobs"]
    assert len(shown) == len(ids)
    assert all(str(id_) in entry for id_, entry in zip(ids[1:], shown[1:], strict=True))


def test_scoring_beside_others_changes_nothing_for_them(client: openai.OpenAI) -> None:
    alone = generate(client).text
    stream = client.completions.create(
        model=MODEL, prompt="A quire is a", max_tokens=24, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    text = ""
    for chunk in stream:
        text += chunk.choices[0].text
        if chunk.choices[0].finish_reason is None:
            client.completions.create(model=MODEL, prompt=list(range(40, 90)), max_tokens=0, echo=True, logprobs=1)
    assert text == alone
