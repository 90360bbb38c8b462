"""One load-generating process: streams answers from an OpenAI-compatible server over raw asyncio sockets.

run_load() sends a load from this process; serve_load() is the body of a client process, controlled through a pipe.
"""

import asyncio
import contextlib
import ssl
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from multiprocessing.connection import Connection
from random import Random

import msgspec

from benchmarks.agents import Agent, Turn
from benchmarks.load import Body, Conversation, LoadConfig, make_bodies, make_conversations
from benchmarks.load_connection import Answer, RequestFailed, RequestTiming, StreamConnection
from benchmarks.workloads import AGENT


class LoadResult(msgspec.Struct):
    """Measurements of one process. cpu_s: its own CPU time, which shows whether the client was the limit."""

    timings: list[RequestTiming]
    wall_s: float
    cpu_s: float


def run_load(config: LoadConfig, stop_fd: int | None = None) -> LoadResult:
    """Send the load and return its timings. Blocks until every request has ended, or `stop_fd` is readable."""
    timings: list[RequestTiming] = []
    clients = _Clients(config, timings)
    if config.workload == AGENT:
        send = clients.converse(make_conversations(config))
    elif config.rate_per_s > 0:
        send = clients.send_at_times(make_bodies(config))
    else:
        send = clients.send_in_closed_loop(make_bodies(config))
    started_s, cpu_started_s = time.perf_counter(), time.process_time()
    asyncio.run(_run(clients, send, stop_fd))
    return LoadResult(timings, time.perf_counter() - started_s, time.process_time() - cpu_started_s)


def serve_load(connection: Connection, config: LoadConfig) -> None:
    """Report readiness, wait for the start message, send the load, return the result. A second message ends it."""
    connection.send_bytes(b"up")
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        connection.recv_bytes()
        connection.send_bytes(msgspec.msgpack.encode(run_load(config, stop_fd=connection.fileno())))


async def _run(clients: "_Clients", send: Coroutine[None, None, None], stop_fd: int | None) -> None:
    task = asyncio.create_task(send)
    loop = asyncio.get_running_loop()
    if stop_fd is not None:
        loop.add_reader(stop_fd, task.cancel)
    try:
        await asyncio.wait([task])
    finally:
        if stop_fd is not None:
            loop.remove_reader(stop_fd)
        clients.close()
    if not task.cancelled():
        task.result()


class _Clients:
    """Connections to one server, reused while the server keeps them open."""

    def __init__(self, config: LoadConfig, timings: list[RequestTiming]) -> None:
        self._config = config
        self._timings = timings
        self._idle: deque[StreamConnection] = deque()
        self._tls = ssl.create_default_context() if config.is_tls else None

    async def send_in_closed_loop(self, bodies: Iterator[Body]) -> None:
        """Keep `concurrency` requests open until all are sent."""

        async def client() -> None:
            for body in bodies:
                await self._send(body)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._config.concurrency):
                group.create_task(client())

    async def send_at_times(self, bodies: Iterator[Body]) -> None:
        """Send at the times of a Poisson process, independent of the answers."""
        rng = Random(self._config.seed + 1)
        due_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for body in bodies:
                due_s += rng.expovariate(self._config.rate_per_s)
                await asyncio.sleep(due_s - time.perf_counter())
                group.create_task(self._send(body))

    async def converse(self, conversations: Sequence[tuple[Conversation, Agent]]) -> None:
        """Take all turns of all conversations at once; each waits for its own answers, and parts once."""

        async def take(conversation: Conversation, turns: Sequence[Turn]) -> bool:
            for turn in turns:
                answer = await self._send(conversation.ask(turn))
                if answer is None:  # without it there is no next turn
                    return False
                conversation.hear(answer)
            return True

        async def follow(conversation: Conversation, agent: Agent) -> None:
            if await take(conversation, agent.trunk):
                await asyncio.gather(*(take(conversation.fork(), branch) for branch in agent.branches))

        async with asyncio.TaskGroup() as group:
            for conversation, agent in conversations:
                group.create_task(follow(conversation, agent))

    def close(self) -> None:
        """Close the idle connections; the others closed with their requests."""
        for connection in self._idle:
            connection.close()

    async def _send(self, body: Body) -> Answer | None:
        """Send one request; return its answer, which holds what the load needs of it, or None if it failed."""
        timing = RequestTiming(time.perf_counter(), num_asked=body.num_asked)
        answer = Answer()
        self._timings.append(timing)
        connection: StreamConnection | None = None
        try:
            async with asyncio.timeout(self._config.timeout_s):
                connection = await self._connect()
                await connection.request(body.data, timing, answer)
                return answer
        except RequestFailed as error:
            timing.error_kind, timing.error = error.kind, str(error)
        except TimeoutError:
            timing.error_kind, timing.error = "timeout", f"no end within {self._config.timeout_s:g} s"
        except OSError as error:
            timing.error_kind, timing.error = "connection failed", str(error) or type(error).__name__
        finally:
            if connection is not None and connection.is_reusable:
                self._idle.append(connection)
            elif connection is not None:
                connection.close()
        return None

    async def _connect(self) -> StreamConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            StreamConnection, self._config.host, self._config.port, ssl=self._tls
        )
        return connection
