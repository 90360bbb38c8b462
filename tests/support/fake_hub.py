"""A small Hugging Face hub in a thread of the test: repositories by name, each a dict of files by path."""

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/models/([\w.-]+/[\w.-]+)(/revision/\w+|/tree/\w+)?")
_FILE = re.compile(r"/([\w.-]+/[\w.-]+)/resolve/\w+/(.+)")


class FakeHub:
    """Its URL, and what was sent of each file. cut: by file name, the bytes after which a connection is cut, once."""

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        self.repositories = repositories
        self.sent: dict[str, int] = {}
        self.ranges: list[str] = []
        self.cut: dict[str, int] = {}
        self.url = ""


@contextlib.contextmanager
def fake_hub(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[FakeHub]:
    """Serve the repositories for the length of a `with`."""
    hub = FakeHub(repositories)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(has_body=False)

        def do_GET(self) -> None:
            self._answer(has_body=True)

        def _answer(self, *, has_body: bool) -> None:
            path = self.path.partition("?")[0]
            if (found := _API.fullmatch(path)) and found[1] in hub.repositories:
                files = hub.repositories[found[1]]
                if (found[2] or "").startswith("/tree"):
                    value: object = [
                        {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                        for name, data in files.items()
                    ]
                else:
                    value = {"id": found[1], "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
                self._send(200, json.dumps(value).encode(), {"content-type": "application/json"}, has_body=has_body)
            elif (found := _FILE.fullmatch(path)) and found[2] in hub.repositories.get(found[1], {}):
                self._send_file(found[2], hub.repositories[found[1]][found[2]], has_body=has_body)
            else:
                self._send(404, b"", {"x-error-code": "RepoNotFound"}, has_body=has_body)

        def _send_file(self, name: str, data: bytes, *, has_body: bool) -> None:
            headers = {"etag": f'"{hashlib.sha256(data).hexdigest()}"', "x-repo-commit": COMMIT}
            headers["accept-ranges"] = "bytes"
            status, asked = 200, re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))
            if asked and has_body:
                begin = int(asked[1])
                hub.ranges.append(f"{name} from {begin}")
                status, headers["content-range"] = 206, f"bytes {begin}-{len(data) - 1}/{len(data)}"
                data = data[begin:]
            self._send(status, data, headers, has_body=has_body, most=hub.cut.pop(name, None) if has_body else None)
            if has_body:
                hub.sent[name] = hub.sent.get(name, 0) + len(data)

        def _send(
            self, status: int, data: bytes, headers: Mapping[str, str], *, has_body: bool, most: int | None = None
        ) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            if has_body:
                self.wfile.write(data[:most])
            if most is not None:
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Keep the test's output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
