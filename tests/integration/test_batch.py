"""`quire batch` as people run it: real processes against a scripted server, and against the daemon."""

import json
import threading
import time
from pathlib import Path

import pytest

from tests.support.batch_runs import batch, echo, records, request, write_input
from tests.support.daemon import ROOT, Daemon
from tests.support.scripted_server import Reply, scripted_server
from tests.support.terminal import Terminal


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
            over.wait(60)
        return echo(path, body)

    with scripted_server(script) as server:
        assert batch(source, "-o", output, "--url", server.url, "--timeout", "0.5").returncode == 1
        over.set()
    slow, fine = records(output)
    assert (slow["error"]["code"], fine["error"]) == ("timeout", None)


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
