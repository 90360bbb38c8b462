"""Links: the connections between prefill and decode engines, over unix sockets of their daemon. Never torch.

A prefill engine listens (PrefillLinks). Each decode engine connects to every prefill engine, and again after a loss
(DecodeLinks). The first messages compare the facts on which the bytes of blocks depend: unequal ones are refused by a
sentence. Calls come from the engine's loop and do not wait. An engine that sleeps for messages is woken by a link:
on_socket and off_socket tell its selector of the sockets.
"""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from engine.interface.transport import Connection
from engine.peers.messages import PeerHello, Refused, ToDecode, ToPrefill, Welcome

logger = logging.getLogger(__name__)

_RECONNECT_S = 0.2
_REFUSED_S = 10.0  # until a prefill engine that refused is asked again
_MOST_NAMED = 3  # facts in a sentence
_MOST_SHOWN = 80  # characters of a fact
_RANKS = "tensor_parallel_size"

OnSocket = Callable[[socket.socket], None]


def describe_difference(here: dict[str, str], there: dict[str, str], *, peer: str) -> str:
    """Return a sentence that names the facts that differ; "": none does. peer: the name of the other side."""
    names = [name for name in dict.fromkeys([*here, *there]) if here.get(name) != there.get(name)]
    if not names:
        return ""
    if _RANKS in names:  # it is a reason for others to differ
        return (
            f"Blocks of {peer} cannot be used: --tensor-parallel-size is {_shown(here.get(_RANKS))} here and"
            f" {_shown(there.get(_RANKS))} there. Each rank takes its part of a block from the same rank there, so that"
            " both need the same number."
        )
    told = [
        f"{name} is {_shown(here.get(name))} here and {_shown(there.get(name))} there" for name in names[:_MOST_NAMED]
    ]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"Blocks of {peer} cannot be used: {', '.join(told)}{more}."


def _shown(fact: str | None) -> str:
    if fact is None:
        return "unknown"
    return fact if len(fact) <= _MOST_SHOWN else f"{fact[:_MOST_SHOWN]}…"


class PrefillLinks:
    """The prefill engine's end. Life: made → poll in every iteration of the loop → close()."""

    def __init__(
        self,
        path: str,
        facts: dict[str, str],
        memory: Callable[[], bytes],
        *,
        on_socket: OnSocket = lambda sock: None,
        off_socket: OnSocket = lambda sock: None,
    ) -> None:
        """path: of the socket to listen on, in place of a former process's. memory: see Welcome."""
        self._facts = facts
        self._memory = memory
        self._on_socket, self._off_socket = on_socket, off_socket
        self._greeting: list[Connection] = []  # their PeerHello has not come
        self._connections: dict[int, Connection] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path + ".new")
        os.replace(path + ".new", path)
        self._listener.listen(64)
        self._listener.setblocking(False)
        on_socket(self._listener)

    @property
    def peers(self) -> list[int]:
        """The decode engines that are connected."""
        return list(self._connections)

    @property
    def is_holding(self) -> bool:
        """False: messages leave as they come. Those that a socket does not take go with the next poll()."""
        return False

    def send(self, peer: int, message: ToDecode) -> None:
        """Send to a decode engine, if it is connected."""
        if peer in self._connections:
            self._connections[peer].send(message)

    def poll(self) -> list[tuple[int, Any]]:
        """Return what came, as (peer, message); None in place of a message: that connection is lost."""
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = self._listener.accept()
                self._greeting.append(Connection(sock, ToPrefill))
                self._on_socket(sock)
        came: list[tuple[int, Any]] = []
        for connection in list(self._greeting):
            messages = connection.receive()
            if messages == []:
                continue
            self._greeting.remove(connection)
            if messages is None or not isinstance(messages[0], PeerHello):
                self._close(connection)
                continue
            came += self._greet(connection, messages[0])
            came += [(messages[0].index, message) for message in messages[1:]]
        for peer, connection in list(self._connections.items()):
            connection.flush()
            messages = connection.receive()
            if messages is None:
                del self._connections[peer]
                self._close(connection)
                came.append((peer, None))
            else:
                came += [(peer, message) for message in messages]
        return came

    def close(self) -> None:
        """Close every connection and stop listening."""
        for connection in [*self._greeting, *self._connections.values()]:
            self._close(connection)
        self._off_socket(self._listener)
        self._listener.close()

    def _greet(self, connection: Connection, hello: PeerHello) -> list[tuple[int, None]]:
        """Compare facts; return the loss of the engine's former connection, if there is one."""
        difference = describe_difference(hello.facts, self._facts, peer="the prefill engine")
        if difference:
            connection.send(Refused(difference))
            self._close(connection)
            return []
        former = self._connections.pop(hello.index, None)
        self._connections[hello.index] = connection
        connection.send(Welcome(self._memory()))
        logger.info("decode engine connected index=%d", hello.index)
        if former is None:
            return []
        self._close(former)
        return [(hello.index, None)]

    def _close(self, connection: Connection) -> None:
        self._off_socket(connection.sock)
        connection.sock.close()


