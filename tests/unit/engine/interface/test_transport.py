"""The engine's sockets: what is taken in first, and what open requests hear when the line ends."""

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from engine.interface.control import Flush, FromLauncher
from engine.interface.errors import EngineDead, Overloaded, ServiceError, ShuttingDown
from engine.interface.kv_snapshot import KvSnapshot
from engine.interface.mailbox import RequestOutput
from engine.interface.protocol import (
    AbortRequest,
    AddRequest,
    ClientGone,
    Finished,
    FromEngine,
    QueueState,
    SamplingParams,
    Started,
    StepEvents,
    TokenLogprobs,
    pack_token_ids,
)
from engine.interface.socket_client import SocketEngineClient
from engine.interface.transport import (
    RECEIVE_BUDGET_S,
    Connection,
    FrameDecoder,
    MessageProtocol,
    SocketTransport,
    encode_frame,
)
from tests.support.fakes import READY


def test_a_flush_is_answered_after_what_the_workers_had_sent_before_it(tmp_path: Path) -> None:
    """A worker aborts, then its client asks for the metrics: the abort counts, whichever socket is read first."""
    order: list[object] = []
    here, there = socket.socketpair()
    transport = SocketTransport(
        str(tmp_path / "engine.sock"),
        READY,
        control=Connection(here, FromLauncher),
        on_control=lambda messages: order.extend(messages or [None]),
        clock=lambda: 0.0,
    )
    workers = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for worker in workers:
        worker.connect(str(tmp_path / "engine.sock"))
    for _ in workers:
        assert list(transport.receive(1.0)) == []
    there.sendall(encode_frame(Flush(1)))
    for worker in workers:
        worker.sendall(encode_frame(AbortRequest("r", "stop")))
    for _, message in transport.receive(1.0):
        order.append(message)
    assert order == [AbortRequest("r", "stop")] * 3 + [Flush(1)]
    transport.close()
    for sock in (*workers, here, there):
        sock.close()


def test_arrivals_are_seen_before_they_are_received(tmp_path: Path) -> None:
    transport = SocketTransport(str(tmp_path / "engine.sock"), READY, clock=lambda: 0.0)
    assert not transport.has_arrivals()
    with socket.socket(socket.AF_UNIX) as worker:
        worker.connect(str(tmp_path / "engine.sock"))
        assert transport.has_arrivals()
        assert list(transport.receive(1.0)) == []
        assert not transport.has_arrivals()
        worker.sendall(encode_frame(AbortRequest("r", "stop")))
        assert transport.has_arrivals()
        assert [message for _, message in transport.receive(1.0)] == [AbortRequest("r", "stop")]
        assert not transport.has_arrivals()
    transport.close()


def test_a_worker_that_connects_later_hears_that_the_queue_is_full(tmp_path: Path) -> None:
    transport = SocketTransport(str(tmp_path / "engine.sock"), READY, clock=lambda: 3.0)
    transport.broadcast(QueueState(True, 7))
    with socket.socket(socket.AF_UNIX) as worker:
        worker.connect(str(tmp_path / "engine.sock"))
        assert list(transport.receive(1.0)) == []
        assert FrameDecoder(FromEngine).feed(worker.recv(1 << 16)) == [
            msgspec.structs.replace(READY, now_s=3.0),
            QueueState(True, 7),
        ]
    transport.close()


def test_a_burst_is_taken_in_over_several_turns_and_delays_no_other_worker(tmp_path: Path) -> None:
    order: list[object] = []
    here, there = socket.socketpair()
    ticks = itertools.count()
    transport = SocketTransport(
        str(tmp_path / "engine.sock"),
        READY,
        control=Connection(here, FromLauncher),
        on_control=lambda messages: order.extend(messages or [None]),
        clock=lambda: next(ticks) / 1000,  # a millisecond for each message and each read
    )
    workers = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    for worker in workers:
        worker.connect(str(tmp_path / "engine.sock"))
        assert list(transport.receive(1.0)) == []
    workers[0].sendall(b"".join(encode_frame(AbortRequest(f"burst {i}")) for i in range(50)))
    assert workers[0].recv(1 << 16)  # its greeting: a close before it is read would reset the connection
    workers[0].close()
    workers[1].sendall(encode_frame(AbortRequest("other")))
    there.sendall(encode_frame(Flush(1)))
    numbers = [0]
    while len(order) < 53:
        for _, message in transport.receive(None):
            order.append(message)
        numbers.append(len(order))
    assert max(after - before for before, after in itertools.pairwise(numbers)) <= RECEIVE_BUDGET_S * 1000 + 1
    assert AbortRequest("other") in order[: numbers[1]]
    burst = [message for message in order if message not in (AbortRequest("other"), Flush(1))]
    assert burst == [*(AbortRequest(f"burst {i}") for i in range(50)), ClientGone()]
    assert order.index(Flush(1)) > 50  # after the messages that were sent before it
    transport.close()
    for sock in (workers[1], here, there):
        sock.close()


