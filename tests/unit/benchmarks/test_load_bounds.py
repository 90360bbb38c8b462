"""Benchmarks of promises: a stream that never begins ends the run, and open requests count as what they had."""

import asyncio
import time
from pathlib import Path

import pytest

from benchmarks import kills
from benchmarks.drain import wait_begun
from benchmarks.kills import Streamed, keep_killing
from benchmarks.overload_daemon import Client

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def test_a_stream_that_is_refused_ends_the_wait_for_all_streams() -> None:
    async def check() -> None:
        streams = [Streamed("plain", 0.0, arrivals_s=[1.0]), Streamed("tools", 0.0, status=503, error="overloaded")]

        async def ended(streamed: Streamed) -> Streamed:
            return streamed

        reading = [asyncio.create_task(ended(streamed)) for streamed in streams]
        with pytest.raises(RuntimeError, match=r"\(tools\) ended before its first event: status 503 overloaded"):
            await asyncio.wait_for(wait_begun(streams, reading), 60)

    asyncio.run(check())


def test_a_standby_that_never_loads_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        log, is_over = tmp_path / "log", asyncio.Event()
        log.write_text("nothing")
        monkeypatch.setattr(kills, "_LONGEST_S", 0.05)
        killing = keep_killing(0, log, every_s=0.1, end_s=1e18, most=1, has_standby=True, is_over=is_over)
        with pytest.raises(RuntimeError, match="did not log 'standby waits'"):
            await asyncio.wait_for(killing, 60)
        assert is_over.is_set()

    asyncio.run(check())


def test_requests_that_are_open_at_the_end_keep_their_times_and_tokens() -> None:
    async def check() -> None:
        num_asked = 0

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_asked
            num_asked += 1
            if num_asked % 2:
                writer.write(_HEAD + b'data: {"choices": []}\n\n')
            await reader.read()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            begun_s = time.monotonic()
            outcomes = await Client(server.sockets[0].getsockname(), seed=1).load(0.5, rate=40)
        assert len(outcomes) > 4
        assert all(begun_s <= outcome.sent_s < begun_s + 0.6 for outcome in outcomes)
        with_token = [outcome for outcome in outcomes if outcome.ttft_s is not None]
        without = [outcome for outcome in outcomes if outcome.status == 0]
        assert with_token
        assert without
        assert {outcome.status for outcome in with_token} == {200}
        assert {outcome.end_s for outcome in with_token} == {None}

    asyncio.run(check())


def test_a_refusal_is_not_asked_again_at_once() -> None:
    async def check() -> None:
        num_asked = 0

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_asked
            num_asked += 1
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            assert await Client(server.sockets[0].getsockname(), seed=1).capacity(0.4, num_open=2) == 0
        assert num_asked <= 4

    asyncio.run(check())
