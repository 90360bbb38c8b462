"""Connections within file descriptors: some are kept back, refusals are told to the client and the log."""

import contextlib
import socket
import threading
import time
from functools import partial

import httpx
import pytest
import uvicorn

from server.http.h11_protocol import ConnectionLimit, HttpProtocol


def test_some_descriptors_are_kept_back() -> None:
    assert ConnectionLimit(1024).refusal(960) is None
    assert ConnectionLimit(1024).refusal(961) is not None
    assert ConnectionLimit(20).refusal(10) is None
    assert ConnectionLimit(20).refusal(11) is not None


def test_the_log_tells_of_refusals_once_in_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    limit = ConnectionLimit(20, clock=lambda: now_s)
    for _ in range(5):
        limit.refusal(11)
    assert [record.args for record in caplog.records] == [(1, 10, 20)]
    now_s = 10.0
    limit.refusal(11)
    assert [record.args for record in caplog.records][1:] == [(5, 10, 20)]


# rule: Security: Connections beyond the file descriptors get a 503
def test_a_connection_too_many_gets_a_503_at_once_and_the_next_one_is_served() -> None:
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    protocol = partial(HttpProtocol, limit=ConnectionLimit(4))
    server = uvicorn.Server(uvicorn.Config(app, http=protocol, lifespan="off", log_config=None, access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{address[1]}"
    try:
        with contextlib.ExitStack() as stack:
            held = [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(2)]
            for connection in held:
                connection.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
                assert connection.recv(1000).startswith(b"HTTP/1.1 200")
            refused = httpx.get(url, timeout=60)
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "too_many_connections"
            assert "2 connections" in refused.json()["error"]["message"]
            held[0].sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")  # those that are in go on
            assert held[0].recv(1000).startswith(b"HTTP/1.1 200")
        end_s = time.monotonic() + 60
        while httpx.get(url, timeout=60).status_code != 200:
            assert time.monotonic() < end_s
    finally:
        server.should_exit = server.force_exit = True
        thread.join(60)
