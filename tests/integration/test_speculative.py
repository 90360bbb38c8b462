"""A daemon that guesses ahead answers the real OpenAI client as one that does not, in fewer steps."""

import re
from collections.abc import Callable

import openai
import pytest

from tests.support.daemon import Daemon

MODEL = "quire-demo"
FLAGS = ("--speculative", "ngram", "--num-speculative-tokens", "6", "--ngram-min", "1")
TEXT = "one two three four five six seven eight nine ten, one two three four five six seven eight nine ten, one two"


@pytest.fixture(scope="module")
def daemons(daemon_with: Callable[..., Daemon]) -> tuple[Daemon, Daemon]:
    """One that speculates and one that does not."""
    return daemon_with(*FLAGS), daemon_with()


@pytest.fixture(scope="module")
def clients(client_with: Callable[..., openai.OpenAI]) -> tuple[openai.OpenAI, openai.OpenAI]:
    """A client of each."""
    return client_with(*FLAGS), client_with()


def metric(daemon: Daemon, name: str) -> float:
    (value,) = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", daemon.get("/metrics").text, re.MULTILINE)
    return float(value)


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0},
        {"temperature": 0.2, "seed": 5, "n": 3},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0, "stop": ["eight"]},
        {"temperature": 0, "frequency_penalty": 0.5},
    ],
)
def test_answers_and_usage_are_equal_streamed_and_whole(
    clients: tuple[openai.OpenAI, openai.OpenAI], more: dict[str, object]
) -> None:
    request = {"model": MODEL, "prompt": TEXT, "max_tokens": 60, "extra_body": {"ignore_eos": True}} | more
    answers = []
    for client in clients:
        whole = client.completions.create(**request)
        pieces: dict[int, str] = {}
        num_logprobs: dict[int, int] = {}
        usage = None
        for chunk in client.completions.create(**request, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                pieces[choice.index] = pieces.get(choice.index, "") + choice.text
                if choice.logprobs is not None:
                    num_logprobs[choice.index] = num_logprobs.get(choice.index, 0) + len(choice.logprobs.tokens)
        assert usage is not None
        assert [pieces[choice.index] for choice in whole.choices] == [choice.text for choice in whole.choices]
        assert usage.completion_tokens == whole.usage.completion_tokens
        if "logprobs" in more:
            assert num_logprobs == {0: whole.usage.completion_tokens}
            assert len(whole.choices[0].logprobs.token_logprobs) == whole.usage.completion_tokens
        if "stop" not in more:
            assert usage.completion_tokens == 60 * more.get("n", 1)
        answers.append(
            ([(choice.text, choice.finish_reason) for choice in whole.choices], whole.usage.completion_tokens)
        )
    assert answers[0] == answers[1]


def test_a_chat_streams_every_token_though_several_come_at_once(clients: tuple[openai.OpenAI, openai.OpenAI]) -> None:
    messages = [{"role": "user", "content": f"Repeat this: {TEXT}"}]
    request = {"model": MODEL, "messages": messages, "max_completion_tokens": 50, "temperature": 0}
    answers = []
    for client in clients:
        whole = client.chat.completions.create(**request)
        chunks = client.chat.completions.create(**request, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        answers.append((text, whole.usage))
    assert answers[0] == answers[1]


def test_metrics_tell_what_was_guessed_and_what_was_right(
    daemons: tuple[Daemon, Daemon], clients: tuple[openai.OpenAI, openai.OpenAI]
) -> None:
    request = {"model": MODEL, "prompt": TEXT, "max_tokens": 80, "temperature": 0, "extra_body": {"ignore_eos": True}}
    steps = [-metric(daemon, "quire_iteration_tokens_count") for daemon in daemons]
    for client in clients:
        client.completions.create(**request)
    speculating, plain = daemons
    for prefix in ("quire_", "vllm:"):
        guessed = metric(speculating, f"{prefix}spec_decode_num_draft_tokens_total")
        accepted = metric(speculating, f"{prefix}spec_decode_num_accepted_tokens_total")
        assert 0 < accepted <= guessed
        assert 0 < metric(speculating, f"{prefix}spec_decode_num_drafts_total") <= guessed
        assert metric(plain, f"{prefix}spec_decode_num_draft_tokens_total") == 0
    for i, daemon in enumerate(daemons):
        steps[i] += metric(daemon, "quire_iteration_tokens_count")
    assert 0 < steps[0] < steps[1]
