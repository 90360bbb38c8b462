"""`quire batch` that is stopped, by people, disks and servers, and gone on with."""

import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.batch_runs import batch, command, echo, records, write_input
from tests.support.daemon import ROOT, wait_for
from tests.support.scripted_server import Reply, scripted_server


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def test_a_second_run_keeps_answers_repairs_a_torn_line_and_tries_failures_again(files):
    source, output = files
    write_input(source, 6)
    is_broken = True

    def script(path, body):
        if body is not None and body["prompt"] == "4" and is_broken:
            return Reply(500, {"error": {"message": "oh"}})
        return echo(path, body)

    with scripted_server(script) as server:
        assert batch(source, "-o", output, "--url", server.url).returncode == 1
        first = records(output)
        lines = output.read_text().splitlines(keepends=True)
        output.write_text(lines[5] + lines[4] + lines[0] + lines[1] + lines[2] + lines[3][:40])  # as if it was killed
        server.asked.clear()
        is_broken = False
        result = batch(source, "-o", output, "--url", server.url)
        assert (result.returncode, sorted(body["prompt"] for body in server.asked)) == (0, ["3", "4"])
        assert "2 answered, 0 failed, 4 were there already" in result.stderr
        second = records(output)
        assert [record["custom_id"] for record in second] == [f"r{i}" for i in range(6)]
        assert [second[i]["id"] for i in (0, 1, 2, 5)] == [first[i]["id"] for i in (0, 1, 2, 5)]
        server.asked.clear()
        result = batch(source, "-o", output, "--url", server.url)
        assert (result.returncode, server.asked) == (0, [])
        assert "all 6 lines are answered" in result.stderr
    assert records(output) == second


def test_the_output_of_another_batch_is_refused_untouched(files):
    source, output = files
    output.write_text(
        '{"id":"i","custom_id":"z","response":{"status_code":200,"request_id":"","body":{}},"error":null}\n'
    )
    before = output.read_bytes()
    write_input(source, 2)
    result = batch(source, "-o", output, "--url", "127.0.0.1:1")
    assert result.returncode == 2
    assert 'has an answer to "z", which is not in the input' in result.stderr
    assert output.read_bytes() == before


@pytest.mark.parametrize(
    ("number", "ignored"),
    [(signal.SIGINT, None), (signal.SIGTERM, None), (signal.SIGHUP, None), (signal.SIGTERM, signal.SIGINT)],
)
def test_a_stopped_batch_can_be_gone_on_with(files, number, ignored):
    source, output = files
    write_input(source, 50)
    slow = True

    def script(path, body):
        if body is not None and slow:
            time.sleep(0.1)
        return echo(path, body)

    with scripted_server(script) as server:
        process = subprocess.Popen(
            command(source, "-o", output, "--url", server.url, "--concurrency", "2"),
            cwd=ROOT, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: [
                signal.signal(each, signal.SIG_IGN if each == ignored else signal.SIG_DFL)
                for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            ],
        )  # fmt: skip
        wait_for(lambda: output.exists() and len(output.read_bytes().splitlines()) >= 4, timeout_s=60, what="answers")
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "Run the same command to go on" in stderr
        assert "Traceback" not in stderr
        kept = len(records(output))
        assert 4 <= kept < 50
        slow = False
        assert batch(source, "-o", output, "--url", server.url).returncode == 0
    assert [record["custom_id"] for record in records(output)] == [f"r{i}" for i in range(50)]


def test_under_nohup_a_closed_terminal_stops_nothing(files):
    source, output = files
    write_input(source, 6)

    def script(path, body):
        if body is not None:
            time.sleep(0.1)
        return echo(path, body)

    with scripted_server(script) as server:
        process = subprocess.Popen(
            command(source, "-o", output, "--url", server.url, "--concurrency", "1"),
            cwd=ROOT, stderr=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        )  # fmt: skip
        wait_for(lambda: server.asked, timeout_s=60, what="a request")
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert len(records(output)) == 6


def test_a_full_disk_stops_it_with_whole_lines_only(files):
    source, output = files
    write_input(source, 50)
    with scripted_server(echo) as server:
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # noqa: E731
        result = batch(source, "-o", output, "--url", server.url, preexec_fn=limit)
        assert result.returncode == 3
        assert "No room to write" in result.stderr
        assert 0 < output.stat().st_size <= 2000
        assert len(records(output)) > 5
        assert batch(source, "-o", output, "--url", server.url).returncode == 0
    assert [record["custom_id"] for record in records(output)] == [f"r{i}" for i in range(50)]


def test_a_server_that_goes_away_stops_the_batch(files):
    source, output = files
    write_input(source, 8)
    with scripted_server(lambda path, body: Reply(404) if body is None else Reply(0)) as server:
        url = server.url
    result = batch(source, "-o", output, "--url", url)
    assert result.returncode == 3
    assert f"No server with OpenAI's API answers at {url}" in result.stderr


def test_a_server_that_dies_in_the_middle_stops_the_batch_which_can_be_gone_on_with(files):
    source, output = files
    write_input(source, 8)
    with scripted_server(echo) as server:
        url = server.url
        process = subprocess.Popen(
            command(source, "-o", output, "--url", url, "--concurrency", "1", "--retries", "1"),
            cwd=ROOT, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        server.close_after(3)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 3
    assert f"No server answers at {url}" in stderr
    assert "Stopped: " in stderr
    assert len(records(output)) >= 3


def test_a_server_of_its_own_that_dies_is_said(files, tmp_path: Path):
    source, output = files
    write_input(source, 400, max_tokens=50)
    env = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        command(source, "-o", output, "--model", ROOT / "models" / "demo" / "checkpoint", "--retries", "1",
                "--concurrency", "8"),
        cwd=ROOT, stderr=subprocess.PIPE, text=True, env=env,
    )  # fmt: skip
    wait_for(lambda: output.exists() and output.stat().st_size > 0, timeout_s=90, what="an answer")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "The server that was started is gone: It was killed by SIGKILL" in stderr
    assert "Traceback" not in stderr
    assert len(records(output)) >= 1