class DecodeLinks:
    """The decode engine's end: a connection to each prefill engine. Life: made → poll in every iteration → close()."""

    def __init__(
        self,
        paths: list[str],
        hello: PeerHello,
        *,
        on_socket: OnSocket = lambda sock: None,
        off_socket: OnSocket = lambda sock: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """paths: of the sockets of the prefill engines, by their numbers."""
        self._paths = paths
        self._hello = hello
        self._on_socket, self._off_socket = on_socket, off_socket
        self._clock = clock
        self._connections: dict[int, Connection] = {}
        self._next_try_s = [0.0] * len(paths)
        self.refusals: dict[int, str] = {}  # sentences of the prefill engines that refused last

    @property
    def connecting(self) -> list[int]:
        """See LinksToPrefill.connecting: a connection is one at once here."""
        return []

    def send(self, peer: int, message: ToPrefill) -> None:
        """Send to a prefill engine, if it is connected."""
        if peer in self._connections:
            self._connections[peer].send(message)

    def poll(self) -> list[tuple[int, Any]]:
        """Return what came, as (peer, message); None in place of a message: that connection is lost.

        Welcome is the first message of a connection.
        """
        came: list[tuple[int, Any]] = []
        for peer in range(len(self._paths)):
            connection = self._connections.get(peer) or self._connect(peer)
            if connection is None:
                continue
            connection.flush()
            messages = connection.receive()
            if messages is None:
                self._drop(peer)
                came.append((peer, None))
                continue
            for message in messages:
                if isinstance(message, Refused):
                    self.refusals[peer] = message.message
                    self._next_try_s[peer] = self._clock() + _REFUSED_S
                    logger.error("prefill engine %d: %s Prompts are computed here.", peer, message.message)
                else:
                    if isinstance(message, Welcome):
                        self.refusals.pop(peer, None)
                    came.append((peer, message))
        return came

    def close(self) -> None:
        """Close every connection."""
        for peer in list(self._connections):
            self._drop(peer)

    def drop(self, peer: int) -> None:
        """Close a connection whose peer cannot be used; it is tried again later."""
        if peer in self._connections:
            self._drop(peer)
            self._next_try_s[peer] = self._clock() + _REFUSED_S

    def _connect(self, peer: int) -> Connection | None:
        now = self._clock()
        if now < self._next_try_s[peer]:
            return None
        self._next_try_s[peer] = now + _RECONNECT_S
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(self._paths[peer])
        except OSError:  # it does not run, or has a backlog
            sock.close()
            return None
        connection = self._connections[peer] = Connection(sock, ToDecode)
        self._on_socket(sock)
        connection.send(self._hello)
        return connection

    def _drop(self, peer: int) -> None:
        connection = self._connections.pop(peer)
        self._off_socket(connection.sock)
        connection.sock.close()
