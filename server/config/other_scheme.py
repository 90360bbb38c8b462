"""The scheme that a server speaks in place of its URL's: http where https was typed, and the reverse."""

import socket
import ssl
from urllib.parse import urlsplit

_TIMEOUT_S = 2.0
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST")  # OpenSSL's words for an answer that is not TLS


def other_scheme(url: str) -> str | None:
    """Return the URL with the scheme that its server speaks, None if that is the URL's own or cannot be told.

    Connects once and sends a TLS greeting and no request; blocks for two times 2 s at most.
    """
    parts = urlsplit(url)
    is_https = parts.scheme == "https"
    if parts.hostname is None or parts.scheme not in ("http", "https"):
        return None
    speaks_tls = _speaks_tls(parts.hostname, parts.port or (443 if is_https else 80))
    if speaks_tls is None or speaks_tls == is_https:
        return None
    return parts._replace(scheme="https" if speaks_tls else "http").geturl()


def _speaks_tls(host: str, port: int) -> bool | None:
    context = ssl.create_default_context()
    context.check_hostname = False  # nothing is sent: whose certificate it is does not matter
    context.verify_mode = ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), timeout=_TIMEOUT_S) as connection:
            context.wrap_socket(connection, server_hostname=host).close()
    except ssl.SSLError as error:
        return False if error.reason in _NO_TLS else None
    except OSError:
        return None
    return True
