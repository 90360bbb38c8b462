"""What open requests do between two engines: they wait, go on, are given up or end, and each of them ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from engine.interface.errors import EngineDead, PoisonRequest, PromptTooLong, ServiceError, ShuttingDown
from engine.interface.mailbox import Mailbox, Mailboxes, RequestOutput
from engine.interface.metrics import Metrics
from engine.interface.protocol import (
    AbortRequest,
    Accepted,
    AddRequest,
    Alone,
    Begun,
    CacheReport,
    Finished,
    QueueCosts,
    RefuseDigest,
    RequestFailed,
    SamplingParams,
    SetAside,
    Started,
    StepEvents,
    ToEngine,
    pack_token_ids,
)
from engine.interface.replays import Journal, digest_of
from engine.interface.socket_client import SocketEngineClient
from engine.interface.tenant import Charge
from engine.interface.transport import encode_frame, read_messages
from tests.support.fakes import READY


class Engines:
    """One engine after the other on a socket, which say what the test wants."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.received: list[ToEngine] = []
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def start(self) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._writer = writer
            writer.write(encode_frame(READY))
            async for message in read_messages(reader, ToEngine):
                self.received.append(message)

        self.received = []
        self._server = await asyncio.start_unix_server(serve, self.path)

    def end(self) -> None:
        assert self._server is not None
        assert self._writer is not None
        self._server.close()
        self._writer.close()
        Path(self.path).unlink(missing_ok=True)

    def begin(self, *request_ids: str, cache: CacheReport | None = None) -> None:
        self.send(Begun(list(request_ids), [cache] * len(request_ids)))

    def tokens(self, request_id: str, *token_ids: int, reason: str | None = None, started: bool = False) -> None:
        events = StepEvents(0, [request_id], [len(token_ids)], list(token_ids))
        if started:
            events.started = [Started(0, 0, 0.5, 0.25, CacheReport("new", 0, 0))]
        if reason is not None:
            events.finished = [Finished(0, reason, None)]
        self.send(events)

    def send(self, message: object) -> None:
        assert self._writer is not None
        self._writer.write(encode_frame(message))

    async def got(self, count: int) -> list[ToEngine]:
        """Wait for so many messages to the present engine."""
        await until(lambda: len(self.received) >= count)
        return self.received


class Reader:
    """Reads the outputs of one request in a task."""

    def __init__(self, client: SocketEngineClient, request: AddRequest) -> None:
        self.outputs: list[RequestOutput] = []
        self.error: ServiceError | None = None
        self.task = asyncio.create_task(self._read(client, request))

    async def _read(self, client: SocketEngineClient, request: AddRequest) -> None:
        try:
            async for output in client.submit(request):
                self.outputs.append(output)
        except ServiceError as error:
            self.error = error

    @property
    def token_ids(self) -> list[int]:
        return [token_id for output in self.outputs for token_id in output.token_ids]

    async def end(self) -> "Reader":
        await asyncio.wait_for(self.task, 60)
        return self


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


def request(name: str = "r", **fields: object) -> AddRequest:
    return AddRequest(name, pack_token_ids([1, len(name)]), SamplingParams(max_tokens=8, seed=3), 0.0, **fields)


@asynccontextmanager
async def connected(tmp_path: Path, **options: object) -> AsyncIterator[tuple[SocketEngineClient, Engines]]:
    engines = Engines(str(tmp_path / "engine.sock"))
    await engines.start()
    client = SocketEngineClient(engines.path, **{"max_replays": 2, **options})
    await client.start()
    await client.wait_ready(timeout_s=60)
    try:
        yield client, engines
    finally:
        await client.aclose()
        engines.end()


async def restart(client: SocketEngineClient, engines: Engines) -> None:
    engines.end()
    await until(lambda: client.ready is None)
    await engines.start()
    await until(lambda: client.ready is not None)


def run(scenario) -> None:
    asyncio.run(asyncio.wait_for(scenario, 120))


