"""Exit with 0 if the server in this container answers GET /ready with 200, else with 1 and one line that says why.

The address is the one argument: http://127.0.0.1:8000 without one, https://… or unix:/path/to/socket.
A certificate is not checked: the server is this very container.
"""

import http.client
import socket
import ssl
import sys
from urllib.parse import urlsplit

_TIMEOUT_S = 4.0


def main() -> int:
    """Ask once."""
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    try:
        connection = _connect(url)
        connection.request("GET", "/ready")
        response = connection.getresponse()
        print(response.status, response.read(200).decode("utf-8", "replace"))
        return 0 if response.status == 200 else 1
    except (OSError, http.client.HTTPException) as error:
        print(f"{url} does not answer: {error}")
        return 1


def _connect(url: str) -> http.client.HTTPConnection:
    if url.startswith("unix:"):
        connection = http.client.HTTPConnection("localhost", timeout=_TIMEOUT_S)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(_TIMEOUT_S)
        connection.sock.connect(url.removeprefix("unix:"))
        return connection
    parts = urlsplit(url)
    host = parts.hostname or "127.0.0.1"
    if parts.scheme == "https":
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return http.client.HTTPSConnection(host, parts.port, timeout=_TIMEOUT_S, context=context)
    return http.client.HTTPConnection(host, parts.port, timeout=_TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main())
