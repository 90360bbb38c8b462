"""A daemon takes the port of another one over while clients ask: nobody is refused, cut or told to come again."""

import json
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest

from tests.integration.conftest import needs_proc
from tests.integration.test_service_manager import Manager
from tests.support.daemon import READY, Daemon, wait_for
from tests.support.life_cycle import MODEL, Start, Stream, ready_status

pytestmark = needs_proc
CHAT = "/v1/chat/completions"
BESIDE = ("--takeover-form", "beside")  # else the next daemon takes seconds to measure the memory
ENDS = ("response.completed", "response.incomplete", "message_stop")
STORY = [{"role": "user", "content": "Tell me a story"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
REQUESTS: list[tuple[str, dict]] = [
    (CHAT, {"messages": STORY, "temperature": 0, "max_tokens": 60, "ignore_eos": True}),
    (CHAT, {"messages": STORY, "seed": 7, "n": 3, "max_tokens": 30, "ignore_eos": True}),
    (
        CHAT,
        {
            "messages": STORY,
            "seed": 3,
            "max_tokens": 60,
            "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
        },
    ),
    ("/v1/completions", {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 50, "ignore_eos": True}),
    ("/v1/responses", {"input": "Tell me a story", "temperature": 0, "max_output_tokens": 50}),
    ("/v1/messages", {"messages": STORY, "temperature": 0, "max_tokens": 50}),
]


def stream(client: httpx.Client, url: str, path: str, body: dict) -> dict[int, str]:
    """Return the texts of a streamed answer by choice. It must be whole."""
    texts: dict[int, str] = {}
    lines: list[str] = []
    with client.stream("POST", url + path, json={"model": MODEL, "stream": True, **body}) as response:
        assert response.status_code == 200, response.read()
        lines += [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    for event in events:
        assert "error" not in event, event
        for choice in event.get("choices", ()):
            text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + (text or "")
        if event.get("type") == "response.output_text.delta":
            texts[0] = texts.get(0, "") + event["delta"]
        if event.get("type") == "content_block_delta":
            texts[0] = texts.get(0, "") + event["delta"]["text"]
    is_whole = lines[-1] == "[DONE]" or events[-1]["type"] in ENDS
    assert is_whole, lines[-1]
    return texts


class Clients:
    """Ask without a pause until stop(), each in a thread of its own; every answer must be the undisturbed one."""

    def __init__(self, url: str, requests: Sequence[tuple[str, dict]] = REQUESTS) -> None:
        self.num_answers = 0
        self.num_probes = 0
        self.errors: list[str] = []
        self._url = url
        self._requests = requests
        self._is_stopped = False
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        with new_client() as client:
            self._undisturbed = [stream(client, url, path, body) for path, body in requests]

    def start(self, *, num_streams: int) -> None:
        """Start so many streams, half of them over connections that stay open between requests, and probes."""
        for i in range(num_streams):
            self._run(self._stream, i % len(self._requests), i % 4 < 2)
        for keeps in (True, False):
            self._run(self._probe, "/health", keeps)
            self._run(self._probe, "/ready", keeps)

    def stop(self) -> None:
        """Let the last answers come, and check all."""
        self._is_stopped = True
        for thread in self._threads:
            thread.join(180)
        assert self.errors == []

    def _run(self, ask: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=self._guard, args=(ask, *arguments), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _guard(self, ask: Callable[..., None], *arguments: object) -> None:
        try:
            ask(*arguments)
        except (AssertionError, httpx.HTTPError) as error:
            self.errors.append(f"{arguments}: {type(error).__name__}: {error}")

    def _stream(self, number: int, keeps_connection: bool) -> None:
        path, body = self._requests[number]
        client = new_client()
        while not self._is_stopped:
            assert stream(client, self._url, path, body) == self._undisturbed[number]
            with self._lock:
                self.num_answers += 1
            if not keeps_connection:
                client.close()
                client = new_client()
        client.close()

    def _probe(self, path: str, keeps_connection: bool) -> None:
        with new_client() as client:
            while not self._is_stopped:
                response = client.get(self._url + path, headers={} if keeps_connection else {"connection": "close"})
                assert response.status_code == 200, response.text
                with self._lock:
                    self.num_probes += 1
                time.sleep(0.05)


def new_client() -> httpx.Client:
    """Return a client whose idle connections stay open. verify=False spares it the certificates of the world."""
    return httpx.Client(timeout=180, verify=False, limits=httpx.Limits(keepalive_expiry=None))


def hear(manager: Manager, lines: list[str]) -> None:
    """Add what a service manager hears, which has to read: its queue is short."""
    try:
        while True:
            lines += manager.wait("WATCHDOG=1")
    except OSError:  # it is closed, or hears no more
        pass


def port_of(daemon: Daemon) -> str:
    return daemon.base_url.rpartition(":")[2]


def start_next(start: Start, daemon: Daemon, *flags: str) -> Daemon:
    return start("--port", port_of(daemon), "--takeover", *flags)


def wait_given(old: Daemon, new: Daemon) -> None:
    wait_for(
        lambda: READY.search(new.log) or new.process.poll() is not None, timeout_s=240, what="ready beside streams"
    )
    assert new.process.poll() is None, new.log
    assert f"the port is handed over, open requests go on here until they end pid={new.process.pid}" in old.log
    assert "form=beside" in new.log


# rule: Streams: An upgrade cuts nobody: the next daemon takes the port over, and open streams end in the old one
def test_a_next_daemon_takes_the_port_over_and_nobody_notices(tmp_path: Path, start: Start) -> None:
    manager = Manager()
    environment = {"NOTIFY_SOCKET": manager.name, "WATCHDOG_USEC": "500000"}
    with Daemon("--device", "cpu", "--http-workers", "2", folder=tmp_path, env=environment) as old:
        old.wait_ready()
        heard = manager.wait("READY=1")
        threading.Thread(target=hear, args=(manager, heard), daemon=True).start()
        clients = Clients(old.base_url, [REQUESTS[1], REQUESTS[5]])
        clients.start(num_streams=3)
        new = start_next(start, old, "--served-model-name", MODEL, "--served-model-name", "also")
        with new_client() as idle:
            wait_for(lambda: "stage name=weights" in new.log, timeout_s=180, what="a load")  # an idle one has 75 s
            idle.get(old.base_url + "/health")
            wait_given(old, new)
            assert idle.get(old.base_url + "/health").headers["connection"] == "close"  # by the old one, the last time
        wait_for(lambda: heard.count("READY=1") == 2, timeout_s=60, what="ready again")
        named = heard.index(f"MAINPID={new.process.pid}")
        assert {"READY=1", "WATCHDOG=1", f"STATUS=Serving {MODEL} on {new.base_url}"} <= set(heard[named:])
        assert [model["id"] for model in new.get("/v1/models").json()["data"]] == [MODEL, "also"]
        assert old.process.wait(60) == 0
        clients.stop()
        assert clients.num_answers > 3
        assert "STOPPING=1" not in heard
    manager.close()
    assert "Traceback" not in old.log + new.log
    assert ready_status(new) == 200
    new.process.send_signal(signal.SIGTERM)
    assert new.process.wait(60) == 0


@pytest.mark.full
def test_two_takeovers_in_a_row_under_fifty_streams(start: Start) -> None:
    first = start("--http-workers", "2", "--max-num-seqs", "128").wait_ready()
    clients = Clients(first.base_url)
    clients.start(num_streams=52)
    daemons = [first]
    for num_workers in ("3", "1"):  # some share a socket, then one has several
        wait_for(lambda: clients.num_answers > 0, timeout_s=120, what="answers")
        daemons.append(start_next(start, daemons[-1], "--http-workers", num_workers, "--max-num-seqs", "128"))
        wait_given(daemons[-2], daemons[-1])
        clients.num_answers = 0
    for old in daemons[:2]:
        assert old.process.wait(180) == 0
    wait_for(lambda: clients.num_answers > 10, timeout_s=120, what="answers of the third")
    clients.stop()
    assert clients.num_probes > 200
    assert len({daemon.process.pid for daemon in daemons}) == 3
    assert not any("Traceback" in daemon.log for daemon in daemons)
    assert daemons[-1].metrics()["quire_requests_failed_total{reason=engine_dead}"] == 0


@pytest.mark.full
def test_a_unix_socket_is_taken_over_and_its_file_stays(start: Start, tmp_path: Path) -> None:
    path = str(tmp_path / "q.sock")
    old = start("--uds", path).wait_ready()
    inode = Path(path).stat().st_ino
    new = start("--uds", path, "--takeover")
    wait_given(old, new)
    assert old.process.wait(60) == 0
    assert Path(path).stat().st_ino == inode
    with httpx.Client(transport=httpx.HTTPTransport(uds=path)) as client:
        assert client.get("http://localhost/ready").status_code == 200
    new.process.send_signal(signal.SIGTERM)
    assert new.process.wait(60) == 0
    assert not Path(path).exists()


@pytest.mark.full
def test_a_signal_ends_what_the_old_one_still_has(start: Start) -> None:
    old = start("--drain-timeout", "0.5").wait_ready()
    long = Stream(old, max_tokens=4000).wait_started()
    new = start_next(start, old)
    wait_given(old, new)
    old.process.send_signal(signal.SIGTERM)
    assert long.wait_end()[-1]["error"]["code"] == "server_shutting_down"
    assert old.process.wait(60) == 0
    assert ready_status(new) == 200


@pytest.mark.full
def test_the_next_one_serves_when_the_old_one_is_killed_meanwhile(start: Start) -> None:
    old = start().wait_ready()
    url = old.base_url
    new = start_next(start, old, *BESIDE)
    wait_for(lambda: "takes the port over when it is ready" in new.log, timeout_s=60, what="the offer")
    old.process.kill()
    statuses: list[int] = []
    while not READY.search(new.log):
        statuses.append(httpx.get(url + "/health", timeout=60).status_code)  # connections wait, and none is refused
    assert set(statuses) == {200}
    assert "has ended before" in new.log
    assert ready_status(new) == 200


def test_a_next_daemon_that_fails_leaves_the_old_one(start: Start, daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["Nothing"]}')
    wrong = start_next(start, daemon, str(tmp_path / "model"))
    assert wrong.process.wait(60) != 0
    assert f"The daemon with process {daemon.process.pid} goes on serving." in wrong.log
    killed = start_next(start, daemon, *BESIDE)
    wait_for(lambda: "takes the port over when it is ready" in killed.log, timeout_s=60, what="the offer")
    second = start_next(start, daemon)
    assert second.process.wait(60) == 3
    assert f"cannot be taken over: process {killed.process.pid} is taking it over already." in second.log
    killed.process.kill()
    wait_for(lambda: daemon.log.count("the takeover was given up") == 2, timeout_s=60, what="its end")
    ended = start_next(start, daemon, *BESIDE)
    wait_for(lambda: "takes the port over when it is ready" in ended.log, timeout_s=60, what="the offer")
    ended.process.send_signal(signal.SIGTERM)
    assert ended.process.wait(60) == 0
    assert daemon.get("/health").status_code == 200
    assert Stream(daemon, max_tokens=4).wait_end()
    assert "handed over" not in daemon.log


@pytest.mark.full
def test_an_engine_that_cannot_load_leaves_the_old_one(start: Start, daemon: Daemon) -> None:
    wrong = start_next(start, daemon, *BESIDE, "--kv-cache-memory", "1KiB")
    assert wrong.process.wait(90) != 0
    assert f"The daemon with process {daemon.process.pid} goes on serving." in wrong.log
    assert daemon.get("/health").status_code == 200
