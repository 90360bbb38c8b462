"""benchmarks.online, beside a daemon that is made up."""

import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from benchmarks import online
from benchmarks.report import BenchError


@pytest.mark.parametrize("starts", [0, 1, 3])
def test_each_start_but_the_last_is_stopped_before_the_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], starts: int
) -> None:
    events: list[str] = []

    def start_server(folder: str, port: int, flags: list[str]) -> tuple[subprocess.Popen[bytes] | None, float]:
        events.append("start")
        return None, 1.0

    monkeypatch.setattr(online, "write_model_folder", lambda config, folder: None)
    monkeypatch.setattr(online, "start_server", start_server)
    monkeypatch.setattr(online, "stop_server", lambda server: events.append("stop"))
    monkeypatch.setattr(online, "_measure", lambda args, concurrency, seed: events.append(f"c{concurrency} of {seed}"))
    monkeypatch.setattr(online, "format_report", lambda report: "")
    monkeypatch.setattr(sys, "argv", ["online", "--starts", str(starts), "--concurrency", "1", "4", "1"])
    assert online.main() == 0
    assert events == [*["start", "stop"] * (starts - 1), "start", "c1 of 0", "c4 of 0", "c1 of 100000", "stop"]
    assert capsys.readouterr().out.count("ready in") == max(starts, 1)


def test_a_daemon_that_ends_before_it_is_ready_is_named_with_its_status() -> None:
    server = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(BenchError, match="ended with 3 before it was ready"):
        online.wait_until_ready(server, 1)


def test_the_wait_for_a_daemon_that_never_is_ready_is_bounded() -> None:
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with pytest.raises(BenchError, match=r"not ready within 0\.1 s: it did not reply\."):
            online.wait_until_ready(server, 1, timeout_s=0.1)
    finally:
        online.stop_server(server)


def test_a_daemon_that_is_not_ready_in_time_tells_what_it_waits_for() -> None:
    class Loading(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.end_headers()
            self.wfile.write(b'{"stage": "kernels"}')

    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with HTTPServer(("127.0.0.1", 0), Loading) as replies:
        Thread(target=replies.serve_forever, daemon=True).start()
        try:
            with pytest.raises(BenchError, match=r'not ready within 0\.1 s: \{"stage": "kernels"\}\.'):
                online.wait_until_ready(server, replies.server_port, timeout_s=0.1)
        finally:
            online.stop_server(server)
            replies.shutdown()
