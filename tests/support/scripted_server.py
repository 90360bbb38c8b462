"""A small HTTP server in a thread of the test, whose every answer the test writes."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from tests.support.daemon import wait_for


class Reply(NamedTuple):
    """What the server answers. body: JSON, bytes as they are, or an iterator of some, whose end ends the connection.

    A status of 0 closes the connection.
    """

    status: int = 200
    body: Any = None
    headers: tuple[tuple[str, str], ...] = ()


Script = Callable[[str, Any], Reply]  # (path, body as JSON or None) → reply


class _Server(ThreadingHTTPServer):
    """Knows its connections, so that it can cut them."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self.connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), handler)

    def process_request(self, request: socket.socket, client_address: tuple[str, int]) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, *_: object) -> None:
        """Clients that leave are what some tests are about."""


class ScriptedServer:
    """Where it listens, and what it was asked by POST."""

    def __init__(self, server: "_Server") -> None:
        self._server = server
        self.asked: list[Any] = []
        self.keys: set[str | None] = set()
        self.num_open = 0
        self.most_open = 0

    def close_after(self, num_asked: int) -> None:
        """Go away, connections and all, once so many requests have come. Blocks."""
        wait_for(lambda: len(self.asked) >= num_asked, timeout_s=60, what=f"{num_asked} requests")
        self.close()

    def close(self) -> None:
        """Stop listening and cut every connection."""
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._server.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def url(self) -> str:
        """Its URL without /v1."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"


@contextlib.contextmanager
def scripted_server(script: Script) -> Iterator[ScriptedServer]:
    """Serve `script` for the length of a `with`. GET /v1/models is answered unless the script does it."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            reply = script(self.path, None)
            if reply.status == 404 and self.path == "/v1/models":
                reply = Reply(body={"object": "list", "data": [{"id": "scripted"}]})
            self._send(reply)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                running.asked.append(body)
                running.keys.add(self.headers["authorization"])
                running.num_open += 1
                running.most_open = max(running.most_open, running.num_open)
            reply = script(self.path, body)
            with lock:
                running.num_open -= 1
            self._send(reply)

        def _send(self, reply: Reply) -> None:
            if reply.status == 0:
                self.close_connection = True
                return
            if isinstance(reply.body, Iterator):
                self._stream(reply.body)
                return
            data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body, indent=1).encode()
            with contextlib.suppress(OSError):
                self.send_response(reply.status)
                for name, value in reply.headers:
                    self.send_header(name, value)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def _stream(self, parts: Iterator[bytes]) -> None:
            self.close_connection = True
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for part in parts:
                    self.wfile.write(part)
            parts.close()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = _Server(Handler)
    running = ScriptedServer(server)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield running
    finally:
        running.close()
        thread.join(60)
