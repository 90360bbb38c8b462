"""The work on a large body ends with its client, wherever it is, and the body makes room."""

import asyncio
import json
import threading

import pytest

from server.api.heavy_work import HeavyWork
from server.api.limits import LIMITS
from tests.unit.server.conftest import CHAT, COMPLETIONS

TEXT = "q" * (LIMITS.small_body_bytes + 1)
MESSAGES = [{"role": "user", "content": TEXT}]
BODIES = {
    CHAT: {"messages": MESSAGES},
    f"{CHAT}/render": {"messages": MESSAGES},
    COMPLETIONS: {"prompt": TEXT},
    "/v1/responses": {"input": TEXT},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 5},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": MESSAGES},
    "/v1/embeddings": {"input": TEXT},
    "/tokenize": {"messages": MESSAGES},
    "/detokenize": {"tokens": [5] * 40_000},
}


async def leave(app, path: str) -> None:
    """Send a body and be gone; return when the app has ended the request."""
    messages = [{"type": "http.request", "body": json.dumps(BODIES[path]).encode(), "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def send(message):
        pass

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    await app.app({**scope, "headers": [(b"content-type", b"application/json")]}, receive, send)


# rule: Limits: The work on a large body ends with its client, and the body makes room
@pytest.mark.parametrize("kind", ["body", "heavy"])
def test_work_on_a_large_body_ends_with_its_client(harness, kind, monkeypatch):
    app, may_go = harness(pooling="last"), threading.Event()
    places: list[int] = []
    monkeypatch.setattr("server.api.large_bodies.LargeBodies.hold", lambda bodies, num_bytes: places.append(num_bytes))
    run, run_alone = HeavyWork.run, HeavyWork.run_alone

    async def held_run(work, num_bytes, job, **kwargs):
        if kind == "heavy" and num_bytes > LIMITS.small_body_bytes:
            return await run(work, num_bytes, lambda: may_go.wait(300), **kwargs)
        return await run(work, num_bytes, job, **kwargs)

    async def held_alone(work, job):
        if kind == "body":
            return await run_alone(work, lambda: may_go.wait(300))
        return await run_alone(work, job)

    monkeypatch.setattr(HeavyWork, "run", held_run)
    monkeypatch.setattr(HeavyWork, "run_alone", held_alone)

    async def send_all() -> None:
        paths = [path for path in BODIES if kind == "body" or path != "/detokenize"]
        await asyncio.gather(*(leave(app, path) for path in paths))

    try:
        asyncio.run(asyncio.wait_for(send_all(), 60))
    finally:
        may_go.set()
    assert sum(places) == 0
    assert app.metrics.drain().counters["http_disconnects_total", ""] == len(BODIES) - (kind == "heavy")