def test_control_messages_do_not_wait_for_the_end_of_an_endless_burst(tmp_path: Path) -> None:
    order: list[object] = []
    here, there = socket.socketpair()
    ticks = itertools.count()
    transport = SocketTransport(
        str(tmp_path / "engine.sock"),
        READY,
        control=Connection(here, FromLauncher),
        on_control=lambda messages: order.extend(messages or [None]),
        clock=lambda: next(ticks) / 1000,
    )
    worker = socket.socket(socket.AF_UNIX)
    worker.connect(str(tmp_path / "engine.sock"))
    assert list(transport.receive(1.0)) == []
    worker.sendall(b"".join(encode_frame(AbortRequest("r")) for _ in range(500)))
    there.sendall(encode_frame(Flush(1)))
    for _ in range(20):
        order += [message for _, message in transport.receive(None)]
    assert AbortRequest("r") in order[order.index(Flush(1)) + 1 :]
    transport.close()
    for sock in (worker, here, there):
        sock.close()


REQUEST = AddRequest("r", pack_token_ids([1]), SamplingParams(max_tokens=1), 0.0)


@asynccontextmanager
async def connected(tmp_path: Path) -> AsyncIterator[tuple[SocketEngineClient, asyncio.Server, asyncio.StreamWriter]]:
    """Yield a client of an engine that greets and then says nothing."""
    path = str(tmp_path / "engine.sock")
    writers: list[asyncio.StreamWriter] = []

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode_frame(READY))
        writers.append(writer)

    server = await asyncio.start_unix_server(greet, path)
    client = SocketEngineClient(path)
    await client.start()
    while client.ready is None:
        await asyncio.sleep(0.005)
    try:
        yield client, server, writers[0]
    finally:
        await client.aclose()
        server.close()
        writers[0].close()


async def end_of(client: SocketEngineClient) -> ServiceError:
    with pytest.raises(ServiceError) as info:
        _ = [delta async for delta in client.submit(REQUEST)]
    return info.value


@pytest.mark.parametrize("is_ours", [True, False])
def test_an_open_request_hears_who_ended_it(tmp_path: Path, is_ours: bool) -> None:
    """Our own end is a shutdown; the engine's end is a restart."""

    async def run() -> list[ServiceError]:
        async with connected(tmp_path) as (client, server, engine):
            open_request = asyncio.create_task(end_of(client))
            await asyncio.sleep(0.02)
            if is_ours:
                await client.aclose()
            else:
                server.close()
                engine.close()
            first = await asyncio.wait_for(open_request, 60)
            return [first, await asyncio.wait_for(end_of(client), 60)]

    errors = asyncio.run(run())
    assert [type(error) for error in errors] == [ShuttingDown if is_ours else EngineDead] * 2
    for error in errors:
        assert error.message[0].isupper()
        assert error.message.endswith(".")
        assert ("shutting down" in error.message) == is_ours
    assert ("restarted" in errors[0].message) != is_ours


def test_a_peer_that_stops_reading_is_dropped_before_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.interface.transport.MAX_UNSENT_BYTES", 1 << 20)
    here, there = socket.socketpair()
    connection = Connection(here, FromLauncher)
    for _ in range(40):
        connection.send(AddRequest("r", pack_token_ids(range(20_000)), SamplingParams(max_tokens=1), 0.0))
    assert not connection.has_unsent
    assert connection.receive() is None
    there.close()
    here.close()


def test_a_client_that_knows_of_a_full_queue_refuses_by_itself(tmp_path: Path) -> None:
    async def run() -> None:
        async with connected(tmp_path) as (client, _, writer):
            assert not client.is_full
            writer.write(encode_frame(QueueState(True)))
            while not client.is_full:
                await asyncio.sleep(0.005)
            assert isinstance(await end_of(client), Overloaded)
            writer.write(encode_frame(QueueState(False)))
            while client.is_full:
                await asyncio.sleep(0.005)
            writer.write(encode_frame(QueueState(True)))
            writer.close()
            while client.ready is not None:
                await asyncio.sleep(0.005)
            assert not client.is_full  # the next engine's queue is another one

    asyncio.run(run())


