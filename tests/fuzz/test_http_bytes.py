"""Raw bytes against a server: whatever arrives, it answers below 500 or closes, hangs on nobody, and stays healthy.

A file of the corpus is named NAME.STATUSES.http after the answers that it must get, 100-200 for two, `none` for none.
"""

import logging
import re
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlparse

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.conftest import seeds
from tests.fuzz.counts import count
from tests.support.daemon import Daemon, wait_for
from tests.support.fakes import FakeEngineClient, FakeLauncherChannel
from tests.unit.server.conftest import Harness, serving, write_model_folder

STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
QUIET_S = 0.03  # without a further byte: what was sent is a part of a request, or answered
END_S = 10.0
SEEDS = [path.read_bytes() for path in seeds("http")]
PARTS = [
    b"GET /version HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\n", b"POST /v1/chat/completions HTTP/1.0\r\n",
    b"OPTIONS * HTTP/1.1\r\n", b"GET http://x/version HTTP/1.1\r\n", b"Host: x\r\n", b"host:\r\n",
    b"Content-Length: 2\r\n", b"Content-Length: 02\r\n", b"Content-Length: 5, 5\r\n", b"Content-Length:\x0b2\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: chunked, chunked\r\n", b"Transfer-Encoding:\x00chunked\r\n",
    b"Content-Type: application/json\r\n", b"Connection: close\r\n", b"Connection: upgrade\r\nUpgrade: websocket\r\n",
    b"Expect: 100-continue\r\n", b"X-Request-Id: a\x7fb\r\n", b"Authorization: Bearer x\r\n", b" folded\r\n",
    b"\r\n", b"\n", b"\r", b"\x00", b"0\r\n\r\n", b"2\r\n{}\r\n", b'2;x="\r\n{}\r\n', b"{}", b'{"prompt": "a"}',
    b'{"messages": [{"role": "user", "content": "hi"}], "stream": true}', b"fffffffff\r\n",
]  # fmt: skip


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    folder = write_model_folder(tmp_path_factory.mktemp("model"))
    app = Harness(folder, FakeEngineClient(script=[50] * 5), FakeLauncherChannel()).app
    with serving(app) as url:
        parts = urlparse(url)
        yield parts.hostname or "", parts.port or 0


@pytest.fixture(scope="module")
def errors() -> Iterator[list[logging.LogRecord]]:
    """What is logged as an error meanwhile, ours or a library's."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    yield records
    logging.getLogger().removeHandler(handler)


def exchange(address: tuple[str, int], pieces: list[bytes], *, quiet_s: float = QUIET_S, num_answers: int = 0) -> bytes:
    """Send the pieces one by one, wait for the answers and until nothing more comes, hang up; so must the server."""
    received = b""
    with socket.create_connection(address, timeout=END_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for piece in pieces:
                connection.sendall(piece)
                if len(pieces) > 1:
                    time.sleep(0.001)
            try:
                while True:
                    is_answered = len(STATUS.findall(received)) >= num_answers
                    connection.settimeout(quiet_s if is_answered else END_S)
                    part = connection.recv(65536)
                    if not part:
                        break
                    received += part
                return received
            except TimeoutError:
                pass
            connection.settimeout(END_S)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                received += part
        except (ConnectionResetError, BrokenPipeError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise AssertionError(f"The server keeps a connection open whose client has left: {pieces!r}") from None
    return received


def check_healthy(address: tuple[str, int]) -> None:
    reply = exchange(address, [b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"], quiet_s=END_S)
    assert reply.startswith(b"HTTP/1.1 200 ")


# rule: Limits: No bytes lead to a 5xx, a hang or an error in the log
# rule: Security: A body that is framed in two ways is refused (request smuggling)
@pytest.mark.parametrize("path", seeds("http"), ids=lambda path: path.name)
def test_the_corpus_gets_its_answers(address, errors, path):
    expected = [status for status in path.name.split(".")[-2].split("-") if status != "none"]
    received = exchange(address, [path.read_bytes()], quiet_s=0.3, num_answers=len(expected))
    statuses = [status.decode() for status in STATUS.findall(received)]
    count("connections with bytes", map(int, statuses))
    assert statuses == expected
    assert not errors


@st.composite
def connections(draw: st.DrawFn) -> list[bytes]:
    """Draw what a client sends: parts put together, or files of the corpus spliced and damaged, cut into pieces."""
    if draw(st.booleans()):
        data = b"".join(draw(st.lists(st.sampled_from(PARTS) | st.binary(max_size=8), max_size=14)))
    else:
        data = bytearray(draw(st.sampled_from(SEEDS)) + draw(st.just(b"") | st.sampled_from(SEEDS)))
        for _ in range(draw(st.integers(0, 3))):
            at, length = draw(st.integers(0, min(len(data), 400))), draw(st.integers(0, 12))
            data[at : at + length] = draw(st.binary(max_size=6) | st.sampled_from(PARTS))
        data = bytes(data)
    cuts = sorted(draw(st.lists(st.integers(0, min(len(data), 600)), max_size=4)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


# rule: Limits: No bytes lead to a 5xx, a hang or an error in the log
@given(connections())
def test_any_bytes_are_answered_below_500_or_closed(address, errors, pieces):
    received = exchange(address, pieces)
    statuses = [int(status) for status in STATUS.findall(received)]
    count("connections with bytes", statuses)
    assert all(status < 500 for status in statuses), pieces
    assert not received or received.startswith(b"HTTP/1.1 "), pieces
    assert not errors


# rule: Limits: No bytes lead to a 5xx, a hang or an error in the log
def test_a_real_daemon_survives_them(tmp_path):
    @settings(max_examples=min(settings.default.max_examples, 300))
    @given(connections())
    def survives(pieces):
        received = exchange(address, pieces)
        statuses = [int(status) for status in STATUS.findall(received)]
        count("connections with bytes, to a daemon", statuses)
        assert all(status < 500 for status in statuses), pieces

    with Daemon("--device", "cpu", "--max-model-len", "256", "--allowed-host", "x", folder=tmp_path) as daemon:
        parts = urlparse(daemon.wait_ready().base_url)
        address = parts.hostname or "", parts.port or 0
        survives()
        check_healthy(address)
        wait_for(lambda: daemon.metrics()["quire_kv_cache_blocks_used"] == 0, timeout_s=30, what="blocks freed")
        assert "Traceback" not in daemon.log
        assert " ERROR " not in daemon.log


# rule: Limits: Sending a request has its time: headers 30 s, body 300 s
def test_many_half_requests_hold_up_nobody(address):
    held = [socket.create_connection(address, timeout=END_S) for _ in range(200)]
    try:
        for number, connection in enumerate(held):
            connection.sendall(SEEDS[number % len(SEEDS)][:20])
        check_healthy(address)
    finally:
        for connection in held:
            connection.close()
    check_healthy(address)
