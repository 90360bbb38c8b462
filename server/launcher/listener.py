"""The listening sockets: bound by the launcher before slow work, or taken over from a daemon; inherited by the workers.

A unix socket is one file and one socket for all workers; owned_socket_file removes the file when the daemon ends, if it
still has the port.
"""

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from engine.interface.config import LaunchConfig
from engine.interface.errors import StartupError
from server.config.host_names import is_loopback
from server.config.value_types import UsageError

_BACKLOG = 2048
_PROBE_TIMEOUT_S = 5.0
_SOCKET_MODE = 0o660  # its owner and its group
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where to ask one that listens everywhere  # nosec B104
_REASONS = {
    errno.EADDRINUSE: "is in use: stop the program that has it, or choose another one with --port (0 picks a free one)",
    errno.EACCES: "needs rights that this user lacks: choose one above 1023 with --port",
    errno.EADDRNOTAVAIL: "cannot be bound, because --host is no address of this machine",
}


def bind(config: LaunchConfig) -> list[socket.socket]:
    """Return listening sockets: one, or on Linux one per HTTP worker, among which the kernel spreads connections.

    A socket shared by several workers would give whole bursts to whichever wakes first. Raises StartupError.
    """
    if config.uds is not None:
        return [_listen_unix(config.uds)]
    family, address = _resolve(config.host, config.port)
    if config.http_workers == 1 or sys.platform != "linux":
        return [_listen(family, address, is_shared=False)]
    # SO_REUSEPORT would let a second daemon of this user in; a plain socket first finds out that the port is taken
    with _listen(family, address, is_shared=False) as probe:
        address = probe.getsockname()
    return [_listen(family, address, is_shared=True) for _ in range(config.http_workers)]


def wanted_address(config: LaunchConfig) -> str:
    """Return the address that the flags ask for, in the form of bound_address. Raises UsageError."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    _, address = _resolve(config.host, config.port)
    return _address_text(address)


def bound_address(listener: socket.socket) -> str:
    """Return where a socket listens: `unix:PATH`, `HOST:PORT` or `[HOST]:PORT`, its host as a number."""
    name = listener.getsockname()
    return f"unix:{name}" if listener.family == socket.AF_UNIX else _address_text(name)


def listeners_by_worker(listeners: Sequence[socket.socket], *, num_workers: int) -> list[list[socket.socket]]:
    """Return the sockets of each worker. Each socket has a worker, or connections would wait in its queue for ever.

    After a takeover from a daemon with another number of workers, some share one, or have several.
    """
    shares: list[list[socket.socket]] = [[] for _ in range(num_workers)]
    for i in range(max(len(listeners), num_workers) if num_workers else 0):
        shares[i % num_workers].append(listeners[i % len(listeners)])
    return shares


def allowed_hosts_of(config: LaunchConfig, given: list[str], *, allow_anonymous: bool) -> list[str] | None:
    """Return ServerConfig.allowed_hosts for a server without API keys.

    On a loopback address only a browser lets others in, by a page whose host name resolves to it (DNS rebinding); so
    only known names are served. Raises UsageError for another address, unless it was asked for.
    """
    if config.uds is not None:
        return None
    _, address = _resolve(config.host, config.port)
    is_local = is_loopback(address[0])
    if not is_local and not allow_anonymous:
        raise UsageError(
            f"--host {config.host} can be reached by other machines and there is no API key: set --api-key-file or "
            "QUIRE_API_KEY, or allow everybody with --allow-anonymous."
        )
    return given if "*" not in given and (is_local or given) else None


@contextlib.contextmanager
def owned_socket_file(config: LaunchConfig, *, is_owned: Callable[[], bool]) -> Iterator[None]:
    """Remove the bound unix socket's file at the end, if it is owned then and another daemon has not replaced it."""
    path = None if config.uds is None else Path(config.uds)
    inode = None if path is None else path.stat().st_ino
    try:
        yield
    finally:
        if path is not None and is_owned() and path.exists() and path.stat().st_ino == inode:
            path.unlink()


def server_url(config: LaunchConfig, listener: socket.socket) -> str:
    """Return the URL to type on this machine. A wildcard host is shown as the loopback address."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    scheme, port = "http" if config.tls_cert is None else "https", listener.getsockname()[1]
    host = _LOOPBACK.get(config.host, config.host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def probe_url(config: LaunchConfig, listener: socket.socket) -> str:
    """Return the same for deploy/docker/healthcheck.py, which must know of TLS over a unix socket too."""
    url = server_url(config, listener)
    return url if config.uds is None or config.tls_cert is None else f"unix+tls:{config.uds}"


async def is_ready(config: LaunchConfig, listener: socket.socket) -> bool:
    """Send GET /ready as a client would; return True once a worker replies that it is ready."""
    tls = None
    if config.tls_cert is not None:
        tls = ssl.create_default_context()
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE  # our own certificate, on our own socket
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            if config.uds is not None:
                hostname = None if tls is None else "localhost"
                reader, writer = await asyncio.open_unix_connection(config.uds, ssl=tls, server_hostname=hostname)
            else:
                host, port = listener.getsockname()[:2]
                reader, writer = await asyncio.open_connection(_LOOPBACK.get(host, host), port, ssl=tls)
            try:
                writer.write(b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                return (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            finally:
                writer.close()
    except OSError:  # a TimeoutError is one too
        return False


def _address_text(address: tuple) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple]:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise UsageError(f"--host {host} is no address that can be listened on: {reason}.") from error
    return family, address


def _listen_unix(path: str) -> socket.socket:
    """Listen at `path`; replace a stale socket there, which no process listens on. Raises StartupError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listener.bind(path)
        os.chmod(path, _SOCKET_MODE)  # before listen(): until then no client can connect
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise StartupError(f"--uds {path} cannot be bound: {error.strerror}.") from error
    listener.setblocking(False)
    return listener


def _remove_stale(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartupError(f"--uds {path} is a file that is no socket: it is left alone, choose another path.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)  # its daemon was killed
            return
    raise StartupError(f"--uds {path} is in use: stop the program that listens there, or choose another path.")


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
