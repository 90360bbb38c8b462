"""The client of the attacks tells apart what became of its request."""

import asyncio
from collections.abc import Awaitable, Callable

from tests.chaos.client import Answer, Conduct, ask, completion, wait_closed

_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
_EVENT = b'data: {"choices": [{"text": "word "}]}\n\n'
_DONE = b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n'
_ERROR = b'{"error": {"message": "The queue is full.", "code": "overloaded"}}'
_REFUSAL = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: %d\r\n\r\n" % len(_ERROR) + _ERROR
_REQUEST = completion("Hi", max_tokens=2)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n" % len(data) + data + b"\r\n"


WHOLE = _HEAD + chunk(_EVENT) + chunk(_EVENT + _DONE) + b"0\r\n\r\n"


def served(reply: bytes, act: Callable[[tuple[str, int]], Awaitable[Answer | bool]]) -> Answer | bool:
    """Run a client against a server that reads one request and writes some bytes; return what the client returns."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received = b""
        while len(received) < len(_REQUEST) and (data := await reader.read(65_536)):
            received += data
        writer.write(reply)
        writer.close()

    async def run() -> Answer | bool:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            return await act(server.sockets[0].getsockname())

    return asyncio.run(run())


def asked(reply: bytes, conduct: Conduct | None = None) -> Answer:
    answer = served(reply, lambda address: ask(address, _REQUEST, conduct))
    assert isinstance(answer, Answer)
    return answer


def test_a_whole_stream_is_answered_with_its_text_and_usage() -> None:
    answer = asked(WHOLE)
    assert (answer.outcome, answer.text, answer.usage) == ("200", "word word ", {"completion_tokens": 2})
    assert answer.path == "/v1/completions"


def test_a_refusal_is_answered_with_its_code() -> None:
    answer = asked(_REFUSAL)
    assert (answer.outcome, answer.code, answer.error) == ("429", "overloaded", "The queue is full.")


def test_an_error_inside_a_stream_shows() -> None:
    answer = asked(_HEAD + chunk(_EVENT) + chunk(b'data: {"error": {"code": "engine_dead"}}\n\n') + b"0\r\n\r\n")
    assert answer.outcome == "200 engine_dead"


def test_an_answer_that_breaks_off_is_cut() -> None:
    assert asked(b"").outcome == asked(_HEAD[:-2]).outcome == asked(_HEAD + chunk(_EVENT)).outcome == "cut"
    assert asked(b"nonsense\r\n\r\n").outcome == "cut"


def test_a_client_leaves_after_its_events_or_before_any() -> None:
    answer = asked(WHOLE, Conduct(leave_after=1, resets=True))
    assert (answer.outcome, answer.status) == ("left", 200)
    assert asked(WHOLE, Conduct(leave_after=0)).status == 0


def test_a_slow_client_gets_the_whole_answer() -> None:
    answer = asked(WHOLE, Conduct(slow_bytes=5, slow_reads=5, pause_s=0.01))
    assert (answer.outcome, answer.text) == ("200", "word word ")


def test_without_a_server_the_answer_is_cut() -> None:
    assert asyncio.run(ask(("127.0.0.1", 1), _REQUEST)).outcome == "cut"


def test_a_connection_that_the_server_closes_is_told_from_one_that_stays() -> None:
    assert served(b"", lambda address: wait_closed(address, _REQUEST, timeout_s=60)) is True
    assert served(b"", lambda address: wait_closed(address, b"PO", timeout_s=0.1)) is False
