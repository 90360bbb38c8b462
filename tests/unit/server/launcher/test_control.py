"""The control channel between launcher and workers: state, exact scrapes, and ends, over real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from engine.interface.control import (
    Drain,
    EngineFailed,
    Flush,
    Flushed,
    FromLauncher,
    Hello,
    MetricsDelta,
    Stage,
    State,
)
from engine.interface.errors import EngineError
from engine.interface.metrics import Metrics
from engine.interface.transport import encode_frame, read_messages
from server.http.launcher_link import LauncherLink
from server.launcher.control_server import ControlServer, fetch_engine_limits
from server.launcher.metrics_registry import MetricsRegistry


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test in a loop of its own, at most a minute."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something that another task does has happened."""
    while not condition():
        await asyncio.sleep(0.005)


class Daemon:
    """A control server on a socket, with what its children said."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.messages: list[tuple[Hello, Any]] = []
        self.served: dict[int, list[str]] = {}  # by worker: the ids of its requests
        self.cancelled: list[tuple[int, str, str]] = []
        self.control = ControlServer(
            registry=MetricsRegistry(model_name="tiny", version="1"),
            on_message=lambda hello, message: self.messages.append((hello, message)),
        )

    async def worker(self, index: int) -> tuple[LauncherLink, Metrics]:
        metrics = Metrics()
        self.served.setdefault(index, [])

        def cancel_here(request_id: str, *, key_hash: str) -> bool:
            self.cancelled.append((index, request_id, key_hash))
            return request_id in self.served[index]

        launcher = LauncherLink(self.path, worker_index=index, metrics=metrics, on_cancel=cancel_here)
        await launcher.start()
        await until(lambda: any(hello.role == "worker" and hello.index == index for hello, _ in self.messages))
        return launcher, metrics


@asynccontextmanager
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    running = Daemon(str(tmp_path / "control.sock"))
    await running.control.start(running.path)
    try:
        yield running
    finally:
        await running.control.aclose()


@in_loop
async def test_a_worker_learns_the_state_at_once_and_every_change(tmp_path: Path) -> None:
    async with daemon(tmp_path) as running:
        running.control.set_state(stage=Stage("weights", 1, 2))
        worker, _ = await running.worker(0)
        await until(lambda: worker.state == State(Stage("weights", 1, 2), False))
        running.control.set_state(stage=Stage("ready"))
        await until(lambda: worker.state.stage.name == "ready")
        running.control.set_state(fault="stalled")
        await until(lambda: worker.state.fault == "stalled")
        running.control.set_state(is_draining=True)
        await until(lambda: worker.state == State(Stage("ready"), True, "stalled"))
        running.control.set_state(fault="")
        await until(lambda: not worker.state.fault)
        await worker.aclose()


@in_loop
async def test_a_scrape_at_any_worker_counts_what_all_counted_up_to_now(tmp_path: Path) -> None:
    async with daemon(tmp_path) as running:
        running.control.set_state(stage=Stage("ready"))
        workers = [await running.worker(index) for index in range(3)]
        for round_ in range(1, 4):
            for _, metrics in workers:
                metrics.count("http_disconnects_total", 10)
            for launcher, _ in workers:
                assert (
                    f'quire_http_disconnects_total{{model_name="tiny"}} {round_ * 30}.0'
                    in (await launcher.scrape()).decode()
                )
        pages = await asyncio.gather(*(launcher.scrape() for launcher, _ in workers for _ in range(5)))
        assert len(set(pages)) == 1
        for launcher, _ in workers:
            await launcher.aclose()


@in_loop
async def test_a_scrape_asks_the_engine_after_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has flushed has also written its aborts to the engine, which must count them first."""
    monkeypatch.setattr("server.launcher.control_server._FLUSH_TIMEOUT_S", 60.0)
    monkeypatch.setattr("server.http.launcher_link._SCRAPE_TIMEOUT_S", 60.0)
    order: list[str] = []

    async def child(role: str, delay_s: float) -> None:
        reader, writer = await asyncio.open_unix_connection(running.path)
        writer.write(encode_frame(Hello(role, 7, 1)))
        async for message in read_messages(reader, FromLauncher):
            if isinstance(message, Flush):
                order.append(f"{role} asked")
                await asyncio.sleep(delay_s)
                order.append(f"{role} answers")
                writer.write(encode_frame(Flushed(message.number)))
        writer.close()

    async with daemon(tmp_path) as running:
        running.control.set_state(stage=Stage("ready"))
        children = [asyncio.create_task(child("engine", 0.01)), asyncio.create_task(child("worker", 0.05))]
        await until(lambda: len(running.messages) == 2)
        worker, _ = await running.worker(0)
        await worker.scrape()
        assert order == ["worker asked", "worker answers", "engine asked", "engine answers"]
        await worker.aclose()
    await asyncio.gather(*children)


