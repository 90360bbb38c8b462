"""The client of an engine on another host, whose clock is another one."""

import asyncio
import itertools
import time
from pathlib import Path

import msgspec
import pytest

from engine.interface.kv_snapshot import KvSnapshot
from engine.interface.protocol import AddRequest, ClientGone, EngineReady, SamplingParams, ToEngine, pack_token_ids
from engine.interface.socket_client import SocketEngineClient
from engine.interface.transport import SocketTransport, encode_frame, read_messages
from tests.support.fakes import READY

AHEAD_S = 5000.0


async def sent_to_engine(path: str, request: AddRequest, *, is_remote: bool) -> AddRequest:
    """Return a request as an engine gets it whose clock is ahead."""
    got: asyncio.Future[AddRequest] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode_frame(msgspec.structs.replace(READY, now_s=time.monotonic() + AHEAD_S)))
        async for message in read_messages(reader, ToEngine):
            got.set_result(message)
            break
        writer.close()

    server = await asyncio.start_unix_server(serve, path)
    client = SocketEngineClient(path, is_remote=is_remote)
    await client.start()
    await client.wait_ready(timeout_s=60)
    outputs = client.submit(request)
    asking = asyncio.ensure_future(anext(outputs))
    try:
        async with asyncio.timeout(60):
            return await got
    finally:
        asking.cancel()
        await client.aclose()
        server.close()


@pytest.mark.parametrize("deadline_s", [None, 130.0])
def test_times_of_a_request_are_those_of_the_engines_clock(deadline_s: float | None, tmp_path: Path) -> None:
    request = AddRequest(
        "a", pack_token_ids([1, 2]), SamplingParams(max_tokens=1), arrival_s=100.0, deadline_s=deadline_s
    )
    got = asyncio.run(sent_to_engine(str(tmp_path / "s"), request, is_remote=True))
    assert got.arrival_s == pytest.approx(100.0 + AHEAD_S, abs=1.0)
    assert got.deadline_s == (None if deadline_s is None else pytest.approx(130.0 + AHEAD_S, abs=1.0))
    got = asyncio.run(sent_to_engine(str(tmp_path / "t"), request, is_remote=False))
    assert (got.arrival_s, got.deadline_s) == (100.0, deadline_s)


def test_the_time_of_a_snapshot_is_that_of_the_clients_clock(tmp_path: Path) -> None:
    async def test() -> KvSnapshot:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(encode_frame(msgspec.structs.replace(READY, now_s=time.monotonic() + AHEAD_S)))
            async for _ in read_messages(reader, ToEngine):
                now_s = time.monotonic() + AHEAD_S
                writer.write(encode_frame(KvSnapshot(1, now_s, 0.0, 4, 16, 8, 0, 0, 0, [], 0, b"", b"", 0, 0, 0, 0)))
            writer.close()

        server = await asyncio.start_unix_server(serve, str(tmp_path / "s"))
        client = SocketEngineClient(str(tmp_path / "s"), is_remote=True)
        await client.start()
        await client.wait_ready(timeout_s=60)
        try:
            async with asyncio.timeout(60):
                return await client.kv_snapshot()
        finally:
            await client.aclose()
            server.close()

    assert asyncio.run(test()).now_s == pytest.approx(time.monotonic(), abs=10.0)


def test_an_engine_tells_its_clock_to_each_client(tmp_path: Path) -> None:
    times = itertools.count(10.0)
    transport = SocketTransport(str(tmp_path / "s"), READY, clock=lambda: next(times))

    async def greeting() -> EngineReady:
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        assert list(transport.receive(1.0)) in ([], [(1, ClientGone())])
        async for message in read_messages(reader, EngineReady):
            writer.close()
            return message
        raise AssertionError("no greeting")

    first, second = asyncio.run(greeting()), asyncio.run(greeting())
    transport.close()
    assert 0.0 < first.now_s < second.now_s
    assert msgspec.structs.replace(first, now_s=0.0) == READY
