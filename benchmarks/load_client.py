"""One load-generating process: streams completions from an OpenAI-compatible server over raw asyncio sockets.

An HTTP library costs 5 to 11 µs an event, which would make the client the limit at tens of thousands of tokens a
second; here a chunk costs one scan. It speaks just enough HTTP/1.1: keep-alive POST, chunked replies.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from random import Random

import msgspec


class LoadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to send: `concurrency` requests at once (closed loop), or Poisson arrivals at `rate_per_s` if > 0."""

    host: str
    port: int
    model: str
    path: str = "/v1/completions"
    api_key: str = ""
    num_requests: int = 100
    concurrency: int = 1
    rate_per_s: float = 0.0
    input_len: int = 512  # tokens
    output_len: int = 128  # tokens
    vocab_size: int = 10_000  # prompt ids are drawn below it
    seed: int = 0
    timeout_s: float = 600.0


class RequestTiming(msgspec.Struct):
    """One request as its client saw it; seconds of time.perf_counter()."""

    start_s: float
    first_s: float = 0.0
    end_s: float = 0.0
    num_tokens: int = 0
    itl_s: list[float] = []
    error: str = ""


class LoadResult(msgspec.Struct):
    """What one process measured. cpu_s: its own CPU time, to tell a saturated client from a slow server."""

    timings: list[RequestTiming]
    wall_s: float
    cpu_s: float


def run_load(config: LoadConfig) -> LoadResult:
    """Send the load and return its timings. Blocks until every request has ended."""
    started_s, cpu_started_s = time.perf_counter(), time.process_time()
    timings = asyncio.run(_run(config))
    return LoadResult(timings, time.perf_counter() - started_s, time.process_time() - cpu_started_s)


async def _run(config: LoadConfig) -> list[RequestTiming]:
    rng = Random(config.seed)
    bodies = iter([_body(config, rng) for _ in range(config.num_requests)])
    timings: list[RequestTiming] = []
    if config.rate_per_s > 0:
        tasks = []
        for body in bodies:
            tasks.append(asyncio.create_task(_drain(config, iter([body]), timings)))
            await asyncio.sleep(rng.expovariate(config.rate_per_s))
        await asyncio.gather(*tasks)
    else:
        await asyncio.gather(*(_drain(config, bodies, timings) for _ in range(config.concurrency)))
    return timings


def _body(config: LoadConfig, rng: Random) -> bytes:
    prompt = [rng.randrange(config.vocab_size) for _ in range(config.input_len)]
    payload = {
        "model": config.model,
        "prompt": prompt,
        "max_tokens": config.output_len,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body = json.dumps(payload).encode()
    head = f"POST {config.path} HTTP/1.1\r\nHost: {config.host}:{config.port}\r\nContent-Type: application/json\r\n"
    if config.api_key:
        head += f"Authorization: Bearer {config.api_key}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _drain(config: LoadConfig, bodies: Iterator[bytes], timings: list[RequestTiming]) -> None:
    """Send one body after another over one connection, made again after an error."""
    stream: _Stream | None = None
    for body in bodies:
        timing = RequestTiming(time.perf_counter())
        timings.append(timing)
        try:
            if stream is None:
                loop = asyncio.get_running_loop()
                _, stream = await loop.create_connection(_Stream, config.host, config.port)
            await asyncio.wait_for(stream.request(body, timing), config.timeout_s)
        except (OSError, ValueError, TimeoutError) as error:
            timing.error = f"{type(error).__name__}: {error}"
            if stream is not None:
                stream.close()
            stream = None
    if stream is not None:
        stream.close()


class _Stream(asyncio.Protocol):
    """One connection; one streamed reply at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._timing = RequestTiming(0.0)
        self._done: asyncio.Future[None] | None = None
        self._head = b""
        self._tail = b""
        self._last_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("connection closed before the reply's end")

    async def request(self, body: bytes, timing: RequestTiming) -> None:
        """Send one request and return at the end of its stream, `timing` filled in. Raises ValueError or OSError."""
        assert self._transport is not None
        self._timing, self._head, self._tail = timing, b"", b""
        self._done = asyncio.get_running_loop().create_future()
        self._last_s = timing.start_s
        self._transport.write(body)
        await self._done

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self._head.endswith(b"\r\n\r\n"):
            head, separator, data = (self._head + data).partition(b"\r\n\r\n")
            self._head = head + separator
            if not separator:
                return
            if b" 200 " not in head.split(b"\r\n", 1)[0]:
                self._fail(f"{head.split(bytes([13, 10]), 1)[0].decode()} {data[:300].decode(errors='replace')}")
                return
        # an event may be cut by a read: only what is new counts, the cut's halves together
        joined = self._tail + data
        num_events = joined.count(b'"text":') - self._tail.count(b'"text":')
        if num_events:
            if self._timing.first_s == 0.0:
                self._timing.first_s = now
            else:
                self._timing.itl_s.append(now - self._last_s)
                self._timing.itl_s += [0.0] * (num_events - 1)
            self._last_s = now
        if b"data: [DONE]" in joined and joined.endswith(b"0\r\n\r\n"):
            self._finish(joined, now)
            return
        self._tail = joined[-2048:]

    def _finish(self, tail: bytes, now: float) -> None:
        timing = self._timing
        timing.end_s = now
        position = tail.rfind(b'"completion_tokens":')
        digits = tail[position + 20 :].lstrip()
        timing.num_tokens = int(digits[: len(digits) - len(digits.lstrip(b"0123456789"))] or 0)
        if b'"error"' in tail or timing.first_s == 0.0 or position < 0:
            self._fail("the stream ended with an error or without usage")
        elif self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, message: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ValueError(message))
