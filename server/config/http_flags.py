"""Flags of `quire serve` that say who reaches the daemon and how: keys, TLS, a unix socket, browsers, proxies.

Imports argparse, and ssl where it is needed. server/cli.py makes LaunchConfig and ServerConfig of the parsed values.
"""

import argparse
import re
from pathlib import Path
from typing import NamedTuple

from engine.interface.errors import StartupError
from server.config.value_types import deadline, integer, limited, seconds, text

_DEFAULT_HOST, _DEFAULT_PORT = "127.0.0.1", 8000
_MAX_SOCKET_PATH_BYTES = 107  # sun_path of Linux, less its end; 103 on macOS


class Address(NamedTuple):
    """Where to listen: a unix socket, or host and port."""

    host: str
    port: int
    uds: str | None


class Tls(NamedTuple):
    """Paths of a certificate chain and its key, both or neither."""

    cert: str | None
    key: str | None


def add_address_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of where to listen."""
    add = group.add_argument
    add("--host", type=text, help="address to listen on (127.0.0.1)")
    add("--port", type=integer(0, 65_535), metavar="N", help="0: any free port (8000)")
    add("--uds", type=text, metavar="PATH", help="listen on a unix socket (mode 0660) instead of host and port")
    add("--tls-cert", type=text, metavar="FILE", help="certificate chain in PEM: serve HTTPS; needs --tls-key")
    add("--tls-key", type=text, metavar="FILE", help="its private key in PEM, without a passphrase")


def add_request_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of how requests are taken, and for how long they wait."""
    add = group.add_argument
    add("--strict", action="store_true", help="refuse unknown request fields instead of reporting them")
    add("--request-timeout", type=deadline, metavar="S", help="deadline of every request in seconds (none)")
    add("--stall-timeout", type=seconds, default=300.0, metavar="S", help="restart a hung engine; 0: never (300)")


def add_access_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of who may ask."""
    add = group.add_argument
    add(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="key that requests need; repeatable. Other users of this machine see it in ps: better a file",
    )
    add("--api-key-file", type=text, metavar="FILE", help="keys, one a line; also QUIRE_API_KEY=KEY,KEY")
    add(
        "--cors-origin",
        action="append",
        type=origin,
        default=[],
        metavar="ORIGIN",
        help="let pages of this origin call from a browser; repeatable, * is all (none)",
    )
    add("--root-path", type=root_path, default="", metavar="PATH", help="prefix under which a proxy shows the server")


@limited("scheme://host[:port], or *")
def origin(value: str) -> str:
    """Parse a browser's origin: scheme and host, a port where it is not the usual one, and no path."""
    if value != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[A-Za-z0-9.\-_\[\]:]+", value):
        raise argparse.ArgumentTypeError(f"{value!r} is not an origin such as https://chat.example.org, or *")
    return value


@limited("a path such as /llm")
def root_path(value: str) -> str:
    """Parse a path prefix; none is the default."""
    if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)*", value):
        raise argparse.ArgumentTypeError(f"{value!r} is not a path such as /llm, without a slash at its end")
    return value


def address_of(arguments: argparse.Namespace) -> Address:
    """Return where to listen. Raises StartupError for a unix socket together with host or port."""
    host, port, uds = arguments.host, arguments.port, arguments.uds
    if uds is not None:
        for flag, value in (("--host", host), ("--port", port)):
            if value is not None:
                raise StartupError(f"--uds {uds} and {flag} {value} exclude each other.", exit_code=2)
        uds = str(Path(uds).expanduser().absolute())
        if len(uds.encode()) > _MAX_SOCKET_PATH_BYTES:
            raise StartupError(
                f"--uds {uds} has {len(uds.encode())} bytes, the limit is {_MAX_SOCKET_PATH_BYTES}.", exit_code=2
            )
    return Address(host if host is not None else _DEFAULT_HOST, port if port is not None else _DEFAULT_PORT, uds)


def tls_of(arguments: argparse.Namespace) -> Tls:
    """Return the TLS files, tried out. Raises StartupError that names the flag at fault."""
    cert, key = arguments.tls_cert, arguments.tls_key
    if cert is None and key is None:
        return Tls(None, None)
    if cert is None or key is None:
        given, missing = ("--tls-cert", "--tls-key") if key is None else ("--tls-key", "--tls-cert")
        raise StartupError(f"{given} needs {missing} as well.", exit_code=2)
    import ssl

    chain, private_key = _readable("--tls-cert", cert), _readable("--tls-key", key)
    try:
        # a passphrase would be asked for on the terminal, and again by every worker
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, private_key, password=lambda: "")
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = error.reason if isinstance(error, ssl.SSLError) and error.reason else "not PEM files that fit together"
        raise StartupError(
            f"--tls-cert {chain} and --tls-key {private_key} cannot be used: {reason.replace('_', ' ').lower()}.",
            exit_code=2,
        ) from error
    return Tls(chain, private_key)


def _readable(flag: str, name: str) -> str:
    path = Path(name).expanduser()
    try:
        path.read_bytes()
    except OSError as error:
        raise StartupError(f"{flag} {path} cannot be read: {error.strerror}.", exit_code=2) from error
    return str(path.resolve())
