"""`quire batch` as people run it: real processes against a scripted server, and against the daemon."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.integration.daemon import ROOT, Daemon, wait_for
from tests.integration.scripted_server import Reply, scripted_server
from tests.integration.terminal import Terminal

TIMEOUT_S = 120


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "server", "batch", *map(str, arguments)]


def batch(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    """Run `quire batch` to its end."""
    return subprocess.run(command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, **options)


def write_input(path: Path, count: int, **body) -> Path:
    lines = [request(f"r{i}", prompt=f"{i}", **body) for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def request(custom_id: str, *, url: str = "/v1/completions", **body) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def echo(path: str, body: dict | None) -> Reply:
    if body is None:
        return Reply(404)
    return Reply(body={"echo": body["prompt"]}, headers=(("x-request-id", f"id-{body['prompt']}"),))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def test_answers_come_in_the_order_of_the_lines_with_bounded_concurrency(files):
    source, output = files
    write_input(source, 40)

    def uneven(path, body):
        if body is not None:
            time.sleep(0.1 if int(body["prompt"]) % 8 == 0 else 0.01)
        return echo(path, body)

    with scripted_server(uneven) as server:
        result = batch(source, "-o", output, "--url", server.url, "--concurrency", "5", "--api-key", "sesame")
    assert (result.returncode, result.stdout) == (0, "")
    assert "40 answered, 0 failed" in result.stderr
    found = records(output)
    assert [record["custom_id"] for record in found] == [f"r{i}" for i in range(40)]
    assert [record["response"]["body"]["echo"] for record in found] == [str(i) for i in range(40)]
    assert found[3]["response"] == {"status_code": 200, "request_id": "id-3", "body": {"echo": "3"}}
    assert all(record["error"] is None and record["id"].startswith("batch_req_") for record in found)
    assert 2 <= server.most_open <= 5
    assert server.keys == {"Bearer sesame"}


def test_faults_of_lines_are_told_in_place_and_the_others_go_on(files):
    source, output = files
    lines = [
        request("a", prompt="1"),
        request("a", prompt="2"),
        request("b", url="/v1/nothing"),
        request("c", prompt="bad"),
    ]
    source.write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + "{torn\n\n" + json.dumps(request("d", prompt="4"))
    )

    def script(path, body):
        if body is not None and body["prompt"] == "bad":
            return Reply(400, {"error": {"message": "prompt is bad", "param": "prompt", "code": "invalid_parameter"}})
        return echo(path, body)

    with scripted_server(script) as server:
        result = batch(source, "-o", output, "--url", server.url)
    assert result.returncode == 1
    assert "2 answered, 4 failed" in result.stderr
    one, twice, unknown, refused, torn, last = records(output)
    assert one["response"]["status_code"] == last["response"]["status_code"] == 200
    assert twice["response"] is unknown["response"] is torn["response"] is None
    assert (twice["custom_id"], twice["error"]["code"], twice["error"]["line"]) == ("a", "duplicate_custom_id", 2)
    assert twice["error"]["message"] == 'Line 2: custom_id "a" is that of line 1 as well.'
    assert (unknown["error"]["code"], unknown["error"]["param"]) == ("invalid_url", "url")
    assert (torn["custom_id"], torn["error"]["code"], torn["error"]["line"]) == (None, "invalid_json_line", 5)
    assert (refused["response"]["status_code"], refused["error"]) == (400, None)
    assert refused["response"]["body"]["error"]["param"] == "prompt"


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


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_when_it_says(files, status):
    source, output = files
    write_input(source, 3)
    tries: dict[str, list[float]] = {}

    def script(path, body):
        if body is None:
            return Reply(404)
        seen = tries.setdefault(body["prompt"], [])
        seen.append(time.monotonic())
        if body["prompt"] == "1" and len(seen) == 1:
            return Reply(status, {"error": {"message": "full"}}, (("retry-after", "1"),))
        return echo(path, body)

    with scripted_server(script) as server:
        result = batch(source, "-o", output, "--url", server.url)
    assert result.returncode == 0
    assert [record["response"]["status_code"] for record in records(output)] == [200, 200, 200]
    first, second = tries["1"]
    assert second - first >= 0.9


def test_retries_end_with_the_servers_own_words(files):
    source, output = files
    write_input(source, 1)
    full = Reply(429, {"error": {"message": "full"}}, (("retry-after", "0"),))
    with scripted_server(lambda path, body: Reply(404) if body is None else full) as server:
        assert batch(source, "-o", output, "--url", server.url, "--retries", "2").returncode == 1
        assert len(server.asked) == 3
    assert records(output)[0]["response"]["body"] == {"error": {"message": "full"}}


def test_what_is_no_json_and_a_lost_connection_are_faults_of_the_line(files):
    source, output = files
    write_input(source, 3)
    replies = {"0": Reply(200, b"<html>"), "1": Reply(0), "2": Reply(200, b'{"text": "\xe2\x80\xa8 \\n"}')}
    with scripted_server(lambda path, body: replies[body["prompt"]] if body else Reply(404)) as server:
        assert batch(source, "-o", output, "--url", server.url, "--retries", "1").returncode == 1
    html, lost, fine = (json.loads(line) for line in output.read_bytes().splitlines())
    assert (html["error"]["code"], lost["error"]["code"]) == ("invalid_response", "connection_lost")
    assert fine["response"]["body"]["text"] == "\u2028 \n"


def test_a_slow_answer_is_given_up_and_the_rest_goes_on(files):
    source, output = files
    write_input(source, 2)
    over = threading.Event()

    def script(path, body):
        if body is not None and body["prompt"] == "0":
            over.wait(20)
        return echo(path, body)

    with scripted_server(script) as server:
        assert batch(source, "-o", output, "--url", server.url, "--timeout", "0.5").returncode == 1
        over.set()
    slow, fine = records(output)
    assert (slow["error"]["code"], fine["error"]) == ("timeout", None)


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
        _, stderr = process.communicate(timeout=30)
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
        process.communicate(timeout=30)
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


def test_a_wrong_key_stops_at_once(files):
    source, output = files
    write_input(source, 8)
    with scripted_server(lambda path, body: Reply(401, {"error": {"message": "no such key"}})) as server:
        result = batch(source, "-o", output, "--url", server.url, "--api-key", "wrong")
        assert result.returncode == 2
        assert "refuses this API key" in result.stderr
        assert server.asked == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{in}",), "-o/--output"),
        (("missing.jsonl", "-o", "{out}"), "missing.jsonl cannot be read: No such file"),
        (("/dev/null", "-o", "{out}"), "must be a file"),
        (("{in}", "-o", "/dev/null"), "must be a file"),
        (("{in}", "-o", "{in}"), "is the input"),
        (("{in}", "-o", "/nowhere/out.jsonl"), "cannot be written: No such file"),
        (("{in}", "-o", "{out}", "--url", "x", "--model", "y"), "exclude each other"),
        (("{in}", "-o", "{out}", "--url", "ftp://x"), "is not a URL"),
        (("{in}", "-o", "{out}", "--concurrency", "0"), "from 1 to 1,024"),
    ],
)
def test_wrong_usage_is_one_sentence(files, arguments, words):
    source, output = files
    write_input(source, 1)
    result = batch(*(argument.format(**{"in": source, "out": output}) for argument in arguments))
    assert result.returncode == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_daemon_answers_chats_and_completions(files, daemon: Daemon):
    source, output = files
    chat = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 8}
    lines = [request("c", url="/v1/chat/completions", **chat), request("p", prompt="One, two,", max_tokens=4)]
    lines.append(request("e", prompt="x", max_tokens=-1))
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert batch(source, "-o", output, "--url", f"{daemon.base_url}/v1").returncode == 1
    answered, completed, refused = records(output)
    assert answered["response"]["body"]["choices"][0]["message"]["content"]
    assert completed["response"]["body"]["usage"]["completion_tokens"] <= 4
    assert refused["response"]["body"]["error"]["param"] == "max_tokens"


def test_a_server_of_its_own_answers_to_the_files_names_and_is_stopped(files, tmp_path: Path):
    source, output = files
    write_input(source, 2, model="gpt-4o-mini", max_tokens=3)
    model = ROOT / "models" / "demo" / "checkpoint"
    env = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    result = batch(source, "-o", output, "--model", model, env=env)
    assert result.returncode == 0, result.stderr
    assert f"Started {model} on http://127.0.0.1:" in result.stderr
    assert [record["response"]["body"]["model"] for record in records(output)] == ["gpt-4o-mini"] * 2
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("quire-")] == []


def test_a_model_that_is_none_is_said_in_a_sentence(files, tmp_path: Path):
    source, output = files
    write_input(source, 1)
    result = batch(source, "-o", output, "--model", tmp_path)
    assert result.returncode == 3
    assert result.stderr.startswith("quire: error: No server could be started: ")
    assert len(result.stderr.splitlines()) == 1


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


def test_a_bar_on_a_terminal(files):
    source, output = files
    write_input(source, 3)
    with (
        scripted_server(echo) as server,
        Terminal("batch", str(source), "-o", str(output), "--url", server.url) as terminal,
    ):
        terminal.expect("Batch")
        terminal.expect("3 answered, 0 failed")
        assert terminal.wait() == 0
        assert b"\x1b[?25h" in terminal.raw  # the cursor is back


def test_a_server_of_its_own_that_dies_is_said(files, tmp_path: Path):
    source, output = files
    write_input(source, 400, max_tokens=200)
    env = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        command(source, "-o", output, "--model", ROOT / "models" / "demo" / "checkpoint", "--retries", "1"),
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
