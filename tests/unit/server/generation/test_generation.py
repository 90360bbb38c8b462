"""CompletionStream: choices merged, counted and closed."""

import asyncio
import time

import pytest

from engine.interface.errors import EngineDead, RequestAborted
from engine.interface.metrics import Metrics
from engine.interface.protocol import SamplingParams
from server.api.collected import collect_choices
from server.errors import DeadlineExceeded
from server.generation.events import ChoiceFinished
from server.generation.generation import CompletionStream
from server.generation.spec import GenerationSpec
from server.text.tokenizer import load_tokenizer
from tests.support.fakes import FakeEngineClient


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return load_tokenizer(model_folder)


def spec(**fields) -> GenerationSpec:
    fields = {"prompts": ((1, 2),), "n": 1, "params": SamplingParams(max_tokens=100, seed=5), **fields}
    return GenerationSpec(arrival_s=time.monotonic(), **fields)


def run(client, tokenizer, *, metrics=None, stop_after=None, **fields):
    """Return the events and the stats; leave after `stop_after` events."""
    generation = CompletionStream(
        spec(**fields), request_id="r", client=client, tokenizer=tokenizer, metrics=metrics or Metrics()
    )

    async def collect():
        events, source = [], generation.batches()
        async for batch in source:
            events += batch
            if stop_after is not None and len(events) >= stop_after:
                break
        await source.aclose()
        return events

    return asyncio.run(collect()), generation.stats()


# rule: Fields: `n` gives as many choices, each drawn on its own
def test_every_choice_gets_its_own_seed_and_prompt(tokenizer):
    client = FakeEngineClient(tokenizer.encode("Hello"))
    events, stats = run(client, tokenizer, prompts=((1, 2), (3,)), n=3)
    submitted = sorted(client.submitted, key=lambda request: request.request_id)
    assert [request.params.seed for request in submitted] == [5, 6, 7, 8, 9, 10]
    assert [request.prompt_token_ids for request in submitted] == [[1, 2]] * 3 + [[3]] * 3
    assert [choice.index for choice in collect_choices(events)] == list(range(6))
    assert {choice.text for choice in collect_choices(events)} == {"Hello"}
    assert stats.num_prompt_tokens == 3
    assert stats.num_output_tokens == 6 * len(tokenizer.encode("Hello"))


@pytest.mark.parametrize("tokens_per_delta", [1, 2, 5, 50])
def test_a_stop_string_cuts_the_text_aborts_the_request_and_ends_the_count(tokenizer, tokens_per_delta):
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog.")
    client = FakeEngineClient(ids, tokens_per_delta=tokens_per_delta)
    events, stats = run(client, tokenizer, stop=("wn f",))
    (choice,) = collect_choices(events)
    assert (choice.text, choice.finish_reason) == ("The quick bro", "stop")
    used = tokenizer.decode(ids[: stats.num_output_tokens])
    assert "wn f" in used
    assert "wn f" not in tokenizer.decode(ids[: stats.num_output_tokens - 1])
    assert client.aborted == ([] if client.finished else ["r-0"])
    assert choice.token_ids == ids[: stats.num_output_tokens]


# rule: Fields: `stop_token_ids`, `min_tokens` and `include_stop_str_in_output` act
def test_stop_strings_wait_for_min_tokens(tokenizer):
    ids = tokenizer.encode("Hello, world! Hello, world!")
    params = SamplingParams(max_tokens=100, min_tokens=len(ids) // 2 + 1)
    events, _ = run(FakeEngineClient(ids), tokenizer, stop=("wor",), params=params)
    assert collect_choices(events)[0].text == "Hello, world! Hello, "


# rule: Fields: `stop_token_ids`, `min_tokens` and `include_stop_str_in_output` act
def test_a_stop_token_counts_but_is_no_text(tokenizer):
    ids = [*tokenizer.encode("Hello"), *tokenizer.encode("!")]
    params = SamplingParams(max_tokens=100, stop_token_ids=[ids[-1]])
    events, stats = run(FakeEngineClient(ids), tokenizer, params=params)
    assert (collect_choices(events)[0].text, collect_choices(events)[0].finish_reason) == ("Hello", "stop")
    assert stats.num_output_tokens == len(ids)
    events, _ = run(FakeEngineClient(ids), tokenizer, params=params, include_stop_str_in_output=True)
    assert collect_choices(events)[0].text == "Hello!"


def test_leaving_early_aborts_every_child(tokenizer):
    client = FakeEngineClient(tokenizer.encode("Hello, world! How are you?"), delay_s=0.001)
    run(client, tokenizer, n=3, stop_after=2)
    assert sorted(client.aborted) == ["r-0", "r-1", "r-2"]


def test_an_error_of_one_child_ends_all(tokenizer):
    client = FakeEngineClient(tokenizer.encode("Hello, world!"), fail=EngineDead("gone"), fail_after=2)
    with pytest.raises(EngineDead):
        run(client, tokenizer, n=2)


# rule: Streams: Index in every choice, the role in the first delta, finish_reason one of OpenAI's
def test_an_abort_by_others_is_an_error_and_no_finish_reason(tokenizer):
    client = FakeEngineClient(tokenizer.encode("Hello, world!"))
    client.abort("r-0")
    with pytest.raises(RequestAborted):
        run(client, tokenizer)


# rule: Limits: A request has a deadline, also in the queue
@pytest.mark.parametrize("n", [1, 2])
def test_the_deadline_aborts(tokenizer, n):
    client = FakeEngineClient(tokenizer.encode("Hello, world!"), delay_s=10)
    with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
        run(client, tokenizer, n=n, timeout_s=0.05)
    assert len(client.aborted) == n


@pytest.mark.parametrize("tokens_per_delta", [1, 3, 10])
def test_ten_requests_of_ten_tokens_are_counted_exactly(tokenizer, tokens_per_delta):
    metrics = Metrics()
    for _ in range(10):
        client = FakeEngineClient([70] * 50, tokens_per_delta=tokens_per_delta)
        run(client, tokenizer, metrics=metrics, params=SamplingParams(max_tokens=10))
    histograms = metrics.drain().histograms
    counts = {name: sum(histogram.counts) for name, histogram in histograms.items()}
    assert counts == {
        "time_to_first_token_seconds": 10,
        "inter_token_latency_seconds": 90,
        "e2e_request_latency_seconds": 10,
        "request_max_num_generation_tokens": 10,
    }


def test_logprobs_stay_beside_their_tokens(tokenizer):
    ids = tokenizer.encode("The quick brown fox")
    params = SamplingParams(max_tokens=100, logprobs=2)
    events, _ = run(FakeEngineClient(ids, tokens_per_delta=3), tokenizer, params=params, stop=("brown",))
    for event in events:
        if not isinstance(event, ChoiceFinished):
            assert [entry.logprob for entry in event.logprobs] == [-id_ / 1000 for id_ in event.token_ids]


def test_the_prompts_of_a_list_draw_from_different_noise(tokenizer):
    client = FakeEngineClient(tokenizer.encode("Hello"))
    run(client, tokenizer, prompts=((1, 2),) * 4, params=SamplingParams(max_tokens=100, seed=2**63 - 2))
    submitted = sorted(client.submitted, key=lambda request: request.request_id)
    assert [request.params.seed for request in submitted] == [2**63 - 2, 2**63 - 1, 0, 1]
