"""The form of chat streams, chunk by chunk, as clients rely on it."""

import pytest

from tests.unit.server.conftest import stream_chunks

LAST = ("stop", "length", "tool_calls", "content_filter")


# rule: Streams: Role, text, finish, usage, `[DONE]`, in this order; one id, time and model
# rule: Streams: Index in every choice, the role in the first delta, finish_reason one of OpenAI's
@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"max_tokens": 2}, {"stop": ["world"]}, {"logprobs": True}])
def test_every_chunk_has_openais_form(harness, fields):
    chunks = stream_chunks(harness().chat(stream=True, **fields).text)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    for index in range(fields.get("n", 1)):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        first, *middle, last = choices
        assert first["delta"]["role"] == "assistant"
        assert first["delta"]["content"] == ""
        assert all("role" not in choice["delta"] for choice in [*middle, last])
        assert all(choice["finish_reason"] is None for choice in [first, *middle])
        assert last["finish_reason"] in LAST
        assert not last["delta"].get("content")


# rule: Fields: Timings are in whole answers and in the last chunk
def test_timings_come_with_the_last_chunk(harness):
    for options in ({}, {"stream_options": {"include_usage": True}}):
        *before, last = stream_chunks(harness().chat(stream=True, **options).text)
        assert set(last["timings"]) == {"queue_ms", "prefill_ms", "ttft_ms", "itl_ms", "total_ms"}
        assert all("timings" not in chunk for chunk in before)


# rule: Fields: Usage always counts cached tokens
# rule: Fields: Timings are in whole answers and in the last chunk
# rule: Streams: `refusal: null` in messages
def test_messages_always_have_a_refusal_and_usage_its_cached_tokens(harness):
    answer = harness(engine={"num_cached_tokens": 3}).chat().json()
    assert answer["choices"][0]["message"]["refusal"] is None
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert set(answer["timings"]) == {"queue_ms", "prefill_ms", "ttft_ms", "itl_ms", "total_ms"}