def test_a_request_waits_and_goes_on_with_the_tokens_that_were_sent(tmp_path: Path) -> None:
    async def scenario() -> None:
        metrics = Metrics()
        async with connected(tmp_path, metrics=metrics) as (client, engines):
            reader = Reader(client, request())
            assert await engines.got(1) == [request()]
            engines.begin("r", cache=CacheReport("all", 1, 1))
            engines.tokens("r", 5, 6, started=True)
            await until(lambda: reader.token_ids == [5, 6])
            await restart(client, engines)
            (again,) = await engines.got(1)
            assert again == request(
                output=pack_token_ids([5, 6]), counts_prompt=False, num_replays=1, is_suspect=True, is_charged=True
            )
            engines.tokens("r", 7, reason="length")
            await reader.end()
            assert reader.token_ids == [5, 6, 7]
            assert [output.num_replays for output in reader.outputs] == [0, 1]
            assert reader.outputs[-1].finish_reason == "length"
        assert metrics.drain().counters["request_replays_total", ""] == 1

    run(scenario())


def test_what_a_slow_reader_has_not_taken_is_not_asked_for_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path, was_killed=lambda: True) as (client, engines):
            outputs = client.submit(request())
            first = asyncio.create_task(anext(outputs))
            await engines.got(1)
            engines.tokens("r", 5)
            assert (await first).token_ids == [5]
            engines.tokens("r", 6)  # nobody reads it
            await asyncio.sleep(0.05)
            await restart(client, engines)
            (again,) = await engines.got(1)
            assert (again.output, again.is_suspect) == (pack_token_ids([5, 6]), False)
            engines.tokens("r", 7, reason="stop")
            assert [output.token_ids async for output in outputs] in ([[6, 7]], [[6], [7]])

    run(scenario())


def test_the_first_admission_tells_what_was_cached(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (client, engines):
            reader = Reader(client, request())
            await engines.got(1)
            engines.begin("r", cache=CacheReport("all", 1, 2))
            await restart(client, engines)
            await engines.got(1)
            engines.begin("r", cache=CacheReport("new", 0, 0))
            engines.tokens("r", 5, reason="stop", started=True)
            (output,) = (await reader.end()).outputs
            assert (output.num_cached_tokens, output.cache) == (1, CacheReport("all", 1, 2))
            assert (output.queue_s, output.prefill_s) == (0.5, 0.25)

    run(scenario())


@pytest.mark.parametrize("reason", ["abort", "stop"])
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "while it waits"])
def test_a_request_that_is_aborted_ends_without_an_engine(tmp_path: Path, reason: str, is_before: bool) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (client, engines):
            reader = Reader(client, request())
            await engines.got(1)
            if is_before:  # the engine ends before it has done so
                client.abort("r", reason=reason)
            engines.end()
            await until(lambda: client.ready is None)
            if not is_before:
                assert not reader.task.done()
                client.abort("r", reason=reason)
            await reader.end()
            assert [output.finish_reason for output in reader.outputs] == [reason]
            await engines.start()
            await until(lambda: client.ready is not None)
            assert [message for message in engines.received if isinstance(message, AddRequest)] == []

    run(scenario())