def test_a_slow_reader_gets_scores_and_tokens_joined_and_nothing_lost(tmp_path: Path) -> None:
    scores = [TokenLogprobs(-float(i), [i], [-float(i)], i) for i in range(4)]
    name = REQUEST.request_id
    messages = [
        StepEvents(0, [name], [0], [], prompt_logprobs={0: scores[:2]}),
        StepEvents(1, [name], [1], [7], started=[Started(0, 5, 0.1, 0.2)], prompt_logprobs={0: scores[2:]}),
        StepEvents(2, [name], [1], [8], finished=[Finished(0, "length", None)]),
    ]

    async def run() -> list[RequestOutput]:
        async with connected(tmp_path) as (client, _, writer):
            deltas = client.submit(REQUEST)
            first = asyncio.ensure_future(anext(deltas))
            await asyncio.sleep(0.05)
            writer.write(b"".join(map(encode_frame, messages)))
            return [await first] + [delta async for delta in deltas]

    deltas = asyncio.run(run())
    assert [entry for delta in deltas for entry in delta.prompt_logprobs] == scores
    assert [id_ for delta in deltas for id_ in delta.token_ids] == [7, 8]
    assert next(delta.num_cached_tokens for delta in deltas if delta.token_ids) == 5
    assert deltas[-1].finish_reason == "length"


SNAPSHOT = KvSnapshot(1, 2.0, 0.0, 4, 16, 8, 0, 0, 0, [], 0, b"", b"", 0, 0, 0, 0)


def test_who_asks_for_the_pool_while_an_answer_is_due_gets_that_one(tmp_path: Path) -> None:
    async def run() -> list[KvSnapshot]:
        async with connected(tmp_path) as (client, _, writer):
            first, second, impatient = (asyncio.create_task(client.kv_snapshot()) for _ in range(3))
            await asyncio.sleep(0.02)
            impatient.cancel()
            writer.write(encode_frame(SNAPSHOT))  # one answer for all of them
            found = [await asyncio.wait_for(first, 60), await asyncio.wait_for(second, 60)]
            writer.write(encode_frame(SNAPSHOT))  # which nobody waits for
            third = asyncio.create_task(client.kv_snapshot())
            await asyncio.sleep(0.05)
            if not third.done():
                writer.write(encode_frame(SNAPSHOT))
            return [*found, await asyncio.wait_for(third, 60)]

    assert asyncio.run(run()) == [SNAPSHOT] * 3


@pytest.mark.parametrize("is_ours", [True, False])
def test_who_waits_for_the_pool_hears_of_the_end(tmp_path: Path, is_ours: bool) -> None:
    async def run() -> list[BaseException]:
        async with connected(tmp_path) as (client, server, engine):
            waiting = asyncio.create_task(client.kv_snapshot())
            await asyncio.sleep(0.02)
            if is_ours:
                await client.aclose()
            else:
                server.close()
                engine.close()
            first = await asyncio.wait_for(asyncio.gather(waiting, return_exceptions=True), 60)
            return first + await asyncio.gather(client.kv_snapshot(), return_exceptions=True)

    assert [type(error) for error in asyncio.run(run())] == [ShuttingDown if is_ours else EngineDead] * 2


def test_a_client_waits_for_a_greeting_and_no_longer_than_it_shall(tmp_path: Path) -> None:
    async def run() -> None:
        path, greets = str(tmp_path / "engine.sock"), asyncio.Event()

        async def greet_late(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await greets.wait()
            writer.write(encode_frame(READY))

        server = await asyncio.start_unix_server(greet_late, path)
        client = SocketEngineClient(path)
        await client.start()
        await client.wait_ready(timeout_s=0.05)
        assert client.ready is None
        asyncio.get_running_loop().call_later(0.05, greets.set)
        await client.wait_ready(timeout_s=30.0)
        assert client.ready == READY
        await client.aclose()
        server.close()

    asyncio.run(run())


@pytest.mark.parametrize("end", [None, msgspec.DecodeError, KeyError])
def test_messages_are_handed_on_as_they_arrive_until_a_frame_or_their_handler_fails(
    end: type[Exception] | None,
) -> None:
    opened: list[asyncio.WriteTransport] = []
    received: list[FromEngine] = []

    def receive(message: FromEngine) -> None:
        received.append(message)
        if end is KeyError and len(received) == 2:
            raise KeyError

    async def run() -> object:
        here, there = socket.socketpair()
        _, connection = await asyncio.get_running_loop().create_unix_connection(
            lambda: MessageProtocol(FromEngine, on_open=opened.append, on_message=receive), sock=here
        )
        frames = b"".join(encode_frame(QueueState(is_full)) for is_full in (True, False))
        for part in (frames[:7], frames[7:], b"\x03\0\0\0abc" if end is msgspec.DecodeError else b""):
            there.sendall(part)
            await asyncio.sleep(0.01)
        there.close()
        (error,) = await asyncio.gather(asyncio.wait_for(connection.closed, 60), return_exceptions=True)
        opened[0].close()
        return error

    error = asyncio.run(run())
    assert received == [QueueState(True), QueueState(False)]
    assert error is None if end is None else isinstance(error, end)
