"""The host names in requests, and which of them mean this machine. Standard library only."""

import ipaddress
import re

_AUTHORITY = re.compile(r"(?:\[([0-9a-f:.%]+)\]|([^\s:/@\[\]]+))(?::\d*)?")


def host_of(authority: str) -> str:
    """Return the host of `host[:port]` in lower case, without brackets and a final dot; "" if it is malformed."""
    match = _AUTHORITY.fullmatch(authority.strip().lower())
    return (match[1] or match[2]).removesuffix(".") if match else ""


def is_loopback(host: str) -> bool:
    """Return True for localhost and for a loopback address: 127.0.0.0/8, ::1."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
