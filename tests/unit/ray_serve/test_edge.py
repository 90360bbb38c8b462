"""What stands around Ray's proxies: sessions by prompt, and answers that end as our API's do, whatever Ray does."""

import asyncio
import contextlib
import json
from collections.abc import Sequence

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.ray.edge import Edge, middlewares

CHAT = "/v1/chat/completions"
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-request-id", b"req-7")]


class Proxy:
    """Stands for Ray's proxy: notes what reaches it, and answers with given messages."""

    def __init__(self, *answer: Message, error: Exception | None = None) -> None:
        self.scope: Scope = {}
        self.body = b""
        self._answer = answer
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        while (message := await receive())["type"] == "http.request":
            self.body += message["body"]
            if not message.get("more_body"):
                break
        for message in self._answer:
            await send(message)
        if self._error is not None:
            raise self._error

    @property
    def session(self) -> bytes | None:
        return dict(self.scope["headers"]).get(b"x-session-id")


def ask(
    app: ASGIApp,
    *chunks: bytes,
    path: str = CHAT,
    method: str = "POST",
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> list[Message]:
    """Send one request through an Edge; return the messages that the client gets."""
    parts = chunks or (b"",)
    messages: list[Message] = [
        {"type": "http.request", "body": part, "more_body": i + 1 < len(parts)} for i, part in enumerate(parts)
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": list(headers)}
    with contextlib.suppress(RuntimeError):  # Ray's, which its server logs
        asyncio.run((app if isinstance(app, Edge) else Edge(app))(scope, receive, send))
    return sent


def start(status: int = 200, headers: Sequence[tuple[bytes, bytes]] = STREAM) -> Message:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def part(body: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def error_of(sent: list[Message]) -> dict[str, object]:
    return json.loads(b"".join(message.get("body", b"") for message in sent))["error"]


def test_a_prompt_becomes_a_session_and_the_body_arrives_whole() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
    proxy = Proxy(start(), part(b"", more=False))
    ask(proxy, body[:7], body[7:])
    assert proxy.body == body
    assert proxy.session is not None
    again = Proxy(start(), part(b"", more=False))
    ask(again, body)
    assert again.session == proxy.session


@pytest.mark.parametrize("name", [b"x-session-id", b"X-Session-Id", b"x_session_id"])
def test_a_session_of_the_client_is_left_alone(name: bytes) -> None:
    proxy = Proxy(start(), part(b"", more=False))
    ask(proxy, b'{"prompt":"Hi"}', headers=[(name, b"mine")])
    assert proxy.scope["headers"] == [(name, b"mine")]


def test_the_header_is_the_one_that_ray_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_SESSION_ID_HEADER_KEY", "X_Conversation")
    (edge,) = middlewares()
    proxy = Proxy(start(), part(b"", more=False))
    ask(edge.cls(proxy, *edge.args, **edge.kwargs), b'{"prompt":"Hi"}')
    assert dict(proxy.scope["headers"])[b"x-conversation"].startswith(b"prompt-")


def test_a_body_too_large_to_be_served_is_passed_on_as_it_comes() -> None:
    chunks = [b"x" * 1024 * 1024] * 10
    proxy = Proxy(start(), part(b"", more=False))
    ask(proxy, *chunks)
    assert len(proxy.body) == 10 * 1024 * 1024
    assert proxy.session is None


def test_a_whole_answer_is_passed_on_untouched_but_for_a_second_request_id() -> None:
    messages = [start(headers=[*STREAM, (b"X-Request-ID", b"ray-1")]), part(b"a", more=True), part(b"b", more=False)]
    assert ask(Proxy(*messages)) == [start(), part(b"a", more=True), part(b"b", more=False)]


def test_an_error_of_our_own_is_passed_on() -> None:
    refusal = [start(400, [(b"content-type", b"application/json")]), part(b'{"error":{}}', more=False)]
    assert ask(Proxy(*refusal)) == refusal


@pytest.mark.parametrize("error", [None, RuntimeError("the actor died")])
def test_no_answer_becomes_a_503_in_our_form(error: Exception | None) -> None:
    sent = ask(Proxy(error=error))
    assert sent[0]["status"] == 503
    assert (b"retry-after", b"2") in sent[0]["headers"]
    assert error_of(sent)["code"] == "engine_dead"


@pytest.mark.parametrize(("status", "expected"), [(404, 503), (408, 503), (500, 503), (503, 503), (429, 429)])
def test_a_bare_text_of_rays_becomes_json(status: int, expected: int) -> None:
    text = [start(status, [(b"content-type", b"text/plain")]), part(b"Backpressure", more=False)]
    sent = ask(Proxy(*text))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == expected
    assert "replica" in str(error_of(sent)["message"])


def test_a_stream_that_is_cut_ends_with_an_error_event() -> None:
    sent = ask(Proxy(start(), part(b"data: {}\n\n", more=True)))
    last = sent[-1]["body"].split(b"\n\n")
    assert json.loads(last[0].removeprefix(b"data: "))["error"]["code"] == "engine_dead"
    assert last[1] == b"data: [DONE]"
    assert not sent[-1].get("more_body")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_cut_stream_of_named_events_ends_with_one(path: str) -> None:
    sent = ask(Proxy(start(), part(b"event: ping\ndata: {}\n\n", more=True)), path=path)
    name, data = sent[-1]["body"].strip().split(b"\n")
    assert name == b"event: error"
    event = json.loads(data.removeprefix(b"data: "))
    assert event["type"] == "error"
    assert "replica" in json.dumps(event)


def test_a_whole_answer_that_is_cut_is_not_made_to_look_complete() -> None:
    messages = [start(headers=[(b"content-type", b"application/json")]), part(b'{"id"', more=True)]
    assert ask(Proxy(*messages)) == messages
