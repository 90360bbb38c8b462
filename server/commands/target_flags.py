"""The flags --url, --api-key and --debug of every command that talks to a server. Imports argparse only."""

import argparse
import re

from server.config.value_types import text

DEFAULT_URL = "http://127.0.0.1:8000"


def add_server_flags(parser: argparse.ArgumentParser, *, url_help: str) -> None:
    """Add --url, --api-key and --debug."""
    add = parser.add_argument
    add("--url", type=base_url, help=url_help)
    add("--api-key", type=text, metavar="KEY", help="sent as a bearer token (QUIRE_API_KEY)")
    add("--debug", action="store_true", help="show tracebacks")


def base_url(value: str) -> str:
    """Parse a server's URL, with or without /v1 at its end; return it without."""
    url = value if "://" in value else f"http://{value}"
    if not re.fullmatch(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?(/[^\s?#]*)?", url):
        raise argparse.ArgumentTypeError(f"{value!r} is not a URL such as {DEFAULT_URL}")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
