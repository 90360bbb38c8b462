"""What is not HTTP, or too much of it, gets OpenAI's error too: over raw sockets, as the parser sees it."""

import json
import socket
import time
from urllib.parse import urlparse

import h11
import pytest

from server.http import h11_protocol as http_protocol
from tests.unit.server.conftest import serving

pytestmark = pytest.mark.slow

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
CLOSE = b"Connection: close\r\n\r\n"
CHUNKED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
)


@pytest.fixture
def url(harness):
    with serving(harness().app) as served:
        yield served


def connect(url: str) -> socket.socket:
    return socket.create_connection((urlparse(url).hostname, urlparse(url).port), timeout=60)


def read_reply(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Read one answer to the end of the connection."""
    data = b""
    while part := connection.recv(65536):
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    status_line, *lines = head.decode().split("\r\n")
    return int(status_line.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body


def ask(url: str, *parts: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send the parts, each in a packet of its own."""
    with connect(url) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            connection.sendall(part)
            time.sleep(0.02 if len(parts) > 1 else 0)
        return read_reply(connection)


def check_error(reply: tuple[int, dict[str, str], bytes], status: int, code: str) -> str:
    found, headers, body = reply
    assert found == status
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    assert headers["x-request-id"]
    assert headers["date"]
    assert headers["x-should-retry"] == "false"
    assert int(headers["content-length"]) == len(body)
    error = json.loads(body)["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    return error["message"]


# rule: Errors: What is not HTTP, and headers over the limits, get the same form
# rule: Security: A body that is framed in two ways is refused (request smuggling)
@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"hello\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        GET + b"no colon\r\n\r\n",
        GET + b"x: a\x00b\r\n\r\n",
        GET + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n",
        GET + b"Content-Length: -1\r\n\r\n",
        GET + b"Transfer-Encoding: gzip\r\n\r\n",
        GET + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        GET + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "GET /schön HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
        b"POST /ping HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        GET + b"x: 1\r\n 2\r\n\r\n",
        GET + b"x: 1\r\n\t2\r\n\r\n",
        GET + b"x: 1\n" + CLOSE,
        b"GET /health HTTP/1.1\nHost: x\r\n\r\n",
        GET + b"\n",
        b"\n" + GET + CLOSE,
        b"\r\n\r\n" + GET + CLOSE,
        b"GET http:///health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://me@x/health HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=[
        "tls",
        "no-http",
        "no-host",
        "no-colon",
        "nul",
        "two-lengths",
        "negative-length",
        "gzip",
        "length-and-chunks",
        "chunks-and-length",
        "http-2",
        "not-ascii",
        "chunks-in-http-1.0",
        "folded-by-space",
        "folded-by-tab",
        "bare-lf-behind-field",
        "bare-lf-behind-request-line",
        "bare-lf-at-the-end",
        "bare-lf-before-request",
        "two-empty-lines",
        "absolute-without-host",
        "absolute-with-user",
    ],
)
def test_what_is_not_http_is_a_400_of_openais_form(url, data):
    assert check_error(ask(url, data), 400, "malformed_http").endswith(".")


# rule: Security: What proxies read in two ways is refused: bare LF, folded lines, Transfer-Encoding in HTTP/1.0
@pytest.mark.parametrize("trailer", [b"x: 1\n\r\n", b"x: 1\r\n 2\r\n\r\n", b"\n"])
def test_a_trailer_is_held_to_the_same_lines(url, trailer):
    check_error(ask(url, CHUNKED + b"\r\n2\r\n{}\r\n0\r\n" + trailer), 400, "malformed_http")
    check_error(ask(url, CHUNKED + b"\r\n", b"2\r\n{}", b"\r\n0\r\n", trailer), 400, "malformed_http")


def test_a_body_in_many_chunks_is_read_once(url, monkeypatch):
    copied = []
    trailing = h11.Connection.trailing_data
    spy = property(lambda self: copied.append(len(trailing.fget(self)[0])) or trailing.fget(self))
    monkeypatch.setattr(h11.Connection, "trailing_data", spy)
    chunks = b"1\r\n0\r\n" + b"01\r\n \r\n" * 9000
    check_error_of_body(ask(url, CHUNKED + CLOSE + chunks + b"0\r\n\r\n"))
    assert sum(copied) < 10 * len(chunks)


