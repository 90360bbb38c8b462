"""One client of the server under attack: a raw connection, one POST, and what became of it.

ask() sends a request as its Conduct says (it leaves early, it dawdles) and returns an Answer, never an exception: a
answer that breaks off is a finding. request_bytes() makes requests. Imports benchmarks.http_stream.
"""

import asyncio
import json
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.http_stream import ReplyError, StreamedReply

Address = tuple[str, int]
TIMEOUT_S = 120.0
_SMALL_BUFFER = 4096  # of the socket of a slow reader, so that the server feels it
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST, not FIN


@dataclass(frozen=True)
class Conduct:
    """How a client behaves. The default sends its request at once and reads the answer to its end."""

    leave_after: int | None = None  # events; 0: once the request is sent
    resets: bool = False  # it leaves with RST
    slow_bytes: int = 0  # sent one a second, before the rest of the request
    slow_reads: int = 0  # bytes read one a second, before the rest of the answer
    pause_s: float = 1.0  # the second of the two above
    sends_all: bool = True  # False: the last byte is never sent


@dataclass
class Answer:
    """What one client saw. status: 0 if it saw none."""

    end: Literal["answered", "left", "cut"] = "cut"
    status: int = 0
    code: str = ""  # of an error, also of one inside a stream
    text: str = ""
    num_events: int = 0
    seconds: float = 0.0
    error: str = ""  # a message of the server, or why the answer was cut
    is_counted: bool = True  # False: refused before it became a request that the server counts
    path: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        """A word for tables: the status, with the code of an error inside the stream; left; cut."""
        if self.end != "answered":
            return self.end
        return f"{self.status} {self.code}" if self.status == 200 and self.code else str(self.status)


def request_bytes(
    path: str, body: Mapping[str, Any] | bytes, *, headers: Mapping[str, str] | None = None, method: str = "POST"
) -> bytes:
    """Return a request for one connection."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {
        "Host": "127.0.0.1",
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        "Connection": "close",
        **(headers or {}),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + content


def completion(prompt: str, *, max_tokens: int, **more: object) -> bytes:
    """Return a streamed completion that generates exactly so many tokens."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0, "stream": True}
    return request_bytes("/v1/completions", {**body, **more})


async def ask(address: Address, request: bytes, conduct: Conduct | None = None, *, is_counted: bool = True) -> Answer:
    """Send a request and return what came of it."""
    answer = Answer(is_counted=is_counted, path=request.split(b" ", 2)[1].decode("latin-1")[:100])
    started_s = time.monotonic()
    conduct = conduct or Conduct()
    connection: _Connection | None = None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            connection = await _Connection.open(address, has_small_buffer=conduct.slow_reads > 0)
            await connection.exchange(request, conduct, answer)
    except TimeoutError:
        answer.error = f"no end within {TIMEOUT_S:g} s"
    except (OSError, ReplyError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        if connection is not None:
            connection.close(resets=conduct.resets and answer.end == "left")
    answer.seconds = time.monotonic() - started_s
    return answer


async def wait_closed(address: Address, data: bytes, *, timeout_s: float) -> bool:
    """Send some bytes, then nothing; tell if the server closes the connection in time."""
    connection = await _Connection.open(address)
    try:
        await connection.send(data)
        async with asyncio.timeout(timeout_s):
            while await connection.receive():
                pass
        return True
    except TimeoutError:
        return False
    except OSError:
        return True
    finally:
        connection.close()


class _Connection:
    def __init__(self, plain: socket.socket) -> None:
        self._socket = plain
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open(cls, address: Address, *, has_small_buffer: bool = False) -> "_Connection":
        plain = socket.socket()
        plain.setblocking(False)
        if has_small_buffer:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
        try:
            await asyncio.get_running_loop().sock_connect(plain, address)
        except BaseException:
            plain.close()
            raise
        return cls(plain)

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._socket, data)

    async def receive(self, num_bytes: int = 65_536) -> bytes:
        return await self._loop.sock_recv(self._socket, num_bytes)

    def close(self, *, resets: bool = False) -> None:
        if resets:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._socket.close()

    async def exchange(self, request: bytes, conduct: Conduct, answer: Answer) -> None:
        refused = await self._send_all(request, conduct)
        if conduct.leave_after == 0:
            answer.end = "left"
            return
        reply, num_read = StreamedReply(), 0
        while not reply.is_complete:
            is_slow = num_read < conduct.slow_reads
            if is_slow:
                await asyncio.sleep(conduct.pause_s)
            try:
                data = await self.receive(1 if is_slow else 65_536)
            except ConnectionResetError:
                if refused is None:
                    raise
                data = b""
            num_read += len(data)
            if not data:
                reply.feed_end()
                break
            for payload in reply.feed(data):
                _apply(answer, payload)
            answer.status = reply.status
            if conduct.leave_after is not None and answer.num_events >= conduct.leave_after:
                answer.end = "left"
                return
        if reply.error_body:
            _apply(answer, reply.error_body)
        if reply.is_complete:
            answer.end = "answered"
        else:
            answer.error = f"the connection closed before the answer's end: {refused or 'no error'}"

    async def _send_all(self, request: bytes, conduct: Conduct) -> OSError | None:
        """Send the request. A server that refuses may close before it has read all of it: its answer still comes."""
        at = request.index(b"\r\n\r\n") + 4 if conduct.slow_bytes else 0  # a slow body comes after a quick head
        end = len(request) - (not conduct.sends_all)
        try:
            await self.send(request[:at])
            for place in range(at, min(at + conduct.slow_bytes, end)):
                await asyncio.sleep(conduct.pause_s)
                await self.send(request[place : place + 1])
            await self.send(request[min(at + conduct.slow_bytes, end) : end])
        except (BrokenPipeError, ConnectionResetError) as error:
            return error
        return None


def _apply(answer: Answer, payload: bytes) -> None:
    if payload == b"[DONE]":
        return
    answer.num_events += 1
    event = json.loads(payload)
    if error := event.get("error"):
        answer.code = error.get("code") or error.get("type") or "error"
        answer.error = error.get("message", "")
    answer.usage = event.get("usage") or answer.usage
    for choice in event.get("choices") or ():
        answer.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