@in_loop
async def test_an_engine_that_stands_still_is_not_asked_until_it_goes_on(tmp_path: Path) -> None:
    asked = 0

    async def engine() -> None:
        nonlocal asked
        reader, writer = await asyncio.open_unix_connection(running.path)
        writer.write(encode_frame(Hello("engine", 0, 1)))
        async for message in read_messages(reader, FromLauncher):
            asked += 1
            writer.write(encode_frame(Flushed(message.number)))
        writer.close()

    async with daemon(tmp_path) as running:
        child = asyncio.create_task(engine())
        await until(lambda: len(running.messages) == 1)
        worker, _ = await running.worker(0)
        for fault, expected in (("", 1), ("stalled", 1), ("", 2)):
            running.control.set_state(stage=Stage("ready"), fault=fault)
            await worker.scrape()
            assert asked == expected
        await worker.aclose()
    await child


@in_loop
@pytest.mark.slow
async def test_children_that_all_hang_do_not_make_a_scrape_fail(tmp_path: Path) -> None:
    async with daemon(tmp_path) as running:
        running.control.set_state(stage=Stage("ready"))
        for role in ("engine", "worker"):
            _, writer = await asyncio.open_unix_connection(running.path)
            writer.write(encode_frame(Hello(role, 7, 1)))
        await until(lambda: len(running.messages) == 2)
        worker, _ = await running.worker(0)
        assert b"quire_build_info" in await worker.scrape()
        await worker.aclose()


@in_loop
async def test_counts_of_a_worker_that_ends_are_not_lost(tmp_path: Path) -> None:
    async with daemon(tmp_path) as running:
        first, metrics = await running.worker(0)
        second, _ = await running.worker(1)
        metrics.count("http_disconnects_total", 4)
        await first.aclose()
        await running.control.settle("worker", 0)
        assert b'quire_http_disconnects_total{model_name="tiny"} 4.0' in await second.scrape()
        await second.aclose()


@pytest.mark.parametrize("stage", ["weights", "ready"])
@in_loop
@pytest.mark.slow
async def test_an_engine_that_hangs_or_loads_does_not_hold_up_a_scrape(tmp_path: Path, stage: str) -> None:
    async with daemon(tmp_path) as running:
        reader, writer = await asyncio.open_unix_connection(running.path)
        writer.write(encode_frame(Hello("engine", 0, 1)) + encode_frame(Stage(stage)))
        await until(lambda: len(running.messages) == 2)
        running.control.set_state(stage=Stage(stage))
        worker, _ = await running.worker(0)
        assert b"quire_build_info" in await worker.scrape()  # within the worker's own limit
        await worker.aclose()
        writer.close()
        flushes = [message async for message in read_messages(reader, FromLauncher)]
        assert [type(message) for message in flushes] == ([Flush] if stage == "ready" else [])


