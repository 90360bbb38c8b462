"""The form of chat streams, chunk by chunk, as clients rely on it."""

import pytest

from server.api.objects import ChatChunk, ChatChunkChoice, ChatDelta
from server.api.sse import TextEvent, data_events
from tests.unit.server.conftest import chat_text, stream_chunks

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


@pytest.mark.parametrize("text", ["a", "", "\0", '"\\', "\n\u2028", "</s>", "Grüße 日本語 😀", '"\\u0000"'])
def test_an_event_made_of_text_alone_is_the_one_that_is_encoded_whole(text):
    def event(shown: str) -> bytes:
        delta = ChatDelta(reasoning_content=shown, reasoning=shown)  # twice
        return data_events(ChatChunk(id="a", created=1, model="m", choices=[ChatChunkChoice(0, delta)]))

    write = TextEvent(event(TextEvent.TEXT))
    assert write(text) == event(text)
    assert write("and again") == event("and again")


def test_every_choice_has_the_events_of_its_own_index(harness):
    text = "Hello, world! And more."
    reply = harness(text).chat(n=2, stream=True, stream_options={"include_usage": True})
    chunks = stream_chunks(reply.text)
    assert [chat_text(chunks, index) for index in (0, 1)] == [text, text]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