def test_a_client_that_waits_for_100_continue_gets_it_and_then_its_answer(url):
    body = json.dumps({"prompt": "a"}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
    with connect(url) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n" % len(body) + CLOSE)
        assert connection.recv(65536).startswith(b"HTTP/1.1 100 ")
        connection.sendall(body)
        assert read_reply(connection)[0] == 200


def check_error_of_body(reply: tuple[int, dict[str, str], bytes]) -> None:
    """A chat body without messages."""
    assert (reply[0], json.loads(reply[2])["error"]["code"]) == (400, "malformed_json")


# RFC 9112, §3.2.2: a server must accept the absolute form, and its authority stands over Host
@pytest.mark.parametrize(
    "target", [b"http://x/ready", b"HTTP://x:8000/ready?a=1", b"https://other.example.org/ready", b"/ready"]
)
def test_a_target_may_be_a_whole_url(url, target):
    status, _, body = ask(url, b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n" + CLOSE)
    assert (status, json.loads(body)) == (200, {"stage": "ready", "done": 1.0})


@pytest.mark.parametrize("target", [b"http://x", b"http://x?a=1"])
def test_a_url_without_a_path_is_the_root(url, target):
    status, _, body = ask(url, b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n" + CLOSE)
    assert (status, json.loads(body)["name"]) == (200, "Quire")


def test_the_host_of_a_whole_url_stands_over_the_header():
    async def app(scope, receive, send):
        host = dict(scope["headers"])[b"host"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": host + b" " + scope["raw_path"] + scope["query_string"]})

    with serving(app) as served:
        head = b"GET http://right:80/a%20b?c HTTP/1.1\r\nAccept: */*\r\nHost: wrong\r\n"
        assert ask(served, head + CLOSE)[2].endswith(b"right:80 /a%20bc\r\n0\r\n\r\n")


# RFC 9112, §2.2: old clients end a body with one line too many
@pytest.mark.parametrize("parts", [[b"\r\n"], [b"\r", b"\n"]], ids=["whole", "in-two-reads"])
def test_an_empty_line_before_a_request_is_skipped(url, parts):
    assert ask(url, *parts, GET + CLOSE)[0] == 200


def test_an_empty_line_between_two_requests_is_skipped(url):
    ping = b"POST /ping HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}\r\n"
    with connect(url) as connection:
        connection.sendall(ping * 2 + GET + CLOSE)
        data = b""
        while part := connection.recv(65536):
            data += part
    assert data.count(b"HTTP/1.1 200 OK") == 3


def test_a_body_with_a_bad_chunk_is_a_400(url):
    check_error(ask(url, CHUNKED + b"\r\n", b"nonsense\r\n"), 400, "malformed_http")
    check_error(ask(url, CHUNKED + b"\r\nnonsense\r\n"), 400, "malformed_http")


def test_a_bad_body_behind_a_finished_answer_just_closes(url, caplog):
    status, _, body = ask(
        url, b"GET /version HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", b"nonsense\r\n"
    )
    assert status == 200
    assert json.loads(body)["version"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


# rule: Limits: Headers 64 KiB and 100 lines
@pytest.mark.parametrize("num_parts", [1, 5])
def test_more_than_64_kib_of_headers_are_a_431_in_one_read_or_in_many(url, num_parts):
    head = GET + b"x-big: " + b"a" * (64 * 1024) + b"\r\n" + CLOSE
    size = -(-len(head) // num_parts)
    parts = [head[start : start + size] for start in range(0, len(head), size)]
    assert "65536" in check_error(ask(url, *parts), 431, "headers_too_large")


# rule: Errors: What is not HTTP, and headers over the limits, get the same form
def test_headers_without_end_are_a_431(url):
    check_error(ask(url, GET + b"x-big: " + b"a" * 300_000), 431, "headers_too_large")


def test_almost_64_kib_of_headers_are_fine(url):
    assert ask(url, GET + b"x-big: " + b"a" * (63 * 1024) + b"\r\n" + CLOSE)[0] == 200


# rule: Limits: Headers 64 KiB and 100 lines
def test_at_most_100_header_lines(url):
    lines = [b"x-%d: 1\r\n" % i for i in range(98)]  # Host and Connection are two more
    assert ask(url, GET + b"".join(lines) + CLOSE)[0] == 200
    assert "100" in check_error(ask(url, GET + b"".join(lines) + b"x: 1\r\n" + CLOSE), 431, "headers_too_large")
    folded = GET + b"x: 1\r\n" + b" 2\r\n" * 200 + CLOSE
    check_error(ask(url, folded), 431, "headers_too_large")


def test_trailers_have_the_same_limits(url):
    trailers = b"".join(b"x-%d: 1\r\n" % i for i in range(101))
    check_error(ask(url, CHUNKED + b"\r\n2\r\n{}\r\n0\r\n" + trailers + b"\r\n"), 431, "headers_too_large")


def test_the_limit_is_each_requests_own(url):
    """Pipelined requests share a buffer, not a limit."""
    with connect(url) as connection:
        head = GET + b"x-big: " + b"a" * (40 * 1024) + b"\r\n"
        connection.sendall((head + b"\r\n") * 3 + head + CLOSE)
        data = b""
        while part := connection.recv(65536):
            data += part
    assert data.count(b"HTTP/1.1 200 OK") == 4


def test_a_bad_request_behind_a_good_one_is_answered_in_turn(url):
    with connect(url) as connection:
        connection.sendall(GET + b"\r\n" + b"nonsense\r\n\r\n")
        data = b""
        while part := connection.recv(65536):
            data += part
    assert data.index(b"200 OK") < data.index(b"malformed_http")


def test_each_refusal_leaves_one_line(url, caplog):
    caplog.set_level("INFO", "quire.access")
    _, headers, _ = ask(url, b"hello\r\n\r\n")
    lines = [record.getMessage() for record in caplog.records if record.name == "quire.access"]
    assert lines == [f"- - 400 malformed_http {headers['x-request-id']}"]


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.3)
    monkeypatch.setattr(http_protocol, "BODY_PAUSE_S", 0.3)
    monkeypatch.setattr(http_protocol, "BODY_TIMEOUT_S", 0.8)


def drip(url: str, start: bytes, part: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send a byte now and then until there is an answer."""
    with connect(url) as connection:
        connection.sendall(start)
        for _ in range(50):
            connection.settimeout(0.1)
            try:
                if connection.recv(1, socket.MSG_PEEK):
                    break
            except TimeoutError:
                connection.sendall(part)
        connection.settimeout(60)
        return read_reply(connection)


# rule: Limits: Sending a request has its time: headers 30 s, body 300 s
@pytest.mark.parametrize("start", [b"G", GET], ids=["method", "headers"])
@pytest.mark.slow
def test_headers_that_never_end_are_a_408(impatient, url, start):
    assert "0.3 s" in check_error(ask(url, start), 408, "slow_client")


# rule: Errors: 408 when the request's time is over, or its sender is too slow
@pytest.mark.slow
def test_headers_that_drip_are_a_408(impatient, url):
    check_error(drip(url, GET + b"x: ", b"a"), 408, "slow_client")


@pytest.mark.slow
def test_a_connection_that_says_nothing_is_closed(impatient, url):
    with connect(url) as connection:
        assert connection.recv(100) == b""


# rule: Limits: Sending a request has its time: headers 30 s, body 300 s
@pytest.mark.slow
def test_a_body_that_stops_is_a_408(impatient, url):
    head = CHUNKED.replace(b"Transfer-Encoding: chunked", b"Content-Length: 100")
    check_error(ask(url, head + b"\r\n{"), 408, "slow_client")
    check_error(ask(url, CHUNKED + b"\r\n1\r\n{"), 408, "slow_client")


# rule: Errors: 408 when the request's time is over, or its sender is too slow
@pytest.mark.slow
def test_a_body_that_drips_is_a_408(impatient, url):
    head = CHUNKED.replace(b"Transfer-Encoding: chunked", b"Content-Length: 1000")
    check_error(drip(url, head + b"\r\n", b" "), 408, "slow_client")


def read_health(connection):
    """Read one whole answer, however many pieces it comes in, of a connection that stays open."""
    answer = b""
    while not answer.endswith(b'{"status":"ok"}'):
        piece = connection.recv(4096)
        assert piece
        answer += piece
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.slow
def test_a_second_request_has_its_own_time(impatient, url, monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 1.0)
    with connect(url) as connection:
        connection.sendall(GET + b"\r\n")
        read_health(connection)
        time.sleep(1.2)  # idle between requests is the keep-alive's business
        connection.sendall(GET + b"\r\n")
        read_health(connection)
        connection.sendall(GET)
        check_error(read_reply(connection), 408, "slow_client")


@pytest.mark.slow
def test_an_answer_may_take_longer_than_a_request(impatient, harness, monkeypatch):
    for limit in ("HEAD_TIMEOUT_S", "BODY_PAUSE_S", "BODY_TIMEOUT_S"):  # a busy machine is slow to read what was sent
        monkeypatch.setattr(http_protocol, limit, 1.0)
    app = harness(engine={"delay_s": 1.2}).app
    with serving(app) as url, connect(url) as connection:
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}).encode()
        head = CHUNKED.replace(b"Transfer-Encoding: chunked", b"Content-Length: %d" % len(body))
        connection.sendall(head + b"Connection: close\r\n\r\n" + body)
        assert read_reply(connection)[0] == 200


# rule: Errors: A body that breaks off gets the error of its path, and the id that the request has by then
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_a_body_at_fault_is_refused_in_the_form_of_its_path_with_the_requests_id(url, path):
    head = CHUNKED.replace(b"/v1/chat/completions", path.encode()) + b"x-request-id: my-own.1\r\n\r\n"
    status, headers, body = ask(url, head, b"zz\r\n")
    assert (status, headers["x-request-id"]) == (400, "my-own.1")
    error = json.loads(body)
    assert "illegal chunk header" in error["error"]["message"]
    if path == "/v1/messages":
        assert (error["type"], error["request_id"], headers["request-id"]) == ("error", "my-own.1", "my-own.1")
    else:
        assert "request-id" not in headers


@pytest.mark.parametrize("is_one_packet", [False, True])
def test_a_body_at_fault_behind_a_prefix_is_refused_in_the_form_of_its_path(harness, is_one_packet):
    head = CHUNKED.replace(b"/v1/chat/completions", b"/llm/v1/messages") + b"\r\n"
    parts = [head + b"zz\r\n"] if is_one_packet else [head, b"zz\r\n"]
    with serving(harness(root_path="/llm").app, prefix="/llm") as url:
        status, headers, body = ask(url, *parts)
    error = json.loads(body)
    assert (status, error["type"], error["request_id"]) == (400, "error", headers["request-id"])