@in_loop
async def test_a_scrape_without_an_answer_is_an_error_and_not_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.http.launcher_link._SCRAPE_TIMEOUT_S", 0.2)
    path = str(tmp_path / "control.sock")

    async def greet_and_no_more(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode_frame(State(Stage("ready"), False)))
        await asyncio.sleep(60)

    server = await asyncio.start_unix_server(greet_and_no_more, path)
    worker = LauncherLink(path, worker_index=0, metrics=Metrics(), on_cancel=lambda request_id, *, key_hash: False)
    await worker.start()
    with pytest.raises(EngineError, match="in time"):
        await worker.scrape()
    await worker.aclose()
    server.close()


@in_loop
async def test_a_cancel_reaches_every_other_worker(tmp_path: Path) -> None:
    async with daemon(tmp_path) as running:
        workers = [(await running.worker(index))[0] for index in range(3)]
        running.served[2] = ["cmpl-1"]
        assert await workers[0].cancel("cmpl-1", key_hash="k")
        assert sorted(running.cancelled) == [(1, "cmpl-1", "k"), (2, "cmpl-1", "k")]
        assert not await workers[2].cancel("cmpl-1", key_hash="k")  # its own requests it knows itself
        for worker in workers[1:]:
            await worker.aclose()
        await until(lambda: len(running.control._children) == 1)
        assert not await workers[0].cancel("cmpl-1", key_hash="k")
        await workers[0].aclose()


@in_loop
@pytest.mark.slow
async def test_a_cancel_that_a_hung_worker_leaves_unanswered_is_an_error(tmp_path: Path) -> None:
    async with daemon(tmp_path) as running:
        worker, _ = await running.worker(0)
        _, writer = await asyncio.open_unix_connection(running.path)
        writer.write(encode_frame(Hello("worker", 1, 1)))  # which then says nothing
        await until(lambda: len(running.messages) == 2)
        with pytest.raises(EngineError, match="Not every HTTP worker"):
            await worker.cancel("cmpl-1", key_hash="")
        writer.close()
        await worker.aclose()


@in_loop
async def test_drain_is_passed_on_and_the_launchers_end_is_an_end_without_delay(tmp_path: Path) -> None:
    async with daemon(tmp_path) as running:
        first, _ = await running.worker(0)
        second, _ = await running.worker(1)
        running.control.send(Drain(7.5), role="worker", index=0)
        assert await first.wait_end() == 7.5
        assert first.state.is_draining
        assert not second.state.is_draining
    assert await second.wait_end() == 0.0
    assert second.state.is_draining
    await until(lambda: not first.is_connected)
    await first.aclose()
    await second.aclose()


@in_loop
async def test_a_worker_that_fails_says_why_before_it_ends(tmp_path: Path) -> None:
    async with daemon(tmp_path) as running:
        worker, _ = await running.worker(2)
        worker.fail("The tokenizer is broken.", 3)
        await worker.aclose()
        await running.control.settle("worker", 2)
        hello, message = running.messages[-1]
        assert (hello.role, hello.index) == ("worker", 2)
        assert message == EngineFailed("The tokenizer is broken.", 3)


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff",
        b"\x03\x00\x00\x00abc",
        encode_frame(Stage("ready")),
        encode_frame(Hello("engine", 0, 1)) + encode_frame(MetricsDelta({("no_such_total", ""): 1.0})),
    ],
)
@in_loop
async def test_nonsense_costs_its_sender_the_connection_and_nobody_else(tmp_path: Path, frame: bytes) -> None:
    async with daemon(tmp_path) as running:
        worker, _ = await running.worker(0)
        reader, writer = await asyncio.open_unix_connection(running.path)
        writer.write(frame)
        assert await reader.read() == b""
        writer.close()
        assert b"quire_build_info" in await worker.scrape()
        await worker.aclose()


def test_an_engine_that_ends_before_its_greeting_has_no_limits(tmp_path: Path) -> None:
    """A connection that was never accepted is reset by the engine's end."""
    path = str(tmp_path / "engine.sock")

    async def run() -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            asked = asyncio.create_task(fetch_engine_limits(path))
            await asyncio.sleep(0.1)
            assert not asked.done()
        assert await asyncio.wait_for(asked, 60) is None
        assert await fetch_engine_limits(path) is None

    asyncio.run(run())
