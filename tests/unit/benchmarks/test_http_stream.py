"""A streamed reply gives the same events however the network cuts it, and says when it ends."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.http_stream import ReplyError, StreamedReply

EVENTS = [b'{"choices":[{"text":"a\\n"}]}', b'{"usage":{"completion_tokens":1}}', b"[DONE]"]
BODY = b": ping\r\n\r\n" + b"".join(b"data: " + event + b"\n\n" for event in EVENTS)


def chunked(body: bytes, size: int, *, trailer: bytes = b"") -> bytes:
    """Return a whole reply whose body comes in chunks of `size`."""
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    coded = b"".join(b"%x;name=value\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + coded + b"0\r\n" + trailer + b"\r\n"


def feed_all(reply: StreamedReply, data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % len(data) for cut in cuts), len(data)]
    return [event for start, end in pairwise(edges) for event in reply.feed(data[start:end])]


@given(st.integers(1, 200), st.lists(st.integers(0, 10_000), max_size=30), st.sampled_from([b"", b"X-A: b\r\n"]))
def test_chunks_and_reads_may_cut_anywhere(size: int, cuts: list[int], trailer: bytes) -> None:
    reply = StreamedReply()
    assert feed_all(reply, chunked(BODY, size, trailer=trailer), cuts) == EVENTS
    assert reply.is_complete
    assert reply.keeps_alive


@given(st.lists(st.integers(0, 10_000), max_size=30))
def test_a_body_with_a_length_ends_there(cuts: list[int]) -> None:
    reply = StreamedReply()
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(BODY)
    assert feed_all(reply, head + BODY, cuts) == EVENTS
    assert reply.is_complete
    assert not reply.keeps_alive


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    reply = StreamedReply()
    assert reply.feed(b"HTTP/1.0 200 OK\r\n\r\n" + BODY) == EVENTS
    assert not reply.is_complete
    reply.feed_end()
    assert reply.is_complete


def test_a_chunked_body_that_breaks_off_is_not_complete() -> None:
    reply = StreamedReply()
    reply.feed(chunked(BODY, 20)[:-7])
    reply.feed_end()
    assert not reply.is_complete


def test_the_body_of_an_error_is_kept_and_is_no_event() -> None:
    reply = StreamedReply()
    assert reply.feed(b"HTTP/1.1 429 Too Many\r\nContent-Length: 9\r\n\r\ndata: no\n") == []
    assert (reply.status, reply.error_body, reply.is_complete) == (429, b"data: no\n", True)


@pytest.mark.parametrize(
    "data",
    [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nno size\r\n", b"x" * 70_000],
)
def test_what_is_no_http_is_an_error(data: bytes) -> None:
    with pytest.raises(ReplyError):
        StreamedReply().feed(data)
