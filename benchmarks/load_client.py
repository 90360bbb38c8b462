"""One load-generating process: streams answers from an OpenAI-compatible server over raw asyncio sockets.

run_load() sends a load from this process; serve_load() is the body of a client process, controlled through a pipe.
"""

import asyncio
import contextlib
import json
import ssl
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from random import Random
from typing import Any

import msgspec

from benchmarks.load_connection import RequestFailed, RequestTiming, StreamConnection

# Common enough to be one token each, with the space before, in most vocabularies
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend"
)


class LoadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A load: `concurrency` requests at once (closed loop), or Poisson arrivals at `rate_per_s` if > 0."""

    host: str
    port: int
    is_tls: bool = False
    path: str = "/v1/completions"  # or a path that ends with /chat/completions
    model: str
    api_key: str = ""
    num_requests: int = 100
    concurrency: int = 1
    rate_per_s: float = 0.0
    input_len: int = 512  # tokens, or words if prompts are text
    output_len: int = 128  # tokens
    prompt_format: str = "ids"  # ids | text
    ignores_eos: bool = True  # send ignore_eos, so that every answer has output_len tokens
    vocab_size: int = 10_000  # prompt ids are drawn below it
    seed: int = 0
    timeout_s: float = 600.0  # of one request


class LoadResult(msgspec.Struct):
    """Measurements of one process. cpu_s: its own CPU time, which shows whether the client was the limit."""

    timings: list[RequestTiming]
    wall_s: float
    cpu_s: float


def run_load(config: LoadConfig, stop_fd: int | None = None) -> LoadResult:
    """Send the load and return its timings. Blocks until every request has ended, or `stop_fd` is readable."""
    bodies = make_bodies(config)
    started_s, cpu_started_s = time.perf_counter(), time.process_time()
    timings: list[RequestTiming] = []
    asyncio.run(_run(config, bodies, timings, stop_fd))
    return LoadResult(timings, time.perf_counter() - started_s, time.process_time() - cpu_started_s)


def serve_load(connection: Connection, config: LoadConfig) -> None:
    """Report readiness, wait for the start message, send the load, return the result. A second message ends it."""
    connection.send_bytes(b"up")
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        connection.recv_bytes()
        connection.send_bytes(msgspec.msgpack.encode(run_load(config, stop_fd=connection.fileno())))


def make_bodies(config: LoadConfig) -> Iterator[bytes]:
    """Return the bytes of every request, made before the clock starts."""
    rng = Random(config.seed)
    return iter([_body(config, rng) for _ in range(config.num_requests)])


def _body(config: LoadConfig, rng: Random) -> bytes:
    payload: dict[str, Any] = {"model": config.model, "temperature": 0.0, "stream": True}
    payload["stream_options"] = {"include_usage": True}
    if config.ignores_eos:
        payload["ignore_eos"] = True
    text = " ".join(rng.choices(_WORDS.split(), k=config.input_len)) if config.prompt_format == "text" else ""
    if config.path.endswith("/chat/completions"):
        payload |= {"messages": [{"role": "user", "content": text}], "max_completion_tokens": config.output_len}
    else:
        payload |= {"prompt": text or [rng.randrange(config.vocab_size) for _ in range(config.input_len)]}
        payload["max_tokens"] = config.output_len
    body = json.dumps(payload).encode()
    host = f"[{config.host}]" if ":" in config.host else config.host
    head = f"POST {config.path} HTTP/1.1\r\nHost: {host}:{config.port}\r\nContent-Type: application/json\r\n"
    if config.api_key:
        head += f"Authorization: Bearer {config.api_key}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _run(config: LoadConfig, bodies: Iterator[bytes], timings: list[RequestTiming], stop_fd: int | None) -> None:
    clients = _Clients(config, timings)
    send = clients.send_at_times if config.rate_per_s > 0 else clients.send_in_closed_loop
    task = asyncio.create_task(send(bodies))
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

    async def send_in_closed_loop(self, bodies: Iterator[bytes]) -> None:
        """Keep `concurrency` requests open until all are sent."""

        async def client() -> None:
            for body in bodies:
                await self._send(body)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._config.concurrency):
                group.create_task(client())

    async def send_at_times(self, bodies: Iterator[bytes]) -> None:
        """Send at the times of a Poisson process, independent of the answers."""
        rng = Random(self._config.seed + 1)
        due_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for body in bodies:
                due_s += rng.expovariate(self._config.rate_per_s)
                await asyncio.sleep(due_s - time.perf_counter())
                group.create_task(self._send(body))

    def close(self) -> None:
        """Close the idle connections; the others closed with their requests."""
        for connection in self._idle:
            connection.close()

    async def _send(self, body: bytes) -> None:
        timing = RequestTiming(time.perf_counter())
        self._timings.append(timing)
        connection: StreamConnection | None = None
        try:
            async with asyncio.timeout(self._config.timeout_s):
                connection = await self._connect()
                await connection.request(body, timing)
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
