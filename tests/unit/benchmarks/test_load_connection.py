"""What a client counts of a stream: which chunks bring a token, where the figures come from, what is an error."""

import asyncio
import json
from unittest.mock import Mock

import pytest

from benchmarks.gpu_memory import used_gib
from benchmarks.load_connection import Answer, RequestFailed, RequestTiming, StreamConnection

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def event(payload: object) -> bytes:
    data = b"data: " + (payload if isinstance(payload, bytes) else json.dumps(payload).encode()) + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def chat(finish_reason: str | None = None, **delta: object) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})


def text(text: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})


def usage(**counts: object) -> bytes:
    return event({"choices": [], "usage": counts})


def receive(*reads: bytes) -> tuple[RequestTiming, StreamConnection]:
    """Return what one request measured of a reply that arrived in these reads."""

    async def run() -> tuple[RequestTiming, StreamConnection]:
        connection, timing = StreamConnection(), RequestTiming(0.0)
        connection.connection_made(Mock(spec=asyncio.Transport))
        task = asyncio.create_task(connection.request(b"", timing, Answer()))
        await asyncio.sleep(0)
        for read in reads:
            connection.data_received(read)
        connection.connection_lost(None)
        await task
        return timing, connection

    return asyncio.run(run())


def test_a_chats_role_and_closing_chunks_are_no_tokens() -> None:
    timing, _ = receive(
        HEAD + chat(role="assistant", content=""),
        chat(reasoning_content="Hm"),
        chat(content="A"),
        chat(content=" b") + chat("stop"),
        usage(prompt_tokens=9, completion_tokens=3, prompt_tokens_details={"cached_tokens": 4}),
        event(b"[DONE]") + END,
    )
    assert (timing.num_chunks, len(timing.itl_s), timing.num_tokens) == (3, 2, 3)
    assert (timing.num_input_tokens, timing.num_cached_tokens) == (9, 4)
    assert 0 < timing.first_s < timing.last_s <= timing.end_s


def test_a_completions_empty_chunk_is_a_token_and_its_closing_one_is_not() -> None:
    timing, _ = receive(HEAD + text(""), text("b"), text("", "length") + END)
    assert (timing.num_chunks, timing.num_tokens, timing.has_usage) == (2, 2, False)


def test_tokens_that_arrive_together_are_no_time_apart() -> None:
    timing, _ = receive(HEAD + text("a"), text("b") + text("c") + text("d"), text("", "length") + END)
    assert timing.itl_s[0] > 0
    assert timing.itl_s[1:] == [0.0, 0.0]


def test_one_token_without_text_still_has_a_first_token() -> None:
    timing, _ = receive(HEAD + text("", "length") + usage(completion_tokens=1) + event(b"[DONE]") + END)
    assert (timing.num_tokens, timing.num_chunks) == (1, 0)
    assert timing.first_s == timing.end_s > 0


@pytest.mark.parametrize(
    ("reads", "kind", "words"),
    [
        ([HEAD + text("a"), event({"error": {"message": "engine died"}}), END], "error in the stream", "engine died"),
        ([HEAD + text("a")], "connection closed", "before the reply's end"),
        ([HEAD + text("a") + END], "incomplete stream", "too early"),
        ([HEAD + text("", "stop") + END], "incomplete stream", "without a token"),
        ([HEAD + event(b"{not json")], "malformed reply", "cannot be read"),
        ([b"HTTP/1.1 503 X\r\nContent-Length: 4\r\n\r\nbusy"], "HTTP 503", "busy"),
        (
            [b'HTTP/1.1 400 X\r\nContent-Length: 32\r\n\r\n{"error": {"message": "too long"}}'[:-2]],
            "HTTP 400",
            "too long",
        ),
        ([b"SMTP ready\r\n\r\n"], "malformed reply", "SMTP"),
    ],
)
def test_what_came_to_nothing_has_a_kind_and_words(reads: list[bytes], kind: str, words: str) -> None:
    with pytest.raises(RequestFailed, match=words) as caught:
        receive(*reads)
    assert caught.value.kind == kind


def test_the_memory_of_all_gpus_is_added_up() -> None:
    assert used_gib("1024\n512\n") == 1.5
    assert used_gib("") is None
    assert used_gib("No devices were found\n") is None
