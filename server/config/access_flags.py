"""The flags of access to `quire serve`: keys, browsers, the proxy's path, and an address without keys.

server/hosted/daemon.py adds the first group too; the second is for a server that listens itself.
"""

import argparse
import re

from server.config.host_names import host_of
from server.config.value_types import limited, text


def add_access_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of API keys, CORS and the proxy's path."""
    add = group.add_argument
    add(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="accepted API key; repeatable. Other users of this machine can see it in ps: prefer a file",
    )
    add("--api-key-file", type=text, metavar="FILE", help="API keys, one a line; also QUIRE_API_KEY=KEY,KEY")
    add(
        "--cors-origin",
        action="append",
        type=origin,
        default=[],
        metavar="ORIGIN",
        help="origin whose pages may call the server from a browser; repeatable, * allows all (none)",
    )
    add(
        "--priority",
        choices=("off", "keys", "all"),
        metavar="WHO",
        help="who may set priority: off, keys (those with the role priority), all (all; with several keys off)",
    )
    add("--root-path", type=root_path, default="", metavar="PATH", help="path prefix of the server behind a proxy")


def add_exposure_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of a server with an address of its own and without API keys."""
    add = group.add_argument
    add(
        "--allow-anonymous",
        action="store_true",
        help="listen on an address that other machines reach without any API key",
    )
    add(
        "--allowed-host",
        action="append",
        type=host_name,
        default=[],
        metavar="NAME",
        help="without keys: host name of requests besides loopback ones; repeatable, * allows all (none)",
    )


@limited("scheme://host[:port], or *")
def origin(value: str) -> str:
    """Parse a browser's origin: scheme, host, and the port unless it is the default; no path."""
    if value != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[A-Za-z0-9.\-_\[\]:]+", value):
        raise argparse.ArgumentTypeError(f"{value!r} is not an origin such as https://chat.example.org, or *")
    return value


@limited("a path such as /llm")
def root_path(value: str) -> str:
    """Parse a path prefix; none is the default."""
    if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)*", value):
        raise argparse.ArgumentTypeError(f"{value!r} is not a path such as /llm, without a slash at its end")
    return value


@limited("a host name or address, or *")
def host_name(value: str) -> str:
    """Parse the host that a request names in its Host header; no scheme, no port."""
    name = value.lower()
    if name != "*" and (not name or host_of(f"[{name}]" if ":" in name else name) != name):
        raise argparse.ArgumentTypeError(f"{value!r} is not a host name such as quire.example.org, or *")
    return name
