"""http typed for https, and the reverse: the commands name the URL that works."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
import trustme

from server.commands.server_target import ServerEndpoint, make_client, nobody_message, transport_message
from server.config.other_scheme import other_scheme


@contextlib.contextmanager
def http_server(tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Yield the address of a server that has no page at all."""
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    return context


def sentence(url: str) -> str:
    endpoint = ServerEndpoint(url)
    with make_client(endpoint, timeout_s=5.0) as client, pytest.raises(httpx.HTTPError) as caught:
        client.get("/v1/models")
    return transport_message(endpoint, caught.value)


def test_a_server_without_tls_is_told_apart() -> None:
    with http_server() as address:
        assert other_scheme(f"http://{address}/v1") is None
        assert other_scheme(f"https://{address}/v1") == f"http://{address}/v1"
        expected = f"The server at https://{address} speaks HTTP without TLS: its URL is http://{address}."
        assert sentence(f"https://{address}") == expected


def test_a_server_with_tls_is_told_apart(tls: ssl.SSLContext) -> None:
    with http_server(tls) as address:
        assert other_scheme(f"https://{address}") is None
        assert (
            sentence(f"http://{address}") == f"The server at http://{address} speaks TLS: its URL is https://{address}."
        )
        assert sentence(f"https://{address}").startswith(f"The TLS certificate of https://{address} is not trusted: ")


def test_where_nobody_listens_nothing_is_guessed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    assert other_scheme(url) is None
    assert other_scheme(url.replace("http", "https")) is None
    assert sentence(url) == f"No server answers at {url}."
    assert (
        nobody_message(ServerEndpoint(url), "start one") == f"No server with OpenAI's API answers at {url}: start one."
    )
