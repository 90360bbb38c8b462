"""A server with the real chat page and scripted answers, in a thread: cases that a model rarely makes."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from server.http.routes.api_route import router_of
from server.http.routes.pages import root_routes

Chunk = dict[str, Any]


@dataclass
class Reply:
    """One answer to a chat request.

    is_cut: the connection breaks after the chunks. is_held: it stays open after them, until a test sets it to False.
    """

    chunks: list[Chunk] = field(default_factory=list)
    status: int = 200
    error: dict[str, Any] | None = None  # the body of a bad status, or the last event of a stream
    headers: dict[str, str] = field(default_factory=dict)
    pause_s: float = 0.005
    is_cut: bool = False
    is_held: bool = False
    rest: list[Chunk] = field(default_factory=list)  # what follows once it is no longer held


class FakeServer:
    """Answers on `url` with `replies` in turn, the last again and again. `requests` are the bodies it got."""

    def __init__(self, *, key: str | None = None) -> None:
        self.replies: list[Reply] = []
        self.requests: list[Chunk] = []
        self.num_left = 0  # streams whose client went away
        self.stage, self.done = "ready", 1.0
        self.url = ""
        self._key = key

    def app(self) -> FastAPI:
        """Return the application."""
        app = FastAPI(openapi_url=None)
        app.include_router(router_of(root_routes()))

        @app.get("/ready")
        async def ready() -> Response:
            return JSONResponse({"stage": self.stage, "done": self.done}, 200 if self.stage == "ready" else 503)

        @app.get("/v1/models")
        async def models(request: Request) -> Response:
            if not self._knows(request):
                return _error(401, "invalid_api_key", "This server needs an API key.")
            cards = [
                {"id": name, "max_model_len": 4096 if self.stage == "ready" else None} for name in ("fake", "other")
            ]
            return JSONResponse({"object": "list", "data": cards})

        @app.post("/v1/chat/completions/render")
        async def render() -> Response:
            return JSONResponse({}, headers={"x-quire-ignored": "reasoning_effort"})

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            if not self._knows(request):
                return _error(401, "invalid_api_key", "This server needs an API key.")
            if self.stage != "ready":
                return _error(503, "not_ready", f"The server is not ready: {self.stage}.")
            self.requests.append(await request.json())
            reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
            if reply.status != 200:
                return JSONResponse({"error": reply.error}, reply.status, headers=reply.headers)
            return StreamingResponse(self._stream(reply), media_type="text/event-stream", headers=reply.headers)

        return app

    async def _stream(self, reply: Reply) -> AsyncGenerator[bytes, None]:
        try:
            for chunks in (reply.chunks, reply.rest):
                for chunk in chunks:
                    yield _event({"id": "chatcmpl-1", "model": "fake", **chunk})
                    await asyncio.sleep(reply.pause_s)
                while reply.is_held:
                    yield b": ping\n\n"
                    await asyncio.sleep(0.02)
            if reply.is_cut:
                raise ConnectionResetError("as the script has it")
            if reply.error is not None:
                yield _event({"error": reply.error})
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.num_left += 1
            raise

    def _knows(self, request: Request) -> bool:
        return self._key is None or request.headers.get("authorization") == f"Bearer {self._key}"


@contextlib.contextmanager
def serving(fake: FakeServer) -> Iterator[FakeServer]:
    """Serve on a free port until the block ends."""
    server = uvicorn.Server(uvicorn.Config(fake.app(), port=0, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    fake.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    yield fake
    server.should_exit = True
    thread.join(5)


def delta(finish: str | None = None, **parts: Any) -> Chunk:
    """Return one chunk of a stream."""
    return {"choices": [{"index": 0, "delta": parts, "finish_reason": finish}]}


def told(text: str, *, thoughts: str = "", size: int = 4, finish: str = "stop") -> list[Chunk]:
    """Return the chunks of an answer: its text in pieces, then usage and timings."""
    chunks = [delta(role="assistant", content="")]
    chunks += [delta(reasoning_content=thoughts[i : i + size]) for i in range(0, len(thoughts), size)]
    chunks += [delta(content=text[i : i + size]) for i in range(0, len(text), size)]
    usage = {"prompt_tokens": 40, "completion_tokens": len(chunks) - 1, "prompt_tokens_details": {"cached_tokens": 32}}
    timings = {"queue_ms": 1.0, "prefill_ms": 30.0, "ttft_ms": 41.2, "itl_ms": 8.0, "total_ms": 500.0}
    return [*chunks, delta(finish), {"choices": [], "usage": usage, "timings": timings}]


def called(name: str, arguments: str, *, size: int = 5) -> list[Chunk]:
    """Return the chunks of an answer that is one tool call."""
    head = {"index": 0, "id": "call_1", "type": "function", "function": {"name": name, "arguments": ""}}
    pieces = [arguments[i : i + size] for i in range(0, len(arguments), size)]
    return [
        delta(role="assistant", content=""),
        delta(tool_calls=[head]),
        *(delta(tool_calls=[{"index": 0, "function": {"arguments": piece}}]) for piece in pieces),
        delta("tool_calls"),
    ]


def _event(value: Chunk) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _error(status: int, code: str, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": code}}, status)
