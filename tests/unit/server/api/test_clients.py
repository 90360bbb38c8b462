"""Over a real socket: the real openai client, raw server-sent events, and clients that leave."""

import asyncio
import json
import socket
import time
from urllib.parse import urlparse

import openai
import pytest

from engine.interface.errors import EngineDead, Overloaded
from server.api.sse import EventStreamResponse
from tests.unit.server.conftest import USER_HI, serving

TEXT = "Schöne Grüße, 日本語 😀!"


@pytest.fixture
def served(harness):
    app = harness(TEXT)
    with serving(app.app) as url:
        yield app, url


def test_the_openai_client_chats(served):
    app, url = served
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        reply = client.chat.completions.create(model="tiny", messages=USER_HI, logprobs=True, top_logprobs=1, n=2)
        assert [choice.message.content for choice in reply.choices] == [TEXT, TEXT]
        assert reply.choices[0].logprobs.content[0].top_logprobs[0].token
        assert reply.usage.prompt_tokens_details.cached_tokens == 0
        stream = client.chat.completions.create(
            model="tiny", messages=USER_HI, stream=True, n=2, stream_options={"include_usage": True}
        )
        texts, usage = ["", ""], None
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
            usage = chunk.usage or usage
        assert texts == [TEXT, TEXT]
        assert usage.completion_tokens == 2 * len(app.ids(TEXT))
        completion = client.completions.create(model="tiny", prompt=["a", "b"], logprobs=1, max_tokens=200)
        assert [choice.text for choice in completion.choices] == [TEXT, TEXT]
        assert [model.id for model in client.models.list()] == ["tiny", "alias/tiny"]
        with client.chat.completions.stream(model="tiny", messages=USER_HI) as stream:
            assert stream.get_final_completion().choices[0].message.content == TEXT


def test_the_async_openai_client_streams(served):
    _, url = served

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            stream = await client.completions.create(model="tiny", prompt="a", stream=True, max_tokens=200)
            return "".join([chunk.choices[0].text async for chunk in stream])

    assert asyncio.run(ask()) == TEXT


def test_the_openai_client_raises_its_own_errors(served):
    app, url = served
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=3) as client:
        with pytest.raises(openai.NotFoundError) as info:
            client.chat.completions.create(model="gpt", messages=USER_HI)
        assert info.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as info:
            client.chat.completions.create(model="tiny", messages=USER_HI, max_tokens=9999)
        assert info.value.code == "context_length_exceeded"
        app.client.fail, app.client.fail_after = EngineDead("gone"), 2
        with pytest.raises(openai.APIError, match="gone"):
            list(client.chat.completions.create(model="tiny", messages=USER_HI, stream=True))


def send_raw(url: str, body: dict, path: str = "/v1/chat/completions") -> socket.socket:
    data = json.dumps({"model": "tiny", "messages": USER_HI, **body}).encode()
    connection = socket.create_connection((urlparse(url).hostname, urlparse(url).port), timeout=60)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    connection.sendall(f"{head}Connection: close\r\n\r\n".encode() + data)
    return connection


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def test_a_raw_stream_is_whole_events_and_ends_with_done(served):
    _, url = served
    raw = read_all(send_raw(url, {"stream": True}))
    head, _, rest = raw.partition(b"\r\n\r\n")
    assert b"200 OK" in head
    payload = dechunk(rest)
    events = payload.decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events[-1] == "data: [DONE]"


def dechunk(data: bytes) -> bytes:
    parts = []
    while data:
        size, _, data = data.partition(b"\r\n")
        parts.append(data[: int(size, 16)])
        data = data[int(size, 16) + 2 :]
    return b"".join(parts)


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.01)


# rule: Errors: A client that leaves ends its request, stream or not
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("delay_s", [0.05, 60])
@pytest.mark.slow
def test_a_client_that_leaves_aborts_its_request(harness, stream, delay_s, caplog):
    """While tokens flow, for so long that all cannot have come, and while the first one is still awaited."""
    caplog.set_level("INFO", "quire.access")
    app = harness("Hello, world! " * 40, engine={"delay_s": delay_s})
    with serving(app.app) as url:
        connection = send_raw(url, {"stream": stream, "n": 2})
        wait_for(lambda: len(app.client.submitted) == 2)
        time.sleep(0.1)
        connection.close()
        wait_for(lambda: len(app.client.aborted) == 2)
        wait_for(lambda: caplog.records)
    assert app.client.finished == []
    assert " abort req-" in caplog.records[0].getMessage()
    assert app.metrics.drain().counters["http_disconnects_total", ""] == 1


# rule: Limits: The queue is bounded by requests and tokens, and refuses at once
@pytest.mark.parametrize("has_decided", [False, True])
def test_a_stream_begins_once_accepted_so_that_a_late_refusal_is_a_429(harness, monkeypatch, has_decided):
    """The engine decides between two steps, and a step may take seconds."""
    monkeypatch.setattr("server.http.routes.reply.FIRST_EVENT_GRACE_S", 0.01)
    app = harness("Hi", engine={"delay_s": 0.2, "fail": Overloaded("The queue is full.", retry_after_s=7)})
    app.client.has_decided = has_decided
    reply = app.chat(stream=True)
    if has_decided:
        assert reply.status_code == 200
        assert '"code":"overloaded"' in reply.text
    else:
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "7")


def test_a_stream_begins_without_a_decision_after_ten_seconds(harness, monkeypatch):
    """So that clients and proxies see a sign of life while an engine starts."""
    monkeypatch.setattr("server.http.routes.reply.FIRST_EVENT_GRACE_S", 0.01)
    monkeypatch.setattr("server.http.routes.reply.DECISION_GRACE_S", 0.1)
    app = harness("Hi", engine={"delay_s": 0.4, "fail": Overloaded("The queue is full.")})
    app.client.has_decided = False
    assert app.chat(stream=True).status_code == 200


# rule: Streams: A silent stream sends pings
@pytest.mark.slow
def test_a_silent_stream_pings(harness, monkeypatch):
    monkeypatch.setattr("server.http.routes.reply.FIRST_EVENT_GRACE_S", 0.01)
    monkeypatch.setattr(EventStreamResponse.__init__, "__kwdefaults__", {"ping_interval_s": 0.01})
    app = harness("Hi", engine={"delay_s": 0.5})
    text = app.chat(stream=True).text
    assert text.index("data: ") < text.index(": ping\n\n")
    assert text.endswith("data: [DONE]\n\n")
    assert "Hi" in "".join(
        json.loads(line[6:])["choices"][0]["delta"].get("content", "")
        for line in text.split("\n\n")
        if line.startswith("data: {")
    )


# rule: Errors: 404 for models and routes, 405 with `Allow`, 413, 415
# rule: Limits: Body 8 MiB, refused while it arrives
def test_an_oversized_body_is_refused_over_the_wire(harness):
    app = harness(max_body_bytes=1000)
    with serving(app.app) as url:
        connection = socket.create_connection((urlparse(url).hostname, urlparse(url).port), timeout=60)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: 999999999\r\n\r\n")
        reply = read_all(connection)
    assert b"413" in reply.split(b"\r\n")[0]
    assert b"body_too_large" in reply
