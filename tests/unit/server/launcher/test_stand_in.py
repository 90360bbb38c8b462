"""What the launcher answers on the port while no HTTP worker serves, over real sockets."""

import asyncio
import json
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
import trustme

from engine.interface.config import LaunchConfig
from engine.interface.control import Stage, State
from server.launcher.stand_in import StandIn

SERVED = State(Stage("ready"), False)


def run(
    test: Callable[[httpx.AsyncClient, StandIn], Awaitable[None]],
    *,
    state: State = SERVED,
    num_ended: int = 1,
    config: LaunchConfig | None = None,
    trust: ssl.SSLContext | None = None,
) -> None:
    """Run a test against a started StandIn with the prefix /llm."""

    async def with_client() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            stand_in = StandIn([listener], config or LaunchConfig(), root_path="/llm", state=lambda: state)
            await stand_in.start(num_ended=num_ended)
            url = f"{'https' if trust else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=url, verify=trust or True, timeout=30) as client:
                await test(client, stand_in)
            stand_in.stop()
            assert listener.fileno() > 0  # for the next worker

    asyncio.run(asyncio.wait_for(with_client(), 60))


def test_every_request_is_a_503_that_says_when_to_try_again() -> None:
    async def check(client: httpx.AsyncClient, _: StandIn) -> None:
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("DELETE", "/no/such?x=/health")):
            reply = await client.request(method, path, content=b"x" * 3_000_000 if method == "POST" else None)
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")
            error = reply.json()["error"]
            assert (error["code"], error["type"], error["param"]) == ("not_ready", "service_unavailable_error", None)
            assert reply.headers["x-request-id"].startswith("req-")
        reply = await client.post("/v1/messages", json={})
        assert reply.json()["error"]["type"] == "overloaded_error"
        assert (await client.head("/v1/models")).content == b""

    run(check)


def test_while_draining_clients_are_sent_elsewhere() -> None:
    async def check(client: httpx.AsyncClient, _: StandIn) -> None:
        assert (await client.get("/v1/models")).json()["error"]["code"] == "draining"
        assert (await client.get("/ready")).json() == {"stage": "draining", "done": 0.0}

    run(check, state=State(Stage("ready"), True))


@pytest.mark.parametrize(
    ("fault", "num_ended", "status", "word"),
    [
        ("", 5, 200, "worker restarting"), ("", 6, 503, "worker dead"), ("restarting", 1, 200, "worker restarting"),
        ("stalled", 1, 503, "engine stalled"), ("dead", 6, 503, "engine dead"),
    ],
)  # fmt: skip
def test_health_is_bad_only_while_somebody_else_should_act(fault: str, num_ended: int, status: int, word: str) -> None:
    async def check(client: httpx.AsyncClient, _: StandIn) -> None:
        for path in ("/health", "/llm/health?a=1", "/ping"):
            reply = await client.get(path)
            assert (reply.status_code, reply.json()["status"]) == (status, word)
        assert (await client.get("/ready")).status_code == 503

    run(check, state=State(Stage("ready"), False, fault), num_ended=num_ended)


def test_bytes_that_are_no_request_end_their_connection_alone() -> None:
    async def check(client: httpx.AsyncClient, _: StandIn) -> None:
        for data in (b"\r\n\r\n", b"x" * 100_000, b"GET"):
            reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
            writer.write(data)
            writer.write_eof()
            with_reply = data == b"\r\n\r\n"
            try:
                assert (await reader.read()).startswith(b"HTTP/1.1 503 ") == with_reply
            except ConnectionResetError:
                assert not with_reply
            writer.close()
        assert (await client.get("/health")).status_code == 200

    run(check)


def test_it_stops_and_starts_again() -> None:
    async def check(client: httpx.AsyncClient, stand_in: StandIn) -> None:
        stand_in.stop()
        stand_in.stop()
        waiting = asyncio.create_task(client.get("/ready"))
        await asyncio.sleep(0.05)
        assert not waiting.done()  # it waits in the listener's queue
        await stand_in.start(num_ended=2)
        assert (await waiting).status_code == 503

    run(check)


def test_with_tls_it_answers_over_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    (tmp_path / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    trust = ssl.create_default_context()
    authority.configure_trust(trust)

    async def check(client: httpx.AsyncClient, _: StandIn) -> None:
        reply = await client.get("/v1/models")
        assert (reply.status_code, json.loads(reply.content)["error"]["code"]) == (503, "not_ready")

    config = LaunchConfig(tls_cert=str(tmp_path / "cert.pem"), tls_key=str(tmp_path / "key.pem"))
    run(check, config=config, trust=trust)
