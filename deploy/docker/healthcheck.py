"""Exit with 0 if the server in this container answers GET /ready with 200, else with 1 and a line with the reason.

The server's address is read from the launcher's directory (server/launcher/run_dir.py), however it was configured.
Alternatively the argument is an address: http://HOST:PORT, https://HOST:PORT, unix:/PATH or, with TLS, unix+tls:/PATH.
The certificate is not checked: the server runs in this container. Imports the standard library only.
"""

import contextlib
import http.client
import socket
import ssl
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

_TIMEOUT_S = 4.0


def main() -> int:
    """Check each known server once; return 0 if at least one is ready."""
    urls = sys.argv[1:] or list(_known())
    if not urls:
        print("no server has said where it listens: it looks for its model, or it has ended")
    return 0 if any(_is_ready(url) for url in urls) else 1  # one left by a killed server refuses at once


def _known() -> Iterator[str]:
    """Yield the addresses that servers of this user have written to their RunDir."""
    parent = tempfile.gettempdir()
    for folder in Path(parent if len(parent) < 64 else "/tmp").glob("quire-*"):  # nosec B108
        with contextlib.suppress(OSError):  # of another user, not a server's, or gone by now
            yield (folder / "url").read_text(encoding="utf-8")


def _is_ready(url: str) -> bool:
    try:
        connection = _connect(url)
        connection.request("GET", "/ready")
        response = connection.getresponse()
        print(url, response.status, response.read(200).decode("utf-8", "replace"))
    except (OSError, http.client.HTTPException) as error:
        print(f"{url} does not answer: {error}")
        return False
    return response.status == 200


def _connect(url: str) -> http.client.HTTPConnection:
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    kind, _, path = url.partition(":")
    if kind in ("unix", "unix+tls"):
        connection = http.client.HTTPConnection("localhost", timeout=_TIMEOUT_S)
        plain = socket.socket(socket.AF_UNIX)
        plain.settimeout(_TIMEOUT_S)
        plain.connect(path)
        connection.sock = tls.wrap_socket(plain, server_hostname="localhost") if kind == "unix+tls" else plain
        return connection
    parts = urlsplit(url)
    host = parts.hostname or "127.0.0.1"
    if kind == "https":
        return http.client.HTTPSConnection(host, parts.port, timeout=_TIMEOUT_S, context=tls)
    return http.client.HTTPConnection(host, parts.port, timeout=_TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main())
