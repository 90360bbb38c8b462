"""What happens to a daemon in production: killed and hung processes, full disks, no descriptors, clocks that jump."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.integration.conftest import needs_proc
from tests.support.daemon import ROOT, Daemon, descendants, is_alive, wait_for
from tests.support.life_cycle import Start, Stream, post, ready_status
from tests.support.terminal import Terminal

pytestmark = [needs_proc, pytest.mark.full]

DAY_S = 86_400
JUMPING_CLOCK = """\
import pathlib, time
_time, _file = time.time, pathlib.Path(__file__).with_name("offset")
time.time = lambda: _time() + float(_file.read_text())
"""


def through_shell(folder: Path, setup: str, *arguments: str, **env: str) -> Daemon:
    """Start a daemon from a shell that has run `setup`."""
    command = ("sh", "-c", f'{setup} && exec "$0" -m server "$@"', sys.executable)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return Daemon("--device", "cpu", *arguments, folder=folder, command=command, env={"PYTHONPATH": path, **env})


def test_one_worker_of_two_is_killed_and_the_streams_of_the_other_go_on(start: Start) -> None:
    daemon = start("--http-workers", "2").wait_ready()
    wait_for(lambda: len(daemon.running("server.http.worker")) == 2, timeout_s=60, what="two workers")
    streams = [Stream(daemon, max_tokens=300) for _ in range(16)]
    for stream in streams:
        stream.wait_started()
    first = daemon.running("server.http.worker")[0]
    num_lost = daemon.connections("server.http.worker")[0]
    assert 0 < num_lost < 16
    os.kill(first, signal.SIGKILL)
    assert [post(daemon).status_code for _ in range(8)] == [200] * 8  # some wait for the next worker, none fails
    for stream in streams:
        stream.thread.join(60)
    assert sum(stream.is_closed_well is False for stream in streams) == num_lost
    assert sum(stream.events[-1] == "[DONE]" for stream in streams) == 16 - num_lost
    assert len(daemon.running("server.http.worker")) == 2
    assert first not in daemon.running("server.http.worker")
    metrics = daemon.metrics()
    assert (metrics["quire_worker_restarts_total"], metrics["quire_engine_restarts_total"]) == (1, 0)
    assert metrics["quire_num_requests_running"] == 0  # those of the killed worker hold no blocks


def test_an_engine_that_hangs_too_long_is_killed_and_comes_back(start: Start) -> None:
    daemon = start("--stall-timeout", "11").wait_ready()
    stream = Stream(daemon, max_tokens=100).wait_started()
    engine = daemon.child("engine.process")
    os.kill(engine, signal.SIGSTOP)
    wait_for(lambda: not is_alive(engine), timeout_s=60, what="killed")
    assert stream.wait_end()[-1]["choices"][0]["finish_reason"] == "length"  # it went on
    wait_for(lambda: ready_status(daemon) == 200, timeout_s=60, what="ready again")
    assert daemon.get("/health").status_code == 200
    assert post(daemon).status_code == 200
    assert "The engine made no progress for 11 s (--stall-timeout) and was killed." in daemon.log
    assert daemon.metrics()["quire_engine_restarts_total"] == 1


def test_a_log_on_a_full_disk_stops_nothing() -> None:
    with tempfile.TemporaryDirectory(prefix="full-") as folder, open("/dev/full", "wb") as full:
        path = f"{folder}/quire.sock"
        process = subprocess.Popen(
            [sys.executable, "-m", "server", "serve", "--device", "cpu", "--uds", path],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=full,
        )
        try:
            with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://localhost", timeout=60) as http:
                wait_for(lambda: _status(http) == 200, timeout_s=90, what="ready")
                body = {"model": "quire-demo", "prompt": "A quire", "max_tokens": 8, "ignore_eos": True}
                for _ in range(200):  # more lines than a buffer holds
                    assert http.get("/nowhere").status_code == 404
                assert http.post("/v1/completions", json=body).status_code == 200
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                (engine,) = (int(pid) for pid in children if "engine" in Path(f"/proc/{pid}/cmdline").read_text())
                os.kill(engine, signal.SIGKILL)
                wait_for(lambda: _status(http) != 200, timeout_s=60, what="not ready")
                wait_for(lambda: _status(http) == 200, timeout_s=60, what="ready again")
                assert http.post("/v1/completions", json=body).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            assert not Path(path).exists()
            assert not any(is_alive(int(pid)) for pid in children)
        finally:
            process.kill()
            process.wait(60)


def _status(http: httpx.Client) -> int:
    try:
        return http.get("/ready").status_code
    except httpx.TransportError:
        return 0


# rule: Security: Connections beyond the file descriptors get a 503
def test_without_file_descriptors_new_connections_are_refused_and_it_recovers(tmp_path: Path) -> None:
    with through_shell(tmp_path, "ulimit -n 64") as daemon:
        daemon.wait_ready()
        stream = Stream(daemon, max_tokens=400).wait_started()
        host, port = daemon.base_url.removeprefix("http://").split(":")
        held = [socket.create_connection((host, int(port)), timeout=60) for _ in range(100)]
        try:
            wait_for(lambda: "ulimit -n sets the file descriptors" in daemon.log, timeout_s=60, what="log line")
            events = stream.wait_end()
            assert [event["choices"][0]["finish_reason"] for event in events if event["choices"]][-1] == "length"
        finally:
            for connection in held:
                connection.close()
        wait_for(lambda: ready_status(daemon) == 200, timeout_s=60, what="served again")
        assert post(daemon).status_code == 200
        metrics = daemon.metrics()
        assert (metrics["quire_worker_restarts_total"], metrics["quire_engine_restarts_total"]) == (0, 0)


def test_the_soft_limit_of_file_descriptors_is_raised(tmp_path: Path) -> None:
    with through_shell(tmp_path, "ulimit -Sn 256 && ulimit -Hn 2000") as daemon:
        worker = daemon.wait_ready().child("server.http.worker")
        lines = Path(f"/proc/{worker}/limits").read_text().splitlines()
        (limits,) = [line.split() for line in lines if line.startswith("Max open files")]
        assert limits[3:5] == ["2000", "2000"]


def test_a_clock_that_jumps_changes_no_duration(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(JUMPING_CLOCK)
    offset = tmp_path / "offset"
    offset.write_text("0")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    with through_shell(tmp_path, "true", "--request-timeout", "60", PYTHONPATH=path) as daemon:
        before = post(daemon.wait_ready()).json()
        stream = Stream(daemon, max_tokens=300).wait_started()
        offset.write_text(str(-DAY_S))
        wait_for(lambda: len(stream.events) > 100, timeout_s=60, what="more tokens")
        behind = post(daemon).json()
        offset.write_text(str(DAY_S))
        events = stream.wait_end()
        ahead = post(daemon).json()
        assert abs(behind["created"] - before["created"] + DAY_S) < 3600  # the clock did jump
        assert abs(ahead["created"] - before["created"] - DAY_S) < 3600
        assert len({event["created"] for event in events}) == 1
        assert [event["choices"][0]["finish_reason"] for event in events if event["choices"]][-1] == "length"
        metrics = daemon.metrics()
        durations = {name: value for name, value in metrics.items() if name.endswith("_seconds_sum")}
        assert len(durations) > 10
        assert all(0 <= value < 3600 for value in durations.values()), durations
        assert metrics["quire_requests_finished_total{finished_reason=length}"] == 4
        assert daemon.get("/health").status_code == 200
        for answer in (before, behind, ahead):
            assert all(0 <= value < 3600 for value in _numbers(answer["timings"]))


def _numbers(timings: dict) -> list[float]:
    return [value for value in timings.values() if isinstance(value, int | float)]


def test_closing_the_terminal_ends_it_as_sigterm_does() -> None:
    with Terminal("serve", "--device", "cpu", "--port", "0") as terminal:
        terminal.expect("Ready in", timeout_s=90)
        children = Path(f"/proc/{terminal.process.pid}/task/{terminal.process.pid}/children").read_text().split()
        assert len(children) >= 2
        terminal.hang_up()
        assert terminal.process.wait(60) == 0
        wait_for(lambda: not any(is_alive(int(pid)) for pid in children), timeout_s=60, what="children ended")


def with_key(daemon: Daemon, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.get(daemon.base_url + "/v1/models", headers=headers, timeout=60).status_code


def all_workers(check: Callable[[], bool]) -> bool:
    """Tell if a check holds on so many new connections that each of two workers has one."""
    return all(check() for _ in range(12))


# rule: Security: SIGHUP reads the key file again, in every worker; a broken file changes nothing; streams go on
def test_sighup_reads_the_keys_again_in_every_worker_and_streams_go_on(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-stays\nsk-goes\n")
    flags = ("--device", "cpu", "--http-workers", "2", "--api-key-file", str(keys))
    with Daemon(*flags, folder=tmp_path, env={"QUIRE_API_KEY": "sk-environment"}) as daemon:
        daemon.wait_ready()
        url, body = daemon.base_url + "/v1/completions", {"prompt": "Go", "max_tokens": 400, "ignore_eos": True}
        headers = {"authorization": "Bearer sk-goes"}
        with httpx.stream("POST", url, json={**body, "stream": True}, headers=headers, timeout=60) as stream:
            lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: "))
            next(lines)
            keys.write_text("sk-stays\nsk-comes\n")
            daemon.process.send_signal(signal.SIGHUP)
            wait_for(
                lambda: all_workers(lambda: with_key(daemon, "sk-goes") == 401), timeout_s=60, what="the key refused"
            )
            for key in ("sk-stays", "sk-comes", "sk-environment"):
                assert all_workers(lambda key=key: with_key(daemon, key) == 200)
            *_, last, done = lines
        assert done == "[DONE]"
        assert json.loads(last)["choices"][0]["finish_reason"] == "length"
        assert "api keys reloaded" in daemon.log

        keys.write_text("not a key\n")
        daemon.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "api keys not reloaded, the old ones stay valid" in daemon.log, timeout_s=60, what="log line")
        for pid in daemon.running("server.http.worker"):  # the next ones start with what was read last
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda pid=pid: not is_alive(pid), timeout_s=60, what="killed")
        wait_for(lambda: len(daemon.running("server.http.worker")) == 2, timeout_s=60, what="two workers")
        wait_for(lambda: ready_status(daemon) == 200, timeout_s=60, what="no longer the launcher's own answer")
        assert all_workers(lambda: with_key(daemon, "sk-goes") == 401)
        assert all_workers(lambda: with_key(daemon, "sk-comes") == 200)
        assert "sk-" not in daemon.log


def test_a_killed_daemons_directory_is_removed_by_the_next(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="run-") as parent:
        with Daemon("--device", "cpu", folder=tmp_path, env={"TMPDIR": parent}) as killed:
            killed.wait_ready()
            (left,) = Path(parent).glob("quire-*")
            killed.process.kill()
            killed.process.wait(60)
        assert left.exists()
        with Daemon("--device", "cpu", folder=tmp_path, env={"TMPDIR": parent}) as daemon:
            wait_for(
                lambda: "removed the run directory of a killed daemon" in daemon.log, timeout_s=60, what="log line"
            )
            assert not left.exists()
            assert len(list(Path(parent).glob("quire-*"))) == 1
            daemon.wait_ready()


def test_a_launcher_killed_while_the_model_loads_leaves_no_orphans(start: Start) -> None:
    daemon = start()
    wait_for(lambda: len(descendants(daemon.process.pid)) == 2, timeout_s=60, what="children")
    children = descendants(daemon.process.pid)
    daemon.process.kill()
    wait_for(lambda: not any(is_alive(pid) for pid in children), timeout_s=60, what="children ended")


def test_no_helper_of_a_worker_outlives_the_launcher_or_the_worker(start: Start) -> None:
    daemon = start().wait_ready()
    worker = daemon.child("server.http.worker")
    assert post(daemon, response_format={"type": "json_object"}).status_code == 200
    helpers = descendants(worker)
    assert helpers  # it tries grammars
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: not any(is_alive(pid) for pid in helpers), timeout_s=60, what="helpers ended")
    wait_for(lambda: ready_status(daemon) == 200, timeout_s=60, what="served again")
    assert post(daemon, response_format={"type": "json_object"}).status_code == 200
    everybody = descendants(daemon.process.pid)
    assert len(everybody) == 3
    daemon.process.kill()
    wait_for(lambda: not any(is_alive(pid) for pid in everybody), timeout_s=60, what="all ended")
