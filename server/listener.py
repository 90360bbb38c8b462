"""The listening sockets: bound by the launcher before anything heavy, inherited by the workers."""

import asyncio
import errno
import socket
import sys

from engine.config import LaunchConfig
from engine.errors import StartupError

_BACKLOG = 2048
_PROBE_TIMEOUT_S = 5.0
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_REASONS = {
    errno.EADDRINUSE: "is in use: stop the program that has it, or choose another one with --port (0 picks a free one)",
    errno.EACCES: "needs rights that this user lacks: choose one above 1023 with --port",
    errno.EADDRNOTAVAIL: "cannot be bound, because --host is no address of this machine",
}


def bind(config: LaunchConfig) -> list[socket.socket]:
    """Return listening sockets: one, or on Linux one per HTTP worker, among which the kernel spreads connections.

    A socket shared by several workers would give whole bursts to whichever wakes first. Raises StartupError.
    """
    family, address = _resolve(config.host, config.port)
    if config.http_workers == 1 or sys.platform != "linux":
        return [_listen(family, address, is_shared=False)]
    # SO_REUSEPORT would let a second daemon of this user in; a plain socket first finds out that the port is taken
    with _listen(family, address, is_shared=False) as probe:
        address = probe.getsockname()
    return [_listen(family, address, is_shared=True) for _ in range(config.http_workers)]


def server_url(host: str, listener: socket.socket) -> str:
    """Return the URL to type on this machine. A wildcard host is shown as the loopback address."""
    port = listener.getsockname()[1]
    if host in _LOOPBACK:
        host = _LOOPBACK[host]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def is_ready(listener: socket.socket) -> bool:
    """Ask GET /ready as a client would: true once a worker answers and says that it serves."""
    host, port = listener.getsockname()[:2]
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(_LOOPBACK.get(host, host), port)
            try:
                writer.write(b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                return (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            finally:
                writer.close()
    except OSError:  # a TimeoutError is one too
        return False


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple]:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise StartupError(f"--host {host} is no address that can be listened on: {reason}.", exit_code=2) from error
    return family, address


def _listen(family: socket.AddressFamily, address: tuple, *, is_shared: bool) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = _REASONS.get(error.errno or 0, f"cannot be bound: {error.strerror}")
        raise StartupError(f"Port {address[1]} on {address[0]} {reason}.") from error
    listener.setblocking(False)
    return listener
