"""A server that speaks enough of OpenAI's API to be loaded, and fails on demand. Runs in a thread of the test."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

Replies = list[tuple[str, dict[str, Any]]]  # (path, body) of every POST, in order


class FakeOpenAI:
    """Answers on `url`.

    behaviour: good | ids | chunky | no-usage | only-text | unauthorized | error | cut | overloaded.
    ids: with the token ids of answers, which are 9, where a request asks for them.
    """

    def __init__(self, behaviour: str, *, prefix: str = "/v1") -> None:
        self.requests: Replies = []
        self._behaviour = behaviour
        self._prefix = prefix
        self._port = 0

    @property
    def url(self) -> str:
        """The server without any path."""
        return f"http://127.0.0.1:{self._port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until its client leaves."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                path = head.split(" ")[1]
                length = next((line for line in head.splitlines() if line.startswith("content-length:")), ":0")
                body = await reader.readexactly(int(length.partition(":")[2]))
                if not await self._answer(writer, path, json.loads(body) if body else None):
                    break
        writer.close()

    async def serve(self, started: threading.Event, stop: asyncio.Event) -> None:
        """Listen on a free port until `stop`."""
        server = await asyncio.start_server(self.handle, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        server.close()

    async def _answer(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any] | None) -> bool:
        """Answer one request; return whether the connection goes on."""
        if self._behaviour == "unauthorized":
            return self._plain(writer, 401, {"error": {"message": "no such key"}})
        if path == f"{self._prefix}/models":
            return self._plain(writer, 200, {"data": [{"id": "fake"}]})
        if body is None or path not in (f"{self._prefix}/completions", f"{self._prefix}/chat/completions"):
            return self._plain(writer, 404, {"detail": "Not Found"})
        self.requests.append((path, body))
        if self._behaviour == "only-text" and ("ignore_eos" in body or isinstance(body.get("prompt"), list)):
            return self._plain(writer, 422, {"detail": [{"loc": ["body"], "msg": "ids and ignore_eos are not known"}]})
        is_trial = len(self.requests) == 1
        if self._behaviour == "overloaded" and not is_trial:
            return self._plain(writer, 429, {"error": {"message": "queue is full"}})
        return await self._stream(writer, body, is_bad=not is_trial and self._behaviour in ("error", "cut"))

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any], *, is_bad: bool) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        num_tokens = body.get("max_tokens") or body["max_completion_tokens"]
        per_chunk = 4 if self._behaviour == "chunky" else 1
        for i in range(0, num_tokens, per_chunk):
            if is_bad and i >= num_tokens // 2:
                if self._behaviour == "error":
                    await self._event(writer, {"error": {"message": "the engine died", "code": "engine_dead"}})
                    writer.write(b"0\r\n\r\n")
                return self._behaviour == "error"
            text = " word" * min(per_chunk, num_tokens - i)
            choice: dict[str, Any] = {"delta": {"content": text}} if "messages" in body else {"text": text}
            if self._behaviour == "ids" and body.get("return_token_ids"):
                choice |= {"token_ids": [9]}
            await self._event(writer, {"choices": [choice | {"index": 0, "finish_reason": None}]})
        end = {"delta": {}} if "messages" in body else {"text": ""}
        await self._event(writer, {"choices": [end | {"index": 0, "finish_reason": "length"}]})
        if self._behaviour != "no-usage":
            usage = {"prompt_tokens": 7, "completion_tokens": num_tokens}
            await self._event(writer, {"choices": [], "usage": usage})
        await self._event(writer, None)
        writer.write(b"0\r\n\r\n")
        return True

    async def _event(self, writer: asyncio.StreamWriter, payload: dict[str, Any] | None) -> None:
        line = b"data: " + (b"[DONE]" if payload is None else json.dumps(payload).encode()) + b"\n\n"
        writer.write(b"%x\r\n%s\r\n" % (len(line), line))
        await writer.drain()
        await asyncio.sleep(0.001)

    def _plain(self, writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> bool:
        data = json.dumps(body).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data))
        return True


@contextlib.contextmanager
def fake_openai(behaviour: str, *, prefix: str = "/v1") -> Iterator[FakeOpenAI]:
    """Run a FakeOpenAI for the length of a `with`."""
    fake = FakeOpenAI(behaviour, prefix=prefix)
    started, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(fake.serve(started, stop),))
    thread.start()
    assert started.wait(60)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()