def test_a_client_that_leaves_while_it_waits_is_forgotten(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (client, engines):
            gone, stays = Reader(client, request("gone")), Reader(client, request())
            await engines.got(2)
            engines.end()
            await until(lambda: client.ready is None)
            gone.task.cancel()
            await asyncio.gather(gone.task, return_exceptions=True)
            await engines.start()
            (again,) = await engines.got(1)
            assert again.request_id == "r"
            engines.tokens("r", 1, reason="stop")
            await stays.end()
            assert engines.received == [again]

    run(scenario())


def test_a_request_that_was_checked_before_the_end_waits_as_well_and_is_no_replay(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (client, engines):
            engines.end()
            await until(lambda: client.ready is None)
            reader = Reader(client, request())
            await asyncio.sleep(0.02)
            await engines.start()
            assert await engines.got(1) == [msgspec.structs.replace(request(), has_waited=True)]
            engines.tokens("r", 1, reason="stop")
            assert (await reader.end()).outputs[-1].num_replays == 0

    run(scenario())


def test_nobody_waits_without_replays_or_before_the_first_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path, max_replays=0) as (client, engines):
            reader = Reader(client, request())
            await engines.got(1)
            engines.end()
            assert isinstance((await reader.end()).error, EngineDead)
            assert isinstance((await Reader(client, request()).end()).error, EngineDead)
        client = SocketEngineClient(str(tmp_path / "none.sock"), max_replays=2)
        await client.start()
        assert isinstance((await Reader(client, request()).end()).error, EngineDead)
        await client.aclose()

    run(scenario())


def test_waiting_ends_when_restarts_have_failed(tmp_path: Path) -> None:
    async def scenario() -> None:
        hopeless: list[bool] = []
        async with connected(tmp_path, has_given_up=lambda: bool(hopeless)) as (client, engines):
            reader = Reader(client, request())
            await engines.got(1)
            engines.end()
            await asyncio.sleep(0.3)
            assert not reader.task.done()
            hopeless.append(True)
            assert isinstance((await reader.end()).error, EngineDead)
            assert isinstance((await Reader(client, request()).end()).error, EngineDead)
            await engines.start()
            await until(lambda: client.ready is not None)
            later = Reader(client, request("later"))
            assert await engines.got(1) == [request("later")]
            engines.tokens("later", 1, reason="stop")
            assert (await later.end()).error is None

    run(scenario())


def test_a_drain_that_ends_while_requests_wait_ends_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (client, engines):
            reader = Reader(client, request())
            await engines.got(1)
            engines.end()
            await until(lambda: client.ready is None)
            await client.aclose()
            assert isinstance((await reader.end()).error, ShuttingDown)

    run(scenario())


def test_a_load_that_fails_between_two_engines_counts_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (client, engines):
            reader = Reader(client, request())
            await engines.got(1)
            engines.begin("r")
            for _ in range(4):  # engines that greet, and end before they begin
                await restart(client, engines)
                (message,) = await engines.got(1)
            assert message.num_replays == 4
            engines.tokens("r", 1, reason="stop")
            assert (await reader.end()).error is None

    run(scenario())


def test_poison_ends_alone_and_every_later_engine_is_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (client, engines):
            bad, good = Reader(client, request("bad")), Reader(client, request("good one"))
            await engines.got(2)
            for number in range(3):
                if number < 2:  # with others in the engine nobody knows whose fault it is
                    engines.begin("bad", "good one")
                    engines.tokens("good one", 1)
                else:
                    engines.send(Alone("bad"))
                    engines.begin("bad")
                await asyncio.sleep(0.02)
                await restart(client, engines)
                received = await engines.got(2)
                is_isolated = [message.is_isolated for message in received if isinstance(message, AddRequest)]
                assert is_isolated == [[False, False], [True, False], [False]][number]
            error = (await bad.end()).error
            assert isinstance(error, PoisonRequest)
            assert "token 1" in error.message
            refuse, again = received
            assert isinstance(refuse, RefuseDigest)
            assert refuse.digest == digest_of(request("bad"))
            assert again.request_id == "good one"
            await restart(client, engines)
            assert isinstance((await engines.got(2))[0], RefuseDigest)
            engines.tokens("good one", 1, reason="stop")
            assert (await good.end()).error is None

    run(scenario())


def test_a_request_that_the_engine_has_set_aside_is_not_accused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (client, engines):
            readers = [Reader(client, request(name)) for name in ("aside", "again", "beside")]
            await engines.got(3)
            engines.begin("aside", "again", "beside")
            engines.send(SetAside(["aside", "again", "of no reader"]))
            engines.begin("again")
            await asyncio.sleep(0.02)
            await restart(client, engines)
            received = await engines.got(3)
            assert {message.request_id: message.is_suspect for message in received} == {
                "aside": False, "again": True, "beside": True
            }  # fmt: skip
            for name in ("aside", "again", "beside"):
                engines.tokens(name, 1, reason="stop")
            for reader in readers:
                assert (await reader.end()).error is None

    run(scenario())


def test_kills_from_outside_make_nobody_poison_and_have_a_limit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path, was_killed=lambda: True) as (client, engines):
            reader = Reader(client, request())
            for number in range(3):
                (message,) = await engines.got(1)
                assert (message.num_replays, message.is_suspect) == (number, False)
                engines.begin("r")
                await asyncio.sleep(0.02)
                await restart(client, engines)
            error = (await reader.end()).error
            assert isinstance(error, EngineDead)
            assert "3 times in a row" in error.message

    run(scenario())


