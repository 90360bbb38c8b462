"""`quire top` as people run it: one look, and live in a real terminal."""

import json
import signal
import subprocess
import sys

import openai
import pytest

from tests.support.daemon import ROOT, Daemon
from tests.support.scripted_server import Reply, scripted_server
from tests.support.terminal import CTRL_C, Terminal

PAGE = b"""
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="other"} 3.0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{model_name="other"} 5.0
"""
ROW = {
    "id": "chatcmpl-1", "index": 0, "state": "running", "num_blocks": 7, "num_shared_blocks": 2, "bytes": 1,
    "num_tokens": 100, "num_computed_tokens": 99, "num_prompt_tokens": 90, "num_hit_tokens": 32, "age_s": 1.5,
    "num_preemptions": 0, "runs": [1, 7],
}  # fmt: skip


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server", "top", "--interval", "0.2", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_one_look_in_text_and_in_json(daemon: Daemon, client: openai.OpenAI):
    ask = {"model": "quire-demo", "prompt": "One, two,", "max_tokens": 5, "extra_body": {"ignore_eos": True}}
    client.completions.create(**ask)
    result = top("--once", "--url", daemon.base_url)
    assert result.returncode == 0, result.stderr
    assert "quire-demo" in result.stdout
    assert "blocks of 16 tokens" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "\x1b" not in result.stdout
    frame = json.loads(top("--json", "--url", f"{daemon.base_url}/v1").stdout)
    metrics = daemon.metrics()
    assert frame["total"]["generated_tokens"] == metrics["quire_generation_tokens_total"]
    assert frame["total"]["ttft_s"]["count"] == metrics["quire_time_to_first_token_seconds_count"]
    assert 0 < frame["total"]["itl_s"]["p50"] <= frame["total"]["itl_s"]["p99"]
    assert frame["kv_blocks_total"] == metrics["quire_kv_cache_blocks_total"]


def test_live_view_moves_and_q_quits(daemon: Daemon, client: openai.OpenAI):
    with Terminal("top", "--interval", "0.2", "--url", daemon.base_url) as terminal:
        terminal.expect(r"Requests +0 running")
        terminal.expect("q quits")
        before = daemon.metrics()["quire_generation_tokens_total"]
        client.completions.create(model="quire-demo", prompt="One", max_tokens=50, extra_body={"ignore_eos": True})
        assert daemon.metrics()["quire_generation_tokens_total"] == before + 50
        terminal.expect(r"Tokens +[1-9][\d,.]*/s generated")
        terminal.send("x")
        terminal.send("q")
        assert terminal.wait() == 0
    assert terminal.raw.rstrip().endswith(b"\x1b[?25h") or b"\x1b[?1049l" in terminal.raw


def test_ctrl_c_quits_as_well_and_a_server_that_goes_away_is_said():
    with scripted_server(lambda path, _: Reply(body=PAGE) if path == "/metrics" else Reply(404)) as server:
        terminal = Terminal("top", "--interval", "0.1", "--url", server.url)
        terminal.expect("3 running")
    with terminal:
        terminal.expect("No server answers at .* Trying again")
        terminal.send(CTRL_C)
        assert terminal.wait() == 0
        assert "Traceback" not in terminal.text


def test_a_killed_view_gives_the_terminal_back():
    with (
        scripted_server(lambda path, _: Reply(body=PAGE) if path == "/metrics" else Reply(404)) as server,
        Terminal("top", "--interval", "0.1", "--url", server.url) as terminal,
    ):
        terminal.expect("3 running")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.wait() == 128 + signal.SIGTERM
        assert b"\x1b[?1049l" in terminal.raw


def test_requests_are_listed_where_the_server_tells_of_them():
    snapshot = {"model": "m", "pool": {}, "requests": [ROW, ROW | {"id": "cmpl-2", "index": 3}], "num_unlisted": 1}
    pages = {"/metrics": Reply(body=PAGE), "/kv/snapshot": Reply(body=snapshot)}
    with scripted_server(lambda path, _: pages.get(path, Reply(404))) as server:
        text = top("--once", "--url", server.url).stdout
        frame = json.loads(top("--json", "--url", server.url).stdout)
    assert "chatcmpl-1            running         7      2           99/100       32  1.50 s" in text
    assert "cmpl-2#3" in text
    assert "… 1 more" in text
    assert frame["requests"][0]["num_hit_tokens"] == 32
    assert frame["model"] == "other"


@pytest.mark.parametrize(
    ("reply", "code", "words"),
    [
        (Reply(401, {"error": {"message": "no"}}), 2, "needs an API key"),
        (Reply(404, {"detail": "Not Found"}), 3, "shows no metrics"),
        (Reply(200, b"<html>"), 3, "cannot be read"),
    ],
)
def test_what_is_no_server_to_watch_is_said_in_a_sentence(reply, code, words):
    with scripted_server(lambda *_: reply) as server:
        result = top("--once", "--url", server.url)
    assert (result.returncode, words in result.stderr, len(result.stderr.splitlines())) == (code, True, 1)


def test_no_server_at_all():
    result = top("--url", "127.0.0.1:1")
    assert (result.returncode, result.stderr) == (3, "quire: error: No server answers at http://127.0.0.1:1.\n")