def test_an_abort_reaches_the_engine_that_runs_the_replay(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (client, engines):
            reader = Reader(client, request())
            await engines.got(1)
            await restart(client, engines)
            await engines.got(1)
            client.abort("r")
            assert (await engines.got(2))[1] == AbortRequest("r")
            engines.tokens("r", reason="abort")
            assert (await reader.end()).outputs[-1].finish_reason == "abort"

    run(scenario())


def test_the_launcher_tells_how_the_engine_ended_before_requests_go_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        ends = [0]
        killed: list[bool] = []
        options = {"num_ends": lambda: ends[0], "was_killed": lambda: bool(killed)}
        async with connected(tmp_path, **options) as (client, engines):
            reader = Reader(client, request())
            await engines.got(1)
            engines.begin("r")
            await asyncio.sleep(0.02)
            engines.end()
            await until(lambda: client.ready is None)
            await engines.start()
            await asyncio.sleep(0.3)
            assert (client.ready, engines.received) == (None, [])
            ends[0] += 1
            killed.append(True)
            (again,) = await engines.got(1)
            assert not again.is_suspect
            engines.tokens("r", 1, reason="stop")
            assert (await reader.end()).error is None

    run(scenario())


def test_a_lost_connection_to_an_engine_that_lives_accuses_nobody(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("engine.interface.socket_client._MAX_TOLD_S", 0.1)

    async def scenario() -> None:
        async with connected(tmp_path, num_ends=lambda: 0) as (client, engines):
            reader = Reader(client, request())
            for number in range(3):
                (message,) = await engines.got(1)
                assert (message.num_replays, message.is_suspect) == (number, False)
                engines.begin("r")
                await asyncio.sleep(0.02)
                if number < 2:
                    await restart(client, engines)
            engines.tokens("r", 1, reason="stop")
            assert (await reader.end()).error is None

    run(scenario())


def test_an_embedding_is_progress(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path, was_killed=lambda: True) as (client, engines):
            long = Reader(client, request("long", pooling="mean"))
            for number in range(4):
                short = Reader(client, request(f"short {number}", pooling="mean"))
                await engines.got(2)
                engines.begin("long", f"short {number}")
                done = StepEvents(0, [f"short {number}"], [0], [], embeddings={0: b"1234"})
                done.finished = [Finished(0, "stop", None)]
                engines.send(done)
                assert (await short.end()).error is None
                await restart(client, engines)
            await engines.got(1)
            assert long.error is None
            client.abort("long")
            engines.tokens("long", reason="abort")
            await long.end()

    run(scenario())


def test_a_request_is_charged_once_by_the_engine_that_accepts_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        charge = Charge(1, 9)
        async with connected(tmp_path, was_killed=lambda: True) as (client, engines):
            names = ("sent", "accepted", "begun")
            readers = [Reader(client, request(name, charge=charge)) for name in names]
            await engines.got(3)
            assert [client.is_decided(name) for name in names] == [False, False, False]
            engines.send(Accepted("accepted"))
            engines.begin("begun")
            await asyncio.sleep(0.02)
            assert [client.is_decided(name) for name in names] == [False, True, True]
            await restart(client, engines)
            again = {message.request_id: message for message in await engines.got(3)}
            assert [again[name].is_charged for name in names] == [False, True, True]
            assert all(message.charge == charge for message in again.values())
            for name in names:
                engines.tokens(name, 1, reason="stop")
            for reader in readers:
                assert (await reader.end()).error is None
            assert client.is_decided("sent")

    run(scenario())


def test_an_engine_is_told_the_costs_that_an_earlier_one_measured(tmp_path: Path) -> None:
    async def scenario() -> None:
        costs = QueueCosts(1.0, 1000.0, 2.0, 100.0, (0.5, 3.0), {"team": (40.0, 5.0)})
        async with connected(tmp_path) as (client, engines):
            engines.send(costs)
            await asyncio.sleep(0.02)
            await restart(client, engines)
            assert await engines.got(1) == [costs]

    run(scenario())


def test_requests_go_on_at_the_socket_of_a_next_daemon(tmp_path: Path) -> None:
    async def scenario() -> None:
        moved_to = ""
        async with connected(tmp_path, moved_to=lambda: moved_to) as (client, engines):
            reader = Reader(client, request())
            await engines.got(1)
            engines.tokens("r", 5, started=True)
            await until(lambda: reader.token_ids == [5])
            engines.end()
            await until(lambda: client.ready is None)
            assert client.last_ready == READY
            (tmp_path / "next").mkdir()
            following = Engines(str(tmp_path / "next" / "engine.sock"))
            await following.start()
            late = Reader(client, request("late"))
            moved_to = following.path
            again, first = await following.got(2)
            waited = msgspec.structs.replace(request("late"), has_waited=True)
            assert (again.output, first) == (pack_token_ids([5]), waited)
            following.send(RequestFailed("r", "context_length_exceeded", "It is too long."))
            following.send(RequestFailed("late", "context_length_exceeded", "It is too long."))
            await reader.end()
            assert reader.outputs[-1].finish_reason == "length"  # no token has room behind what the client has
            assert (await late.end()).error.code == "context_length_exceeded"
            following.end()
            engines.path = following.path  # for the end of the scenario
            await engines.start()

    run(scenario())


def test_no_more_requests_wait_than_the_last_engine_would_have_taken(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (client, engines):
            engines.end()
            await until(lambda: client.ready is None)
            most = READY.max_num_seqs + READY.max_queued_requests
            readers = [Reader(client, request(f"r{i}")) for i in range(most + 1)]
            refused = await readers[-1].end()
            assert (refused.error.code, refused.error.retry_after_s) == ("overloaded", 10)
            assert not any(reader.task.done() for reader in readers[:-1])
            await engines.start()
            submitted = await engines.got(most)
            assert [(each.has_waited, each.num_replays) for each in submitted] == [(True, 0)] * most
            for reader in readers[:-1]:
                reader.task.cancel()
            await asyncio.gather(*(reader.task for reader in readers[:-1]), return_exceptions=True)

    run(scenario())


def test_no_more_tokens_wait_than_the_last_engine_would_have_taken(tmp_path: Path) -> None:
    most = READY.num_blocks * READY.block_size + READY.max_queued_tokens

    def long(request_id: str, num_tokens: int) -> AddRequest:
        return AddRequest(request_id, bytes(4 * num_tokens), SamplingParams(max_tokens=4), arrival_s=0.0)

    async def scenario() -> None:
        async with connected(tmp_path) as (client, engines):
            engines.end()
            await until(lambda: client.ready is None)
            first = Reader(client, long("first", most + 1))  # alone it waits, whatever its length is
            await asyncio.sleep(0)
            assert (await Reader(client, long("second", 1)).end()).error.code == "overloaded"
            client.abort("first")
            await first.end()
            readers = [Reader(client, long(name, most // 2)) for name in "ab"]
            await asyncio.sleep(0)
            refused = await Reader(client, long("c", most)).end()
            assert (refused.error.code, refused.error.retry_after_s) == ("overloaded", 10)
            await engines.start()
            assert [each.request_id for each in await engines.got(2)] == ["a", "b"]
            for reader in readers:
                reader.task.cancel()
            await asyncio.gather(*(reader.task for reader in readers), return_exceptions=True)

    run(scenario())


@pytest.mark.parametrize("event", ["nothing", "accepted", "begun"])
def test_the_error_of_an_engine_that_died_tells_how_far_it_came(event: str) -> None:
    mailbox = Mailbox(AddRequest("a", b"", SamplingParams(max_tokens=4), arrival_s=0.0))
    if event == "accepted":
        mailbox.journal.accept()
    elif event == "begun":
        mailbox.journal.begin(None)
    error = EngineDead("It died.")
    mailbox.fail(error)
    assert (error.was_accepted, error.was_begun) == (event != "nothing", event == "begun")


def test_what_another_engine_had_accepted_stays_accepted() -> None:
    request = AddRequest("a", b"", SamplingParams(max_tokens=4), arrival_s=0.0, num_replays=1, is_charged=True)
    journal = Journal(request)
    assert journal.goes_on
    assert journal.is_accepted
    journal.submit()
    again = journal.submit()
    assert (again.is_charged, again.num_replays) == (True, 2)


@pytest.mark.parametrize("output", [b"", pack_token_ids([11])])
def test_a_context_that_the_tokens_of_another_engine_fill_is_the_end(output: bytes) -> None:
    mailboxes = Mailboxes()
    request = AddRequest("a", b"", SamplingParams(max_tokens=4), arrival_s=0.0, output=output)

    async def read() -> list[RequestOutput]:
        refused = RequestFailed("a", PromptTooLong.code, "No room.")
        outputs = mailboxes.outputs(request, send=lambda _: mailboxes.deliver(refused, 0.0), abort=lambda: None)
        return [each async for each in outputs]

    if output:
        assert [each.finish_reason for each in asyncio.run(read())] == ["length"]
    else:
        with pytest.raises(PromptTooLong):
            asyncio.run(read())
